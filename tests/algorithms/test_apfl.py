"""APFL: its three updates by hand, the limits of the mixture, and a proportion that stays one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, by_hand, close, gradient, mean, models, quadratic, run, server, state, weighted

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.apfl import APFL
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.testing.workbench import SEED

PLAIN = {"steps": LocalTraining(batch=5, steps=4), "epochs": LocalTraining(batch=3, steps=None, epochs=2, lr_decay=0.9)}


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("weights", ["equal", "examples"])
def test_rounds_follow_algorithm_1(every_step: bool, weights: str) -> None:
    """v̄ = α v + (1 − α) w_m;  α ← α − η ⟨∇f(v̄), v − w_m⟩;  v ← v − η α ∇f(v̄);  w_m ← w_m − η ∇f(w_m)."""
    method = APFL(ALL.with_steps(3), alpha=0.4, alpha_every_step=every_step, weights=weights)
    with by_hand(method) as loop:
        v = [loop.task.init(SEED) for _ in range(3)]
        alpha = [0.4] * 3
        for _ in range(3):
            w, sent = server(loop), []
            for m in range(3):
                w_m = w.clone()
                for step in range(3):
                    g = gradient(loop, m, alpha[m] * v[m] + (1 - alpha[m]) * w_m)
                    old = alpha[m]
                    if every_step or step == 0:
                        alpha[m] = min(max(alpha[m] - LR * float(g @ (v[m] - w_m)), 0.0), 1.0)
                    v[m] = v[m] - LR * old * g  # g is the gradient at the old mixture
                    w_m = w_m - LR * gradient(loop, m, w_m)
                sent.append(w_m)
            loop.round()
            close(server(loop), weighted(sent) if weights == "examples" else mean(sent))
            for m in range(3):
                close(state(loop, m, "v"), v[m])
                assert float(state(loop, m, "alpha")) == pytest.approx(alpha[m], abs=1e-6)
                close(models(loop)[m], alpha[m] * v[m] + (1 - alpha[m]) * server(loop))


def test_weight_decay_is_part_of_both_losses() -> None:
    kappa = 0.3
    with by_hand(APFL(replace(ALL, weight_decay=kappa), alpha=0.4)) as loop:
        v = loop.task.init(SEED)
        for _ in range(2):
            w = server(loop)
            alpha = float(state(loop, 1, "alpha"))
            mixed = alpha * v + (1 - alpha) * w
            g = gradient(loop, 1, mixed) + kappa * mixed
            v, alpha = v - LR * alpha * g, min(max(alpha - LR * float(g @ (v - w)), 0.0), 1.0)
            wanted = mean([w - LR * (gradient(loop, m, w) + kappa * w) for m in range(3)])
            loop.round()
            close(server(loop), wanted)
            close(state(loop, 1, "v"), v)
            assert float(state(loop, 1, "alpha")) == pytest.approx(alpha, abs=1e-6)


def test_alpha_stays_in_the_first_round_and_moves_in_the_second() -> None:
    with by_hand(APFL(ALL, alpha=0.3)) as loop:
        loop.round()
        assert loop.evaluate().figures["alpha"].tolist() == [0.3] * 3
        loop.round()
        assert all(a != 0.3 for a in loop.evaluate().figures["alpha"].tolist())


@pytest.mark.parametrize("training", PLAIN.values(), ids=PLAIN.keys())
def test_alpha_zero_is_fedavg_with_equal_weights(training: LocalTraining) -> None:
    ours, theirs = run(APFL(training, alpha=0.0, adaptive=False)), run(FedAvg(training, weights="equal"))
    close(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal models"], ours["server.w"].expand(6, -1))


@pytest.mark.parametrize("training", PLAIN.values(), ids=PLAIN.keys())
def test_alpha_one_is_local_training(training: LocalTraining) -> None:
    ours = run(APFL(training, alpha=1.0, adaptive=False))
    close(ours["personal models"], run(Local(training))["personal models"], 1e-5)


def test_alpha_zero_stays_where_its_slope_is_clipped() -> None:
    """At α = 0 v never moves, so v − w is the way back to the start: uphill, and α would fall below 0."""
    found = run(APFL(PLAIN["steps"], alpha=0.0), participation=1.0)
    assert found["figure alpha"].tolist() == [0.0] * 6


@pytest.mark.parametrize("every_step", [False, True])
def test_alpha_is_always_a_proportion(every_step: bool) -> None:
    """Very different clients and a rate at which the slopes of α are steep."""
    method = APFL(replace(ALL, lr=0.4).with_steps(5), alpha_every_step=every_step)
    with quadratic(method, s0=400.0) as (loop, _):
        seen = set()
        for _ in range(12):
            loop.round()
            alpha = loop.evaluate().figures["alpha"]
            assert bool(((alpha >= 0) & (alpha <= 1)).all())
            seen |= set(alpha.tolist())
        assert seen & {0.0, 1.0}  # the bounds were met


def test_clients_unlike_the_others_rely_on_themselves() -> None:
    """The quadratic's slope is (v̄ − z)(v − w)/s: it falls, and α rises, while v lies between w and z."""
    with quadratic(APFL(ALL.with_steps(5)), s0=100.0) as (loop, _):
        for _ in range(40):
            loop.round()
        assert float(loop.evaluate().figures["alpha"].mean()) > 0.7


def test_who_is_not_called_mixes_its_own_model_with_the_current_one() -> None:
    with by_hand(APFL(ALL, alpha=0.25), participation=0.4) as loop:
        for _ in range(3):
            loop.round()
        for m in range(3):
            alpha = float(state(loop, m, "alpha"))
            close(models(loop)[m], alpha * state(loop, m, "v") + (1 - alpha) * server(loop))


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(APFL(ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.1}, r"alpha must be in \[0, 1\]; got 1.1"),
        ({"weights": "none"}, r"weights must be examples \| equal; got 'none'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_algorithm("apfl", ALL, options)
