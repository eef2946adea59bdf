"""Per-FedAvg: its meta step by hand, contraction on a quadratic, FedAvg as its limit, adaptation on training data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, by_hand, close, gradient, mean, models, quadratic, run, server, two_bowls
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.perfedavg import PerFedAvg
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.loop import Loop

ALPHA, BETA = 0.3, 0.07


def hessian_product(loop: Loop, client: int, w: Tensor, v: Tensor) -> Tensor:
    """∇²f(w) v by a central difference, wide enough for float32."""
    step = 1e-2 / float(v.norm())
    return (gradient(loop, client, w + step * v) - gradient(loop, client, w - step * v)) / (2 * step)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_a_step_by_hand(variant: str) -> None:
    """All batches are all examples, so b, b' and b'' agree."""
    with by_hand(PerFedAvg(ALL, variant, alpha=ALPHA, beta=BETA)) as loop:
        for _ in range(2):
            w, moved = server(loop), []
            for m in range(3):
                v = gradient(loop, m, w - ALPHA * gradient(loop, m, w))
                if variant == "hf":
                    v = v - ALPHA * hessian_product(loop, m, w, v)
                moved.append(w - BETA * v)
            loop.round()
            close(server(loop), mean(moved), 1e-5)


@pytest.mark.parametrize(("variant", "power"), [("fo", 1), ("hf", 2)])
@pytest.mark.parametrize("steps", [1, 3])
def test_contraction_on_a_quadratic(variant: str, power: int, steps: int) -> None:
    """f = (w − z)²/(2 s): w − z shrinks by 1 − (β/s)(1 − α/s)^power per step; the Hessian is exact at any δ."""
    method = PerFedAvg(ALL.with_steps(steps), variant, alpha=ALPHA, beta=BETA)
    with quadratic(method, start=5.0) as (loop, world):
        w, s = server(loop), world.s[:, None]
        loop.round()
        factor = (1 - BETA / s * (1 - ALPHA / s) ** power) ** steps
        close(server(loop), (world.z + factor * (w - world.z)).mean(0), 1e-5)


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining(batch=5, steps=4),
        LocalTraining(batch=3, steps=None, epochs=2),
        LocalTraining(batch=5, steps=4, lr_decay=0.8),
    ],
    ids=["steps", "epochs", "decay"],
)
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_an_inner_step_it_is_fedavg_at_another_rate(variant: Any, training: LocalTraining) -> None:
    """α = 0: the outer gradient is taken at w itself. It is on batches of another stream, so let them be full."""
    full = replace(training, batch=100)
    ours = run(PerFedAvg(full, variant, alpha=0.0, beta=BETA))
    theirs = run(FedAvg(replace(full, lr=BETA), weights="equal"))
    close(ours["server.w"], theirs["server.w"])
    close(ours["personal models"], theirs["server.w"].expand(6, -1))


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_its_model_is_the_one_from_which_a_step_leads_furthest(variant: str) -> None:
    """What it was invented for. θ²/2 and 3 (θ − 4)²/2: FedAvg rests where Σ a (w − z) = 0, at 3; the Hessian-free
    variant where Σ a (1 − α a)² (w − z) = 0 (first order: one factor less). With α = 0.3 a step of the steep client
    goes nine tenths of its way, so that both lean to the other one, and the loss after a step is less."""
    alpha, a, z = 0.3, torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0])
    with two_bowls(PerFedAvg(ALL, variant, alpha=alpha, beta=0.2)) as loop:
        for _ in range(200):
            loop.round()
        w = float(server(loop))
    shift = a * (1 - alpha * a) ** (2 if variant == "hf" else 1)
    assert w == pytest.approx(float((shift * z).sum() / shift.sum()), abs=1e-3)

    def after_a_step(w: float) -> float:
        return float((a / 2 * ((1 - alpha * a) * (w - z)).square()).sum())

    assert after_a_step(w) < 0.6 * after_a_step(3.0)


