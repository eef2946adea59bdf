"""Runs of methods in the arena, each in a folder of its own, and their verification.

    run_entries(["mine.py:Mine"], "lite", "arena")       arena/mine/entry.json, and the references beside it
    verify("arena/mine/entry.json", cells=4)             what was drawn, run again and compared

A run that was stopped goes on with the next federation. Verifying draws cells (a federation with a seed) and as many of
the settings that were tried, runs them again, and compares bit for bit where processor and versions are those of the
entry, and within the suite's tolerance elsewhere: of a cell, and of the mean of n cells divided by √n, since honest
differences have both signs."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from pathlib import Path
from typing import Any

from kinfed.algorithms import ALGORITHMS, Algorithm
from kinfed.arena.contest import SeededFederation, best_trial, drawn_settings, enter, refusal, tried
from kinfed.arena.entries import ArenaEntry, Code, FederationScores, TriedSetting, read_entry, this_machine
from kinfed.arena.suites import CURRENT, Suite, SuiteFederation, suite
from kinfed.core import plugins, storage
from kinfed.errors import ConfigError, DataError

Say = Callable[[str], None]
ENTRY = "entry.json"


def run_entries(
    targets: Sequence[str], subset: str = "lite", out: Path | str = "arena", *, suite_name: str = CURRENT,
    say: Say = lambda sentence: None,
) -> list[Path]:  # fmt: skip
    """Entries of these methods, names or file.py:Class, and of the references that are not in the folder yet."""
    whole = suite(suite_name)
    whole.federations(subset)  # refuses an unknown one
    methods = [_method(target) for target in targets]
    files = []
    for name, code in [*((name, None) for name in whole.references if name not in dict(methods)), *methods]:
        files.append(_run_entry(name, code, whole, subset, Path(out), say))
    return files


def _run_entry(method: str, code: Code | None, whole: Suite, subset: str, out: Path, say: Say) -> Path:
    folder = out / method
    storage.make_folder(folder)
    file, machine, about = folder / ENTRY, this_machine(), {"suite": whole.digest(subset), "subset": subset}
    made_of = {**about, "machine": machine, "code": None if code is None else code.digest}
    if file.exists():
        entry = read_entry(file)
        own = None if entry.code is None else entry.code.digest
        if {
            "suite": entry.suite_digest,
            "subset": entry.subset,
            "machine": dict(entry.machine),
            "code": own,
        } == made_of:
            return file
        raise ConfigError(
            f"{file} is of another subset, suite, version, processor or code; choose another folder (--out)"
        )
    scores: dict[str, FederationScores] = {}
    for one in whole.federations(subset):
        part = folder / f"{one.name}.json"
        record = storage.read_json(part, "a part of an entry") if part.exists() else {}
        if record.get("of") == made_of:
            scores[one.name] = storage.as_record(FederationScores, record.get("scores"), f"{part}: scores")
            continue
        scores[one.name] = enter(method, one, whole.budgets[subset])
        storage.write_json(part, {"of": made_of, "scores": asdict(scores[one.name])})
        say(f"{method} in {one.name}: {_result(scores[one.name], one)}")
    title = ALGORITHMS[method].title
    ArenaEntry(method, title, whole.name, whole.digest(subset), subset, scores, machine, code).write(file)
    for one in whole.federations(subset):
        (folder / f"{one.name}.json").unlink()
    return file


def _result(scores: FederationScores, one: SuiteFederation) -> str:
    if scores.refused:
        return f"cannot run ({scores.refused})"
    means = [cell.mean for cell in scores.cells.values()]
    known = [mean for mean in means if mean is not None]
    if len(known) < len(means):
        return "diverged"
    return f"{one.metric} {sum(known) / len(known):.4f}, {scores.processor_seconds:.1f} s of processor time"


def _method(target: str) -> tuple[str, Code | None]:
    """Name of a registered method, or of a class in a file, which is registered where it is not."""
    path, _, kind = target.partition(".py:")
    if not kind:
        if ALGORITHMS[target] and not ALGORITHMS.is_own(target):
            raise ConfigError(
                f"{target} is a plugin's method; name its file, so that its code is in the entry: file.py:Class"
            )
        return target, None
    file = Path(f"{path}.py")
    return _registered(plugins.load(file), kind, file), Code(
        f"{file.name}:{kind}", plugins.digest_of(file), file.read_text("utf-8")
    )


def _registered(module: Any, kind: str, file: Path) -> str:
    target = getattr(module, kind, None)
    if not isinstance(target, type) or not issubclass(target, Algorithm):
        raise ConfigError(f"{file} has no method {kind}: a class that is a kinfed.author.Algorithm")
    name = ALGORITHMS.name_of(target)
    if name is None:
        name = kind.lower()
        ALGORITHMS.register(name, target, title=kind)
    return name


# ---- verification ----


@dataclass(frozen=True)
class EntryCheck:
    """What was run again, and where it differs."""

    entry: ArenaEntry
    drawn: tuple[str, ...]  # cells
    tried: tuple[str, ...]  # settings
    differences: tuple[str, ...]
    exact: bool  # compared bit for bit
    all_cells: int
    all_tried: int

    @property
    def holds(self) -> bool:
        return not self.differences

    def catches(self, share: float) -> float:
        """The chance that such a draw meets one of the cells, where a share of them is forged."""
        return _meets(round(share * self.all_cells), len(self.drawn), self.all_cells)

    def catches_tried(self, share: float) -> float:
        """The same of settings: a false value on validation rows makes the best on test rows the chosen one."""
        return _meets(round(share * self.all_tried), len(self.tried), self.all_tried)


def _meets(forged: int, drawn: int, of: int) -> float:
    return 1 - comb(of - forged, drawn) / comb(of, drawn)


def verify(
    file: Path | str, cells: int = 8, *, draw: int | None = None, plugin: Path | None = None, trust_code: bool = False,
    say: Say = lambda sentence: None,
) -> EntryCheck:  # fmt: skip
    """Run a drawn part of an entry again. `draw` repeats a draw; otherwise it is a new one, which cannot be
    foreseen."""
    import numpy as np

    entry = read_entry(file)
    whole = suite(entry.suite)
    with tempfile.TemporaryDirectory() as folder:
        _admit(entry, plugin, trust_code, Path(folder))
    federations, seeds = whole.federations(entry.subset), whole.budgets[entry.subset].seeds
    everything = [(one, seed) for one in federations for seed in seeds]
    settings = [(one, trial) for one in federations for trial in entry.federations[one.name].trials]
    generator = np.random.default_rng(secrets.randbits(64) if draw is None else draw)
    exact = dict(entry.machine) == this_machine()
    drawn, tried_again, wrong, gained = [], [], _undrawn_settings(entry, whole), []
    for place in generator.permutation(len(everything))[:cells].tolist():
        one, seed = everything[place]
        name = f"{one.name}, seed {seed}"
        difference, more = _cell_differences(entry, SeededFederation(one, seed), exact, whole.tolerance)
        say(f"{name}: {difference or 'the same'}")
        drawn.append(name)
        gained.append(more)
        wrong += [f"{name}: {difference}"] if difference else []
    if gained and abs(mean := sum(gained) / len(gained)) > whole.tolerance / sqrt(len(gained)):
        wrong.append(f"the entry is {mean:+.3f} of skill from what was run, mean over {len(gained)} cells")
    for place in generator.permutation(len(settings))[:cells].tolist():
        one, trial = settings[place]
        name = f"{one.name}, {trial.settings or 'as configured'}"
        difference = _trial_difference(entry, one, trial, exact, whole)
        say(f"{name}: {difference or 'the same'}")
        tried_again.append(name)
        wrong += [f"{name}: {difference}"] if difference else []
    return EntryCheck(
        entry, tuple(drawn), tuple(tried_again), tuple(wrong), exact, len(everything), len(settings)
    )  # fmt: skip


def _admit(entry: ArenaEntry, plugin: Path | None, trust_code: bool, folder: Path) -> None:
    """Load the code of an entry: a file that the verifier names, or what is in the entry, if that is trusted."""
    if entry.code is None:
        if entry.method not in ALGORITHMS or not ALGORITHMS.is_own(entry.method):
            raise DataError(f"the entry is of {entry.method}, which is no method of kinfed's, and has no code")
        _check_title(entry)
        return
    name, _, kind = entry.code.target.partition(":")
    if plugin is None and not trust_code:
        raise ConfigError(
            f"the entry is of code that is not kinfed's ({name}, digest {entry.code.digest}), and verifying runs it. "
            "Name a file that you have read (--plugin FILE), or run what is in the entry (--trust-code)"
        )
    file = plugin
    if file is None:
        file = folder / Path(name).name
        file.write_text(entry.code.text, "utf-8")
    module = plugins.load(file)
    if plugins.digest_of(file) != entry.code.digest:
        raise DataError(
            f"{file.name} is not the code that the entry was made with: its digest is {plugins.digest_of(file)}"
        )
    if _registered(module, kind, file) != entry.method:
        raise DataError(f"{entry.code.target} is not the method {entry.method}")
    _check_title(entry)


def _check_title(entry: ArenaEntry) -> None:
    if entry.title != (title := ALGORITHMS[entry.method].title):
        raise DataError(f"the entry calls itself {entry.title!r}, and {entry.method} is {title}")


def _cell_differences(entry: ArenaEntry, place: SeededFederation, exact: bool, tolerance: float) -> tuple[str, float]:
    """How a cell differs from what the entry says, "" if it does not, and how much more skill the entry has."""
    scores = entry.federations[place.spec.name]
    if scores.refused:
        if refusal(tried(entry.method, place.spec, suite(entry.suite).budgets[entry.subset])):
            return "", 0.0
        return f"the entry says that it cannot run here ({scores.refused}), and it can", 0.0
    recorded = scores.cells[place.seed]
    if recorded.gradients > place.budget and recorded.rounds > 1:
        return f"{recorded.gradients:,} gradients, more than the {place.budget:,} of the budget", 0.0
    own = place.judged(entry.method, best_trial(scores.trials, place.spec.metric).settings)
    if own == recorded:
        return "", 0.0
    if exact:
        if (own.rounds, own.gradients) != (recorded.rounds, recorded.gradients):
            done = f"{own.rounds} rounds and {own.gradients:,} gradients"
            return f"{done}, not {recorded.rounds} and {recorded.gradients:,}", 0.0
        clients = sum(a != b for a, b in zip(own.scores or (), recorded.scores or (), strict=False))
        shown = f"{place.spec.metric} {_shown(own.mean)}, not {_shown(recorded.mean)}"
        return f"other scores of {clients} clients: {shown}", 0.0
    shown = f"{place.spec.metric} {_shown(own.mean)}, not {_shown(recorded.mean)}"
    if own.mean is None or recorded.mean is None:
        return ("" if own.mean == recorded.mean else shown), 0.0
    more = place.spec.skill(recorded.mean, place.seed) - place.spec.skill(own.mean, place.seed)
    if abs(more) <= tolerance and len(own.scores or ()) == len(recorded.scores or ()):
        return "", more
    return f"{shown}: {abs(more):.3f} of skill apart, {tolerance} allowed", more


def _undrawn_settings(entry: ArenaEntry, whole: Suite) -> list[str]:
    """The federations in which other settings were tried than the suite draws."""
    wrong = []
    for one in whole.federations(entry.subset):
        scores = entry.federations[one.name]
        drawn = list(drawn_settings(entry.method, one, whole.budgets[entry.subset]))
        if not scores.refused and [trial.settings for trial in scores.trials] != drawn:
            wrong.append(f"{one.name}: the settings that were tried are not those that the suite draws")
    return wrong


def _trial_difference(entry: ArenaEntry, one: SuiteFederation, trial: TriedSetting, exact: bool, whole: Suite) -> str:
    """How a setting that was tried in a federation differs when it is tried again; "" if it does not."""
    own = SeededFederation(one, whole.budgets[entry.subset].seeds[0]).validated(entry.method, trial.settings)
    if own == trial or (not exact and _close(own.value, trial.value, one, whole.tolerance)):
        return ""
    return f"{_shown(own.value)} on validation rows, not {_shown(trial.value)}"


def _close(own: float | None, recorded: float | None, one: SuiteFederation, tolerance: float) -> bool:
    if own is None or recorded is None:
        return own == recorded
    return abs(one.skill(own, 0) - one.skill(recorded, 0)) <= tolerance


def _shown(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.6f}"
