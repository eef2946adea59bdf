"""Self-FL (Algorithm 1): formulas, edge cases, limits, rounds worked by hand, and what it sends."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.selffl.selffl import Client, Down, SelfFL
from kinfed.algorithms.selffl.uncertainty import LocalPlan, Rules, Running
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.server.loop import Loop
from kinfed.testing import tiny_federation, tiny_model
from kinfed.theory.gaussian import Case, GaussianTask, draw

F64 = torch.float64
WORK = LocalTraining(lr=0.1, batch=5, steps=4)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def plan(s: float, s0: float, S: float, step_size: float = 0.01, default_steps: int = 7, **options: Any) -> LocalPlan:
    """The plan of one client, its fields as 0-dimensional tensors."""
    rules = Rules(**options)
    plans = rules.local_plan(doubles(s), doubles(s0), doubles(S), doubles(step_size), torch.tensor([default_steps]))
    return LocalPlan(*(field[0] for field in plans))


def points(*values: float) -> Federation:
    """One client for every value, with that single example."""
    return Federation.from_arrays(
        np.array(values)[:, None], np.zeros(len(values), int), np.arange(len(values)), test_fraction=0, num_classes=1
    )


# ---------------------------------------------------------------- the running variance


@given(n=st.integers(1, 12), dims=st.integers(1, 4), seed=st.integers(0, 1000))
def test_the_running_variance_is_numpys(n: int, dims: int, seed: int):
    x = np.random.default_rng(seed).normal(3.0, 2.0, (n, dims))
    models = Running(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dims, dtype=F64), torch.zeros(1, dtype=F64))
    for row in x:
        models = models.add(torch.from_numpy(row)[None])
    assert models.n.tolist() == [n]
    np.testing.assert_allclose(models.mean[0], x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(models.m2[0], n * x.var(0).sum(), rtol=1e-10, atol=1e-12)
    mean, total = Rules().own_variance(models), Rules(var_m="sum").own_variance(models)
    if n < 2:
        assert mean.tolist() == total.tolist() == [-1.0]
    else:
        np.testing.assert_allclose(mean[0], x.var(0).sum(), rtol=1e-10)
        np.testing.assert_allclose(total[0], n * x.var(0).sum(), rtol=1e-10)


def test_each_client_has_a_clock_of_its_own():
    x = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    turns = [(0,), (1,), (0, 1), (0,), (0, 1), (1,), (0,)]
    models = Running(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=F64), torch.zeros(2, dtype=F64))
    for t, who in enumerate(turns):
        index = torch.tensor(who)
        added = Running(*(f[index] for f in models)).add(x[t, index])
        models = Running(*(f.index_copy(0, index, g) for f, g in zip(models, added, strict=True)))
    for m in range(2):
        own = torch.stack([x[t, m] for t, who in enumerate(turns) if m in who])
        torch.testing.assert_close(Rules().own_variance(models)[m], own.var(0, correction=0).sum())


def test_float32_models_keep_a_float64_variance():
    # A spread of 1e-3 around 1000: squares of the values themselves would lose it in float32.
    x = 1000 + 1e-3 * torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=F64)
    models = Running(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1), torch.zeros(1, dtype=F64))
    for row in x.to(torch.float32):
        models = models.add(row[None])
    assert models.mean.dtype == torch.float32
    assert models.m2.dtype == F64
    expected = x.to(torch.float32).to(F64).var(correction=0)
    torch.testing.assert_close(Rules().own_variance(models)[0], expected, rtol=0.1, atol=0)


# ---------------------------------------------------------------- the plan: (18), (19) and their edges


def test_a_plan_by_hand():
    # s0 = 1, s = 1, S = 3/4: w = 1/2, w/S = 2/3, ρ = (3/4)/(1 + 3/4) = 3/7; a = 1/2: l = ln(3/7)/ln(1/2) = 1.22
    decision = plan(1.0, 1.0, 0.75, step_size=0.5)
    assert bool(decision.ready)
    assert float(decision.ratio) == pytest.approx(2 / 3)
    assert float(decision.rho) == pytest.approx(3 / 7)
    assert float(decision.raw) == pytest.approx(math.log(3 / 7) / math.log(1 / 2))
    assert int(decision.steps) == 1
    # exact: the others know the client to 1/(1 + 4/3) = 3/7, ρ = (3/7)/(1 + 3/7) = 3/10; (18) is the same
    exact = plan(1.0, 1.0, 0.75, step_size=0.5, posterior="exact")
    assert float(exact.rho) == pytest.approx(3 / 10)
    assert float(exact.raw) == pytest.approx(math.log(3 / 10) / math.log(1 / 2))
    assert float(exact.ratio) == pytest.approx(2 / 3)
    assert int(exact.steps) == 2
    first = plan(1.0, 1.0, 0.75, step_size=0.5, l_rule="first_order")
    assert float(first.raw) == pytest.approx(-math.log(3 / 7) / 0.5)


@pytest.mark.parametrize(
    ("s", "s0", "S"),
    [
        (-1.0, 1.0, 1.0),  # own variance unknown
        (1.0, 0.0, 1.0),  # between clients unknown: round 1, or only one client has ever replied
        (1.0, 1.0, 0.0),  # nobody else
        (0.0, 0.0, 0.0),
    ],
)
def test_without_all_uncertainties_a_client_does_as_in_fedavg(s: float, s0: float, S: float):
    decision = plan(s, s0, S)
    assert not bool(decision.ready)
    assert (float(decision.ratio), float(decision.rho), float(decision.raw), int(decision.steps)) == (
        0.0,
        -1.0,
        -1.0,
        7,
    )


def test_a_known_s0_of_zero_is_a_value():
    decision = plan(0.5, 0.0, 2.0, known_variances=True)  # w = 2, w/S = 1, ρ = 2/(2 + 2)
    assert bool(decision.ready)
    assert (float(decision.ratio), float(decision.rho)) == (1.0, 0.5)


@pytest.mark.parametrize("step_size", [1.0, 1.5, 1e9])
def test_a_step_that_leaps_past_the_optimum_is_taken_once(step_size: float):
    decision = plan(1.0, 1.0, 1.0, step_size=step_size)
    assert (float(decision.raw), int(decision.steps)) == (0.0, 1)
    just_below = plan(1.0, 1.0, 1.0, step_size=1 - 1e-12)
    assert 0 < float(just_below.raw) < 0.1  # so that 0 is its limit
    assert int(just_below.steps) == 1


def test_a_model_that_never_moves_takes_one_step():
    decision = plan(0.0, 1.0, 5.0)
    assert (float(decision.raw), int(decision.steps)) == (0.0, 1)
    assert 0 < float(decision.rho) < 1e-11


def test_a_share_that_rounds_to_one_takes_one_step():
    decision = plan(1e10, 1e-3, 1e12, step_size=1e-4)
    assert float(decision.rho) == 1.0
    assert 0 < float(decision.raw) < 1  # 1/(a s S), not 0/0
    assert int(decision.steps) == 1


def test_steps_grow_with_the_clients_own_variance_and_saturate():
    # S = 50, η = 1e-3: 3.5, 10.4, 18.1 and at most 1/(η S) = 20 steps.
    raw = [float(plan(s, 1.0, 50.0, step_size=1e-3).raw) for s in (2e-3, 1e-2, 0.1, 1e9)]
    assert raw == pytest.approx([3.46, 10.4, 18.1, 20.0], rel=0.01)


def test_steps_are_rounded_and_capped():
    assert int(plan(0.1, 1.0, 50.0, step_size=1e-3).steps) == 18
    assert int(plan(0.1, 1.0, 50.0, step_size=1e-3, l_max=5).steps) == 5
    assert int(plan(1.0, 1.0, 0.01, step_size=1e-6).steps) == 40
    assert int(plan(1.0, 1.0, 0.01, step_size=1e-3, l_max=None).steps) == 4613  # ln(1/101)/ln(0.999)
    assert int(plan(1.0, 1.0, 0.01, step_size=1e-12, l_max=None).steps) == 1_000_000


def test_the_ratio_is_capped():
    assert float(plan(0.0, 1.0, 0.1).ratio) == 1.0
    assert float(plan(0.0, 1.0, 0.1, r_max=math.inf).ratio) == pytest.approx(10.0)
    assert float(plan(0.0, 1.0, 0.1, r_max=1 / 3).ratio) == pytest.approx(1 / 3)


@given(
    s=st.floats(0, 1e30), s0=st.floats(1e-30, 1e30), S=st.floats(1e-30, 1e30), step_size=st.floats(1e-9, 1e3),
    posterior=st.sampled_from(["paper", "exact"]), l_rule=st.sampled_from(["log", "first_order"]),
)  # fmt: skip
def test_plans_are_finite_whatever_the_uncertainties(
    s: float, s0: float, S: float, step_size: float, posterior: str, l_rule: str
):
    decision = plan(s, s0, S, step_size, posterior=posterior, l_rule=l_rule)
    assert 0 <= float(decision.ratio) <= 1
    assert 0 <= float(decision.rho) <= 1
    assert math.isfinite(float(decision.raw))
    assert float(decision.raw) >= 0
    assert 1 <= int(decision.steps) <= 40


def test_contraction_rates():
    sizes = {"lr": 0.06, "batch": torch.tensor([2]), "count": torch.tensor([3])}
    rates = {c: float(Rules(contraction=c).step_size(**sizes)) for c in ("paper", "gd", "sum", "mean")}
    assert rates == pytest.approx({"paper": 0.03, "gd": 0.06, "sum": 0.04, "mean": 0.02})


def test_the_contraction_of_batch_means_is_what_sgd_does():
    # N = 50, B = 10 and a loss of mean reduction on examples of curvature 1/v: the distance shrinks by 1 − η/v per
    # step on average, and v = N s is what "mean" says; the printed η/(B s) is off by N/B.
    v, count = 0.5, torch.tensor([50])
    s = v / 50
    a = float(Rules(contraction="mean").step_size(0.05, torch.tensor([10]), count)) / s
    assert a == pytest.approx(0.05 / v)
    assert float(Rules().step_size(0.05, torch.tensor([10]), count)) / s == pytest.approx(5 * a)


# ---------------------------------------------------------------- the server's sums and weights


def test_the_sum_over_the_others():
    s, s0 = doubles(1.0, 3.0, -1.0, 1.0), torch.tensor(1.0, dtype=F64)  # w = 1/2, 1/4, unknown, 1/2
    active = torch.tensor([True, True, True, False])
    assert Rules().sum_of_others(s, s0, active).tolist() == [0.25, 0.5, 0.75, 0.75]  # the last is not in its own sum
    assert Rules(domain="all").sum_of_others(s, s0, active).tolist() == [0.75, 1.0, 1.25, 0.75]


def test_weights_of_unknown_clients_are_the_mean_of_the_known():
    s0 = torch.tensor(1.0, dtype=F64)
    assert Rules().client_weights(doubles(1.0, -1.0, 3.0), s0).tolist() == [0.5, 0.375, 0.25]
    assert Rules().client_weights(doubles(-1.0, -1.0), s0).tolist() == [1.0, 1.0]
    among = torch.tensor([True, True, False])
    assert Rules().client_weights(doubles(1.0, -1.0, 3.0), s0, among).tolist() == [0.5, 0.5, 0.0]


def test_the_spread_of_clients():
    x, before = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]]), torch.tensor(9.0, dtype=F64)
    assert float(Rules().variance_between(x, before)) == pytest.approx(2 + 6)  # Σ (x − 1)² + Σ (y − 1)²
    assert float(Rules(var0="mean").variance_between(x, before)) == pytest.approx(8 / 3)
    assert float(Rules().variance_between(x[:1], before)) == 9.0  # one client says nothing
    two = torch.tensor([True, True, False])
    assert float(Rules().variance_between(x, before, two)) == pytest.approx(2.0)
    assert float(Rules().variance_between(x, before, torch.tensor([False, True, False]))) == 9.0


# ---------------------------------------------------------------- limits


def final(loop: Loop, rounds: int) -> tuple[Tensor, Tensor]:
    """(server model, personal models) after some rounds."""
    for _ in range(rounds):
        loop.round()
    models = loop.evaluate(keep_models=True).models
    loop.pool.close()
    server_models = loop.algorithm.server_models(loop.server)
    assert server_models is not None
    assert models is not None
    return server_models.models[0], models


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [("selffl_control", "fedavg", {"smoothing": 1.0}), ("selffl_control", "fedavg_smooth", {})],
)
@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_without_its_parts_it_is_fedavg_bit_for_bit(
    ours: str, theirs: str, options: dict[str, Any], participation: float
):
    data, common = tiny_federation(), {"training": WORK, "participation": participation, "seed": 3}
    a = final(simulate(data, tiny_model, ours, **common, **options), 5)
    b = final(simulate(data, tiny_model, theirs, **common), 5)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("posterior", ["paper", "exact"])
def test_with_known_variances_it_is_the_generic_iteration(posterior: str):
    """Section 3.1 in closed form, round by round, and its fixed point (not θ^FL) in the end."""
    world = draw(Case(s0=0.01, low=4, high=9, clients=5), 1)
    model = world.model("exact" if posterior == "exact" else "paper")
    lr = 2e-3
    loop = simulate(
        world.federation, world.task(dtype=F64), "selffl", training=LocalTraining(lr=lr, batch=100, steps=3),
        known_variances=True, contraction="gd", l_max=None, posterior=posterior,
    )  # fmt: skip
    shrink = model.rounded_shrink(lr)
    steps = model.rounds(0.0, shrink)
    next(steps)
    for _ in range(4):
        loop.round()
        expected = next(steps)
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.models is not None
        torch.testing.assert_close(evaluation.models.squeeze(1), expected.personal, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(loop.server.theta[0], expected.server, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(evaluation.figures["raw_steps"], model.steps(lr), rtol=1e-5, atol=0)
    torch.testing.assert_close(evaluation.figures["weight_of_others"], model.rho, rtol=1e-5, atol=0)
    server, personal = final(loop, 60)
    torch.testing.assert_close(personal.squeeze(1), model.fixed_point(shrink).personal, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(server[0], model.fixed_point(shrink).server, rtol=1e-5, atol=1e-5)


def test_a_single_client_trains_as_in_fedavg():
    data = tiny_federation((9,))
    a = final(simulate(data, tiny_model, "selffl", training=WORK), 5)
    b = final(simulate(data, tiny_model, "fedavg", training=WORK), 5)
    torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-6)


def test_where_all_take_part_the_domain_does_not_matter():
    data, common = tiny_federation(), {"training": WORK, "contraction": "mean"}
    a = final(simulate(data, tiny_model, "selffl", **common, domain="active"), 5)
    b = final(simulate(data, tiny_model, "selffl", **common, domain="all"), 5)
    assert torch.equal(a[1], b[1])


def test_clients_never_active_use_the_global_model():
    loop = simulate(tiny_federation(), tiny_model, "selffl", training=WORK, participation=0.34)
    server, personal = final(loop, 1)
    active = loop.schedule.active(0, 1, 6)
    assert len(active) == 2
    for m in range(6):
        assert torch.equal(personal[m], server) == (m not in active)


# ---------------------------------------------------------------- rounds worked by hand


def test_three_rounds_by_hand():
    """z = 0, 4, 8 with true s = 1, 1, 2; η = 1/2, so one step halves the way of the first two and leaves 3/4 of the
    third's. One step always: η/s ≥ 1 for the variances below."""
    task = GaussianTask(doubles(1, 1, 2), 1.0, dtype=F64)
    loop = simulate(points(0, 4, 8), task, "selffl", training=LocalTraining(lr=0.5, batch=1, steps=1), contraction="gd")
    loop.round()
    # 0 + 0, 4 − 2, 8 − 6 from θ = 0; no variance known: equal weights; s0 = Σ (x − 4/3)² = (16 + 4 + 4)/9
    assert float(loop.server.theta) == pytest.approx(4 / 3)
    assert float(loop.server.s0) == pytest.approx(24 / 9)
    assert loop.server.s.tolist() == [-1, -1, -1]
    loop.round()
    # still no variance before training: from θ = 4/3 to 2/3, 8/3, 3, whose mean is 19/9
    # s = var{0, 2/3}, var{2, 8/3}, var{2, 3} = 1/9, 1/9, 1/4; s0 = (13² + 5² + 8²)/81 = 86/27
    assert loop.server.s.tolist() == pytest.approx([1 / 9, 1 / 9, 1 / 4])
    assert float(loop.server.s0) == pytest.approx(86 / 27)
    w = [1 / (Fraction(86, 27) + s) for s in (Fraction(1, 9), Fraction(1, 9), Fraction(1, 4))]
    assert w == [Fraction(27, 89), Fraction(27, 89), Fraction(108, 371)]
    x = [Fraction(2, 3), Fraction(8, 3), Fraction(3)]
    theta = sum(a * b for a, b in zip(w, x, strict=True)) / sum(w)
    assert float(loop.server.theta) == pytest.approx(float(theta))
    loop.round()
    # (18): θ − w_m/(Σ w − w_m) (x_m − θ), which is the weighted mean of the other two; then one step
    start = [(w[1] * x[1] + w[2] * x[2]) / (w[1] + w[2]), (w[0] * x[0] + w[2] * x[2]) / (w[0] + w[2])]
    start.append((w[0] * x[0] + w[1] * x[1]) / (w[0] + w[1]))
    moved = [start[0] / 2, (start[1] + 4) / 2, start[2] * Fraction(3, 4) + 2]
    evaluation = loop.evaluate(keep_models=True)
    loop.pool.close()
    assert evaluation.models is not None
    assert evaluation.models.squeeze(1).tolist() == pytest.approx([float(v) for v in moved])
    assert evaluation.figures["steps"].tolist() == [1, 1, 1]
    assert evaluation.figures["raw_steps"].tolist() == [0, 0, 0]
    assert evaluation.figures["rounds_active"].tolist() == [3, 3, 3]


