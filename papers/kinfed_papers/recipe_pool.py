"""Many recipes in several processes with one core each, and how long the rest may take.

A process measures one recipe as `kinfed reproduce NAME` does and writes its page; stopped, the next call goes on where
it was. The time left follows from the share of each recipe that is done, weighted by what recipes took when they were
last measured (`MINUTES`; at the scale smoke all are about as long): how fast this machine works through these minutes
shows as it goes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kinfed.errors import KinfedError
from kinfed.runs import Interrupted, NullObserver, RunInfo
from kinfed_papers import measure
from kinfed_papers.recipe import Scale
from kinfed_papers.recipe_page import PAGE, write_reproduction
from kinfed_papers.recipes import MINUTES, load_recipe

LEAST_SHARE = 0.002  # of a recipe, before it says again how far it is
LOOK_EVERY = 1.0  # seconds
USUAL_MINUTES = 10.0  # of a recipe that was never timed
SMOKE_MINUTES = 0.5
ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class RecipeJob:
    name: str
    scale: Scale
    folder: Path
    seeds: tuple[int, ...] | None
    settings: Mapping[str, Any]

    def is_done(self) -> bool:
        """Whether it has been measured and has its page."""
        recipe = load_recipe(self.name)
        has_page = (self.folder / PAGE).exists()
        return has_page and measure.is_done(recipe, self.scale, self.folder, self.seeds, self.settings)

    def done_share(self) -> float:
        return measure.done_share(load_recipe(self.name), self.scale, self.folder, self.seeds, self.settings)


@dataclass
class PoolState:
    """How far the recipes are; what a display shows."""

    shares: dict[str, float]  # of every recipe, done
    scale: Scale = "small"
    running: dict[str, float] = field(default_factory=dict)  # name -> when it began
    failures: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    earned: float = 0.0  # minutes of MINUTES that were worked through so far
    busy: float = 0.0  # seconds of all processes together

    def seconds_left(self, processes: int) -> float | None:
        """None while too little is done to tell."""
        if self.busy < 5 or self.earned <= 0:
            return None
        pace = self.busy / self.earned  # seconds of a process for one of those minutes
        left = [
            minutes(name, self.scale) * (1 - share)
            for name, share in self.shares.items()
            if name not in self.done and name not in self.failures
        ]
        return pace * max(sum(left) / processes, max(left, default=0.0))

    def advance(self, name: str, share: float) -> None:
        self.earned += minutes(name, self.scale) * max(share - self.shares[name], 0.0)
        self.shares[name] = max(share, self.shares[name])


def minutes(name: str, scale: Scale) -> float:
    """Minutes of a recipe beside others: at the scale smoke all are a trial of the code."""
    return SMOKE_MINUTES if scale == "smoke" else MINUTES.get(name, USUAL_MINUTES)


class ShareSender(NullObserver):
    """Tells how much of a recipe is done, in rounds of all methods and seeds; studies count as one round."""

    def __init__(self, job: RecipeJob, send: Callable[[str, float], None]) -> None:
        self._send = send
        self._sent = 0.0
        parts = load_recipe(job.name).parts(job.scale)
        rounds = [measure.part_rounds(part, job.seeds, job.settings) for part in parts]
        self._total = max(sum(rounds), 1)
        self._before = {part.name: sum(rounds[:number]) for number, part in enumerate(parts)}
        self._done = 0

    def begun(self, run: RunInfo) -> None:
        if run.folder is not None and run.folder.name in self._before:
            self._done = self._before[run.folder.name]

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self._done += first
        if first:  # of an earlier sitting: done, and no measure of this one's pace
            self._tell("resumed")

    def round(self, *report: Any) -> None:
        self._done += 1
        self._tell("share")

    def _tell(self, kind: str) -> None:
        share = min(self._done / self._total, 1.0)
        if share >= self._sent + LEAST_SHARE:
            self._sent = share
            self._send(kind, share)


def run_recipes(
    jobs: Sequence[RecipeJob],
    processes: int,
    show: Callable[[PoolState], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> PoolState:
    """Measure all of them, the longest first; `show` hears of every change and now and then. What was done before gets
    no process. Failures of a recipe leave the others alone. Stopped, processes end after their round."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    state = PoolState({job.name: job.done_share() for job in jobs}, jobs[0].scale)
    state.done += [job.name for job in jobs if job.is_done()]
    waiting = [job for job in jobs if job.name not in state.done]
    waiting.sort(key=lambda job: -minutes(job.name, job.scale))
    active: dict[str, tuple[BaseProcess, Connection]] = {}
    before = time.monotonic()
    try:
        while waiting or active:
            if should_stop():
                stop.set()
                waiting.clear()
            while waiting and len(active) < processes:
                job = waiting.pop(0)
                active[job.name] = _start(context, job, stop)
                state.running[job.name] = time.monotonic()
            show(state)
            wait([connection for _, connection in active.values()], LOOK_EVERY)
            now = time.monotonic()
            state.busy += (now - before) * len(active)
            before = now
            for name in list(active):
                if _listen(name, *active[name], state):
                    del active[name], state.running[name]
        show(state)
    finally:
        for process, _ in active.values():  # only where this loop itself was interrupted
            process.terminate()
    return state


def _start(context: Any, job: RecipeJob, stop: Any) -> tuple[BaseProcess, Connection]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure_recipe, args=(job, sender, stop), name=job.name)
    with _environment(ONE_CORE), _interrupts_held():
        process.start()
    sender.close()  # here; the process has its own end
    return process, receiver


def _listen(name: str, process: BaseProcess, connection: Connection, state: PoolState) -> bool:
    """Take in what a process has said; True once it has ended."""
    try:
        while connection.poll():
            kind, value = connection.recv()
            if kind == "share":
                state.advance(name, value)
            elif kind == "resumed":
                state.shares[name] = max(value, state.shares[name])
            elif kind == "done":
                state.advance(name, 1.0)
                state.done.append(name)
            else:
                state.failures[name] = value
        return False
    except (EOFError, OSError):  # the other end is closed
        process.join()
        if process.exitcode and name not in state.failures:
            state.failures[name] = f"its process ended with exit code {process.exitcode}"
        connection.close()
        return True


def measure_recipe(job: RecipeJob, connection: Connection, stop: Any) -> None:
    """What a process does: the recipe, then its page. It tells its share, and how it ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:  # Ctrl-C reaches all processes; the parent tells this one to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    recipe = load_recipe(job.name)
    observer = ShareSender(job, lambda kind, share: connection.send((kind, share)))
    try:
        done = measure.reproduce(
            recipe,
            job.scale,
            job.folder,
            seeds=job.seeds,
            settings=job.settings,
            observer=observer,
            should_stop=lambda: stop.is_set() or (parent is not None and not parent.is_alive()),
        )
        write_reproduction(done)
        connection.send(("done", None))
    except (Interrupted, BrokenPipeError):
        pass  # stopped, or no process is left to tell; what is done is saved
    except KinfedError as error:
        connection.send(("failed", str(error)))
    except Exception:
        connection.send(("failed", traceback.format_exc()))
    finally:
        connection.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal. One that starts within is deaf to it from its first moment on, before
    it could ignore it itself; this process hears it afterwards. (Windows has no such mask.)"""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for processes that start within."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
