"""FedALA: shares of the received model by hand, FedAvg and local training as limits, and when shares have settled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    TWO_STEPS,
    WORKS,
    by_hand,
    close,
    deep,
    gradient,
    models,
    run,
    server,
    state,
    two_bowls,
)

from kinfed.algorithms.fedala import Client, FedALA
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ModelError


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_shares_that_never_move_are_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedALA(training, weight_lr=0.0)), run(FedAvg(training))
    for name in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[name], theirs[name]), name


def test_without_any_share_it_is_local_training() -> None:
    """Ω = 0 in all layers: training goes on from the own model, whatever the server sends."""
    training = WORKS["epochs"]
    method = FedALA(training, weight_lr=0.0, upper="*")
    with by_hand(method, model=deep) as ours, by_hand(Local(training), model=deep) as theirs:
        for number in range(3):
            ours.round()
            theirs.round()
            if number == 0:
                everyone = ours.pool.clients.take(torch.arange(3))
                ours.pool.clients.put(torch.arange(3), replace(everyone, omega=torch.zeros_like(everyone.omega)))
        assert torch.equal(models(ours), models(theirs))


def test_two_quadratics_by_hand() -> None:
    """In the second round θ = (0.81, 2.53) and w = 1.67: one step of Ω from 1 with (5), then two steps of training."""
    with two_bowls(FedALA(TWO_STEPS, weights="equal", weight_lr=0.5, max_passes=1)) as loop:
        loop.round()
        loop.round()
        trained = []
        for m, (curve, center, theta) in enumerate(((1.0, 0.0, 0.81), (3.0, 4.0, 2.53))):
            omega = min(max(1 - 0.5 * curve * (1.67 - center) * (1.67 - theta), 0), 1)
            x = theta + (1.67 - theta) * omega
            for _ in range(2):
                x -= LR * curve * (x - center)
            assert float(state(loop, m, "omega")) == pytest.approx(omega)
            assert float(state(loop, m, "theta")) == pytest.approx(x)
            trained.append(x)
        assert 0 < float(state(loop, 0, "omega")) < 1
        assert float(state(loop, 1, "omega")) == 0.0  # 1 − 0.5 · 3 (1.67 − 4) (1.67 − 2.53) is below 0
        assert float(server(loop)) == pytest.approx(sum(trained) / 2)


def test_lower_layers_are_the_received_ones_and_upper_ones_are_mixed() -> None:
    """Two passes of one full batch each, by plain autograd; other clients' rows are theirs."""
    method = FedALA(ALL, upper_layers=2, weight_lr=20.0, max_passes=2, share=1.0)
    with by_hand(method, model=deep) as loop:
        loop.round()
        w = server(loop)
        upper = torch.arange(47) >= 20
        expected = []
        for m in range(3):
            theta, omega = state(loop, m, "theta"), torch.ones(47)
            for _ in range(2):
                x = torch.where(upper, theta + (w - theta) * omega, w)
                omega = (omega - 20.0 * gradient(loop, m, x) * (w - theta)).clamp(0, 1)
            x = torch.where(upper, theta + (w - theta) * omega, w)
            expected.append((omega[upper], x - LR * gradient(loop, m, x)))
        loop.round()
        for m, (omega, theta) in enumerate(expected):
            close(state(loop, m, "omega"), omega, 1e-5)
            close(state(loop, m, "theta"), theta, 1e-5)
            assert float(omega.std()) > 0


def passes(method: FedALA, loop_rounds: int) -> list[int]:
    """Gradients beyond local training in every round, divided by the batches of a pass."""
    counts = []
    with by_hand(method, sizes=(6,)) as loop:
        task, calls = loop.task, [0]
        inner = task.grad
        task.grad = lambda *a: (calls.__setitem__(0, calls[0] + 1), inner(*a))[1]  # type: ignore[method-assign]
        for _ in range(loop_rounds):
            before = calls[0]
            loop.round()
            counts.append(calls[0] - before)
    return counts


