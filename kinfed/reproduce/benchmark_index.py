"""The index of a benchmark: what holds, what does not, what is unknown, and how sure that is; every claim in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kinfed.report import write_page
from kinfed.report.formats import plural
from kinfed.report.html import render
from kinfed.report.tables import TableCell, TableColumn, TextTable
from kinfed.reproduce.benchmark_records import BenchmarkRecord
from kinfed.reproduce.judge import DECIDED, Status, Verdict, by_chance, firm_verdicts, margin_text
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe import Source

PACKAGE = "kinfed.reproduce"

# Sections of the index by verdict, of the papers' claims and of our questions. Ties among questions are open.
CLAIM_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "What holds": ("reproduced",),
    "What does not hold": ("contradicted",),
    "What is unknown": ("undecided",),
    "Exact ties": ("tied",),
}
UNTESTED_SECTIONS: Mapping[str, Status] = {
    "Not measured": "not judged",
    "Cannot be tested here": "cannot be tested here",
}
QUESTION_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "Our questions: yes": ("reproduced",),
    "Our questions: no": ("contradicted",),
    "Our questions: open": ("undecided", "tied"),
}
TALLY = ("Reproduced", "Contradicted", "Undecided", "Tied", "Not tested", *QUESTION_SECTIONS)

HOW_TO_READ = (
    "Intervals are Student's 95 % intervals of paired differences over seeds, drawn about zero, each on a scale of its "
    "own; to the right is for the claim. Of several rivals, the interval that decides is shown."
)


def tally(judged: Sequence[Verdict]) -> tuple[int, ...]:
    """How many of the paper's claims and of our questions have which verdict, in the order of TALLY."""
    claims, questions = (
        [verdict.status for verdict in judged if verdict.source == source] for source in ("paper", "kinfed")
    )
    counts = [sum(map(claims.count, statuses)) for statuses in CLAIM_SECTIONS.values()]
    answers = [sum(map(questions.count, statuses)) for statuses in QUESTION_SECTIONS.values()]
    return *counts, len(claims) - sum(counts), *answers


def summary_sentences(records: Sequence[BenchmarkRecord], missing: Sequence[str] = ()) -> list[str]:
    """What holds, what does not, what is unknown, and what chance alone would give; `missing` are recipes without a
    record."""
    claims = [verdict for record in records for verdict in record.verdicts if verdict.source == "paper"]
    counts = {status: sum(verdict.status == status for verdict in claims) for status in DECIDED}
    above, below = by_chance(claims)
    firm = firm_verdicts(claims)
    holds, fails = (sum(verdict.status == status for verdict in firm) for status in ("reproduced", "contradicted"))
    judged = sum(counts.values())
    at_paper = [verdict for record in records if record.scale == "paper" for verdict in record.verdicts]
    of_paper = sum(verdict.source == "paper" and verdict.status in DECIDED for verdict in at_paper)
    impossible = sum(verdict.status == "cannot be tested here" for verdict in claims)
    sentences = [
        f"Of {plural(len(claims), 'claim')} of the papers, {counts['reproduced']} are reproduced, "
        f"{counts['contradicted']} contradicted, {counts['undecided']} undecided (an interval contains zero), "
        f"{counts['tied']} exact ties; {impossible} cannot be tested here (private data, figures without numbers), and "
        f"{len(claims) - judged - impossible} were not measured at these scales.",
        f"Every interval is judged by itself at 95 %. If no method differed from any other, chance alone would call at "
        f"most {above:.1f} of the {judged} judged claims reproduced and {below:.1f} contradicted. What also holds for "
        f"all of them together (Holm's correction at 5 %) is called firm: {holds} of those reproduced, {fails} of "
        "those contradicted.",
        f"A verdict is about what was run here: {of_paper} of the {judged} judged claims at the scale paper, with the "
        "published settings as far as they are known; the others at the scale small, most of them with less data, "
        "fewer rounds or smaller networks than in the papers. Some are on other data at either scale. Every page says "
        "what differs.",
    ]
    if missing:
        sentences.append(f"Recipes that were never measured whole, whose claims are not counted: {', '.join(missing)}.")
    return sentences


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


def claim_sections(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable]]:
    """(heading, a line for every claim with that verdict), those that have lines, the papers' claims without a verdict
    among them; `page` is the address of a recipe's page (BenchmarkRecord.address)."""
    claims = [verdict for record in records for verdict in record.verdicts if verdict.source == "paper"]
    firm = set(map(id, firm_verdicts(claims)))
    parts: tuple[tuple[Source, Mapping[str, tuple[Status, ...]]], ...] = (
        ("paper", CLAIM_SECTIONS),
        ("kinfed", QUESTION_SECTIONS),
    )
    sections = []
    for source, headings in parts:
        columns = ["Claim", "Where", "Interval", "Margin", "How sure", "Scale", "Page"]
        if source == "kinfed":
            columns = ["Question", *columns[2:]]
        for heading, statuses in headings.items():
            rows = [
                _claim_line(record, verdict, id(verdict) in firm, page)
                for record in records
                for verdict in record.verdicts
                if verdict.source == source and verdict.status in statuses and verdict.margin is not None
            ]
            if rows:
                sections.append(_section(heading, columns, rows))
        if source == "paper":
            sections += _untested_sections(records, page)
    return sections


