"""FedBE: FedAvg as its limit, draws and a round by hand, and labels that nobody looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import TWO_STEPS, WORKS, deep
from scipy import stats
from torch import Tensor

from kinfed.algorithms.common.distillation import public_scores
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedbe import FedBE
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.task import Task
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED


def federation() -> Federation:
    return tiny_federation((20, 30, 10)).with_public(0.1, SEED)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_distillation_it_is_fedavg(training: LocalTraining) -> None:
    ours = Bench(FedBE(training, distill_steps=0), federation=federation()).run()
    theirs = Bench(FedAvg(training), federation=federation()).run()
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["personal models"])


@pytest.mark.parametrize("sampling", ["gaussian", "dirichlet"])
def test_an_ensemble_of_one_model_teaches_nothing(sampling: str) -> None:
    """One client at a time: no variance, all samples are its model, whose predictions are the targets."""
    alone = Schedule(1e-9)
    method = FedBE(TWO_STEPS, sampling=sampling, distill_steps=7, cycle=3)  # type: ignore[arg-type]
    ours = Bench(method, federation=federation(), model=deep).run(alone)
    theirs = Bench(FedAvg(TWO_STEPS), federation=federation(), model=deep).run(alone)
    assert torch.allclose(ours["server.w"], theirs["server.w"], atol=1e-6)


def one_round(method: FedBE) -> tuple[Tensor, Tensor, Tensor, Task, Federation, Tensor]:
    """w before, clients' models and counts, the task, the data, and w after one round of all."""
    data = federation()
    with Bench(method, federation=data, model=deep).loop(Schedule()) as loop:
        before = torch.clone(loop.server.w)  # type: ignore[attr-defined]
        loop.round()
        states = loop.pool.states()
        theta = states["rows.theta"][torch.argsort(states["ids"])].clone()
        return before, theta, data.train.count.double(), loop.task, data, torch.clone(loop.server.w)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", ["gaussian", "dirichlet"])
def test_a_round_by_hand(sampling: str) -> None:
    """Two cycles of two steps: rates lr, 0.4 lr, lr, 0.4 lr; the result is the mean of what each cycle ended with."""
    method = FedBE(TWO_STEPS, sampling=sampling, samples=3, concentration=0.7, distill_steps=4, cycle=2, distill_lr=0.3)  # type: ignore[arg-type]
    _, theta, count, task, data, after = one_round(method)
    p = count / count.sum()
    mean = (p[:, None] * theta.double()).sum(0)
    keys = rng.fold(rng.fold(rng.root(SEED, "ensemble"), 0), torch.arange(3))
    if sampling == "gaussian":
        spread = (p[:, None] * (theta - mean).double().square()).sum(0).sqrt()
        drawn = mean + spread * rng.normal(keys, len(mean))
    else:
        gamma = torch.from_numpy(stats.gamma.ppf(rng.uniform(keys, 3).numpy(), 0.7))
        drawn = (gamma * count / (gamma * count).sum(1, keepdim=True)) @ theta.double()
    public = data.population(SEED).pool
    assert public is not None
    ensemble = torch.cat([drawn, mean[None], theta.double()]).float()
    target = torch.stack([torch.softmax(public_scores(task, m[None], public)[0], -1) for m in ensemble]).mean(0)
    x = data.features.gather(data.public)  # type: ignore[arg-type]
    w, ends = mean.float(), []
    for step in range(4):
        leaf = w.clone().requires_grad_()
        loss = -(target * torch.log_softmax(task.logits(leaf[None], x[None])[0], -1)).sum(1).mean()
        (g,) = torch.autograd.grad(loss, leaf)
        w = w - 0.3 * (1.0 if step % 2 == 0 else 0.4) * g
        if step % 2:
            ends.append(w)
    assert torch.allclose(after, torch.stack(ends).mean(0), atol=1e-5)


def test_the_servers_model_comes_to_say_what_clients_say_together() -> None:
    """What distillation is for: after many local steps the mean of models predicts otherwise than the models."""
    far = LocalTraining(lr=1.0, batch=100, steps=30)
    method = FedBE(far, sampling="dirichlet", distill_steps=80, cycle=20, distill_lr=0.5)
    _, theta, count, task, data, after = one_round(method)
    mean = ((count / count.sum())[:, None] * theta.double()).sum(0).float()
    public = data.population(SEED).pool
    assert public is not None

    def said(models: Tensor) -> Tensor:
        return torch.stack([torch.softmax(public_scores(task, m[None], public)[0], -1) for m in models]).mean(0)

    together = said(theta)
    assert float((said(after[None]) - together).abs().mean()) < 0.7 * float((said(mean[None]) - together).abs().mean())


def test_labels_of_public_examples_are_not_looked_at() -> None:
    data = federation()
    labels = data.labels.clone()
    labels[data.public] = (labels[data.public] + 1) % 3  # type: ignore[index]
    method = FedBE(TWO_STEPS, distill_steps=3)
    runs = [Bench(method, federation=each).run() for each in (data, replace(data, labels=labels))]
    assert torch.equal(runs[0]["server.w"], runs[1]["server.w"])


def test_distillation_is_of_the_server_and_sends_nothing() -> None:
    """Bytes are FedAvg's: a model of 47 parameters down, and up with the number of examples."""
    with Bench(FedBE(TWO_STEPS, distill_steps=3), federation=federation(), model=deep).loop(Schedule()) as loop:
        report = loop.round()
    assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * (47 + 1))
