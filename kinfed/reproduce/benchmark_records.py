"""What the index of a benchmark knows of reproductions.

A record is what the index knows of a reproduction. Published pages have their records beside them
(`verdicts/<recipe>.json`, at the scale paper `verdicts/<recipe>-paper.json`), so that publishing one recipe leaves the
others in the index as they were. A claim that was judged at several scales counts once, at the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.report.statistics import Interval
from kinfed.reproduce.judge import Verdict, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe import SCALES, Scale

RECORDS = "verdicts"  # folder of the records beside published pages


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