class PlainSelfFL:
    """Algorithm 1 on numbers, line by line, without tensors."""

    def __init__(self, z: list[float], s_true: list[float], lr: float, usual: int, c: float) -> None:
        self.z, self.s_true, self.lr, self.usual, self.c = z, s_true, lr, usual, c
        self.theta, self.s0 = 0.0, 0.0
        self.history: dict[int, list[float]] = {m: [] for m in range(len(z))}
        self.uploaded: dict[int, float] = {}
        self.steps: dict[int, int] = {}

    def round(self, active: list[int]) -> None:
        trained = {}
        for m in active:
            past = self.history[m]
            start, steps = self.theta, self.usual
            others = sum(1 / (self.s0 + self.uploaded[k]) for k in active if k != m and k in self.uploaded)
            if len(past) >= 2 and self.s0 > 0 and others > 0:
                s = float(np.var(past))
                start = self.theta - min(1 / (self.s0 + s) / others, 1.0) * (past[-1] - self.theta)
                a = self.lr / s
                exact = 0.0 if a >= 1 else math.log(others / (1 / s + others)) / math.log(1 - a)
                steps = min(max(round(exact), 1), 40)
            self.steps[m] = steps
            x = start
            for _ in range(steps):
                x -= self.lr * (x - self.z[m]) / self.s_true[m]
            trained[m] = x
        for m, x in trained.items():
            self.history[m].append(x)
            if len(self.history[m]) >= 2:
                self.uploaded[m] = float(np.var(self.history[m]))
        values = list(trained.values())
        if len(values) >= 2:
            self.s0 = float(np.var(values)) * len(values)
        known = [1 / (self.s0 + self.uploaded[m]) for m in active if m in self.uploaded]
        usual = sum(known) / len(known) if known else 1.0
        w = [1 / (self.s0 + self.uploaded[m]) if m in self.uploaded else usual for m in active]
        average = sum(a * trained[m] for a, m in zip(w, active, strict=True)) / sum(w)
        self.theta = (1 - self.c) * self.theta + self.c * average


