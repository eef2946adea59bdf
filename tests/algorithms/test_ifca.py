"""IFCA: choices and averages by hand, FedAvg with one model, empty clusters, and its two starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_bench import ALL, LR, SIZES, WORKS, by_hand, close, gradient, mean, models, run, server, weighted
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.ifca import IFCA, Down
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import CHECKS, VARIANT_CHECKS, Bench
from kinfed.testing.workbench import SEED


def loss(loop: Loop, client: int, theta: Tensor) -> float:
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
    z = x @ theta[:12].reshape(3, 4).T + theta[12:]
    return float(nn.functional.cross_entropy(z, y))


@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_rounds_by_hand(weights: str) -> None:
    """Each client trains the model with the lowest training loss; a model nobody chose stays as it was."""
    with by_hand(IFCA(ALL, clusters=3, weights=weights)) as loop:
        chosen = set()
        for _ in range(4):
            omega = server(loop, "omega")
            j = [min(range(3), key=lambda k: loss(loop, m, omega[k])) for m in range(3)]
            chosen |= set(j)
            wanted = omega.clone()
            for k in set(j):
                members = [m for m in range(3) if j[m] == k]
                rows = [omega[k] - LR * gradient(loop, m, omega[k]) for m in members]
                sizes = tuple(SIZES[m] for m in members)
                wanted[k] = weighted(rows, sizes) if weights == "examples" else mean(rows)
            loop.round()
            close(server(loop, "omega"), wanted)
            assert server(loop, "cluster").tolist() == j
            omega = server(loop, "omega")
            now = [min(range(3), key=lambda k: loss(loop, m, omega[k])) for m in range(3)]
            close(models(loop), omega[now])  # chosen afresh


@pytest.mark.parametrize("weights", ["equal", "examples"])
@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_one_model_is_fedavg(training: LocalTraining, weights: str) -> None:
    ours, theirs = run(IFCA(training, clusters=1, weights=weights)), run(FedAvg(training, weights=weights))
    assert torch.equal(ours["server.omega"][0], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["server.w"].expand(6, -1))


def test_an_empty_cluster_stays_and_ties_go_to_the_lower_number() -> None:
    with by_hand(IFCA(ALL, clusters=3)) as loop:
        omega = server(loop, "omega")
        omega[1], omega[2] = omega[0], 100.0  # 0 and 1 alike; 2 so large that nobody wants it
        omega[2, ::2] = -100.0
        loop.server = replace(loop.server, omega=omega.clone())
        loop.round()
        assert server(loop, "cluster").tolist() == [0, 0, 0]
        assert torch.equal(server(loop, "omega")[1:], omega[1:])
        assert loop.algorithm.figures(loop.server)["clusters_in_use"] == 1


def test_a_model_without_a_finite_loss_is_not_chosen() -> None:
    with by_hand(IFCA(ALL, clusters=3)) as loop:
        omega = server(loop, "omega")
        omega[0], omega[1] = torch.nan, torch.inf
        cohort = loop.pool.federation.cohort(torch.arange(3), SEED, 1)
        method: Any = loop.algorithm
        assert method._best(loop.task, Down(omega.expand(3, -1, -1)), cohort).tolist() == [2, 2, 2]


def test_random_starts_are_independent_and_the_first_is_everyones() -> None:
    with by_hand(IFCA(ALL, clusters=3)) as loop:
        omega = server(loop, "omega")
        assert torch.equal(omega[0], loop.task.init(SEED))
        assert len({tuple(row.tolist()) for row in omega}) == 3
        assert server(loop, "cluster").tolist() == [-1] * 3


def test_who_has_not_been_called_has_no_known_cluster() -> None:
    with by_hand(IFCA(ALL, clusters=2), participation=0.4) as loop:
        loop.round()
        (active,) = loop.schedule.active(SEED, 1, 3).tolist()
        assert [m for m in range(3) if int(server(loop, "cluster")[m]) >= 0] == [active]


# Twelve clients; those with odd numbers have renamed classes.


def disagreeing() -> Federation:
    numbers = np.random.default_rng(3)
    y = np.tile(np.repeat(np.arange(3), 8), 12)
    x = 3.0 * np.eye(3, 5)[y] + numbers.normal(size=(len(y), 5))
    owner = np.repeat(np.arange(12), 24)
    return Federation.from_arrays(x, np.where(owner % 2 == 1, (y + 1) % 3, y), owner, num_classes=3)


@pytest.mark.parametrize("participation", [1.0, 0.25])
def test_the_k_means_start_finds_groups_that_exist(participation: float) -> None:
    data = disagreeing()
    method = IFCA(LocalTraining(lr=0.2, batch=50, steps=10), clusters=2, init="kmeans")
    task = make_task(lambda: nn.Linear(5, 3))
    pool = LocalPool(method, task, data, 0, workers=1)
    loop = Loop(method, task, pool, data.population(0), Schedule(participation))
    assert len({tuple(row.tolist()) for row in server(loop, "omega")}) == 1
    report = loop.round()
    assert report.active == 12  # everyone, whatever the participation
    even, odd = set(server(loop, "cluster")[::2].tolist()), set(server(loop, "cluster")[1::2].tolist())
    assert (len(even), len(odd)) == (1, 1)
    assert even != odd
    for _ in range(6):
        report = loop.round()
    assert report.active == 12 * participation
    score = loop.evaluate().personal
    assert score is not None
    assert float(score.correct.sum() / score.count.sum()) > 0.9
    pool.close()


def test_the_k_means_start_takes_the_means_of_what_came_back() -> None:
    with by_hand(IFCA(ALL, clusters=2, init="kmeans")) as loop:
        w = loop.task.init(SEED)
        moved = torch.stack([w - LR * gradient(loop, m, w) for m in range(3)])
        report = loop.round()
        label = server(loop, "cluster")
        assert sorted(label.tolist()) in ([0, 0, 1], [0, 1, 1])
        for k in range(2):
            close(server(loop, "omega")[k], moved[label == k].mean(0))
        assert report.bytes_down == 3 * 15 * 4  # the models are still alike: one is sent
        assert loop.round().bytes_down == 3 * 2 * 15 * 4


def test_fewer_distinct_clients_than_models_leave_models_at_the_start() -> None:
    with by_hand(IFCA(ALL, clusters=3, init="kmeans"), sizes=(2,)) as loop:
        loop.round()
        w = loop.task.init(SEED)
        assert torch.equal(server(loop, "omega")[1:], w.expand(2, -1))
        assert not torch.equal(server(loop, "omega")[0], w)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("ifca", options={"init": "kmeans", "clusters": 2})


# Everyone is called in the first round, so nobody is an outsider.
@pytest.mark.parametrize("check", VARIANT_CHECKS)
def test_the_contract_holds_with_the_k_means_start(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_bytes_are_k_models_down_one_and_a_number_up() -> None:
    with by_hand(IFCA(ALL, clusters=4)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 15 * 4, 3 * (15 * 4 + 8))


def test_the_choice_counts_as_a_leak() -> None:
    profile = IFCA().privacy(torch.tensor([3]))
    assert profile is not None
    assert "lowest loss" in profile.impossible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 0}, "clusters must be at least 1"),
        ({"init": "zeros"}, r"init must be random \| kmeans; got 'zeros'"),
        ({"weights": "none"}, r"weights must be examples \| equal"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("ifca", ALL, options)
