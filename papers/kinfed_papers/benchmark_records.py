"""What a published benchmark keeps of reproductions, beside their pages.

verdicts/<page>.json    a record: the verdicts, and of every part when, how and with which seeds and settings it was
                        measured
measured/<page>.csv     its figures, every metric of every method by seed, so that verdicts and pages can be made again

Records are written in format 6. Older ones are read: in format 5 verdicts had other words (OLDER_WORDS); in format 4
other data were noted of a record, not of its claims, and draws of seeds were not counted; verdicts of format 3 know
neither limits nor the confidence of their interval, those of format 2 do not say which claims are main ones and which
rival decides, and format 1 had verdicts and no figures: these verdicts stand until the parts behind them are measured
again. A claim that was judged at several scales counts once, at the largest."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinfed.analysis import MOST_SEEDS, Interval, student_quantile
from kinfed.core import storage, unescape_formula
from kinfed.errors import StorageError
from kinfed.report import csv_text
from kinfed_papers.judge import verdicts
from kinfed_papers.measure import Reproduction
from kinfed_papers.part_records import PartRecord, processor_seconds_per_seed, settings_hash
from kinfed_papers.recipe import SCALES, Measurements, Recipe, Scale
from kinfed_papers.verdict import DECIDED, Status, Verdict, joint_confidence, margin_text

FORMAT = 6
OLDER_WORDS: Mapping[str, Status] = {
    "reproduced": "holds", "contradicted": "does not hold", "tied": "exact tie", "undecided": "unknown",
    "cannot be tested here": "not testable",
}  # fmt: skip
RECORDS, MEASURED = "verdicts", "measured"  # folders beside published pages
NEW_CLAIM = "not measured yet: this claim, or its wording, is newer than the page, whose figures were not saved"
KEYS = ("part", "method", "metric")  # first columns of measured/<page>.csv; then one for every seed


@dataclass(frozen=True)
class UnkeptFigures:
    """What verdicts rest on whose figures were not kept (Verdict.earlier)."""

    seeds: int
    provenance: str

    @property
    def date(self) -> str:
        return self.provenance.partition(" ")[0]


@dataclass(frozen=True)
class BenchmarkRecord:
    recipe: str
    title: str
    paper: str
    reproduces: str
    scale: Scale
    verdicts: tuple[Verdict, ...]
    parts: Mapping[str, PartRecord] = field(default_factory=dict)
    unkept: UnkeptFigures | None = None

    @classmethod
    def of(cls, reproduction: Reproduction, published: BenchmarkRecord | None = None) -> BenchmarkRecord:
        """Judged by the recipe as it is; what its parts cannot tell, by published verdicts without figures."""
        recipe, scale = reproduction.recipe, reproduction.scale
        judged = verdicts(recipe, reproduction.results, scale, reproduction.gaps, reproduction.draws)
        unkept = None if published is None else published.unkept
        if published is not None and unkept is not None:
            judged = _completed(judged, published.verdicts, new_claim="" if reproduction.parts else NEW_CLAIM)
            if not any(verdict.earlier for verdict in judged):
                unkept = None  # all of it was measured again
        return cls(
            recipe.name,
            recipe.title,
            recipe.paper.name,
            recipe.reproduces,
            scale,
            tuple(judged),
            reproduction.parts,
            unkept,
        )

    @property
    def name(self) -> str:
        return page_name(self.recipe, self.scale)

    @property
    def provenances(self) -> tuple[str, ...]:
        """When and with what its parts were measured, in order."""
        return tuple(sorted({source.provenance for source in self._sources}))

    @property
    def dates(self) -> tuple[str, ...]:
        return tuple(sorted({source.date for source in self._sources}))

    @property
    def seed_counts(self) -> tuple[int, ...]:
        """How many seeds its parts have, from the fewest to the most."""
        parts = {len(part.seeds) for part in self.parts.values()}
        return tuple(sorted(parts | ({self.unkept.seeds} if self.unkept is not None else set())))

    @property
    def processor_seconds_per_seed(self) -> float | None:
        """None if figures were not kept, or a part took several sittings."""
        return processor_seconds_per_seed(self.parts.values()) if self.parts and self.unkept is None else None

    @property
    def _sources(self) -> list[PartRecord | UnkeptFigures]:
        """What its verdicts rest on."""
        return [*self.parts.values(), *([] if self.unkept is None else [self.unkept])]

    def address(self, page: str) -> str:
        """`page` with {recipe}, {scale} and {page}, the name of its published page."""
        return page.format(recipe=self.recipe, scale=self.scale, page=self.name)

    @classmethod
    def read(cls, path: Path) -> BenchmarkRecord:
        values = storage.read_json(path, "the record of a published recipe")
        version = values.pop("format", 1)
        if version > FORMAT:
            raise StorageError(
                f"{path} has format {version}, and this kinfed reads formats up to {FORMAT}: upgrade kinfed"
            )
        judged = _read_verdicts(values.pop("verdicts"))
        if version < 4:
            judged = tuple(map(_for_all_comparisons, judged))
        if values.pop("other_data", False):  # until format 4 of a whole record
            judged = tuple(replace(verdict, other_data=True) for verdict in judged)
        if version == 1:
            source = UnkeptFigures(values.pop("seeds"), values.pop("provenance"))
            return cls(**values, verdicts=tuple(replace(v, earlier=source.date) for v in judged), unkept=source)
        figures = _read_measured(path.parent.parent / MEASURED / f"{path.stem}.csv") if values["parts"] else {}
        parts = {
            name: _read_part(path, name, facts, figures.get(name, {})) for name, facts in values.pop("parts").items()
        }
        described = values.pop("unkept")
        unkept = None if described is None else UnkeptFigures(**described)
        return cls(**values, verdicts=judged, parts=parts, unkept=unkept)

    def write(self, folder: Path) -> None:
        for name in (RECORDS, MEASURED):
            storage.make_folder(folder / name)
        if self.parts:
            text = _measured_text({name: part.measured for name, part in self.parts.items()})
            storage.write_atomically(folder / MEASURED / f"{self.name}.csv", text.encode())
        values = {
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("recipe", "title", "paper", "reproduces", "scale")},
            "parts": {
                name: {
                    "settings": part.settings,
                    "seeds": part.seeds,
                    "provenance": part.provenance,
                    "seconds": part.seconds,
                    "processor_seconds": part.processor_seconds,
                    "draw": part.draw,
                }
                for name, part in self.parts.items()
            },
            "unkept": None if self.unkept is None else asdict(self.unkept),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }
        storage.write_json(folder / RECORDS / f"{self.name}.json", values, sort_keys=False)


def joined_parts(
    recipe: Recipe, scale: Scale, published: Mapping[str, PartRecord], measured: Mapping[str, PartRecord]
) -> dict[str, PartRecord]:
    """Choose a record for every part of the recipe: what was measured with its present settings before what was not,
    then what has more than one seed, then the newer, then what is to be published now. Other seeds in place of
    published ones are another draw."""
    parts = {}
    for part in recipe.parts(scale):
        present = settings_hash(part)
        records = [group[part.name] for group in (published, measured) if part.name in group]
        if records:  # of equals, `max` takes the first
            best = max(reversed(records), key=lambda record: _rank(record, present))
            before = published.get(part.name, best)
            if before.settings == best.settings:
                was_evidence = len(before.seeds) > 1
                best = replace(best, draw=before.draw + (was_evidence and best.seeds != before.seeds))
            parts[part.name] = best
    return parts


def _rank(record: PartRecord, present: str) -> tuple[bool, bool, str]:
    return record.settings == present, len(record.seeds) > 1, record.date


def page_name(recipe: str, scale: Scale) -> str:
    """Name of a published page and its record: a recipe can be published at several scales."""
    return recipe if scale == "small" else f"{recipe}-{scale}"


def read_records(folder: Path, order: Iterable[str]) -> list[BenchmarkRecord]:
    """Records of a folder of published pages: recipes in this order first, then the rest by name, the scales of
    each."""
    records = [BenchmarkRecord.read(path) for path in sorted((folder / RECORDS).glob("*.json"))]
    names = {record.recipe for record in records}
    ordered = dict.fromkeys([*(name for name in order if name in names), *sorted(names)])
    return [record for name in ordered for record in records if record.recipe == name]


def count_once(records: Sequence[BenchmarkRecord]) -> list[BenchmarkRecord]:
    """Every claim once, in the record of the largest scale that judged it."""
    names = dict.fromkeys(record.recipe for record in records)
    return [
        record for name in names for record in largest_scales([record for record in records if record.recipe == name])
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
    candidates = (
        replace(record, verdicts=tuple(verdict for verdict in record.verdicts if home[verdict.claim] is record))
        for record in ranked
    )
    return [record for record in candidates if record.verdicts]


def _completed(judged: Sequence[Verdict], published: Sequence[Verdict], new_claim: str) -> list[Verdict]:
    """Verdicts with published ones on the same claims, whose figures were not kept, if there is none. Place,
    source and weight are the recipe's. `new_claim`: why a claim that was not published has none."""
    stands = (*DECIDED, "not judged") if new_claim else DECIDED  # a page without figures keeps its reasons, too
    earlier = {verdict.claim: verdict for verdict in published if verdict.earlier}
    completed = []
    for verdict in judged:
        before = earlier.get(verdict.claim)
        if verdict.status == "not judged" and before is not None and before.status in stands:
            verdict = replace(
                before, source=verdict.source, place=verdict.place, main=verdict.main,
                limit=verdict.limit, at_most=verdict.at_most, other_data=verdict.other_data,
            )  # fmt: skip
            if verdict.limit or verdict.at_most:  # which its sentence may not know
                verdict = replace(verdict, sentence=_sentence(verdict))
        elif verdict.status == "not judged" and before is None and new_claim:
            verdict = replace(verdict, sentence=new_claim)
        completed.append(verdict)
    return completed


