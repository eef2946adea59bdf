"""FL+HC: FedAvg before the clustering, the clustering by hand, FedAvg in each cluster after it, and latecomers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, gradient, info, models, run, server, weighted
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.flhc import FLHC, Server
from kinfed.algorithms.local import Local
from kinfed.core import rng
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import CHECKS, VARIANT_CHECKS, Bench, tiny_federation
from kinfed.testing.workbench import SEED

# Updates of six clients: three pairs, far apart.
PAIRS = torch.tensor([[1.0, 0.0], [0.0, 4.0], [1.2, 0.0], [-6.0, 0.0], [0.0, 4.4], [-6.0, 0.2]])


def fresh(clients: int = 6) -> Server:
    return Server(
        model=torch.zeros(1, 2),
        cluster=torch.zeros(clients, dtype=torch.int64),
        origin=torch.zeros(2),
        centre=torch.empty(0, 2),
        threshold=torch.zeros((), dtype=torch.float64),
    )


def replies(method: FLHC, state: Server, ids: list[int], updates: Tensor, count: list[int] | None = None) -> Server:
    counted = None if method.weights == "equal" else torch.tensor(count or [1.0] * len(ids)).float()
    return method.aggregate(state, torch.tensor(ids), DeltaUp(updates, counted), info())


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_before_the_clustering_it_is_fedavg(training: LocalTraining, weights: str) -> None:
    ours, theirs = run(FLHC(training, n1=5, weights=weights)), run(FedAvg(training, weights=weights))
    assert torch.equal(ours["server.model"][0], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["server.w"].expand(6, -1))


def test_one_cluster_stays_fedavg() -> None:
    training = WORKS["steps"]
    ours = run(FLHC(training, n1=1, threshold=1e9), participation=1.0)
    theirs = run(FedAvg(training), participation=1.0)
    close(ours["server.model"][0], theirs["server.w"])


def test_clusters_of_one_train_alone() -> None:
    """Clustered at once with T_d = 0: everyone goes on from the common start with its own model."""
    training = WORKS["steps"]
    ours = run(FLHC(training, n1=0, threshold=0.0), participation=1.0)
    assert ours["server.cluster"].tolist() == [0, 1, 2, 3, 4, 5]
    close(ours["personal models"], run(Local(training), participation=1.0)["personal models"], 1e-5)


@pytest.mark.parametrize("linkage", ["ward", "complete", "average", "single"])
def test_the_clustering_by_hand(linkage: str) -> None:
    method = FLHC(n1=0, linkage=linkage, threshold=1.0)
    state = replies(method, fresh(), [0, 1, 2, 3, 4, 5], PAIRS, [1, 1, 3, 1, 1, 3])
    assert state.cluster.tolist() == [0, 1, 0, 2, 1, 2]
    close(state.model, torch.tensor([[1.15, 0.0], [0.0, 4.2], [-6.0, 0.15]]))  # means by examples
    close(state.centre, torch.tensor([[1.1, 0.0], [0.0, 4.2], [-6.0, 0.1]]))
    assert float(state.threshold) == 1.0


def test_metrics_lead_to_other_clusters() -> None:
    """(1, 1) and (9, 9) have the same direction; by length (1, 1) is nearer to (1, −1)."""
    updates = torch.tensor([[1.0, 1.0], [9.0, 9.0], [1.0, -1.0]])
    by_length = replies(FLHC(n1=0, linkage="average", threshold=3.0), fresh(3), [0, 1, 2], updates)
    assert by_length.cluster.tolist() == [0, 1, 0]
    turned = FLHC(n1=0, linkage="average", metric="cosine", threshold=0.5)
    assert replies(turned, fresh(3), [0, 1, 2], updates).cluster.tolist() == [0, 0, 1]
    steps = torch.tensor([[0.0, 0.0], [2.0, 2.0], [3.1, 0.0]])  # L1: 4, 3.1, 3.1;  L2: 2.8, 3.1, 2.3
    l1 = replies(FLHC(n1=0, linkage="single", metric="l1", threshold=3.2), fresh(3), [0, 1, 2], steps)
    assert l1.cluster.tolist() == [0, 0, 0]
    l1 = replies(FLHC(n1=0, linkage="complete", metric="l1", threshold=3.2), fresh(3), [0, 1, 2], steps)
    assert len(l1.model) == 2


def test_the_threshold_is_a_quantile_of_all_distances() -> None:
    updates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [4.0, 0.0], [10.0, 0.0]])
    found = sorted(abs(a - b) for a in (0, 1, 4, 10) for b in (0, 1, 4, 10) if a < b)
    for q in (0.0, 0.3, 0.5, 1.0):
        method = FLHC(n1=0, linkage="complete", quantile=q)
        state = replies(method, fresh(4), [0, 1, 2, 3], updates)
        assert float(state.threshold) == pytest.approx(float(np.quantile(found, q)))
    assert len(state.model) == 1  # at the largest distance all are joined
    assert method.figures(state) == {"clusters": 1, "threshold": 10.0, "assignment": state.cluster}


def test_clusters_go_on_alone() -> None:
    """The clustering round moves every new cluster from the common model; the next ones from its own."""
    sizes = (2, 6, 4)
    with by_hand(FLHC(ALL, n1=1, linkage="complete", quantile=0.0), sizes=sizes) as loop:
        loop.round()
        start = server(loop, "model").expand(3, -1)  # by client
        for _ in range(3):
            g = [gradient(loop, k, start[k]) for k in range(3)]
            loop.round()
            cluster = server(loop, "cluster").tolist()
            assert sorted(cluster) in ([0, 0, 1], [0, 1, 1])  # the nearest two are joined
            for c in (0, 1):
                members = [k for k in range(3) if cluster[k] == c]
                step = weighted([g[k] for k in members], tuple(sizes[k] for k in members))
                close(server(loop, "model")[c], start[members[0]] - LR * step)
            start = server(loop, "model")[cluster]
            close(models(loop), start)


def test_the_clustering_round_calls_on_everyone() -> None:
    with by_hand(FLHC(ALL, n1=2), sizes=(2, 6, 4, 3, 5, 7), participation=0.34) as loop:
        assert [loop.round().active for _ in range(3)] == [2, 2, 6]
        members = torch.bincount(server(loop, "cluster"))  # nobody is without a cluster
        called = sum(max(int(0.34 * n), 1) for n in members.tolist())
        assert [loop.round().active for _ in range(2)] == [called, called]


@dataclass(frozen=True)
class Misses(Schedule):
    """Client 4 is lost in the first round."""

    dropout: float = 0.5

    def dropouts(self, seed: int, round: int, ids: Tensor) -> Tensor:
        return (ids == 4) & (round == 1)


def test_a_latecomer_trains_from_the_same_model_and_joins_the_nearest_cluster() -> None:
    method = FLHC(n1=0, threshold=1.0)
    others = [0, 1, 2, 3, 5]
    state = replies(method, fresh(), others, PAIRS[others])
    assert state.cluster.tolist() == [0, 1, 0, 2, -1, 2]
    state = replace(state, origin=torch.tensor([7.0, 7.0]))
    sent = method.download(state, torch.tensor([3, 4])).w
    close(sent, torch.stack([state.model[2], torch.tensor([7.0, 7.0])]))
    placed = replies(method, state, [0, 4], torch.tensor([[0.5, 0.5], [0.2, 4.0]]))
    assert placed.cluster.tolist() == [0, 1, 0, 2, 1, 2]
    close(placed.model[0], state.model[0] + 0.5)
    assert torch.equal(placed.model[1:], state.model[1:])  # what placed it is not averaged
    close(method.download(placed, torch.tensor([4])).w, placed.model[1:2])
    beside = replies(method, state, [1, 4], torch.tensor([[0.5, 0.5], [0.2, 4.0]]))  # a member of its cluster replies
    close(beside.model[1], state.model[1] + 0.5)


@pytest.mark.parametrize("metric", ["l2", "l1", "cosine"])
def test_latecomers_are_placed_by_the_metric(metric: str) -> None:
    method = FLHC(n1=0, linkage="average", metric=metric, threshold=1e-6)
    state = replies(method, fresh(4), [0, 1], torch.tensor([[1.0, 0.0], [0.0, 9.0]]))
    near = {"l2": 0, "l1": 0, "cosine": 1}[metric]  # (0.5, 1.5): short as the first, turned to the second
    placed = replies(method, state, [3], torch.tensor([[0.5, 1.5]]))
    assert placed.cluster.tolist() == [0, 1, -1, near]


def test_a_client_lost_in_the_clustering_round_is_placed_later() -> None:
    with Bench(FLHC(LocalTraining(batch=5, steps=5), n1=0)).loop(Misses()) as loop:
        loop.round()
        assert int(server(loop, "cluster")[4]) == -1
        close(models(loop)[4], loop.task.init(SEED))
        loop.round()
        assert bool((server(loop, "cluster") >= 0).all())


def test_one_reply_is_one_cluster() -> None:
    state = replies(FLHC(n1=0), fresh(3), [1], torch.tensor([[1.0, 2.0]]))
    assert state.cluster.tolist() == [-1, 0, -1]
    close(state.model, torch.tensor([[1.0, 2.0]]))


def test_equal_updates_are_one_cluster() -> None:
    state = replies(FLHC(n1=0), fresh(3), [0, 1, 2], torch.ones(3, 2))
    assert state.cluster.tolist() == [0, 0, 0]


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(FLHC(ALL, n1=1)) as loop:
        for _ in range(3):
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * (15 + 1) * 4)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(FLHC(LocalTraining(batch=5, steps=5), n1=1, linkage="average"), federation=tiny_federation())


# The clustering round calls on everyone, so nobody is an outsider.
@pytest.mark.parametrize("check", VARIANT_CHECKS)
def test_the_contract_holds_after_the_clustering(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n1": -1}, "n1 must be at least 0"),
        ({"linkage": "median"}, r"linkage must be ward \| complete \| average \| single"),
        ({"metric": "l3"}, r"metric must be l2 \| l1 \| cosine"),
        ({"metric": "cosine"}, "ward's linkage is defined for metric l2 only"),
        ({"threshold": -1.0}, "threshold must be at least 0"),
        ({"quantile": 1.5}, r"quantile must be in \[0, 1\]"),
        ({"weights": "none"}, r"weights must be examples \| equal"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("flhc", ALL, options)


def test_after_the_clustering_every_cluster_is_called_in_every_round() -> None:
    """Clusters of 7, 2 and 1 clients, and two without a cluster yet, a third of each, at least one."""
    method = FLHC(ALL, n1=0)
    cluster = torch.tensor([0, 1, 0, 0, -1, 0, 2, 0, -1, 0, 1, 0])
    state = replace(fresh(12), model=torch.zeros(3, 2), cluster=cluster, centre=torch.zeros(3, 2))
    population = replace(Population(12, SEED), participation=1 / 3)
    drawn = [method.plan(state, torch.tensor([0]), RoundInfo(number, population))[1] for number in range(2, 40)]
    for ids in drawn:
        assert ids.tolist() == sorted(ids.tolist())
        assert torch.bincount(cluster[ids] + 1).tolist() == [1, 2, 1, 1]
    assert set(torch.cat(drawn).tolist()) == set(range(12))
    again = method.plan(state, torch.tensor([0]), RoundInfo(5, population))[1]
    assert torch.equal(again, drawn[3])
    everyone = method.plan(state, torch.arange(12), RoundInfo(5, Population(12, SEED)))[1]
    assert torch.equal(everyone, torch.arange(12))


def test_no_cluster_round_is_without_training() -> None:
    with by_hand(FLHC(ALL, n1=0, quantile=0.3), sizes=(2, 6, 4, 3, 5, 7), participation=0.2) as loop:
        loop.round()
        for _ in range(3):
            before = server(loop, "model")
            loop.round()
            assert bool((server(loop, "model") != before).any(1).all())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_who_disagree_get_models_of_their_own(seed: int) -> None:
    """What it was invented for: eight clients with the same inputs, of whom every other one has the classes renamed."""
    y = torch.arange(8 * 42) // 8 % 3
    owner = torch.arange(8 * 42) % 8
    noise = rng.normal(rng.root(seed, "planted"), len(y) * 5).reshape(-1, 5)
    x = (3.0 * torch.eye(3, 5)[y] + noise).to(torch.float32)
    data = Federation.from_arrays(x.numpy(), ((y + owner % 2) % 3).numpy(), owner.numpy(), num_classes=3)
    training, right = LocalTraining(lr=0.2, batch=50, steps=10), {}
    for n1 in (2, 99):
        with Bench(FLHC(training, n1=n1), federation=data, model=lambda: torch.nn.Linear(5, 3)).loop(
            Schedule()
        ) as loop:
            for _ in range(10):
                loop.round()
            score = loop.evaluate().personal
            assert score is not None
            right[n1] = float(score.correct.sum() / score.count.sum())
            cluster = server(loop, "cluster")
            assert set(cluster[::2].tolist()).isdisjoint(cluster[1::2].tolist()) is (n1 == 2)
    assert right[2] > 0.9
    assert right[99] < 0.7
