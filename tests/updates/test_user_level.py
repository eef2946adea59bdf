"""User-level privacy: the noisy sum by hand, whole runs, what one client can change, and epsilon by other ways."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import AnyAlgorithm, AveragingAlgorithm, RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.common.message_shape import update_template
from kinfed.algorithms.fedavg import FedAvg
from kinfed.config.config_reading import make_config
from kinfed.core.tree import Tree
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.privacy.ledger import Event
from kinfed.privacy.noise import Secret, new_nonce, seeded_noise
from kinfed.records.compare import same_results
from kinfed.report import build
from kinfed.runs.method_run import Interrupted
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.tuning.tuner import tune
from kinfed.updates.promises import ClientSampling, UserPrivacy
from kinfed.updates.robust import Median, RobustAverage
from kinfed.updates.stages import Updates
from kinfed.updates.user_level import UserLevel

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

from kinfed.privacy.accountant import fixed_size_epsilon, fixed_size_renyi_epsilon, renyi_epsilon

TRAINING = LocalTraining(batch=5, steps=2, lr=0.05)
SIZES = (3, 4, 16, 7, 13, 10)
DELTA = 1e-5
WITHOUT_BOUNDS = UserPrivacy(noise=0.0, clip=1e6)


@dataclass
class Pair(Tree):
    """An update of two averaged fields and a weight."""

    a: Tensor  # [n, 2]
    b: Tensor  # [n, 1, 2]
    count: Tensor  # [n]


def pairs(*rows: list[float]) -> Pair:
    table = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)
    return Pair(table[:, :2], table[:, None, 2:], torch.full((len(table),), 7.0))


def user_level(privacy: UserPrivacy, expected: float = 2.0, seed: int = 0, **changes: Any) -> UserLevel:
    given_values = {"template": pairs([0, 0, 0, 0]), "averages": ("a", "b"), "source": seeded_noise(seed)}
    return UserLevel(
        privacy, **(given_values | changes), sampling=ClientSampling("poisson", 0.5), expected=expected,
        rounds=range(1, 11),
    )  # fmt: skip


def as_row(up: Any) -> list[float]:
    return [*up.a.flatten().tolist(), *up.b.flatten().tolist()]


# ---- one round by hand ----


def test_updates_are_clipped_as_one_vector_and_divided_by_the_expected_number() -> None:
    up = pairs([3, 0, 0, 4], [0.3, 0, 0, 0.4], [0, 0, 12, 5])  # norms 5, 0.5, 13
    mean = user_level(UserPrivacy(noise=0.0, clip=1.0), expected=4.0).mean(up, 1)
    torch.testing.assert_close(
        torch.tensor(as_row(mean)), torch.tensor([0.6 + 0.3, 0, 12 / 13, 0.8 + 0.4 + 5 / 13]) / 4
    )
    assert mean.a.shape == (2,)
    assert mean.b.shape == (1, 2)
    assert mean.count is None


def test_noise_has_the_deviation_that_epsilon_is_computed_from() -> None:
    wide = DeltaUp(torch.zeros(1, 100_001), None)
    level = user_level(UserPrivacy(noise=1.5, clip=2.0), 10.0, template=wide, averages=("delta",))
    one, two = level.mean(wide, 1).delta, level.mean(wide, 2).delta
    assert float(one.std()) == pytest.approx(1.5 * 2.0 / 10, rel=0.01)
    assert abs(float((one * two).mean())) < 0.01 * float(one.std()) ** 2 * 2  # rounds have noise of their own
    again = user_level(UserPrivacy(noise=1.5, clip=2.0), 10.0, template=wide, averages=("delta",))
    assert torch.equal(again.mean(None, 1).delta, one)  # nobody came: the same noise about zero
    other = user_level(UserPrivacy(noise=1.5, clip=2.0), 10.0, 1, template=wide, averages=("delta",))
    assert not torch.equal(other.mean(wide, 1).delta, one)


def test_noise_may_come_from_a_secret_instead_of_the_seed() -> None:
    wide = DeltaUp(torch.ones(1, 10_000), None)
    noises = []
    for _ in range(2):
        source = Secret.new().draws(b"run", new_nonce()).noise
        level = user_level(UserPrivacy(noise=1.0, clip=1e-6), 1.0, template=wide, averages=("delta",), source=source)
        noises.append(level.mean(wide, 1).delta)
    assert float(noises[0].std()) == pytest.approx(1e-6, rel=0.05)
    assert not torch.equal(*noises)


def test_the_norm_follows_the_quantile() -> None:
    level = user_level(UserPrivacy(noise=0.0, clip=1.0, quantile=0.5), expected=4.0)
    level.mean(pairs([3, 0, 0, 4], [0, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 0.1, 0]), 1)  # 3 of 4 lie within 1
    assert level.clip == pytest.approx(math.exp(-0.2 * (0.75 - 0.5)))
    before = level.clip
    level.mean(None, 2)  # nobody: a share of one half, by the shift that makes a client weigh ±1/2
    assert level.clip == pytest.approx(before)


def test_the_norm_settles_at_the_quantile_under_noise() -> None:
    table = torch.zeros(100, 4)
    table[:, 0] = torch.arange(1, 101) / 10  # norms 0.1 to 10; their 0.3 quantile is 3
    up = Pair(table[:, :2], table[:, None, 2:], torch.ones(100))
    level = user_level(UserPrivacy(noise=1.0, clip=0.1, quantile=0.3), expected=100.0)
    for number in range(1, 121):
        level.mean(up, number)
    assert 2.0 < level.clip < 4.5


@given(st.floats(0.1, 50), st.floats(1, 1000))
def test_sum_and_count_together_have_the_noise_that_is_accounted(noise: float, expected: float) -> None:
    """A client moves the sum by C and the count by 1/2: distances in units of noise add up as squares."""
    level = user_level(UserPrivacy(noise=noise, quantile=0.5), expected)
    assert 1 / level.sum_noise**2 + 0.25 / level.count_noise**2 == pytest.approx(1 / noise**2)
    assert noise <= level.sum_noise <= 1.1548 * noise


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_the_sum_gets_its_noise_and_the_count_its_own(quantile: float | None) -> None:
    """With draws of one in the place of normal ones: (1/E) σ C in every coordinate, and σ_b in the count."""
    level = user_level(
        UserPrivacy(noise=2.0, clip=3.0, quantile=quantile), expected=4.0, source=lambda name, at: torch.ones_like(at)
    )
    assert (level.sum_noise > 2.05) == (quantile is not None)
    assert as_row(level.mean(None, 1)) == pytest.approx([level.sum_noise * 3.0 / 4.0] * 4)
    clip = 3.0 if quantile is None else 3.0 * math.exp(-0.2 * (0.5 + level.count_noise / 4.0 - 0.5))
    assert level.clip == pytest.approx(clip)


@given(st.permutations(range(4)), st.floats(0.1, 10))
def test_the_order_of_clients_does_not_matter(order: list[int], clip: float) -> None:
    up = pairs([3, 0, 0, 4], [0.3, 1, 0, 0.4], [0, 0, 12, 5], [1e-3, 0, 0, 0])
    mean = as_row(user_level(UserPrivacy(noise=0.5, clip=clip)).mean(up, 1))
    same = as_row(user_level(UserPrivacy(noise=0.5, clip=clip)).mean(up.take(torch.tensor(order)), 1))
    assert same == pytest.approx(mean, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4), st.floats(0.01, 100))
def test_a_client_moves_the_mean_by_the_norm_over_the_expected_number_at_most(row: list[float], clip: float) -> None:
    others = [[3.0, 0, 0, 4], [0.3, 1, 0, 0.4]]
    privacy = UserPrivacy(noise=1.0, clip=clip)
    without = torch.tensor(as_row(user_level(privacy, 5.0).mean(pairs(*others), 1)), dtype=torch.float64)
    with_it = torch.tensor(as_row(user_level(privacy, 5.0).mean(pairs(*others, row), 1)), dtype=torch.float64)
    assert float((with_it - without).norm()) <= clip / 5 * (1 + 1e-5)


def test_an_update_that_is_not_finite_adds_nothing() -> None:
    good, bad = [0.3, 0, 0, 0.4], [math.nan, 0, math.inf, 0]
    level = user_level(UserPrivacy(noise=0.0))
    assert as_row(level.mean(pairs(good, bad), 1)) == as_row(level.mean(pairs(good), 2))


# ---- in the server loop ----


def method(name: str, **options: Any) -> AnyAlgorithm:
    return make_algorithm(name, TRAINING, ({"own": "*.bias"} if name == "fedbn" else {}) | options)


class Hostile(LocalPool):
    """Client 0 sends a thousand million times its update, and more."""

    def train(self, *arguments: Any, **more: Any) -> Updates:
        reply = super().train(*arguments, **more)
        if 0 in reply.ids.tolist():
            row = int((reply.ids == 0).nonzero())
            reply.rows.delta[row] = 1e9 * reply.rows.delta[row] + 1e9
        return reply


@contextmanager
def loop(
    algorithm: AnyAlgorithm,
    privacy: UserPrivacy | None,
    schedule: Schedule | None = None,
    *,
    pool: type[LocalPool] = LocalPool,
    chunk: int | None = None,
    data: Federation | None = None,
) -> Iterator[Loop]:
    data, schedule = tiny_federation(SIZES) if data is None else data, schedule or Schedule(0.5)
    if "needs validation" in algorithm.traits:
        data = data.with_validation(0.25, 0)
    task, population, level = make_task(Bench(algorithm).model), data.population(0), None
    if privacy is not None:
        template = update_template(algorithm, task, data, algorithm.init_server(task, population))
        assert isinstance(algorithm, AveragingAlgorithm)
        level = UserLevel(
            privacy, template, algorithm.fields, seeded_noise(0), schedule.client_sampling(len(data)),
            schedule.expected_replies(len(data), keeps_stragglers=False), range(1, 11),
        )  # fmt: skip
    clients = pool(algorithm, task, data, 0, workers=1, chunk=chunk)
    with Loop(algorithm, task, clients, population, schedule, [] if level is None else [level]) as running:
        yield running


def server_after(rounds: int, *settings: Any, **options: Any) -> dict[str, Tensor]:
    with loop(*settings, **options) as running:
        for _ in running.rounds(rounds):
            pass
        return {name: tensor.clone() for name, tensor in running.server.named().items()}


def averaging_methods() -> list[str]:
    names = []
    for name in ALGORITHMS:
        algorithm = method(name)
        by_sums = getattr(algorithm, "adds_up", False)  # they need a model and numbers of their own: test_lmm.py
        if not algorithm.single_updates and not kinfed.algorithms.changes_data(algorithm) and not by_sums:
            names.append(name)
    return names


@pytest.mark.parametrize("name", averaging_methods())
def test_without_noise_and_with_a_wide_norm_it_is_the_mean_with_equal_weights(name: str) -> None:
    data = tiny_federation((8,) * 6)  # weights by examples are equal, too
    if "needs public data" in method(name).traits:
        data = data.with_public(0.25, 0)
    plain = server_after(2, method(name), None, data=data)
    private = server_after(2, method(name), WITHOUT_BOUNDS, data=data)
    for field in plain.keys() - {"s", "others"}:  # variances that Self-FL's control is told and does not use
        torch.testing.assert_close(private[field], plain[field], rtol=1e-5, atol=1e-6)


def test_examples_do_not_weigh() -> None:
    by_examples, equal = (server_after(2, FedAvg(TRAINING, weights=w), WITHOUT_BOUNDS) for w in ("examples", "equal"))
    assert torch.equal(by_examples["w"], equal["w"])


def test_chunks_and_threads_do_not_matter() -> None:
    privacy = UserPrivacy(noise=0.5, clip=0.1, quantile=0.5)
    one = server_after(3, FedAvg(TRAINING), privacy, Schedule(0.5, sampling="poisson"), chunk=1)
    all_at_once = server_after(3, FedAvg(TRAINING), privacy, Schedule(0.5, sampling="poisson"))
    torch.testing.assert_close(one["w"], all_at_once["w"], rtol=1e-5, atol=1e-6)


def test_a_hostile_update_moves_the_server_by_the_norm_over_the_expected_number() -> None:
    privacy = UserPrivacy(noise=0.5, clip=0.1)
    honest = server_after(1, FedAvg(TRAINING), privacy, Schedule(1.0))["w"]
    attacked = server_after(1, FedAvg(TRAINING), privacy, Schedule(1.0), pool=Hostile)["w"]
    distance = float((attacked - honest).double().norm())
    assert 0 < distance <= 2 * 0.1 / len(SIZES) * (1 + 1e-4)  # its honest update was clipped to 0.1, too


def test_a_round_in_which_nobody_comes_is_noised_like_any_other() -> None:
    data = tiny_federation(SIZES)
    schedule = Schedule(0.01, sampling="poisson")
    empty = [number for number in range(1, 4) if not len(schedule.active(0, number, len(data)))]
    assert empty == [1, 2, 3]
    with loop(FedAvg(TRAINING), UserPrivacy(noise=1.0), schedule) as running:
        before = running.server.w.clone()
        report = running.round()
        assert report.active == 0
        assert not torch.equal(running.server.w, before)
        assert running.user_level is not None
        assert running.user_level.spent == 1


def test_what_stays_with_clients_gets_no_noise() -> None:
    """Ditto without a pull: the personal model is local training, whatever happens to the server's."""
    models = []
    for privacy in (None, UserPrivacy(noise=100.0)):
        with loop(method("ditto", lam=0.0), privacy) as running:
            for _ in running.rounds(2):
                pass
            models.append(running.pool.states()["rows.v"])
    assert torch.equal(*models)