def test_many_rounds_against_a_plain_loop():
    z, s_true = [0.5, 1.0, 1.4, 2.0, 3.5, 1.1], [0.3, 0.2, 0.5, 0.1, 0.4, 0.25]
    task = GaussianTask(doubles(*s_true), 1.0, dtype=F64)
    loop = simulate(
        points(*z),
        task,
        "selffl",
        seed=2,
        participation=0.5,
        training=LocalTraining(lr=0.01, batch=1, steps=9),
        contraction="gd",
    )
    plain = PlainSelfFL([float(np.float32(v)) for v in z], s_true, 0.01, 9, 0.5)
    chosen = set()
    for t in range(1, 21):
        loop.round()
        plain.round(loop.schedule.active(2, t, 6).tolist())
        assert float(loop.server.theta) == pytest.approx(plain.theta, rel=1e-5)
        assert float(loop.server.s0) == pytest.approx(plain.s0, rel=1e-4)
        chosen |= set(plain.steps.values())
    evaluation = loop.evaluate(keep_models=True)
    loop.pool.close()
    assert evaluation.models is not None
    assert evaluation.models.squeeze(1).tolist() == pytest.approx([h[-1] for h in plain.history.values()], rel=1e-5)
    assert evaluation.figures["steps"].tolist() == [plain.steps[m] for m in range(6)]
    assert len(chosen) > 3  # the rule was really at work


