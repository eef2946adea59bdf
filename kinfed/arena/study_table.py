"""The table of a study, and its curve.

Bold is, in each column, the best mean and every method that it does not lead clearly: Student's interval of the paired
differences by seed, at 95 % for all rivals of the column together (Bonferroni). Underlined is the best of the others. A
rank is a method's place among the methods of a column, seed by seed, ties shared; its interval is Student's over
columns, or over the seeds of a single column. Columns that share clients are not independent draws: intervals of
ranks say how stable ranks are over these columns, not over all data there could be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

from kinfed.analysis import MetricStyle, average, interval, leader, metric_style, rankings, single_run
from kinfed.arena.plan import Cell
from kinfed.engine import METRICS
from kinfed.errors import ConfigError, DataError
from kinfed.records import RunRecord, finite
from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.report.drawing import Figure, Trace, View, axis, curve, in_view, layout, log_axis, plural, y_title

if TYPE_CHECKING:
    from kinfed.arena.studies import StudyResult

PACKAGE = "kinfed.arena"
Values = dict[str, dict[int, float]]  # of every method, by seed


@dataclass(frozen=True)
class StudyTable:
    """Methods by cells, with footnotes made from the runs."""

    table: TextTable
    notes: tuple[str, ...]
    figure: Figure | None = None  # over the swept setting

    def text(self) -> str:
        """The table as a terminal shows it."""
        return "\n".join([self.table.text(max(100, 16 * len(self.table.columns))), "", *self.notes])

    def markdown(self) -> str:
        return "\n".join([self.table.markdown(), *(f"{note}  " for note in self.notes), ""])

    def latex(self) -> str:
        """A tabular for the package booktabs, with the footnotes below it."""
        return self.table.latex(self.notes)

    def csv(self) -> str:
        return self.table.csv()

    def html(self) -> str:
        """A page that needs nothing from outside itself."""
        return render(
            "study.html", PACKAGE, title=f"{self.table.title} – kinfed", kicker="study", heading=self.table.title,
            links=[], footer=[], figures=self.figure is not None, table=self.table, notes=self.notes,
            figure=self.figure,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.text()


def study_table(study: StudyResult, metric: str | None = None, *, costs: bool = False) -> StudyTable:
    """The table of a study as far as it has come."""
    begun = [(cell, run) for cell, run in study.cells if run is not None]
    if not begun:
        raise DataError(f"{study.folder} has no cell that was begun; run it with: kinfed study")
    metric = metric or _headline(begun[0][1])
    labels = list(dict.fromkeys(label for cell, _ in begun for label in cell.labels))
    columns = [(cell, _values(run, metric)) for cell, run in begun]
    everything = [value for _, values in columns for by_seed in values.values() for value in by_seed.values()]
    style = metric_style(metric).for_values([value for value in everything if finite(value)])
    heads = [TableColumn("Method", "name"), *(_heading(study, cell, style) for cell, _ in columns)]
    titles = {method.algorithm: method.label for _, run in begun for method in single_run(run).methods}
    rows = [[TableCell(titles.get(label, label))] for label in labels]
    for _, values in columns:
        marks = _marks(values, style)
        for label, row in zip(labels, rows, strict=True):
            row.append(_figure(values.get(label, {}), style, marks.get(label, "")))
    if len(labels) > 1:
        heads.append(TableColumn("rank", "text", definition="mean place among the methods, with its 95 % interval"))
        for label, row in zip(labels, rows, strict=True):
            row.append(_rank(label, [values for _, values in columns], style))
    if costs:
        heads += [TableColumn("MB", definition="sent up and down by all clients of a run"), TableColumn("seconds")]
        for label, row in zip(labels, rows, strict=True):
            row += _costs(label, [run for _, run in begun])
    better = "lower is better" if style.lower_is_better else "higher is better"
    title = f"{style.title} of personal models{f' ({style.unit.strip()})' if style.unit else ''}, {better}"
    figure = sweep_figure(study, metric) if len(study.plan.values) > 1 else None
    return StudyTable(TextTable.of(title, heads, rows), tuple(_notes(study, metric)), figure)


def _headline(run: RunRecord) -> str:
    final = next((trial.final for trial in run.trials), None)
    return final.metric if final is not None else str(run.config.get("metric") or "accuracy")


def _values(run: RunRecord, metric: str) -> Values:
    """The mean of the metric over clients, of finished trials, by method and seed; NaN where a trial diverged."""
    METRICS.named(metric)  # refuses a name that is no metric
    values: Values = {}
    for trial in run.trials:
        if trial.finished and (mean := trial.final.personal.get(f"{metric}_mean")) is not None:
            values.setdefault(trial.algorithm, {})[trial.seed] = math.nan if trial.final.diverged else mean
    return values


def _heading(study: StudyResult, cell: Cell, style: MetricStyle) -> TableColumn:
    """The innermost name below the others."""
    value = f"{study.plan.setting.rpartition('.')[2]} {cell.value}" if cell.value else ""
    *outer, inner = [part for part in (cell.federation, cell.model, value) if part] or [style.title]
    return TableColumn(inner, group=", ".join(outer))


def _marks(values: Values, style: MetricStyle) -> dict[str, str]:
    """Which methods of a column are "best", and which one is "second"."""
    known = {label: by_seed for label, by_seed in values.items() if by_seed and all(map(finite, by_seed.values()))}
    numbered = dict(enumerate(known.values()))
    first = leader(numbered, style.lower_is_better)
    if first is None or len(known) < 2:
        return {}
    names, best = list(known), numbered[first]
    sign = -1.0 if style.lower_is_better else 1.0
    confidence = 1 - 0.05 / (len(known) - 1)
    marks = {names[first]: "best"}
    for label, by_seed in known.items():
        leads = {seed: sign * (best[seed] - by_seed[seed]) for seed in best.keys() & by_seed.keys()}
        lead = interval(leads, confidence)
        if lead is not None and lead.low <= 0:
            marks[label] = "best"
    others = {number: by_seed for number, (label, by_seed) in enumerate(known.items()) if label not in marks}
    if (second := leader(others, style.lower_is_better)) is not None:
        marks[names[second]] = "second"
    return marks


def _figure(by_seed: Mapping[int, float], style: MetricStyle, mark: str) -> TableCell:
    mean = average(by_seed)
    if mean is None:
        return TableCell("–")
    if not finite(mean.mean):
        lost = sum(not finite(value) for value in by_seed.values())
        return TableCell(f"diverged ({lost} of {len(by_seed)})")
    spread = "" if mean.sd is None else f"{style.scale * mean.sd:.{style.digits}f}"
    text = f"{style.scale * mean.mean:.{style.digits}f}"
    return TableCell(text, spread, best=mark == "best", second=mark == "second")


def _rank(label: str, columns: list[Values], style: MetricStyle) -> TableCell:
    """A method's mean rank over the columns that have it, with the interval over them."""
    last = max(len(values) for values in columns)
    by_column = [
        {seed: rankings.places(_of_seed(values, seed), style.lower_is_better)[label] for seed in values.get(label, {})}
        for values in columns
    ]
    by_column = [places for places in by_column if places]
    if not by_column:
        return TableCell("–")
    means = {number: fmean(places.values()) for number, places in enumerate(by_column)}
    likely = interval(means if len(means) > 1 else by_column[0])
    text = f"{fmean(means.values()):.1f}"
    if likely is None:
        return TableCell(text)
    return TableCell(f"{text} [{max(likely.low, 1):.1f}, {min(likely.high, last):.1f}]")


