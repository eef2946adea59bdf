"""Algorithm 2 (augmented) and the cluster-level variant of Self-FL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.selffl.augmented import SelfFLAugmented
from kinfed.algorithms.selffl.cluster import SelfFLCluster, Server
from kinfed.algorithms.selffl.selffl import Up
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.server.loop import Loop
from kinfed.testing import tiny_federation, tiny_model
from kinfed.theory.gaussian import Case, GaussianTask, draw

F64 = torch.float64
WORK = LocalTraining(lr=0.1, batch=5, steps=4)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def after(loop: Loop, rounds: int) -> tuple[Any, Tensor]:
    """(server, personal models) after some rounds."""
    for _ in range(rounds):
        loop.round()
    models = loop.evaluate(keep_models=True).models
    loop.pool.close()
    assert models is not None
    return loop.server, models


# ---------------------------------------------------------------- Algorithm 2


def test_training_goes_on_to_the_clients_own_optimum_and_the_server_averages_those():
    world = draw(Case(s0=0.01, low=4, high=9, clients=5), 1)
    lr = 8e-3
    loop = simulate(
        world.federation, world.task(dtype=F64), "selffl_augmented", training=LocalTraining(lr=lr, batch=100, steps=3),
        known_variances=True, contraction="gd", l_max=None, tol=1e-13, max_extra=100,
    )  # fmt: skip
    server, personal = after(loop, 3)
    model = world.model()
    optima = loop.pool.clients.take(torch.arange(5)).optimum
    torch.testing.assert_close(optima, world.z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(server.theta[0], model.theta_G, rtol=1e-6, atol=1e-6)  # (26) of the z is (2)
    # (24) of z and θ^G is INIT (12), so the personal models are θ^FL up to the rounding of l: no gap as in Algorithm 1
    expected = model.descend(model.init, lr, model.steps(lr).round().clamp(min=1))
    torch.testing.assert_close(personal.squeeze(1), expected, rtol=1e-5, atol=1e-5)


def test_full_batches_leave_no_variance_and_a_single_step():
    world = draw(Case(s0=0.01, low=4, high=9, clients=4), 1)
    loop = simulate(
        world.federation, world.task(), "selffl_augmented", training=LocalTraining(lr=8e-3, batch=100, steps=3),
        contraction="gd", tol=0.0, max_extra=40,
    )  # fmt: skip
    after(loop, 4)
    figures = loop.evaluate().figures
    assert bool((figures["sigma_m_sq"] < 1e-9).all())
    assert figures["steps"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("lr", "tol", "limit", "epochs"),
    [
        (1 / 32, 0.0, 4, 4),  # never settles: the cap
        (1 / 32, 0.1, 9, 1),  # an epoch leaves (31/32)² of the loss, a change of 6%
        (1 / 5, 0.1, 3, 3),  # a change of 36%
    ],
)
def test_training_stops_where_the_loss_settles(lr: float, tol: float, limit: int, epochs: int):
    """A single example x = 0 with s = 1 from θ = 1: an epoch is one step and leaves 1 − η of θ. A second client is at
    its optimum, where nothing changes."""
    data = Federation.from_arrays(np.zeros((2, 1)), np.zeros(2, int), np.arange(2), test_fraction=0, num_classes=1)
    task = GaussianTask(doubles(1, 1), 1.0, dtype=F64)
    method = SelfFLAugmented(LocalTraining(lr=lr, batch=1, steps=1), tol=tol, max_extra=limit)
    out = method.find_optimum(task, torch.tensor([[1.0], [0.0]], dtype=F64), data.cohort(torch.arange(2), 0, 1))
    assert out[0].item() == pytest.approx((1 - lr) ** epochs)
    assert out[1].item() == 0.0


def test_clients_stop_one_by_one():
    # Curvatures 1/s = 1 and 10: with η = 0.09 an epoch leaves 91% and 10% of the way; the loss of the second around
    # its floor (examples ±1) settles long before that of the first.
    x = np.array([[5.0], [-5.0], [1.0], [-1.0]])
    data = Federation.from_arrays(x, np.zeros(4, int), np.array([0, 0, 1, 1]), test_fraction=0, num_classes=1)
    task = GaussianTask(doubles(1, 0.1), 1.0, dtype=F64)
    method = SelfFLAugmented(LocalTraining(lr=0.09, batch=2, steps=1), tol=1e-3, max_extra=50)
    out = method.find_optimum(task, torch.tensor([[3.0], [3.0]], dtype=F64), data.cohort(torch.arange(2), 0, 1))

    def epochs(theta: float, left: float, spread: float) -> int:
        loss, done = theta**2 + spread, 0
        while True:
            theta, done, before = theta * left, done + 1, loss
            loss = theta**2 + spread
            if abs(loss - before) <= 1e-3 * before:
                return done

    first, second = epochs(3.0, 0.91, 25.0), epochs(3.0, 0.1, 1.0)
    assert first > second + 5
    assert out.squeeze(1).tolist() == pytest.approx([3 * 0.91**first, 3 * 0.1**second], rel=1e-5)


def test_two_models_travel_up():
    loop = simulate(tiny_federation(), tiny_model, "selffl_augmented", training=WORK, participation=0.5)
    report = loop.round()
    loop.pool.close()
    assert report.bytes_down == 3 * 4 * (115 + 2)
    assert report.bytes_up == 3 * 4 * (2 * 115 + 1)


def test_variances_are_those_of_the_optima():
    loop = simulate(tiny_federation(), tiny_model, "selffl_augmented", training=WORK, contraction="mean")
    optima = []
    for _ in range(3):
        loop.round()
        optima.append(loop.pool.clients.take(torch.arange(6)).optimum.to(F64))
    loop.pool.close()
    spread = torch.stack(optima).var(0, correction=0).sum(1)
    torch.testing.assert_close(loop.evaluate().figures["sigma_m_sq"], spread, rtol=1e-4, atol=1e-8)
    loop.pool.close()
    last = optima[-1] - optima[-1].mean(0)
    assert float(loop.server.s0) == pytest.approx(float(last.square().sum()), rel=1e-4)  # (25)


@pytest.mark.parametrize(
    ("options", "says"), [({"tol": -1.0}, "tol must be at least 0"), ({"max_extra": 0}, "max_extra must be at least 1")]
)
def test_bad_stopping_rules_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_algorithm("selffl_augmented", WORK, options)


# ---------------------------------------------------------------- clusters


def grouped(groups: Tensor | None) -> Federation:
    data = tiny_federation()
    data.groups = groups
    return data


def test_a_cluster_for_each_client_is_selffl_where_all_take_part():
    data, common = grouped(torch.arange(6)), {"training": WORK, "contraction": "mean"}
    a, ours = after(simulate(data, tiny_model, "selffl_cluster", **common), 6)
    b, theirs = after(simulate(data, tiny_model, "selffl", **common), 6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.theta, b.theta, rtol=0, atol=1e-5)
    assert float(a.s0) == pytest.approx(float(b.s0), rel=1e-4)


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_a_single_cluster_is_the_weighted_average_alone(participation: float):
    data = grouped(torch.zeros(6, dtype=torch.int64))
    common = {"training": WORK, "participation": participation}
    a, ours = after(simulate(data, tiny_model, "selffl_cluster", **common), 6)
    b, theirs = after(simulate(data, tiny_model, "selffl_agg", smoothing=1.0, **common), 6)
    torch.testing.assert_close(a.theta, b.theta, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert float(a.s0) == 0.0  # one representative has no spread


class Clusters:
    """A server of the cluster-level variant, of models with one number, and its rounds one after the other."""

    def __init__(self, clients: int, groups: Tensor | None = None, **options: Any) -> None:
        self.method = SelfFLCluster(WORK, **options)
        num_groups = 0 if groups is None else int(groups.max()) + 1
        self.population = Population(clients, seed=0, groups=groups, num_groups=num_groups)
        self.server = self.method.init_server(GaussianTask(torch.ones(clients), 1.0, 1, dtype=F64), self.population)
        self.number = 0

    def aggregate(self, ids: list[int], delta: Tensor, s: Tensor) -> Server:
        self.number += 1
        info = RoundInfo(self.number, self.population)
        up = Up(delta[:, None].to(F64), s, None)
        self.server = self.method.aggregate(self.server, torch.tensor(ids), up, info)
        return self.server

    def sums_of_others(self) -> list[float]:
        everyone = torch.arange(self.population.num_clients)
        server, ids = self.method.plan(self.server, everyone, RoundInfo(self.number + 1, self.population))
        assert torch.equal(ids, everyone)
        return server.others.tolist()


def test_absent_clusters_are_remembered():
    clusters = Clusters(4, torch.tensor([0, 0, 1, 2]))
    server = clusters.aggregate([0, 1, 2], doubles(1.0, 3.0, 6.0), torch.tensor([-1.0, -1.0, -1.0]))
    # representatives 2 and 6; the third cluster has never been seen; equal weights
    assert server.rep.squeeze(1).tolist() == [2.0, 6.0, 0.0]
    assert server.seen.tolist() == [True, True, False]
    assert float(server.theta) == 4.0
    assert float(server.s0) == 8.0
    # only the first cluster is active: at 4 + 1 = 5; the second is still at 6
    server = clusters.aggregate([1], doubles(1.0), torch.tensor([-1.0]))
    assert server.rep.squeeze(1).tolist() == [5.0, 6.0, 0.0]
    assert float(server.theta) == 5.5
    assert float(server.s0) == 0.5


def test_cluster_sums_by_hand():
    clusters = Clusters(4, torch.tensor([0, 0, 1, 2]))
    server = clusters.aggregate([0, 1, 2], doubles(1.0, 3.0, 6.0), torch.tensor([2.0, 4.0, -1.0]))
    # within the first: spread 2, weights 1/(2 + 2), 1/(2 + 4): (1/4 + 3/6)/(1/4 + 1/6) = 9/5
    assert float(server.rep[0]) == pytest.approx(9 / 5)
    # s_c = 3 and unknown, so equal weights; s0 = 2 · (6 − 9/5)²/4
    assert clusters.method.cluster_variance(server).tolist() == [3.0, -1.0, -1.0]
    assert float(server.theta) == pytest.approx((9 / 5 + 6) / 2)
    s0 = 4.2**2 / 2
    assert float(server.s0) == pytest.approx(s0)
    server.s[2] = 1.0
    w = [1 / (s0 + 3), 1 / (s0 + 1)]
    assert clusters.sums_of_others() == pytest.approx([w[1], w[1], w[0], w[0] + w[1]])


def test_clusters_are_found_by_the_level_of_uncertainty():
    clusters = Clusters(8, torch.tensor([0] * 8), clusters=3, recluster_every=2)
    assert clusters.server.rep.shape == (3, 1)
    assert clusters.server.group.tolist() == [0] * 8
    s = torch.tensor([1e2, 1e-4, 1.1e2, -1.0, 1.0, 1.2, 0.9, 2e-4])
    server = clusters.aggregate(list(range(8)), torch.arange(8.0), s)
    assert server.group.tolist() == [0] * 8  # every second round
    server = clusters.aggregate(list(range(8)), torch.arange(8.0), s)
    # from least to most uncertain; the one of unknown variance goes with the most
    assert server.group.tolist() == [2, 0, 2, 1, 1, 1, 1, 0]
    assert server.seen.tolist() == [True, False, False]
    # the new clusters have variances but no representative yet: the others are the first cluster alone
    w = 1 / (float(server.s0) + 1.5e-4)
    assert clusters.sums_of_others() == pytest.approx([w, 0, w, w, w, w, w, 0], rel=1e-6)


def test_a_round_without_replies_only_delays_the_clustering():
    clusters = Clusters(3, clusters=2, recluster_every=2)
    s = torch.tensor([0.1, 0.1, 5.0])
    clusters.aggregate([0, 1, 2], torch.arange(3.0), s)
    clusters.number += 1  # nobody replied in round 2, in which clusters were due
    assert clusters.aggregate([0, 1, 2], torch.arange(3.0), s).group.tolist() == [0, 0, 1]


def test_fewer_levels_than_clusters_make_fewer_clusters():
    clusters = Clusters(4, clusters=3, recluster_every=1)
    clusters.server.seen[:] = True
    server = clusters.aggregate([0, 1, 2, 3], torch.arange(4.0), torch.tensor([1.0, 1.0, 5.0, 1.0]))
    assert server.group.tolist() == [0, 0, 1, 0]
    assert server.seen.tolist() == [True, True, False]


def test_models_that_never_move_can_be_clustered():
    clusters = Clusters(3, clusters=2, recluster_every=1)
    server = clusters.aggregate([0, 1, 2], torch.arange(3.0), torch.tensor([0.0, 0.0, 5.0]))
    assert server.group.tolist() == [0, 0, 1]


def test_without_variances_there_is_one_cluster():
    clusters = Clusters(3, clusters=2, recluster_every=1)
    server = clusters.aggregate([0, 1, 2], torch.arange(3.0), torch.full((3,), -1.0))
    assert server.group.tolist() == [0, 0, 0]
    assert float(server.theta) == 1.0


@pytest.mark.parametrize(
    ("groups", "options", "count", "given"),
    [
        (torch.tensor([0, 1, 2, 0, 1, 2]), {}, 3, True),
        (torch.tensor([0, 1, 2, 0, 1, 2]), {"clusters": 2}, 2, False),
        (None, {}, 5, False),
        (None, {"clusters": 9, "recluster_every": 3}, 6, False),
    ],
)
def test_where_groups_come_from(groups: Tensor | None, options: dict[str, int], count: int, given: bool):
    clusters = Clusters(6, groups, **options)
    assert len(clusters.server.rep) == count
    assert clusters.method.has_groups(clusters.population) == given


def test_bytes_of_the_cluster_variant_are_those_of_selffl():
    loop = simulate(tiny_federation(), tiny_model, "selffl_cluster", training=WORK, participation=0.5)
    report = loop.round()
    figures = loop.algorithm.figures(loop.server)
    loop.pool.close()
    assert (report.bytes_down, report.bytes_up) == (3 * 4 * 117, 3 * 4 * 116)
    assert figures["clusters"] == 2
    assert figures["group"].tolist() == [0, 1] * 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"domain": "active"}, "domain is all"),
        ({"use_agg": False}, "use selffl with use_agg=false"),
        ({"known_variances": True}, "known variances are those of clients"),
        ({"clusters": 0}, "clusters must be at least 1"),
        ({"recluster_every": 0}, "recluster_every must be at least 1"),
    ],
)
def test_bad_cluster_options_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_algorithm("selffl_cluster", WORK, options)
