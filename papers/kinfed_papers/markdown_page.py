"""A reproduction as a page of Markdown: what docs/benchmark shows of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kinfed.report.drawing import duration, plural
from kinfed_papers.judge import NOT_RUN
from kinfed_papers.measure import Reproduction
from kinfed_papers.part_records import PartRecord, default_seeds, processor_seconds_per_seed
from kinfed_papers.readings import LIKELIEST, ReadingGrid, choices_table, reading_grids
from kinfed_papers.result_tables import claims_not_run, filled_tables, verdict_table
from kinfed_papers.verdict import Verdict

CLAIMS, AGAIN = "## Claims", "To measure it again:"


def markdown_page(reproduction: Reproduction, judged: Sequence[Verdict]) -> str:
    recipe = reproduction.recipe
    lines = [f"# {recipe.title}", "", f"{recipe.paper.citation}: {recipe.reproduces}. {recipe.about}", ""]
    lines += [provenance_text(reproduction), ""]
    if reproduction.missing:
        lines += [f"**Not on this page:** {'; '.join(reproduction.gaps_in_words)}.", ""]
    if stand_in := recipe.stand_ins.get(reproduction.scale):
        lines += [f"**Stand-in:** {stand_in}", ""]
    lines += _readings_section(reproduction)
    for table in filled_tables(reproduction):
        lines += [f"## {table.table.title}", ""]
        lines += [table.table.caption, ""] if table.table.caption else []
        lines += [table.text_table().markdown()]
    lines += _claims_section(judged, dated=True)
    if recipe.notes:
        lines += ["## What differs from the paper, and why", "", *(f"* {note}" for note in recipe.notes), ""]
    lines += [f"{AGAIN} " + ", ".join(f"`{command}`" for command in commands(reproduction)), ""]
    return "\n".join(lines)


def _readings_section(reproduction: Reproduction) -> list[str]:
    """Claims in every reading of the paper, and what it says of each choice; nothing where a recipe has none."""
    grids = reading_grids(reproduction)
    if not grids:
        return []
    lines = ["## In every reading of the paper", "", *grid_lines(grids)]
    choices = choices_table(grids)
    return lines + (["What the paper leaves open:", "", choices.markdown()] if choices.rows else [])


def grid_lines(grids: Sequence[ReadingGrid]) -> list[str]:
    """A sentence for every grid, then the grids."""
    lines = [line for grid in grids for line in (grid.sentence(), "")]
    lines += [line for grid in grids for line in (f"**{grid.readings.title}**", "", grid.table().markdown())]
    return [*lines, f"{LIKELIEST} marks what the authors most likely ran.", ""]


def with_claims(page: str, judged: Sequence[Verdict]) -> str:
    """A page whose figures were not kept, with these verdicts in place of those it has."""
    blocks = re.split(rf"^(?=## |{AGAIN} )", page, flags=re.MULTILINE)
    section = "\n".join([*_claims_section(judged, dated=False), ""])
    places = [number for number, block in enumerate(blocks) if block.startswith(f"{CLAIMS}\n")]
    if places:
        blocks[places[0]] = section
    else:
        tail = [number for number, block in enumerate(blocks) if block.startswith(("## What differs", AGAIN))]
        blocks.insert(min(tail, default=len(blocks)), section)
    return "".join(blocks)


def _claims_section(judged: Sequence[Verdict], *, dated: bool) -> list[str]:
    """Lines; none if a recipe claims nothing."""
    if not judged:
        return []
    lines = [CLAIMS, "", verdict_table(judged, dated=dated).markdown()]
    if missing := claims_not_run(judged):
        lines += [f"{plural(len(missing), 'more claim')} not judged: {NOT_RUN}.", ""]
    return lines


def provenance_text(reproduction: Reproduction) -> str:
    """When and how it was measured; part by part, where parts differ in that."""
    sittings = _sittings(reproduction.current)
    if not sittings:
        return f"Scale {reproduction.scale}: nothing measured."
    figures = "mean ± standard deviation over seeds, figures of the last round"
    whole = len(sittings) == 1
    described = [
        f"{seeds_text(seeds)}, measured {provenance}"
        if whole
        else f"{', '.join(names)}: {seeds_text(seeds)}, {provenance}"
        for (seeds, provenance), names in sittings.items()
    ]
    text = f"Scale {reproduction.scale}, {'; '.join(described)}. Shown are {figures}."
    if processor := processor_seconds_per_seed(reproduction.current.values()):
        text += f" On one core a seed takes {duration(processor)} of processor time, evaluation included."
    return text


def commands(reproduction: Reproduction) -> list[str]:
    """What measures the same again: one command for all parts with the same seeds."""
    recipe, scale = reproduction.recipe, reproduction.scale
    parts = {part.name: part for part in recipe.parts(scale)}
    by_seeds: dict[tuple[int, ...] | None, list[str]] = {}
    for name, record in reproduction.current.items():
        own = default_seeds(parts[name]) in (record.seeds, None)
        by_seeds.setdefault(None if own else record.seeds, []).append(name)
    whole = [name for name, part in parts.items() if name in reproduction.current or not part.optional]
    if list(by_seeds.values()) == [whole] or not by_seeds:
        seeds = next(iter(by_seeds), None)
        return [recipe.command(scale, seeds=seeds)]
    return [recipe.limited_to(names, scale).command(scale, seeds=seeds) for seeds, names in by_seeds.items()]


def seeds_text(seeds: Sequence[int]) -> str:
    """How many, and which: 5 seeds (10–14)."""
    if not seeds:
        return "no seeds"
    first, last = seeds[0], seeds[-1]
    dense = len(seeds) > 2 and list(seeds) == list(range(first, last + 1))
    which = f"{first}–{last}" if dense else ", ".join(map(str, seeds))
    return f"{plural(len(seeds), 'seed')} ({which})"


def _sittings(parts: Mapping[str, PartRecord]) -> dict[tuple[tuple[int, ...], str], list[str]]:
    """Parts by the seeds and the provenance that they share."""
    sittings: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, record in parts.items():
        sittings.setdefault((record.seeds, record.provenance), []).append(name)
    return sittings
