"""Shards and workers, without any process: a client does the same wherever it lives, and its state can move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.algorithms.common.averaging import ModelDown
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.mocha import Mocha
from kinfed.core.tree import Nothing
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.ragged import SPLITS
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import CheckpointError
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.worker import StateSnapshot, Worker, balance, compact, expected_work, make_shard
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise
from kinfed.testing import tiny_federation, tiny_model

SEED = 3
WORK = LocalTraining(batch=5, steps=4)


def whole() -> Federation:
    return tiny_federation().with_validation(0.2, SEED)


# ---- who goes where ----


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_everybody_is_dealt_once_and_no_shard_has_much_more_work_than_need_be(work: list[int], shards: int) -> None:
    shards = min(shards, len(work))
    cost = torch.tensor(work)
    members = balance(cost, shards)
    assert sorted(torch.cat(members).tolist()) == list(range(len(work)))
    assert all(len(ids) and ids.tolist() == sorted(ids.tolist()) for ids in members)
    largest = max(int(cost[ids].sum()) for ids in members)
    lower = max(sum(work) / shards, max(work))  # no way of dealing has a smaller largest sum
    assert largest <= max(4 / 3 * lower, lower + sorted(work)[-min(shards + 1, len(work))])


def test_a_client_with_much_work_gets_a_shard_of_its_own() -> None:
    assert [ids.tolist() for ids in balance(torch.tensor([10, 100, 10, 10]), 2)] == [[1], [0, 2, 3]]
    assert [len(ids) for ids in balance(torch.zeros(6, dtype=torch.int64), 3)] == [2, 2, 2]
    with pytest.raises(ValueError, match="got 5"):
        balance(torch.tensor([1, 1]), 5)


def test_work_is_counted_in_examples_of_a_round_and_an_evaluation() -> None:
    data = whole()
    steps = expected_work(FedAvg(LocalTraining(batch=5, steps=4)), data)
    assert steps.tolist() == (4 * data.train.count.clamp_max(5) + data.test.count).tolist()
    epochs = expected_work(FedAvg(LocalTraining(batch=5, steps=None, epochs=2)), data)
    assert bool((epochs >= data.train.count).all())


# ---- what is there ----


def test_a_shard_holds_its_clients_examples_and_nobody_elses() -> None:
    data = replace(whole(), tags=torch.arange(len(whole().labels)))
    ids = torch.tensor([1, 3, 4])
    shard = make_shard(data, ids)
    owned = sum(int(data.split(name).count[ids].sum()) for name in SPLITS)
    assert len(shard.features) == len(shard.labels) == owned < len(data.features)
    for k in ids.tolist():
        ours, theirs = shard.cohort(torch.tensor([k]), SEED, 2), data.cohort(torch.tensor([k]), SEED, 2)
        for name in SPLITS:
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.longest == other.longest
            (_, a), (_, b) = next(one.in_order()), next(other.in_order())
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)
            tags = shard.tags[shard.split(name)[k]]
            assert torch.equal(tags, data.tags[data.split(name)[k]])
    with pytest.raises(ValueError, match=r"clients \[0, 2\] do not live in this shard"):
        shard.cohort(torch.tensor([0, 1, 2]), SEED, 1)


def test_examples_that_two_clients_share_are_there_once() -> None:
    method = make_algorithm("fedavg_data", WORK)
    data, _ = prepare_data(method, whole(), whole().population(SEED))
    shard = make_shard(data, torch.arange(6))
    distinct = torch.unique(torch.cat([data.split(name).rows for name in SPLITS]))
    assert len(shard.features) == len(distinct)


# ---- what workers do ----


def workers_of(method: Any, task: Any, data: Federation, members: list[list[int]], run: str = "run") -> list[Worker]:
    made = []
    for ids in members:
        worker = Worker()
        worker.load_shard(make_shard(data, torch.tensor(ids)))
        worker.start_run(run, method, task, SEED)
        made.append(worker)
    return made


def message(task: Any, n: int) -> ModelDown:
    return ModelDown(task.init(SEED).expand(n, -1))


MEMBERS = [[0, 2, 5], [1, 3, 4]]


@pytest.mark.parametrize(
    "method", [FedAvg(WORK), Ditto(WORK), make_algorithm("apfl", WORK)], ids=lambda m: str(type(m))
)
def test_two_workers_do_what_one_local_pool_does(method: Any) -> None:
    task, data = make_task(tiny_model), whole()
    pool = LocalPool(method, task, data, SEED, workers=1, chunk=1)
    workers = workers_of(method, task, data, MEMBERS)
    effort = torch.tensor([1.0, 0.5, 1.0, 0.3, 1.0, 0.7])
    for round in (1, 2):
        wanted = pool.train(torch.arange(6), lambda who: message(task, len(who)), round, effort)
        for worker, members in zip(workers, MEMBERS, strict=True):
            ids = torch.tensor(members)
            reply, snapshots = worker.train(ids, compact(message(task, 3)), round, effort[ids])
            torch.testing.assert_close(reply.rows.delta, wanted.rows.delta[ids], rtol=0, atol=1e-6)
            assert snapshots.ids.tolist() == members
            assert snapshots.run == "run"
    want = pool.evaluate(torch.arange(6), lambda who: message(task, len(who)), 2, server_model=lambda who: message(task, len(who)).w, keep_models=True)  # fmt: skip # noqa: E501
    for worker, members in zip(workers, MEMBERS, strict=True):
        ids = torch.tensor(members)
        down = compact(message(task, 3))
        found = worker.evaluate(ids, down, 2, "test", down.w, True)
        torch.testing.assert_close(found.models, want.models[ids], rtol=0, atol=1e-6)
        assert torch.equal(found.personal.correct, want.personal.correct[ids])
        assert torch.equal(found.server_model.correct, want.server_model.correct[ids])
        assert found.record is None


def test_what_is_the_same_for_all_is_sent_once() -> None:
    task = make_task(tiny_model)
    assert compact(message(task, 5)).w.shape == (1, task.num_params)
    own = ModelDown(torch.randn(5, 7))
    assert torch.equal(compact(own).w, own.w)


def test_a_workers_states_can_be_taken_over_by_another() -> None:
    """The states that came with the replies, the oldest first, are all that a new worker needs."""
    task, data, method = make_task(tiny_model), whole(), Ditto(WORK)
    (first,) = workers_of(method, task, data, [[0, 1, 2, 3]])
    snapshots: list[StateSnapshot] = []
    for round, ids in ((1, [0, 1, 2]), (2, [1, 2]), (3, [2])):
        snapshots.append(first.train(torch.tensor(ids), compact(message(task, len(ids))), round, None)[1])
    (second,) = workers_of(method, task, data, [[0, 1, 2, 3]])
    second.restore([one.ids for one in snapshots], *snapshots)
    ours, theirs = second.states(), first.states()
    assert ours.keys() == theirs.keys()
    assert sorted(ours["ids"].tolist()) == [0, 1, 2]
    for name in ours:
        a, b = (s[name][torch.argsort(s["ids"])] for s in (ours, theirs))
        assert torch.equal(a, b)
    after = [w.train(torch.tensor([1, 3]), compact(message(task, 2)), 4, None)[0].rows.delta for w in (first, second)]
    assert torch.equal(*after)


def test_states_of_another_run_are_refused() -> None:
    task, data = make_task(tiny_model), whole()
    (one,) = workers_of(Ditto(WORK), task, data, [[0, 1]], run="one")
    (other,) = workers_of(Ditto(WORK), task, data, [[0, 1]], run="other")
    _, snapshots = one.train(torch.tensor([0, 1]), compact(message(task, 2)), 1, None)
    with pytest.raises(CheckpointError, match="states of run 'one' do not belong to run 'other'"):
        other.restore([snapshots.ids], snapshots)
    assert other.states()["ids"].tolist() == []


def test_states_of_a_checkpoint_come_back_as_what_another_worker_needs() -> None:
    task, data = make_task(tiny_model), whole()
    one, other, third = (workers_of(Ditto(WORK), task, data, [[0, 1, 2]])[0] for _ in range(3))
    one.train(torch.tensor([0, 2]), compact(message(task, 2)), 1, None)
    count, snapshots = other.load(one.states())
    assert count == 2
    third.restore([snapshots.ids], snapshots)
    assert torch.equal(third.states()["rows.v"], one.states()["rows.v"])
    with pytest.raises(CheckpointError):
        other.load({"ids": torch.tensor([0]), "rows.v": torch.zeros(1, 3)})


def test_a_round_in_which_nobody_has_a_usable_update_keeps_nothing() -> None:
    task, data = make_task(tiny_model), whole()
    (worker,) = workers_of(Ditto(WORK), task, data, [[0, 1]])
    bad = ModelDown(torch.full((1, task.num_params), torch.nan))
    reply, snapshots = worker.train(torch.tensor([0, 1]), bad, 1, None)
    assert sorted(reply.refused) == [0, 1]
    assert isinstance(snapshots.rows, Nothing)
    worker.restore([snapshots.ids], snapshots)
    assert worker.states()["ids"].tolist() == []


def test_states_are_as_wide_as_the_longest_client_wherever_that_is() -> None:
    data = whole()
    longest = int(data.train.count.argmax())
    others = [k for k in range(6) if k != longest]
    method, task = (
        Mocha(WORK),
        make_task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(*_sizes(data)))),
    )
    (worker,) = workers_of(method, task, data, [others])
    state: Any = worker.pool.clients.take(torch.tensor(others[:1]))
    assert state.beta.shape[1] == int(data.train.count.max())


def _sizes(data: Federation) -> tuple[int, int]:
    return int(torch.tensor(data.features.shape).prod()), data.num_classes


def test_a_worker_without_a_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="start one first"):
        Worker().states()


def test_private_gradients_are_recorded_where_they_are_taken() -> None:
    """Noise and books are those of one process, wherever the clients live."""
    work = replace(WORK, poisson=True)
    data, method = whole(), FedAvg(work)

    def private() -> PrivateTask:
        return PrivateTask(make_task(tiny_model), 1.0, 1.0, seeded_noise(SEED))

    task = private()
    pool = LocalPool(method, task, data, SEED, workers=1)
    with task.recording() as record:
        wanted = pool.train(torch.arange(6), lambda who: message(task, len(who)), 1)
    found: dict[int, Tensor] = {}
    calls: dict[int, int] = {}
    for worker, members in zip(workers_of(method, private(), data, MEMBERS), MEMBERS, strict=True):
        reply, _ = worker.train(torch.tensor(members), compact(message(task, 3)), 1, None)
        assert reply.record is not None
        calls |= reply.record.calls
        found |= dict(zip(members, reply.rows.delta, strict=True))
    assert calls == record.calls
    torch.testing.assert_close(torch.stack([found[k] for k in range(6)]), wanted.rows.delta, rtol=0, atol=1e-6)
