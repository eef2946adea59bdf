"""Rows of one call, shared out among idle threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.core.threads import SLICES, WORTH_A_THREAD, OneCoreThreads, idle_threads, share_rows


@pytest.fixture(scope="module")
def three() -> Iterator[OneCoreThreads]:
    pool = OneCoreThreads(3)
    yield pool
    pool.close()


def slices_of(work: list[float]) -> list[slice]:
    """In the order of rows; appending is safe from threads."""
    slices: list[slice] = []
    share_rows(slices.append, np.array(work))
    return sorted(slices, key=lambda rows: rows.start)


@given(work=st.lists(st.integers(0, 5), max_size=12))
def test_every_row_is_in_one_slice_whatever_the_work(work: list[int], three: OneCoreThreads) -> None:
    with idle_threads(three):
        slices = slices_of([amount * WORTH_A_THREAD for amount in work])
    assert [row for rows in slices for row in range(rows.start, rows.stop)] == list(range(len(work)))
    assert len(slices) <= 3 * SLICES


def test_slices_have_about_the_same_work(three: OneCoreThreads) -> None:
    with idle_threads(three):
        assert slices_of([WORTH_A_THREAD] * 12) == [slice(first, first + 2) for first in range(0, 12, 2)]
        work = [9 * WORTH_A_THREAD, *[WORTH_A_THREAD] * 9]  # the first row is half of it
        assert slices_of(work) == [slice(0, 1), slice(1, 4), slice(4, 7), slice(7, 10)]


def test_little_work_and_work_without_idle_threads_stay_where_they_are(three: OneCoreThreads) -> None:
    where: list[str] = []

    def note(rows: slice) -> None:
        where.append(threading.current_thread().name)

    share_rows(note, np.full(10, WORTH_A_THREAD))
    with idle_threads(three):
        share_rows(note, np.full(10, WORTH_A_THREAD / 11))
        assert where == [threading.current_thread().name] * 2
        share_rows(lambda rows: share_rows(note, np.full(10, WORTH_A_THREAD)), np.full(3, WORTH_A_THREAD))
    assert len(where) == 5  # three rows make three slices, and busy threads share out nothing themselves
    share_rows(note, np.full(10, WORTH_A_THREAD))
    assert where[-1] == threading.current_thread().name


def test_an_error_in_a_thread_reaches_the_caller(three: OneCoreThreads) -> None:
    def fail(rows: slice) -> None:
        if rows.stop == 3:
            raise ValueError("of the last rows")

    with idle_threads(three), pytest.raises(ValueError, match="of the last rows"):
        share_rows(fail, np.full(3, WORTH_A_THREAD))


def test_threads_start_at_the_first_use_and_can_be_used_again_after_closing() -> None:
    before = set(threading.enumerate())
    pool = OneCoreThreads(2)
    assert set(threading.enumerate()) == before
    for _ in range(2):
        assert list(pool.map(lambda _: torch.get_num_threads(), range(4))) == [1] * 4
        assert len(set(threading.enumerate()) - before) == 2
        pool.close()
        assert set(threading.enumerate()) == before
