"""Runs the parts of a recipe and collects what they found. Interrupted, it goes on where it stopped.

<out>/parts/<part>/         the run's folder, as `kinfed run` writes it (without checkpoints once it is done)
<out>/parts/<part>.json     what was measured; a part that has it is done, unless its settings have changed
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.errors import StorageError
from kinfed.reproduce.recipe import Found, Measured, Part, Recipe, Scale, Study
from kinfed.runs.config import RunConfig, make_config
from kinfed.runs.experiment import run
from kinfed.runs.observer import NullObserver, Observer

# A recipe needs final figures, curves, and no models; what a part says itself has the last word.
USUAL: Mapping[str, Any] = {"eval_every": 10, "save_models": False}


@dataclass(frozen=True)
class Reproduction:
    """A recipe that was run at a scale."""

    recipe: Recipe
    scale: Scale
    out: Path
    found: Found
    seconds: float  # of all parts, also those of earlier sittings
    seeds: tuple[int, ...]
    made: str  # when, with what, on which kind of machine; of the part measured last

    @property
    def run_folders(self) -> dict[str, Path]:
        folders = {part.name: self.out / "parts" / part.name for part in self.recipe.parts(self.scale)}
        return {name: folder for name, folder in folders.items() if (folder / "config.json").exists()}


def reproduce(
    recipe: Recipe,
    scale: Scale,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Reproduction:
    """Every part that is not done yet. `settings` (where data lies, how many workers) go over those of all runs."""
    found: dict[str, Measured] = {}
    seconds, made = 0.0, ""
    for part in recipe.parts(scale):
        record = out / "parts" / f"{part.name}.json"
        config = config_of(part, seeds, settings or {}) if isinstance(part, Part) else None
        identity = _identity(part, config, seeds)
        known = storage.read_json(record) if record.exists() else None
        if known is not None and known["identity"] != identity:
            raise StorageError(
                f"{record} was measured with other settings of {recipe.name}; choose another folder with --out, or "
                f"remove {record.parent} to measure again"
            )
        if known is None:
            storage.make_folder(record.parent)
            known = _measure(part, config, seeds, record, identity, observer or NullObserver(), should_stop)
        home = (part.under if isinstance(part, Part) else None) or part.name
        found.setdefault(home, {}).update(
            {
                row: {
                    metric: {int(seed): value for seed, value in by_seed.items()} for metric, by_seed in metrics.items()
                }
                for row, metrics in known["measured"].items()
            }
        )
        seconds, made = seconds + known["seconds"], max(made, known["made"])
    every = {seed for rows in found.values() for metrics in rows.values() for by in metrics.values() for seed in by}
    return Reproduction(recipe, scale, out, Found(found, recipe.aliases), seconds, tuple(sorted(every)), made)


def is_done(recipe: Recipe, scale: Scale, out: Path, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> bool:
    """Whether every part has been measured, with these settings."""
    for part in recipe.parts(scale):
        record = out / "parts" / f"{part.name}.json"
        if not record.exists():
            return False
        config = config_of(part, seeds, settings) if isinstance(part, Part) else None
        if storage.read_json(record)["identity"] != _identity(part, config, seeds):
            return False
    return True


def config_of(part: Part, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> RunConfig:
    chosen = {**USUAL, **part.settings, **settings}
    if seeds is not None:
        chosen["seeds"] = list(seeds)
    return make_config(None, chosen)


def _identity(part: Part | Study, config: RunConfig | None, seeds: Sequence[int] | None) -> str:
    if config is not None:
        return config.fingerprint()
    assert isinstance(part, Study)
    text = json.dumps([dict(part.identity), None if seeds is None else list(seeds)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measure(
    part: Part | Study, config: RunConfig | None, seeds: Sequence[int] | None, record: Path, identity: str,
    observer: Observer, should_stop: Callable[[], bool],
) -> dict[str, Any]:  # fmt: skip
    began = time.perf_counter()
    if isinstance(part, Study):
        measured, seconds = part.measure(seeds), None
    else:
        folder = record.with_suffix("")
        run(config, out=folder, resume=True, observer=observer, should_stop=should_stop)
        summary = storage.read_json(folder / "summary.json")["results"]
        measured = of_summary(summary)
        if part.also is not None:
            for row, metrics in part.also(folder).items():
                measured.setdefault(row, {}).update(metrics)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # done, and by far the largest files
        seconds = sum(float(result["seconds"]) for result in summary)
    known = {
        "identity": identity,
        "seconds": time.perf_counter() - began if seconds is None else seconds,
        "made": _here_and_now(),
        "measured": measured,
    }
    storage.write_json(record, known, sort_keys=False)
    known_again: dict[str, Any] = storage.read_json(record)  # as later sittings see it
    return known_again


def _here_and_now() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("kinfed", "torch"))
    return f"{date.today().isoformat()} with {versions} on {platform.machine()}, {os.cpu_count()} cores"


def of_summary(results: Sequence[Mapping[str, Any]]) -> Measured:
    """{method: {"personal.accuracy": {seed: value}, ...}} with bytes per round and seconds per round."""
    measured: Measured = {}
    for result in results:
        seed = int(result["seed"])
        groups = {"personal": result["personal"], "server": result["server"], **result["alternatives"]}
        figures = {
            f"{kind}.{metric}": value for kind, metrics in groups.items() for metric, value in (metrics or {}).items()
        }
        figures["bytes"] = (result["bytes_down"] + result["bytes_up"]) / max(result["rounds"], 1)
        figures["seconds"] = result["seconds"] / max(result["rounds"], 1)
        if "privacy" in result:
            spent = [value for value in result["privacy"]["epsilon"] if value is not None]
            if spent:
                figures["epsilon"] = max(spent)
        for metric, value in figures.items():
            if isinstance(value, int | float):
                measured.setdefault(result["algorithm"], {}).setdefault(metric, {})[seed] = float(value)
    return measured
