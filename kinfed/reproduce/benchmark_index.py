"""The index of a benchmark: what holds, what does not, what is unknown, and how sure that is; every claim in a line.

A record is what the index knows of a reproduction. Published pages have their records beside them
(`verdicts/<recipe>.json`, at the scale paper `verdicts/<recipe>-paper.json`), so that publishing one recipe leaves the
others in the index as they were. A claim that was judged at several scales counts once, at the largest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.report import write_page
from kinfed.report.formats import plural
from kinfed.report.html import render
from kinfed.report.statistics import Interval
from kinfed.report.tables import TableCell, TableColumn, TextTable
from kinfed.reproduce.judge import DECIDED, Status, Verdict, by_chance, firm_verdicts, margin_text, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe import SCALES, Scale, Source

PACKAGE = "kinfed.reproduce"
RECORDS = "verdicts"  # folder of the records beside published pages

# Sections of the index by verdict, of the papers' claims and of our questions. Ties among questions are open.
CLAIM_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "What holds": ("reproduced",),
    "What does not hold": ("contradicted",),
    "What is unknown": ("undecided",),
    "Exact ties": ("tied",),
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


@dataclass(frozen=True)
class BenchmarkRecord:
    recipe: str
    title: str
    paper: str
    reproduces: str
    scale: Scale
    seeds: int
    provenance: str
    verdicts: tuple[Verdict, ...]

    @classmethod
    def of(cls, reproduction: Reproduction) -> BenchmarkRecord:
        recipe = reproduction.recipe
        return cls(
            recipe.name,
            recipe.title,
            recipe.paper.name,
            recipe.reproduces,
            reproduction.scale,
            len(reproduction.seeds),
            reproduction.provenance,
            tuple(verdicts(recipe, reproduction.results, reproduction.scale)),
        )

    @classmethod
    def read(cls, path: Path) -> BenchmarkRecord:
        values: dict[str, Any] = storage.read_json(path)
        entries = values.pop("verdicts")
        margins = (None if entry["margin"] is None else Interval(**entry["margin"]) for entry in entries)
        judged = (Verdict(**{**entry, "margin": margin}) for entry, margin in zip(entries, margins, strict=True))
        return cls(**values, verdicts=tuple(judged))

    def write(self, folder: Path) -> None:
        storage.make_folder(folder / RECORDS)
        name = page_name(self.recipe, self.scale)
        storage.write_json(folder / RECORDS / f"{name}.json", asdict(self), sort_keys=False)

    def address(self, page: str) -> str:
        """`page` with {recipe}, {scale} and {page}, the name of its published page."""
        return page.format(recipe=self.recipe, scale=self.scale, page=page_name(self.recipe, self.scale))


def page_name(recipe: str, scale: Scale) -> str:
    """Of a published page and its record: a recipe can be published at several scales."""
    return recipe if scale == "small" else f"{recipe}-{scale}"


def published_records(folder: Path, order: Iterable[str]) -> list[BenchmarkRecord]:
    """Of a folder of published pages: recipes in this order first, then the rest by name, every claim once."""
    records = [BenchmarkRecord.read(path) for path in sorted((folder / RECORDS).glob("*.json"))]
    names = {record.recipe for record in records}
    first = [name for name in order if name in names]
    return [
        record
        for name in dict.fromkeys([*first, *sorted(names)])
        for record in largest_scales([record for record in records if record.recipe == name])
    ]


def largest_scales(records: Sequence[BenchmarkRecord]) -> list[BenchmarkRecord]:
    """Records of one recipe, largest scale first, with every claim in the first of them that judged it (in the first
    that has it, if none did). A record with no claims left is dropped."""
    if len(records) < 2:
        return list(records)
    ranked = sorted(records, key=lambda record: -SCALES.index(record.scale))
    home: dict[str, BenchmarkRecord] = {}
    for record in ranked:
        for verdict in record.verdicts:
            if verdict.claim not in home:
                home[verdict.claim] = record
    for record in reversed(ranked):  # the largest has the last word
        home |= {verdict.claim: record for verdict in record.verdicts if verdict.status != "not judged"}
    kept = (
        replace(record, verdicts=tuple(verdict for verdict in record.verdicts if home[verdict.claim] is record))
        for record in ranked
    )
    return [record for record in kept if record.verdicts]


def tally(judged: Sequence[Verdict]) -> tuple[int, ...]:
    """How many of the paper's claims and of our questions have which verdict, in the order of TALLY."""
    claims, questions = (
        [verdict.status for verdict in judged if verdict.source == source] for source in ("paper", "kinfed")
    )
    counts = [sum(map(claims.count, statuses)) for statuses in CLAIM_SECTIONS.values()]
    answers = [sum(map(questions.count, statuses)) for statuses in QUESTION_SECTIONS.values()]
    return *counts, len(claims) - sum(counts), *answers


def summary_sentences(records: Sequence[BenchmarkRecord]) -> list[str]:
    """What holds, what does not, what is unknown, and what chance alone would give."""
    claims = [verdict for record in records for verdict in record.verdicts if verdict.source == "paper"]
    counts = {status: sum(verdict.status == status for verdict in claims) for status in DECIDED}
    above, below = by_chance(claims)
    firm = firm_verdicts(claims)
    holds, fails = (sum(verdict.status == status for verdict in firm) for status in ("reproduced", "contradicted"))
    judged = sum(counts.values())
    at_paper = [verdict for record in records if record.scale == "paper" for verdict in record.verdicts]
    of_paper = sum(verdict.source == "paper" and verdict.status in DECIDED for verdict in at_paper)
    impossible = sum(verdict.status == "cannot be tested here" for verdict in claims)
    return [
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
    """(heading, a line for every claim with that verdict), those that have lines; `page` is the address of a recipe's
    page (BenchmarkRecord.address)."""
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
                table = TextTable.of(heading, [TableColumn(name, "text") for name in columns], rows)
                sections.append((f"{heading} ({len(rows)})", table))
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
            str(record.seeds),
            record.scale,
            record.provenance.partition(" ")[0],
        ]
        for record in records
    ]
    return TextTable.of("Recipes", columns, rows)


def write_index(records: Sequence[BenchmarkRecord], path: Path, page: str) -> Path:
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
        footer=sorted({record.provenance for record in records}),
        figures=False,
        table=recipes_table(records, page),
        papers=papers_table(records),
        summary=summary_sentences(records),
        how_to_read=HOW_TO_READ,
        sections=sections,
    )
    return write_page(path, text)


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`."""
    return write_index(
        [BenchmarkRecord.of(one) for one in reproductions], out / "index.html", "{recipe}-{scale}/index.html"
    )


def write_readme(records: Sequence[BenchmarkRecord], folder: Path) -> Path:
    """As Markdown, with intervals of characters."""
    lines = [
        "# Benchmark",
        "",
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and every claim judged: reproduced if all of its intervals lie above zero, contradicted if one lies "
        "below, undecided otherwise.",
        "",
        *summary_sentences(records),
        "",
        papers_table(records).markdown(),
        f"{HOW_TO_READ} The same with finer drawings: [claims.html](claims.html).",
        "",
    ]
    for heading, table in claim_sections(records, "{page}.md"):
        lines += [f"## {heading}", "", table.markdown()]
    lines += ["## Recipes", "", recipes_table(records, "{page}.md").markdown()]
    return write_page(folder / "README.md", "\n".join(lines))
