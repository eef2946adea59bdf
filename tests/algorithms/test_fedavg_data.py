"""FedAvg + Data: who gives and receives what, what it costs, and centralized training as the limit of sharing all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_bench import ALL, LR, SIZES, by_hand, close, gradient, linear, run, server, weighted

import kinfed
from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedavg_data import FedAvgData
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.federations.federation import Federation
from kinfed.data.federations.sharing import SharedFeatures, share_examples
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import tiny_federation
from kinfed.testing.workbench import SEED, state_of

KEY = rng.root(0, "tests")
EXAMPLE = 4 * 4 + 8  # bytes: four float32 features and an int64 label


def share(data: Federation, size: int, fraction: float = 1.0) -> tuple[Federation, Any]:
    return share_examples(data, data.population(SEED), size, fraction, KEY)


# The exchange.


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0.01, 1), st.floats(0.05, 1))
def test_everyone_holds_its_own_and_its_part_of_the_pool(sizes: list[int], part: float, fraction: float) -> None:
    data = tiny_federation(tuple(sizes), test=1)
    size = max(round(part * sum(sizes)), 1)
    shared, clients = share(data, size, fraction)
    first = len(data.labels)
    pool = shared.features.copies  # type: ignore[attr-defined]
    assert len(pool) == size == int(clients.pool.count)
    received = 0
    for k, own in enumerate(data.train.lists()):
        now = shared.train[k]
        assert torch.equal(now[: len(own)], own)
        got = now[len(own) :]
        assert len(got.unique()) == len(got)
        assert bool((got >= first).all())
        # Every example differs from every other in its features: nobody holds one twice.
        assert len({tuple(row) for row in shared.features.rows(now).tolist()}) == len(now)
        missing = max(round(fraction * size), 1) - len(got)
        mine = {tuple(row) for row in data.features.raw[own].tolist()}
        assert 0 <= missing <= sum(tuple(row) in mine for row in pool.tolist())
        received += len(got)
    assert clients.exchanged == (EXAMPLE * received, EXAMPLE * size)
    assert torch.equal(shared.test.rows, data.test.rows)


def test_pool_examples_are_training_examples_with_their_labels() -> None:
    data = tiny_federation((5, 8, 3))
    _, clients = share(data, 6)
    trained = {
        (tuple(x), y)
        for x, y in zip(data.features.raw[data.train.rows].tolist(), data.labels[data.train.rows].tolist(), strict=True)
    }
    pool = clients.pool
    x = pool.features.gather(pool.rows).tolist()
    y = pool.labels[pool.rows].tolist()
    assert len({tuple(row) for row in x}) == 6
    assert all((tuple(a), b) in trained for a, b in zip(x, y, strict=True))


def test_parts_of_the_pool_differ_and_depend_on_nothing_but_the_key() -> None:
    data = tiny_federation((30, 30, 30), test=1)
    shared, _ = share(data, 40, 0.5)
    got = [set(shared.train[k].tolist()) - set(data.train[k].tolist()) for k in range(3)]
    assert got[0] != got[1] != got[2]
    again, _ = share(data, 40, 0.5)
    assert torch.equal(again.train.rows, shared.train.rows)
    other, _ = share_examples(data, data.population(SEED), 40, 0.5, rng.root(1, "tests"))
    assert not torch.equal(other.features.copies, shared.features.copies)  # type: ignore[attr-defined]


def test_a_row_that_several_clients_own_is_sent_to_none_of_them() -> None:
    data = tiny_federation((4, 4))
    both = replace(data, train=data.train.joined(data.train.take(torch.tensor([1, 0]))))
    shared, clients = share(both, 8)
    assert shared.train.count.tolist() == [8, 8]
    assert clients.exchanged == (0, 8 * EXAMPLE)


def test_shared_features_read_like_the_originals() -> None:
    raw = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 1, 2, 2)).astype(np.uint8))
    old = Features(raw, torch.tensor(127.5), torch.tensor(63.0))
    new = SharedFeatures(raw, old.mean, old.std, copies=raw[[4, 1]])
    assert len(new) == 8
    index = torch.tensor([[0, 6], [7, 5]])
    assert torch.equal(new.gather(index), old.gather(torch.tensor([[0, 4], [1, 5]])))
    moved = new.on(torch.device("cpu"))
    assert isinstance(moved, SharedFeatures)
    assert torch.equal(moved.gather(index), new.gather(index))


def test_the_data_set_itself_is_not_copied_and_copies_do_not_change_with_it() -> None:
    data = tiny_federation((4, 4))
    shared, _ = share(data, 3)
    assert shared.features.raw is data.features.raw
    copies = shared.features.copies.clone()  # type: ignore[attr-defined]
    data.features.raw.fill_(7.0)
    assert torch.equal(shared.features.copies, copies)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("size", "fraction", "message"),
    [(0, 1.0, "between 1 and all 8"), (9, 1.0, "all 8"), (3, 0.0, "fraction of the pool"), (3, 1.1, "fraction")],
)
def test_impossible_exchanges(size: int, fraction: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share(tiny_federation((4, 4)), size, fraction)


# The method.


def test_sharing_everything_is_centralized_training() -> None:
    """Every client holds all examples; one step on all of them is a step on the whole data set."""
    data = tiny_federation(SIZES)
    with by_hand(FedAvgData(ALL, share=1.0)) as loop:
        assert loop.pool.federation.train.count.tolist() == [12, 12, 12]
        with by_hand(FedAvg(ALL)) as plain:
            for _ in range(3):
                w = server(loop)
                whole = weighted([gradient(plain, k, w) for k in range(3)])
                loop.round()
                close(server(loop), w - LR * whole)
    assert data.train.count.tolist() == list(SIZES)


def test_weights_count_what_was_received() -> None:
    with by_hand(FedAvgData(ALL, share=0.4)) as loop:
        count = tuple(loop.pool.federation.train.count.tolist())
        assert count != SIZES
        assert sum(count) > sum(SIZES)
        w = server(loop)
        g = [gradient(loop, k, w) for k in range(3)]
        loop.round()
        close(server(loop), w - LR * weighted(g, count))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 3),  # 5 % of 51
        ({"share": 0.1, "alpha": 0.5}, 5),
        ({"share": 1.0, "share_base": "client"}, 8),  # an average client has 8.5
        ({"share": 0.5, "share_base": "client"}, 4),
        ({"share_base": "client"}, 1),  # never nothing
    ],
)
def test_sizes_of_the_pool(options: dict[str, Any], size: int) -> None:
    data = tiny_federation()
    shared, clients = prepare_data(FedAvgData(ALL, **options), data, data.population(SEED))
    assert int(clients.pool.count) == size  # type: ignore[union-attr]
    most = round(options.get("alpha", 1.0) * size)
    assert int((shared.train.count - data.train.count).max()) <= most


def test_the_exchange_is_counted_once_in_the_first_round() -> None:
    with by_hand(FedAvgData(ALL, share=0.5)) as loop:
        got = int((loop.pool.federation.train.count - torch.tensor(SIZES)).sum())
        down, up = 3 * 15 * 4, 3 * (15 + 1) * 4
        first = loop.round()
        assert (first.bytes_down, first.bytes_up) == (down + got * EXAMPLE, up + 6 * EXAMPLE)
        for _ in range(2):
            later = loop.round()
            assert (later.bytes_down, later.bytes_up) == (down, up)


@pytest.mark.parametrize("first", [1, 5])
def test_a_resumed_run_does_not_pay_again(first: int) -> None:
    data = tiny_federation(SIZES)
    method = FedAvgData(ALL, share=0.5)
    task = make_task(linear)

    def fresh() -> Loop:
        shared, clients = prepare_data(method, data, data.population(SEED))
        return Loop(
            method, task, LocalPool(method, task, shared, SEED, workers=1), clients, Schedule(first_round=first)
        )

    loop = fresh()
    paid = loop.round().bytes_up
    stored = state_of(loop)
    second = loop.round().bytes_up
    assert paid == second + 6 * EXAMPLE
    again = fresh()
    again.load(first, stored)
    assert again.round().bytes_up == second
    assert torch.equal(server(again), server(loop))


def test_a_first_round_nobody_replies_in_still_costs_the_exchange() -> None:
    class Nobody(Schedule):
        def dropouts(self, seed: int, round: int, ids: torch.Tensor) -> torch.Tensor:
            return torch.ones(len(ids), dtype=torch.bool)

    data = tiny_federation(SIZES)
    method, task = FedAvgData(ALL, share=0.5), make_task(linear)
    shared, clients = prepare_data(method, data, data.population(SEED))
    loop = Loop(method, task, LocalPool(method, task, shared, SEED), clients, Nobody(dropout=0.5))
    assert loop.round().bytes_up == 6 * EXAMPLE


def test_the_server_may_start_from_a_model_of_the_pool() -> None:
    with by_hand(FedAvgData(ALL, share=0.5)) as cold, by_hand(FedAvgData(ALL, share=0.5, warm_steps=1)) as warm:
        w = server(cold)
        assert torch.equal(w, cold.task.init(SEED))
        pool: Any = cold.population.pool
        x, y = pool.features.gather(pool.rows), pool.labels[pool.rows]
        theta = w.clone().requires_grad_()
        z = x @ theta[:12].reshape(3, 4).T + theta[12:]
        (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, y), theta)
        close(server(warm), w - LR * g)
        assert torch.equal(warm.pool.federation.train.rows, cold.pool.federation.train.rows)


def test_without_an_exchange_it_refuses_to_run() -> None:
    data, task = tiny_federation(SIZES), make_task(linear)
    method = FedAvgData(ALL)
    with pytest.raises(
        ConfigError, match=r"none were shared; give .* prepare_data\(algorithm, federation, population\)"
    ):
        Loop(method, task, LocalPool(method, task, data, SEED), data.population(SEED))


def test_other_methods_of_a_run_keep_their_own_data() -> None:
    settings: dict[str, Any] = {"rounds": 2, "seeds": [3], "participation": 0.5, "lr": 0.1, "batch": 5, "steps": 4}
    data = tiny_federation()
    alone = kinfed.run(federation=data, model=linear, algorithms="fedavg", **settings).result("fedavg")
    both = kinfed.run(federation=data, model=linear, algorithms="fedavg_data,fedavg", **settings)
    assert both.result("fedavg").bytes_up == alone.bytes_up
    assert torch.equal(both.result("fedavg").server_model, alone.server_model)  # type: ignore[arg-type]
    assert both.result("fedavg_data").bytes_up == alone.bytes_up + 3 * EXAMPLE
    loop = kinfed.simulate(
        data, linear, "fedavg_data", seed=3, participation=0.5, training=LocalTraining(lr=0.1, batch=5, steps=4)
    )
    reports = list(loop.rounds(2))
    assert sum(report.bytes_up for report in reports) == both.result("fedavg_data").bytes_up


def test_sharing_helps_clients_of_few_classes() -> None:
    """The tiny federation's clients see mostly one class each: the global model learns more from a shared pool."""
    training = LocalTraining(batch=5, steps=5, lr=0.02)
    plain = run(FedAvg(training), 3, participation=0.34)["server loss"].sum()
    shared = run(FedAvgData(training, share=0.5), 3, participation=0.34)["server loss"].sum()
    assert shared < plain


def test_it_is_not_private() -> None:
    assert "training examples" in FedAvgData().privacy(torch.tensor([5])).impossible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, r"share must be in \(0, 1\]"),
        ({"alpha": 1.5}, r"alpha must be in \(0, 1\]"),
        ({"share_base": "server"}, r"share_base must be global \| client; got 'server'"),
        ({"warm_steps": -1}, "warm_steps must be at least 0"),
        ({"weights": "none"}, r"weights must be examples \| equal"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("fedavg_data", ALL, options)
