"""Reads all results of run folders into records, for reports and recipes.

A folder is read as far as it goes: a run that was killed, or is still running, gives what it has written so far
together with notes that say what is missing. Only a folder that is no run at all, or whose lines lack the fields
that give them meaning, is an error. Single files are read by kinfed.records.run_files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinfed.core import storage, unescape_formula
from kinfed.data import Description
from kinfed.errors import StorageError
from kinfed.records.curves import Curves
from kinfed.records.run_files import RoundLine, RunFiles, RunFolderError, client_rows
from kinfed.records.run_record import Baseline, ClientRecord, FinalRecord, Key, RoundRecord, RunRecord, TrialRecord


def load_runs(folders: list[Path]) -> list[RunRecord]:
    """The runs in the given order, each with a label that no other has: its folder name, longer where needed."""
    if not folders:
        raise RunFolderError("a report needs at least one run folder; give the folder that `kinfed run` printed")
    resolved = [folder.resolve() for folder in folders]
    for path in resolved:
        if resolved.count(path) > 1:
            raise RunFolderError(f"run folder {path} is given twice; give each folder once")
    return [load_run(path, label) for path, label in zip(resolved, _labels(resolved), strict=True)]


def load_run(path: Path, label: str) -> RunRecord:
    files = RunFiles(path)
    envelope, config = files.envelope, files.settings
    notes: list[str] = []
    rounds = _read_rounds(path / "rounds.jsonl", config.get("folds") or 1, notes)
    clients = _read_clients(path / "clients.csv", notes)
    results = _read_results(path / "summary.json")
    run = RunRecord(
        path=path, label=label, config=config, version=str(envelope.get("kinfed", "unknown")),
        versions=dict(envelope.get("versions") or {}), fingerprint=str(envelope["fingerprint"]), trials=(),
        federations=dict(_descriptions(path)), baselines=dict(_baselines(path)), curves=dict(_curves(path)),
        parameters=read_parameters(path / "model.json"), results=tuple(results.values()), contents=files.contents,
        changed_files=tuple(name for name in files.changed_files() if not name.startswith("models/")),
    )  # fmt: skip
    if run.changed_files:
        listed = ", ".join(run.changed_files)
        notes.append(f"Changed after the run had ended: {listed}. The page shows what is there, not what was measured.")
    trials = []
    for key in dict.fromkeys([*rounds, *results]):
        ordered, final = tuple(entry for _, entry in sorted(rounds.get(key, {}).items())), results.get(key)
        # summary.json is written when all is done, so before that a trial counts as finished by its round number.
        finished = final is not None or ordered[-1].number == run.last_planned_round
        own = tuple(clients.get(key, ()))
        trials.append(TrialRecord(*key, ordered, own, final or FinalRecord.so_far(key, ordered), finished))
    run = replace(run, trials=tuple(trials))
    return replace(run, notes=tuple(_progress_notes(run) + _version_notes(envelope) + notes))


def read_parameters(path: Path) -> int | None:
    """Number of parameters of one model, as model.json says; None if it does not."""
    try:
        size = storage.read_json(path).get("parameters")
    except StorageError:
        return None
    return size if isinstance(size, int) and size > 0 else None


@contextmanager
def _refusing(place: Path | str, needs: str) -> Iterator[None]:
    """A record without the fields that give it meaning is an error, which says where and what it needs."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise RunFolderError(f"{place}: {needs} ({error!r})") from None


def _labels(paths: list[Path]) -> list[str]:
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _read_rounds(path: Path, folds: int, notes: list[str]) -> dict[Key, dict[int, RoundRecord]]:
    """Rounds by their numbers. A later line replaces an earlier one of the same round: a resumed run repeats what
    followed its checkpoint. Of several folds the rounds that all have are joined."""
    if not path.exists():
        return {}
    rounds: dict[Key, dict[int, dict[int, RoundRecord]]] = {}  # by number of the round and fold
    unreadable, number = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = storage.parse_json(text)
            except ValueError:
                unreadable.append(number)
                continue
            needs = "a round needs algorithm, seed and round, and numbers where numbers belong"
            with _refusing(f"{path}, line {number}", needs):
                read = storage.as_record(RoundLine, line, f"{path}, line {number}")
                key, entry = (read.algorithm, read.seed), RoundRecord.from_json(line)
                rounds.setdefault(key, {}).setdefault(entry.number, {})[read.fold or 0] = entry
    if unreadable == [number]:
        notes.append("The last line of rounds.jsonl is cut, as when a run is killed while writing; it was left out.")
    elif unreadable:
        listed = ", ".join(map(str, unreadable[:5])) + (", …" if len(unreadable) > 5 else "")
        notes.append(f"Damaged lines of rounds.jsonl were left out: {len(unreadable)} (line {listed}).")
    joined = {
        key: {n: RoundRecord.joined(list(by_fold.values())) for n, by_fold in entries.items() if len(by_fold) == folds}
        for key, entries in rounds.items()
    }
    return {key: entries for key, entries in joined.items() if entries}


