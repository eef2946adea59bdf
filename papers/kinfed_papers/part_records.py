"""What was measured of one part of a recipe: the same record beside its run and in a published benchmark.

A record notes a hash of the settings that the recipe declared for the part, without seeds. The recipe as it is now has
such a hash, too: where the two differ, what was measured is not what the recipe would measure. The hash covers what the
recipe declares and not what kinfed adds by default, so that a new setting in a later version changes no hash; the
provenance says which version measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinfed.config import NON_RESULT_SETTINGS, RunConfig, make_config
from kinfed.core import storage
from kinfed.errors import KinfedError
from kinfed.runs import read_config
from kinfed_papers.recipe import BySeed, Measurements, RunPart, Study

# A recipe needs final figures, curves, and no models; what a part says itself has the last word.
DEFAULT_SETTINGS: Mapping[str, Any] = {"eval_every": 10, "save_models": False}

PUBLISHED_DIGITS = 7  # significant ones: more than any test set can tell apart, in half the space


@dataclass(frozen=True)
class PartRecord:
    measured: Measurements
    settings: str | None  # hash of what the recipe declared (settings_hash); None: an older version did not note it
    provenance: str  # when, with what, on which kind of machine
    seconds: float
    processor_seconds: float | None  # of all cores; None if it took several sittings
    draw: int = 1  # 2: published before with these settings and other seeds, and measured again

    @property
    def seeds(self) -> tuple[int, ...]:
        values = (by_seed for metrics in self.measured.values() for by_seed in metrics.values())
        return tuple(sorted({seed for by_seed in values for seed in by_seed}))

    @property
    def date(self) -> str:
        return self.provenance.partition(" ")[0]

    def rounded(self) -> PartRecord:
        """With PUBLISHED_DIGITS of every figure, as a published record keeps them and its verdicts are judged."""
        measured = {
            row: {
                metric: {seed: float(f"{value:.{PUBLISHED_DIGITS}g}") for seed, value in by_seed.items()}
                for metric, by_seed in metrics.items()
            }
            for row, metrics in self.measured.items()
        }
        return replace(self, measured=measured)

    @classmethod
    def read(cls, path: Path, part: RunPart | Study) -> PartRecord:
        """Read a file beside a run. One of an older version notes no hash: the run's own settings tell whether they are
        those of the recipe now."""
        values = storage.read_json(path, "what was measured of a part of a recipe")
        record = cls(
            {
                row: {metric: _by_seed(by_seed) for metric, by_seed in metrics.items()}
                for row, metrics in values["measured"].items()
            },
            values.get("settings"),
            values["provenance"],
            values["seconds"],
            values.get("processor_seconds"),
        )
        if "settings" not in values and _has_present_settings(part, record, values["identity"], path):
            return replace(record, settings=settings_hash(part))
        return record


def processor_seconds_per_seed(records: Iterable[PartRecord]) -> float | None:
    """Seconds of all these parts on all cores; None if a part took several sittings."""
    total = 0.0
    for record in records:
        if record.processor_seconds is None or not record.seeds:
            return None
        total += record.processor_seconds / len(record.seeds)
    return total


def record_path(out: Path, part: RunPart | Study) -> Path:
    return out / "parts" / f"{part.name}.json"


def part_config(part: RunPart, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> RunConfig:
    merged = {**DEFAULT_SETTINGS, **part.settings, **settings}
    if seeds is not None:
        merged["seeds"] = list(seeds)
    return make_config(None, merged)


def settings_hash(part: RunPart | Study) -> str:
    """Hash of what the recipe declares for a part and its result depends on, whatever the seeds."""
    if isinstance(part, Study):
        return _hash(dict(part.identity))
    values = part_config(part, None, {}).dump()
    declared = {*DEFAULT_SETTINGS, *part.settings} - {"seeds", *NON_RESULT_SETTINGS}
    return _hash({name: values[name] for name in declared})


def identity(part: RunPart | Study, config: RunConfig | None, seeds: Sequence[int] | None) -> str:
    """Hash of all settings and the seeds: a folder is gone on with only where it is the same."""
    if config is not None:
        return config.fingerprint()
    assert isinstance(part, Study)
    own = part.seeds if seeds is None else seeds
    return _hash([dict(part.identity), None if own is None else list(own)])


def default_seeds(part: RunPart | Study) -> tuple[int, ...] | None:
    """Those that the recipe gives a part; None for a study without chance in it."""
    return part_config(part, None, {}).seeds if isinstance(part, RunPart) else part.seeds


def _has_present_settings(part: RunPart | Study, record: PartRecord, noted: str, path: Path) -> bool:
    if isinstance(part, Study):
        return noted in (identity(part, None, None), identity(part, None, record.seeds))
    try:
        measured = read_config(path.with_suffix(""))
        return measured.fingerprint() == part_config(part, measured.seeds, {}).fingerprint()
    except KinfedError:  # a folder without its run, or settings that this version does not know
        return noted == part_config(part, record.seeds, {}).fingerprint()


def _by_seed(values: Mapping[str, float | None]) -> BySeed:
    """Keys of JSON are strings, and what is not finite is null."""
    return {int(seed): math.nan if value is None else value for seed, value in values.items()}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
