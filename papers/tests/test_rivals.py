"""The comparison with other libraries: its work, its referee and its yardstick; no test here judges a time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rivals
import torch
from contestant import SIDES, entry_of
from kinfed_side import KinfedSide
from loop_side import LoopSide
from rivals import BEGIN, END, Contest, Contestant, ContestantError, Results, Times, contest_row, leave_out, put_into
from work import EIGHT, WORKS, Images, make_images

TINY = replace(WORKS["W2"], clients=4, active=4, examples=40, fewest=40, batch=40, epochs=3)


@pytest.fixture(scope="module")
def images() -> Images:
    return make_images(TINY)


def test_data_is_the_same_whoever_makes_or_reads_it(images: Images, tmp_path: Path) -> None:
    again = make_images(TINY)
    images.save(tmp_path / "images.npz")
    read = Images.load(tmp_path / "images.npz")
    for name, value in vars(images).items():
        assert np.array_equal(value, getattr(again, name))
        assert np.array_equal(value, getattr(read, name))
    assert np.diff(images.offsets).tolist() == [40] * 4


SMALL = {"clients": 2, "active": 2, "examples": 12, "fewest": 12, "batch": 12, "epochs": 2, "held_out": 40}


@pytest.mark.parametrize("name", ["LSTM", "RESNET18", "TRANSFORMER"])
def test_models_of_both_sides_are_the_same(name: str) -> None:
    """Running statistics of BatchNorm are averaged as well."""
    work = replace(WORKS[name], **SMALL)
    images = make_images(work)
    ours, loop = KinfedSide(work, images, "fedavg", cores=1), LoopSide(work, images, "fedavg", cores=1)
    task = ours._loop.task
    loop._w = [value.clone() for value in task.unflatten(task.init(0)).values()]
    ours.rounds(1)
    loop.rounds(1)
    server = torch.cat([value.reshape(-1) for value in loop._w])
    # Examples are summed in another order, which BatchNorm amplifies; a step moves parameters by some 1e-2.
    torch.testing.assert_close(ours._loop.server.w, server, rtol=1e-3, atol=1e-4)
    assert abs(ours.accuracy() - loop.accuracy()) <= 0.05  # two of 40 examples
    ours.close()


@pytest.mark.parametrize("method", EIGHT)
def test_the_loop_computes_what_kinfed_computes(method: str, images: Images) -> None:
    """Batches of all examples are the same whatever the order they are drawn in."""
    ours, loop = KinfedSide(TINY, images, method, cores=1), LoopSide(TINY, images, method, cores=1)
    task = ours._loop.task
    loop._w = [value.clone() for value in task.unflatten(task.init(0)).values()]
    for side in (ours, loop):
        side.rounds(2)
    ours.close()
    model = torch.cat([value.flatten() for value in loop._w])
    shared = next(iter(ours._loop.server.named().values()))  # of FedRep, what lies below the head
    assert len(shared) == len(model) - (10 * 128 + 10 if method == "fedrep" else 0)
    assert float((shared - model[: len(shared)]).abs().max()) < 1e-5
    assert float((shared - task.init(0)[: len(shared)]).abs().max()) > 1e-3


def test_contestants_have_the_methods_they_say() -> None:
    assert {"kinfed", "loop", "fedjax", "pfl", "flower"} <= SIDES.keys()
    assert all(set(entry.methods) <= set(EIGHT) for entry in SIDES.values())
    own = entry_of("some/place/mine.py:MySide")
    assert (own.module, own.name) == ("mine", "MySide")


def test_a_row_compares_with_the_loop_and_the_fastest_rival() -> None:
    times = {
        name: Times(cpu=[seconds, 2 * seconds], wall=[1.0, 1.0], accuracy=0.5)
        for name, seconds in (("loop", 0.4), ("fedjax", 0.2), ("pfl", 0.3), ("kinfed", 0.1))
    }
    row = contest_row(Contest("W1", "fedavg", 1, times, limit=0.05), ["loop", "fedjax", "pfl", "flower", "kinfed"])
    assert row == [
        "W1", "fedavg", "1", "400", "200", "300", "", "100", "4.0", "2.0 (2.0) fedjax", "50 (3.0)", "50-50 %"
    ]  # fmt: skip


def test_tables_take_the_place_of_the_last_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="marks"):
        put_into(page, "new")


def test_a_rival_that_fails_is_named_and_the_others_go_on() -> None:
    log = "Traceback ...\nValueError: no cluster\nThe above exception was the cause of another:\nRuntimeError: ended\n"
    results = Results()
    assert "no cluster" in leave_out(ContestantError("flower", log), results, "LR_MNIST fedavg, 1 core(s)")
    assert results.failures == ["LR_MNIST fedavg, 1 core(s): flower ended without an answer: ValueError: no cluster"]
    with pytest.raises(SystemExit, match="no cluster"):
        leave_out(ContestantError("kinfed", log), results, "")


def test_a_rival_that_does_not_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "PATIENCE", 0.0)
    with pytest.raises(ContestantError, match="loop ended without an answer: TimeoutError: none in 0 seconds"):
        Contestant("loop", Path(sys.executable), WORKS["W2"], "fedavg", tmp_path / "images.npz", cores=1)


@pytest.mark.timeout(60)
def test_who_is_ended_leaves_nobody_behind() -> None:
    """A child of the one that is ended holds its output, too, which ends when nobody does any more."""
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    rivals.end_session(process)
    assert process.stdout.read() == ""
    process.stdout.close()
