"""The index of a benchmark, as pages of HTML and Markdown: the main claims first, then every claim by its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kinfed.report import render, write_page
from kinfed_papers.benchmark_records import BenchmarkRecord
from kinfed_papers.benchmark_tables import (
    certainty_table,
    claim_sections,
    main_claims,
    main_counts,
    papers_table,
    question_sections,
    recipes_table,
    summary_sentences,
)
from kinfed_papers.measure import Reproduction

PACKAGE = "kinfed_papers"
MAIN_CLAIMS = "The papers’ main claims"
BESIDE = "Our own questions about these claims: controls and other readings of the paper"
QUESTIONS = "questions.md"
READINGS = "readings.md"

HOW_TO_READ = (
    (
        "Holds",
        "better than every rival that the claim names, and not just because of lucky seeds: the 95 % interval of "
        "every difference lies above zero. Where a limit is given, it lies on the right side of that: above “(limit "
        "−2)”, below “(at most 10)”.",
    ),
    (
        "Does not hold",
        "worse than at least one of them: an interval lies below zero (or on the wrong side of its limit), even when "
        "the intervals are widened to hold at 95 % for all comparisons of the claim together, in at least half of the "
        "paper’s rounds. A claim that fails in fewer rounds is unknown: not at the paper’s length.",
    ),
    (
        "Unknown",
        "too close to call, or not all rivals were run. “About 9 seeds” is a rough guide: if the measured differences "
        "are the true ones, the closest comparison has an even chance of being decided by 9 seeds. New seeds replace "
        "the old ones and are never added to them, so that no one can keep adding seeds until the result looks right. "
        "“Draw 2” is such a second set of seeds for the same settings: its intervals are widened to hold at 95 % for "
        "both draws together.",
    ),
    (
        "Firm",
        "a verdict with five seeds or more that survives Holm’s correction at 5 % over all claims (or all questions). "
        "“By chance”: at most this many verdicts of a kind would occur if every claim lay exactly on its border.",
    ),
    (
        "Intervals",
        "Student’s t intervals of differences paired by seed, after the last round. They only cover chance from the "
        "seeds: other data or settings can reverse an answer. Each row shows the interval that decides, on its own "
        "scale; the line in the middle is zero (or the limit), and the right side is in favour of the claim, also "
        "where that means a smaller number.",
    ),
    (
        "Scales",
        "“paper” has the published settings as far as they are known, “small” has less data, fewer rounds or smaller "
        "networks; “other data” is another data set than the paper’s. The page of a recipe says what differs, and why.",
    ),
)


def write_index(records: Sequence[BenchmarkRecord], path: Path, page: str, missing: Sequence[str] = ()) -> Path:
    """Write the index as a page of HTML; `page` is the address of a recipe's page (BenchmarkRecord.address)."""
    main, claims, questions = (
        main_claims(records, page),
        claim_sections(records, page),
        question_sections(records, page),
    )
    text = render(
        "site.html",
        PACKAGE,
        title="Benchmark – kinfed",
        kicker="kinfed reproduce",
        heading="Tables and figures of the papers, measured again",
        links=[
            *([("main-claims", MAIN_CLAIMS)] if main else []),
            ("glance", "At a glance"),
            *((f"claims-{number}", heading) for number, (heading, _) in enumerate(claims)),
            *([("questions", "Our questions")] if questions else []),
            ("recipes", "Recipes"),
        ],
        footer=sorted({provenance for record in records for provenance in record.provenances}),
        figures=False,
        table=recipes_table(records, page),
        certainty=certainty_table(records),
        papers=papers_table(records),
        counts=main_counts(records),
        main_title=MAIN_CLAIMS,
        beside=BESIDE,
        main_claims=main,
        summary=summary_sentences(records, missing),
        how_to_read=HOW_TO_READ,
        claims=claims,
        questions=questions,
    )
    return write_page(path, text)


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`."""
    return write_index(
        [BenchmarkRecord.of(one) for one in reproductions], out / "index.html", "{recipe}-{scale}/index.html"
    )


def write_readme(records: Sequence[BenchmarkRecord], folder: Path, missing: Sequence[str] = ()) -> Path:
    """Write the index as Markdown, with intervals of characters; our questions on a page of their own."""
    page = "{page}.md"
    lines = [
        "# Benchmark",
        "",
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and a verdict on every claim.",
        "",
        "\n\n".join(summary_sentences(records, missing)),
        "",
    ]
    main, counts = main_claims(records, page), main_counts(records)
    lines += [counts.markdown()] if counts.rows else []
    lines += [*(f"* **{term}**: {text}" for term, text in HOW_TO_READ), ""]
    lines += [
        "The same page with better graphics: [claims.html](claims.html). "
        f"Our questions have [a page of their own]({QUESTIONS}); claims that depend on how a paper is read, [another]"
        f"({READINGS}).",
        "",
    ]
    if main:
        lines += [f"## {MAIN_CLAIMS}", ""]
        for paper, claims, questions in main:
            lines += [f"### {paper}", ""]
            lines += [claims.markdown()] if claims.rows else []
            lines += [f"{BESIDE}.", "", questions.markdown()] if questions.rows else []
    lines += ["## At a glance", "", certainty_table(records).markdown(), papers_table(records).markdown()]
    for heading, table in claim_sections(records, page):
        lines += [f"## {heading}", "", table.markdown()]
    lines += ["## Recipes", "", recipes_table(records, page).markdown()]
    questions_page = [
        "# Our questions",
        "",
        "In addition to the [claims of the papers](README.md), we ask: does a method beat its control, does it beat "
        "training alone, and what does another reading of the paper give? These questions are judged like claims.",
        "",
    ]
    for heading, table in question_sections(records, page):
        questions_page += [f"## {heading.removeprefix('Our questions: ').capitalize()}", "", table.markdown()]
    write_page(folder / QUESTIONS, "\n".join(questions_page))
    return write_page(folder / "README.md", "\n".join(lines))
