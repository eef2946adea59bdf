"""MOCHA against hand-worked steps, plain SVM solvers and its own dual; its mean-regularized namesake at its limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_bench import deep, linear
from sklearn.svm import LinearSVC
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import check_algorithm_settings
from kinfed.algorithms.mocha import Mocha, coordinates, joined, linear_layer, relations
from kinfed.algorithms.mocha_deep import MochaDeep
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError, ModelError
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, check_variant, tiny_federation
from kinfed.testing.workbench import SEED, outcome

WORK = LocalTraining(batch=5, steps=5)
SIZES = (3, 9, 5, 14)
P = 15  # of the linear model: 4 inputs, 3 classes


@contextmanager
def running(
    method: Any, federation: Federation | None = None, model: Any = linear, **schedule: float
) -> Iterator[Loop]:
    bench = Bench(method, federation=federation or tiny_federation(SIZES), model=model)
    with bench.loop(Schedule(**schedule)) as loop:
        yield loop


def data_of(loop: Loop, client: int) -> tuple[Tensor, Tensor]:
    """x [N, 5] with a feature of 1, y [N, 3] = ±1, in float64 and in the order of the client's list."""
    federation = loop.pool.federation
    rows = federation.train[client]
    x = torch.cat([federation.features.raw[rows], torch.ones(len(rows), 1)], 1).double()
    return x, 2.0 * nn.functional.one_hot(federation.labels[rows], 3).double() - 1


def beta_of(loop: Loop, client: int) -> Tensor:
    return loop.pool.clients.take(torch.tensor([client])).named()["beta"][0].double()


def dual_sum(loop: Loop, client: int) -> Tensor:
    """b_t [3, 5] from the client's dual variables, by a plain formula."""
    x, y = data_of(loop, client)
    beta = beta_of(loop, client)
    assert (beta[len(x) :] == 0).all()
    assert bool(((beta >= 0) & (beta <= 1)).all())
    return (beta[: len(x)] * y).T @ x / len(x)


def wide(loop: Loop, rows: Tensor) -> Tensor:
    """[n, 3, 5] weights and biases of rows [n, P]."""
    return joined(linear_layer(loop.task), rows).double()


def objectives(loop: Loop, lam: float) -> tuple[float, float]:
    """(primal, dual) in float64 from the clients' dual variables and the server's Σ."""
    clients = range(loop.population.num_clients)
    sigma = loop.server.named()["sigma"]
    b = torch.stack([dual_sum(loop, t).flatten() for t in clients])
    w = (sigma @ b / lam).reshape(len(b), 3, 5)
    penalty = float((b * (sigma @ b)).sum()) / (2 * lam)
    loss = gain = 0.0
    for t in clients:
        x, y = data_of(loop, t)
        loss += float((1 - y * (x @ w[t].T)).clamp_min(0).mean(0).sum())
        gain += float(beta_of(loop, t)[: len(x)].mean(0).sum())
    return loss + penalty, gain - penalty


# MOCHA


def test_one_coordinate_step_by_hand() -> None:
    """x = (3, 4), one client, λ = 0.1, Σ = 1: q = 10, β = 1 / (10 · 25), b = β x, w = b / λ, and ⟨w, x⟩ = 1."""
    data = Federation.from_arrays([[3.0, 4.0], [0.0, 0.0]], [0, 0], [0, 0], test_rows=[False, True], num_classes=2)
    method = Mocha(training=LocalTraining(batch=1, steps=1), lam=0.1)
    with running(method, data, lambda: nn.Sequential(nn.Linear(2, 2, bias=False))) as loop:
        assert loop.server.named()["q"].tolist() == [10.0]
        loop.round()
        torch.testing.assert_close(beta_of(loop, 0)[0], torch.tensor([0.004, 0.004], dtype=torch.float64))
        server = loop.server.named()
        torch.testing.assert_close(server["b"], torch.tensor([[0.012, 0.016, -0.012, -0.016]]))
        torch.testing.assert_close(server["w"], torch.tensor([[0.12, 0.16, -0.12, -0.16]]))


