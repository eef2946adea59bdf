"""CFL: FedAvg until a split, splits worked by hand, and the right clients on each side of the second one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, gradient, info, mean, models, run, server
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.cfl import CFL, Server, Up
from kinfed.algorithms.fedavg import FedAvg
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.testing import CHECKS, VARIANT_CHECKS, Bench, tiny_model

EAGER = {"eps1": 0.5, "eps2": 0.9, "t_min": 0, "min_size": 3}


class Start:
    """As much of a task as a server needs: a start of zeros."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.trainable = slice(0, size)

    def init(self, seed: int, number: int = 0) -> Tensor:
        return torch.zeros(self.size)


def fresh(method: CFL, clients: int, size: int = 2) -> Server:
    return method.init_server(Start(size), Population(clients, 0))  # type: ignore[arg-type]


def after(method: CFL, state: Server, updates: dict[int, list[float]], number: int = 1) -> Server:
    ids = torch.tensor(sorted(updates))
    return method.aggregate(state, ids, Up(torch.tensor([updates[int(k)] for k in ids])), info(number))


# Two of the four directions a first split tells apart, all four after a second: clients 0..7 by k % 4.
FOUR = {k: [[1.0, 0.3], [-1.0, 0.3], [1.0, -0.3], [-1.0, -0.3]][k % 4] for k in range(8)}


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_a_split_it_is_fedavg_with_equal_weights(training: LocalTraining) -> None:
    ours, theirs = run(CFL(training)), run(FedAvg(training, weights="equal"))
    assert torch.equal(ours["server.model"][0], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["server.w"].expand(6, -1))


def test_every_cluster_moves_by_the_equal_mean_of_its_members() -> None:
    with by_hand(CFL(ALL)) as loop:
        loop.server = replace(
            loop.server, cluster=torch.tensor([0, 1, 0]), model=torch.stack([torch.zeros(15), torch.ones(15)]),
            parent=torch.tensor([-1, 0]), born=torch.tensor([0, 1]),
            mean_norm=torch.zeros(2).double(), max_norm=torch.zeros(2).double(),
        )  # fmt: skip
        g = [gradient(loop, m, torch.full((15,), float(m == 1))) for m in range(3)]
        loop.round()
        close(server(loop, "model")[0], -LR * mean([g[0], g[2]]))
        close(server(loop, "model")[1], 1 - LR * g[1])
        close(models(loop), server(loop, "model")[[0, 1, 0]])


def test_a_split_by_hand() -> None:
    """Mean of the updates (0, 0), largest norm √1.09: between ε₁ and ε₂. Both parts then move by their own mean."""
    method = CFL(**EAGER)
    state = after(method, fresh(method, 8), FOUR)
    assert state.cluster.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert state.parent.tolist() == [-1, 0]
    assert state.born.tolist() == [0, 1]
    close(state.model, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))


def test_the_second_split_names_members_by_their_ids() -> None:
    """Cluster 1 holds clients 1, 3, 5, 7. Positions inside it, taken for ids, would move clients 0 and 2."""
    method = CFL(**EAGER)
    state = after(method, fresh(method, 8), FOUR)
    apart = {k: [0.0, 1.0 if k in (1, 5) else -1.0] if k % 2 else [0.0, 0.1] for k in range(8)}
    state = after(method, state, apart, 2)
    assert state.cluster.tolist() == [0, 1, 0, 2, 0, 1, 0, 2]
    assert state.parent.tolist() == [-1, 0, 1]
    assert state.born.tolist() == [0, 1, 2]
    close(state.model, torch.tensor([[1.0, 0.1], [-1.0, 1.0], [-1.0, -1.0]]))


