"""FedMD and KT-pFL: rounds by hand, mixtures by hand, local training as the limit; public examples are for all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import LR, TWO_STEPS, WORKS, close, deep, gradient, info, state
from torch import Tensor, nn

import kinfed
from kinfed.algorithms.base import check_algorithm_settings
from kinfed.algorithms.common.distillation import public_scores
from kinfed.algorithms.fedmd import FedMD
from kinfed.algorithms.ktpfl import KTpFL, Server, Up
from kinfed.algorithms.local import Local
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.testing.workbench import SEED


def federation(sizes: tuple[int, ...] = (20, 30, 10)) -> Federation:
    """A tenth of the training examples is public: six of 60."""
    return tiny_federation(sizes).with_public(0.1, SEED)


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("method", [FedMD, KTpFL])
def test_without_digest_it_is_local_training(method: Any, training: LocalTraining) -> None:
    options = {"public_steps": 0} if method is FedMD else {}
    some = Schedule(participation=0.67)
    ours = Bench(method(training, digest_steps=0, **options), federation=federation()).run(some)
    theirs = Bench(Local(training), federation=federation()).run(some)
    assert torch.equal(ours["personal models"], theirs["personal models"])


def chain(theta: Tensor, x: Tensor) -> Tensor:
    """Logits of the deep model."""
    a = torch.tanh(x.flatten(1) @ theta[:16].view(4, 4).T + theta[16:20])
    a = torch.tanh(a @ theta[20:32].view(3, 4).T + theta[32:35])
    return a @ theta[35:44].view(3, 3).T + theta[44:47]


def stepped(theta: Tensor, loss: Tensor, leaf: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(loss, leaf)
    return theta - LR * g


def public_step(theta: Tensor, x: Tensor, loss: Any) -> Tensor:
    leaf = theta.clone().requires_grad_()
    return stepped(theta, loss(chain(leaf, x)), leaf)


@pytest.mark.parametrize("distance", ["l2", "l1"])
def test_fedmd_by_hand(distance: Any) -> None:
    """Two steps on public labels in a client's first round, two of digest, two of its own; two of three at a time."""
    data = federation()
    assert data.public is not None
    x, y = data.features.gather(data.public), data.labels[data.public]
    method = FedMD(TWO_STEPS, digest_steps=2, public_steps=2, distance=distance)
    with Bench(method, federation=data, model=deep).loop(Schedule(participation=0.67)) as loop:
        theta = dict.fromkeys(range(3), loop.task.init(SEED))
        seen: set[int] = set()
        consensus = None
        for number in range(1, 5):
            active = loop.schedule.active(SEED, number, 3).tolist()
            for m in active:
                if m not in seen:
                    for _ in range(2):
                        theta[m] = public_step(theta[m], x, lambda z: nn.functional.cross_entropy(z, y))
                if consensus is not None:
                    apart = nn.functional.mse_loss if distance == "l2" else nn.functional.l1_loss
                    for _ in range(2):
                        theta[m] = public_step(theta[m], x, lambda z, apart=apart, to=consensus: apart(z, to))
                for _ in range(2):
                    theta[m] = theta[m] - LR * gradient(loop, m, theta[m])
            consensus = torch.stack([chain(theta[m], x) for m in active]).mean(0)
            seen |= set(active)
            report = loop.round()
            assert report.bytes_down == len(active) * (6 * 3 * 4 + 1)
            assert report.bytes_up == len(active) * 6 * 3 * 4
            close(loop.server.consensus, consensus, 1e-5)
            for m in seen:
                close(state(loop, m, "theta"), theta[m], 1e-5)


def test_ktpfl_by_hand() -> None:
    data = federation()
    assert data.public is not None
    x = data.features.gather(data.public)
    method = KTpFL(TWO_STEPS, digest_steps=2, temperature=2.0, rho=0.3)
    with Bench(method, federation=data, model=deep).loop(Schedule(participation=0.67)) as loop:
        theta = dict.fromkeys(range(3), loop.task.init(SEED))
        s: dict[int, Tensor] = {}
        c = {(i, j): 1 / 3 for i in range(3) for j in range(3)}
        for number in range(1, 5):
            active = loop.schedule.active(SEED, number, 3).tolist()
            before = dict(s)
            for m in active:
                if before:
                    total = sum(c[m, j] for j in before)
                    target = torch.stack([c[m, j] / total * before[j] for j in before]).sum(0)
                    for _ in range(2):
                        theta[m] = public_step(
                            theta[m],
                            x,
                            lambda z, t=target: nn.functional.kl_div(
                                torch.log_softmax(z / 2, 1), t, reduction="batchmean"
                            ),
                        )
                for _ in range(2):
                    theta[m] = theta[m] - LR * gradient(loop, m, theta[m])
                s[m] = torch.softmax(chain(theta[m], x) / 2, 1)
            for i in s:
                row = torch.tensor([c[i, j] for j in s], dtype=torch.float64)
                leaf = (row / row.sum()).requires_grad_()
                target = sum(leaf[n] * s[j].double() for n, j in enumerate(s))  # type: ignore[assignment]
                loss = (s[i].double() - target).square().mean() + 0.3 * (leaf - 1 / len(s)).square().mean()
                (g,) = torch.autograd.grad(loss, leaf)
                for j, value in zip(s, torch.softmax(5 * (leaf.detach() - g), 0).tolist(), strict=True):
                    c[i, j] = value
            report = loop.round()
            assert report.bytes_down == len(active) * (6 * 3 * 4 + 1)
            assert report.bytes_up == len(active) * 6 * 3 * 4
            for m in s:
                close(state(loop, m, "theta"), theta[m], 1e-5)
                close(loop.server.predictions[m], s[m], 1e-5)
            wanted = torch.tensor([[c[i, j] for j in range(3)] for i in range(3)], dtype=torch.float64)
            close(loop.server.coefficients, wanted, 1e-5)