def _sentence(verdict: Verdict) -> str:
    """Sentence of a verdict without figures, by the comparison that decides."""
    rival = f" against {verdict.rival}" if verdict.rival else ""
    outlook = f"; {verdict.outlook}" if verdict.outlook else ""
    seeds = "" if verdict.margin is None else f" ({verdict.margin.n} seeds, 95 % interval)"
    return f"{margin_text(verdict)}{rival}{outlook}{seeds}"


def _read_part(path: Path, name: str, facts: Mapping[str, Any], measured: Measurements) -> PartRecord:
    part = PartRecord(measured=measured, **{key: value for key, value in facts.items() if key != "seeds"})
    if list(part.seeds) != list(facts["seeds"]):
        raise StorageError(
            f"{path} has seeds {list(facts['seeds'])} of the part {name}, and {MEASURED}/{path.stem}.csv has figures "
            f"of {list(part.seeds)}: restore both files from one version"
        )
    return part


def _read_verdicts(entries: Sequence[Mapping[str, Any]]) -> tuple[Verdict, ...]:
    margins = (None if entry["margin"] is None else Interval(**entry["margin"]) for entry in entries)
    read = (Verdict(**{**entry, "margin": margin}) for entry, margin in zip(entries, margins, strict=True))
    return tuple(
        replace(
            verdict,
            status=OLDER_WORDS.get(verdict.status, verdict.status),
            sentence=_with_present_outlook(verdict.sentence.removeprefix("yes, ").removeprefix("no, ")),
            outlook=_with_present_outlook(verdict.outlook),
        )
        for verdict in read
    )


