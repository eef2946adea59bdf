"""The page of an entry beside the references, and the board of many entries, with the sentences that sum them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kinfed.analysis import Interval, rankings
from kinfed.arena.arena_runs import ENTRY
from kinfed.arena.entries import ArenaEntry, read_entry
from kinfed.arena.standings import Standings
from kinfed.errors import DataError
from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.report.drawing import MUTED, Figure, Trace, axis, dots, duration, layout, line, plural

PACKAGE = "kinfed.arena"
OWN = "kin"  # kinfed's own method: what speaks against it is told first
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
    references = [read_entry(folder / name / ENTRY) for name in _references(entry) if name != entry.method]
    standings = Standings((entry, *references))
    sentences = (*strengths(standings, entry.method), *_costs(standings, entry.method))
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
    standings = Standings(tuple(read_entry(file) for file in files))
    first = standings.entries[0]
    tables = (summary_table(standings), axes_table(standings))
    title = f"The arena: {first.suite}, {first.subset}"
    return ArenaPage(title, tuple(findings(standings)), tables, rank_figure(standings), _notes(standings, None))


def _references(entry: ArenaEntry) -> tuple[str, ...]:
    from kinfed.arena.suites import suite

    return suite(entry.suite).references


# ---- sentences ----


def strengths(standings: Standings, method: str) -> list[str]:
    """What a method is good for, by axis: where it leads the best reference, where it cannot be told from it, and where
    it is behind."""
    title, kinds = standings.by_method[method].title, _axes_by_outcome(standings, method)
    sentences = []
    if kinds["ahead"]:
        sentences.append(f"{title} is ahead of the best reference with {'; '.join(kinds['ahead'])}.")
    if kinds["level"]:
        sentences.append(f"{title} is not told apart from it with {', '.join(kinds['level'])}.")
    if kinds["behind"]:
        sentences.append(f"{title} is behind it with {'; '.join(kinds['behind'])}.")
    if not kinds["ahead"]:
        sentences.insert(0, f"There is no axis on which {title} is shown to be better than the best reference.")
    hurt = standings.hurt(method)
    if method != standings.references[0]:
        sentences.append(
            f"{hurt.share:.0%} of clients have a worse model than they learn alone, by {hurt.points:.3f} of skill on "
            "average."
        )
    refused = [
        f"{name} ({one.refused})" for name, one in standings.by_method[method].federations.items() if one.refused
    ]
    if refused:
        sentences.append(f"It cannot run in {'; '.join(refused)}: its clients count as training alone there.")
    return sentences


def _axes_by_outcome(standings: Standings, method: str) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for name, places in standings.by_axis().items():
        regret = standings.regret_in(method, places)
        if regret is None or regret.low <= 0 <= regret.high:
            kinds["level"].append(name)
        else:
            better = ", ".join(sorted({_title(standings, standings.best_references[place]) for place in places}))
            amount = f"{abs(regret.mean):.3f} of skill"
            kinds["ahead" if regret.high < 0 else "behind"].append(f"{name} ({amount}; best reference: {better})")
    return kinds


def _title(standings: Standings, method: str) -> str:
    return standings.by_method[method].title


def findings(standings: Standings) -> list[str]:
    """What the board says; first what speaks against kinfed's own method."""
    ranks, regret = standings.plain_ranks, standings.regret
    order = sorted(ranks, key=lambda name: ranks[name])
    ahead = [name for name in order if ranks[name] < ranks[OWN]]
    sentences = []
    if ahead:
        shown = ", ".join(_title(standings, name) for name in ahead[:8]) + (", …" if len(ahead) > 8 else "")
        sentences.append(
            f"Against {OWN}, kinfed's own method: {plural(len(ahead), 'method')} of {len(order)} rank before it: "
            f"{shown}."
        )
    behind = _axes_by_outcome(standings, OWN)["behind"]
    if behind:
        sentences.append(f"Against {OWN}: it is behind the best of the references with {'; '.join(behind)}.")
    hurt = standings.hurt(OWN)
    sentences.append(f"Against {OWN}: {hurt.share:.0%} of clients have a worse model than they learn alone.")
    first = order[0]
    critical = rankings.critical_difference(len(order), len(standings.federations))
    level = sum(ranks[name] - ranks[first] < critical for name in order) - 1
    sentences.append(
        f"{_title(standings, first)} has the best mean rank, {ranks[first]:.1f} of {len(order)}; "
        f"{plural(level, 'method')} cannot be told apart from it (critical difference {critical:.1f} with "
        f"{len(standings.federations)} federations)."
    )
    better = [name for name in order if regret[name].high < 0]
    shown = ", ".join(_title(standings, name) for name in better) or "none"
    sentences.append(f"Ahead of the best reference on average over federations, with an interval below zero: {shown}.")
    for name, places in standings.by_axis().items():
        best = sorted(order, key=lambda method: -fmean(_skills_in(standings, method, places)))[:3]
        sentences.append(f"Best with {name}: {', '.join(_title(standings, method) for method in best)}.")
    return [*sentences, *stability(standings)]


def stability(standings: Standings) -> list[str]:
    """How far ranks depend on the seed, and on whether methods are tuned."""
    one = standings.federations[0]
    seeds = list(standings.skills[standings.references[0]][one.name])
    by_seed = [
        rankings.mean_ranks(
            {m: {p: {seed: own[seed]} for p, own in places.items()} for m, places in standings.skills.items()}
        )
        for seed in seeds
    ]
    pairs = [rankings.rank_correlation(a, b) for i, a in enumerate(by_seed) for b in by_seed[i + 1 :]]
    sentences = [
        f"Ranks by single seeds correlate with each other with {fmean(pairs):.2f} (Spearman, mean over pairs of seeds)."
    ]
    usual, tuned = (_validation_ranks(standings, best) for best in (False, True))
    moved, correlation = (
        fmean(abs(usual[name] - tuned[name]) for name in usual),
        rankings.rank_correlation(usual, tuned),
    )
    sentences.append(
        f"Ranks on validation rows as configured and after tuning correlate with {correlation:.2f}; tuning moved a "
        f"method by {moved:.1f} places on average."
    )
    return sentences


