"""Orders of examples that compiled loops draw are those of kinfed.data.examples.windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.data.examples import windows
from kinfed.data.examples.windows import Windows
from kinfed.engine.compiled.fused_steps import draw_orders

pytestmark = pytest.mark.timeout(400)  # the first of these tests on a machine compiles


def windows_of(counts: list[int], steps: list[int], by_epoch: bool, seed: int = 0) -> Windows:
    count = torch.tensor(counts, dtype=torch.int64)
    key = torch.randint(-(1 << 62), 1 << 62, (len(counts),), generator=torch.Generator().manual_seed(seed))
    steps_taken = torch.tensor(steps, dtype=torch.int64) * (count > 0)
    return Windows(torch.arange(sum(counts)), count.cumsum(0) - count, count, steps_taken, key, 10, by_epoch)


@given(
    clients=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 25)), min_size=1, max_size=5),
    by_epoch=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_orders_are_those_of_windows(clients: list[tuple[int, int]], by_epoch: bool, seed: int) -> None:
    counts, steps = map(list, zip(*clients, strict=True))
    whole = windows_of(counts, steps, by_epoch, seed)
    for client, (count, epochs) in enumerate(zip(whole.count, whole.epochs, strict=True)):
        order = np.empty(count * epochs, np.int64)
        draw_orders(whole.key[client], count, epochs, order, np.empty(count, np.int64))
        begin = whole.offset[client]
        assert order.tolist() == whole.order[begin : begin + len(order)].tolist()


def test_a_long_order_is_a_permutation() -> None:
    order = np.empty(100_003, np.int64)
    draw_orders(np.uint64(5), len(order), 1, order, np.empty_like(order))
    assert sorted(order.tolist()) == list(range(len(order)))
    assert order[:20].tolist() != sorted(order[:20].tolist())


def test_more_orders_than_a_word_can_number_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, steps = [7, 0, 30, 4, 12], [9, 3, 12, 1, 5]
    together = windows_of(counts, steps, by_epoch=True).order
    monkeypatch.setattr(windows, "MOST_EXAMPLES", 9)
    assert windows_of(counts, steps, by_epoch=True).order.tolist() == together.tolist()