def _with_present_outlook(text: str) -> str:
    """Older verdicts looked for more than MOST_SEEDS seeds."""

    def shown(match: re.Match[str]) -> str:
        return match[0] if int(match[1].replace(",", "")) <= MOST_SEEDS else f"not even {MOST_SEEDS} seeds would decide"

    return re.sub(r"(?:about|not even) ([\d,]+) seeds would decide", shown, text)


def _for_all_comparisons(verdict: Verdict) -> Verdict:
    """Older formats let one of several comparisons contradict a claim with an interval of 95 % for itself alone. With
    95 % for all of them together it is wider, and the claim may be open."""
    margin = verdict.margin
    if verdict.status != "does not hold" or verdict.margins < 2 or margin is None:
        return verdict
    joint = joint_confidence(verdict.confidence, verdict.margins)
    widening = float(student_quantile(margin.n - 1, joint) / student_quantile(margin.n - 1, verdict.confidence))
    reach = widening * (margin.high - margin.mean)
    wide = replace(margin, low=margin.mean - reach, high=margin.mean + reach)
    status: Status = "does not hold" if wide.high < 0 else "unknown"
    return replace(verdict, margin=wide, confidence=joint, status=status)


def _measured_text(parts: Mapping[str, Measurements]) -> str:
    series = {
        (part, row, metric): by_seed
        for part, rows in parts.items()
        for row, metrics in rows.items()
        for metric, by_seed in metrics.items()
    }
    seeds = sorted({seed for by_seed in series.values() for seed in by_seed})
    lines = ([*key, *(by_seed.get(seed) for seed in seeds)] for key, by_seed in series.items())
    return csv_text([*KEYS, *map(str, seeds)], lines)


def _read_measured(path: Path) -> dict[str, Measurements]:
    if not path.exists():
        raise StorageError(f"{path} does not exist; it holds the figures of a published record: restore it")
    with storage.storage_errors("read", path):
        head, *lines = csv.reader(io.StringIO(path.read_text("utf-8")))
    seeds = [int(seed) for seed in head[len(KEYS) :]]
    parts: dict[str, Measurements] = {}
    for line in lines:
        part, row, metric = map(unescape_formula, line[: len(KEYS)])
        values = line[len(KEYS) :]
        by_seed = {seed: float(value) for seed, value in zip(seeds, values, strict=True) if value}
        parts.setdefault(part, {}).setdefault(row, {})[metric] = by_seed
    return parts
