"""Reads all results of run folders into plain dataclasses, for reports and recipes.

A folder is read as far as it goes: a run that was killed, or is still running, gives what it has written so far
together with notes that say what is missing. Only a folder that is no run at all, or whose lines lack the fields
that give them meaning, is an error. Single files are read by kinfed.records.run_files.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kinfed.core import storage, unescape_formula
from kinfed.data import Description
from kinfed.errors import StorageError
from kinfed.records.baseline_record import Baseline
from kinfed.records.curves import Curves
from kinfed.records.headline import has_diverged
from kinfed.records.run_files import RunFiles, RunFolderError

Kind = Literal["personal", "server"]
KINDS: tuple[Kind, Kind] = ("personal", "server")
Metrics = dict[str, float]
Key = tuple[str, int]  # algorithm, seed


@dataclass(frozen=True)
class JournalRound:
    """One line of rounds.jsonl. Bytes are those of this round, over all its clients."""

    number: int
    seconds: float
    active: int
    dropped: int
    bytes_down: float
    bytes_up: float
    metrics: dict[Kind, Metrics]  # only the kinds evaluated in this round
    method: dict[str, Any]  # the method's own figures
    took_part: int | None = None  # clients that have taken part so far, whom the metrics are of
    all_clients: dict[Kind, Metrics] = field(default_factory=dict)  # the metrics of all clients
    clock: float | None = None  # simulated seconds since the start, where the run has a clock

    @property
    def bytes(self) -> float:
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class ClientResult:
    """One line of clients.csv: one client after the final round."""

    client: str  # its name
    n_train: int
    n_test: int
    values: dict[str, float]  # e.g. personal_accuracy; an empty cell is absent here

    @property
    def took_part(self) -> bool:
        """In some round; what is compared is of such clients."""
        return self.values.get("took_part") != 0


@dataclass(frozen=True)
class Final:
    """Where one trial stands: after its last evaluated round, which is the final one if the trial is finished."""

    round: int  # its number; a warm start shifts numbers, so it may exceed `rounds`
    rounds: int  # how many were run
    metrics: dict[Kind, Metrics]
    bytes_down: float
    bytes_up: float
    seconds: float
    took_part: int | None = None  # clients that the metrics are of; None: not written down
    all_clients: dict[Kind, Metrics] = field(default_factory=dict)  # the metrics of all clients
    diverged: bool = False

    @property
    def bytes(self) -> float:
        return self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class Trial:
    """One algorithm with one seed."""

    algorithm: str
    seed: int
    rounds: tuple[JournalRound, ...]  # ascending, each number once
    clients: tuple[ClientResult, ...]
    final: Final
    finished: bool

    @property
    def participants(self) -> tuple[ClientResult, ...]:
        """The clients that took part in a round."""
        return tuple(client for client in self.clients if client.took_part)


@dataclass(frozen=True)
class Run:
    path: Path
    label: str
    config: dict[str, Any]  # the resolved configuration
    version: str
    versions: dict[str, Any]
    fingerprint: str
    trials: tuple[Trial, ...]
    federations: dict[int, Description]  # who holds what, by seed
    notes: tuple[str, ...] = ()
    baselines: dict[int, Baseline] = field(default_factory=dict)  # what clients reach without a model, by seed
    curves: dict[Key, Curves] = field(default_factory=dict)  # ROC and calibration of clients, by algorithm and seed
    parameters: int | None = None  # of a model

    def __repr__(self) -> str:
        seeds = len({trial.seed for trial in self.trials})
        return f"Run({str(self.path)!r}: {', '.join(self.algorithms)}; seeds: {seeds})"

    @property
    def last_planned_round(self) -> int | None:
        return last_planned_round(self.config)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """In the order of the configuration, then in order of appearance."""
        configured = self.config.get("algorithms")
        names = [*(configured if isinstance(configured, dict) else ()), *(t.algorithm for t in self.trials)]
        present = {trial.algorithm for trial in self.trials}
        return tuple(name for name in dict.fromkeys(names) if name in present)


def load_runs(folders: list[Path]) -> list[Run]:
    """The runs in the given order, each with a label that no other has: its folder name, longer where needed."""
    if not folders:
        raise RunFolderError("a report needs at least one run folder; give the folder that `kinfed run` printed")
    resolved = [folder.resolve() for folder in folders]
    for path in resolved:
        if resolved.count(path) > 1:
            raise RunFolderError(f"run folder {path} is given twice; give each folder once")
    return [load_run(path, label) for path, label in zip(resolved, _labels(resolved), strict=True)]


def load_run(path: Path, label: str) -> Run:
    files = RunFiles(path)
    envelope, config = files.envelope, files.settings
    notes: list[str] = []
    lines = _read_rounds(path / "rounds.jsonl", config.get("folds") or 1, notes)
    clients = _read_clients(path / "clients.csv", notes)
    results = _read_results(path / "summary.json")
    trials = make_trials(lines, clients, results, last_planned_round(config))
    run = Run(
        path=path,
        label=label,
        config=config,
        version=str(envelope.get("kinfed", "unknown")),
        versions=dict(envelope.get("versions") or {}),
        fingerprint=str(envelope["fingerprint"]),
        trials=tuple(trials),
        federations=dict(_descriptions(files)),
        baselines=dict(_baselines(path)),
        curves=dict(_curves(path)),
        parameters=read_parameters(path / "model.json"),
    )
    return replace(run, notes=tuple(_progress_notes(run) + _version_notes(envelope) + notes))


def read_parameters(path: Path) -> int | None:
    """Of one model, as model.json says; None where it does not."""
    try:
        size = storage.read_json(path).get("parameters")
    except StorageError:
        return None
    return size if isinstance(size, int) and size > 0 else None


def _labels(paths: list[Path]) -> list[str]:
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _read_rounds(path: Path, folds: int, notes: list[str]) -> dict[Key, dict[int, JournalRound]]:
    if not path.exists():
        return {}
    records, unreadable, number = [], [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append((f"{path}, line {number}", json.loads(line)))
            except json.JSONDecodeError:
                unreadable.append(number)
    if unreadable == [number]:
        notes.append("The last line of rounds.jsonl is cut, as when a run is killed while writing; it was left out.")
    elif unreadable:
        listed = ", ".join(map(str, unreadable[:5])) + (", …" if len(unreadable) > 5 else "")
        notes.append(f"Damaged lines of rounds.jsonl were left out: {len(unreadable)} (line {listed}).")
    return join_records(records, folds)


def join_records(records: Iterable[tuple[str, Any]], folds: int) -> dict[Key, dict[int, JournalRound]]:
    """Rounds by their numbers, from lines of the journal and where each was read. A later line replaces an earlier one
    of the same round: a resumed run repeats what followed its checkpoint. Of several folds the rounds that all have are
    joined."""
    lines: dict[Key, dict[int, dict[int, JournalRound]]] = {}  # by number of the round and fold
    for where, record in records:
        key, entry = _round(record, where)
        lines.setdefault(key, {}).setdefault(entry.number, {})[int(record.get("fold") or 0)] = entry
    joined: dict[Key, dict[int, JournalRound]] = {}
    for key, rounds in lines.items():
        complete = {number: list(by_fold.values()) for number, by_fold in rounds.items() if len(by_fold) == folds}
        if complete:
            joined[key] = {number: _join_folds(entries) for number, entries in complete.items()}
    return joined


def _join_folds(folds: list[JournalRound]) -> JournalRound:
    """The same round of several folds: means of their metrics and costs; the method's own figures of the first one."""
    first = folds[0]
    if len(folds) == 1:
        return first

    def mean(metrics: list[dict[Kind, Metrics]]) -> dict[Kind, Metrics]:
        means: dict[Kind, Metrics] = {}
        for kind in metrics[0]:
            entries = [one.get(kind, {}) for one in metrics]
            names = [name for name in entries[0] if all(name in entry for entry in entries)]
            means[kind] = {name: fmean(entry[name] for entry in entries) for name in names}
        return means

    return replace(
        first,
        metrics=mean([fold.metrics for fold in folds]),
        all_clients=mean([fold.all_clients for fold in folds]),
        seconds=fmean(fold.seconds for fold in folds),
        bytes_down=fmean(fold.bytes_down for fold in folds),
        bytes_up=fmean(fold.bytes_up for fold in folds),
    )


