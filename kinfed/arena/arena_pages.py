"""The page of an entry beside the references, and the board of many entries, with the sentences that sum them up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from kinfed.analysis import Interval, rankings
from kinfed.arena.arena_runs import ENTRY
from kinfed.arena.conclusions import costs, findings, strengths, who_is_missing
from kinfed.arena.entries import ArenaEntry, read_entry
from kinfed.arena.standings import Standings
from kinfed.arena.suites import suite
from kinfed.errors import DataError
from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.report.drawing import MUTED, Figure, Trace, axis, dots, layout, line, plural

PACKAGE = "kinfed.arena"
MOST_GROUPED = 12  # methods of a picture with a bar for every group that is not told apart
BAR, DOT = "#2598e6", "#17468f"


@dataclass(frozen=True)
class ArenaPage:
    """Sentences, tables and a picture, as a page or as Markdown."""

    title: str
    sentences: tuple[str, ...]
    tables: tuple[TextTable, ...]
    figure: Figure
    notes: tuple[str, ...]
    code: str = ""  # of a method that is not kinfed's own

    @property
    def html(self) -> str:
        return render(
            "arena.html", PACKAGE, title=f"{self.title} – kinfed", kicker="arena", heading=self.title, links=[],
            footer=[], figures=True, page=self,
        )  # fmt: skip

    @property
    def markdown(self) -> str:
        sentences = "\n".join(f"- {sentence}" for sentence in self.sentences)
        tables = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in self.tables)
        notes = "\n\n".join(self.notes)
        return f"# {self.title}\n\n{sentences}\n\n{tables}\n{notes}\n"


def entry_page(file: Path, folder: Path) -> ArenaPage:
    """An entry beside the references that lie in the same folder of entries."""
    entry = read_entry(file)
    references = [read_entry(folder / name / ENTRY) for name in suite(entry.suite).references if name != entry.method]
    standings = Standings((entry, *references))
    sentences = (*strengths(standings, entry.method), *costs(standings, entry.method))
    tables = (_federations_table(standings, entry.method), summary_table(standings))
    return ArenaPage(
        f"{entry.title} in {entry.suite}, {entry.subset}", sentences, tables, rank_figure(standings),
        _notes(standings, entry), "" if entry.code is None else entry.code.text,
    )  # fmt: skip


def arena_board(folder: Path | str) -> ArenaPage:
    """All entries below a folder; those that do not stand are refused."""
    files = sorted(Path(folder).rglob(ENTRY))
    if not files:
        raise DataError(f"{folder} holds no {ENTRY}; make one with: kinfed arena run METHOD --out {folder}")
    entries = [read_entry(file) for file in files]
    nowhere = [entry for entry in entries if all(one.refused for one in entry.federations.values())]
    standings = Standings(tuple(entry for entry in entries if entry not in nowhere))
    first = standings.entries[0]
    tables = (summary_table(standings), families_table(standings), axes_table(standings))
    title = f"The arena: {first.suite}, {first.subset}"
    sentences = (*findings(standings), *who_is_missing(standings, nowhere))
    return ArenaPage(title, sentences, tables, rank_figure(standings), _notes(standings, None))


def _notes(standings: Standings, entry: ArenaEntry | None) -> tuple[str, ...]:
    first, budget = standings.entries[0], len(standings.federations)
    notes = [
        "Skill is 0 without a model and 1 without an error, from the mean over clients of the federation's metric on "
        "test rows. Regret is skill that is missing to the best reference ("
        + ", ".join(standings.title(name) for name in standings.references)
        + "), which is picked with hindsight in every federation.",
        f"Intervals are of 95 %, by drawing the {budget} federations and their seeds anew; in one federation or axis "
        "Student's over seeds. Federations of one data set are no independent draws. The critical difference is "
        "Nemenyi's.",
        "Every method has the same budget of gradients, counted by the engine, and tries the same shares of its ranges "
        "on validation rows. Those with 0 gradients, which learn by sums or grow trees, end by themselves.",
    ]
    machines = sorted(
        {", ".join(f"{name} {version}" for name, version in one.machine.items()) for one in standings.entries}
    )
    notes.append(f"Made with {'; '.join(machines)}.")
    if entry is not None:
        notes.append(f"Suite {first.suite} {first.subset}, digest {first.suite_digest}; entry, digest {entry.digest}.")
    return tuple(notes)


# ---- tables ----


def summary_table(standings: Standings) -> TextTable:
    """All methods by rank."""
    ranks, regret = standings.ranks, standings.regret
    reach = max(abs(bound) for one in regret.values() for bound in (one.low, one.high))
    columns = [
        TableColumn("Method", "name", sortable=True),
        TableColumn("rank", sortable=True, definition="mean place over federations, 1 the best"),
        TableColumn("95 %", "text"),
        TableColumn("skill", sortable=True, definition="0 without a model, 1 without an error; mean over federations"),
        TableColumn("regret", sortable=True, definition="skill that is missing to the best reference"),
        TableColumn("95 %", "text"),
        TableColumn("hurt", sortable=True, definition="share of clients with a worse model than they learn alone"),
        TableColumn("worst tenth", sortable=True, definition="skill of the worst tenth of clients"),
        TableColumn("gradients", sortable=True, definition="times FedAvg's, as counted"),
        TableColumn("seconds", sortable=True, definition="of processor time, with tuning"),
    ]
    rows = []
    for name in sorted(ranks, key=lambda method: ranks[method].mean):
        rank, own, hurt = ranks[name], regret[name], standings.hurt(name)
        skill = fmean(standings.skills_in(name, [one.name for one in standings.federations]))
        rows.append(
            [
                TableCell(standings.title(name)), _cell(rank.mean, 1), TableCell(_interval(rank, 1)), _cell(skill, 3),
                _cell(own.mean, 3), TableCell(_interval(own, 3), interval=(own.low, own.mean, own.high), reach=reach),
                TableCell(f"{hurt.share:.0%}", sort_value=hurt.share), _cell(standings.worst_tenth(name), 3),
                _cell(standings.work(name), 2), _cell(standings.by_method[name].processor_seconds, 1),
            ]
        )  # fmt: skip
    return TextTable.of("Methods by rank", columns, rows)


def axes_table(standings: Standings) -> TextTable:
    """Skill by axis; the best of each is bold."""
    axes, ranks = standings.by_axis(), standings.plain_ranks
    columns = [TableColumn("Method", "name", sortable=True), *(TableColumn(name, sortable=True) for name in axes)]
    means = {name: {axis: fmean(standings.skills_in(name, places)) for axis, places in axes.items()} for name in ranks}
    best = {axis: max(own[axis] for own in means.values()) for axis in axes}
    rows = []
    for name in sorted(ranks, key=lambda method: ranks[method]):
        cells = [_cell(means[name][axis], 3, best=means[name][axis] == best[axis]) for axis in axes]
        rows.append([TableCell(standings.title(name)), *cells])
    return TextTable.of("Skill by what clients differ in", columns, rows)


def families_table(standings: Standings) -> TextTable:
    """The median of every family by axis; the best of those with several methods is bold."""
    axes, families = standings.by_axis(), standings.by_family()
    medians = {
        family: {
            axis: median(fmean(standings.skills_in(name, places)) for name in names) for axis, places in axes.items()
        }
        for family, names in families.items()
    }
    several = [own for family, own in medians.items() if len(families[family]) > 1] or list(medians.values())
    best = {axis: max(own[axis] for own in several) for axis in axes}
    columns = [
        TableColumn("Family", "name", sortable=True), TableColumn("methods"),
        *(TableColumn(name, sortable=True) for name in axes),
    ]  # fmt: skip
    rows = [
        [
            TableCell(family),
            TableCell(str(len(families[family]))),
            *(_cell(own[a], 3, best=own in several and own[a] == best[a]) for a in axes),
        ]
        for family, own in sorted(medians.items(), key=lambda entry: -fmean(entry[1].values()))
    ]
    return TextTable.of("Families: the median of their methods' skill", columns, rows)


def _federations_table(standings: Standings, method: str) -> TextTable:
    """A method beside the references, federation by federation."""
    others = [name for name in standings.references if name != method]
    columns = [
        TableColumn("Federation", "name"), TableColumn("axis", "text"), TableColumn(standings.title(method)),
        *(TableColumn(standings.title(name)) for name in others), TableColumn("regret"), TableColumn("95 %", "text"),
        TableColumn("rounds"),
    ]  # fmt: skip
    regrets = {one.name: standings.regret_in(method, [one.name]) for one in standings.federations}
    reach = max((abs(bound) for own in regrets.values() if own for bound in (own.low, own.high)), default=1.0)
    rows = []
    for one in standings.federations:
        own, scores = regrets[one.name], standings.by_method[method].federations[one.name]
        skills = {name: fmean(standings.skills[name][one.name].values()) for name in (method, *others)}
        best = max(skills.values())
        cells = [_cell(skills[name], 3, best=skills[name] == best) for name in (method, *others)]
        rounds = ", ".join(dict.fromkeys(str(cell.rounds) for cell in scores.cells.values())) or "–"
        likely = (
            TableCell("–")
            if own is None
            else TableCell(_interval(own, 3), interval=(own.low, own.mean, own.high), reach=reach)
        )
        missing = TableCell("–") if own is None else _cell(own.mean, 3)
        rows.append([TableCell(one.name), TableCell(one.axis), *cells, missing, likely, TableCell(rounds)])
    return TextTable.of("Skill by federation", columns, rows)


def _cell(value: float, digits: int, best: bool = False) -> TableCell:
    return TableCell(f"{value:.{digits}f}".replace("-", "−"), sort_value=value, best=best)


def _interval(own: Interval, digits: int) -> str:
    return f"[{own.low:.{digits}f}, {own.high:.{digits}f}]".replace("-", "−")


# ---- picture ----


def rank_figure(standings: Standings) -> Figure:
    """The critical-difference picture: mean ranks with intervals, best above, and bars beside methods that are not told
    apart; of many methods, the bar of the best."""
    ranks = standings.ranks
    order = sorted(ranks, key=lambda name: ranks[name].mean)
    critical = rankings.critical_difference(len(order), len(standings.federations))
    groups = rankings.alike({name: ranks[name].mean for name in order}, critical)
    x: list[float | None] = []
    y: list[float | None] = []
    for place, name in enumerate(order):
        x += [ranks[name].low, ranks[name].high, None]
        y += [place, place, None]
    shown = [f"{standings.title(name)}: {ranks[name].mean:.2f} {_interval(ranks[name], 1)}" for name in order]
    data: list[Trace] = [line(x, y, MUTED, "", width=1.5)]
    data.append(dots([ranks[name].mean for name in order], range(len(order)), DOT, "%{text}", text=shown))
    edge = float(len(order))
    for number, group in enumerate(groups if len(order) <= MOST_GROUPED else groups[:1]):
        at = edge + 0.35 + 0.25 * number
        ends = [order.index(group[0]) - 0.3, order.index(group[-1]) + 0.3]
        data.append(line([at, at], ends, BAR, f"not told apart: {plural(len(group), 'method')}", width=4))
    ticks = {"tickvals": list(range(len(order))), "ticktext": [standings.title(name) for name in order]}
    rows = axis("", **ticks, range=[len(order) - 0.4, -0.6], showgrid=False)
    places = axis(
        f"mean rank; a critical difference of {critical:.1f} tells two methods apart",
        range=[0.7, edge + 1 + 0.25 * min(len(groups), 8)],
    )
    description = (
        f"Mean ranks of {plural(len(order), 'method')} with intervals; {standings.title(order[0])} is the best."
    )
    return Figure(description, data, layout(places, rows, ""), 110 + 20 * len(order))
