"""FedNTD: distillation of the classes an example does not have; FedAvg as its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, cut_gradient, deep, run, server, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedntd import FedNTD, not_true_softmax
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import Task
from kinfed.testing import Bench


def not_true_divergence(z: Tensor, z_w: Tensor, y: Tensor, tau: float) -> Tensor:
    """[B] KL over the classes c ≠ y, example by example."""
    total = []
    for row, teacher, label in zip(z, z_w, y.tolist(), strict=True):
        rest = [c for c in range(len(row)) if c != label]
        p, q = torch.softmax(row[rest] / tau, 0), torch.softmax(teacher[rest] / tau, 0)
        total.append((q * (q.log() - p.log())).sum())
    return torch.stack(total)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_distillation_it_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedNTD(training, beta=0.0)), run(FedAvg(training))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_example_by_hand() -> None:
    """z = (2, 1, 0), z_w = (0, 0, 1), y = 0, τ = 1: the divergence is 0.462117."""
    z, z_w, y = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0])
    assert float(not_true_divergence(z, z_w, y, 1.0)) == pytest.approx(0.462117, abs=1e-6)
    p, q = not_true_softmax(z, y, 1.0), not_true_softmax(z_w, y, 1.0)
    assert p[0, 0] == q[0, 0] == 0
    assert float((q[0, 1:] * (q[0, 1:] / p[0, 1:]).log()).sum()) == pytest.approx(0.462117, abs=1e-6)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_rounds_by_hand(tau: float) -> None:
    """Two steps, as the first has z = z_w: plain autograd of the whole loss; bytes are FedAvg's."""
    with by_hand(FedNTD(ALL.with_steps(2), beta=0.5, tau=tau), model=deep) as loop:
        task: Any = loop.task
        for _ in range(2):
            w = server(loop)
            module, models = task.module_of(w), []

            def loss(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, teacher: nn.Module = module) -> Tensor:
                kl = not_true_divergence(z, teacher(x).detach(), y, tau).mean()
                return nn.functional.cross_entropy(z, y) + 0.5 * tau**2 * kl

            for m in range(3):
                theta = w
                for _ in range(2):
                    theta = theta - LR * cut_gradient(loop, m, theta, loss)
                models.append(theta)
            report = loop.round()
            close(server(loop), weighted(models))
            assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * 48)


def test_the_first_step_of_a_round_is_fedavgs() -> None:
    with by_hand(FedNTD(ALL, beta=5.0), model=deep) as ours, by_hand(FedAvg(ALL), model=deep) as theirs:
        for loop in (ours, theirs):
            loop.round()
        close(server(ours), server(theirs))


def test_knowledge_of_other_classes_is_kept() -> None:
    """After long training on few classes, the received model's view of the not-true classes has suffered less."""
    training = LocalTraining(lr=0.5, batch=8, steps=60)
    drift = {}
    for beta in (0.0, 1.0):
        bench = Bench(FedNTD(training, beta=beta))
        with bench.loop() as loop:
            w, data = server(loop), bench.federation.cohort(torch.arange(6), seed=0, round=1)
            task: Task = loop.task
            trained = loop.algorithm.train(task, w.expand(6, -1), data)
            ((_, batch),) = data.test.in_order()
            z, z_w = task.logits(trained, batch.x), task.logits(w.expand(6, -1), batch.x)
            drift[beta] = float(not_true_divergence(z.flatten(0, 1), z_w.flatten(0, 1), batch.y.flatten(), 1.0).mean())
    assert drift[1.0] < drift[0.0] / 2
