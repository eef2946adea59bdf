"""Recipes in processes of their own: progress, a stop, a failure, going on, and the time left."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from kinfed.cli.reproduce_command import duration
from kinfed.reproduce.measure import is_done
from kinfed.reproduce.recipe_pool import PoolState, RecipeJob, measure_recipe, minutes, run_recipes
from kinfed.reproduce.recipes import MINUTES, RECIPES, load_recipe

STEPS = "selffl-steps"


def job(name: str, folder: Path) -> RecipeJob:
    return RecipeJob(name, "smoke", folder, (0,), {"workers": 1})


def test_a_process_that_is_stopped_goes_on_in_the_next(tmp_path: Path) -> None:
    shares: list[float] = []
    first = run_recipes(
        [job(STEPS, tmp_path)], 2, lambda state: shares.append(state.shares[STEPS]), lambda: any(shares)
    )
    assert (first.done, first.failures) == ([], {})
    assert 0 < first.shares[STEPS] < 1
    second = run_recipes([job(STEPS, tmp_path)], 1, lambda state: None)
    assert (second.done, second.failures) == ([STEPS], {})
    assert is_done(load_recipe(STEPS), "smoke", tmp_path, (0,), {"workers": 1})
    assert (tmp_path / "index.html").exists()
    third = run_recipes([job(STEPS, tmp_path)], 1, lambda state: None, lambda: True)  # nothing is begun
    assert (third.shares[STEPS], third.done) == (1.0, [])


def test_a_recipe_that_fails_says_why(tmp_path: Path) -> None:
    record = tmp_path / "parts" / "letters.json"
    record.parent.mkdir()
    record.write_text('{"identity": "of another run"}')
    receiver, sender = multiprocessing.Pipe(duplex=False)
    measure_recipe(job(STEPS, tmp_path), sender, threading.Event())
    kind, text = receiver.recv()
    assert kind == "failed"
    assert "was measured with other settings" in text
    with pytest.raises(EOFError):
        receiver.recv()


def test_the_time_left_by_hand() -> None:
    """Half of the longer recipe was done in 100 s of two processes. Left are its other half, which one process has to
    do, and the shorter one."""
    state = PoolState({"selffl-ablation": 0.0, STEPS: 0.0})
    assert state.seconds_left(2) is None
    state.advance("selffl-ablation", 0.5)
    state.busy = 100.0
    half = minutes("selffl-ablation") / 2
    pace = 100 / half
    assert state.seconds_left(2) == pytest.approx(pace * max((half + minutes(STEPS)) / 2, half))
    state.failures[STEPS] = "it did not start"
    assert state.seconds_left(2) == pytest.approx(pace * half)
    state.done.append("selffl-ablation")
    assert state.seconds_left(2) == 0.0


def test_minutes_are_those_of_recipes() -> None:
    assert set(MINUTES) <= set(RECIPES)
    assert [duration(seconds) for seconds in (5, 90, 3590, 3660)] == ["1 min", "2 min", "1 h 00 min", "1 h 01 min"]
