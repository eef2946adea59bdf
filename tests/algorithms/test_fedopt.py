"""FedAdam, FedYogi, FedAdagrad and FedAvgM against the papers' formulas, written out number by number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from method_bench import ALL, LR, by_hand, close, gradient, run, server, state, two_bowls, weighted
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedopt import FedOpt, Server
from kinfed.algorithms.fedprox import FedProx
from kinfed.core import rng
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench

OPTIMIZERS = ("adam", "yogi", "adagrad")


def second_moment(optimizer: str, v: float, delta: float, beta2: float) -> float:
    if optimizer == "adagrad":
        return v + delta**2
    if optimizer == "adam":
        return beta2 * v + (1 - beta2) * delta**2
    sign = (v > delta**2) - (v < delta**2)
    return v - (1 - beta2) * delta**2 * sign


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_follow_algorithm_2(optimizer: str) -> None:
    method = FedOpt(ALL, optimizer, server_lr=0.3, beta1=0.8, beta2=0.9, tau=0.01)
    with by_hand(method) as loop:
        m, v = torch.zeros(15), torch.full((15,), 0.01**2)
        for _ in range(3):
            w = server(loop)
            delta = weighted([-LR * gradient(loop, k, w) for k in range(3)])
            m = 0.8 * m + 0.2 * delta
            v = torch.tensor([second_moment(optimizer, float(a), float(d), 0.9) for a, d in zip(v, delta, strict=True)])
            loop.round()
            close(server(loop, "m"), m)
            close(server(loop, "v"), v, 1e-8)
            close(server(loop), w + 0.3 * m / (v.sqrt() + 0.01))


@given(
    st.sampled_from(OPTIMIZERS),
    st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6),
    st.floats(0, 0.99),
    st.floats(0.5, 0.99),  # yogi keeps at least β₂ v of v, so rounding errors at most double in a round
    st.floats(1e-3, 1),
)
def test_one_coordinate_over_many_rounds(
    optimizer: str, deltas: list[float], beta1: float, beta2: float, tau: float
) -> None:
    """A scalar loop in float64; v never falls below zero, so the root exists."""
    method = FedOpt(server_optimizer=optimizer, server_lr=0.5, beta1=beta1, beta2=beta2, tau=tau, weights="equal")
    state = Server(torch.zeros(1), torch.zeros(1), torch.full((1,), tau**2))
    w, m, v = 0.0, 0.0, tau**2
    for number, delta in enumerate(deltas, 1):
        assume(abs(v - delta**2) > 1e-5 * v)  # yogi jumps there
        m = beta1 * m + (1 - beta1) * delta
        v = second_moment(optimizer, v, delta, beta2)
        w += 0.5 * m / (math.sqrt(v) + tau)
        up = DeltaUp(torch.tensor([[delta]]), None)
        state = method.aggregate(state, torch.tensor([0]), up, RoundInfo(number, Population(1, 0)))
        assert state.v is not None
        assert float(state.v) >= 0
    assert float(state.w) == pytest.approx(w, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_small_against_tau_is_scaled_not_normalized(optimizer: Any) -> None:
    """√v + τ is 2τ in the first round, of Adam (1 + √β₂) τ: with that as η the step is FedAvg's."""
    rate = 1e3 * (1 + (0.81**0.5 if optimizer == "adam" else 1.0))
    method = FedOpt(ALL, optimizer, server_lr=rate, beta1=0.0, beta2=0.81, tau=1e3)
    with by_hand(method) as loop, by_hand(FedAvg(ALL)) as plain:
        loop.round()
        plain.round()
        close(server(loop), server(plain), 1e-5)


def test_an_update_large_against_tau_moves_every_coordinate_alike() -> None:
    method = FedOpt(ALL, "adagrad", server_lr=0.05, beta1=0.0, tau=1e-9)
    with by_hand(method) as loop:
        w = server(loop)
        delta = weighted([-LR * gradient(loop, k, w) for k in range(3)])
        loop.round()
        close(server(loop) - w, 0.05 * delta.sign(), 1e-5)