def test_batches_of_a_step_are_independent() -> None:
    """With batches of one of many examples, FO at α = 0 and FedAvg see different ones."""
    training = LocalTraining(batch=1, steps=3)
    ours, theirs = run(PerFedAvg(training, alpha=0.0), 1), run(FedAvg(training, weights="equal"), 1)
    assert not torch.allclose(ours["server.w"], theirs["server.w"], atol=1e-4)


def test_everyone_adapts_afresh_on_training_data() -> None:
    with by_hand(PerFedAvg(ALL, alpha=ALPHA, adapt_steps=2), participation=0.4) as loop:
        loop.round()
        w = server(loop)
        for m in range(3):
            once = w - ALPHA * gradient(loop, m, w)
            close(models(loop)[m], once - ALPHA * gradient(loop, m, once))
        shared = loop.algorithm.server_models(loop.server)
        assert shared is not None
        assert torch.equal(shared.models, w[None])


def test_rates_default_to_the_works_and_decay_with_it() -> None:
    training = replace(ALL, lr_decay=0.5)
    with by_hand(PerFedAvg(training)) as plain, by_hand(PerFedAvg(training, alpha=LR, beta=LR)) as named:
        for loop in (plain, named):
            loop.round()
            loop.round()
            w = server(loop)
            close(models(loop)[1], w - LR / 2 * gradient(loop, 1, w))  # the rate of the last completed round
        assert torch.equal(server(plain), server(named))


@pytest.mark.parametrize(("variant", "power"), [("fo", 1), ("hf", 2)])
def test_weight_decay_is_part_of_the_loss(variant: str, power: int) -> None:
    """f = (w − z)²/(2 s) + κ w²/2 is a quadratic of curvature 1/s + κ around z/(1 + κ s)."""
    kappa = 0.4
    method = PerFedAvg(replace(ALL, weight_decay=kappa), variant, alpha=ALPHA, beta=BETA)
    with quadratic(method, start=5.0) as (loop, world):
        w, curve = server(loop), 1 / world.s[:, None] + kappa
        centre = world.z / (1 + kappa * world.s[:, None])
        loop.round()
        factor = 1 - BETA * curve * (1 - ALPHA * curve) ** power
        close(server(loop), (centre + factor * (w - centre)).mean(0), 1e-5)
        w = server(loop)
        close(models(loop), w - ALPHA * curve * (w - centre), 1e-5)


def test_a_client_at_its_minimum_stays() -> None:
    """v = 0: the Hessian-free correction has nothing to divide by, and nothing to correct."""
    with quadratic(PerFedAvg(ALL, "hf"), clients=1) as (loop, world):
        loop.server = replace(loop.server, w=world.z[0].clone())
        loop.round()
        close(server(loop), world.z[0])


def test_a_steep_loss_does_not_blow_up_the_difference_quotient() -> None:
    """Far from the minimum ‖v‖ is large; the points of the quotient stay within δ of w."""
    with quadratic(PerFedAvg(ALL, "hf", alpha=ALPHA, beta=BETA, delta=0.1), start=1e3) as (loop, world):
        w, s = server(loop), world.s[:, None]
        loop.round()
        factor = 1 - BETA / s * (1 - ALPHA / s) ** 2
        close(server(loop), (world.z + factor * (w - world.z)).mean(0), 1e-3)


def test_bytes_are_one_model_each_way() -> None:
    for variant in ("fo", "hf"):
        with by_hand(PerFedAvg(ALL, variant)) as loop:
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)


def test_the_registered_hessian_free_variant() -> None:
    assert make_algorithm("perfedavg_hf", ALL) == PerFedAvg(ALL, "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "so"}, r"variant must be fo \| hf; got 'so'"),
        ({"alpha": -0.1}, "alpha must be at least 0"),
        ({"beta": 0.0}, "beta must be positive"),
        ({"delta": 0.0}, "delta must be positive"),
        ({"adapt_steps": 0}, "adapt_steps must be at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("perfedavg", ALL, options)