def test_two_steps_on_one_example_change_nothing_the_second_time() -> None:
    """Every step is exact, so the second finds nothing to do."""
    data = tiny_federation((1, 1))
    with (
        running(Mocha(training=LocalTraining(batch=1, steps=1)), data) as one,
        running(Mocha(training=LocalTraining(batch=1, steps=9)), data) as nine,
    ):
        one.round()
        nine.round()
        torch.testing.assert_close(nine.server.named()["b"], one.server.named()["b"])


@pytest.mark.parametrize("schedule", [{}, {"participation": 0.5, "dropout": 0.3, "stragglers": 0.5}])
def test_models_are_what_the_dual_variables_say(schedule: dict[str, float]) -> None:
    """w_t = (1/λ) Σ_t' Σ_tt' b_t' with b from the clients' own variables, whoever took part, after Σ steps too."""
    method = Mocha(training=WORK, lam=0.02, sigma_every=3)
    with running(method, **schedule) as loop:
        for _ in range(7):
            loop.round()
        server = loop.server.named()
        b = torch.stack([dual_sum(loop, t) for t in range(4)])
        torch.testing.assert_close(wide(loop, server["b"]), b, rtol=1e-5, atol=1e-6)
        w = torch.einsum("ts,scd->tcd", server["sigma"], b) / 0.02
        torch.testing.assert_close(wide(loop, server["w"]), w, rtol=1e-4, atol=1e-5)
        assert not torch.equal(server["sigma"], torch.eye(4, dtype=torch.float64) / 4)
        assert float(server["sigma"].trace()) == pytest.approx(1)


@pytest.mark.parametrize("schedule", [{}, {"participation": 0.5, "stragglers": 0.5}])
def test_the_dual_never_falls_while_relations_stay(schedule: dict[str, float]) -> None:
    """ρ makes local steps safe to add up. Relations are learned once, in round 4, and are strong then."""
    lam, rounds = 0.02, 14
    with running(Mocha(training=WORK, lam=lam, sigma_every=4), **schedule) as loop:
        for _ in range(4):
            loop.round()
        loop.algorithm = replace(loop.algorithm, sigma_every=0)
        assert loop.algorithm.figures(loop.server)["rho"] > 1.3
        duals = [objectives(loop, lam)[1]]
        first = objectives(loop, lam)
        for _ in range(rounds):
            loop.round()
            duals.append(objectives(loop, lam)[1])
        last = objectives(loop, lam)
        assert all(after >= before - 1e-6 for before, after in itertools.pairwise(duals))
        assert last[0] - last[1] < 0.8 * (first[0] - first[1])
        assert last[0] >= last[1] - 1e-6


def test_a_round_without_replies_does_not_skip_the_step_of_relations() -> None:
    """Σ moves with the second round that somebody replied in, which is the third."""

    class LosesTheSecond(Schedule):
        def lost(self, seed: int, round: int, ids: Tensor) -> Tensor:
            return torch.full(ids.shape, round == 2)

    bench = Bench(Mocha(training=WORK, sigma_every=2), federation=tiny_federation(SIZES), model=linear)
    with bench.loop(LosesTheSecond(dropout=0.5)) as loop:
        unrelated = loop.server.named()["sigma"]
        moved = []
        for _ in range(3):
            loop.round()
            moved.append(not torch.equal(loop.server.named()["sigma"], unrelated))
        assert moved == [False, False, True]


def test_the_duality_gap_closes() -> None:
    with running(Mocha(training=LocalTraining(batch=14, steps=8), lam=0.05, sigma_every=0)) as loop:
        gaps = []
        for _ in range(60):
            loop.round()
            primal, dual = objectives(loop, 0.05)
            gaps.append(primal - dual)
        assert min(gaps) > -1e-6
        assert gaps[-1] < 1e-4 < gaps[0]


def noisy() -> Federation:
    """Labels that no linear model fits: some examples stay on the wrong side, with β = 1."""
    data = tiny_federation(SIZES)
    wrong = (torch.arange(len(data.labels)) % 4 == 0).to(torch.int64)
    return replace(data, labels=(data.labels + wrong) % 3)