def test_poisson_sampling_calls_each_client_on_its_own() -> None:
    schedule = Schedule(0.3, sampling="poisson")
    called = torch.stack(
        [torch.isin(torch.arange(50), schedule.active(0, number, 50)) for number in range(1, 401)]
    ).double()
    assert float(called.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(called.sum(1).var()) == pytest.approx(50 * 0.3 * 0.7, rel=0.2)  # a fixed number would have none
    assert torch.equal(schedule.active(0, 7, 20), (ids := schedule.active(0, 7, 50))[ids < 20])
    with pytest.raises(ConfigError, match=r"sampling must be fixed \| poisson"):
        Schedule(0.5, sampling="both")  # type: ignore[arg-type]


# ---- refusals ----


def with_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(averaging_methods()) - {"glmm", "cox"}))
def test_methods_that_do_more_than_average_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="leave out the method"):
        WITHOUT_BOUNDS.check(name, method(name), make_task(tiny_model))


def test_running_statistics_are_refused_where_they_travel() -> None:
    task = make_task(with_norms)
    with pytest.raises(ConfigError, match="running statistics"):
        WITHOUT_BOUNDS.check("fedavg", method("fedavg"), task)
    WITHOUT_BOUNDS.check("fedbn", make_algorithm("fedbn", TRAINING, {}), task)


