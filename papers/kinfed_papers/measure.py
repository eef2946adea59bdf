"""Runs the parts of a recipe and collects their measurements. Interrupted, it goes on where it stopped.

<out>/parts/<part>/         the run's folder, as `kinfed run` writes it (without checkpoints once it is done)
<out>/parts/<part>.json     what was measured; a part that has it is done, unless its settings have changed
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.errors import MissingDataError, StorageError
from kinfed.records import load_run
from kinfed.runs import Interrupted, NullObserver, Observer, run
from kinfed.version import __version__
from kinfed_papers.part_records import PartRecord, identity, part_config, record_path, settings_hash
from kinfed_papers.recipe import DIVERGED, Measurements, Recipe, Results, RunPart, Scale, Study

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reproduction:
    """What was measured of a recipe at a scale, part by part; parts may be missing, or of other days and seeds."""

    recipe: Recipe
    scale: Scale
    parts: Mapping[str, PartRecord]
    out: Path | None = None  # the folder with its runs; published figures have none

    @property
    def run_folders(self) -> dict[str, Path]:
        """Folders of the current parts that are runs."""
        if self.out is None:
            return {}
        folders = {name: self.out / "parts" / name for name in self.current}
        return {name: folder for name, folder in folders.items() if (folder / "config.json").exists()}

    @cached_property
    def missing(self) -> dict[str, str]:
        """Parts of the scale without figures that the recipe as it is now would give, and why."""
        return {name: f"the part {name} {reason}" for name, reason in self._reasons.items()}

    @property
    def gaps_in_words(self) -> list[str]:
        """`missing` for a page: parts that lack for the same reason in one sentence."""
        parts: dict[str, list[str]] = {}
        for name, reason in self._reasons.items():
            parts.setdefault(reason, []).append(name)
        return [
            f"{'the part' if len(names) == 1 else 'each of the parts'} {', '.join(names)} {reason}"
            for reason, names in parts.items()
        ]

    @cached_property
    def _reasons(self) -> dict[str, str]:
        """Why a part has no figures, to follow its name."""
        reasons = {}
        for part in self.recipe.parts(self.scale):
            record = self.parts.get(part.name)
            if record is None and part.optional:
                reasons[part.name] = "has not been measured: it runs only where its data is available"
            elif record is None:
                reasons[part.name] = "has not been measured yet"
            elif record.settings != settings_hash(part):
                reasons[part.name] = f"was measured on {record.date} with other settings than the recipe has now"
        return reasons

    @cached_property
    def gaps(self) -> dict[str, str]:
        """`missing` by the part whose methods the figures would be."""
        homes = {part.name: home(part) for part in reversed(self.recipe.parts(self.scale))}
        return {homes[name]: self.missing[name] for name in homes if name in self.missing}

    @cached_property
    def draws(self) -> dict[str, int]:
        """How often seeds were drawn, by the part whose methods the figures are."""
        draws: dict[str, int] = {}
        for part in self.recipe.parts(self.scale):
            if part.name in self.current:
                draws[home(part)] = max(draws.get(home(part), 1), self.current[part.name].draw)
        return draws

    @cached_property
    def current(self) -> dict[str, PartRecord]:
        """Records that the recipe as it is now would give, in its order."""
        parts = self.recipe.parts(self.scale)
        return {part.name: self.parts[part.name] for part in parts if part.name not in self.missing}

    @cached_property
    def results(self) -> Results:
        """Measurements of the current records."""
        by_home: dict[str, Measurements] = {}
        for part in self.recipe.parts(self.scale):
            if part.name in self.current:
                by_home.setdefault(home(part), {}).update(self.current[part.name].measured)
        return Results(by_home, self.recipe.aliases)


def home(part: RunPart | Study) -> str:
    """The part whose methods a part's figures are."""
    return part.merge_into or part.name


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
    """Every part that is not done yet; optional parts whose data are missing are left out. `settings` (where data lies,
    how many workers) go over those of all runs."""
    records: dict[str, PartRecord] = {}
    for part in recipe.parts(scale):
        path = record_path(out, part)
        config = part_config(part, seeds, settings or {}) if isinstance(part, RunPart) else None
        if not path.exists() or _has_other_seeds(path, part, config, seeds):
            storage.make_folder(path.parent)
            try:
                _measure(part, config, seeds, settings or {}, path, observer or NullObserver(), should_stop)
            except MissingDataError as error:
                if not part.optional:
                    raise
                log.warning("%s: the part %s is left out: %s", recipe.name, part.name, error)
                continue
        if storage.read_json(path)["identity"] != identity(part, config, seeds):
            raise StorageError(
                f"{path} was measured with other settings of {recipe.name}, or other seeds; choose another folder with "
                f"--out, or remove {path.parent} to measure again"
            )
        records[part.name] = PartRecord.read(path, part)
    return Reproduction(recipe, scale, records, out)


def read_reproduction(recipe: Recipe, scale: Scale, out: Path) -> Reproduction:
    """What lies in a folder, measured with whatever seeds and settings."""
    paths = {part.name: (record_path(out, part), part) for part in recipe.parts(scale)}
    records = {name: PartRecord.read(path, part) for name, (path, part) in paths.items() if path.exists()}
    return Reproduction(recipe, scale, records, out)


