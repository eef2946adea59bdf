"""The tables of the report as data, and their CSV and Markdown forms."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kinfed.report.comparison import Comparison, Method
from kinfed.report.statistics import Average, average, clear_winner
from kinfed.runs.reader import KINDS, Kind

MINUS = "\u2212"
NARROW_SPACE = "\u202f"

METRIC_NAMES = {
    "accuracy": "Accuracy",
    "accuracy_mean": "Client mean",
    "accuracy_std": "Client spread",
    "worst10": "Worst 10 %",
    "top10": "Largest 10 %",
    "loss": "Loss",
}
KIND_NAMES: dict[Kind, str] = {"personal": "Personal models", "server": "Server model"}

DEFINITIONS = {
    "accuracy": "Share of all test examples that are classified correctly: every client counts in proportion to its "
    "number of test examples.",
    "accuracy_mean": "Plain average of the clients' accuracies: every client counts the same, however small it is.",
    "accuracy_std": "Standard deviation of the accuracy over clients: how unequally the clients are served.",
    "worst10": "Average accuracy of the tenth of the clients (rounded up) with the lowest accuracies. Clients with "
    "only one or two test examples can dominate it.",
    "top10": "Accuracy over the tenth of the clients (rounded up) with the most training examples, weighted by test "
    "examples.",
    "loss": "Average loss on the test examples; lower is better.",
}


@dataclass(frozen=True)
class Column:
    key: str
    group: str
    heading: str
    definition: str
    values: Callable[[Method], dict[int, float]]  # by seed
    scale: float = 1.0  # from the stored to the shown unit
    digits: int = 1
    lower_is_better: bool = False
    judged: bool = True  # whether a best may be marked


@dataclass(frozen=True)
class Cell:
    average: Average | None
    best: bool = False


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    methods: tuple[Method, ...]
    cells: tuple[tuple[Cell, ...], ...]  # a row per method


def metric_column(kind: Kind, metric: str) -> Column:
    loss = metric == "loss"
    return Column(
        key=f"{kind}_{metric}",
        group=KIND_NAMES[kind],
        heading=METRIC_NAMES[metric],
        definition=DEFINITIONS[metric],
        values=lambda method: method.final(kind, metric),
        scale=1.0 if loss else 100.0,
        digits=3 if loss else 1,
        lower_is_better=loss or metric == "accuracy_std",
    )


COST_COLUMNS = (
    Column(
        key="mb_per_round",
        group="Cost",
        heading="MB a round",
        definition="Megabytes (10⁶ bytes) sent in an average round, to and from all clients together.",
        values=lambda method: {t.seed: t.final.bytes / max(t.final.rounds, 1) for t in method.counted},
        scale=1e-6,
        digits=2,
        judged=False,
    ),
    Column(
        key="mb_total",
        group="Cost",
        heading="MB in all",
        definition="Megabytes (10⁶ bytes) sent up to the final round, to and from all clients together.",
        values=lambda method: {t.seed: t.final.bytes for t in method.counted},
        scale=1e-6,
        digits=1,
        judged=False,
    ),
    Column(
        key="seconds",
        group="Cost",
        heading="Seconds",
        definition="Seconds of the whole run of the method on the machine that ran it.",
        values=lambda method: {t.seed: t.final.seconds for t in method.counted},
        digits=1,
        judged=False,
    ),
)

MAIN_COLUMNS = (
    *(metric_column("personal", m) for m in ("accuracy", "accuracy_mean", "worst10", "top10", "loss")),
    metric_column("server", "accuracy"),
    *COST_COLUMNS,
)
GLOBAL_COLUMNS = tuple(
    metric_column("server", metric) for metric in ("accuracy", "accuracy_mean", "worst10", "top10", "loss")
)
ALL_COLUMNS = (*(metric_column(kind, metric) for kind in KINDS for metric in METRIC_NAMES), *COST_COLUMNS)


def results(comparison: Comparison, columns: Sequence[Column] = MAIN_COLUMNS) -> Table:
    methods = comparison.methods
    winners: list[int | None] = []
    for column in columns:
        values = {method.index: column.values(method) for method in methods}
        judged = column.judged and comparison.same_final_round
        winners.append(clear_winner(values, column.lower_is_better) if judged else None)
    cells = tuple(
        tuple(
            Cell(average(column.values(method)), best=winner == method.index)
            for column, winner in zip(columns, winners, strict=True)
        )
        for method in methods
    )
    return Table(tuple(columns), methods, cells)


def shown(value: float, digits: int) -> str:
    """A number as people write it: a true minus, thousands apart, and never zero for what is only small."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    tiny = abs(value) < 0.5 * 10**-digits
    text = f"{value:.1g}" if tiny else f"{value:,.{0 if abs(value) >= 1000 else digits}f}"
    return text.replace(",", NARROW_SPACE).replace("-", MINUS)