# ---------------------------------------------------------------- parts, one at a time


def ready_client(theta: float) -> Client:
    """A client with two past models 1 apart (variance 1/4), the last one θ."""
    last = torch.zeros(1, 3, dtype=F64)
    value = torch.tensor([[theta]], dtype=F64)
    return Client(value, value - 0.5, doubles(0.5), torch.tensor([2]), last)


@pytest.mark.parametrize(
    ("name", "start", "steps"),
    # w = 1/(3/4 + 1/4) = 1, S = 4: start 2 − (3 − 2)/4; ρ = 4/(4 + 4) = 1/2 and a = 1/8: ln(1/2)/ln(7/8) = 5.19
    [("selffl", 1.75, 5), ("selffl_init", 1.75, 2), ("selffl_steps", 2.0, 5), ("selffl_agg", 2.0, 2)],
)
def test_each_part_alone(name: str, start: float, steps: int):
    method = make_algorithm(name, LocalTraining(lr=1 / 32, batch=1, steps=2), {"contraction": "gd"})
    task = GaussianTask(doubles(1.0), 1.0, dtype=F64)  # true s = 1: a step leaves 31/32 of the way to z = 0
    data = points(0.0).cohort(torch.tensor([0]), 0, 1)
    down = Down(torch.tensor([[2.0]], dtype=F64), torch.tensor([0.75]), torch.tensor([4.0]))
    client, up = method.client_update(task, ready_client(3.0), down, data)
    assert client.theta.item() == pytest.approx(start * (31 / 32) ** steps)
    assert up.delta.item() == pytest.approx(client.theta.item() - 2.0)
    assert up.s.item() == pytest.approx(np.var([2.0, 3.0, client.theta.item()]))
    assert client.last[:, 2].item() == steps
    assert client.last[:, 1].item() == pytest.approx(math.log(1 / 2) / math.log(7 / 8))
    weighs_by_examples = name in ("selffl_init", "selffl_steps")
    assert (up.count is not None) == weighs_by_examples