@dataclass(frozen=True)
class Choosy(FedAvg):
    def plan(self, server: Any, active: Tensor, round: RoundInfo) -> tuple[Any, Tensor]:
        return server, active[:1]


def test_a_method_that_chooses_its_clients_is_refused() -> None:
    with loop(Choosy(TRAINING), UserPrivacy(noise=1.0)) as running, pytest.raises(ConfigError, match="chooses"):
        running.round()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user_clip": 1.0}, "got neither"),
        ({"user_noise": 1.0, "user_epsilon": 2.0}, "got both"),
        ({"user_noise": -1.0}, "user_noise must be"),
        ({"user_noise": math.nan}, "user_noise must be"),
        ({"user_noise": 1.0, "user_clip": 0.0}, "user_clip must be"),
        ({"user_noise": 1.0, "user_delta": 1.0}, "user_delta"),
        ({"user_noise": 1.0, "user_quantile": 1.0}, "user_quantile"),
        ({"user_noise": 1.0, "pretrain": 1}, "pretrain"),
        ({"user_noise": 1.0, "robust": "median"}, "leave out robust"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(settings=settings)


def test_a_loop_takes_no_robust_rule_beside_it() -> None:
    with loop(FedAvg(TRAINING), UserPrivacy(noise=1.0)) as running, pytest.raises(ConfigError, match="robust"):
        Loop(
            running.algorithm, running.task, running.pool, running.population, running.schedule,
            [*running.stages, RobustAverage(Median(), running.algorithm)],
        )  # fmt: skip


def test_tuning_refuses_it(tmp_path: Path) -> None:
    config = make_config(settings={"user_noise": 1.0, "algorithms": "fedavg"})
    with pytest.raises(ConfigError, match="no account"):
        tune(config, 2, tmp_path / "tuned")


# ---- epsilon ----


def gaussian_delta(e: float, mu: float) -> float:
    """δ(ε) of N(0, 1) against N(mu, 1): Balle and Wang 2018, Theorem 8."""
    return float(stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu))


