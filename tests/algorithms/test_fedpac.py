"""FedPAC: the quadratic program against numbers by hand and its optimality conditions; rounds by plain autograd; FedRep
as its limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from method_bench import (
    ALL,
    LR,
    SIZES,
    TWO_STEPS,
    by_hand,
    close,
    cut_gradient,
    deep,
    features,
    info,
    models,
    run,
    server,
    weighted,
)
from torch import Tensor, nn

from kinfed.algorithms.fedpac import FedPAC, Up, error_terms, least_on_simplex, mixing_weights
from kinfed.algorithms.fedrep import FedRep
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.testing import tiny_federation
from kinfed.testing.workbench import SEED

HEAD = slice(35, 47)  # of the deep model
EPOCH = LocalTraining(batch=3, steps=None, epochs=1, weight_decay=0.01, momentum=0.5)


def test_without_mixing_and_the_pull_it_is_fedrep() -> None:
    ours = run(FedPAC(EPOCH, lam=0.0, mix=False, head_lr=None, weights="equal"))
    theirs = run(FedRep(EPOCH))
    assert torch.equal(ours["server.shared"], theirs["server.shared"])
    trained = torch.isin(torch.arange(6), theirs["clients.ids"])
    assert torch.equal(ours["personal models"][trained], theirs["personal models"][trained])


def test_two_clients_by_hand() -> None:
    """Q_1 = diag(0, 1): α_1 minimizes 0.1 a² + 1.3 (1 − a)², at a = 13/14; Q_2 alike."""
    h = torch.tensor([[1.0, 0, 0, 1], [1.0, 0, 0, 0]])
    alpha, unsolved = mixing_weights(h, torch.tensor([0.1, 0.3]))
    close(alpha, torch.tensor([[13 / 14, 1 / 14], [3 / 14, 11 / 14]], dtype=torch.float64))
    assert unsolved == 0


def test_equal_clients_share_by_certainty_and_one_example_keeps_its_head() -> None:
    h = torch.ones(3, 4)
    alpha, _ = mixing_weights(h, torch.tensor([1.0, 2.0, 4.0]))
    close(alpha[1], torch.tensor([4 / 7, 2 / 7, 1 / 7], dtype=torch.float64))
    alpha, _ = mixing_weights(torch.tensor([[1.0], [2.0], [2.5]]), torch.tensor([0.0, 1.0, 1.0]))
    assert alpha[0].tolist() == [1.0, 0.0, 0.0]


def test_weights_that_hardly_count_are_dropped() -> None:
    alpha, _ = mixing_weights(torch.tensor([[0.0], [100.0]]), torch.tensor([1.0, 1.0]))
    assert torch.equal(alpha, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("rank", [1, 3, 12])
def test_the_program_is_solved(rank: int) -> None:
    """Karush-Kuhn-Tucker: (M a)_j is a'Ma where a_j > 0, and no smaller elsewhere."""
    draw = np.random.default_rng(rank)
    for n in (1, 2, 12):
        root = draw.normal(size=(n, rank))
        M = root @ root.T + np.diag(draw.uniform(0.01, 1.0, n))
        a = least_on_simplex(M)
        assert a.sum() == pytest.approx(1)
        assert (a >= 0).all()
        slope = M @ a - a @ M @ a
        assert slope.min() > -1e-9
        assert np.abs(slope[a > 0]).max() < 1e-9


def test_a_singular_program_has_a_solution() -> None:
    """Two clients of one example each that are the same for a third."""
    alpha, unsolved = mixing_weights(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([1.0, 0.0, 0.0]))
    assert unsolved == 0
    close(alpha[0], torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))