def test_a_client_that_never_trained_starts_at_the_received_model():
    method = SelfFL(LocalTraining(lr=1 / 32, batch=1, steps=2), contraction="gd", known_variances=True)
    task = GaussianTask(doubles(0.25), 0.75, dtype=F64)
    data = points(0.0).cohort(torch.tensor([0]), 0, 1)
    down = Down(torch.tensor([[2.0]], dtype=F64), torch.tensor([0.75]), torch.tensor([4.0]))
    client, up = method.client_update(task, method.init_client(task, data), down, data)
    assert client.theta.item() == pytest.approx(2.0 * (7 / 8) ** 5)  # but its known variance decides the steps
    assert up.s.item() == 0.25


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        ({}, 4, None),
        ({"l_init": 9}, 9, None),
        ({"fixed_epochs": 3}, 6, 6),  # 8 examples in batches of 5: two steps per epoch
        ({"use_steps": False}, 4, 4),
    ],
)
def test_steps_before_and_after_the_variance_is_known(options: dict[str, Any], first: int, later: int | None):
    loop = simulate(tiny_federation((8, 8, 8)), tiny_model, "selffl", training=WORK, contraction="mean", **options)
    seen = []
    for _ in range(3):
        loop.round()
        seen.append(loop.evaluate().figures["steps"].tolist())
    loop.pool.close()
    assert seen[0] == seen[1] == [first] * 3  # two models make a variance
    assert seen[2] == [later] * 3 if later else seen[2] != seen[1]