@pytest.mark.parametrize(("q", "noise"), [(0.1, 2.0), (0.5, 4.0), (0.01, 1.0)])
def test_one_round_of_a_fixed_number_has_the_closed_form(q: float, noise: float) -> None:
    e = optimize.brentq(lambda e: q * gaussian_delta(e, 2 / noise) - DELTA, 1e-9, 100)
    expected = math.log1p(q * math.expm1(e))
    assert fixed_size_epsilon(q, 1, noise, DELTA) == pytest.approx(expected, rel=2e-3)
    assert fixed_size_epsilon(q, 1, noise, DELTA) >= expected
    assert ClientSampling("fixed", q).epsilon(noise, 1, DELTA) == fixed_size_epsilon(q, 1, noise, DELTA)


@pytest.mark.parametrize(
    ("q", "rounds", "noise"), [(0.1, 100, 8.0), (0.5, 40, 4.0), (0.01, 1000, 1.0), (0.02, 50, 3.0)]
)
def test_rounds_of_a_fixed_number_lie_between_two_other_accounts(q: float, rounds: int, noise: float) -> None:
    """Below Renyi accounting of the same (an upper bound), and above Poisson sampling at distance 2, add or remove one
    (whose rounds are dominated by these)."""
    here = fixed_size_epsilon(q, rounds, noise, DELTA)
    assert ClientSampling("poisson", q).epsilon(noise / 2, rounds, DELTA) <= here * (1 + 1e-3)
    assert here < fixed_size_renyi_epsilon(q, rounds, noise, DELTA)