def test_clients_train_as_in_fedavg_or_fedprox() -> None:
    with by_hand(FedOpt(ALL)) as loop:
        w = server(loop)
        loop.round()
        for k in range(3):
            close(state(loop, k, "theta"), w - LR * gradient(loop, k, w))
    training = LocalTraining(batch=5, steps=4)
    for mu, local in ((0.0, FedAvg(training)), (0.7, FedProx(training, mu=0.7))):
        ours, theirs = run(FedOpt(training, mu=mu), 1), run(local, 1)
        assert torch.equal(ours["clients.rows.theta"], theirs["clients.rows.theta"])


def test_equal_weights() -> None:
    with by_hand(FedOpt(ALL, beta1=0.0, weights="equal")) as loop:
        w = server(loop)
        delta = weighted([-LR * gradient(loop, k, w) for k in range(3)], (1, 1, 1))
        loop.round()
        close(server(loop, "m"), delta)


def test_bytes_are_those_of_fedavg() -> None:
    with by_hand(FedOpt(ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * (15 + 1) * 4)


def test_momentum_gets_further_where_steps_are_small() -> None:
    """Two quadratics whose mean is least at 3, from 1, with steps of a hundredth: momentum of 0.9 is worth up to ten of
    them."""
    left = {}
    for name in ("fedavg", "fedavgm"):
        with two_bowls(make_algorithm(name, LocalTraining(lr=0.01, batch=100, steps=1), {"weights": "equal"})) as loop:
            for _ in range(30):
                loop.round()
            left[name] = abs(3 - float(server(loop)))
    assert left["fedavg"] == pytest.approx(2 * 0.98**30, rel=1e-4)  # the mean curvature is 2
    assert left["fedavgm"] < 0.5 * left["fedavg"]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_coordinates_of_small_gradients_are_learnt_as_well(name: str, seed: int) -> None:
    """What adaptive servers were invented for. The input that decides is thirty times smaller than five that say
    nothing, and so are its gradients: FedAvg hardly moves its weight, whatever the rate that the others allow."""
    count, clients = 8 * 80, 8
    x = rng.normal(rng.root(seed, "planted"), count * 6).reshape(count, 6).to(torch.float32)
    y = (x[:, 0] > 0).long()
    x[:, 0] *= 0.03
    data = Federation.from_arrays(x.numpy(), y.numpy(), (torch.arange(count) % clients).numpy(), num_classes=2)
    training, correct = LocalTraining(lr=0.3, batch=100, steps=1), {}
    for method in (name, "fedavg"):
        options = {"server_lr": 2.0, "tau": 1e-4} if method != "fedavg" else {}
        bench = Bench(make_algorithm(method, training, options), federation=data, model=lambda: nn.Linear(6, 2))
        found = bench.run(Schedule(), rounds=60, chunk=None)
        correct[method] = float(found["server correct"].sum() / data.test.count.sum())
    assert correct[name] > 0.85
    assert correct["fedavg"] < 0.65


def test_registered_variants() -> None:
    assert make_algorithm("fedadam", ALL) == FedOpt(ALL, "adam")
    assert make_algorithm("fedyogi", ALL) == FedOpt(ALL, "yogi")
    assert make_algorithm("fedadagrad", ALL) == FedOpt(ALL, "adagrad", beta1=0.0)
    assert make_algorithm("fedadagrad", ALL, {"beta1": 0.5}) == FedOpt(ALL, "adagrad", beta1=0.5)
    assert make_algorithm("fedavgm", ALL) == FedOpt(ALL, "momentum", server_lr=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_optimizer": "sgd"}, r"server_optimizer must be adam \| yogi \| adagrad \| momentum; got 'sgd'"),
        ({"server_lr": 0}, "server_lr must be positive"),
        ({"tau": -1}, "tau must be positive"),
        ({"beta1": 1}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        ({"weights": "none"}, r"weights must be examples \| equal"),
        ({"mu": 100.0}, "unstable"),
        (
            {"server_nesterov": True},
            "server_nesterov is a form of server_optimizer = momentum; got server_optimizer = adam",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("fedadam", ALL, options)
