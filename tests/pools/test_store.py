"""Client states by id: only of those seen, in memory or in mapped files, never of another method."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.core.tree import Nothing, Tree
from kinfed.errors import CheckpointError, StorageError
from kinfed.pools.store import ClientStore


@dataclass
class State(Tree):
    v: Tensor  # [n, 3]
    rounds: Tensor  # [n] int64
    seen: Tensor  # [n] bool
    head: Tensor  # [n, 0]: the part of a model that a split may leave empty


def fresh(ids: Tensor) -> State:
    """Recognizable by its id: v = -id, nothing seen."""
    n = len(ids)
    v = -ids[:, None].to(torch.float32).expand(n, 3)
    return State(v, torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.bool), torch.zeros(n, 0))


def made(ids: list[int], round: int) -> State:
    n = len(ids)
    v = torch.tensor(ids, dtype=torch.float32)[:, None] + 100.0 * round + torch.arange(3) / 10
    return State(v, torch.full((n,), round), torch.ones(n, dtype=torch.bool), torch.zeros(n, 0))


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStore[State]:
    return ClientStore(10, fresh, tmp_path / "states" if request.param == "mapped" else None)


def same(a: Tree, b: Tree) -> bool:
    left, right = a.named(), b.named()
    return left.keys() == right.keys() and all(
        torch.equal(left[k], right[k]) and left[k].dtype == right[k].dtype for k in left
    )


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_unseen_clients_are_made_anew_and_leave_no_trace(store: ClientStore[State]) -> None:
    assert same(store.take(ids(7, 2)), fresh(ids(7, 2)))
    assert store.seen.tolist() == []
    assert store.named().keys() == {"ids"}
    store.put(ids(2), made([2], 1))
    mixed = store.take(ids(7, 2, 5))
    assert mixed.v[:, 0].tolist() == [-7, 102, -5]
    assert mixed.seen.tolist() == [False, True, False]
    assert store.seen.tolist() == [2]


def test_states_grow_with_the_clients_seen(store: ClientStore[State]) -> None:
    expected: dict[int, int] = {}
    for round, cohort in enumerate(([4, 1], [9], [1, 3, 0], [9, 2, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), 1):
        store.put(ids(*cohort), made(cohort, round))
        expected |= dict.fromkeys(cohort, round)
        known = list(expected)
        assert sorted(store.seen.tolist()) == sorted(known)
        assert store.take(ids(*known)).rounds.tolist() == [expected[k] for k in known]
        rows = store.named()["rows.v"]
        assert rows.shape == (len(known), 3)  # no memory for the others in a checkpoint
    assert store.seen.tolist() == [4, 1, 9, 3, 0, 2, 5, 6, 7, 8]  # in the order they came


def test_room_is_never_larger_than_the_population(store: ClientStore[State]) -> None:
    for k in range(10):
        store.put(ids(k), made([k], 1))
        assert store._rows is not None
        assert k < len(store._rows.v) <= 10


def test_what_is_taken_is_a_copy(store: ClientStore[State]) -> None:
    store.put(ids(3, 4), made([3, 4], 1))
    taken = store.take(ids(3))
    taken.v.zero_()
    assert same(store.take(ids(3, 4)), made([3, 4], 1))
    given_rows = made([5], 2)
    store.put(ids(5), given_rows)
    given_rows.v.zero_()
    assert same(store.take(ids(5)), made([5], 2))


@dataclass
class Pair(Tree):
    old: Tensor  # [n, 2]
    new: Tensor  # [n, 2]


def test_neighbours_are_lent_without_a_copy_and_may_come_back_as_another_field() -> None:
    store = ClientStore(5, lambda who: Pair(torch.zeros(len(who), 2), torch.zeros(len(who), 2)))
    values = torch.arange(10.0).reshape(5, 2)
    store.put(ids(3, 1, 4, 0, 2), Pair(values, values + 100))
    lent, copied = store.take(ids(1, 4, 0), borrow=True), store.take(ids(4, 1), borrow=True)
    memory = store.named()["rows.new"].untyped_storage().data_ptr()
    assert lent.new.untyped_storage().data_ptr() == memory != copied.new.untyped_storage().data_ptr()
    store.put(ids(1, 4, 0), Pair(lent.new, lent.old))
    assert same(store.take(ids(1, 4, 0)), Pair(values[1:4] + 100, values[1:4]))
    assert same(store.take(ids(3, 2)), Pair(values[[0, 4]], values[[0, 4]] + 100))


def test_nothing_is_lent_where_a_client_is_new() -> None:
    store = ClientStore(5, fresh)
    store.put(ids(2), made([2], 1))
    store.take(ids(2, 3), borrow=True).v.zero_()
    assert same(store.take(ids(2)), made([2], 1))


@given(st.lists(st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=8), max_size=8))
def test_a_store_is_a_dictionary(cohorts: list[list[int]]) -> None:
    store = ClientStore(8, fresh)
    expected = {k: fresh(ids(k)) for k in range(8)}
    for round, cohort in enumerate(cohorts, 1):
        store.put(ids(*cohort), made(cohort, round))
        expected |= {k: made([k], round) for k in cohort}
        for k in range(8):
            assert same(store.take(ids(k)), expected[k])
    assert same(store.take(torch.arange(8)), State.stack([expected[k] for k in range(8)]))


def test_mapped_states_leave_no_file_and_survive(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    store = ClientStore(1000, fresh, folder)
    for round in range(1, 8):
        cohort = list(range(round * 40))
        store.put(ids(*cohort), made(cohort, round))
        assert list(folder.iterdir()) == []
    assert same(store.take(torch.arange(280)), made(list(range(280)), 7))
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder) in maps.read_text()  # the rows do live in mapped files


def test_stores_may_share_a_folder(tmp_path: Path) -> None:
    one, two = ClientStore(5, fresh, tmp_path), ClientStore(5, fresh, tmp_path)
    one.put(ids(0, 1), made([0, 1], 1))
    two.put(ids(0, 1), made([0, 1], 2))
    assert same(one.take(ids(0, 1)), made([0, 1], 1))
    assert same(two.take(ids(0, 1)), made([0, 1], 2))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = ClientStore(5, fresh, blocked / "states")
    with pytest.raises(StorageError, match=f"cannot keep client states in {blocked / 'states'}"):
        store.put(ids(1), made([1], 1))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room is reserved with posix_fallocate")
def test_a_full_disk_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = ClientStore(5, fresh, tmp_path)
    with pytest.raises(StorageError, match="No space left on device"):
        store.put(ids(1), made([1], 1))
    assert list(tmp_path.iterdir()) == []


def test_loading_what_was_named_gives_the_same_store(store: ClientStore[State]) -> None:
    store.put(ids(6, 2), made([6, 2], 1))
    store.put(ids(2, 9), made([2, 9], 2))
    saved = {name: tensor.clone() for name, tensor in store.named().items()}
    other = ClientStore(10, fresh)
    other.put(ids(0, 1), made([0, 1], 5))  # forgotten on loading
    other.load(saved)
    assert other.seen.tolist() == store.seen.tolist() == [6, 2, 9]
    assert same(other.take(torch.arange(10)), store.take(torch.arange(10)))
    other.put(ids(1), made([1], 3))  # and it goes on from there
    assert other.take(ids(1, 2)).rounds.tolist() == [3, 2]
    assert int(saved["rows.rounds"][1]) == 2


def test_an_empty_store_can_be_stored(store: ClientStore[State]) -> None:
    other = ClientStore(10, fresh)
    other.put(ids(4), made([4], 1))
    other.load(store.named())
    assert other.seen.tolist() == []
    assert same(other.take(ids(4)), fresh(ids(4)))


def test_methods_without_client_state_need_none() -> None:
    store = ClientStore(4, lambda who: Nothing())
    store.put(ids(1, 3), Nothing())
    assert store.seen.tolist() == [1, 3]
    assert store.named().keys() == {"ids"}
    assert store.take(ids(0, 1)).named() == {}
    other = ClientStore(4, lambda who: Nothing())
    other.load(store.named())
    assert other.seen.tolist() == [1, 3]


def foreign(store: ClientStore[State]) -> dict[str, tuple[dict[str, Tensor], str]]:
    good = {name: tensor.clone() for name, tensor in store.named().items()}
    without_v = {name: tensor for name, tensor in good.items() if name != "rows.v"}
    return {
        "a field missing": (without_v, r"client state has fields \['head', 'rounds', 'seen'\]; the method keeps"),
        "another field": (good | {"rows.w": torch.zeros(2)}, "client state has fields"),
        "another model": (good | {"rows.v": torch.zeros(2, 4)}, r"v is torch.float32 of shape \[2, 4\]; .*\[2, 3\]"),
        "another type": (good | {"rows.v": good["rows.v"].double()}, "v is torch.float64"),
        "fewer rows": (good | {"rows.v": good["rows.v"][:1]}, r"shape \[1, 3\]"),
        "another population": (good | {"ids": ids(3, 10)}, "ids up to 10; there are 10 clients"),
        "no ids": ({k: v for k, v in good.items() if k != "ids"}, "without the ids"),
        "one id twice": (good | {"ids": ids(3, 3)}, "same id twice"),
    }


@pytest.mark.parametrize(
    "kind",
    ["a field missing", "another field", "another model", "another type", "fewer rows", "another population",
     "no ids", "one id twice"],
)  # fmt: skip
def test_foreign_states_are_refused_and_ours_kept(store: ClientStore[State], kind: str) -> None:
    store.put(ids(3, 4), made([3, 4], 1))
    tensors, message = foreign(store)[kind]
    with pytest.raises(CheckpointError, match=message):
        store.load(tensors)
    assert same(store.take(ids(3, 4)), made([3, 4], 1))


def test_rows_that_do_not_fit_are_refused(store: ClientStore[State]) -> None:
    store.put(ids(3, 4), made([3, 4], 1))
    with pytest.raises(ValueError, match="shape"):
        store.put(ids(3, 4), made([3], 2))  # one row would be written to both
    assert same(store.take(ids(3, 4)), made([3, 4], 1))


def test_states_move_to_files_when_they_outgrow_their_bound(tmp_path: Path) -> None:
    """A row takes 21 bytes: twelve of v, eight of rounds, one of seen."""
    folder = tmp_path / "states"
    store = ClientStore(1000, fresh, folder, bound=21 * 10)
    store.put(torch.arange(10), made(list(range(10)), 1))
    assert not folder.exists()
    store.put(ids(10), made([10], 2))
    assert folder.exists()
    assert same(store.take(torch.arange(10)), made(list(range(10)), 1))
    assert same(store.take(ids(10)), made([10], 2))