def _of_seed(values: Values, seed: int) -> dict[str, float]:
    """The methods that have this seed."""
    return {name: by_seed[seed] for name, by_seed in values.items() if seed in by_seed}


def _costs(label: str, runs: list[RunRecord]) -> list[TableCell]:
    """Megabytes and seconds of a run, mean over cells and seeds."""
    finals = [trial.final for run in runs for trial in run.trials if trial.algorithm == label and trial.finished]
    if not finals:
        return [TableCell("–"), TableCell("–")]
    megabytes = sum(final.bytes for final in finals) / len(finals) / 1e6
    return [TableCell(f"{megabytes:,.2f}"), TableCell(f"{sum(final.seconds for final in finals) / len(finals):,.1f}")]


def _notes(study: StudyResult, metric: str) -> list[str]:
    """What a reader has to know: how many seeds, what was tuned, what is missing, who took other work."""
    plan, seeds = study.plan, {seed for cell in study.crossed for seed in cell.seeds}
    rule = (
        f"Mean ± standard deviation over {plural(len(seeds), 'seed')} of the clients' mean, after the last round. "
        "Bold: the best and what it does not lead clearly (paired by seed, 95 % for all rivals of a column together); "
        "underlined: the best of the others."
    )
    notes = [rule if len(seeds) > 1 else "One seed: no spread, and nothing is decided by it."]
    if len(seeds) == 2:
        notes.append(
            "Two seeds: an interval reaches 12.7 standard errors to both sides, so that hardly a lead is clear."
        )
    if plan.trials:
        notes.append(
            f"Every method was tuned in every column with {plural(plan.trials, 'trial')} on validation data"
            f"{_seeds_text(plan.tuning_seeds)}; methods without options to tune had one."
        )
    if missing := list(filter(None, (_missing(cell, run) for cell, run in study.cells))):
        notes.append(f"Not finished: {'; '.join(missing)}.")
    work: dict[str, list[str]] = {}
    for cell, run in study.cells:
        for label, sentence in _other_work(cell, run):
            work.setdefault(f"{label} {sentence}", []).append(cell.folder)
    for sentence, cells in work.items():
        place = "" if len(cells) == len(study.cells) else f" in {', '.join(cells)}"
        notes.append(f"{sentence}{place}.")
    return notes