def _round(record: Any, where: str) -> tuple[Key, JournalRound]:
    try:
        key = (str(record["algorithm"]), int(record["seed"]))
        return key, JournalRound(
            number=int(record["round"]),
            seconds=float(record.get("seconds") or 0.0),
            active=int(record.get("active") or 0),
            dropped=int(record.get("dropped") or 0),
            bytes_down=float(record.get("bytes_down") or 0),
            bytes_up=float(record.get("bytes_up") or 0),
            metrics=_metrics(record),
            method=record.get("method") or {},
            took_part=None if record.get("took_part") is None else int(record["took_part"]),
            all_clients=_metrics(record.get("all_clients") or {}),
            clock=None if record.get("clock") is None else float(record["clock"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{where}: a round needs algorithm, seed and round, and numbers where numbers belong ({error!r})"
        ) from None


def _metrics(record: dict[str, Any]) -> dict[Kind, Metrics]:
    """Figures that do not exist are absent; null is one that is not finite, for which JSON has no number."""
    return {
        kind: {name: math.nan if value is None else float(value) for name, value in record[kind].items()}
        for kind in KINDS
        if record.get(kind) is not None
    }


def _read_clients(path: Path, notes: list[str]) -> dict[Key, list[ClientResult]]:
    clients: dict[Key, list[ClientResult]] = {}
    if not path.exists():
        return clients
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        needed = {"algorithm", "seed", "client", "n_train", "n_test"}
        if missing := needed - set(reader.fieldnames or ()):
            raise RunFolderError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        for row in reader:
            if None in row or None in row.values():
                notes.append(f"Line {reader.line_num} of clients.csv is cut; it was left out.")
                continue
            try:
                result = ClientResult(
                    client=unescape_formula(row["client"]),
                    n_train=int(row["n_train"]),
                    n_test=int(row["n_test"]),
                    values={name: float(cell) for name, cell in row.items() if name not in needed and cell},
                )
                clients.setdefault((unescape_formula(row["algorithm"]), int(row["seed"])), []).append(result)
            except ValueError as error:
                raise RunFolderError(f"{path}, line {reader.line_num}: {error}") from None
    return clients


def _read_results(path: Path) -> dict[Key, Final]:
    return finals(storage.read_json(path).get("results"), str(path)) if path.exists() else {}


def finals(results: Any, where: str) -> dict[Key, Final]:
    """From the entries of summary.json."""
    try:
        return {
            (str(entry["algorithm"]), int(entry["seed"])): Final(
                round=int(entry["rounds"]),
                rounds=int(entry["rounds"]),
                metrics=_metrics(entry),
                bytes_down=float(entry["bytes_down"]),
                bytes_up=float(entry["bytes_up"]),
                seconds=float(entry["seconds"]),
                took_part=None if entry.get("took_part") is None else int(entry["took_part"]),
                all_clients=_metrics(entry.get("all_clients") or {}),
                diverged=bool(entry.get("diverged")),
            )
            for entry in results or ()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{where}: a result needs algorithm, seed, rounds, bytes_down, bytes_up and seconds ({error!r})"
        ) from None


def _descriptions(files: RunFiles) -> Iterator[tuple[int, Description]]:
    for file in sorted(files.path.glob("federation-*.json")):
        seed = file.stem.removeprefix("federation-")
        if seed.lstrip("-").isdecimal():
            yield int(seed), files.description(int(seed))


def _baselines(path: Path) -> Iterator[tuple[int, Baseline]]:
    for file in sorted(path.glob("baseline-*.json")):
        try:
            baseline = Baseline.from_json(storage.read_json(file))
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{file}: a baseline needs seed, name, personal and clients ({error!r})") from None
        yield baseline.seed, baseline


def _curves(path: Path) -> Iterator[tuple[Key, Curves]]:
    for file in sorted((path / "curves").glob("*.json")):
        record = storage.read_json(file)
        try:
            yield (str(record["algorithm"]), int(record["seed"])), Curves.from_json(record)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{file}: curves need algorithm, seed, clients and their sums ({error!r})") from None


def make_trials(
    lines: dict[Key, dict[int, JournalRound]],
    clients: dict[Key, list[ClientResult]],
    results: dict[Key, Final],
    planned: int | None,
) -> list[Trial]:
    """From the three files that speak of them; `planned` is the number of the last round."""
    keys = dict.fromkeys([*lines, *results])
    return [_trial(key, lines.get(key, {}), clients.get(key, []), results.get(key), planned) for key in keys]


def _trial(
    key: Key, rounds: dict[int, JournalRound], clients: list[ClientResult], result: Final | None, planned: int | None
) -> Trial:
    """summary.json is written when all is done, so before that a trial counts as finished by its round number."""
    ordered = tuple(rounds[number] for number in sorted(rounds))
    if result is not None:
        final = replace(result, round=ordered[-1].number) if ordered else result
        return Trial(*key, ordered, tuple(clients), final, finished=True)
    evaluated = [r for r in ordered if r.metrics]
    last = evaluated[-1].number if evaluated else ordered[-1].number
    counted = [r for r in ordered if r.number <= last]
    final = Final(
        round=last,
        rounds=len(counted),
        metrics=evaluated[-1].metrics if evaluated else {},
        bytes_down=sum(r.bytes_down for r in counted),
        bytes_up=sum(r.bytes_up for r in counted),
        seconds=sum(r.seconds for r in counted),
        took_part=counted[-1].took_part,
        all_clients=evaluated[-1].all_clients if evaluated else {},
        diverged=bool(evaluated) and any(map(has_diverged, evaluated[-1].metrics.values())),
    )
    return Trial(*key, ordered, tuple(clients), final, finished=ordered[-1].number == planned)


def _progress_notes(run: Run) -> list[str]:
    algorithms = run.config.get("algorithms")
    seeds = run.config.get("seeds")
    planned = (
        [(name, int(seed)) for name in algorithms for seed in seeds]
        if isinstance(algorithms, dict) and isinstance(seeds, list)
        else [(trial.algorithm, trial.seed) for trial in run.trials]
    )
    if not run.trials:
        return ["This run has not finished a round yet: there is nothing to show but its configuration."]
    stopped = [trial for trial in run.trials if not trial.finished]
    unstarted = len(set(planned) - {(trial.algorithm, trial.seed) for trial in run.trials})
    if not stopped and not unstarted:
        return []
    of = f" of {run.last_planned_round}" if run.last_planned_round else ""
    parts = [f"{t.algorithm} with seed {t.seed} has reached round {t.rounds[-1].number}{of}" for t in stopped[:6]]
    if len(stopped) > 6:
        parts.append(f"{len(stopped) - 6} more are under way")
    if unstarted:
        parts.append(f"{unstarted} of {len(set(planned))} combinations of method and seed have not started")
    return ["This run is unfinished: " + "; ".join(parts) + ". The figures show what there is so far."]


def _version_notes(envelope: dict[str, Any]) -> list[str]:
    continued = envelope.get("continued") or []
    if not continued:
        return []
    chain = [
        f"kinfed {one.get('kinfed')} with torch {(one.get('versions') or {}).get('torch')}"
        for one in (envelope, *continued)
    ]
    return [f"This run was begun with {chain[0]} and continued with {', then '.join(chain[1:])}."]


def last_planned_round(config: dict[str, Any]) -> int | None:
    rounds, warm = config.get("rounds"), config.get("warm_start") or 0
    return rounds + warm if isinstance(rounds, int) and isinstance(warm, int) else None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
