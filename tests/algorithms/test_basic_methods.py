"""Local, FedAvg, FedProx, FedAvgM and Ditto against steps worked by hand and against each other at their limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from method_bench import accuracy_on, one_body, two_bowls
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedopt import FedOpt
from kinfed.algorithms.fedprox import FedProx
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED, outcome

SIZES = (2, 6, 4)
LR = 0.1
ALL = LocalTraining(lr=LR, batch=100, steps=1)  # every batch is all of a client's examples: gradients by hand
P = 15  # of the linear model


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


@contextmanager
def by_hand(method: Any, **schedule: float) -> Iterator[Loop]:
    """Logistic regression at three clients with 2, 6 and 4 examples."""
    bench = Bench(method, federation=tiny_federation(SIZES), model=linear)
    with bench.loop(Schedule(**schedule)) as loop:
        yield loop


def gradient(loop: Loop, client: int, theta: Tensor) -> Tensor:
    """∇f_m(θ) of the mean cross-entropy by plain autograd."""
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
    theta = theta.clone().requires_grad_()
    z = x @ theta[:12].reshape(3, 4).T + theta[12:]
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), theta)
    return g


def server(loop: Loop, name: str = "w") -> Tensor:
    return loop.server.named()[name].clone()


def state(loop: Loop, client: int, name: str) -> Tensor:
    return loop.pool.clients.take(torch.tensor([client])).named()[name][0].clone()


def by_examples(rows: list[Tensor]) -> Tensor:
    """Σ p_m rows[m] with p_m = N_m / Σ N."""
    return torch.stack([size / sum(SIZES) * row for size, row in zip(SIZES, rows, strict=True)]).sum(0)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def run(method: Any, rounds: int = 5, **schedule: float) -> dict[str, Tensor]:
    with Bench(method).loop(Schedule(**{"participation": 0.67, **schedule})) as loop:
        for _ in range(rounds):
            loop.round()
        return outcome(loop)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor], names: set[str]) -> None:
    for name in names:
        assert torch.equal(a[name], b[name]), name


WORKS = {
    "steps": LocalTraining(batch=5, steps=4),
    "epochs": LocalTraining(batch=3, steps=None, epochs=2),
    "momentum and decay": LocalTraining(batch=5, steps=4, momentum=0.9, weight_decay=0.01, lr_decay=0.9),
}
works = pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())


# FedAvg.


@pytest.mark.parametrize(("weights", "p"), [("examples", (2 / 12, 6 / 12, 4 / 12)), ("equal", (1 / 3, 1 / 3, 1 / 3))])
def test_fedavg_moves_by_the_weighted_mean_of_gradients(weights: str, p: tuple[float, ...]) -> None:
    """One step on all examples: u_m = w − η ∇f_m(w), so w ← w − η Σ p_m ∇f_m(w)."""
    with by_hand(FedAvg(training=ALL, weights=weights)) as loop:
        for _ in range(3):
            w = server(loop)
            g = [gradient(loop, m, w) for m in range(3)]
            loop.round()
            close(server(loop), w - LR * sum(p[m] * g[m] for m in range(3)))
            for m in range(3):
                close(state(loop, m, "theta"), w - LR * g[m])


def test_fedavg_weighs_only_those_who_reply() -> None:
    with by_hand(FedAvg(training=ALL), participation=0.67) as loop:
        w = server(loop)
        active = loop.schedule.active(SEED, 1, 3).tolist()
        assert len(active) == 2
        g = {m: gradient(loop, m, w) for m in active}
        loop.round()
        total = sum(SIZES[m] for m in active)
        close(server(loop), w - LR * sum(SIZES[m] / total * g[m] for m in active))


def test_smoothing_keeps_a_part_of_the_old_model() -> None:
    """w ← (1 − c) w + c ŵ, ŵ what plain FedAvg would make of the round."""
    with by_hand(FedAvg(training=ALL)) as plain, by_hand(FedAvg(training=ALL, smoothing=0.3)) as smooth:
        w = server(plain)
        plain.round()
        smooth.round()
        close(server(smooth), 0.7 * w + 0.3 * server(plain))
    with by_hand(FedAvg(training=ALL, smoothing="participation"), participation=0.4) as loop:
        assert float(server(loop, "c")) == 0.4
        w = server(loop)
        (active,) = loop.schedule.active(SEED, 1, 3).tolist()
        g = gradient(loop, active, w)
        loop.round()
        close(server(loop), w - 0.4 * LR * g)
        assert float(server(loop, "c")) == 0.4


def test_fedavg_smooth_is_fedavg_with_the_participation() -> None:
    assert make_algorithm("fedavg_smooth", ALL) == FedAvg(training=ALL, smoothing="participation")
    same = run(FedAvg(training=WORKS["steps"], smoothing="participation"), participation=1.0)
    same_bits(same, run(FedAvg(training=WORKS["steps"]), participation=1.0), {"server.w", "personal models"})


def test_fedavg_personal_model_is_the_last_local_or_else_the_global_one() -> None:
    with by_hand(FedAvg(training=ALL), participation=0.67) as loop:
        active = loop.schedule.active(SEED, 1, 3).tolist()
        w = server(loop)
        loop.round()
        models = loop.evaluate(keep_models=True).models
        assert models is not None
        for m in range(3):
            close(models[m], w - LR * gradient(loop, m, w) if m in active else server(loop))
        shared = loop.algorithm.server_models(loop.server)
        assert shared is not None
        assert torch.equal(shared.models, server(loop)[None])


def test_smoothing_calms_a_model_that_clients_pull_to_and_fro() -> None:
    """Two clients with opposite minima, one of them at a time: FedAvg's model is where the last one left it, the
    smoothed one stays nearer to what both ask for."""
    spread = {}
    for name in ("fedavg", "fedavg_smooth"):
        method = make_algorithm(name, LocalTraining(lr=LR, batch=100, steps=20), {"weights": "equal"})
        with two_bowls(method, participation=0.5) as loop:
            places = []
            for number in range(80):
                loop.round()
                places += [float(server(loop))] if number >= 20 else []
        spread[name] = float(torch.tensor(places).std())
    assert spread["fedavg_smooth"] < 0.75 * spread["fedavg"]


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_one_model_suits_clients_that_agree_and_none_those_who_do_not(seed: int) -> None:
    """What both are yardsticks for. Twelve examples are too few to learn alone which inputs matter: together they are
    enough. Where clients call the classes by names of their own, one model for all is no better than chance."""
    work = LocalTraining(lr=0.5, batch=12, steps=5)
    agree, differ = one_body(seed=seed), one_body(names=True, seed=seed)
    assert (accuracy_on(agree, FedAvg(work))[1] or 0) > accuracy_on(agree, Local(work))[0] + 0.12
    assert accuracy_on(differ, Local(work))[0] > (accuracy_on(differ, FedAvg(work))[1] or 0) + 0.15


# Local.


def test_local_takes_steps_of_its_own_only_when_called() -> None:
    with by_hand(Local(training=ALL), participation=0.67) as loop:
        theta = {m: state(loop, m, "theta") for m in range(3)}
        assert torch.equal(theta[0], loop.task.init(SEED))
        for number in range(1, 4):
            for m in loop.schedule.active(SEED, number, 3).tolist():
                theta[m] = theta[m] - LR * gradient(loop, m, theta[m])
            loop.round()
            for m in range(3):
                close(state(loop, m, "theta"), theta[m])
        assert loop.evaluate().server_model is None


# FedProx.


@works
def test_fedprox_without_the_proximal_term_is_fedavg(training: LocalTraining) -> None:
    fedavg = run(FedAvg(training=training))
    same_bits(run(FedProx(training=training, mu=0.0)), fedavg, set(fedavg))


def test_fedprox_pulls_toward_the_received_model() -> None:
    """Two steps: θ' = w − η ∇f(w), as θ = w feels no pull; then θ'' = θ' − η (∇f(θ') + μ (θ' − w))."""
    mu = 4.0
    with by_hand(FedProx(training=ALL.with_steps(2), mu=mu)) as loop:
        for _ in range(2):
            w = server(loop)
            ends = []
            for m in range(3):
                one = w - LR * gradient(loop, m, w)
                ends.append(one - LR * (gradient(loop, m, one) + mu * (one - w)))
            loop.round()
            close(server(loop), by_examples(ends))
            close(state(loop, 1, "theta"), ends[1])


def test_fedprox_held_firmly_hardly_moves() -> None:
    """With η μ = 1 every step starts again from w: θ stays within one gradient step of it."""
    with by_hand(FedProx(training=ALL.with_steps(5), mu=1 / LR)) as loop:
        w = server(loop)
        loop.round()
        assert float((state(loop, 0, "theta") - w).norm()) < 3 * LR * float(gradient(loop, 0, w).norm())
        one = w
        for _ in range(5):
            one = w - LR * gradient(loop, 0, one)
        close(state(loop, 0, "theta"), one)


@pytest.mark.parametrize("mu", [0.0, 1.0, 9.0])
def test_fedprox_drifts_less_the_firmer_it_is_held(mu: float) -> None:
    """θ²/2 and 3 (θ − 4)²/2 solved to the end at every client: θ_m = (a_m z_m + μ w)/(a_m + μ), so that the model comes
    to rest at Σ a z/(a + μ) / Σ a/(a + μ): at 2 without a hold, at 2.4 and 2.857 with one; the mean is least at 3."""
    method = FedProx(training=LocalTraining(lr=LR, batch=100, steps=200), mu=mu, weights="equal")
    with two_bowls(method) as loop:
        for _ in range(60):
            loop.round()
        a, z = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 4.0])
        wanted = float((a * z / (a + mu)).sum() / (a / (a + mu)).sum())
        assert float(server(loop)) == pytest.approx(wanted, abs=1e-3)
        assert wanted == pytest.approx({0.0: 2.0, 1.0: 2.4, 9.0: 2.857}[mu], abs=1e-3)


def test_fedprox_uses_the_partial_work_that_fedavg_drops() -> None:
    """What it was invented for, beside drift: stragglers count with the steps they have taken."""
    five = ALL.with_steps(5)
    with by_hand(FedProx(training=five, mu=0.5), stragglers=0.9) as ours:
        w = server(ours)
        assert ours.round().dropped == 0
        steps = []
        for m in range(3):
            theta, ends = w, []
            for _ in range(5):
                theta = theta - LR * (gradient(ours, m, theta) + 0.5 * (theta - w))
                ends.append(theta)
            steps.append(
                [n for n, end in enumerate(ends, 1) if torch.allclose(state(ours, m, "theta"), end, atol=1e-6)]
            )
        assert all(steps)
        assert min(n for (n,) in steps) < 5
        close(server(ours), by_examples([state(ours, m, "theta") for m in range(3)]))
    with by_hand(FedAvg(training=five), stragglers=0.9) as theirs:
        assert theirs.round().dropped > 0


# FedAvgM.


def fedavgm(training: LocalTraining, **options: Any) -> Any:
    return make_algorithm("fedavgm", training, options)


@works
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_fedavgm_without_momentum_is_fedavg(training: LocalTraining, nesterov: bool, weights: str) -> None:
    fedavg = run(FedAvg(training=training, weights=weights))
    without = run(fedavgm(training, weights=weights, beta1=0.0, server_nesterov=nesterov))
    same_bits(without, fedavg, set(fedavg) - {"server.c"})


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_by_hand(nesterov: bool) -> None:
    """Δ = −η Σ p ∇f(w); m ← γ m + Δ; w ← w + η_s m, with Nesterov w ← w + η_s (γ m + Δ)."""
    gamma, rate = 0.8, 0.5
    with by_hand(fedavgm(ALL, beta1=gamma, server_lr=rate, server_nesterov=nesterov)) as loop:
        m = torch.zeros(P)
        for _ in range(4):
            w = server(loop)
            delta = -LR * by_examples([gradient(loop, k, w) for k in range(3)])
            m = gamma * m + delta
            loop.round()
            close(server(loop, "m"), m)
            close(server(loop), w + rate * (gamma * m + delta if nesterov else m))
        assert loop.server.named().keys() == {"w", "m"}


# Ditto.


@works
def test_ditto_without_pull_is_local_beside_fedavg(training: LocalTraining) -> None:
    ditto, local, fedavg = (
        run(Ditto(training=training, lam=0.0)),
        run(Local(training=training)),
        run(FedAvg(training=training)),
    )
    same_bits(ditto, local, {"personal models", "personal loss", "personal correct"})
    assert torch.equal(ditto["clients.rows.v"], local["clients.rows.theta"])
    same_bits(ditto, fedavg, {"server.w", "server loss"})


@works
@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_dittos_global_model_is_fedavgs_whatever_the_pull(training: LocalTraining, weights: str) -> None:
    same_bits(
        run(Ditto(training=training, lam=1.5, weights=weights)),
        run(FedAvg(training=training, weights=weights)),
        {"server.w"},
    )


def test_ditto_by_hand() -> None:
    """v ← v − η (∇f(v) + λ (v − w)) with w as received, twice a round; the global branch never sees v."""
    lam = 2.5
    with by_hand(Ditto(training=ALL.with_steps(2), lam=lam)) as loop:
        v = [loop.task.init(SEED)] * 3
        for _ in range(3):
            w = server(loop)
            ends = []
            for m in range(3):
                u = w
                for _ in range(2):
                    u = u - LR * gradient(loop, m, u)
                    v[m] = v[m] - LR * (gradient(loop, m, v[m]) + lam * (v[m] - w))
                ends.append(u)
            loop.round()
            close(server(loop), by_examples(ends))
            models = loop.evaluate(keep_models=True).models
            assert models is not None
            for m in range(3):
                close(state(loop, m, "v"), v[m])
                close(models[m], v[m])


def test_ditto_pulled_firmly_stays_at_the_global_model() -> None:
    training = LocalTraining(lr=1e-3, batch=5, steps=20)
    found = {}
    for lam in (0.0, 1.0, 30.0, 1000.0):
        with Bench("ditto").loop(Schedule(), algorithm=Ditto(training=training, lam=lam)) as loop:
            for _ in range(4):
                w = server(loop)
                loop.round()
            found[lam] = float((loop.pool.clients.take(torch.arange(6)).named()["v"] - w).norm(dim=1).max())
    assert found[1000.0] < found[30.0] < found[1.0] < found[0.0]
    assert found[1000.0] < 0.05 * found[0.0]


def test_dittos_personal_branch_has_its_own_rate_and_steps() -> None:
    training = LocalTraining(lr=LR, batch=100, steps=1, lr_decay=0.5)
    with by_hand(Ditto(training=training, lam=1.0, personal_lr=0.02, personal_steps=3)) as loop:
        v = loop.task.init(SEED)
        for decay in (1.0, 0.5, 0.25):  # both rates fall alike
            w = server(loop)
            for _ in range(3):
                v = v - 0.02 * decay * (gradient(loop, 1, v) + (v - w))
            g = [gradient(loop, m, w) for m in range(3)]
            loop.round()
            close(state(loop, 1, "v"), v)
            close(server(loop), w - LR * decay * by_examples(g))


def test_ditto_sees_the_batches_of_every_other_method() -> None:
    """With its own steps too: the first of them are FedAvg's, drawn from the same stream."""
    training = LocalTraining(batch=3, steps=2)
    longer = run(Ditto(training=training, lam=0.0, personal_steps=6))
    same_bits(longer, run(Local(training=training.with_steps(6))), {"personal models"})
    same_bits(longer, run(FedAvg(training=training)), {"server.w"})


