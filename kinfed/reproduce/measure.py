"""Runs the parts of a recipe and collects their measurements. Interrupted, it goes on where it stopped.

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
from kinfed.reproduce.recipe import BySeed, Measurements, Recipe, Results, RunPart, Scale, Study
from kinfed.runs.config import RunConfig
from kinfed.runs.config_reading import make_config
from kinfed.runs.experiment import run
from kinfed.runs.observer import NullObserver, Observer
from kinfed.runs.reader import load_run
from kinfed.version import __version__

# A recipe needs final figures, curves, and no models; what a part says itself has the last word.
DEFAULT_SETTINGS: Mapping[str, Any] = {"eval_every": 10, "save_models": False}


@dataclass(frozen=True)
class Reproduction:
    """A recipe that was run at a scale."""

    recipe: Recipe
    scale: Scale
    out: Path
    results: Results
    seconds: float  # of all parts, also those of earlier sittings
    processor_seconds: float | None  # of all parts and cores; None where a part took several sittings
    seeds: tuple[int, ...]
    provenance: str  # when, with what, on which kind of machine; of the part measured last

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
    parts: dict[str, Measurements] = {}
    seconds, provenance = 0.0, ""
    processor: float | None = 0.0
    for part in recipe.parts(scale):
        path = _record_path(out, part)
        config = part_config(part, seeds, settings or {}) if isinstance(part, RunPart) else None
        identity = _identity(part, config, seeds)
        if not path.exists():
            storage.make_folder(path.parent)
            _measure(part, config, seeds, path, identity, observer or NullObserver(), should_stop)
        record = storage.read_json(path)
        if record["identity"] != identity:
            raise StorageError(
                f"{path} was measured with other settings of {recipe.name}; choose another folder with --out, or "
                f"remove {path.parent} to measure again"
            )
        home = (part.merge_into if isinstance(part, RunPart) else None) or part.name
        rows = parts.setdefault(home, {})
        for row, metrics in record["measured"].items():
            rows[row] = {metric: _by_seed(values) for metric, values in metrics.items()}
        seconds, provenance = seconds + record["seconds"], max(provenance, record["provenance"])
        worked = record.get("processor_seconds")
        processor = None if processor is None or worked is None else processor + worked
    measured_seeds = {
        seed for rows in parts.values() for metrics in rows.values() for by_seed in metrics.values() for seed in by_seed
    }
    results = Results(parts, recipe.aliases)
    return Reproduction(recipe, scale, out, results, seconds, processor, tuple(sorted(measured_seeds)), provenance)


def done_share(
    recipe: Recipe, scale: Scale, out: Path, seeds: Sequence[int] | None, settings: Mapping[str, Any]
) -> float:
    """How much of a recipe is in finished parts, by rounds."""
    rounds = [(part, part_rounds(part, seeds, settings)) for part in recipe.parts(scale)]
    finished = sum(count for part, count in rounds if _record_path(out, part).exists())
    return finished / max(sum(count for _, count in rounds), 1)


def is_done(recipe: Recipe, scale: Scale, out: Path, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> bool:
    """Whether every part has been measured, with these settings."""
    for part in recipe.parts(scale):
        path = _record_path(out, part)
        if not path.exists():
            return False
        config = part_config(part, seeds, settings) if isinstance(part, RunPart) else None
        if storage.read_json(path)["identity"] != _identity(part, config, seeds):
            return False
    return True


def part_config(part: RunPart, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> RunConfig:
    merged = {**DEFAULT_SETTINGS, **part.settings, **settings}
    if seeds is not None:
        merged["seeds"] = list(seeds)
    return make_config(None, merged)


def part_rounds(part: RunPart | Study, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> int:
    """Rounds of all methods and seeds, warm starts included; a study counts as one."""
    if isinstance(part, Study):
        return 1
    config = part_config(part, seeds, settings)
    return len(config.seeds) * (len(config.algorithms) * config.rounds + config.warm_start + config.pretrain)


def _record_path(out: Path, part: RunPart | Study) -> Path:
    return out / "parts" / f"{part.name}.json"


def _by_seed(values: Mapping[str, float]) -> BySeed:
    """Keys of JSON are strings."""
    return {int(seed): value for seed, value in values.items()}


def _identity(part: RunPart | Study, config: RunConfig | None, seeds: Sequence[int] | None) -> str:
    if config is not None:
        return config.fingerprint()
    assert isinstance(part, Study)
    text = json.dumps([dict(part.identity), None if seeds is None else list(seeds)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _measure(
    part: RunPart | Study,
    config: RunConfig | None,
    seeds: Sequence[int] | None,
    path: Path,
    identity: str,
    observer: Observer,
    should_stop: Callable[[], bool],
) -> None:
    """Measure a part and write its record."""
    at_once, worked = not path.with_suffix("").exists(), time.process_time()
    if isinstance(part, Study):
        began = time.perf_counter()
        measured = part.measure(seeds)
        seconds = time.perf_counter() - began
    else:
        folder = path.with_suffix("")
        run(config, out=folder, resume=True, observer=observer, should_stop=should_stop)
        summary = storage.read_json(folder / "summary.json")["results"]
        measured = measurements_of_summary(summary)
        if part.extra_metrics is not None:
            for row, metrics in part.extra_metrics(load_run(folder, part.name)).items():
                measured.setdefault(row, {}).update(metrics)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # done, and by far the largest files
        seconds = sum(float(result["seconds"]) for result in summary)
    record = {
        "identity": identity,
        "seconds": seconds,
        "processor_seconds": time.process_time() - worked if at_once else None,
        "provenance": _provenance(),
        "measured": measured,
    }
    storage.write_json(path, record, sort_keys=False)


def _provenance() -> str:
    versions = f"kinfed {__version__}, torch {metadata.version('torch')}"
    return f"{date.today().isoformat()} with {versions} on {platform.machine()}, {os.cpu_count()} cores"


def measurements_of_summary(results: Sequence[Mapping[str, Any]]) -> Measurements:
    """{method: {"personal.accuracy": {seed: value}, ...}} with bytes per round and seconds per round."""
    measured: Measurements = {}
    for result in results:
        seed = int(result["seed"])
        every = result["all_clients"]  # papers judge all clients, those never called too
        groups = {"personal": every["personal"], "server": every["server"], **every["alternatives"]}
        figures = {
            f"{kind}.{metric}": value for kind, metrics in groups.items() for metric, value in (metrics or {}).items()
        }
        figures["bytes"] = (result["bytes_down"] + result["bytes_up"]) / max(result["rounds"], 1)
        figures["seconds"] = result["seconds"] / max(result["rounds"], 1)
        if "privacy" in result:
            epsilons = [value for value in result["privacy"]["epsilon"] if value is not None]
            if epsilons:
                figures["epsilon"] = max(epsilons)
        for metric, value in figures.items():
            if isinstance(value, int | float):
                measured.setdefault(result["algorithm"], {}).setdefault(metric, {})[seed] = float(value)
    return measured
