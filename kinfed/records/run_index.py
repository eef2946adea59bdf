"""The runs, fits, studies and entries below a folder, each by a few facts: what `kinfed runs` lists and `kinfed board`
shows. Nothing is written, and no lock is taken, so that a run which is just beginning is not disturbed."""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kinfed.core import storage
from kinfed.engine import METRICS
from kinfed.errors import ConfigError, StorageError
from kinfed.records.run_files import RunFiles

State = Literal["finished", "running", "stopped", "damaged"]
STATES: tuple[State, ...] = ("finished", "running", "stopped", "damaged")
Kind = Literal["run", "deployment", "fit", "study", "arena entry", "contributions"]
# What is no run is known by its record, and has a page beside it.
_RECORDS: dict[str, tuple[Kind, str]] = {
    "fit.json": ("fit", "fit.html"),
    "study.json": ("study", "study.html"),
    "entry.json": ("arena entry", "entry.html"),
    "contributions.json": ("contributions", "contributions.html"),
}


@dataclass(frozen=True)
class BestMethod:
    """The method with the best mean of the headline metric over seeds: a hint for finding a run, no verdict."""

    algorithm: str
    metric: str
    mean: float

    def __str__(self) -> str:
        metric = METRICS.find(self.metric)
        text = f"{100 * self.mean:.1f} %" if metric is not None and metric.percent else f"{self.mean:.4g}"
        return f"{self.algorithm} {text}"


@dataclass(frozen=True)
class RunEntry:
    path: Path
    name: str  # its place below the folder that was searched
    state: State
    changed: float  # seconds since 1970
    settings: Mapping[str, Any]  # {} of a damaged one
    done: int = 0  # rounds of all methods, seeds and folds
    planned: int = 0
    best: BestMethod | None = None
    problem: str = ""  # of a damaged one
    kind: Kind = "run"
    page: Path | None = None  # of what is no run

    @property
    def algorithms(self) -> list[str]:
        return list(self.settings.get("algorithms") or {})

    @property
    def dataset(self) -> str:
        dataset = self.settings.get("dataset")
        return str(dataset.get("name", "")) if isinstance(dataset, Mapping) else str(dataset or "")

    def setting(self, name: str) -> Any:
        """Value of a dotted name: dataset.name, algorithms.ditto.lam; None if there is none."""
        value: Any = self.settings
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value


def find_runs(folder: Path | str) -> list[RunEntry]:
    """All runs, fits, studies and entries below a folder, or that folder itself, the newest first."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; give the folder that contains your runs, such as runs")
    return sorted((_entry(path, record, root) for path, record in _folders(root)), key=lambda entry: -entry.changed)


def _folders(root: Path) -> Iterator[tuple[Path, str]]:
    """Folders with the name of their record; "" of runs, and of fits that are not finished."""
    for place, folders, files in os.walk(root):
        record = next((name for name in _RECORDS if name in files), "")
        if record or "config.json" in files:
            if record != "study.json":  # whose cells are runs
                folders.clear()  # what is inside a run are its files
            yield Path(place), record
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _entry(path: Path, record: str, root: Path) -> RunEntry:
    name = path.relative_to(root).as_posix() if path != root else path.resolve().name
    files = [path / name for name in (record or "config.json", "rounds.jsonl", "summary.json")]
    changed = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    try:
        return _recorded(path, record, name, changed) if record else _run(path, name, changed)
    except (StorageError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        kind: Kind = _RECORDS[record][0] if record else "run"
        return RunEntry(path, name, "damaged", changed, {}, problem=str(error), kind=kind)


def _recorded(path: Path, record: str, name: str, changed: float) -> RunEntry:
    kind, page = _RECORDS[record]
    content = storage.read_json(path / record)
    settings, done, planned = _about(kind, content), 1, 1
    if kind == "study":
        done, planned = len(list(path.glob("cells/*/summary.json"))), len(content["cells"])
    state: State = "running" if is_running(path) else "finished" if done >= planned else "stopped"
    shown = path / page if (path / page).is_file() else None
    return RunEntry(path, name, state, changed, settings, done, planned, kind=kind, page=shown)


def _about(kind: Kind, content: Mapping[str, Any]) -> dict[str, Any]:
    """Data set, methods, seeds and rounds of what is no run, as a run's settings have them."""
    if kind == "fit":
        return {
            "dataset": content["table"],
            "algorithms": dict.fromkeys(str(c["method"]) for c in content["contenders"]),
        }
    if kind == "study":
        cells = content["cells"]
        return {
            "dataset": ", ".join(dict.fromkeys(str(place[0]) for place, *_ in cells)),
            "algorithms": dict.fromkeys(str(label) for _, labels, *_ in cells for label in labels),
            "seeds": sorted({int(seed) for _, _, seeds, _ in cells for seed in seeds}),
            "rounds": max(int(rounds) for *_, rounds in cells),
        }
    if kind == "arena entry":
        return {"dataset": f"{content['suite']} {content['subset']}", "algorithms": {str(content["method"]): {}}}
    return {"dataset": str(content["settings"].get("table", "")), "algorithms": {str(content["algorithm"]): {}}}