# What travels (bytes per active client and round).


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (Local(training=ALL), 0, 0),
        (FedAvg(training=ALL), 4 * P, 4 * P + 4),
        (FedAvg(training=ALL, weights="equal"), 4 * P, 4 * P),
        (FedAvg(training=ALL, smoothing="participation"), 4 * P, 4 * P + 4),
        (FedProx(training=ALL), 4 * P, 4 * P + 4),
        (fedavgm(ALL), 4 * P, 4 * P + 4),
        (fedavgm(ALL, weights="equal"), 4 * P, 4 * P),
        (Ditto(training=ALL), 4 * P, 4 * P + 4),
        (Ditto(training=ALL, weights="equal"), 4 * P, 4 * P),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_a_model_travels_each_way(method: Any, down: int, up: int) -> None:
    with by_hand(method, participation=0.67) as loop:
        report = loop.round()
        assert (report.active, report.bytes_down, report.bytes_up) == (2, 2 * down, 2 * up)


def test_a_cohort_of_one_replaces_the_model() -> None:
    fedavg = FedAvg(training=ALL)
    with by_hand(fedavg) as loop:
        w, delta = server(loop), torch.arange(float(P))
        up = DeltaUp(delta[None], torch.tensor([7.0]))
        round = RoundInfo(1, loop.population)
        close(fedavg.aggregate(loop.server, torch.tensor([2]), up, round).w, w + delta)  # type: ignore[arg-type]


