"""pFedMe: Algorithm 1 by hand, exact proximal points on a quadratic, its limits and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, by_hand, close, gradient, mean, models, quadratic, run, server, state, weighted
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.pfedme import PFedMe
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.loop import Loop
from kinfed.testing.workbench import SEED

LAM = 3.0


def local_rounds(loop: Loop, client: int, w: Tensor, method: PFedMe) -> tuple[Tensor, Tensor]:
    """(w_m, θ) after R local rounds on all of the client's examples, straight from Algorithm 1."""
    w_m, theta = w.clone(), w.clone()
    eta_p = method.personal_lr or method.training.lr
    for _ in range(method.training.steps or 0):
        for _ in range(method.inner_steps):
            g = gradient(loop, client, theta) + method.inner_decay * theta
            theta = theta - eta_p * (g + method.lam * (theta - w_m))
        w_m = w_m - method.training.lr * method.lam * (w_m - theta)
    return w_m, theta


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"personal_lr": 0.04, "inner_steps": 3},
        {"beta": 1.7},
        {"weights": "examples"},
        {"inner_decay": 0.05},
    ],
    ids=str,
)
def test_rounds_follow_algorithm_1(options: dict[str, Any]) -> None:
    method = PFedMe(ALL.with_steps(2), **{"lam": LAM, "inner_steps": 2} | options)
    with by_hand(method) as loop:
        for _ in range(2):
            w = server(loop)
            found = [local_rounds(loop, m, w, method) for m in range(3)]
            loop.round()
            average = weighted if method.weights == "examples" else mean
            close(server(loop), (1 - method.beta) * w + method.beta * average([a for a, _ in found]))
            for m in range(3):
                close(state(loop, m, "theta"), found[m][1])
                close(models(loop)[m], found[m][1])


def test_many_inner_steps_reach_the_proximal_point() -> None:
    """f = (θ − z)²/(2 s): θ̂ = (z/s + λ w)/(1/s + λ), and w_m = w − η λ (w − θ̂)."""
    method = PFedMe(ALL, lam=LAM, inner_steps=200)
    with quadratic(method, start=0.7) as (loop, world):
        for _ in range(2):
            w = server(loop)
            loop.round()
            s = world.s[:, None]
            prox = (world.z / s + LAM * w) / (1 / s + LAM)
            close(models(loop), prox)
            close(server(loop), w - LR * LAM * (w - prox.mean(0)))


def test_the_stationary_point_is_that_of_the_moreau_envelopes() -> None:
    """Σ ∇F_m(w) = Σ λ (w − θ̂_m) = 0: w is the mean of z_m with weights (1/s_m)/(1/s_m + λ)."""
    method = PFedMe(ALL, lam=LAM, inner_steps=60)
    with quadratic(method) as (loop, world):
        for _ in range(120):
            loop.round()
        weight = (1 / world.s) / (1 / world.s + LAM)
        close(server(loop)[0], (weight * world.z[:, 0]).sum() / weight.sum(), 1e-5)


def test_the_next_local_round_starts_from_the_last_point_and_the_next_round_from_w() -> None:
    method = PFedMe(ALL.with_steps(2), lam=LAM, inner_steps=1)
    with quadratic(method, start=0.7, clients=1) as (loop, world):
        s, z = world.s[0], world.z[0]

        def inner(theta: Tensor, w: Tensor) -> Tensor:
            return theta - LR * ((theta - z) / s + LAM * (theta - w))

        for _ in range(2):
            w = server(loop)
            theta = inner(w, w)
            w_1 = w - LR * LAM * (w - theta)
            theta = inner(theta, w_1)
            loop.round()
            close(models(loop)[0], theta)


def test_only_active_clients_get_a_new_personal_model() -> None:
    with by_hand(PFedMe(ALL, lam=LAM), participation=0.4) as loop:
        (first,) = loop.schedule.active(SEED, 1, 3).tolist()
        loop.round()
        for m in range(3):
            assert torch.equal(models(loop)[m], server(loop)) is (m != first)


def test_recompute_gives_everyone_a_point_at_the_current_model() -> None:
    method = PFedMe(ALL, lam=LAM, inner_steps=200, recompute=True)
    with quadratic(method, start=0.7, participation=0.5) as (loop, world):
        loop.round()
        w, s = server(loop), world.s[:, None]
        close(models(loop), (world.z / s + LAM * w) / (1 / s + LAM))
    fresh = PFedMe(ALL, lam=LAM, inner_steps=3, inner_decay=0.1, recompute=True)
    with by_hand(fresh, participation=0.4) as loop:
        loop.round()
        once = replace(fresh, training=ALL)
        for m in range(3):
            close(models(loop)[m], local_rounds(loop, m, server(loop), once)[1])


def test_rates_decay_together() -> None:
    """In round 3 with a decay of a half both rates are a quarter of what they were."""
    training = replace(ALL, lr_decay=0.5)
    with by_hand(PFedMe(training, lam=LAM, personal_lr=0.2)) as loop:
        loop.round()
        loop.round()
        w = server(loop)
        third = PFedMe(replace(ALL, lr=LR / 4), lam=LAM, personal_lr=0.05)
        found = [local_rounds(loop, m, w, third)[0] for m in range(3)]
        loop.round()
        close(server(loop), mean(found))


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(PFedMe(ALL, lam=LAM)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
    with by_hand(PFedMe(ALL, lam=LAM, weights="examples")) as loop:
        assert loop.round().bytes_up == 3 * (15 + 1) * 4


def test_a_firm_hold_makes_personal_models_the_global_one() -> None:
    training = LocalTraining(lr=1e-3, batch=5, steps=3)
    found = run(PFedMe(training, lam=900.0), 2, participation=1.0)
    close(found["personal models"], found["server.w"].expand(6, -1), 5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0.0}, "lam must be positive; got 0.0"),
        ({"lam": 11.0}, r"lr \* lam <= 1"),
        ({"personal_lr": 0.7, "lam": 3.0}, "they are unstable above"),
        ({"personal_lr": -0.1, "lam": 3.0}, "personal_lr must be positive"),
        ({"inner_steps": 0, "lam": 3.0}, "inner_steps must be at least 1"),
        ({"beta": 0.0, "lam": 3.0}, "beta must be positive"),
        ({"inner_decay": -1.0, "lam": 3.0}, "inner_decay must be at least 0"),
        ({"weights": "none", "lam": 3.0}, r"weights must be examples \| equal"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("pfedme", ALL, options)


@pytest.mark.parametrize("name", ["pfedme", "perfedavg", "perfedavg_hf", "apfl"])
def test_steps_of_ones_own_have_no_momentum(name: str) -> None:
    method = make_algorithm(name, LocalTraining(lr=0.05), {"momentum": 0.9})
    with pytest.raises(ConfigError, match=r"its own, without momentum; got 0\.9; set it to 0"), by_hand(method):
        pass


def test_weight_decay_is_part_of_the_loss() -> None:
    """Of the inner steps only, however it is given: w follows θ."""
    ours = run(PFedMe(LocalTraining(lr=0.05, batch=5, steps=3, weight_decay=0.1), lam=LAM))
    theirs = run(PFedMe(LocalTraining(lr=0.05, batch=5, steps=3), lam=LAM, inner_decay=0.1))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert not torch.equal(ours["server.w"], run(PFedMe(LocalTraining(lr=0.05, batch=5, steps=3), lam=LAM))["server.w"])
