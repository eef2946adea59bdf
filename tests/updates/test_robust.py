"""Robust averages: hand-worked cases, what each rule promises against any hostile rows, and whole runs under attack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp as Up
from kinfed.algorithms.fedavg import FedAvg
from kinfed.config.config_reading import make_config
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.updates.robust import RULES, Clip, Krum, Median, RobustAverage, Rule, TrimmedMean
from kinfed.updates.screening import Screening, UpdateSpec
from kinfed.updates.stages import Stage, Updates

WORK = LocalTraining(batch=5, steps=4)
SEED = 3


def rows(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# ---- by hand ----


def test_the_median_is_that_of_every_coordinate() -> None:
    assert Median()(rows([1, 9], [2, 8], [100, -7])).tolist() == [2, 8]
    assert Median()(rows([1, 0], [2, 0], [4, 1], [100, 1])).tolist() == [3, 0.5]  # between the two in the middle
    assert Median()(rows([5, 6])).tolist() == [5, 6]


def test_the_trimmed_mean_leaves_out_both_ends_of_every_coordinate() -> None:
    five = rows([1, 50], [2, 10], [3, 20], [4, 30], [1000, -900])
    assert TrimmedMean(0.2)(five).tolist() == [3, 20]  # (2 + 3 + 4)/3, (10 + 20 + 30)/3
    assert TrimmedMean(0.0)(five).tolist() == five.mean(0).tolist()
    assert TrimmedMean(0.4)(five).tolist() == Median()(five).tolist()


def test_clipping_shortens_long_updates_and_no_others() -> None:
    two = rows([3, 4], [0.3, 0.4])  # norms 5 and 0.5
    torch.testing.assert_close(Clip(1.0)(two), rows([0.45, 0.6])[0])  # ((0.6, 0.8) + (0.3, 0.4))/2
    torch.testing.assert_close(Clip(10.0)(two), two.mean(0))
    three = rows([2, 0], [0, 1], [-50, 0])
    torch.testing.assert_close(Clip()(three), rows([0.0, 1 / 3])[0])  # at the median norm 2: (2,0), (0,1), (−2,0)
    assert Clip()(torch.zeros(3, 2)).tolist() == [0, 0]


def test_krum_takes_the_updates_with_the_nearest_neighbours() -> None:
    # n = 5, f = 1: scores are sums over the 2 nearest. 0, 1, 2 lie together; 3 is away from them, 4 far away.
    five = rows([0, 0], [1, 0], [0, 1], [4, 4], [-90, 0])
    assert Krum(hostile=1, keep=1)(five).tolist() == [0, 0]  # 1 + 1, against 1 + 2 twice, and 25 + 25
    torch.testing.assert_close(Krum(hostile=1)(five), rows([0.5, 0])[0])  # n − f − 2 = 2 of them: rows 0 and 1
    assert Krum(hostile=1).least == 5
    assert Krum(hostile=2, keep=6).least == 10


# ---- what is promised ----

VALUES = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def honest_and_hostile(draw: Any, rule: Rule, most: int = 9) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(max(rule.least, 1), most))
    k = draw(st.integers(0, min(rule.withstands(n), n - 1)))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    honest = torch.randn(n - k, 4, generator=numbers)
    hostile = torch.tensor(draw(st.lists(st.lists(VALUES, min_size=4, max_size=4), min_size=k, max_size=k)))
    return honest, hostile.reshape(k, 4)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.1), TrimmedMean(0.3), TrimmedMean(0.45)], ids=repr)
def test_the_result_stays_within_the_honest_values_of_every_coordinate(rule: Rule) -> None:
    @given(honest_and_hostile(rule))
    def holds(case: tuple[Tensor, Tensor]) -> None:
        honest, hostile = case
        found = rule(torch.cat([hostile, honest]))
        assert bool((found >= honest.min(0).values).all())
        assert bool((found <= honest.max(0).values).all())

    holds()


@given(honest_and_hostile(Clip(1.0)))
def test_each_hostile_client_moves_a_clipped_mean_by_2c_over_n_at_most(case: tuple[Tensor, Tensor]) -> None:
    honest, hostile = case
    n, k = len(honest) + len(hostile), len(hostile)
    good = torch.cat([torch.zeros_like(hostile), honest])
    moved = Clip(1.0)(torch.cat([hostile, honest])) - Clip(1.0)(good)
    assert float(moved.norm()) <= k / n + 1e-5  # from one that sends nothing; 2c/n from one that sent the contrary


@given(st.integers(0, 3), st.integers(0, 10**6), st.floats(100, 1e15))
def test_krum_never_takes_updates_that_are_far_from_all_honest_ones(f: int, seed: int, size: float) -> None:
    numbers = torch.Generator().manual_seed(seed)
    honest = torch.randn(f + 3, 5, generator=numbers)
    far = size * torch.nn.functional.normalize(torch.randn(f, 5, generator=numbers))
    found = Krum(hostile=f)(torch.cat([far, honest]))
    assert bool((found >= honest.min(0).values).all())
    assert bool((found <= honest.max(0).values).all())


@given(st.permutations(range(7)))
def test_the_order_of_clients_does_not_matter(order: list[int]) -> None:
    updates = torch.randn(7, 30, generator=torch.Generator().manual_seed(1))
    for rule in (Median(), TrimmedMean(), Clip(), Clip(1.0), Krum(2)):
        torch.testing.assert_close(rule(updates[order]), rule(updates), rtol=1e-6, atol=1e-7)


def test_wide_updates_are_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = torch.randn(9, 100, generator=torch.Generator().manual_seed(2))
    rules = (Median(), TrimmedMean(), Clip(), Krum(2))
    whole = [rule(updates) for rule in rules]
    monkeypatch.setattr("kinfed.updates.stages.BLOCK", 70)  # 7 columns
    for rule, wanted in zip(rules, whole, strict=True):
        torch.testing.assert_close(rule(updates), wanted, rtol=1e-6, atol=1e-7)


# ---- methods ----


def takes_part(name: str) -> bool:
    try:
        RobustAverage(Median(), make_algorithm(name, WORK))
    except ConfigError:
        return False
    return True


def test_who_takes_a_robust_average_and_who_says_why_not() -> None:
    """Some of each kind; the tests below hold every method to what it declares."""
    assert all(takes_part(name) for name in ("local", "fedavg", "ditto", "fedem", "fedper"))
    assert not any(takes_part(name) for name in ("selffl", "fedfomo", "cgpfl", "mocha"))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not takes_part(name)])
def test_who_does_not_says_why_and_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match="leave out the method or robust"):
        RobustAverage(Median(), make_algorithm(name, WORK))


class _Mean(Median):
    def __call__(self, rows: Tensor) -> Tensor:
        return rows.mean(0, dtype=torch.float64).to(rows.dtype)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if takes_part(name)])
def test_nothing_but_the_mean_of_updates_reaches_the_server(name: str) -> None:
    """What a method says in `averages` is true: with all rows replaced by their mean, its server and models are the
    same, up to rounding and to figures that nothing uses."""
    federation, clients = tiny_federation((6, 6, 6, 6)), 4  # equal weights
    options = {"fedavg_data": {"weights": "equal"}, "fedbn": {"own": "*.bias"}}
    method = make_algorithm(name, WORK, options.get(name, {}))

    def models(rule: Rule | None) -> tuple[Tensor, Tensor | None]:
        stages = [] if rule is None else [RobustAverage(rule, method)]
        with Bench(method, federation=federation).loop(Schedule(), stages=stages) as loop:
            for _ in range(3):
                loop.round()
            server = method.server_models(loop.server)
            own = loop.evaluate(keep_models=True).models
            return own, None if server is None else server.rows(torch.arange(clients))

    for found, wanted in zip(models(_Mean()), models(None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---- runs under attack ----

HOSTILE = (1, 4)  # of seven clients
INFO = RoundInfo(1, Population(9, 0))


@dataclass(frozen=True)
class Attacked(FedAvg):
    """FedAvg in which some clients send something else, and claim a million examples."""

    attack: str = "none"
    first: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        client, up = super().client_update(task, client, down, data)
        delta, count = up.delta.clone(), up.count.clone()
        for row, k in enumerate(data.ids.tolist()):
            self.first.setdefault(k, delta[row].clone())
            if k in HOSTILE:
                delta[row] = self._sent(delta[row], k)
                count[row] = 1e6
        return client, Up(delta, count)

    def _sent(self, delta: Tensor, client: int) -> Tensor:
        return {
            "sign flip": -10 * delta,
            "huge": torch.full_like(delta, 1e30),
            "nan": torch.full_like(delta, torch.nan),
            "replay": self.first[client],
            "none": delta,
        }[self.attack]


@contextmanager
def attacked(attack: str, rule: Rule | None, largest_norm: float = 0.0) -> Iterator[Loop]:
    method = Attacked(WORK, attack=attack)
    task = make_task(tiny_model)
    data = tiny_federation((4, 6, 8, 10, 5, 7, 9))
    pool = LocalPool(method, task, data, SEED, workers=1, chunk=7)
    try:
        stages: list[Stage] = [] if rule is None else [RobustAverage(rule, method)]
        stages += [Screening(largest_norm, None)] if largest_norm else []
        yield Loop(method, task, pool, data.population(SEED), stages=stages)
    finally:
        pool.close()


@pytest.mark.parametrize("attack", ["sign flip", "huge", "nan", "replay"])
@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), Krum(2)], ids=lambda rule: type(rule).__name__)
def test_two_hostile_clients_of_seven_cannot_move_the_model_beyond_the_honest_updates(attack: str, rule: Rule) -> None:
    if attack == "nan":
        rule = Krum(1) if isinstance(rule, Krum) else rule  # those two are left out at once, and five are left
    with attacked(attack, rule) as loop:
        replies: list[Updates] = []
        train = loop.pool.train
        loop.pool.train = lambda *args, **more: replies.append(train(*args, **more)) or replies[-1]
        for _ in range(3):
            before = loop.server.w.clone()
            report = loop.round()
            honest = replies[-1].rows.delta[~torch.isin(replies[-1].ids, torch.tensor(HOSTILE))]
            assert len(honest) == 5
            step = loop.server.w - before
            assert bool((step >= honest.min(0).values - 1e-6).all())
            assert bool((step <= honest.max(0).values + 1e-6).all())
            assert report.rejected == (list(HOSTILE) if attack == "nan" else [])


@pytest.mark.parametrize("attack", ["sign flip", "huge"])
def test_a_plain_mean_is_at_the_mercy_of_one_that_claims_many_examples(attack: str) -> None:
    with attacked(attack, None) as plain, attacked("none", None) as quiet, attacked(attack, Clip()) as clipped:
        for loop in (plain, quiet, clipped):
            loop.round()
        start = plain.task.init(SEED)
        usual = float((quiet.server.w - start).norm())
        assert float((plain.server.w - quiet.server.w).norm()) > 5 * usual
        assert float((clipped.server.w - start).norm()) < 2 * usual


def test_updates_beyond_the_largest_norm_are_rejected_with_the_reason() -> None:
    with attacked("huge", None, largest_norm=100.0) as loop:
        report = loop.round()
        assert report.rejected == list(HOSTILE)
        assert "largest_norm is 100" in report.reasons[1]
        assert report.dropped == 2
        assert bool(torch.isfinite(loop.server.w).all())


def test_a_round_with_too_few_updates_for_the_rule_changes_nothing_and_says_so() -> None:
    with attacked("nan", Krum(hostile=2)) as loop:  # 7 are called, 2 rejected, 5 left; 7 needed
        before = loop.server.w.clone()
        report = loop.round()
        assert torch.equal(loop.server.w, before)
        assert report.dropped == 7
        assert "5 updates are too few for Krum, which needs 7" in report.note


def test_claimed_numbers_of_examples_do_not_count() -> None:
    up = Up(torch.randn(5, 3), torch.tensor([1.0, 1e9, -1.0, 0.0, 2.0]))
    out = RobustAverage(Median(), make_algorithm("fedavg", WORK)).at_server(Updates(torch.arange(5), up, 0), INFO)
    assert torch.equal(out.mean.delta, Median()(up.delta))


# ---- replies ----

GOOD = {"delta": torch.ones(1, 4), "count": torch.tensor([3.0])}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"delta": torch.ones(1, 5)}, r"delta is torch.float32 of shape \[1, 4\]; got torch.float32 of shape \[1, 5\]"),
        ({"delta": torch.ones(1, 4, dtype=torch.float64)}, "got torch.float64"),
        ({"delta": torch.tensor([[1, torch.nan, 0, 0]])}, r"NaN or infinity \(delta\)"),
        ({"delta": torch.tensor([[1, -torch.inf, 0, 0]])}, "NaN or infinity"),
        ({"delta": torch.full((1, 4), 30.0)}, "norm 60, and largest_norm is 50"),
        ({"count": torch.tensor([-1.0])}, "not negative; got -1"),
        ({"count": torch.tensor([torch.nan])}, r"NaN or infinity \(count\)"),
        ({"more": torch.ones(1)}, "an update has count, delta; got count, delta, more"),
    ],
)
def test_what_is_no_update_of_the_method_is_told_from_what_is(change: dict[str, Tensor], reason: str) -> None:
    spec = UpdateSpec.from_update(GOOD, largest_norm=50.0)
    assert spec.violation(GOOD) is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(spec.violation(GOOD | change))


def test_values_near_the_end_of_the_range_are_finite() -> None:
    assert UpdateSpec.from_update(GOOD).violation(GOOD | {"delta": torch.full((1, 4), 3e38)}) is None


def test_screening_keeps_the_other_rows_as_they_are() -> None:
    delta = torch.arange(12.0).reshape(4, 3)
    delta[1, 2] = torch.nan
    reply = Updates(torch.tensor([2, 5, 6, 9]), Up(delta, torch.tensor([1.0, 1.0, -2.0, 1.0])), 60, {3: ""})
    found = Screening(0.0, None).at_server(reply, INFO)
    assert found.ids.tolist() == [2, 9]
    assert torch.equal(found.rows.delta, delta[[0, 3]])
    assert sorted(found.refused) == [3, 5, 6]
    assert all(found.refused[client] for client in (5, 6))
    assert found.nbytes == 60
    some = replace(reply, ids=reply.ids[1:3], rows=reply.rows.take(torch.tensor([1, 2])))
    nothing = Screening(0.0, None).at_server(some, INFO)
    assert nothing.rows is None
    assert not len(nothing.ids)


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mediann", {}, "unknown robust rule 'mediann'; did you mean median"),
        ("krum", {"hostil": 1}, "unknown option of krum 'hostil'; did you mean hostile"),
        ("krum", {"hostile": "two"}, "krum: hostile must be int; got 'two'"),
        ("krum", {"hostile": -1}, "at least 0"),
        ("krum", {"keep": 0}, "at least 1"),
        ("trimmed_mean", {"share": 0.5}, r"\[0, 0.5\)"),
        ("clip", {"norm": 0}, "positive"),
    ],
)
def test_bad_rules_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RULES[name].make(options)


def test_every_rule_has_a_default_form() -> None:
    assert [type(RULES[name].make()) for name in RULES] == [entry.target for entry in RULES.values()]


def test_settings_name_a_rule_and_its_options() -> None:
    config = make_config(None, {"robust": "trimmed_mean"}, ("robust.share=0.1",))
    assert config.robust_rule == TrimmedMean(0.1)
    assert make_config(None, config.dump()).robust_rule == TrimmedMean(0.1)
    assert config.fingerprint() != make_config().fingerprint()
    assert make_config().robust_rule is None


def test_a_run_refuses_what_a_rule_cannot_do_before_it_begins(tmp_path: Path) -> None:
    settings = {"rounds": 1, "seeds": (0,), "clients": 6, "participation": 1.0, "model": "mlr"}
    with pytest.raises(ConfigError, match="SelfFL estimates"):
        kinfed.run(algorithms="fedavg,selffl", robust="median", out=tmp_path / "a", **settings)
    with pytest.raises(ConfigError, match="needs 7 updates in a round, and 6 clients are called"):
        kinfed.run(algorithms="fedavg", robust={"name": "krum", "hostile": 2}, out=tmp_path / "b", **settings)
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_rule_differs_from_one_without_and_leaves_local_alone() -> None:
    settings = {"rounds": 2, "seeds": (0,), "clients": 6, "participation": 1.0, "model": "mlr"}
    plain = kinfed.run(algorithms="local,ditto", **settings)
    robust = kinfed.run(algorithms="local,ditto", robust="median", **settings)
    assert torch.equal(plain.result("local").evaluation.personal.loss, robust.result("local").evaluation.personal.loss)
    assert not torch.equal(plain.result("ditto").server_model, robust.result("ditto").server_model)
    assert robust.result("ditto").personal["accuracy"] > 0.3


def test_how_many_hostile_clients_rules_withstand_by_hand() -> None:
    """The table of docs/scaling.md."""
    assert [Clip(norm=1.0).withstands(n) for n in (3, 4, 5)] == [3, 4, 5]
    assert [Clip().withstands(n) for n in (3, 4, 5)] == [1, 1, 2]
    assert [Median().withstands(n) for n in (3, 4, 5)] == [1, 1, 2]
    assert [TrimmedMean(share=0.49).withstands(n) for n in (3, 4, 5)] == [1, 1, 2]
    assert TrimmedMean(share=0.1).withstands(30) == 3