def _section(heading: str, columns: Iterable[str], rows: Sequence[Sequence[TableCell]]) -> tuple[str, TextTable]:
    table = TextTable.of(heading, [TableColumn(name, "text") for name in columns], rows)
    return f"{heading} ({len(rows)})", table


def _untested_sections(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable]]:
    """The papers' claims without an interval, and why they have none."""
    sections = []
    for heading, status in UNTESTED_SECTIONS.items():
        rows = [
            [
                TableCell(verdict.claim),
                TableCell(f"{record.paper}: {verdict.place or record.reproduces}"),
                TableCell(verdict.sentence),
                TableCell(record.recipe, link=record.address(page)),
            ]
            for record in records
            for verdict in record.verdicts
            if verdict.source == "paper" and verdict.status == status
        ]
        if rows:
            sections.append(_section(heading, ("Claim", "Where", "Why", "Page"), rows))
    return sections


def _claim_line(record: BenchmarkRecord, verdict: Verdict, is_firm: bool, page: str) -> list[TableCell]:
    margin = verdict.margin
    assert margin is not None
    sure = verdict.outlook if verdict.status == "undecided" else "–" if verdict.status == "tied" else "95 %"
    tone = {"reproduced": "yes", "contradicted": "no"}.get(verdict.status, "open")
    places = [] if verdict.source == "kinfed" else [TableCell(f"{record.paper}: {verdict.place or record.reproduces}")]
    return [
        TableCell(verdict.claim),
        *places,
        TableCell("", interval=(margin.low, margin.mean, margin.high), tone=tone),
        TableCell(f"{margin_text(verdict)}, {plural(margin.n, 'seed')}"),
        TableCell("firm" if is_firm else sure),
        TableCell(record.scale),
        TableCell(record.recipe, link=record.address(page)),
    ]


def recipes_table(records: Sequence[BenchmarkRecord], page: str) -> TextTable:
    columns = [
        TableColumn("Recipe", "name"),
        TableColumn("In the paper", "text"),
        *map(TableColumn, TALLY),
        TableColumn("Seeds"),
        TableColumn("Scale", "text"),
        TableColumn("Measured", "text"),
    ]
    rows: list[list[TableCell | str]] = [
        [
            TableCell(record.recipe, link=record.address(page)),
            f"{record.paper}: {record.reproduces}",
            *map(str, tally(record.verdicts)),
            _range(record.seed_counts),
            record.scale,
            _range(record.dates),
        ]
        for record in records
    ]
    return TextTable.of("Recipes", columns, rows)


def _range(values: Sequence[object]) -> str:
    """From the first to the last."""
    return " to ".join(str(value) for value in dict.fromkeys([*values[:1], *values[-1:]])) or "–"


def write_index(records: Sequence[BenchmarkRecord], path: Path, page: str, missing: Sequence[str] = ()) -> Path:
    """As a page of HTML."""
    sections = claim_sections(records, page)
    text = render(
        "site.html",
        PACKAGE,
        title="Benchmark – kinfed",
        kicker="kinfed reproduce",
        heading="Tables and figures of the papers, measured again",
        links=[
            *((f"claims-{number}", heading) for number, (heading, _) in enumerate(sections)),
            ("recipes", "Recipes"),
        ],
        footer=sorted({provenance for record in records for provenance in record.provenances}),
        figures=False,
        table=recipes_table(records, page),
        papers=papers_table(records),
        summary=summary_sentences(records, missing),
        how_to_read=HOW_TO_READ,
        sections=sections,
    )
    return write_page(path, text)


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`."""
    return write_index(
        [BenchmarkRecord.of(one) for one in reproductions], out / "index.html", "{recipe}-{scale}/index.html"
    )


def write_readme(records: Sequence[BenchmarkRecord], folder: Path, missing: Sequence[str] = ()) -> Path:
    """As Markdown, with intervals of characters."""
    lines = [
        "# Benchmark",
        "",
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and every claim judged: reproduced if all of its intervals lie above zero, contradicted if one lies "
        "below, undecided otherwise.",
        "",
        *summary_sentences(records, missing),
        "",
        papers_table(records).markdown(),
        f"{HOW_TO_READ} The same with finer drawings: [claims.html](claims.html).",
        "",
    ]
    for heading, table in claim_sections(records, "{page}.md"):
        lines += [f"## {heading}", "", table.markdown()]
    lines += ["## Recipes", "", recipes_table(records, "{page}.md").markdown()]
    return write_page(folder / "README.md", "\n".join(lines))