def test_unrelated_clients_are_plain_support_vector_machines() -> None:
    """With Σ = I/m a client solves min (1/2) ‖w‖² + 1/(λ m n) Σ hinge, class by class."""
    lam = 0.05
    with running(Mocha(training=LocalTraining(batch=14, steps=8), lam=lam, sigma_every=0), noisy()) as loop:
        for _ in range(60):
            loop.round()
        assert max(float(beta_of(loop, t).max()) for t in range(4)) == 1
        w = wide(loop, loop.server.named()["w"]).numpy()
        for t, size in enumerate(SIZES):
            x, y = (a.numpy() for a in data_of(loop, t))
            for c in range(3):
                if len(np.unique(y[:, c])) == 1:
                    continue
                svm = LinearSVC(loss="hinge", C=1 / (lam * 4 * size), fit_intercept=False, tol=1e-8, max_iter=200_000)
                svm.fit(x, y[:, c])
                np.testing.assert_allclose(w[t, c], svm.coef_[0], atol=1e-2)
                ours, theirs = (
                    np.maximum(1 - y[:, c] * (x @ v), 0).mean() + lam * 4 / 2 * v @ v for v in (w[t, c], svm.coef_[0])
                )
                assert ours == pytest.approx(theirs, abs=1e-4)


def test_relations_by_hand() -> None:
    w = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    everyone = torch.tensor([True, True])
    torch.testing.assert_close(relations(w, everyone), torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)))
    same = torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        relations(same, everyone), torch.full((2, 2), 0.5, dtype=torch.float64), atol=1e-6, rtol=0
    )
    opposed = relations(torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64), everyone)
    assert float(opposed[0, 1]) == pytest.approx(-0.5, abs=1e-6)
    # The third client has not replied: it keeps 1/3 alone, the others share 2/3 as before.
    third = relations(torch.cat([w, torch.zeros(1, 2, dtype=torch.float64)]), torch.tensor([True, True, False]))
    torch.testing.assert_close(third, torch.diag(torch.tensor([1.5, 0.5, 1.0], dtype=torch.float64)) / 3)
    nobody = relations(torch.zeros(2, 2, dtype=torch.float64), everyone)
    assert torch.equal(nobody, torch.eye(2, dtype=torch.float64) / 2)


@given(st.integers(1, 6), st.integers(0, 99))
def test_relations_are_positive_definite_with_trace_one(clients: int, seed: int) -> None:
    w = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, 3)))  # rank 3: some eigenvalues are zero
    sigma = relations(w, torch.ones(clients, dtype=torch.bool))
    assert float(sigma.trace()) == pytest.approx(1)
    assert float(torch.linalg.eigvalsh(sigma).min()) > 0.5e-7


def contrary() -> Federation:
    """Clients 0-3 and 4-7 give opposite labels to like examples; five examples each to train on."""
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(8), 45)
    x = numbers.normal(size=(len(owner), 4))
    y = (x @ np.array([1.0, -1.0, 0.5, 0.0]) > 0) ^ (owner >= 4)
    return Federation.from_arrays(x, y.astype(int), owner, test_rows=np.tile(np.arange(45) >= 5, 8), num_classes=2)


def test_like_clients_are_found_and_help_each_other() -> None:
    def accuracy(sigma_every: int) -> tuple[float, Tensor]:
        with running(Mocha(training=LocalTraining(batch=5, steps=4), lam=0.01, sigma_every=sigma_every), contrary(),
                     lambda: nn.Sequential(nn.Linear(4, 2))) as loop:  # fmt: skip
            for _ in range(30):
                loop.round()
            score = loop.evaluate().personal
            assert score is not None
            return float(score.correct.sum() / score.count.sum()), loop.server.named()["sigma"]

    alone, _ = accuracy(0)
    together, sigma = accuracy(5)
    assert together > alone + 0.05
    assert float(sigma[:4, :4].min()) > 0.01 > -0.01 > float(sigma[:4, 4:].mean())