def test_the_larger_part_keeps_the_number() -> None:
    method = CFL(**EAGER | {"eps1": 0.9})
    updates = {0: [-1.0, 0.0], 1: [1.0, 0.1], 2: [1.0, -0.1], 3: [1.0, 0.0], 4: [-1.0, 0.1]}
    state = after(method, fresh(method, 5), updates)
    assert state.cluster.tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "clusters"),
    [
        ({}, 2),
        ({"eps2": 1.1}, 1),  # √1.09 = 1.044 is the largest norm
        ({"eps2": 1.04}, 2),
        ({"t_min": 1}, 1),  # a split in round 2 at the earliest
        ({"min_size": 8}, 2),
        ({"min_size": 9}, 1),
        # The parts are (±1, ±0.3): α_cross = (−1 + 0.09)/1.09 = −0.835, √((1 + 0.835)/2) = 0.958
        ({"gamma_max": 0.95}, 2),
        ({"gamma_max": 0.96}, 1),
    ],
)
def test_conditions_of_a_split(options: dict[str, Any], clusters: int) -> None:
    method = CFL(**EAGER | options)
    assert len(after(method, fresh(method, 8), FOUR).model) == clusters


def test_clusters_that_still_move_are_not_split() -> None:
    """Mean update (0.6, 0): not below ε₁ = 0.5, however far apart the members are."""
    method = CFL(**EAGER)
    moving = {k: [x + 0.6, y] for k, (x, y) in FOUR.items()}
    assert len(after(method, fresh(method, 8), moving).model) == 1
    assert len(after(replace(method, eps1=0.61), fresh(method, 8), moving).model) == 2


def test_relative_thresholds_are_shares_of_the_first_rounds_largest_update() -> None:
    """First round: largest norm 10. Then ε₁ = 0.5, ε₂ = 0.9: what EAGER says in absolute numbers."""
    method = CFL(eps1=1e-9, eps2=1e9, eps1_rel=0.05, eps2_rel=0.09, t_min=0)
    state = after(method, fresh(method, 8), {k: [10.0, 0.0] for k in range(8)})
    assert float(state.scale) == 10
    assert len(state.model) == 1
    assert len(after(method, state, FOUR).model) == 2
    assert len(after(replace(method, eps2_rel=0.11), state, FOUR).model) == 1
    assert float(after(method, state, FOUR).scale) == 10


def test_complete_linkage_may_miss_the_best_cut_that_single_linkage_finds() -> None:
    """Directions at 0°, 50°, 100°, 160°, 220°. The widest gap but that behind them is 60°, at 100°-160° and
    160°-220°; complete linkage joins 0°-50° first, then 100°-160°, and cuts between 50° and 100°."""
    angle = np.radians([0, 50, 100, 160, 220])
    updates = {k: [float(np.cos(a)), float(np.sin(a))] for k, a in enumerate(angle)}
    cosine = np.cos(angle[:, None] - angle)
    crossings = {}
    for rule in ("complete", "single"):
        method = CFL(**EAGER | {"eps1": 0.99, "linkage": rule})
        second = after(method, fresh(method, 5), updates).cluster.numpy() == 1
        crossings[rule] = cosine[~second][:, second].max()
    assert crossings["single"] < crossings["complete"] - 0.1