def _validation_ranks(standings: Standings, tuned: bool) -> dict[str, float]:
    """Mean ranks by what tuning saw: of the configured setting, or of the best."""
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for name, entry in standings.by_method.items():
        for one in standings.federations:
            trials = entry.federations[one.name] if not entry.federations[one.name].refused else None
            chosen = standings.by_method[standings.references[0]].federations[one.name] if trials is None else trials
            values = [one.skill(trial.value, 0) for trial in chosen.trials if trial.value is not None]
            default = chosen.trials[0].value
            value = max(values, default=0.0) if tuned else 0.0 if default is None else one.skill(default, 0)
            scores.setdefault(name, {})[one.name] = {0: value}
    return rankings.mean_ranks(scores)


def _skills_in(standings: Standings, method: str, places: Sequence[str]) -> list[float]:
    return [skill for place in places for skill in standings.skills[method][place].values()]


def _costs(standings: Standings, method: str) -> list[str]:
    own, usual = (duration(standings.by_method[name].processor_seconds) for name in (method, "fedavg"))
    return [
        f"It took {standings.work(method):.2f} times FedAvg's gradients, as counted, in "
        f"{own} of processor time with tuning (FedAvg {usual})."
    ]


def _notes(standings: Standings, entry: ArenaEntry | None) -> tuple[str, ...]:
    first, budget = standings.entries[0], len(standings.federations)
    notes = [
        "Skill is 0 without a model and 1 without an error, from the mean over clients of the federation's metric on "
        "test rows. Regret is skill that is missing to the best reference ("
        + ", ".join(_title(standings, name) for name in standings.references)
        + "), which is picked with hindsight in every federation.",
        f"Intervals are of 95 %, by drawing the {budget} federations and their seeds anew; in one federation or axis "
        "Student's over seeds. Federations of one data set are no independent draws. The critical difference is "
        "Nemenyi's.",
        "Every method has the same budget of gradients, counted by the engine, and as many settings to try on "
        "validation rows.",
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
        TableColumn("95 %", "text", group=""),
        TableColumn("hurt", sortable=True, definition="share of clients with a worse model than they learn alone"),
        TableColumn("worst tenth", sortable=True, definition="skill of the worst tenth of clients"),
        TableColumn("gradients", sortable=True, definition="times FedAvg's, as counted"),
        TableColumn("seconds", sortable=True, definition="of processor time, with tuning"),
    ]
    rows = []
    for name in sorted(ranks, key=lambda method: ranks[method].mean):
        rank, own, hurt = ranks[name], regret[name], standings.hurt(name)
        skill = fmean(_skills_in(standings, name, [one.name for one in standings.federations]))
        rows.append(
            [
                TableCell(_title(standings, name)), _cell(rank.mean, 1), TableCell(_interval(rank, 1)), _cell(skill, 3),
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
    means = {
        name: {axis: fmean(_skills_in(standings, name, places)) for axis, places in axes.items()} for name in ranks
    }
    best = {axis: max(own[axis] for own in means.values()) for axis in axes}
    rows = []
    for name in sorted(ranks, key=lambda method: ranks[method]):
        cells = [_cell(means[name][axis], 3, best=means[name][axis] == best[axis]) for axis in axes]
        rows.append([TableCell(_title(standings, name)), *cells])
    return TextTable.of("Skill by what clients differ in", columns, rows)


def _federations_table(standings: Standings, method: str) -> TextTable:
    """A method beside the references, federation by federation."""
    others = [name for name in standings.references if name != method]
    columns = [
        TableColumn("Federation", "name"), TableColumn("axis", "text"), TableColumn(_title(standings, method)),
        *(TableColumn(_title(standings, name)) for name in others), TableColumn("regret"), TableColumn("95 %", "text"),
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
    shown = [f"{_title(standings, name)}: {ranks[name].mean:.2f} {_interval(ranks[name], 1)}" for name in order]
    data: list[Trace] = [line(x, y, MUTED, "", width=1.5)]
    data.append(dots([ranks[name].mean for name in order], range(len(order)), DOT, "%{text}", text=shown))
    edge = float(len(order))
    for number, group in enumerate(groups if len(order) <= MOST_GROUPED else groups[:1]):
        at = edge + 0.35 + 0.25 * number
        ends = [order.index(group[0]) - 0.3, order.index(group[-1]) + 0.3]
        data.append(line([at, at], ends, BAR, f"not told apart: {plural(len(group), 'method')}", width=4))
    ticks = {"tickvals": list(range(len(order))), "ticktext": [_title(standings, name) for name in order]}
    rows = axis("", **ticks, range=[len(order) - 0.4, -0.6], showgrid=False)
    places = axis(
        f"mean rank; a critical difference of {critical:.1f} tells two methods apart",
        range=[0.7, edge + 1 + 0.25 * min(len(groups), 8)],
    )
    description = (
        f"Mean ranks of {plural(len(order), 'method')} with intervals; {_title(standings, order[0])} is the best."
    )
    return Figure(description, data, layout(places, rows, ""), 110 + 20 * len(order))