def test_bytes_and_width_of_states() -> None:
    """Down w_t and q_t, up b_t; states are as wide as the largest client even where only small ones were called."""
    with running(Mocha(training=WORK), participation=0.5) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (2 * 4 * (P + 1), 2 * 4 * P)
        assert loop.pool.clients.take(torch.tensor([0])).named()["beta"].shape == (1, max(SIZES), 3)


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 20)), min_size=1, max_size=4))
def test_coordinates_visit_every_example_once_per_pass(clients: list[tuple[int, int]]) -> None:
    count, steps = (torch.tensor(values) for values in zip(*clients, strict=True))
    part = tiny_federation(tuple(count.tolist())).cohort(torch.arange(len(count)), 1, 2).train
    place = coordinates(part, steps)
    for row, n, s in zip(place.tolist(), count.tolist(), steps.tolist(), strict=True):
        visited = row[:s]
        for begin in range(0, s, n):
            some = visited[begin : begin + n]
            assert len(set(some)) == len(some)
            assert len(some) < n or sorted(some) == list(range(n))
    alone = part.take(slice(0, 1))  # whoever else is asked about
    assert coordinates(alone, steps[:1])[0].tolist() == place[0, : int(steps[0])].tolist()


def test_coordinate_steps_are_the_examples_of_the_local_work() -> None:
    part = tiny_federation((3, 20)).cohort(torch.tensor([0, 1]), 1, 1).train
    steps = Mocha(training=LocalTraining(batch=5, steps=4))
    assert steps._num_coordinates(part).tolist() == [12, 20]
    epochs = Mocha(training=LocalTraining(batch=5, epochs=2, steps=None))
    assert epochs._num_coordinates(part).tolist() == [6, 40]
    slow = replace(part, effort=torch.tensor([0.1, 0.5]))
    assert epochs._num_coordinates(slow).tolist() == [1, 20]


