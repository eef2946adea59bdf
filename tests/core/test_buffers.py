"""Memory of large rows: used again only when nobody looks at it any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kinfed.core import buffers as large_rows
from kinfed.core.buffers import BOUNDARY, copied_rows, difference, empty_rows, forget_free_blocks
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.training.optimizers import make_optimizer


@pytest.fixture(autouse=True)
def small_rows_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(large_rows, "LARGE", 0)
    monkeypatch.setattr("kinfed.engine.training.optimizers.LARGE", 0)
    forget_free_blocks()
    yield
    forget_free_blocks()


def test_a_block_is_used_again_once_its_last_view_is_gone() -> None:
    like = torch.zeros(0)
    rows = empty_rows(like, 2, 1000)
    where, view = rows.data_ptr(), rows[1:].view(-1)[5:]
    del rows
    assert empty_rows(like, 2, 1000).data_ptr() != where  # the view still looks at it
    del view
    again = [empty_rows(like, 2, 1000).data_ptr() for _ in range(2)]
    assert where in again


def test_rows_in_use_never_share_a_block() -> None:
    rows = [copied_rows(torch.full((1, 500), float(k))) for k in range(8)]
    rows[2:5] = []
    rows += [difference(torch.full((1, 500), 10.0 + k), torch.ones(1, 500)) for k in range(4)]
    assert [float(x[0, -1]) for x in rows] == [0, 1, 5, 6, 7, 9, 10, 11, 12]
    assert all(bool((x == x[0, 0]).all()) for x in rows)


def test_rows_begin_where_torch_lets_its_memory_begin() -> None:
    for width in (1, 63, 1001):
        rows = empty_rows(torch.zeros(0, dtype=torch.float64), 3, width)
        assert rows.data_ptr() % BOUNDARY == 0
        assert (rows.shape, rows.dtype) == ((3, width), torch.float64)
        assert rows.is_contiguous()


def test_free_blocks_are_bounded_and_can_be_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_rows, "KEPT", 3 * 4000)
    rows = [empty_rows(torch.zeros(0), 1000) for _ in range(5)]
    rows.clear()
    assert [len(blocks) for blocks in large_rows._free.values()] == [3]
    forget_free_blocks()
    assert not large_rows._free


def test_moments_in_a_block_of_their_own_begin_at_zero() -> None:
    columns = [slice(0, 3), slice(5, 7)]
    training = LocalTraining(lr=0.1, momentum=0.9)
    for _ in range(2):  # the second optimizer finds the block of the first
        x = torch.zeros(2, 8)
        optimizer = make_optimizer(training, columns, x)
        for _ in range(2):
            optimizer.step(slice(None), x, [torch.ones(2, 3), torch.ones(2, 2)], 0.1)
        expected = torch.zeros(2, 8)
        expected[:, [0, 1, 2, 5, 6]] = -0.29  # 0.1 (1 + 1.9)
        torch.testing.assert_close(x, expected)