def points(value: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return ("+" if value > 0 else "") + shown(100 * value, 1)


def cell_text(column: Column, cell: Cell) -> tuple[str, str]:
    """Mean and spread as shown, a dash and nothing where there is none."""
    if cell.average is None:
        return "–", ""
    mean = shown(cell.average.mean * column.scale, column.digits)
    return mean, "" if cell.average.sd is None else f"{cell.average.sd * column.scale:.{column.digits}f}"


def markdown(table: Table) -> str:
    headings = ["Method", *(_full_heading(column) for column in table.columns)]
    lines = [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" + "---:|" * len(table.columns),
    ]
    for method, cells in zip(table.methods, table.cells, strict=True):
        row = [_markdown_text(method.label)]
        for column, cell in zip(table.columns, cells, strict=True):
            mean, spread = cell_text(column, cell)
            text = f"{mean} ± {spread}" if spread and column.judged else mean
            row.append(f"**{text}**" if cell.best else text)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _full_heading(column: Column) -> str:
    return f"{column.group}: {column.heading}" + (" (%)" if column.scale == 100 else "")


def _markdown_text(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


_LATEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "–": "--", "−": "$-$", "±": r"$\pm$", "\u202f": r"\,"}
)  # fmt: skip


def latex_tabular(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A tabular for the package booktabs; the first row is the head."""
    head, *body = (" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in rows)
    begin = [f"% {' '.join(title.split())}", rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}", r"\toprule"]
    return "\n".join([*begin, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def latex(table: Table) -> str:
    rows = [["Method", *(_full_heading(column) for column in table.columns)]]
    for method, cells in zip(table.methods, table.cells, strict=True):
        texts = [cell_text(column, cell) for column, cell in zip(table.columns, cells, strict=True)]
        rows.append([method.label, *(f"{mean} ± {spread}" if spread else mean for mean, spread in texts)])
    return latex_tabular("Results by method", rows)


def results_csv(comparison: Comparison) -> str:
    """One line per method: mean, standard deviation and number of seeds of every figure, in the stored units."""
    table = results(comparison, ALL_COLUMNS)
    unscaled = {"mb_per_round": 1e-6, "mb_total": 1e-6}
    header = ["run", "algorithm", "rounds", "seeds"]
    for column in table.columns:
        header += [column.key, f"{column.key}_sd"]
    rows: list[list[object]] = []
    for method, cells in zip(table.methods, table.cells, strict=True):
        row: list[object] = [method.run.label, method.algorithm, method.final_round, len(method.counted)]
        for column, cell in zip(table.columns, cells, strict=True):
            scale = unscaled.get(column.key, 1.0)
            entry = cell.average
            row += ["", ""] if entry is None else [_number(entry.mean * scale), _number(entry.sd, scale)]
        rows.append(row)
    return _csv(header, rows)


def seeds_csv(comparison: Comparison) -> str:
    """One line per method and seed."""
    header = ["run", "algorithm", "seed", "round", "finished", *(column.key for column in ALL_COLUMNS)]
    rows = []
    for method in comparison.methods:
        for trial in method.trials:
            figures: list[float | None] = [
                trial.final.metrics.get(kind, {}).get(metric) for kind in KINDS for metric in METRIC_NAMES
            ]
            megabytes = trial.final.bytes / 1e6
            figures += [megabytes / max(trial.final.rounds, 1), megabytes, trial.final.seconds]
            done = "yes" if trial.finished else "no"
            start = [method.run.label, method.algorithm, trial.seed, trial.final.round, done]
            rows.append([*start, *(_number(value) for value in figures)])
    return _csv(header, rows)


def rounds_csv(comparison: Comparison) -> str:
    """One line per method, seed and round."""
    metrics = [(kind, metric) for kind in KINDS for metric in METRIC_NAMES]
    header = ["run", "algorithm", "seed", "round", "seconds", "active", "dropped", "bytes_down", "bytes_up"]
    rows = [
        [
            *(method.run.label, method.algorithm, trial.seed, entry.number, _number(entry.seconds)),
            *(entry.active, entry.dropped, _number(entry.bytes_down), _number(entry.bytes_up)),
            *(_number(entry.metrics.get(kind, {}).get(metric)) for kind, metric in metrics),
        ]
        for method in comparison.methods
        for trial in method.trials
        for entry in trial.rounds
    ]
    return _csv([*header, *(f"{kind}_{metric}" for kind, metric in metrics)], rows)


def clients_csv(comparison: Comparison) -> str:
    """One line per method, seed and client, after the final round."""
    every = [
        (method, trial, client) for method in comparison.methods for trial in method.trials for client in trial.clients
    ]
    names = list(dict.fromkeys(name for _, _, client in every for name in client.values))
    rows = []
    for method, trial, client in every:
        start = [method.run.label, method.algorithm, trial.seed, client.client, client.n_train, client.n_test]
        rows.append([*start, *(_number(client.values.get(key)) for key in names)])
    return _csv(["run", "algorithm", "seed", "client", "n_train", "n_test", *names], rows)


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.10g}"


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