def done_share(
    recipe: Recipe, scale: Scale, out: Path, seeds: Sequence[int] | None, settings: Mapping[str, Any]
) -> float:
    """How much of a recipe is in finished parts, by rounds; optional parts count once they are there."""
    present = {part.name for part in recipe.parts(scale) if record_path(out, part).exists()}
    parts = (part for part in recipe.parts(scale) if part.name in present or not part.optional)
    rounds = [(part, part_rounds(part, seeds, settings)) for part in parts]
    finished = sum(count for part, count in rounds if part.name in present)
    return finished / max(sum(count for _, count in rounds), 1)


def is_done(recipe: Recipe, scale: Scale, out: Path, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> bool:
    """Whether every part has been measured, with these settings and seeds, but for optional ones that were left out."""
    for part in recipe.parts(scale):
        path = record_path(out, part)
        if part.optional and not path.exists():
            continue
        config = part_config(part, seeds, settings) if isinstance(part, RunPart) else None
        if not path.exists() or storage.read_json(path).get("identity") != identity(part, config, seeds):
            return False
    return True


def part_rounds(part: RunPart | Study, seeds: Sequence[int] | None, settings: Mapping[str, Any]) -> int:
    """Rounds of all methods and seeds, warm starts included; a study counts as one."""
    if isinstance(part, Study):
        return 1
    config = part_config(part, seeds, settings)
    return len(config.seeds) * (len(config.algorithms) * config.rounds + config.warm_start + config.pretrain)


def _measure(
    part: RunPart | Study,
    config: RunConfig | None,
    seeds: Sequence[int] | None,
    settings: Mapping[str, Any],
    path: Path,
    observer: Observer,
    should_stop: Callable[[], bool],
) -> None:
    """Measure a part and write its record."""
    at_once, worked = not path.with_suffix("").exists(), time.process_time()
    if isinstance(part, Study):
        began, chosen = time.perf_counter(), part.seeds if seeds is None else seeds
        if part.by_seed:
            measured = _measured_by_seed(part, chosen or (), settings, path.with_suffix(""), should_stop)
        else:
            measured = part.measure(chosen, settings)
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
        "identity": identity(part, config, seeds),
        "settings": settings_hash(part),
        "seconds": seconds,
        "processor_seconds": time.process_time() - worked if at_once else None,
        "provenance": _provenance(),
        "measured": measured,
    }
    storage.write_json(path, record, sort_keys=False)


def _has_other_seeds(path: Path, part: RunPart | Study, config: RunConfig | None, seeds: Sequence[int] | None) -> bool:
    """Whether work that is done by seed was measured with these settings and other seeds: what is there of the seeds
    that are asked for is kept."""
    if not (isinstance(part, Study) and part.by_seed):
        return False
    record = storage.read_json(path)
    return bool(record["settings"] == settings_hash(part) and record["identity"] != identity(part, config, seeds))


def _measured_by_seed(
    part: Study, seeds: Sequence[int], settings: Mapping[str, Any], folder: Path, should_stop: Callable[[], bool]
) -> Measurements:
    """What all seeds measured, each kept in a file of its own as soon as it is there."""
    storage.make_folder(folder)
    own, measured = settings_hash(part), Measurements()
    for seed in seeds:
        path = folder / f"seed-{seed}.json"
        record = storage.read_json(path) if path.exists() else {}
        if record.get("settings") != own:
            if should_stop():
                raise Interrupted(f"{part.name} was stopped before seed {seed}")
            record = {"settings": own, "measured": part.measure([seed], settings)}
            storage.write_json(path, record, sort_keys=False)
        for row, metrics in record["measured"].items():
            for metric, by_seed in metrics.items():
                measured.setdefault(row, {}).setdefault(metric, {}).update(
                    {int(number): value for number, value in by_seed.items()}
                )
    return measured


def _provenance() -> str:
    versions = f"kinfed {__version__}, torch {metadata.version('torch')}"
    return f"{date.today().isoformat()} with {versions} on {platform.machine()}, {os.cpu_count()} cores"


def measurements_of_summary(results: Sequence[Mapping[str, Any]]) -> Measurements:
    """{method: {"personal.accuracy": {seed: value}, ...}} with bytes (all, and up alone) and seconds per round."""
    measured: Measurements = {}
    for result in results:
        seed = int(result["seed"])
        every = result["all_clients"]  # papers judge all clients, those never called too
        groups = {"personal": every["personal"], "server": every["server"], **every["alternatives"]}
        figures = {
            f"{kind}.{metric}": value for kind, metrics in groups.items() for metric, value in (metrics or {}).items()
        }
        figures["bytes"] = (result["bytes_down"] + result["bytes_up"]) / max(result["rounds"], 1)
        figures["bytes_up"] = result["bytes_up"] / max(result["rounds"], 1)
        figures["seconds"] = result["seconds"] / max(result["rounds"], 1)
        if result.get("diverged"):
            figures[DIVERGED] = 1.0
        if "privacy" in result:
            epsilons = [value for value in result["privacy"]["epsilon"] if value is not None]
            if epsilons:
                figures["epsilon"] = max(epsilons)
        for metric, value in figures.items():
            if isinstance(value, int | float):
                measured.setdefault(result["algorithm"], {}).setdefault(metric, {})[seed] = float(value)
    return measured