def _run(path: Path, name: str, changed: float) -> RunEntry:
    settings, summary_file = RunFiles(path).settings, path / "summary.json"
    state: State = "running" if is_running(path) else "stopped"
    if "table" in settings:
        about = {"dataset": settings["table"], "algorithms": dict.fromkeys(str(settings["algorithms"]).split(","))}
        return RunEntry(path, name, state, changed, about, kind="fit")
    kind: Kind = "deployment" if (path / "status.json").is_file() else "run"
    summary = storage.read_json(summary_file) if summary_file.exists() else None
    trials = len(settings["algorithms"]) * len(settings["seeds"]) * (settings.get("folds") or 1)
    rounds = (
        storage.read_json(path / "status.json").get("rounds") if kind == "deployment" else None
    )  # it may have grown
    planned, best = trials * int(rounds or settings["rounds"]), None if summary is None else _best(summary["results"])
    if is_tuned := (path / "best.toml").exists() and not is_running(path):
        planned = _lines(path / "rounds.jsonl")
    if (summary is None and not is_tuned) or is_running(path):
        done = _lines(path / "rounds.jsonl")  # methods with rounds of their own may have more than were planned
        return RunEntry(path, name, state, changed, settings, done, max(planned, done), kind=kind)
    return RunEntry(path, name, "finished", changed, settings, planned, planned, best, kind=kind)


def _lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _best(results: list[Mapping[str, Any]]) -> BestMethod | None:
    values: dict[str, list[float]] = {}
    metric = str(results[0].get("metric", "accuracy")) if results else "accuracy"
    for result in results:
        value = (result.get("personal") or {}).get(metric)
        if value is not None and not result.get("diverged"):
            values.setdefault(str(result["algorithm"]), []).append(float(value))
    if not values:
        return None
    known = METRICS.find(metric)
    sign = 1 if known is not None and known.higher_is_better else -1
    algorithm = max(values, key=lambda label: sign * fmean(values[label]))
    return BestMethod(algorithm, metric, fmean(values[algorithm]))


def is_running(path: Path) -> bool:
    """Whether the process that says it writes this run is alive. On another machine, and on Windows, it is believed."""
    try:
        text = (path / ".lock-holder").read_text(encoding="utf-8")
    except OSError:
        return False
    match = re.fullmatch(r"process (\d+) on (.*)", text)
    if match is None or match[2] != socket.gethostname() or os.name == "nt":
        return match is not None
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def matching(
    runs: list[RunEntry], *, dataset: str = "", algorithm: str = "", state: str = "", where: Mapping[str, str]
) -> list[RunEntry]:
    """Runs with the given data set, method, state and settings; settings as they would be typed."""
    if state and state not in STATES:
        raise ConfigError(f"a run is {', '.join(STATES[:-1])} or {STATES[-1]}; got {state!r}")
    return [
        run
        for run in runs
        if (not dataset or dataset in (run.dataset, Path(run.dataset).name))
        and (not algorithm or algorithm in run.algorithms)
        and (not state or run.state == state)
        and all(_as_typed(run.setting(name)) == text for name, text in where.items())
    ]


def _as_typed(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    if isinstance(value, list | tuple):
        return ",".join(map(_as_typed, value))
    if isinstance(value, Mapping):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