def test_the_second_round_learns_until_losses_have_settled_and_later_ones_pass_once() -> None:
    training = LocalTraining(lr=LR, batch=2, steps=1)  # local training does not ask for `grad` here
    three = 3  # batches of two in a pass over six examples
    assert passes(FedALA(training, share=1.0, tol=1e9), 3) == [0, 10 * three, three]
    assert passes(FedALA(training, share=1.0, tol=0.0, max_passes=12), 3) == [0, 12 * three, three]
    assert passes(FedALA(training, share=0.5, tol=0.0, max_passes=12), 3) == [0, 12 * 2, 2]


def test_clients_settle_each_by_itself() -> None:
    """Of three in one cohort: one is new, one has learnt its shares before, one learns them for the first time."""
    method = FedALA(LocalTraining(lr=LR, batch=3, steps=2), weight_lr=5.0, max_passes=4, tol=0.0)
    with by_hand(method, model=deep) as loop:
        loop.round()
        data = loop.pool.federation.cohort(torch.arange(3), seed=7, round=2)
        clients = loop.pool.clients.take(torch.arange(3))
        clients = replace(clients, seen=torch.tensor([False, True, True]), settled=torch.tensor([False, True, False]))
        down = method.download(loop.server, torch.arange(3))
        together, _ = method.client_update(loop.task, clients, down, data)
        assert bool((together.omega[0] == 1).all())
        assert together.settled.tolist() == [False, True, True]
        for m in range(3):
            one = slice(m, m + 1)
            own = loop.pool.federation.cohort(torch.tensor([m]), seed=7, round=2)
            alone, _ = method.client_update(loop.task, clients.take(one), down.take(one), own)
            close(alone.omega[0], together.omega[m])
            close(alone.theta[0], together.theta[m])


def test_shares_leave_the_server_where_it_hurts() -> None:
    """A client whose optimum is its own model gives the received one no share, one that the server helps keeps it."""
    with two_bowls(FedALA(TWO_STEPS, weights="equal", tol=0.0, max_passes=30)) as loop:
        loop.round()
        loop.round()
        omega = [float(state(loop, m, "omega")) for m in range(2)]
        assert omega[0] < 0.1  # w = 1.67 is worse than 0.81 for θ²/2
        assert omega[1] < 0.1  # and than 2.53 for 3 (θ − 4)²/2
    with two_bowls(FedALA(TWO_STEPS, weights="equal", tol=0.0, max_passes=30)) as loop:
        loop.round()
        loop.server.w[:] = 3.0  # which is better than 2.53 for the second, and worse than 0.81 for the first
        loop.round()
        assert float(state(loop, 0, "omega")) < 0.1
        assert float(state(loop, 1, "omega")) == 1.0


def test_personal_models_and_a_client_that_is_late() -> None:
    method = FedALA(ALL.with_steps(3), upper_layers=1, weight_lr=10.0)
    with by_hand(method, model=deep, participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        assert torch.equal(models(loop)[away], server(loop))
        for _ in range(3):
            loop.round()
        m = int(loop.took_part.nonzero()[0])
        client = loop.pool.clients.take(torch.tensor([m]))
        assert isinstance(client, Client)
        down = method.download(loop.server, torch.tensor([m]))
        data = loop.pool.federation.cohort(torch.tensor([m]), seed=7, round=5)
        by_name = method.personalize(loop.task, client, down, data)
        assert list(by_name) == ["personal", "mixed"]
        assert torch.equal(by_name["mixed"][0, :35], server(loop)[:35])
        close(by_name["mixed"][0, 35:], torch.lerp(client.theta[0, 35:], server(loop)[35:], client.omega[0]))


def test_bytes_privacy_and_refusals() -> None:
    with by_hand(FedALA(ALL)) as loop:
        loop.round()
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * (15 + 1) * 4)
        with pytest.raises(ModelError, match="no layer"):
            FedALA(ALL, upper="top").check(loop.task, loop.population)
    count = torch.tensor([10, 41])
    profile = FedALA(LocalTraining(batch=20, steps=5), share=0.8, max_passes=7).privacy(count)
    assert profile.per_round is not None
    assert profile.per_round[1].tolist() == [5 + 7 * 1, 5 + 7 * 2]
    assert any("settled" in text for text in profile.uncovered)
    assert not any("settled" in text for text in FedALA(tol=0.0).privacy(count).uncovered)
