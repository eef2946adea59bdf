"""The index of a benchmark: what holds, what does not, what is unknown, and how sure that is; every claim in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kinfed.report import write_page
from kinfed.report.formats import duration, plural
from kinfed.report.html import render
from kinfed.report.statistics import Interval
from kinfed.report.tables import TableCell, TableColumn, TextTable
from kinfed.reproduce.benchmark_records import BenchmarkRecord
from kinfed.reproduce.judge import DECIDED, Status, Verdict, by_chance, certainty, firm_verdicts, margin_text
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
UNTESTED_SECTIONS: Mapping[Source, Mapping[str, Status]] = {
    "paper": {"Not measured": "not judged", "Cannot be tested here": "cannot be tested here"},
    "kinfed": {"Our questions: not measured": "not judged"},
}
QUESTION_SECTIONS: Mapping[str, tuple[Status, ...]] = {
    "Our questions: yes": ("reproduced",),
    "Our questions: no": ("contradicted",),
    "Our questions: open": ("undecided", "tied"),
}
EVIDENCE = ("Interval", "Margin", "Against", "Seeds", "How sure", "Scale", "Page")  # columns of a claim that was judged
FIGURES = ("Margin", "Seeds")
MAIN_CLAIMS = "What the papers stand on"
GLANCE: Mapping[str, Status] = {
    "Holds": "reproduced",
    "Does not hold": "contradicted",
    "Unknown": "undecided",
    "Exact tie": "tied",
    "Not measured": "not judged",
    "Not testable": "cannot be tested here",
}
TALLY = (*(name for name, status in GLANCE.items() if status in DECIDED), "Not tested", *QUESTION_SECTIONS)

HOW_TO_READ = (
    "Claims are about orders, not levels. A claim holds (is reproduced) if, for every rival it names, Student's 95 % "
    "interval of the paired differences over seeds lies above zero; it does not hold (is contradicted) if one of them "
    "lies below; it is unknown (undecided) if one contains zero, or if comparisons that it needs were not run. Shown "
    "is the interval that decides, each on a scale of its own: the dotted line is zero, to the right is for the claim.",
    "How sure: “firm” holds for all claims (or all questions) together, by Holm's correction at 5 %; “95 %” for the "
    "claim by itself; less, where one of several rivals alone contradicts it, since there were several chances; of an "
    "unknown one, how many seeds would decide with even odds at this spread. “Same in every seed”: there is no spread "
    "to judge by. By chance: so many verdicts there would be at most if every claim lay on its border, neither true "
    "nor false. The scale “paper” has the published settings as far as they are known, “small” has less data, fewer "
    "rounds or smaller networks; the page says what.",
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
    """What holds, what does not, what is unknown, how sure that is and what it is about; `missing` are recipes without
    a record."""
    claims = [verdict for verdict in _verdicts(records, "paper") if verdict.status != "cannot be tested here"]
    judged = [verdict for verdict in claims if verdict.status in DECIDED]
    main = {status: sum(v.status == status for v in claims if v.main) for status in (*DECIDED, "not judged")}
    counts = {status: sum(verdict.status == status for verdict in judged) for status in DECIDED}
    at_paper = _verdicts([record for record in records if record.scale == "paper"], "paper")
    of_paper = sum(verdict.status in DECIDED for verdict in at_paper)
    sentences = [
        f"Of {plural(len(claims), 'claim')} of the papers that can be tested here, {len(judged)} were judged: "
        f"{counts['reproduced']} hold, {counts['contradicted']} do not, {counts['undecided']} are unknown, "
        f"{counts['tied']} are exact ties. {of_paper} of them were judged at the scale paper, the others at the scale "
        "small, most of them with less data, fewer rounds or smaller networks; some are on other data at either scale.",
    ]
    if any(main.values()):
        sentences.append(
            f"Of the {sum(main.values())} that the papers stand on, {main['reproduced']} hold, {main['contradicted']} "
            f"do not, {main['undecided'] + main['tied']} are unknown and {main['not judged']} were not measured."
        )
    if unkept := sum(bool(verdict.earlier) for verdict in judged):
        sentences.append(
            f"The figures behind {unkept} of these verdicts were not kept: they stand as they were published until "
            "their recipes are measured again."
        )
    if missing:
        sentences.append(f"Recipes without a page, whose claims are not counted: {', '.join(missing)}.")
    return sentences


def _verdicts(records: Iterable[BenchmarkRecord], source: Source) -> list[Verdict]:
    return [verdict for record in records for verdict in record.verdicts if verdict.source == source]


def certainty_table(records: Sequence[BenchmarkRecord]) -> TextTable:
    """Of the papers' claims and of our questions: how many have which verdict, how many of them are firm, how many
    there would be by chance alone, and how many were judged at the scale paper."""
    at_paper = [record for record in records if record.scale == "paper"]
    columns, cells = [TableColumn("", "name")], [[name] for name in GLANCE]
    groups: tuple[tuple[str, Source], ...] = (("Claims of the papers", "paper"), ("Our questions", "kinfed"))
    for group, source in groups:
        columns += [TableColumn(heading, group=group) for heading in ("all", "firm", "by chance", "at scale paper")]
        verdicts, of_paper = _verdicts(records, source), _verdicts(at_paper, source)
        firm = firm_verdicts(verdicts)
        expected = dict(zip(("reproduced", "contradicted"), by_chance(verdicts), strict=True))
        for row, status in zip(cells, GLANCE.values(), strict=True):
            count, sure, large = (sum(v.status == status for v in some) for some in (verdicts, firm, of_paper))
            chance = expected.get(status)
            row += [str(count), *(["–", "–"] if chance is None else [str(sure), f"{chance:.1f}"])]
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


def main_claims(records: Sequence[BenchmarkRecord], page: str) -> TextTable:
    """What the papers stand on, paper by paper, each claim with its verdict and, below those of its page, our questions
    that put it into perspective: controls and other readings. All of them are in the sections as well. `page` is the
    address of a recipe's page (BenchmarkRecord.address)."""
    columns = ("Claim", "Paper", "Verdict", *EVIDENCE)
    words = {status: name.lower() for name, status in GLANCE.items()}
    sources: tuple[Source, ...] = ("paper", "kinfed")
    firm = {id(verdict) for source in sources for verdict in firm_verdicts(_verdicts(records, source))}
    papers = list(dict.fromkeys(record.paper for record in records))
    rows = []
    for record in sorted(records, key=lambda record: papers.index(record.paper)):
        verdicts = [verdict for verdict in record.verdicts if verdict.main]
        verdicts.sort(key=lambda verdict: (sources.index(verdict.source), verdict.status == "not judged"))
        for verdict in verdicts:
            claim, *_ = line = _claim_line(record, verdict, id(verdict) in firm, page)
            if verdict.source == "kinfed":
                claim = replace(claim, text=f"Our question: {claim.text}")
            word = TableCell(words[verdict.status], tone=_tone(verdict))
            rows.append([claim, TableCell(record.paper), word, *line[-len(EVIDENCE) :]])
    return _claims_table(MAIN_CLAIMS, columns, rows)


