"""Tables of a benchmark: what holds, what does not, what is unknown, and how sure that is; every claim in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kinfed.report import TableCell, TableColumn, TextTable
from kinfed.report.drawing import duration, plural
from kinfed_papers.benchmark_records import BenchmarkRecord
from kinfed_papers.recipe import Source
from kinfed_papers.result_tables import interval_cell, status_cell
from kinfed_papers.verdict import DECIDED, Status, Verdict, by_chance, certainty, firm_verdicts, margin_text

# Sections by verdict, of the papers' claims and of our questions. Ties among questions are open.
CLAIM_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "What holds": ("holds",),
    "What does not hold": ("does not hold",),
    "What is unknown": ("unknown",),
    "Exact ties": ("exact tie",),
}
UNTESTED_SECTIONS: Mapping[Source, Mapping[str, Status]] = {
    "paper": {"Not judged": "not judged", "Not testable here": "not testable"},
    "kinfed": {"Our questions: not judged": "not judged"},
}
QUESTION_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "Our questions: hold": ("holds",),
    "Our questions: do not": ("does not hold",),
    "Our questions: unknown": ("unknown", "exact tie"),
}
EVIDENCE = ("Interval", "Measured", "Deciding comparison", "Seeds", "How sure", "Scale")  # of what was judged
FIGURES = ("Measured", "Seeds")
GLANCE: Mapping[str, Status] = {
    "Holds": "holds",
    "Does not hold": "does not hold",
    "Unknown": "unknown",
    "Exact tie": "exact tie",
    "Not judged": "not judged",
    "Not testable": "not testable",
}
SOURCES: tuple[Source, ...] = ("paper", "kinfed")
TALLY = (*(name for name, status in GLANCE.items() if status in DECIDED), "Not tested", *QUESTION_SECTIONS)


def tally(judged: Sequence[Verdict]) -> tuple[int, ...]:
    """How many of the paper's claims and of our questions have which verdict, in the order of TALLY."""
    claims, questions = ([verdict.status for verdict in judged if verdict.source == source] for source in SOURCES)
    counts = [sum(map(claims.count, statuses)) for statuses in CLAIM_SECTIONS.values()]
    answers = [sum(map(questions.count, statuses)) for statuses in QUESTION_SECTIONS.values()]
    return *counts, len(claims) - sum(counts), *answers


def summary_sentences(records: Sequence[BenchmarkRecord], missing: Sequence[str] = ()) -> list[str]:
    """What holds, what does not, what is unknown, and in which settings; `missing` are recipes without a record."""
    testable = [(record, verdict) for record, verdict in _claims(records) if verdict.status != "not testable"]
    judged = [(record, verdict) for record, verdict in testable if verdict.status in DECIDED]
    large = [(record, verdict) for record, verdict in judged if record.scale == "paper"]
    foreign = sum(verdict.other_data for _, verdict in large)
    sentences = []
    if main := [verdict for _, verdict in testable if verdict.main]:
        unmeasured = sum(verdict.status == "not judged" for verdict in main)
        published = [verdict for _, verdict in large if verdict.main and not verdict.other_data]
        others = sum(verdict.main and verdict.other_data for _, verdict in judged)
        fewer = len(main) - unmeasured - len(published) - others
        sentences.append(
            f"Of {plural(len(main), 'main claim')} of the papers, {_counts_text(main)}, and {unmeasured} "
            f"{'was' if unmeasured == 1 else 'were'} not judged. With the published settings and data, "
            f"{_counts_text(published)}; "
            + (f"{others} had another data set, and {fewer}" if others else f"{fewer} had")
            + " less data, fewer rounds or smaller networks."
        )
    if testable:
        sentences.append(
            f"Claims that can be tested here: {len(testable)}. Tested: {len(judged)}, of which "
            f"{_counts_text([verdict for _, verdict in judged])}. With the published settings: {len(large)}"
            + (f", and {foreign} of these on other data than the paper’s." if foreign else ".")
        )
    earlier, asked = (sum(bool(verdict.earlier) for verdict in _verdicts(records, source)) for source in SOURCES)
    if earlier or asked:
        sentences.append(
            f"From earlier runs, whose figures were not saved: {plural(earlier, 'verdict')} on claims and {asked} on "
            "questions of ours. Measuring their recipes again will replace them."
        )
    if missing:
        sentences.append(f"Recipes without a page, whose claims are not counted: {', '.join(missing)}.")
    return sentences