def test_a_split_waits_for_everyone_and_uses_last_updates() -> None:
    method = CFL(**EAGER)
    state = after(method, fresh(method, 8), {k: FOUR[k] for k in range(4)})
    assert len(state.model) == 1
    state = after(method, state, {k: FOUR[k] for k in (2, 3, 4, 5, 6)}, 2)
    assert len(state.model) == 1
    assert state.owner.tolist() == [0, 1, 2, 3, 4, 5, 6]
    before = state.model
    state = after(method, state, {5: FOUR[5], 7: FOUR[7]}, 3)
    assert state.cluster.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    close(state.model, before + torch.tensor([[0.0, 0.0], [-1.0, 0.0]]))  # 5 and 7 alone moved their part
    assert not len(state.owner)  # updates from before the split say nothing about its parts
    assert not len(state.last)
    state = after(method, state, {k: [0.0, (-1.0) ** (k // 2)] for k in (0, 2, 4)}, 4)
    assert len(state.model) == 2  # client 6 of cluster 0 is missing
    state = after(method, state, {6: [0.0, -1.0]}, 5)
    assert state.cluster.tolist() == [0, 1, 2, 1, 0, 1, 2, 1]
    assert state.born.tolist() == [0, 3, 5]


def test_a_newer_update_replaces_the_older_one() -> None:
    method = CFL(**EAGER)
    state = after(method, fresh(method, 8), {k: [9.0, 9.0] for k in range(7)})
    state = after(method, state, FOUR)
    assert state.cluster.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]


def test_an_update_of_length_zero_joins_a_part() -> None:
    method = CFL(**EAGER)
    updates = {**FOUR, 0: [0.0, 0.0], 1: [0.0, 0.0]}
    state = after(method, fresh(method, 8), updates)
    assert len(state.model) == 2
    assert torch.isfinite(state.model).all()
    still = after(method, fresh(method, 8), {k: [0.0, 0.0] for k in range(8)})
    assert len(still.model) == 1


def test_figures_say_why_nothing_is_split() -> None:
    method = CFL(**EAGER | {"eps2": 5.0})
    assert method.figures(fresh(method, 8))["largest_update"] == 0
    state = after(method, fresh(method, 8), {k: [x + 0.1, y] for k, (x, y) in FOUR.items()})
    figures = method.figures(state)
    assert figures["clusters"] == 1
    assert figures["smallest_mean_update"] == pytest.approx(0.1, rel=1e-5)
    assert figures["largest_update"] == pytest.approx((1.1**2 + 0.09) ** 0.5, rel=1e-6)


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(CFL(ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)


def test_clients_who_disagree_get_models_of_their_own() -> None:
    """Eight clients with the same inputs; every other one has the three classes renamed."""
    numbers = np.random.default_rng(3)
    y = np.tile(np.repeat(np.arange(3), 14), 8)
    x = 3.0 * np.eye(3, 5)[y] + numbers.normal(size=(len(y), 5))
    owner = np.repeat(np.arange(8), 42)
    named = np.where(owner % 2 == 1, (y + 1) % 3, y)
    data = Federation.from_arrays(x, named, owner, num_classes=3)
    accuracy, clusters = {}, {}
    for rule, t_min in (("complete", 8), ("single", 8), ("complete", 99)):
        method = CFL(LocalTraining(lr=0.2, batch=50, steps=10), eps1_rel=0.35, eps2_rel=0.3, t_min=t_min, linkage=rule)
        task = make_task(lambda: torch.nn.Linear(5, 3))
        pool = LocalPool(method, task, data, 0, workers=1)
        loop = Loop(method, task, pool, data.population(0))
        for _ in range(30):
            loop.round()
        score = loop.evaluate().personal
        assert score is not None
        accuracy[rule, t_min] = float(score.correct.sum() / score.count.sum())
        clusters[rule, t_min] = server(loop, "cluster").tolist()
        pool.close()
    for rule in ("complete", "single"):
        assert set(clusters[rule, 8][::2]).isdisjoint(clusters[rule, 8][1::2])
        assert accuracy[rule, 8] > 0.9
    assert set(clusters["complete", 99]) == {0}
    assert accuracy["complete", 99] < 0.7


@pytest.fixture(scope="module")
def bench() -> Bench:
    method = CFL(LocalTraining(batch=5, steps=5), eps1=1e3, eps2=1e-6, t_min=1, min_size=2)
    return Bench(method, model=tiny_model)


@pytest.mark.parametrize("check", VARIANT_CHECKS)
def test_the_contract_holds_while_clusters_are_split(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_that_run_does_split() -> None:
    found = run(CFL(LocalTraining(batch=5, steps=5), eps1=1e3, eps2=1e-6, t_min=1, min_size=2), 4, participation=1.0)
    assert len(found["server.model"]) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps1": 0}, "eps1 must be positive"),
        ({"eps2_rel": -1}, "eps2_rel must be positive"),
        ({"t_min": -1}, "t_min must be at least 0"),
        ({"min_size": 1}, "min_size must be at least 2"),
        ({"linkage": "ward"}, r"linkage must be complete \| single; got 'ward'"),
        ({"gamma_max": 1.0}, "gamma_max"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("cfl", ALL, options)


def test_one_client_alone() -> None:
    with by_hand(CFL(ALL, t_min=0, eps1=9, eps2=1e-9, min_size=2), sizes=(3,)) as loop:
        for _ in range(3):
            loop.round()
        assert len(server(loop, "model")) == 1


def test_the_schedule_may_leave_clusters_without_anybody() -> None:
    method = CFL(**EAGER)
    state = after(method, fresh(method, 8), FOUR)
    again = after(method, state, {1: [0.5, 0.5]})
    assert torch.equal(again.model[0], state.model[0])
    close(again.model[1], state.model[1] + 0.5)