def test_rounds_by_hand() -> None:
    """Loops over examples, plain autograd, two of three clients at a time; bytes counted by hand."""
    method = FedPAC(TWO_STEPS, lam=0.5, head_lr=0.2)
    with by_hand(method, model=deep, participation=0.67) as loop:
        data, start = loop.pool.federation, loop.task.init(SEED)
        body, heads = start[:35], {m: start[HEAD] for m in range(3)}
        prototypes: dict[int, Tensor] = {}
        heard: set[int] = set()
        for number in range(1, 5):
            active = loop.schedule.active(SEED, number, 3).tolist()
            bodies, sent, h, variance, means = [], [], [], [], []
            for m in active:
                mean_head = torch.stack([heads[k] for k in sorted(heard)]).mean(0) if heard else start[HEAD]
                theta = torch.cat([body, heads[m] if m in heard else mean_head])
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                before = [features(loop, theta, x)[y == c] for c in range(3)]
                shares = [len(phi) / len(y) * phi.mean(0) if len(phi) else torch.zeros(3) for phi in before]
                square = sum(float((phi.double() ** 2).sum()) for phi in before) / len(y)
                variance.append((square - sum(float((s.double() ** 2).sum()) for s in shares)) / len(y))
                h.append(torch.cat(shares))
                theta[HEAD] -= 0.2 * cut_gradient(loop, m, theta, plain)[HEAD]

                def loss(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, own: list[Tensor] = before) -> Tensor:
                    target = [prototypes.get(c, own[c].mean(0)) for c in y.tolist()]
                    pull = (phi - torch.stack(target)).square().mean() if prototypes else 0.0
                    return plain(x, phi, z, y) + 0.5 * pull

                for _ in range(2):
                    theta[:35] -= LR * cut_gradient(loop, m, theta, loss)[:35]
                bodies.append(theta[:35])
                sent.append(theta[HEAD])
                after = features(loop, theta, x)
                means.append({c: (after[y == c].sum(0), int((y == c).sum())) for c in set(y.tolist())})
            alpha, _ = mixing_weights(torch.stack(h), torch.tensor(variance))
            body = weighted(bodies, tuple(SIZES[m] for m in active))
            for row, m in zip(alpha, active, strict=True):
                heads[m] = (row[:, None] * torch.stack(sent)).sum(0).float()
            for c in range(3):
                parts = [one[c] for one in means if c in one]
                if parts:
                    prototypes[c] = sum(total for total, _ in parts) / sum(count for _, count in parts)  # type: ignore[assignment]
            heard |= set(active)
            report = loop.round()
            assert report.bytes_down == len(active) * (4 * (47 + 9) + 3)  # which classes are known is a byte each
            assert report.bytes_up == len(active) * 4 * (47 + 9 + 3 + 9 + 1)
            close(server(loop, "shared"), body, 1e-5)
            for c, prototype in prototypes.items():
                close(server(loop, "prototypes")[c], prototype, 1e-5)
            for m in heard:
                close(models(loop)[m], torch.cat([body, heads[m]]), 1e-5)


def plain(x: Tensor, phi: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z, y)


def test_a_class_without_a_prototype_is_drawn_to_the_clients_own_mean() -> None:
    method = FedPAC(TWO_STEPS, lam=5.0)
    with by_hand(method, model=deep) as loop:
        everybody = torch.arange(3)
        data = loop.pool.federation.cohort(everybody, seed=SEED, round=1)
        down = loop.algorithm.download(loop.server, everybody)
        sums = loop.task.class_sums(torch.cat([down.shared, down.head], 1), data.train)
        some = replace(down, known=torch.tensor([False, True, True]).expand(3, -1))
        own = down.prototypes.clone()
        own[:, 0] = (sums.total[:, 0] / sums.count[:, :1].clamp_min(1)).float()
        every = replace(down, prototypes=own, known=torch.ones(3, 3, dtype=torch.bool))
        bodies = [
            method.client_update(loop.task, loop.pool.clients.take(everybody), d, data)[1].delta for d in (some, every)
        ]
        close(bodies[0], bodies[1])


def test_heads_come_from_clients_with_the_same_labels() -> None:
    """Clients 0 and 1 call classes by other names than 2 and 3: nobody takes much of the other pair's heads."""
    data = tiny_federation((30, 30, 30, 30))
    labels = data.labels.clone()
    for m in (2, 3):
        labels[data.train[m]] = (labels[data.train[m]] + 1) % 3
    data = replace(data, labels=labels)
    with by_hand(FedPAC(ALL), model=deep) as loop:
        cohort = data.cohort(torch.arange(4), seed=0, round=1)
        start = loop.task.init(SEED).expand(4, -1)
        h, variance = error_terms(loop.task.class_sums(start, cohort.train))
    alpha, _ = mixing_weights(h.flatten(1), variance)
    assert float(alpha[:2, 2:].sum(1).max()) < 0.2
    assert float(alpha[2:, :2].sum(1).max()) < 0.2


def test_a_hostile_variance_is_no_solution_to_fear() -> None:
    method = FedPAC(ALL)
    with by_hand(method, model=deep) as loop:
        n, zeros = 3, torch.zeros
        up = Up(zeros(n, 35), zeros(n, 12), zeros(n, 3, 3), torch.ones(n, 3), zeros(n, 3, 3), torch.full((n,), -1.0))
        new = method.aggregate(loop.server, torch.arange(3), up, info(clients=3))
        assert bool(torch.isfinite(new.heads).all())
        assert method.figures(new) == {"own_share": 1.0, "unsolved": 0.0}


def test_a_rate_below_the_floor_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="lr_floor"):
        FedPAC(LocalTraining(lr=0.5, lr_floor=0.3))


def test_class_means_are_not_private() -> None:
    assert "mean features" in FedPAC(ALL).privacy(torch.tensor([4])).impossible
