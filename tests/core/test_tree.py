"""Trees of tensors: rows in, rows out, nothing lost, nothing written where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.core.tree import Nothing, Tree, is_broadcast, runs, take_rows


@dataclass
class Inner(Tree):
    score: Tensor  # [n]
    extra: Tensor | None = None


@dataclass
class State(Tree):
    v: Tensor  # [n, P]
    visits: Tensor  # [n] int64
    seen: Tensor  # [n] bool
    inner: Inner
    absent: Tensor | None = None


def state(n: int, first: int = 0) -> State:
    number = torch.arange(first, first + n)
    v = number[:, None] + torch.tensor([0.0, 0.25, 0.5])
    return State(v, number, number % 2 == 0, Inner(number.to(torch.float64) / 3))


def same(a: Tree, b: Tree) -> bool:
    ours, theirs = a.named(), b.named()
    return (
        type(a) is type(b)
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours)
    )


def test_names_are_joined_by_dots_and_none_is_left_out() -> None:
    assert list(state(2).named()) == ["v", "visits", "seen", "inner.score"]
    assert Nothing().named() == {}


def test_like_is_the_inverse_of_named() -> None:
    rows = state(3)
    back = state(1).like(rows.named())
    assert same(back, rows)
    assert back.absent is None
    assert back.inner.extra is None
    assert same(Nothing().like({}), Nothing())


@pytest.mark.parametrize("change", ["missing", "foreign", "present where None stands"])
def test_like_refuses_other_fields(change: str) -> None:
    named = state(2).named()
    if change == "missing":
        del named["inner.score"]
    else:
        named["other" if change == "foreign" else "absent"] = torch.zeros(2)
    with pytest.raises(ValueError, match="cannot hold"):
        state(2).like(named)


def test_map_keeps_structure_and_leaves_the_original() -> None:
    rows = state(2)
    mapped = rows.map(lambda tensor: tensor[:1])
    assert same(mapped, state(1))
    assert same(rows, state(2))


@pytest.mark.parametrize(
    "index",
    [torch.tensor([3, 0]), torch.tensor([True, False, False, True, False]), slice(1, 4), torch.tensor([], dtype=int)],
)
def test_take_picks_the_same_rows_of_every_field(index: Tensor | slice) -> None:
    rows = state(5)
    taken = rows.take(index)
    numbers = torch.arange(5)[index]
    assert torch.equal(taken.visits, numbers)
    assert torch.equal(taken.v[:, 0], numbers.to(torch.float32))
    assert torch.equal(taken.seen, numbers % 2 == 0)
    assert torch.equal(taken.inner.score, numbers.to(torch.float64) / 3)


@given(st.integers(1, 8), st.data())
def test_what_is_put_can_be_taken_and_the_rest_stays(n: int, data: st.DataObject) -> None:
    index = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n)), dtype=torch.int64)
    rows = state(n)
    rows.put(index, state(len(index), first=100))
    assert same(rows.take(index), state(len(index), first=100))
    others = torch.ones(n, dtype=torch.bool)
    others[index] = False
    assert same(rows.take(others), state(n).take(others))


def test_put_takes_slices_and_masks() -> None:
    rows = state(4)
    rows.put(slice(1, 3), state(2, first=50))
    assert rows.visits.tolist() == [0, 50, 51, 3]
    rows.put(torch.tensor([True, False, False, True]), state(2, first=70))
    assert rows.visits.tolist() == [70, 50, 51, 71]


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([1, 2]), torch.tensor([False, True, True])])
def test_put_keeps_the_type_of_the_state(index: Tensor | slice) -> None:
    rows = Inner(torch.zeros(3, dtype=torch.float64))
    rows.put(index, Inner(torch.tensor([0.5, 1.5], dtype=torch.float32)))
    assert rows.score.dtype == torch.float64
    assert rows.score.tolist() == [0.0, 0.5, 1.5]
    counts = Inner(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"cannot put score of type torch\.float32 into torch\.int64"):
        counts.put(index, Inner(torch.tensor([0.5, 1.5])))


def test_put_refuses_other_fields() -> None:
    rows = state(2)
    with pytest.raises(ValueError, match="cannot put rows with fields"):
        rows.put(slice(None), State(rows.v, rows.visits, rows.seen, rows.inner, absent=torch.zeros(2)))
    lacking = State(rows.v, rows.visits, rows.seen, Inner(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ValueError, match="cannot put rows with fields"):
        lacking.put(slice(None), rows)


@pytest.mark.parametrize("index", [slice(0, 2), torch.tensor([0, 1]), torch.tensor([True, True, False])])
@pytest.mark.parametrize("given", [1, 3])
def test_put_refuses_another_number_of_rows_and_writes_nothing(index: Tensor | slice, given: int) -> None:
    rows = state(3)
    with pytest.raises(ValueError, match="is wanted"):
        rows.put(index, state(given, first=9))
    # A field in the middle that does not fit must not leave those before it written.
    part = state(2, first=9)
    part.seen = torch.ones(2, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="cannot put seen"):
        rows.put(index, part)
    assert same(rows, state(3))


@pytest.mark.parametrize("index", [slice(0, 1), torch.tensor([0])])
def test_put_into_an_expand_is_refused(index: Tensor | slice) -> None:
    shared = Inner(torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"clone\(\)"):
        shared.put(index, Inner(torch.ones(1)))
    assert float(shared.score.sum()) == 0
    own = shared.clone()
    own.put(index, Inner(torch.ones(1)))
    assert own.score.tolist() == [1, 0, 0]


def test_an_expand_to_one_row_can_be_written() -> None:
    alone = Inner(torch.zeros(5).expand(1, 5))
    alone.put(slice(None), Inner(torch.ones(1, 5)))
    assert float(alone.score.sum()) == 5


def test_stack_puts_blocks_one_after_the_other() -> None:
    assert same(State.stack([state(2), state(3, first=2), state(0, first=5), state(1, first=5)]), state(6))
    assert same(State.stack([state(2)]), state(2))
    assert same(Nothing.stack([Nothing(), Nothing()]), Nothing())


def test_stack_refuses_parts_that_differ_and_no_parts() -> None:
    full, bare = Inner(torch.zeros(1), torch.zeros(1)), Inner(torch.zeros(1))
    for parts in ([full, bare], [bare, full]):
        with pytest.raises(ValueError, match="cannot stack"):
            Inner.stack(parts)
    with pytest.raises(ValueError, match="no Inner to stack"):
        Inner.stack([])


def test_bytes_count_what_an_expand_stands_for() -> None:
    assert state(4).nbytes == 4 * (3 * 4 + 8 + 1 + 8)
    assert Inner(torch.zeros(1, 10).expand(7, 10)).nbytes == 7 * 10 * 4
    assert Inner(torch.zeros(3, dtype=torch.float16)).nbytes == 6
    assert Nothing().nbytes == 0


def test_clone_owns_its_memory() -> None:
    rows = Inner(torch.zeros(1, 2).expand(3, 2), torch.zeros(3))
    copy = rows.clone()
    copy.score += 1
    copy.extra += 1
    assert float(rows.score.sum() + rows.extra.sum()) == 0
    assert copy.score.is_contiguous()
    assert copy.score[0, 0] == copy.score[2, 1] == 1


def test_to_moves_every_tensor() -> None:
    moved = state(2).to("meta")
    assert {tensor.device.type for tensor in moved.named().values()} == {"meta"}
    assert moved.absent is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_a_bad_number_anywhere_are_found(bad: float) -> None:
    rows = state(4)
    rows.v[1, 2] = bad
    rows.inner.score[3] = bad
    assert rows.finite_rows(4).tolist() == [True, False, True, False]


def test_infinities_that_cancel_are_found() -> None:
    assert Inner(torch.tensor([[float("inf"), float("-inf")], [1.0, 2.0]])).finite_rows(2).tolist() == [False, True]


def test_counts_flags_and_empty_tensors_are_finite() -> None:
    assert state(3).finite_rows(3).all()
    assert Nothing().finite_rows(2).tolist() == [True, True]
    assert Inner(torch.zeros(2, 0)).finite_rows(2).tolist() == [True, True]
    assert state(0).finite_rows(0).tolist() == []
    assert Inner(torch.full((2,), torch.iinfo(torch.int64).max)).finite_rows(2).all()


def test_a_long_half_precision_row_is_finite() -> None:
    """Its plain sum, 100,000, would not fit the type."""
    rows = Inner(torch.ones(2, 100_000, dtype=torch.float16))
    assert rows.finite_rows(2).all()
    rows.score[1, 5] = float("inf")
    assert rows.finite_rows(2).tolist() == [True, False]


def test_a_shared_row_is_judged_for_all_it_stands_for() -> None:
    assert Inner(torch.tensor([[1.0, float("nan")]]).expand(3, 2)).finite_rows(3).tolist() == [False] * 3


@pytest.mark.parametrize("pattern", ["", "0", "1", "0110", "1011", "111", "000", "10100111"])
def test_runs_are_what_a_mask_chooses(pattern: str) -> None:
    mask = torch.tensor([c == "1" for c in pattern], dtype=torch.bool)
    columns = torch.arange(len(mask))
    found = runs(mask)
    assert torch.equal(torch.cat([columns[:0], *(columns[run] for run in found)]), columns[mask])
    assert all(before.stop < after.start for before, after in pairwise(found))  # none could be one with the next


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2], [1, 2], [2, 1], [0, 0, 2], [3, 1, 3]])
def test_rows_by_number_are_views_where_they_can_be(rows: list[int]) -> None:
    x, index = torch.arange(12.0).view(4, 3), torch.tensor(rows, dtype=torch.int64)
    found = take_rows(x, index)
    assert torch.equal(found, x[index])
    follow = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
    assert (found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == follow


def test_one_row_for_all_clients_is_told_from_equal_rows() -> None:
    row = torch.arange(3.0)
    assert is_broadcast(row.expand(4, 3))
    assert not is_broadcast(row.expand(4, 3).clone())
    assert not is_broadcast(torch.zeros(4, 1).expand(4, 3))


def test_rows_go_into_the_order_of_their_places() -> None:
    rows = state(4)
    assert rows.sorted_by(torch.arange(4)) is rows
    assert same(rows.sorted_by(torch.tensor([2, 0, 3, 1])), rows.take(torch.tensor([1, 3, 0, 2])))


def test_what_lies_in_the_memory_of_another_tree_is_copied_and_nothing_else() -> None:
    rows = state(4)
    view = State(rows.v[1:3], torch.arange(2), rows.seen[:2].clone(), Inner(rows.inner.score[:2]))
    apart = view.apart_from(rows)
    rows.v.zero_()
    rows.inner.score.zero_()
    assert apart.v[0, 0] == 1.0
    assert apart.inner.score[1] == 1 / 3
    assert apart.visits is view.visits
    assert view.apart_from(state(4)) is view


def test_a_sum_that_overflows_over_rows_rejects_none_of_them() -> None:
    rows = Inner(torch.tensor([3e38, 3e38, 1.0], dtype=torch.float32))
    assert rows.finite_rows(3).tolist() == [True, True, True]
    rows.score[1] = torch.inf
    assert rows.finite_rows(3).tolist() == [True, False, True]
