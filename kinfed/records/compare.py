"""Whether two run folders hold the same results, and where two trees of values differ, in words."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.config import DEFAULTS, NON_RESULT_SETTINGS
from kinfed.core import storage
from kinfed.errors import StorageError
from kinfed.records.run_files import RunFiles, client_rows, read_journal

GROWING = ("rounds", "seeds", "algorithms")  # settings of which a run may get more
FUSED_CONTENT = "backend (fused needs numba)"  # among the contents of a run whose gradients compiled loops compute
_ABSENT = object()
_SHOWN_DIFFERENCES = 20  # per file


def differences(
    a: Any, b: Any, tolerance: float = 0.0, names: tuple[str, str] = ("there", "now"), where: str = ""
) -> Iterator[str]:
    """Sentences such as "rounds: 60 there, 30 now" for every leaf in which two trees of values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{where}.{key}" if where else str(key)
            yield from differences(a.get(key, _ABSENT), b.get(key, _ABSENT), tolerance, names, inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, tolerance, names, f"{where}[{index}]")
    elif not _equal(a, b, tolerance):
        yield f"{where}: {_shown(a)} {names[0]}, {_shown(b)} {names[1]}"


def growth_differences(
    envelope: Mapping[str, Any], config: Mapping[str, Any], contents: Mapping[str, str], backend: str | None
) -> list[str]:
    """Differences that keep a run from growing into this configuration, one phrase each. `there` is the folder's
    config.json, `contents` are the digests of the data and code now, `backend` computed the folder's gradients."""
    before, now = dict(envelope["config"]), dict(config)
    changes = []
    if now["rounds"] < before["rounds"]:
        changes.append(f"rounds: {before['rounds']} there, {now['rounds']} now, but rounds can only be added")
    for label, choice in before["algorithms"].items():
        if (other := now["algorithms"].get(label)) != choice:
            changes += [f"{label}.{change}" for change in differences(choice, other or {})]
    if before["backend"] == "auto" and now["backend"] == backend:  # what it was, said aloud
        before["backend"] = now["backend"]
    fixed = [name for name in now if name not in (*GROWING, *NON_RESULT_SETTINGS)]
    before["preset"], now["preset"] = (_choice_of_preset(config.get("preset")) for config in (before, now))
    there = {name: before.get(name, DEFAULTS[name]) for name in fixed}  # a setting may have come later
    changes += differences(there, {name: now[name] for name in fixed})
    digests = envelope.get("contents", {})
    changes += [f"other {name}" for name in sorted(digests.keys() & contents.keys()) if digests[name] != contents[name]]
    if not changes and (FUSED_CONTENT in digests) != (FUSED_CONTENT in contents):
        changes.append(
            f"gradients were computed by the backend {backend}, and a run of this size would use another one; to "
            f"keep the first: --backend {backend}"
        )
    return changes


def _choice_of_preset(use: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The preset without its options by method, which are compared with the methods."""
    return None if use is None else {name: use[name] for name in ("name", "family", "model", "own_lr")}


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or abs(a - b) <= tolerance
    return type(a) is type(b) and bool(a == b)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        mean = value.double().mean().item() if value.numel() else 0.0
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} with mean {mean!r}"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_time(field: str) -> bool:
    """Whether a field holds wall-clock time: seconds, train_seconds, seconds_waiting."""
    return "seconds" in field.split("_")


def strip_times(record: Any) -> Any:
    """The record without its wall-clock fields, at any depth."""
    if isinstance(record, Mapping):
        return {key: strip_times(value) for key, value in record.items() if not is_time(key)}
    if isinstance(record, list | tuple):
        return [strip_times(value) for value in record]
    return record


def same_results(run_a: Path, run_b: Path, *, tolerance: float = 0.0, config: bool = True) -> list[str]:
    """Differences between two run folders, one sentence each; empty if they hold the same results.

    Ignores times, versions, and settings that do not change results. `tolerance` is the absolute difference that
    numbers may have (pools agree to 1e-5); `config=False` leaves the configurations out."""
    a, b = Path(run_a), Path(run_b)
    for folder in (a, b):
        RunFiles(folder).envelope  # noqa: B018  (a folder that is no run is an error, not a run without differences)
    names = {
        path.relative_to(folder).as_posix()
        for folder in (a, b)
        for pattern in ("config.json", "rounds.jsonl", "clients.csv", "summary.json", "federation-*.json", "models/*")
        for path in folder.glob(pattern)
        if not path.name.startswith(".") and (config or path.name != "config.json")
    }
    sentences: list[str] = []
    for name in sorted(names):
        if missing := [str(folder) for folder in (a, b) if not (folder / name).exists()]:
            sentences.append(f"{name}: missing in {missing[0]}")
            continue
        changed = [folder for folder in dict.fromkeys((a, b)) if RunFiles(folder).changed_files([name])]
        sentences += [f"{name}: changed in {folder} after the run had ended" for folder in changed]
        ours, theirs = _contents(a, name), _contents(b, name)
        changes = list(differences(ours, theirs, tolerance, (f"in {a}", f"in {b}")))
        if not changes and name in ("rounds.jsonl", "clients.csv") and list(ours) != list(theirs):
            changes = ["the same lines in another order"]
        sentences += [f"{name}: {change}" for change in changes[:_SHOWN_DIFFERENCES]]
        if len(changes) > _SHOWN_DIFFERENCES:
            sentences.append(f"{name}: and {len(changes) - _SHOWN_DIFFERENCES} more differences")
    return sentences


def _contents(folder: Path, name: str) -> Any:
    """A file as values to compare, without times and versions; lines under names that say what they are about."""
    path = folder / name
    if name == "config.json":
        return {key: value for key, value in RunFiles(folder).settings.items() if key not in NON_RESULT_SETTINGS}
    if name == "rounds.jsonl":
        records = [record for _, record in read_journal(path)]
        return _by_name(("{algorithm}[seed {seed}, round {round}]".format_map(r), strip_times(r)) for r in records)
    if name == "clients.csv":
        return _by_name(_client_line(path, number, row) for number, row in client_rows(path))
    if path.suffix == ".safetensors":
        return storage.read_tensors(path)
    content = strip_times(storage.read_json(path))
    return {key: value for key, value in content.items() if key not in ("kinfed", "versions")}


def _client_line(path: Path, number: int, row: Mapping[str, str] | None) -> tuple[str, Any]:
    if row is None:
        raise StorageError(
            f"{path} is damaged: line {number} has more or fewer cells than the header; restore the file"
        )
    name = "{algorithm}[seed {seed}, client {client}]".format_map(row)
    return name, strip_times({column: _number(cell) for column, cell in row.items()})


def _by_name(lines: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in lines:
        while name in named:
            name += " (again)"
        named[name] = value
    return named


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell
