"""FedAS: alignment and Fisher weights by hand; FedPer as its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    WORKS,
    by_hand,
    close,
    cut_gradient,
    deep,
    features,
    gradient,
    info,
    run,
    server,
    state,
)
from torch import Tensor, nn

from kinfed.algorithms.fedas import Alignment, FedAS, Server, Up
from kinfed.algorithms.fedper import FedPer
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED

HEAD = slice(35, 47)  # of the deep model


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_both_parts_it_is_fedper(training: LocalTraining) -> None:
    ours, theirs = run(FedAS(training, align_epochs=0, fisher="off")), run(FedPer(training, weights="equal"))
    assert torch.equal(ours["server.shared"], theirs["server.shared"])
    assert torch.equal(ours["current_body loss"], theirs["personal loss"])


def test_one_batch_by_hand() -> None:
    """Classes count equally: the two examples of class 0 share what the one of class 1 has; padding has nothing."""
    phi = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [9.0, 9.0]]])
    batch = Batch(phi, torch.tensor([[0, 0, 1, 0]]), torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]), torch.tensor([0]))
    means = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[9.0, 9.0], [9.0, 9.0]]])
    dz, dphi = Alignment(means)(phi, phi, batch, torch.tensor([0]))
    assert dz is not None
    assert not bool(dz.any())
    assert dphi is not None
    assert dphi[0].tolist() == [[0, 0], [1, 0], [0, 4], [0, 0]]


def test_weights_by_hand() -> None:
    """F = (1, 3): a quarter and three quarters; all 0: equal."""
    method, old = FedAS(ALL), Server(torch.tensor([1.0]))
    up = Up(torch.tensor([[4.0], [8.0]]), torch.tensor([1.0, 3.0]))
    assert method.aggregate(old, torch.arange(2), up, info()).shared.tolist() == [8.0]
    none = replace(up, fisher=torch.zeros(2))
    assert method.aggregate(old, torch.arange(2), none, info()).shared.tolist() == [7.0]


@pytest.mark.parametrize("fisher", ["example", "batch"])
def test_rounds_by_hand(fisher: str) -> None:
    """Plain autograd, one example at a time for F; two of three clients in each round."""
    method = FedAS(ALL, align_lr=0.3, fisher=fisher)  # type: ignore[arg-type]
    with by_hand(method, model=deep, participation=0.67) as loop:
        data, start = loop.pool.federation, loop.task.init(SEED)
        body, own = start[:35], dict.fromkeys(range(3), start)
        seen: set[int] = set()
        for number in range(1, 5):
            active = loop.schedule.active(SEED, number, 3).tolist()
            bodies, weights = [], []
            for m in active:
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                theta = torch.cat([body, own[m][HEAD]])
                if m in seen:
                    phi_own = features(loop, own[m], x)

                    def apart(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, before: Tensor = phi_own) -> Tensor:
                        parts = [(phi[y == c] - before[y == c].mean(0)).square().mean() for c in set(y.tolist())]
                        return torch.stack(parts).sum() + 0 * z.sum()

                    theta = theta - 0.3 * cut_gradient(loop, m, theta, apart)
                own[m] = theta - LR * gradient(loop, m, theta)
                each = [
                    cut_gradient(loop, m, own[m], lambda x, phi, z, y, i=i: nn.functional.cross_entropy(z[i], y[i]))  # type: ignore[misc]
                    for i in range(len(y))
                ]
                whole = float(torch.stack(each).mean(0).square().sum())
                weights.append(sum(float(g.square().sum()) for g in each) / len(y) if fisher == "example" else whole)
                bodies.append(own[m][:35])
            body = sum(w * b for w, b in zip(weights, bodies, strict=True)) / sum(weights)  # type: ignore[assignment]
            seen |= set(active)
            report = loop.round()
            assert report.bytes_down == len(active) * 4 * 35
            assert report.bytes_up == len(active) * 4 * 36
            close(server(loop, "shared"), body, 1e-5)
            for m in seen:
                close(state(loop, m, "theta"), own[m], 1e-5)


def test_aligned_bodies_have_the_features_of_the_clients_own() -> None:
    """What the method is for: a client that comes back finds features that its head knows."""
    bench = Bench(FedAS(LocalTraining(lr=0.1, batch=8, steps=20), align_epochs=5, align_lr=0.1))
    with bench.loop() as loop:
        for _ in range(3):
            loop.round()
        ids = loop.pool.states()["ids"]
        client, down = loop.pool.clients.take(ids), loop.algorithm.download(loop.server, ids)
        data = bench.federation.cohort(ids, seed=0, round=4)
        method, task = loop.algorithm, loop.task
        received = method.personalize(task, client, down, data)["current_body"]
        aligned = method._align(task, client.theta, received, data.train)
        far = []
        for theta in (received, aligned):
            sums, own = task.class_sums(theta, data.train), task.class_sums(client.theta, data.train)
            gap = (sums.total - own.total) / own.count.clamp_min(1)[..., None]
            far.append(gap.square().sum((1, 2)))
        assert bool((far[1] < far[0]).all())
        assert float(far[1].sum()) < 0.5 * float(far[0].sum())
        assert torch.equal(aligned[:, task.head.mask], received[:, task.head.mask])


def test_what_leaves_a_client_decides_whether_it_is_private() -> None:
    count = torch.tensor([4])
    assert "Fisher" in FedAS(ALL).privacy(count).impossible
    assert "class means" in FedAS(ALL, fisher="off").privacy(count).impossible
    assert not FedAS(ALL, fisher="off", align_epochs=0).privacy(count).impossible
    assert not FedAS(ALL, fisher="off").single_updates
    assert FedAS(ALL).single_updates
