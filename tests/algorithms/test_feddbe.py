"""FedDBE: the private vector and the consensus of mean features, by hand; FedAvg as its limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    SIZES,
    WORKS,
    by_hand,
    close,
    deep,
    features,
    gradient,
    models,
    run,
    server,
    state,
    weighted,
)
from torch import Tensor, nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.feddbe import Consensus, FedDBE
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.errors import ConfigError
from kinfed.testing.workbench import SEED


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_without_both_parts_it_is_fedavg(name: str) -> None:
    ours, theirs = run(FedDBE(WORKS[name], kappa=0.0, personal_lr=0.0)), run(FedAvg(WORKS[name]))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["server.w"].expand(6, -1))


def test_a_rate_of_zero_and_no_consensus_through_the_loop_is_fedavg_too() -> None:
    """Its own steps are SGD's: κ so small that it vanishes."""
    ours, theirs = run(FedDBE(WORKS["epochs"], kappa=1e-30, personal_lr=0.0)), run(FedAvg(WORKS["epochs"]))
    close(ours["server.w"], theirs["server.w"])


def test_everybodys_first_round_is_fedavgs() -> None:
    ours, theirs = run(FedDBE(WORKS["steps"]), rounds=1), run(FedAvg(WORKS["steps"]), rounds=1)
    assert torch.equal(ours["server.w"], theirs["server.w"])


def test_who_finds_no_consensus_reports_again() -> None:
    """The only report so far was lost on its way to the server: training is FedAvg's, not a pull to zero."""
    with by_hand(FedDBE(ALL), model=deep) as loop:
        everybody = torch.arange(3)
        clients, down = loop.pool.clients.take(everybody), loop.algorithm.download(loop.server, everybody)
        clients.seen = torch.ones(3, dtype=torch.bool)
        data = loop.pool.federation.cohort(everybody, seed=7, round=1)
        _, up = loop.algorithm.client_update(loop.task, clients, down, data)
        assert up.reported.tolist() == list(SIZES)
        close(down.w + up.delta, FedAvg(ALL).train(loop.task, down.w, data))


@pytest.mark.parametrize(("mu", "slope"), [(1.0, 1.0), (0.5, 0.25)])
def test_one_batch_by_hand(mu: float, slope: float) -> None:
    """Mean φ (2, 0), z^g = 0, d_f = 2, κ = 1: with μ = 1, R = 1 and every example has weight · (1, 0)."""
    phi = torch.tensor([[[1.0, 1.0], [3.0, -1.0]]])
    batch = Batch(phi, torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), 0.5), torch.tensor([0]))
    feature_loss = Consensus(torch.zeros(1, 2), torch.zeros(1, 2), 1.0, mu)
    dz, dphi = feature_loss(phi, phi, batch, torch.tensor([0]))
    assert dz is None
    assert dphi is not None
    close(dphi, torch.tensor([[[0.5 * slope, 0.0]] * 2]))
    assert feature_loss.r.tolist() == [[2 * mu, 0.0]]


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_rounds_by_hand(mu: float) -> None:
    """Autograd through CE(W (φ + z̄) + b) + κ R with z̄ as a parameter, two of three clients at a time; bytes."""
    training = replace(ALL.with_steps(2), weight_decay=0.1)
    with by_hand(FedDBE(training, kappa=0.8, mu=mu, personal_lr=0.2), model=deep, participation=0.67) as loop:
        task: Any = loop.task
        data = loop.pool.federation
        z_bar = {m: torch.zeros(3) for m in range(3)}
        reports: dict[int, Tensor] = {}
        for number in range(1, 5):
            w, trained = server(loop), []
            active = loop.schedule.active(SEED, number, 3).tolist()
            if reports:
                total = sum(SIZES[m] for m in reports)
                consensus = sum(SIZES[m] * mean for m, mean in reports.items()) / total
                close(server(loop, "consensus"), consensus, 1e-5)  # type: ignore[arg-type]
            new: dict[int, Tensor] = {}
            for m in active:
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                theta, r = w, torch.zeros(3)
                for _ in range(2):
                    if m not in reports:
                        theta = theta - LR * (gradient(loop, m, theta) + 0.1 * theta)
                        continue
                    module, own = task.module_of(theta), z_bar[m].clone().requires_grad_()
                    phi = module[:-1](x)
                    r = (1 - mu) * r.detach() + mu * phi.mean(0)
                    term = (r - consensus).square().mean() / 2
                    total_loss = nn.functional.cross_entropy(module[-1](phi + own), y) + 0.8 * term
                    *grads, g_own = torch.autograd.grad(total_loss, [*module.parameters(), own])
                    theta = theta - LR * (torch.cat([g.reshape(-1) for g in grads]) + 0.1 * theta)
                    z_bar[m] = z_bar[m] - 0.2 * g_own
                trained.append(theta)
                if m not in reports:
                    new[m] = features(loop, theta, x).mean(0)
            reports |= new
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (
                len(active) * (4 * 50 + 1),
                len(active) * 4 * (47 + 1 + 3 + 1),
            )
            close(server(loop), weighted(trained, tuple(SIZES[m] for m in active)), 1e-5)
            for m in active:
                close(state(loop, m, "z_bar"), z_bar[m], 1e-5)
        for m, row in enumerate(models(loop)):
            module = task.module_of(server(loop))
            x = data.features.raw[:5]
            close(task.logits(row[None], x[None])[0], module[-1](module[:-1](x) + z_bar[m]).detach(), 1e-5)


def test_mean_features_are_held_together() -> None:
    """The clients' mean features differ less with the consensus than without."""
    apart = {}
    for kappa in (0.0, 50.0):
        with by_hand(FedDBE(LocalTraining(lr=0.05, batch=100, steps=20), kappa=kappa), model=deep) as loop:
            for _ in range(3):
                loop.round()
            everybody = torch.arange(3)
            clients, down = loop.pool.clients.take(everybody), loop.algorithm.download(loop.server, everybody)
            data = loop.pool.federation.cohort(everybody, seed=7, round=4)
            _, up = loop.algorithm.client_update(loop.task, clients, down, data)
            sums = loop.task.class_sums(down.w + up.delta, data.train)
            apart[kappa] = float((sums.total.sum(1) / sums.count.sum(1, keepdim=True)).var(0).sum())
    assert apart[50.0] < apart[0.0] / 2


def test_a_head_without_a_bias_is_refused() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3, bias=False))

    wanted = r"FedDBE .* the bias of the last layer, and '3' has none"
    with pytest.raises(ConfigError, match=wanted), by_hand(FedDBE(ALL), model=model):
        pass


def test_a_mean_feature_is_not_private() -> None:
    assert "mean feature" in FedDBE(ALL).privacy(torch.tensor([4])).impossible