def test_nearly_all_clients_in_every_round_are_a_plain_gaussian_of_distance_two() -> None:
    plain = optimize.brentq(lambda e: gaussian_delta(e, 2 * math.sqrt(20) / 10.0) - DELTA, 0, 100)
    assert fixed_size_epsilon(1 - 1e-9, 20, 10.0, DELTA) == pytest.approx(plain, rel=2e-3)


def test_where_all_are_called_a_client_is_added_or_removed() -> None:
    plain = optimize.brentq(lambda e: gaussian_delta(e, math.sqrt(20) / 10.0) - DELTA, 0, 100)
    for scheme in ("fixed", "poisson"):
        everyone = ClientSampling(scheme, 1.0)  # type: ignore[arg-type]
        assert everyone.epsilon(10.0, 20, DELTA) == pytest.approx(plain, rel=2e-3)
        assert everyone.neighbours == "add or remove one client"
    assert ClientSampling("fixed", 0.5).neighbours == "replace one client"


def test_poisson_rounds_agree_with_opacus() -> None:
    opacus = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    accountant = opacus.RDPAccountant()
    accountant.history = [(1.2, 0.1, 150)]
    sampling = ClientSampling("poisson", 0.1)
    assert sampling.renyi_epsilon(1.2, 150, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-2)
    assert sampling.epsilon(1.2, 150, DELTA) < accountant.get_epsilon(DELTA)
    tight = opacus.PRVAccountant()  # Gopi, Lee, Wutschitz 2021: by Fourier transforms of another discretization
    tight.history = accountant.history
    assert sampling.epsilon(1.2, 150, DELTA) == pytest.approx(tight.get_epsilon(DELTA), rel=5e-3)


