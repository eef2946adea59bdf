"""A folder of published pages, made from what was measured and from the recipes as they are now.

Nothing in it is edited by hand: publishing joins what was measured with what is there part by part, judges every claim
of every recipe anew, and writes pages, records and the index."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kinfed.report import write_page
from kinfed.report.drawing import plural
from kinfed_papers.benchmark_index import READINGS, write_index, write_readme
from kinfed_papers.benchmark_records import BenchmarkRecord, count_once, joined_parts, page_name, read_records
from kinfed_papers.markdown_page import grid_lines, markdown_page, with_claims
from kinfed_papers.measure import Reproduction, read_reproduction
from kinfed_papers.readings import ReadingGrid, choices_table, reading_grids
from kinfed_papers.recipe import Recipe, Scale
from kinfed_papers.verdict import DECIDED

log = logging.getLogger(__name__)

PUBLISHED_SCALES: tuple[Scale, ...] = ("small", "paper")  # of all that lies in a folder; smoke is a trial of the code


def find_reproductions(out: Path, recipes: Iterable[Recipe], scales: Sequence[Scale]) -> list[Reproduction]:
    """What was measured of these recipes, in the folders below `out`."""
    read = (read_reproduction(recipe, scale, reproduction_folder(out, recipe.name, scale))
            for recipe in recipes for scale in scales)  # fmt: skip
    return [one for one in read if one.parts]


def reproduction_folder(out: Path, recipe: str, scale: Scale) -> Path:
    return out / f"{recipe}-{scale}"


def publish(reproductions: Sequence[Reproduction], folder: Path, recipes: Mapping[str, Recipe]) -> Path:
    """Join these with what the folder has, and judge all of it by the recipes; those that `recipes` does not have stay
    as they are. Returns README.md, the index; claims.html is another."""
    by_page = {(record.recipe, record.scale): record for record in read_records(folder, recipes)}
    published_now = []
    measured = {(one.recipe.name, one.scale): one for one in reproductions}
    for name, scale in dict.fromkeys([*by_page, *measured]):
        if name in recipes:
            recipe, record = recipes[name], by_page.get((name, scale))
            latest = measured[name, scale].parts if (name, scale) in measured else {}
            new = {part: entry.rounded() for part, entry in latest.items()}
            published = {} if record is None else record.parts
            parts = joined_parts(recipe, scale, published, new)
            for part in published.keys() & parts.keys():
                before, after = (len(group[part].seeds) for group in (published, parts))
                if after < before:
                    log.warning("%s: %s now has %d seeds, and had %d", name, part, after, before)
            published_now.append(Reproduction(recipe, scale, parts))
            _write(published_now[-1], record, folder)
    _write_readings(published_now, folder)
    records = count_once(read_records(folder, recipes))
    missing = [name for name in recipes if all(record.recipe != name for record in records)]
    write_index(records, folder / "claims.html", "{page}.md", missing)
    return write_readme(records, folder, missing)


def _write_readings(reproductions: Iterable[Reproduction], folder: Path) -> None:
    """One page for all claims whose verdict depends on how the paper is read, if any does."""
    lines = [
        "# In every reading of the papers",
        "",
        "Where a paper leaves a choice open, or says it in two ways, a claim has a grid: readings of the method by "
        "readings of its rivals. Every cell shows the comparison that decides, with its 95 % interval.",
        "",
    ]
    papers: dict[str, list[ReadingGrid]] = {}
    for reproduction in reproductions:
        if grids := reading_grids(reproduction):
            page = f"{page_name(reproduction.recipe.name, reproduction.scale)}.md"
            stand_in = reproduction.recipe.stand_ins.get(reproduction.scale)
            lines += [f"## [{reproduction.recipe.title}]({page})", ""]
            lines += [f"Scale {reproduction.scale}{f': {stand_in}' if stand_in else '.'}", "", *grid_lines(grids)]
            papers.setdefault(reproduction.recipe.paper.name, []).extend(grids)
    for paper, grids in papers.items():
        lines += [f"## What the paper leaves open: {paper}", "", choices_table(grids).markdown()]
    if papers:
        write_page(folder / READINGS, "\n".join(lines))


def verdicts_gone(before: BenchmarkRecord, after: BenchmarkRecord) -> list[str]:
    """Claims judged by figures that were not kept, and gone from the recipe (or worded anew): their verdicts cannot be
    had again without measuring."""
    present = {verdict.claim for verdict in after.verdicts}
    return [v.claim for v in before.verdicts if v.earlier and v.status in DECIDED and v.claim not in present]


def _write(reproduction: Reproduction, published: BenchmarkRecord | None, folder: Path) -> None:
    """A page and its record. Where no figures were kept, the page's tables stay and its claims follow the recipe."""
    record = BenchmarkRecord.of(reproduction, published)
    if gone := [] if published is None else verdicts_gone(published, record):
        log.warning(
            "%s: %s without figures went with claims that the recipe no longer makes: %s",
            record.name,
            plural(len(gone), "verdict"),
            "; ".join(gone),
        )
    path = folder / f"{record.name}.md"
    if reproduction.parts:
        write_page(path, markdown_page(reproduction, record.verdicts))
    elif path.exists():
        write_page(path, with_claims(path.read_text("utf-8"), record.verdicts))
    record.write(folder)