def test_mixtures_by_hand() -> None:
    """Two clients that contradict each other: a step from (½, ½) to (1, 0), and the softmax of five times that."""
    method = KTpFL(TWO_STEPS, rho=0.0)
    c = method.next_coefficients(torch.full((2, 2), 0.5, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    own = math.exp(5) / (math.exp(5) + 1)
    close(c, torch.tensor([[own, 1 - own], [1 - own, own]], dtype=torch.float64))
    still = replace(method, coefficient_lr=0.0)
    assert still.next_coefficients(torch.full((2, 2), 0.5).double(), torch.eye(2).double()).tolist() == [[0.5] * 2] * 2
    firm = replace(method, rho=1.0)  # 2ρ/n · (c − ½) = 0.1 at c = 0.6
    c = firm.next_coefficients(torch.tensor([[0.6, 0.4], [0.4, 0.6]]).double(), torch.ones(2, 1).double())
    close(c[0], torch.softmax(5 * torch.tensor([0.5, 0.5]).double(), 0))


def test_equal_shares_teach_the_mean() -> None:
    server = Server(torch.rand(3, 4, 2), torch.tensor([True, False, True]), torch.full((3, 3), 1 / 3).double())
    down = KTpFL(TWO_STEPS).download(server, torch.arange(3))
    for row in down.target:
        close(row, (server.predictions[0] + server.predictions[2]) / 2)


def test_similar_clients_teach_each_other_more() -> None:
    """What mixtures are for: two who agree, and one who does not."""
    s = torch.tensor([[1.0, 0, 1, 0], [0.9, 0.1, 0.9, 0.1], [0.0, 1, 0, 1]]).view(3, 2, 2)
    method = KTpFL(TWO_STEPS)
    server = Server(torch.zeros(3, 2, 2), torch.zeros(3, dtype=torch.bool), torch.full((3, 3), 1 / 3).double())
    c = method.aggregate(server, torch.arange(3), Up(s), info(clients=3)).coefficients
    assert float(c[0, 1]) > float(c[0, 2])
    assert float(c[1, 0]) > float(c[1, 2])


def test_digest_brings_clients_together_on_public_examples() -> None:
    apart = {}
    for steps in (0, 20):
        data = federation((30, 30, 30, 30))
        method = FedMD(LocalTraining(lr=0.1, batch=8, steps=10), digest_steps=steps)
        with Bench(method, federation=data).loop(Schedule()) as loop:
            for _ in range(4):
                loop.round()
            everybody = torch.arange(4)
            public = data.public_split(everybody, 0, 1)
            assert public is not None
            apart[steps] = float(public_scores(loop.task, loop.pool.clients.take(everybody).theta, public).var(0).sum())
    assert apart[20] < 0.7 * apart[0]


def test_a_run_sets_public_examples_aside_where_a_method_needs_them() -> None:
    given = tiny_federation((30, 30, 20))
    common: dict[str, Any] = {"model": "mlr", "rounds": 1, "seeds": [0], "eval_every": 0, "workers": 1}
    result = kinfed.run(federation=given, algorithms=["fedmd", "ktpfl", "local"], **common)
    data = result.federations[0]
    assert data.public is not None
    assert len(data.public) == data.description["public_examples"] == 8
    assert int(data.train.count.sum()) == 72  # of Local, too
    assert kinfed.run(federation=given, algorithms=["local"], **common).federations[0].public is None
    with pytest.raises(ConfigError, match=r"none; run it with --public 0\.1"):
        kinfed.run(federation=given, algorithms=["fedmd"], public=0.0, **common)
    task = make_task(tiny_model)
    with pytest.raises(ConfigError, match="with_public"):
        check_algorithm_settings(KTpFL(TWO_STEPS), task, given.population(0))


def test_they_are_not_private() -> None:
    for method in (FedMD(TWO_STEPS), KTpFL(TWO_STEPS)):
        assert "public examples" in method.privacy(torch.tensor([4])).impossible
    assert rng.root(0, "digest") != rng.root(0, "public")