def _missing(cell: Cell, run: RunRecord | None) -> str:
    """What of a cell is not finished; "" if nothing is."""
    absent = {label: seeds for label in cell.labels if (seeds := _absent(cell, run, label))}
    if not absent:
        return ""
    seeds = next(iter(absent.values()))
    if len(absent) == len(cell.labels) and all(own == list(cell.seeds) for own in absent.values()):
        return cell.folder
    if all(own == seeds for own in absent.values()):
        return f"{', '.join(absent)} in {cell.folder}{_seeds_text(seeds)}"
    return f"{', '.join(label + _seeds_text(own) for label, own in absent.items())} in {cell.folder}"


def _absent(cell: Cell, run: RunRecord | None, label: str) -> list[int]:
    done = {trial.seed for trial in run.trials if trial.algorithm == label and trial.finished} if run else set()
    return [seed for seed in cell.seeds if seed not in done]


def _seeds_text(seeds: Sequence[int]) -> str:
    return f" (seeds {', '.join(map(str, seeds))})" if len(seeds) > 1 else f" (seed {seeds[0]})"


def _other_work(cell: Cell, run: RunRecord | None) -> list[tuple[str, str]]:
    """Methods with local work or rounds other than the run's."""
    sentences = []
    for label, options in (run.config if run else {}).get("algorithms", {}).items():
        other = [f"{name} = {options[name]}" for name in ("steps", "epochs", "batch") if name in options]
        if other and label in cell.labels:
            sentences.append((label, f"has local work of its own ({', '.join(other)})"))
        rounds = {t.final.rounds for t in run.trials if t.algorithm == label and t.finished} if run else set()
        if rounds - {cell.rounds}:
            sentences.append((label, f"took {', '.join(map(str, sorted(rounds)))} of {cell.rounds} rounds"))
    return sentences


def sweep_figure(study: StudyResult, metric: str | None = None) -> Figure:
    """The metric over the swept setting: a line per method, a view for every federation and model."""
    plan, begun = study.plan, [(cell, run) for cell, run in study.cells if run is not None]
    if len(plan.values) < 2 or not begun:
        raise ConfigError("a curve needs a [sweep] with two values or more, and cells that were run")
    metric = metric or _headline(begun[0][1])
    style = metric_style(metric)
    numbers = [float(value) for value in plan.values if isinstance(value, int | float)]
    if len(numbers) < len(plan.values):
        raise ConfigError(f"a curve needs numbers; {plan.setting} takes {', '.join(map(str, plan.values))}")
    methods = single_run(begun[0][1]).methods
    data: list[Trace] = []
    views: list[View] = []
    for place, group in groupby(begun, key=lambda entry: (entry[0].federation, entry[0].model)):
        name, entries = ", ".join(part for part in place if part) or style.title, list(group)
        views.append(View(name, name, y_title(f"{name}: {style.axis_title}")))
        for method in methods:
            points = []
            for cell, run in entries:
                by_seed = _values(run, metric).get(method.algorithm, {})
                mean = average({seed: style.scale * value for seed, value in by_seed.items()})
                if mean is not None and finite(mean.mean):
                    points.append((float(cell.value), mean))
            hover = f"<b>{method.label}</b><br>{plan.setting} %{{x}}: %{{y:.4g}}%{{customdata}}{style.unit}"
            data += in_view(name, curve(method, sorted(points, key=lambda point: point[0]), hover)) if points else []
    wide = min(numbers) > 0 and max(numbers) > 20 * min(numbers)
    x = log_axis(plan.setting, min(numbers), max(numbers)) if wide else axis(plan.setting)
    description = f"The {style.noun} over {plan.setting}, one line per method."
    return Figure(description, data, layout(x, axis(), ""), 400, tuple(views), methods=methods)
