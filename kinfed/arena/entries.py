"""Entries of the arena: one method's scores by federation, seed and client, to be checked and run again by anyone.

    entry = read_entry("entry.json")          refused where it is damaged, incomplete, or contradicts itself

Nothing that a reader concludes is in the file: pages and boards compute it from the scores."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kinfed.arena.suites import Suite, suite
from kinfed.core import storage
from kinfed.engine import METRICS
from kinfed.errors import DataError

_FORMAT, _VERSION = "kinfed-arena-entry", 1


@dataclass(frozen=True)
class TriedSetting:
    """Settings that were tried on validation rows."""

    settings: dict[str, Any]  # none: as configured
    value: float | None  # of the federation's metric; none: refused or diverged
    rounds: int
    gradients: int
    reason: str = ""  # why there is no value


@dataclass(frozen=True)
class CellScores:
    """One federation under one seed."""

    rounds: int
    gradients: int  # as the engine counted them
    scores: tuple[float | None, ...] | None  # by client; none of all: diverged; of one: undefined on its test rows

    @property
    def mean(self) -> float | None:
        known = [score for score in self.scores or () if score is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class FederationScores:
    """A method in one federation."""

    trials: tuple[TriedSetting, ...] = ()
    cells: Mapping[int, CellScores] = field(default_factory=dict)  # by seed
    refused: str = ""  # why the method cannot run here
    processor_seconds: float = 0.0


@dataclass(frozen=True)
class Code:
    """The code of a method that is not kinfed's own."""

    target: str  # file.py:Class
    digest: str  # of the file, and of those beside it that it imports
    text: str  # of the file


@dataclass(frozen=True)
class ArenaEntry:
    """A method in a subset of a suite."""

    method: str
    title: str
    suite: str
    suite_digest: str
    subset: str
    federations: Mapping[str, FederationScores]
    machine: Mapping[str, str]
    code: Code | None = None

    @property
    def processor_seconds(self) -> float:
        return sum(one.processor_seconds for one in self.federations.values())

    def to_json(self) -> dict[str, Any]:
        values = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return {**values, "digest": self.digest}

    @property
    def digest(self) -> str:
        """Digest of everything but times."""
        timeless = {name: replace(one, processor_seconds=0.0) for name, one in self.federations.items()}
        content = storage.to_json(storage.plain(asdict(replace(self, federations=timeless))))
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def write(self, file: Path) -> None:
        storage.write_json(file, self.to_json())


def read_entry(file: Path | str) -> ArenaEntry:
    """The entry in a file, if it is whole and agrees with its suite and itself."""
    record = storage.read_json(Path(file), "the entry of a method")
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise DataError(f"{file} is no entry of this version of the arena; it says {record.get('format')!r}")
    entry: ArenaEntry = storage.as_record(ArenaEntry, record, f"{file} is no entry")
    if entry.digest != record.get("digest"):
        raise DataError(
            f"{file} was changed after it was made: its digest is {entry.digest}, not {record.get('digest')}"
        )
    if contradiction := contradictions(entry, suite(entry.suite)):
        raise DataError(f"{file} is no entry that stands: {contradiction}")
    return entry


def contradictions(entry: ArenaEntry, whole: Suite) -> str:
    """The first thing that an honest entry cannot have, as far as can be told without running anything; "" if none."""
    federations, budget = whole.federations(entry.subset), whole.budgets[entry.subset]
    if entry.suite_digest != whole.digest(entry.subset):
        return f"it was made with another {whole.name} (digest {entry.suite_digest}, not {whole.digest(entry.subset)})"
    if set(entry.federations) != {one.name for one in federations}:
        return f"{entry.subset} has the federations {', '.join(one.name for one in federations)}, and it has others"
    for one in federations:
        scores = entry.federations[one.name]
        if scores.refused:
            if scores.cells:
                return f"in {one.name} it is refused and has scores"
            continue
        if tuple(scores.cells) != budget.seeds:
            return f"in {one.name} it has seeds {', '.join(map(str, scores.cells))}; all of {list(budget.seeds)} count"
        if not 1 <= len(scores.trials) <= budget.trials or scores.trials[0].settings:
            return f"in {one.name} it was tuned with {len(scores.trials)} trials; {budget.trials} are allowed"
        # kinfed's own without gradients (sums, trees) end by themselves; what code of others counts is not known here.
        counted = [cell for cell in scores.cells.values() if cell.gradients or entry.code is not None]
        if any(cell.rounds < 1 for cell in scores.cells.values()) or any(cell.rounds > one.rounds for cell in counted):
            return f"in {one.name} it has more rounds than {one.rounds}"
        of_clients = [score for cell in scores.cells.values() for score in cell.scores or () if score is not None]
        share = METRICS.named(one.metric).percent
        if any(not math.isfinite(score) or (share and not 0 <= score <= 1) for score in of_clients):
            return f"in {one.name} it has scores that no client can have of {one.metric}"
    return ""


def this_machine() -> dict[str, str]:
    """What decides the bits of results."""
    packages = [name for name in ("kinfed", "torch", "numpy", "numba") if find_spec(name) is not None]
    return {"processor": processor_name(), **{name: version(name) for name in packages}}


def processor_name() -> str:
    """The processor, as far as it decides bits: what the system calls it, with family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"
