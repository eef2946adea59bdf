"""`kinfed.run` and `kinfed.load`: a run with a display, and its results as tables, figures and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinfed.api.progress import progress_display
from kinfed.api.run_result import RunResult
from kinfed.config import RunConfig
from kinfed.data import Federation
from kinfed.engine import Builder
from kinfed.runs import Observer, Observers, experiment


def run(
    config: RunConfig | Path | str | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    extend: bool = False,
    federation: Federation | None = None,
    model: str | Mapping[str, Any] | Builder | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> RunResult:
    """Run a configuration (a RunConfig, a TOML file, or settings by name) and show its progress.

    `federation` replaces the data set and its partition. `model` is a name, a dictionary {"name": ..., ...} with
    options, or a function that builds an nn.Module, either without arguments or from the shape of an example and the
    number of classes.

    With `out` the run writes its folder, and can be resumed (`resume`) or extended (`extend`). To extend, pass the
    total number of `rounds`, and the `seeds` and `algorithms` to add; the results are the same as if everything had
    been run at once. Without `out`, everything stays in memory.

    `progress` is True for a progress bar and False for silence. By default there is a bar on a terminal, a line in a
    notebook and nothing elsewhere. An `observer` is notified of every round (kinfed.runs.observer); `should_stop` is
    called after every round."""
    grown = Path(out) if extend and out is not None else None
    chosen, build = experiment.chosen_config(config, model, settings, grown)
    with progress_display(chosen, progress) as display:
        watching = display if observer is None else Observers((display, observer))
        outcome = experiment.run(
            chosen, out=out, resume=resume, extend=extend, federation=federation, model=build, observer=watching,
            should_stop=should_stop,
        )  # fmt: skip
    return RunResult(folder=outcome.folder, outcome=outcome)


def load(folder: Path | str) -> RunResult:
    """Read the results of a run from its folder. An unfinished run has the results so far."""
    return RunResult.read(folder)
