"""Recipes in processes of their own: progress, a stop, a failure, going on, and the time left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kinfed_papers.measure import read_reproduction
from kinfed_papers.recipe_pool import PoolState, RecipeJob, measure_recipe, minutes, run_recipes
from kinfed_papers.recipes import MINUTES, RECIPES, load_recipe
from kinfed_papers.reproduce_command import duration

STEPS = "selffl-steps"


def job(name: str, folder: Path) -> RecipeJob:
    return RecipeJob(name, "smoke", folder, (0,), {"workers": 1})


def measured_here(recipe_job: RecipeJob) -> list[tuple[str, Any]]:
    """What a process for this job would say, without one."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    measure_recipe(recipe_job, sender, threading.Event())
    messages = []
    while True:
        try:
            messages.append(receiver.recv())
        except EOFError:
            return messages


def test_what_a_stopped_process_left_is_gone_on_with(tmp_path: Path) -> None:
    shares: list[float] = []
    stopped = run_recipes(
        [job(STEPS, tmp_path)], 2, lambda state: shares.append(state.shares[STEPS]), lambda: any(shares)
    )
    assert (stopped.done, stopped.failures) == ([], {})
    assert 0 < stopped.shares[STEPS] < 1
    *progress, last = measured_here(job(STEPS, tmp_path))
    assert last == ("done", None)
    kinds = [kind for kind, _ in progress]
    assert kinds == ["resumed"] * kinds.count("resumed") + ["share"] * kinds.count("share")
    resumed = max(share for kind, share in progress if kind == "resumed")
    assert resumed > stopped.shares[STEPS] - 0.01  # it goes on where the process was: no work of this sitting
    assert not read_reproduction(load_recipe(STEPS), "smoke", tmp_path).missing
    assert (tmp_path / "index.html").exists()
    shown: list[PoolState] = []
    again = run_recipes([job(STEPS, tmp_path)], 1, shown.append)  # what is done gets no process
    assert (again.shares[STEPS], again.done, again.busy) == (1.0, [STEPS], 0.0)
    (tmp_path / "index.html").unlink()
    idle = run_recipes([job(STEPS, tmp_path)], 1, lambda state: None, lambda: True)  # its page is missing; not begun
    assert (idle.shares[STEPS], idle.done) == (1.0, [])
    receiver, sender = multiprocessing.Pipe(duplex=False)
    receiver.close()
    measure_recipe(job(STEPS, tmp_path), sender, threading.Event())  # its parent was killed: it ends without a word


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this system has no signal masks")
def test_ctrl_c_does_not_reach_a_process_that_starts(tmp_path: Path) -> None:
    """It is sent as soon as the process is there, long before that has imported anything: no failure, no trace."""

    def interrupt(state: PoolState) -> None:
        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)

    stopped = run_recipes([job(STEPS, tmp_path)], 1, interrupt, lambda: bool(multiprocessing.active_children()))
    assert (stopped.done, stopped.failures) == ([], {})


def test_a_recipe_that_fails_says_why(tmp_path: Path) -> None:
    record = tmp_path / "parts" / "letters.json"
    record.parent.mkdir()
    record.write_text('{"identity": "of another run"}')
    [(kind, text)] = measured_here(job(STEPS, tmp_path))
    assert kind == "failed"
    assert "was measured with other settings" in str(text)


def test_the_time_left_by_hand() -> None:
    """Half of the longer recipe was done in 100 s of two processes. Left are its other half, which one process has to
    do, and the shorter one."""
    state = PoolState({"selffl-ablation": 0.0, STEPS: 0.0})
    assert state.seconds_left(2) is None
    state.advance("selffl-ablation", 0.5)
    state.busy = 100.0
    half = minutes("selffl-ablation", "small") / 2
    pace = 100 / half
    assert state.seconds_left(2) == pytest.approx(pace * max((half + minutes(STEPS, "small")) / 2, half))
    state.failures[STEPS] = "it did not start"
    assert state.seconds_left(2) == pytest.approx(pace * half)
    state.done.append("selffl-ablation")
    assert state.seconds_left(2) == 0.0


def test_at_the_scale_smoke_all_recipes_are_as_long() -> None:
    """The longest recipe at the scale small says nothing of the others' trials."""
    longest = max(MINUTES, key=lambda name: MINUTES[name])
    state = PoolState({longest: 0.0, STEPS: 0.0}, "smoke")
    state.advance(longest, 1.0)
    state.done.append(longest)
    state.busy = 30.0
    assert state.seconds_left(1) == pytest.approx(30.0)


def test_minutes_are_those_of_recipes() -> None:
    assert set(MINUTES) <= set(RECIPES)
    assert [duration(seconds) for seconds in (5, 90, 3590, 3660)] == ["1 min", "2 min", "1 h 00 min", "1 h 01 min"]