def _counts_text(verdicts: Sequence[Verdict]) -> str:
    hold, fail, open_ones, ties = (
        sum(verdict.status == status for verdict in verdicts)
        for status in ("holds", "does not hold", "unknown", "exact tie")
    )
    texts = [
        f"{hold} {'holds' if hold == 1 else 'hold'}",
        f"{fail} {'does' if fail == 1 else 'do'} not",
        f"{open_ones} {'is' if open_ones == 1 else 'are'} unknown",
        *([plural(ties, "exact tie")] if ties else []),
    ]
    return ", ".join(texts)


def _claims(records: Iterable[BenchmarkRecord], source: Source = "paper") -> list[tuple[BenchmarkRecord, Verdict]]:
    return [(record, verdict) for record in records for verdict in record.verdicts if verdict.source == source]


def _verdicts(records: Iterable[BenchmarkRecord], source: Source) -> list[Verdict]:
    return [verdict for _, verdict in _claims(records, source)]


def main_counts(records: Sequence[BenchmarkRecord]) -> TextTable:
    """How many main claims of each paper have which verdict."""
    statuses = {name: status for name, status in GLANCE.items() if status != "not testable"}
    main: dict[str, list[Verdict]] = {}
    for record, verdict in _claims(records):
        if verdict.main:
            main.setdefault(record.paper, []).append(verdict)
    if not any(verdict.status == "exact tie" for verdicts in main.values() for verdict in verdicts):
        del statuses["Exact tie"]
    rows = [
        [paper, *(str(sum(verdict.status == status for verdict in verdicts)) for status in statuses.values())]
        for paper, verdicts in main.items()
    ]
    return TextTable.of("Main claims by paper", [TableColumn("Paper", "name"), *map(TableColumn, statuses)], rows)


def certainty_table(records: Sequence[BenchmarkRecord]) -> TextTable:
    """Count the papers' claims and our questions: how many have which verdict, how many of them are firm, how many
    there would be by chance alone, and how many were judged at the scale paper."""
    at_paper = [record for record in records if record.scale == "paper"]
    columns, cells = [TableColumn("", "name")], [[name] for name in GLANCE]
    for group, source in zip(("Claims of the papers", "Our questions"), SOURCES, strict=True):
        columns += [TableColumn(heading, group=group) for heading in ("all", "firm", "by chance", "at scale paper")]
        verdicts, of_paper = _verdicts(records, source), _verdicts(at_paper, source)
        firm = firm_verdicts(verdicts)
        for row, status in zip(cells, GLANCE.values(), strict=True):
            count, sure, large = (sum(v.status == status for v in some) for some in (verdicts, firm, of_paper))
            certain = status in ("holds", "does not hold")
            row += [str(count), *([str(sure), f"{by_chance(verdicts):.1f}"] if certain else ["–", "–"])]
            row.append(str(large) if status in DECIDED else "–")
    return TextTable.of("At a glance", columns, cells)


def papers_table(records: Sequence[BenchmarkRecord]) -> TextTable:
    """How many claims of each paper, and of our own questions, have which verdict."""
    columns = [TableColumn("Paper", "name"), *map(TableColumn, TALLY)]
    papers = dict.fromkeys(record.paper for record in records)
    judged = {
        paper: tally([verdict for record in records if record.paper == paper for verdict in record.verdicts])
        for paper in papers
    }
    judged["all"] = tuple(map(sum, zip(*judged.values(), strict=True)))
    return TextTable.of("Papers", columns, [[paper, *map(str, counts)] for paper, counts in judged.items()])


def main_claims(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable, TextTable]]:
    """(paper, its main claims, our questions that put them into perspective: controls and other readings). All of them
    are in the sections as well. `page` is the address of a recipe's page (BenchmarkRecord.address)."""
    firm = {id(verdict) for source in SOURCES for verdict in firm_verdicts(_verdicts(records, source))}

    def table(paper: str, source: Source) -> TextTable:
        heading = "Claim" if source == "paper" else "Question"
        rows = []
        for record, verdict in _claims([record for record in records if record.paper == paper], source):
            if verdict.main:
                claim, *_ = line = _claim_line(record, verdict, id(verdict) in firm, page)
                rows.append([claim, status_cell(verdict), *line[-len(EVIDENCE) :]])
        return _claims_table(f"{heading}s: {paper}", (heading, "Verdict", *EVIDENCE), rows)

    papers = dict.fromkeys(record.paper for record in records)
    tables = [(paper, table(paper, "paper"), table(paper, "kinfed")) for paper in papers]
    return [one for one in tables if one[1].rows or one[2].rows]


