"""The tables about methods: results, leads and gains of clients on a page, and for the terminal the gain that a run
measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kinfed.analysis import (
    Comparison,
    Difference,
    Gain,
    Method,
    MetricStyle,
    average,
    clear_winner,
    client_gains,
    gains,
    metric_style,
    single_run,
    summarize_gains,
)
from kinfed.engine import METRICS
from kinfed.errors import ConfigError, StorageError
from kinfed.records import KINDS, Baseline, Kind, TrialRecord, finite, load_runs
from kinfed.report.charts.figures import KIND_NAMES
from kinfed.report.drawing.looks import format_number, natural_order, shown, signed, style_of
from kinfed.report.sentences import best_federated
from kinfed.report.tables import TableCell, TableColumn, TextTable

if TYPE_CHECKING:
    from rich.table import Table

# Heading and definition.
CLIENT_FIGURES = {
    "accuracy": ("Accuracy", "Share of all test examples that are classified correctly: every client counts in "
                 "proportion to its number of test examples."),
    "accuracy_mean": ("Client mean", "Plain average of the clients' accuracies: every client counts the same, however "
                      "small it is."),
    "accuracy_std": ("Client spread", "Standard deviation of the accuracy over clients: how unequally the clients are "
                     "served."),
    "worst10": ("Worst 10 %", "Average accuracy of the tenth of the clients (rounded up) with the lowest accuracies. "
                "Clients with only one or two test examples can dominate it."),
    "top10": ("Largest 10 %", "Accuracy over the tenth of the clients (rounded up) with the most training examples, "
              "weighted by test examples."),
    "loss": ("Loss", "Average loss on the test examples; lower is better."),
}  # fmt: skip
LOSS = MetricStyle("loss", "loss", 1.0, "", 3, lower_is_better=True)  # looking a loss up asks scikit-learn for it
MB = "Megabytes (10⁶ bytes) sent"

METHOD = TableColumn("Method", "name")


@dataclass(frozen=True)
class MethodColumn:
    key: str
    column: TableColumn
    values: Callable[[Method], dict[int, float]]  # by seed
    scale: float = 1.0  # from the stored to the shown unit
    digits: int = 1
    lower_is_better: bool = False
    judged: bool = True  # whether a best may be marked and the spread is of interest

    def cell(self, values: dict[int, float], best: bool = False) -> TableCell:
        """The mean of values by seed, with its spread."""
        entry = average(values)
        if entry is None:
            return TableCell("–", best=best)
        return TableCell(
            format_number(entry.mean * self.scale, self.digits),
            spread="" if entry.sd is None or not self.judged else f"{entry.sd * self.scale:.{self.digits}f}",
            best=best,
            sort_value=float(f"{entry.mean:.9g}") if finite(entry.mean) else None,
        )


def _metric_column(kind: Kind, metric: str) -> MethodColumn:
    style = LOSS if metric == "loss" else metric_style("accuracy")
    return _figure_column(kind, metric, *CLIENT_FIGURES[metric], style, metric in ("loss", "accuracy_std"))


def _figure_column(
    kind: Kind, figure: str, heading: str, definition: str, style: MetricStyle, lower_is_better: bool
) -> MethodColumn:
    column = TableColumn(heading, "figure", KIND_NAMES[kind], style.unit.strip(), definition, sortable=True)
    values = partial(Method.final, kind=kind, metric=figure)
    return MethodColumn(f"{kind}_{figure}", column, values, style.scale, style.digits, lower_is_better)


def _cost_column(
    key: str, heading: str, definition: str, of_trial: Callable[[TrialRecord], float], scale: float, digits: int
) -> MethodColumn:
    def values(method: Method) -> dict[int, float]:
        return {trial.seed: of_trial(trial) for trial in method.complete_trials}

    column = TableColumn(heading, "figure", "Cost", definition=definition, sortable=True)
    return MethodColumn(key, column, values, scale, digits, judged=False)


COST_COLUMNS = (
    _cost_column("mb_per_round", "MB a round", f"{MB} in an average round, to and from all clients together.",
                 lambda trial: trial.final.bytes / max(trial.final.rounds, 1), 1e-6, 2),
    _cost_column("mb_total", "MB in all", f"{MB} up to the final round, to and from all clients together.",
                 lambda trial: trial.final.bytes, 1e-6, 1),
    _cost_column("seconds", "Seconds", "Seconds of the whole run of the method on the machine that ran it.",
                 lambda trial: trial.final.seconds, 1.0, 1),
)  # fmt: skip

_TABLE_METRICS = ("accuracy", "accuracy_mean", "worst10", "top10", "loss")
SERVER_COLUMNS = tuple(_metric_column("server", metric) for metric in _TABLE_METRICS)
MAIN_COLUMNS = (*(_metric_column("personal", metric) for metric in _TABLE_METRICS), SERVER_COLUMNS[0], *COST_COLUMNS)
ALL_COLUMNS = (*(_metric_column(kind, metric) for kind in KINDS for metric in CLIENT_FIGURES), *COST_COLUMNS)


def main_columns(comparison: Comparison) -> tuple[MethodColumn, ...]:
    """Columns of the results table: the headline metric first, where it is not accuracy."""
    name = comparison.metric
    if name in ("accuracy", "loss"):
        return MAIN_COLUMNS
    names = (name, f"{name}_mean", f"{name}_worst10")
    others = [o for o in ("accuracy", "loss") if any(m.final("personal", o) for m in comparison.methods)]
    personal = (*(_chosen_column("personal", one) for one in names), *(_metric_column("personal", o) for o in others))
    return (*personal, _chosen_column("server", name), *COST_COLUMNS)


def _chosen_column(kind: Kind, figure: str) -> MethodColumn:
    """The column of a metric, or of its mean or worst tenth over clients."""
    name = figure.removesuffix("_worst10").removesuffix("_mean")
    style = metric_style(name)
    heading, definition = {
        "": (style.title, METRICS.named(name).definition),
        "_mean": ("Client mean", f"Plain average of the clients' {style.title}: every client counts the same."),
        "_worst10": (
            "Worst 10 %",
            f"Mean {style.title} of the tenth of the clients (rounded up) that are served worst.",
        ),
    }[figure.removeprefix(name)]
    return _figure_column(kind, figure, heading, definition, style, style.lower_is_better)


def results_table(comparison: Comparison, columns: Sequence[MethodColumn] | None = None) -> TextTable:
    """One row per method: mean and standard deviation over seeds."""
    columns = main_columns(comparison) if columns is None else columns
    rows = [[method_cell(method)] for method in comparison.methods]
    for column in columns:
        values = {method.index: column.values(method) for method in comparison.methods}
        judged = column.judged and comparison.same_final_round
        winner = clear_winner(values, column.lower_is_better) if judged else None
        for row, (index, by_seed) in zip(rows, values.items(), strict=True):
            row.append(column.cell(by_seed, winner == index))
    if comparison.baselines:
        rows.append(_baseline_row(comparison, columns))
    return TextTable.of("Results by method", [METHOD, *(column.column for column in columns)], rows)


def every_metric_table(comparison: Comparison) -> TextTable | None:
    """Personal models by all metrics of the problem, and what clients reach without a model; None if one is all."""
    names = [name for name in METRICS if any(method.final("personal", name) for method in comparison.methods)]
    return results_table(comparison, [_chosen_column("personal", name) for name in names]) if len(names) > 1 else None


def _baseline_row(comparison: Comparison, columns: Sequence[MethodColumn]) -> list[TableCell]:
    """The row of what clients reach without a model, never marked best; it has no server and no costs."""
    cells = [TableCell(f"without a model: {next(iter(comparison.baselines.values())).name}", tone="baseline")]
    for column in columns:
        name = column.key.removeprefix("personal_")
        known = {seed: b.personal[name] for seed, b in comparison.baselines.items() if name in b.personal}
        cells.append(replace(column.cell(known if name != column.key else {}), tone="baseline"))
    return cells


def participation_table(comparison: Comparison) -> TextTable:
    """One row per method: who took part, and the headline figure of these clients beside that of all."""
    metric, style = comparison.metric, comparison.style
    rows: list[list[TableCell | str]] = []
    for method in comparison.methods:
        counts = dict.fromkeys(f"{took_part} of {clients}" for took_part, clients in method.participation.values())
        means = [average(of(kind, metric)) for kind in comparison.kinds for of in (method.final, method.final_of_all)]
        figures = ["–" if mean is None else shown(mean.mean, style) for mean in means]
        rows.append([method_cell(method), ", ".join(counts) or "–", *figures])
    heads = [(heading, KIND_NAMES[kind]) for kind in comparison.kinds for heading in ("took part", "all clients")]
    groups = [TableColumn(heading, "figure", name, style.unit.strip()) for heading, name in heads]
    return TextTable.of("Clients that took part, and all", [METHOD, TableColumn("Clients", "text"), *groups], rows)


def method_cell(method: Method) -> TableCell:
    return TableCell(method.label, style=style_of(method))


def leads_table(title: str, leads: Sequence[tuple[Method, Difference | None]], style: MetricStyle) -> TextTable:
    rows: list[list[TableCell | str]] = []
    for method, lead in leads:
        if lead is None:
            rows.append([method_cell(method), *4 * ["–"], "cannot say: too few seeds"])
            continue
        ends = f"{signed(lead.likely.low, style)} to {signed(lead.likely.high, style)}"
        ahead = "not paired" if lead.ahead is None else f"{lead.ahead} of {lead.n}"
        verdict = "yes" if lead.clear else "no, the interval reaches down to zero"
        spread = f"{style.scale * lead.spread:.{style.digits}f}"
        rows.append([method_cell(method), signed(lead.mean, style), ends, spread, ahead, verdict])
    names = (f"Lead, {'points' if style.in_percent else style.title}", "95 % interval", "Spread", "Seeds ahead")
    return TextTable.of(title, [TableColumn("Over", "name"), *names, TableColumn("Clear?", "text")], rows)


def balance_table(by_method: Sequence[tuple[Method, list[Gain]]], style: MetricStyle) -> TextTable:
    """Clients helped, unchanged and hurt, as numbers and as a bar of their shares; every client once."""
    rows = []
    for method, values in by_method:
        s = summarize_gains(client_gains(values))
        shares = (("helped", s.helped), ("unchanged", s.unchanged), ("hurt", s.hurt))
        bar = TableCell("", style=style_of(method), shares=shares)
        counts = [TableCell(str(count), sort_value=count) for _, count in shares]
        figures = [TableCell(_signed(gain, style), sort_value=gain) for gain in (s.mean, s.median, s.lowest)]
        rows.append([method_cell(method), bar, *counts, *figures])
    names = ("Helped", "Unchanged", "Hurt", "Mean gain", "Median gain", "Largest loss")
    columns = [METHOD, TableColumn("Balance", "text"), *(TableColumn(name, sortable=True) for name in names)]
    return TextTable.of("Clients helped and hurt by each method", columns, rows)


def _signed(gain: float, style: MetricStyle) -> str:
    """Signed, or 0 for what is left of equal figures after means over seeds were subtracted."""
    return "0" if abs(gain) < 1e-12 else signed(gain, style)


MOST_NAMED_CLIENTS = 5_000  # in the page's table; clients.csv has all


def sites_table(
    method: Method, values: list[Gain], style: MetricStyle, baselines: Mapping[int, Baseline],
    most: int = MOST_NAMED_CLIENTS,
) -> TextTable | None:  # fmt: skip
    """Every client by name: what it has without a model, alone, and by the method, and the gain with its interval."""
    by_client = client_gains(values)
    if len(by_client) > most:
        return None
    style = style.for_values(g.alone for g in by_client)
    place = {name: float(index) for index, name in enumerate(sorted((g.client for g in by_client), key=natural_order))}
    likely = {g.client: one for g in by_client if (one := g.likely) is not None}
    reach = max((max(abs(known.low), abs(known.high)) for known in likely.values()), default=0.0)
    rows: list[list[TableCell | str]] = []
    for g in by_client:
        interval, verdict = TableCell("–"), "too many or too few test examples to say"
        if known := likely.get(g.client):
            low, high = known.low, known.high
            text = f"{_signed(low, style)} to {_signed(high, style)}"
            interval = TableCell(text, sort_value=low, interval=(low, g.gain, high), reach=reach)
            verdict = "better together" if low > 0 else "better alone" if high < 0 else "may be chance"
            verdict = "equal" if low == high == 0 else verdict
        cells = [TableCell(g.client, sort_value=place[g.client])]
        cells += [TableCell(f"{n:,}", sort_value=n) for n in (g.n_train, g.n_test)]
        cells += [_baseline_cell(g.client, style, baselines)] if baselines else []
        cells += [TableCell(shown(value, style), sort_value=value) for value in (g.alone, g.own)]
        rows.append([*cells, TableCell(_signed(g.gain, style), sort_value=g.gain), interval, verdict])
    figures = [*(["No model"] if baselines else []), "Alone", method.label]
    columns = [
        TableColumn("Client", "name", sortable=True),
        *(TableColumn(name, sortable=True) for name in ("Training rows", "Test rows")),
        *(TableColumn(name, unit=style.unit.strip(), sortable=True) for name in figures),
        *(TableColumn("Gain", sortable=True), TableColumn("95 % interval", "text", sortable=True)),
        TableColumn("Verdict", "text"),
    ]
    return TextTable.of(f"Every client: {style.title} alone and with {method.label}", columns, rows)


def _baseline_cell(client: str, style: MetricStyle, baselines: Mapping[int, Baseline]) -> TableCell:
    entry = average({seed: value for seed, b in baselines.items() if (value := b.clients.get(client)) is not None})
    return TableCell("–") if entry is None else TableCell(shown(entry.mean, style), sort_value=entry.mean)


METRIC_KEYS = [(kind, metric) for kind in KINDS for metric in CLIENT_FIGURES]


def measured_gain(folder: Path, algorithm: str | None = None, limit: int = 40) -> tuple[Table, str]:
    """A table of the clients, largest gain first, and the balance in a sentence. The method is the best federated one
    of the run unless it is named; Local of the same run is what it is compared with."""
    from rich.box import SIMPLE  # a page has its tables without a terminal's
    from rich.table import Table
    from rich.text import Text

    run = load_runs([folder])[0]
    if run.changed_files:
        raise StorageError(f"{', '.join(run.changed_files)} in {folder} changed after the run had ended; restore them")
    comparison = single_run(run)
    method = _method(comparison, algorithm)
    values = gains(comparison, method)
    if not values:
        raise ConfigError(
            f"{folder} has no finished run of local with the same clients as {method.algorithm}; gains are measured "
            "against training alone, so add local to the algorithms"
        )
    s, style = summarize_gains(client_gains(values)), comparison.style
    table = sites_table(method, values, style, comparison.baselines, most=len(values))
    assert table is not None  # all clients are wanted
    view = Table(box=SIMPLE, title=table.title, title_justify="left", title_style="dim", padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        view.add_column(column.heading, justify="left" if number == 0 or column.kind == "text" else "right")
    for row in table.rows[:limit]:
        view.add_row(*(Text(cell.text) for cell in row))
    return view, (
        f"{method.label} helps {s.helped} of {s.n} clients, leaves {s.unchanged} as they were and hurts {s.hurt}; the "
        f"mean gain in {style.noun} is {signed(s.mean, style)}{' points' if style.in_percent else ''}"
    )


def _method(comparison: Comparison, algorithm: str | None) -> Method:
    by_name = {method.algorithm: method for method in reversed(comparison.methods)}
    chosen = best_federated(comparison) if algorithm is None else by_name.get(algorithm)
    if chosen is not None:
        return chosen
    if algorithm is None:
        raise ConfigError("the run has no finished method besides local; run one, such as fedavg or ditto")
    names = ", ".join(method.algorithm for method in comparison.methods)
    raise ConfigError(f"the run has no method {algorithm!r}; it has {names}")