def test_a_published_setting() -> None:
    """McMahan et al. 2018: 763,430 users, 5,000 expected in a round, noise 1, 5,000 rounds: ε = 4.634 at δ = 1e-9, by
    moments of whole orders (Abadi et al. 2016), which are written out here. Finer orders and PLD give less."""
    q, rounds, delta = 5000 / 763_430, 5000, 1e-9

    def moments(order: int) -> float:
        terms = [
            math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / 2) for k in range(order + 1)
        ]
        return rounds * math.log(math.fsum(terms)) / (order - 1) + math.log(1 / delta) / (order - 1)

    printed = min(moments(order) for order in range(2, 33))
    assert printed == pytest.approx(4.634, abs=5e-4)
    assert renyi_epsilon((Event(q, 1, rounds),), 1.0, delta, "2017") == pytest.approx(printed, rel=0.01)
    sampling = ClientSampling("poisson", q)
    assert sampling.epsilon(1.0, rounds, delta) < sampling.renyi_epsilon(1.0, rounds, delta) < printed


@pytest.mark.parametrize("scheme", ["fixed", "poisson"])
def test_the_noise_for_an_epsilon(scheme: Any) -> None:
    sampling = ClientSampling(scheme, 0.2)
    noise = sampling.noise_for(2.0, 30, DELTA)
    assert sampling.epsilon(noise, 30, DELTA) <= 2.0 < sampling.epsilon(noise * 0.99, 30, DELTA)


# ---- whole runs ----

RUN: dict[str, Any] = {
    "federation": tiny_federation((8,) * 6), "model": tiny_model, "rounds": 4, "steps": 2, "batch": 5, "seeds": (0,),
    "eval_every": 2, "participation": 0.5, "checkpoint_every": 1,
}  # fmt: skip


def test_a_run_says_what_it_promises_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = RUN | {
        "algorithms": "fedavg,ditto,local", "user_epsilon": 4.0, "sampling": "poisson", "user_quantile": 0.5,
        "warm_start": 1,
    }  # fmt: skip
    whole = kinfed.run(**settings, out=tmp_path / "whole")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())["results"]
    fedavg, local = summary[0]["user_privacy"], summary[2]["user_privacy"]
    assert fedavg["rounds"] == 5
    assert fedavg["sampling"] == "poisson"
    assert fedavg["rate"] == 0.5
    assert fedavg["epsilon"] == ClientSampling("poisson", 0.5).epsilon(fedavg["noise"], 5, DELTA) <= 4.0
    assert fedavg["epsilon"] < fedavg["epsilon_rdp"]
    assert fedavg["clip"] != 1.0
    assert local["epsilon"] == 0.0
    page = build([tmp_path / "whole"]).read_text()
    assert "Server model private at (ε, δ) = (4, 1e-5) per client" in page
    assert "Personal models stay with their clients" in page
    assert "Nothing leaves the clients" in page

    calls = iter(range(100))
    with pytest.raises(Interrupted):
        kinfed.run(**settings, out=tmp_path / "stopped", should_stop=lambda: next(calls) >= 5)
    resumed = kinfed.run(**settings, out=tmp_path / "stopped", resume=True)
    assert not same_results(tmp_path / "whole", tmp_path / "stopped")
    for ours, theirs in zip(whole.results, resumed.results, strict=True):
        assert ours.server_model is None or torch.equal(ours.server_model, theirs.server_model)


def test_both_kinds_of_privacy_at_once() -> None:
    result = kinfed.run(**RUN, algorithms="fedavg", user_noise=2.0, dp_noise=1.0).results[0]
    assert result.privacy is not None
    assert result.user_privacy is not None
    assert math.isfinite(result.privacy["epsilon_max"])
    assert math.isfinite(result.user_privacy["epsilon"])
    assert result.user_privacy["neighbours"] == "replace one client"


def test_a_checkpoint_without_the_record_is_refused() -> None:
    with loop(FedAvg(TRAINING), UserPrivacy(noise=1.0)) as private, loop(FedAvg(TRAINING), None) as plain:
        plain.round()
        with pytest.raises(CheckpointError, match="user-level"):
            private.load(1, plain.state())