def claim_sections(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable]]:
    """(heading, a line for every claim of the papers with that verdict), those that have lines, and those without a
    verdict; `page` as in `main_claims`."""
    return _sections(records, "paper", CLAIM_SECTIONS, ("Claim", "Where", *EVIDENCE), page)


def question_sections(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable]]:
    """The same of our questions."""
    return _sections(records, "kinfed", QUESTION_SECTIONS, ("Question", *EVIDENCE), page)


def _sections(
    records: Sequence[BenchmarkRecord],
    source: Source,
    headings: Mapping[str, tuple[Status, ...]],
    columns: Sequence[str],
    page: str,
) -> list[tuple[str, TextTable]]:
    sections = []
    firm = set(map(id, firm_verdicts(_verdicts(records, source))))
    for heading, statuses in headings.items():
        entries = [(r, v) for r, v in _claims(records, source) if v.status in statuses and v.margin is not None]
        entries.sort(key=lambda pair: id(pair[1]) not in firm)  # the surest first, otherwise in order
        rows = [_claim_line(record, verdict, id(verdict) in firm, page) for record, verdict in entries]
        if rows:
            sections.append(_section(heading, columns, rows))
    return sections + _untested_sections(records, source, page)


def _section(heading: str, columns: Iterable[str], rows: Sequence[Sequence[TableCell]]) -> tuple[str, TextTable]:
    return f"{heading} ({len(rows)})", _claims_table(heading, columns, rows)


def _claims_table(title: str, columns: Iterable[str], rows: Sequence[Sequence[TableCell]]) -> TextTable:
    kinds = [TableColumn(name, "figure" if name in FIGURES else "text") for name in columns]
    return TextTable.of(title, kinds, rows)


def _untested_sections(records: Sequence[BenchmarkRecord], source: Source, page: str) -> list[tuple[str, TextTable]]:
    """Claims or questions without an interval, and why they have none."""
    sections = []
    for heading, status in UNTESTED_SECTIONS[source].items():
        rows = [
            [
                TableCell(verdict.claim, link=record.address(page)),
                *([] if source == "kinfed" else [_place_cell(record, verdict)]),
                TableCell(verdict.sentence),
            ]
            for record, verdict in _claims(records, source)
            if verdict.status == status
        ]
        if rows:
            columns = ("Claim", "Where", "Why") if source == "paper" else ("Question", "Why")
            sections.append(_section(heading, columns, rows))
    return sections


def _place_cell(record: BenchmarkRecord, verdict: Verdict) -> TableCell:
    return TableCell(f"{record.paper}: {verdict.place or record.reproduces}")


def _claim_line(record: BenchmarkRecord, verdict: Verdict, is_firm: bool, page: str) -> list[TableCell]:
    margin = verdict.margin
    sure = "firm" if is_firm else certainty(verdict)
    places = [] if verdict.source == "kinfed" else [_place_cell(record, verdict)]
    return [
        TableCell(verdict.claim, link=record.address(page)),
        *places,
        replace(interval_cell(verdict, ""), tone="" if margin is None else status_cell(verdict).tone),
        TableCell(margin_text(verdict)),
        TableCell(verdict.rival),
        TableCell("–" if margin is None else str(margin.n)),
        TableCell(f"{sure}; figures not saved" if verdict.earlier and margin is not None else sure),
        TableCell(", ".join(filter(None, (record.scale, verdict.length, "other data" * verdict.other_data)))),
    ]


def recipes_table(records: Sequence[BenchmarkRecord], page: str) -> TextTable:
    columns = [
        TableColumn("Recipe", "name"),
        TableColumn("In the paper", "text"),
        *map(TableColumn, TALLY),
        TableColumn("Seeds"),
        TableColumn("A seed, on one core"),
        TableColumn("Scale", "text"),
        TableColumn("Measured", "text"),
    ]
    rows: list[list[TableCell | str]] = [
        [
            TableCell(record.recipe, link=record.address(page)),
            f"{record.paper}: {record.reproduces}",
            *map(str, tally(record.verdicts)),
            _range(record.seed_counts),
            "–" if record.processor_seconds_per_seed is None else duration(record.processor_seconds_per_seed),
            record.scale,
            _range(record.dates),
        ]
        for record in records
    ]
    return TextTable.of("Recipes", columns, rows)


def _range(values: Sequence[object]) -> str:
    """From the first to the last."""
    return " to ".join(str(value) for value in dict.fromkeys([*values[:1], *values[-1:]])) or "–"