def test_what_mocha_cannot_do_is_refused() -> None:
    clients = tiny_federation(SIZES).population(SEED)
    with pytest.raises(ModelError, match=r"linear models.*mlr.*mocha_deep"):
        Mocha().check(make_task(deep), clients)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square()

    with pytest.raises(ModelError, match="layers layer"):
        Mocha().check(make_task(Own), clients)
    task = make_task(linear)
    Mocha().check(task, clients)
    task = task.starting_at(task.init(0))
    with pytest.raises(ConfigError, match="warm start"):
        Mocha().check(task, clients)
    for options, match in (
        ({"lam": 0.0}, "lam must be positive"),
        ({"lam": float("inf")}, "lam must be positive"),
        ({"sigma_every": -1}, "sigma_every"),
        ({"augment": "flip"}, "dual variable"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_algorithm("mocha", WORK, options)
    with pytest.raises(ConfigError, match="momentum"):
        check_algorithm_settings(make_algorithm("mocha", WORK, {"momentum": 0.9}), make_task(linear), clients)


def test_relations_of_many_clients_stay_out_of_the_journal() -> None:
    few, many = (
        Mocha().init_server(make_task(linear), tiny_federation((1,) * count, test=0).population(1)) for count in (3, 41)
    )
    assert Mocha().figures(few)["relations"].shape == (3, 3)
    assert Mocha().figures(many).keys() == {"rho", "own_share"}


# The mean-regularized variant


def models(loop: Loop) -> Tensor:
    return loop.pool.clients.take(torch.arange(loop.population.num_clients)).named()["w"]


def test_without_pulls_it_is_local_training() -> None:
    def personal(name: str, options: dict[str, Any]) -> Tensor:
        bench = Bench(make_algorithm(name, WORK, options))
        return bench.run(rounds=5)["personal models"]

    assert torch.equal(personal("mocha_deep", {"lam1": 0, "lam2": 0}), personal("local", {}))
    assert torch.equal(personal("mocha_deep", {"lam1": 0, "lam2": 0, "learn_omega": True}), personal("local", {}))
    assert not torch.equal(personal("mocha_deep", {"lam1": 0, "lam2": 0.1}), personal("local", {}))


def test_a_deep_step_by_hand() -> None:
    """w_i ← w_i − η (∇f_i(w_i) + 2 λ₁ w_i + 2 λ₂ (w_i − w̄)) in the second round, when models differ."""
    lr, lam1, lam2 = 0.1, 0.03, 0.2
    method = MochaDeep(training=LocalTraining(lr=lr, batch=100, steps=1), lam1=lam1, lam2=lam2)
    with running(method) as loop:
        loop.round()
        before = models(loop).clone()
        mean = before.mean(0)
        torch.testing.assert_close(loop.server.named()["models"], mean[None])
        loop.round()
        for i, after in enumerate(models(loop)):
            rows = loop.pool.federation.train[i]
            x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
            w = before[i].clone().requires_grad_()
            loss = nn.functional.cross_entropy(x @ w[:12].reshape(3, 4).T + w[12:], y)
            (g,) = torch.autograd.grad(loss + lam1 * w.square().sum() + lam2 * (w - mean).square().sum(), w)
            torch.testing.assert_close(after, before[i] - lr * g, rtol=1e-5, atol=1e-6)


def test_the_mean_is_that_of_all_clients_as_last_known() -> None:
    with running(MochaDeep(training=WORK), participation=0.5, dropout=0.3) as loop:
        for _ in range(6):
            loop.round()
        mean = models(loop).mean(0, keepdim=True)
        torch.testing.assert_close(loop.server.named()["models"], mean, rtol=1e-5, atol=1e-6)


def test_learned_relations_pull_like_the_gradient_of_the_penalty() -> None:
    """2 λ₂ Ω_ii (w_i − c_i) is the gradient of λ₂ tr(W Ω Wᵀ) in w_i, and Ω the inverse root of the Gram matrix."""
    method = MochaDeep(training=WORK, lam1=0.0, lam2=0.05, learn_omega=True, omega_floor=0.2)
    with running(method, participation=0.75) as loop:
        for _ in range(4):
            loop.round()
        server = loop.server.named()
        torch.testing.assert_close(server["models"], models(loop), rtol=1e-5, atol=1e-6)
        w = server["models"].double()
        value, vector = torch.linalg.eigh(w @ w.T)
        root = value.clamp_min(0).sqrt()
        omega = vector @ torch.diag(1 / (root / root.mean()).clamp_min(0.2)) @ vector.T
        torch.testing.assert_close(server["omega"], omega)
        assert float(torch.linalg.eigvalsh(omega).max()) <= 5 + 1e-9
        down = loop.algorithm.download(loop.server, torch.arange(4))
        strength, center = loop.algorithm._proximal(down)
        w.requires_grad_()
        (g,) = torch.autograd.grad(0.05 * torch.trace(w.T @ omega @ w), w)
        torch.testing.assert_close(strength[:, None] * (w.detach().float() - center), g.float(), rtol=1e-4, atol=1e-5)


def test_bytes_of_the_deep_variant() -> None:
    for learn, extra in ((False, 0), (True, 1)):
        with running(MochaDeep(training=WORK, learn_omega=learn), participation=0.5) as loop:
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (2 * 4 * (P + extra), 2 * 4 * P)


def test_one_client_alone_has_learned_relations() -> None:
    with running(MochaDeep(training=WORK, learn_omega=True), tiny_federation((5,))) as loop:
        loop.round()
        loop.round()
        assert all(bool(torch.isfinite(tensor).all()) for tensor in outcome(loop).values())


def test_learned_relations_keep_the_contract() -> None:
    check_variant(MochaDeep(training=WORK, learn_omega=True))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lam1": -1}, "lam1 must be at least 0"),
        ({"lam2": -0.1}, "lam2 must be at least 0"),
        ({"lam2": 30}, "overshoot"),
        ({"lam2": 2.5, "learn_omega": True}, "overshoot"),
        ({"omega_floor": 0}, "omega_floor"),
        ({"learn_omega": "maybe"}, "learn_omega must be bool"),
    ],
)
def test_bad_options_of_the_deep_variant(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_algorithm("mocha_deep", WORK, options)
