"""Displays of a running experiment in Python: a bar on a terminal, a line that changes in a notebook, else nothing."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kinfed.config import split_choice
from kinfed.errors import ConfigError
from kinfed.records import headline_text
from kinfed.runs import Metrics, NullObserver, Observer

if TYPE_CHECKING:
    from rich.console import Console

    from kinfed.config import RunConfig
    from kinfed.records import FinalRecord
    from kinfed.server import RoundReport

NOTEBOOK_EVERY = 0.2  # seconds between two forms of the line


def total_rounds(config: RunConfig) -> int:
    """Rounds of all methods, seeds and folds, with what comes before them."""
    from kinfed.algorithms import make_algorithm

    rounds = 0
    for choice in config.algorithms.values():
        method, options, _ = split_choice(choice)
        try:
            rounds += make_algorithm(method, config.training, options).rounds_in(config.rounds)
        except ConfigError:  # left out of "all", with a note; where it was named, the run refuses it
            continue
    of_a_seed = rounds + config.warm_start + config.pretrain
    return (config.folds or 1) * len(config.seeds) * of_a_seed


class Speed:
    """Rounds per second since it was made."""

    def __init__(self) -> None:
        self._began, self._rounds = time.monotonic(), 0

    def after_round(self) -> float:
        self._rounds += 1
        return self._rounds / max(time.monotonic() - self._began, 1e-9)


class LiveDisplay(NullObserver):
    """A progress bar over all rounds of all methods and seeds. Use as a context manager."""

    def __init__(self, console: Console, total_rounds: int, metric: str | None = None, *, transient: bool = False):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._metric = metric
        self._progress = Progress(
            TextColumn("{task.fields[label]} seed {task.fields[seed]}", style="bold", markup=False), BarColumn(),
            MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"), console=console, transient=transient,
        )  # fmt: skip
        self._bar = self._progress.add_task("", total=total_rounds, label="", seed="", rate="", accuracy="")
        self._speed, self._left = Speed(), 0  # rounds of the algorithm that remain

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self._speed, self._left = Speed(), rounds - first
        self._progress.update(self._bar, advance=first, label=label, seed=str(seed), accuracy="")

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        fields: dict[str, Any] = {"rate": f"{self._speed.after_round():.1f} rounds/s"}
        if personal is not None:
            fields["accuracy"] = headline_text(personal, self._metric)
        self._left -= 1
        self._progress.update(self._bar, advance=1, **fields)

    def finished(self, result: FinalRecord) -> None:
        self._progress.update(self._bar, advance=self._left)
        self._left = 0

    def note(self, text: str) -> None:
        self._progress.console.print(f"note: {text}", style="yellow", highlight=False, markup=False)


class NotebookLine(NullObserver):
    """One line that changes in place, without widgets, with the notes below it. `show` puts HTML in the place of what
    it was given before."""

    def __init__(self, show: Callable[[str], None], total_rounds: int, metric: str | None = None) -> None:
        self._show, self._total, self._metric = show, total_rounds, metric
        self._done, self._left, self._drawn, self._began = 0, 0, 0.0, time.monotonic()
        self._where = self._figure = ""
        self._notes: list[str] = []

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self._done, self._left = self._done + first, rounds - first
        self._where, self._figure = f"{label}, seed {seed}", ""
        self._draw()

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        self._done, self._left = self._done + 1, self._left - 1
        if personal is not None:
            self._figure = headline_text(personal, self._metric)
        if time.monotonic() - self._drawn >= NOTEBOOK_EVERY:
            self._draw()

    def finished(self, result: FinalRecord) -> None:
        self._total, self._left = self._total - self._left, 0  # it has learnt all before its last round

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._draw()

    def ended(self) -> None:
        self._where, self._figure = f"{self._done:,} rounds in {time.monotonic() - self._began:.1f} s", ""
        self._draw(running=False)

    def _draw(self, running: bool = True) -> None:
        from kinfed.report import render  # with plotly, which a terminal need not wait for

        self._drawn = time.monotonic()
        share = min(self._done / max(self._total, 1), 1.0)
        self._show(render(
            "progress.html", "kinfed.api", share=share, done=self._done, total=self._total,
            where=self._where, figure=self._figure, notes=self._notes, running=running,
        ))  # fmt: skip


@contextmanager
def progress_display(config: RunConfig, wanted: bool | None) -> Iterator[Observer]:
    """The display for where this process runs. `wanted`: True always shows one, False none, None if someone looks
    on: in a notebook, and where standard error is a terminal."""
    metric, rounds = config.metric, total_rounds(config)
    if wanted is not False and (show := notebook_cell()) is not None:
        yield NotebookLine(show, rounds, metric)
    elif wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield NullObserver()
    else:
        from rich.console import Console  # without an onlooker it is not waited for

        console = Console(stderr=True, markup=False, emoji=False, force_terminal=True)
        with LiveDisplay(console, rounds, metric, transient=True) as display:
            yield display


def notebook_cell() -> Callable[[str], None] | None:
    """A function that shows HTML below the running cell in place of its last; None if this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # a terminal's IPython has no kernel
        return None
    displays: Any = importlib.import_module("IPython.display")  # it is there: this code runs inside it
    handle = displays.display(displays.HTML(""), display_id=True)
    return lambda text: handle.update(displays.HTML(text))
