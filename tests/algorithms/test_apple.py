"""APPLE: a step of core and relations by hand, local training and FedAvg as limits, and who makes use of whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, TWO_STEPS, WORKS, by_hand, close, gradient, info, models, server, two_bowls

from kinfed.algorithms.apple import APPLE
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model

ONE_STEP = LocalTraining(lr=0.1, batch=100, steps=1)
CORES = torch.tensor([[1.0], [3.0]], dtype=torch.float64)


def start_at(loop: Any, cores: torch.Tensor, q: torch.Tensor) -> None:
    loop.server = replace(loop.server, cores=cores.clone(), q=q.clone())


def test_a_step_by_hand() -> None:
    """Cores 1 and 3 in equal shares: x = 2, where the slopes are 2 and −6; η = η_q = 0.1."""
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    for core_step, cores in (("paper", [0.9, 3.3]), ("normalized", [0.8, 3.6])):  # q_mm/‖q‖² is 0.5/0.5
        with two_bowls(APPLE(ONE_STEP, relation_lr=0.1, mu=0.0, core_step=core_step)) as loop:  # type: ignore[arg-type]
            start_at(loop, CORES, half)
            loop.round()
            assert server(loop, "cores")[:, 0].tolist() == pytest.approx(cores)
            close(server(loop, "q"), torch.tensor([[0.3, -0.1], [1.1, 2.3]]))


def test_two_steps_and_the_pull_of_relations_by_hand() -> None:
    """In the fourth of eight rounds of pull: r = (1 + cos(3π/8))/2; each client sees the other's core as it was."""
    q0 = torch.tensor([[-0.3, 0.4], [-0.2, 0.9]], dtype=torch.float64)
    with two_bowls(APPLE(TWO_STEPS, relation_lr=0.05, mu=2.0, pull_rounds=8, core_step="paper")) as loop:
        for _ in range(3):
            loop.round()
        start_at(loop, CORES, q0)
        loop.round()
        strength = 2.0 * (1 + torch.cos(torch.tensor(3 * torch.pi / 8)).item()) / 2
        for m, (curve, center) in enumerate(((1.0, 0.0), (3.0, 4.0))):
            c, q = CORES[:, 0].clone(), q0[m].clone()
            for _ in range(2):
                g = curve * (float(q @ c) - center)
                old = q.clone()
                q = q - 0.05 * (g * c + strength * (q - 0.5))
                c[m] -= 0.1 * old[m] * g
            assert float(server(loop, "cores")[m]) == pytest.approx(float(c[m]), rel=1e-6)
            assert server(loop, "q")[m].tolist() == pytest.approx(q.tolist(), rel=1e-6)


def test_the_pull_fades_away() -> None:
    method = APPLE(mu=0.4, pull_rounds=4)
    now = method.init_server(make_task(tiny_model), Population(3, 0))
    strengths = [float(method.plan(now, torch.arange(3), info(t))[0].strength) for t in range(1, 7)]
    assert strengths == pytest.approx([0.4, 0.2 + 0.2 * 0.5**0.5, 0.2, 0.2 - 0.2 * 0.5**0.5, 0, 0])
    assert float(method.init_server(make_task(tiny_model), Population(3, 0)).q.sum(1).mean()) == pytest.approx(1)


def test_a_strong_pull_makes_relations_equal_in_one_step() -> None:
    """η_q μ = 1 and no slope: the start is both clients' minimum."""
    with two_bowls(APPLE(ONE_STEP, relation_lr=0.5, mu=2.0)) as loop:
        cores = torch.tensor([[0.0], [4.0]], dtype=torch.float64)
        start_at(loop, cores, torch.eye(2, dtype=torch.float64))
        loop.round()
        close(server(loop, "q"), torch.full((2, 2), 0.5))
        close(server(loop, "cores"), cores)


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_own_cores_alone_are_local_training(name: str) -> None:
    for core_step in ("normalized", "paper"):
        method = APPLE(WORKS[name], relation_lr=0.0, core_step=core_step)  # type: ignore[arg-type]
        with by_hand(method, participation=0.67) as ours, by_hand(Local(WORKS[name]), participation=0.67) as theirs:
            ours.server = replace(ours.server, q=torch.eye(3))
            for _ in range(4):
                ours.round()
                theirs.round()
            close(models(ours), models(theirs))


def test_equal_relations_move_the_mean_of_cores_as_fedavg() -> None:
    with by_hand(APPLE(ALL, relation_lr=0.0)) as ours, by_hand(FedAvg(ALL, weights="equal")) as theirs:
        for _ in range(4):
            ours.round()
            theirs.round()
        close(server(ours, "cores").mean(0), server(theirs))
        close(models(ours), server(theirs).expand(3, -1))


def test_the_papers_step_at_equal_relations() -> None:
    """Each core moves by −η g_m(x)/N."""
    with by_hand(APPLE(ALL, relation_lr=0.0, core_step="paper")) as loop:
        loop.round()
        cores = server(loop, "cores")
        x = cores.mean(0)
        expected = [cores[m] - 0.1 / 3 * gradient(loop, m, x) for m in range(3)]
        loop.round()
        close(server(loop, "cores"), torch.stack(expected), 1e-5)


def test_clients_make_use_of_their_like() -> None:
    """Clients 1 and 3 call every class by another name than 0 and 2 do: cores of the other kind are of less use."""
    data = tiny_federation((16, 16, 16, 16))
    labels = data.labels.clone()
    for m in (1, 3):
        labels[data.train[m]] = (labels[data.train[m]] + 1) % 3
    method = APPLE(LocalTraining(lr=0.1, batch=16, steps=5), relation_lr=0.01)
    with Bench(method, federation=replace(data, labels=labels)).loop(Schedule()) as loop:
        for _ in range(15):
            loop.round()
        q = server(loop, "q")
        for m in range(4):
            assert float(q[m, m - 2]) > float(q[m, [m - 1, m - 3]].max()) + 0.03


def test_a_late_client_finds_the_mixture_of_all() -> None:
    with by_hand(APPLE(WORKS["epochs"]), participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        close(models(loop)[away], server(loop, "cores").mean(0))
        assert not bool(server(loop, "known")[away])


def test_bytes_and_refusals() -> None:
    with by_hand(APPLE(ALL)) as loop:
        report = loop.round()
        # Three cores of 15 numbers, its own place, three relations, whether it has trained, and the strength.
        assert (report.bytes_down, report.bytes_up) == (3 * (4 * (45 + 3 + 1) + 8 + 1), 3 * 4 * (15 + 3))
        with pytest.raises(ConfigError, match=r"all 100,000 .*: 40.0 GB, more than max_gb=4"):
            loop.algorithm.check(loop.task, Population(100_000, 0))
        with pytest.raises(ConfigError, match="newcomer"):
            loop.algorithm.place_newcomer(loop.task, loop.server, None)  # type: ignore[arg-type]