def claim_sections(records: Sequence[BenchmarkRecord], page: str) -> list[tuple[str, TextTable]]:
    """(heading, a line for every claim with that verdict), those that have lines, the papers' claims without a verdict
    among them; `page` as in `main_claims`."""
    parts: tuple[tuple[Source, Mapping[str, tuple[Status, ...]]], ...] = (
        ("paper", CLAIM_SECTIONS),
        ("kinfed", QUESTION_SECTIONS),
    )
    sections = []
    for source, headings in parts:
        columns = ["Claim", "Where", *EVIDENCE] if source == "paper" else ["Question", *EVIDENCE]
        firm = set(map(id, firm_verdicts(_verdicts(records, source))))
        for heading, statuses in headings.items():
            chosen = [
                (record, verdict)
                for record in records
                for verdict in record.verdicts
                if verdict.source == source and verdict.status in statuses and verdict.margin is not None
            ]
            chosen.sort(key=lambda pair: id(pair[1]) not in firm)  # the surest first, otherwise in order
            rows = [_claim_line(record, verdict, id(verdict) in firm, page) for record, verdict in chosen]
            if rows:
                sections.append(_section(heading, columns, rows))
        sections += _untested_sections(records, source, page)
    return sections


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
                TableCell(verdict.claim),
                *([] if source == "kinfed" else [_place_cell(record, verdict)]),
                TableCell(verdict.sentence),
                TableCell(record.recipe, link=record.address(page)),
            ]
            for record in records
            for verdict in record.verdicts
            if verdict.source == source and verdict.status == status
        ]
        if rows:
            columns = ("Claim", "Where", "Why", "Page") if source == "paper" else ("Question", "Why", "Page")
            sections.append(_section(heading, columns, rows))
    return sections