# Options.


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (FedAvg, {"weights": "size"}, r"FedAvg: weights must be examples \| equal; got 'size'"),
        (FedAvg, {"smoothing": 0.0}, r"FedAvg: smoothing must be in \(0, 1\]; got 0.0"),
        (FedAvg, {"smoothing": 1.5}, "got 1.5"),
        (FedAvg, {"smoothing": "half"}, "got 'half'"),
        (FedAvg, {"smoothing": float("nan")}, "got nan"),
        (FedProx, {"mu": -0.1}, "mu must be at least 0; got -0.1"),
        (FedProx, {"mu": float("nan")}, "mu must be at least 0; got nan"),
        (FedProx, {"mu": 20.0}, "unstable for lr \\* mu >= 2; got 0.1 \\* 20.0; lower one of them"),
        (FedProx, {"weights": "size"}, r"weights must be examples \| equal"),
        (FedOpt, {"server_optimizer": "momentum", "beta1": 1.0}, r"beta1 must be in \[0, 1\); got 1.0"),
        (FedOpt, {"server_optimizer": "momentum", "beta1": -0.1}, "got -0.1"),
        (FedOpt, {"server_optimizer": "momentum", "server_lr": 0.0}, "server_lr must be positive; got 0.0"),
        (FedOpt, {"server_optimizer": "momentum", "weights": "size"}, r"weights must be examples \| equal"),
        (Ditto, {"lam": -1.0}, "Ditto: lam must be at least 0; got -1"),
        (Ditto, {"lam": float("nan")}, "lam must be at least 0; got nan"),
        (Ditto, {"lam": 20.0}, "unstable for lr \\* lam >= 2; got 0.1 \\* 20.0; lower one of them"),
        (Ditto, {"lam": 5.0, "personal_lr": 0.5}, "got 0.5 \\* 5.0"),
        (Ditto, {"personal_lr": -0.1}, "personal_lr must be positive; got -0.1"),
        (Ditto, {"personal_steps": 0}, "personal_steps must be at least 1; got 0"),
        (Ditto, {"weights": "size"}, r"weights must be examples \| equal"),
    ],
)
def test_bad_options_are_refused_when_the_method_is_made(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(training=ALL, **options)