def test_a_batch_is_never_larger_than_the_clients_data():
    """(19) divides by B_m: with one example and batches of 10 that is 1, so η/(B_m s) = 1/32 · 4."""
    method = SelfFL(LocalTraining(lr=1 / 32, batch=10, steps=2))
    down = Down(torch.tensor([[2.0]], dtype=F64), torch.tensor([0.75]), torch.tensor([4.0]))
    data = points(0.0).cohort(torch.tensor([0]), 0, 1)
    client, _ = method.client_update(GaussianTask(doubles(1.0), 1.0, dtype=F64), ready_client(3.0), down, data)
    assert client.last[:, 1].item() == pytest.approx(math.log(1 / 2) / math.log(7 / 8))


def test_the_sum_of_a_batch_is_that_of_the_clients_own_examples():
    """Two clients of 3 and 5 examples, batches of up to 5: two full gradient steps by autograd."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(8, 4)).astype(np.float32), np.array([0, 1, 1, 0, 2, 1, 2, 0])
    owner = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    data = Federation.from_arrays(x, y, owner, test_fraction=0, num_classes=3)
    training = LocalTraining(lr=0.05, batch=5, steps=2)
    loop = simulate(
        data, lambda: torch.nn.Linear(4, 3), "selffl_control", training=training, reduction="sum", smoothing=1.0
    )
    start = loop.task.init(0)
    loop.round()
    trained = loop.evaluate(keep_models=True).models
    loop.pool.close()
    assert trained is not None
    for client in (0, 1):
        theta, inputs, labels = start, torch.from_numpy(x[owner == client]), torch.from_numpy(y[owner == client])
        for _ in range(2):
            theta = theta.detach().requires_grad_()
            logits = inputs @ theta[:12].reshape(3, 4).T + theta[12:]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            theta = theta - 0.05 * torch.autograd.grad(loss, theta)[0]
        assert torch.allclose(trained[client], theta, atol=1e-6)


@pytest.mark.parametrize(("name", "training"), [("selffl", {"steps": None, "epochs": 1}), ("selffl_augmented", {})])
def test_the_sum_of_a_batch_needs_batches_of_one_size(name: str, training: dict[str, Any]):
    with pytest.raises(ConfigError, match="needs batches of one size"):
        simulate(tiny_federation(), tiny_model, name, training=LocalTraining(**training), reduction="sum")


def test_the_learning_rate_of_the_round_decides_the_steps():
    training = LocalTraining(lr=0.01, batch=1, steps=2, lr_decay=0.5)
    method = SelfFL(training, contraction="gd", l_max=None)
    task = GaussianTask(doubles(1.0), 1.0, dtype=F64)
    down = Down(torch.tensor([[2.0]], dtype=F64), torch.tensor([0.75]), torch.tensor([4.0]))
    raw = []
    for t in (1, 2):
        data = points(0.0).cohort(torch.tensor([0]), 0, t)
        client, _ = method.client_update(task, ready_client(3.0), down, data)
        raw.append(client.last[:, 1].item())
    assert raw == pytest.approx([math.log(0.5) / math.log(1 - lr / 0.25) for lr in (0.01, 0.005)])


def test_smoothing_is_the_participation_rate():
    data = tiny_federation()
    start = simulate(data, tiny_model, "selffl", training=WORK, participation=0.5).server.theta
    step = {}
    for c in (1.0, "participation", 0.1):
        server, _ = final(simulate(data, tiny_model, "selffl", training=WORK, participation=0.5, smoothing=c), 1)
        step[c] = server - start
    torch.testing.assert_close(step["participation"], 0.5 * step[1.0])
    torch.testing.assert_close(step[0.1], 0.1 * step[1.0])


# ---------------------------------------------------------------- messages, memory, failures


def test_bytes_by_hand():
    parameters = 115
    for name, up in (("selffl", 1), ("selffl_agg", 1), ("selffl_init", 2), ("selffl_steps", 2)):
        loop = simulate(tiny_federation(), tiny_model, name, training=WORK, participation=0.5)
        report = loop.round()
        loop.pool.close()
        assert report.bytes_down == 3 * 4 * (parameters + 2)
        assert report.bytes_up == 3 * 4 * (parameters + up)  # N_m travels only where it weighs


def test_memory_of_a_client_is_two_models_and_a_few_scalars():
    loop = simulate(tiny_federation(), tiny_model, "selffl", training=WORK)
    loop.round()
    loop.pool.close()
    rows = loop.pool.clients.take(torch.tensor([0]))
    assert rows.nbytes == 2 * 4 * 115 + 2 * 8 + 3 * 8  # θ_m and x̄_m; m2 and n; three figures for the report


def test_a_diverging_client_is_dropped_and_keeps_its_past():
    task = GaussianTask(doubles(1, 1, 1), 1.0)
    loop = simulate(points(0, 4, 8), task, "selffl", training=LocalTraining(lr=0.5, batch=1, steps=1), contraction="gd")
    loop.round()
    loop.round()
    before, s = loop.pool.clients.take(torch.tensor([1])), loop.server.s.clone()
    task.s[1] = 1e-300
    report = loop.round()
    loop.pool.close()
    after = loop.pool.clients.take(torch.tensor([1]))
    assert report.rejected == [1]
    assert all(torch.equal(a, b) for a, b in zip(before.named().values(), after.named().values(), strict=True))
    assert float(loop.server.s[1]) == float(s[1])
    assert bool(loop.server.theta.isfinite())


def test_one_active_client_at_a_time_says_nothing_about_differences():
    loop = simulate(tiny_federation(), tiny_model, "selffl", training=WORK, participation=0.17)
    for _ in range(12):
        assert loop.round().active == 1
    figures = loop.evaluate().figures
    loop.pool.close()
    assert float(loop.server.s0) == 0.0
    assert set(figures["steps"].tolist()) <= {0, 4}
    assert bool((figures["raw_steps"] == -1).all())


def test_figures():
    loop = simulate(tiny_federation(), tiny_model, "selffl", training=WORK, participation=0.5, contraction="mean")
    for _ in range(6):
        loop.round()
    common, own = loop.algorithm.figures(loop.server), loop.evaluate().figures
    loop.pool.close()
    assert common["sigma0_sq"] == float(loop.server.s0) > 0
    assert common["clients_with_variance"] == int((own["rounds_active"] >= 2).sum())
    known = own["sigma_m_sq"] >= 0
    torch.testing.assert_close(own["sigma_m_sq"][known], loop.server.s[known], rtol=1e-6, atol=0)
    decided = own["raw_steps"] >= 0
    assert bool(decided.any())
    assert bool((own["steps"][decided] >= 1).all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"var_m": "median"}, r"selffl: var_m must be mean \| sum; got 'median'"),
        ({"domain": "some"}, r"selffl: domain must be active \| all"),
        ({"contraction": "fast"}, r"selffl: contraction must be paper \| gd \| sum \| mean"),
        ({"posterior": "mine"}, r"selffl: posterior must be paper \| exact"),
        ({"l_rule": "x"}, r"selffl: l_rule must be log \| first_order"),
        ({"l_max": 0}, "l_max must be at least 1"),
        ({"l_init": 0}, "l_init must be at least 1"),
        ({"fixed_epochs": 0}, "fixed_epochs must be at least 1"),
        ({"fixed_epochs": 2, "use_steps": False}, "fixed_epochs replaces"),
        ({"smoothing": 0.0}, "smoothing must be in"),
        ({"smoothing": "half"}, "smoothing must be float or participation"),
        ({"r_max": 0.0}, "r_max must be positive"),
        ({"use_init": "perhaps"}, "selffl: use_init must be bool"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_algorithm("selffl", WORK, options)


def test_known_variances_need_a_task_that_knows_them():
    with pytest.raises(ConfigError, match="known_variances=true needs a task that knows its variances"):
        simulate(tiny_federation(), tiny_model, "selffl", known_variances=True)


def test_what_leaves_a_client_beside_gradients_is_declared():
    count = torch.tensor([3, 50])
    profile = make_algorithm("selffl", WORK).privacy(count)
    assert profile is not None
    assert profile.per_round is not None
    assert {k: v.tolist() for k, v in profile.per_round.items()} == {1: [40, 40]}
    assert not profile.uncovered
    by_examples = make_algorithm("selffl_steps", WORK, {"l_max": None}).privacy(count)
    assert by_examples is not None
    assert by_examples.per_round is None
    assert list(by_examples.uncovered.values()) == ["use_agg = true"]
    fixed = make_algorithm("selffl", WORK, {"fixed_epochs": 2}).privacy(count)
    assert fixed is not None
    assert fixed.per_round is not None
    assert fixed.per_round[1].tolist() == [2, 20]


def test_only_the_control_is_a_plain_average():
    assert not make_algorithm("selffl_control", WORK).single_updates
    for name in ("selffl", "selffl_init", "selffl_steps", "selffl_agg", "selffl_augmented", "selffl_cluster"):
        assert make_algorithm(name, WORK).single_updates
    parts = {"use_init": False, "use_steps": False, "use_agg": False}
    assert make_algorithm("selffl_augmented", WORK, parts).single_updates  # it sends two models


def test_the_control_estimates_no_variance_between_clients():
    loop = simulate(tiny_federation(), tiny_model, "selffl_control", training=WORK)
    loop.round()
    figures = loop.algorithm.figures(loop.server)
    loop.pool.close()
    assert float(loop.server.s0) == 0.0
    assert "sigma0_sq" not in figures