def _place_cell(record: BenchmarkRecord, verdict: Verdict) -> TableCell:
    return TableCell(f"{record.paper}: {verdict.place or record.reproduces}")


def _claim_line(record: BenchmarkRecord, verdict: Verdict, is_firm: bool, page: str) -> list[TableCell]:
    margin = verdict.margin
    sure = "firm" if is_firm else certainty(verdict)
    places = [] if verdict.source == "kinfed" else [_place_cell(record, verdict)]
    return [
        TableCell(verdict.claim),
        *places,
        TableCell("") if margin is None else TableCell("", interval=_drawn(margin), tone=_tone(verdict)),
        TableCell(margin_text(verdict)),
        TableCell(verdict.rival),
        TableCell("–" if margin is None else str(margin.n)),
        TableCell(f"{sure}; figures not kept" if verdict.earlier and margin is not None else sure),
        TableCell(record.scale),
        TableCell(record.recipe, link=record.address(page)),
    ]


def _drawn(margin: Interval) -> tuple[float, float, float]:
    return margin.low, margin.mean, margin.high


def _tone(verdict: Verdict) -> str:
    return {"reproduced": "yes", "contradicted": "no"}.get(verdict.status, "open")


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


def write_index(records: Sequence[BenchmarkRecord], path: Path, page: str, missing: Sequence[str] = ()) -> Path:
    """As a page of HTML."""
    main, sections = main_claims(records, page), claim_sections(records, page)
    text = render(
        "site.html",
        PACKAGE,
        title="Benchmark – kinfed",
        kicker="kinfed reproduce",
        heading="Tables and figures of the papers, measured again",
        links=[
            *([("main-claims", MAIN_CLAIMS)] if main.rows else []),
            ("glance", "At a glance"),
            *((f"claims-{number}", heading) for number, (heading, _) in enumerate(sections)),
            ("recipes", "Recipes"),
        ],
        footer=sorted({provenance for record in records for provenance in record.provenances}),
        figures=False,
        table=recipes_table(records, page),
        certainty=certainty_table(records),
        papers=papers_table(records),
        main_claims=main,
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
        "ones, and a verdict on every claim.",
        "",
        "\n\n".join(summary_sentences(records, missing)),
        "",
        f"## {MAIN_CLAIMS}",
        "",
        main_claims(records, "{page}.md").markdown(),
        "## At a glance",
        "",
        certainty_table(records).markdown(),
        "\n\n".join(HOW_TO_READ),
        "",
        papers_table(records).markdown(),
        "The same with finer drawings: [claims.html](claims.html).",
        "",
    ]
    for heading, table in claim_sections(records, "{page}.md"):
        lines += [f"## {heading}", "", table.markdown()]
    lines += ["## Recipes", "", recipes_table(records, "{page}.md").markdown()]
    return write_page(folder / "README.md", "\n".join(lines))