def _read_clients(path: Path, notes: list[str]) -> dict[Key, list[ClientRecord]]:
    clients: dict[Key, list[ClientRecord]] = {}
    if not path.exists():
        return clients
    for number, row in client_rows(path):
        if row is None:
            notes.append(f"Line {number} of clients.csv is cut; it was left out.")
            continue
        try:
            key = unescape_formula(row["algorithm"]), int(row["seed"])
            row["client"] = unescape_formula(row["client"])
            clients.setdefault(key, []).append(ClientRecord.from_row(row))
        except ValueError as error:
            raise RunFolderError(f"{path}, line {number}: {error}") from None
    return clients


def _read_results(path: Path) -> dict[Key, FinalRecord]:
    if not path.exists():
        return {}
    with _refusing(path, "a result needs algorithm, seed, rounds, personal, bytes_down, bytes_up and seconds"):
        finals = [FinalRecord.from_json(entry) for entry in storage.read_json(path).get("results") or ()]
    return {(final.label, final.seed): final for final in finals}


def _descriptions(path: Path) -> Iterator[tuple[int, Description]]:
    for file in sorted(path.glob("federation-*.json")):
        seed = file.stem.removeprefix("federation-")
        if seed.lstrip("-").isdecimal():
            yield int(seed), Description.from_json(storage.read_json(file), str(file))


def _baselines(path: Path) -> Iterator[tuple[int, Baseline]]:
    for file in sorted(path.glob("baseline-*.json")):
        with _refusing(file, "a baseline needs seed, name, personal and clients"):
            baseline = Baseline.from_json(storage.read_json(file))
        yield baseline.seed, baseline


def _curves(path: Path) -> Iterator[tuple[Key, Curves]]:
    for file in sorted((path / "curves").glob("*.json")):
        record = storage.read_json(file)
        with _refusing(file, "curves need algorithm, seed, clients and their sums"):
            key, curves = (str(record["algorithm"]), int(record["seed"])), Curves.from_json(record)
        yield key, curves


def _progress_notes(run: RunRecord) -> list[str]:
    algorithms, seeds = run.config.get("algorithms"), run.config.get("seeds")
    planned = started = {(trial.algorithm, trial.seed) for trial in run.trials}
    if isinstance(algorithms, dict) and isinstance(seeds, list):
        with _refusing("config.json", "seeds are whole numbers"):
            planned = {(name, int(seed)) for name in algorithms for seed in seeds}
    if not run.trials:
        return ["This run has not finished a round yet: there is nothing to show but its configuration."]
    stopped = [trial for trial in run.trials if not trial.finished]
    unstarted = len(planned - started)
    if not stopped and not unstarted:
        return []
    of = f" of {run.last_planned_round}" if run.last_planned_round else ""
    parts = [f"{t.algorithm} with seed {t.seed} has reached round {t.rounds[-1].number}{of}" for t in stopped[:6]]
    if len(stopped) > 6:
        parts.append(f"{len(stopped) - 6} more are under way")
    if unstarted:
        parts.append(f"not started yet: {unstarted} of {len(planned)} combinations of method and seed")
    return ["This run is unfinished: " + "; ".join(parts) + ". The figures show what has been measured so far."]


def _version_notes(envelope: dict[str, Any]) -> list[str]:
    continued = envelope.get("continued") or []
    if not continued:
        return []
    chain = [
        f"kinfed {one.get('kinfed')} with torch {(one.get('versions') or {}).get('torch')}"
        for one in (envelope, *continued)
    ]
    return [f"This run was begun with {chain[0]} and continued with {', then '.join(chain[1:])}."]
