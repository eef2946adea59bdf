"""FedProto: prototypes and the pull to them by hand; local training as its limit; the nearest prototype as a head."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, cut_gradient, deep, features, info, run, server, state
from torch import Tensor, nn

from kinfed.algorithms.fedproto import FedProto, PrototypePull, Server, Up
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_the_pull_it_is_local_training(training: LocalTraining) -> None:
    ours, theirs = run(FedProto(training, lam=0.0)), run(Local(training))
    assert torch.equal(ours["personal models"], theirs["personal models"])


def test_everybodys_first_round_is_local() -> None:
    ours, theirs = run(FedProto(WORKS["steps"], lam=9.0), rounds=1), run(Local(WORKS["steps"]), rounds=1)
    assert torch.equal(ours["personal models"], theirs["personal models"])


@pytest.mark.parametrize(("reduce", "slope"), [("mean", (1.0, 2.0)), ("sum", (2.0, 4.0))])
def test_one_example_by_hand(reduce: str, slope: tuple[float, float]) -> None:
    """φ = (1, 2), C̄ = 0, d_f = 2, λ = 1: R = 2.5 as a mean; nothing for a class without a prototype."""
    phi = torch.tensor([[[1.0, 2.0], [1.0, 2.0]]])
    batch = Batch(phi, torch.tensor([[0, 1]]), torch.ones(1, 2), torch.tensor([0]))
    feature_loss = PrototypePull(
        torch.zeros(1, 2, 2), torch.tensor([[True, False]]), 1.0, 0.5 if reduce == "mean" else 1.0
    )
    dz, dphi = feature_loss(phi, phi, batch, torch.tensor([0]))
    assert dz is None
    assert dphi is not None
    assert dphi[0].tolist() == [list(slope), [0.0, 0.0]]


@pytest.mark.parametrize(("reduce", "weights"), [("mean", "equal"), ("sum", "examples")])
def test_rounds_by_hand(reduce: str, weights: str) -> None:
    """Plain autograd at every client, means of features by loops over examples; C (d_f + 1) numbers each way."""
    method = FedProto(ALL.with_steps(2), lam=0.5, reduce=reduce, weights=weights)  # type: ignore[arg-type]
    with by_hand(method, model=deep, participation=0.67) as loop:
        data = loop.pool.federation
        theta = {m: loop.task.init(SEED) for m in range(3)}
        prototypes: dict[int, Tensor] = {}

        def loss(x: Tensor, phi: Tensor, z: Tensor, y: Tensor) -> Tensor:
            far = [(phi[i] - prototypes[c]).square() for i, c in enumerate(y.tolist()) if c in prototypes]
            each = [f.mean() if reduce == "mean" else f.sum() for f in far]
            return nn.functional.cross_entropy(z, y) + 0.5 * torch.stack([z.sum() * 0, *each]).sum() / len(y)

        for number in range(1, 5):
            active = loop.schedule.active(SEED, number, 3).tolist()
            sent: dict[int, list[tuple[Tensor, int]]] = {}
            for m in active:
                for _ in range(2):
                    theta[m] = theta[m] - LR * cut_gradient(loop, m, theta[m], loss)
                phi, y = features(loop, theta[m], data.features.gather(data.train[m])), data.labels[data.train[m]]
                for c in set(y.tolist()):
                    sent.setdefault(c, []).append((phi[y == c].mean(0), int((y == c).sum())))
            for c, means in sent.items():
                share = [count if weights == "examples" else 1 for _, count in means]
                prototypes[c] = sum(s * mean for s, (mean, _) in zip(share, means, strict=True)) / sum(share)  # type: ignore[assignment]
            report = loop.round()
            assert report.bytes_down == len(active) * (3 * 3 * 4 + 3)  # which classes are known is a byte each
            assert report.bytes_up == len(active) * 4 * (3 * 3 + 3)
            assert server(loop, "known").tolist() == [c in prototypes for c in range(3)]
            for c, prototype in prototypes.items():
                close(server(loop, "prototypes")[c], prototype, 1e-5)
            for m in active:
                close(state(loop, m, "theta"), theta[m], 1e-5)


def test_classes_that_nobody_sent_keep_their_prototype() -> None:
    method, old = FedProto(ALL), Server(torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([True, True, False]))
    up = Up(torch.tensor([[[3.0], [0.0], [0.0]], [[5.0], [0.0], [0.0]]]), torch.tensor([[1.0, 0, 0], [3.0, 0, 0]]))
    new = method.aggregate(old, torch.arange(2), up, info())
    assert new.prototypes.tolist() == [[4.5], [2.0], [0.0]]
    assert new.known.tolist() == [True, True, False]


def test_the_nearest_prototype_is_a_head() -> None:
    with by_hand(FedProto(ALL.with_steps(3)), model=deep) as loop:
        loop.round()
        everybody = torch.arange(3)
        clients, down = loop.pool.clients.take(everybody), loop.algorithm.download(loop.server, everybody)
        down.known = torch.tensor([[False, True, True]]).expand(3, -1)
        data = loop.pool.federation.cohort(everybody, seed=7, round=1)
        rows = loop.algorithm.personalize(loop.task, clients, down, data)
        assert isinstance(rows, dict)
        assert list(rows) == ["personal", "nearest_prototype"]
        ((_, batch),) = data.test.in_order()
        phi = loop.task.features(clients.theta, batch.x)
        distance = (phi[:, :, None] - down.prototypes[:, None]).square().sum(-1)
        distance[..., 0] = torch.inf
        assert torch.equal(loop.task.logits(rows["nearest_prototype"], batch.x).argmax(-1), distance.argmin(-1))


def test_features_of_a_class_come_together() -> None:
    """With the pull, the clients' prototypes of a class are nearer to each other than in local training."""
    apart = {}
    for lam in (0.0, 5.0):
        bench = Bench(FedProto(LocalTraining(lr=0.1, batch=8, steps=20), lam=lam))
        with bench.loop() as loop:
            for _ in range(6):
                loop.round()
            everybody = torch.arange(6)
            data = bench.federation.cohort(everybody, seed=0, round=1)
            sums = loop.task.class_sums(loop.pool.clients.take(everybody).theta, data.train)
            means = sums.total / sums.count.clamp_min(1)[..., None]
            apart[lam] = sum(float(means[sums.count[:, c] > 0, c].var(0).sum()) for c in range(3))
    assert apart[5.0] < apart[0.0] / 2


def test_class_means_are_not_private() -> None:
    assert "mean features" in FedProto(ALL).privacy(torch.tensor([4])).impossible
