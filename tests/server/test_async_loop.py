"""Asynchronous rounds: limits that are other methods, steps by hand, and the same bits after a pause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.common.message_shape import update_template
from kinfed.analysis.comparison import compare
from kinfed.config.config_reading import make_config
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.deploy.settings import Deployment
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.records.reader import load_runs
from kinfed.report.charts.figures import metric_over_time
from kinfed.server.async_loop import AsyncLoop
from kinfed.server.loop import Loop
from kinfed.server.schedule import CLOCKS, Clock, Schedule, Speeds, gradients_per_round
from kinfed.testing.workbench import ROUNDS, SEED, WORK, Bench, expect_equal, outcome, state_of, tiny_federation
from kinfed.updates.staleness import MODES, FedAsync, FedBuff, Staleness, StalenessRule, shortened_fields

EQUAL = CLOCKS["equal"].make()
MIXED = Speeds(step_seconds=0.5, bandwidth=1e4)


def clock_of(bench: Bench, speeds: Speeds) -> Clock:
    return Clock(speeds, gradients_per_round(bench.algorithm, bench.federation.train.count), SEED)


def async_loop(
    bench: Bench, rule: StalenessRule, speeds: Speeds = MIXED, schedule: Schedule | None = None, **pool: Any
) -> AsyncLoop:
    algorithm, task, data = replace(bench.algorithm), bench.make_task(), bench.federation
    population = data.population(SEED)
    changes = shortened_fields(type(algorithm).__name__, algorithm, task, data, population)
    template = update_template(algorithm, task, data, algorithm.init_server(task, population))
    clients = LocalPool(algorithm, task, data, SEED, workers=1, **pool)
    when = replace(schedule or Schedule(0.67), clock=clock_of(bench, speeds))
    return AsyncLoop(algorithm, task, clients, population, when, [Staleness(rule, changes, template.nbytes)])


def sync_loop(bench: Bench, speeds: Speeds | None, schedule: Schedule) -> Loop:
    algorithm, task, data = replace(bench.algorithm), bench.make_task(), bench.federation
    pool = LocalPool(algorithm, task, data, SEED, workers=1)
    when = replace(schedule, clock=None if speeds is None else clock_of(bench, speeds))
    return Loop(algorithm, task, pool, data.population(SEED), when)


def finished(loop: Loop, rounds: int = ROUNDS) -> dict[str, Tensor]:
    with loop:
        for _ in range(rounds):
            loop.round()
        return outcome(loop)


def bench_of(name: str, **options: Any) -> Bench:
    return Bench(make_algorithm(name, WORK, options))


# ---- limits ----


@pytest.mark.parametrize(("name", "participation"), [("fedavg", 1.0), ("fedadam", 0.67), ("fedper", 0.67)])
def test_a_buffer_of_all_at_equal_speeds_is_the_synchronous_method(name: str, participation: float) -> None:
    bench, schedule = bench_of(name), Schedule(participation, dropout=0.0)
    size = schedule.size(len(bench.federation))
    theirs = finished(sync_loop(bench, EQUAL, schedule))
    ours = finished(async_loop(bench, FedBuff(buffer=size), EQUAL, schedule))
    ours = {key: tensor for key, tensor in ours.items() if not key.startswith("async.")}
    expect_equal(ours, theirs, f"{name} without staleness")


def test_fedasync_with_one_client_at_a_time_takes_its_model() -> None:
    """α = 1 and s = 0: w is the client's model after each step, and every client starts from the last one's."""
    bench = bench_of("fedavg")
    with async_loop(bench, FedAsync(mixing=1.0), schedule=Schedule(1e-9)) as loop:
        for _ in range(4):
            report = loop.round()
            assert report.staleness == 0
            gap = (loop.pool.states()["rows.theta"] - loop.server.w).abs().amax(1)  # type: ignore[attr-defined]
            assert float(gap.min()) < 1e-6


def test_fedasync_by_hand() -> None:
    """Two clients at work: the second to arrive started from w⁰, when the server has w¹. α (1 + 1)^−½ of its model."""
    bench = bench_of("fedavg", weights="equal")
    with async_loop(bench, FedAsync(mixing=0.6), schedule=Schedule(0.34)) as loop:
        first = torch.clone(loop.server.w)  # type: ignore[attr-defined]
        loop.round()
        after_one = torch.clone(loop.server.w)  # type: ignore[attr-defined]
        second = loop._flight.ids[loop._flight.version == 0]
        flight = loop._flight
        report = loop.round()
        if report.staleness == 1:  # the one that started first, and was slower
            states = loop.pool.states()
            theta = states["rows.theta"][states["ids"] == second][0]
            a = 0.6 * 2**-0.5
            assert torch.allclose(loop.server.w, (1 - a) * after_one + a * theta, atol=1e-6)  # type: ignore[attr-defined]
        else:
            pytest.fail(f"the second arrival should be of the first two clients; in flight were {flight}")
        assert not torch.equal(first, after_one)


def test_staleness_weights_by_hand() -> None:
    s = torch.tensor([0, 1, 3, 5])
    assert torch.allclose(FedBuff().weight(s), torch.tensor([1, 0.5**0.5, 0.5, 6**-0.5], dtype=torch.float64))
    assert FedAsync(staleness="hinge").weight(s).tolist() == [1, 1, 1, 1 / 11]
    assert FedAsync(staleness="hinge", a=1.0, b=2).weight(s).tolist() == [1, 1, 0.5, 0.25]
    assert FedBuff(staleness="constant").weight(s).tolist() == [1, 1, 1, 1]
    assert FedBuff(a=1.0).weight(s).tolist() == [1, 0.5, 0.25, 1 / 6]


def test_a_stale_update_counts_less_in_the_methods_own_average() -> None:
    """FedBuff's step from what the clients sent: Σ s(s_i) Δ_i / K."""
    bench = bench_of("fedavg", weights="equal")
    with async_loop(bench, FedBuff(buffer=2), schedule=Schedule(0.67)) as loop:
        updates: list[Any] = []
        train = loop.pool.train

        def recorded(ids: Tensor, download: Any, *rest: Any, **more: Any) -> Any:
            reply = train(ids, download, *rest, **more)
            updates.append((download(ids).w, reply.rows.delta, ids))
            return reply

        loop.pool.train = recorded  # type: ignore[method-assign]
        stale = 0
        versions = [torch.clone(loop.server.w)]  # type: ignore[attr-defined]
        for completed in range(5):
            updates.clear()
            loop.round()
            step = torch.zeros_like(versions[0])
            for w, delta, _ in updates:
                for start, change in zip(w, delta, strict=True):
                    (version,) = [number for number, old in enumerate(versions) if torch.equal(old, start)]
                    step += (1 + completed - version) ** -0.5 * change / 2
                    stale += completed > version
            assert torch.allclose(loop.server.w, versions[-1] + step, atol=1e-6)  # type: ignore[attr-defined]
            versions.append(torch.clone(loop.server.w))  # type: ignore[attr-defined]
        assert stale  # otherwise nothing was tested


# ---- the clock ----


def test_seconds_by_hand() -> None:
    count = torch.tensor([10, 3])
    ditto = make_algorithm("ditto", LocalTraining(batch=5, steps=4))
    assert gradients_per_round(ditto, count).tolist() == [8, 8]
    clock = Clock(
        Speeds(step_seconds=0.5, spread=0.3, bandwidth=100.0, bandwidth_spread=0.2), torch.tensor([8.0, 2.0]), 7
    )
    ids = torch.tensor([1, 0])
    c, b = (rng.normal(rng.fold(rng.root(7, f"clock {what}"), 0, ids), 1)[:, 0] for what in ("speed", "bandwidth"))
    by_hand = torch.tensor([1.0, 4.0]) * torch.exp(0.3 * c) + 50 / (100 * torch.exp(0.2 * b))
    assert torch.allclose(clock.seconds(ids, 1, 50.0), by_hand)
    assert torch.equal(clock.seconds(ids, 1, 50.0), clock.seconds(ids, 2, 50.0))  # speeds are the clients' own
    jittery = replace(clock, speeds=replace(clock.speeds, jitter=1.0))
    assert not torch.equal(jittery.seconds(ids, 1, 50.0), jittery.seconds(ids, 2, 50.0))


def test_a_synchronous_round_takes_as_long_as_its_slowest_client_and_changes_nothing_else() -> None:
    bench, schedule = bench_of("fedavg"), Schedule(0.67)
    with sync_loop(bench, MIXED, schedule) as loop:
        reports = [loop.round() for _ in range(3)]
        clock, d = loop.clock, loop.task.num_params
        assert clock is not None
        times = [
            float(clock.seconds(schedule.active(SEED, number, 6), number, 4.0 * (2 * d + 1)).max())
            for number in (1, 2, 3)
        ]
        assert [report.clock for report in reports] == pytest.approx(torch.tensor(times).cumsum(0).tolist())
        ours = outcome(loop)
    assert float(ours.pop("now")) == reports[-1].clock
    expect_equal(ours, finished(sync_loop(bench, None, schedule), 3), "a clock only watches")


def test_nobody_waits_for_the_slowest() -> None:
    """The same number of updates takes less simulated time than in synchronous rounds; some are stale."""
    bench, schedule = bench_of("fedavg"), Schedule(0.67)
    with sync_loop(bench, MIXED, schedule) as loop:
        waiting = [loop.round() for _ in range(6)][-1].clock
    with async_loop(bench, FedBuff(buffer=4), schedule=schedule) as loop:
        reports = [loop.round() for _ in range(6)]
    assert waiting is not None
    assert reports[-1].clock is not None
    assert reports[-1].clock < 0.7 * waiting
    assert max(report.staleness or 0 for report in reports) > 0


# ---- pauses ----


@pytest.mark.parametrize(
    ("name", "rule"), [("ditto", FedBuff(buffer=2)), ("fedavg", FedAsync()), ("local", FedAsync())]
)
def test_a_checkpoint_goes_on_bit_for_bit(name: str, rule: StalenessRule) -> None:
    bench, schedule = bench_of(name), Schedule(0.67, dropout=0.2)
    once = finished(async_loop(bench, rule, schedule=schedule), 6)
    with async_loop(bench, rule, schedule=schedule) as loop:
        for _ in range(3):
            loop.round()
        completed, state = loop.completed, state_of(loop)
    with async_loop(bench, rule, schedule=schedule, chunk=1) as loop:
        loop.load(completed, state)
        for _ in range(3):
            loop.round()
        expect_equal(outcome(loop), once, "a pause changes nothing")
    del state["async.flight.finish"]
    with async_loop(bench, rule) as loop, pytest.raises(CheckpointError, match="clients at work"):
        loop.load(completed, state)


def test_a_run_resumes_and_its_page_shows_simulated_time(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "federation": tiny_federation(), "algorithms": "local,fedavg", "seeds": (0,), "rounds": 4, "steps": 3,
        "model": "mlr", "eval_every": 2, "mode": {"name": "fedbuff", "buffer": 2}, "compress": "topk:0.5",
    }  # fmt: skip
    kinfed.run(**settings, out=tmp_path / "once")
    stop = iter([False, True])
    with pytest.raises(kinfed.KinfedError):
        kinfed.run(**settings, out=tmp_path / "twice", should_stop=lambda: next(stop))
    kinfed.run(**settings, out=tmp_path / "twice", resume=True)
    files = [next((tmp_path / name / "models").glob("fedavg*")).read_bytes() for name in ("once", "twice")]
    assert files[0] == files[1]
    (comparison,) = compare(load_runs([tmp_path / "once"]))
    figure = metric_over_time(comparison)
    assert figure is not None
    assert {trace["name"] for trace in figure.data} >= {"Local", "FedAvg"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("fedfomo", FedBuff(), "plans each round"),
        ("scaffold", FedBuff(), "control variates"),
        ("fedamp", FedBuff(), "every single model"),
        ("fedmd", FedBuff(), "not changes of a model"),
        ("gpfl", FedAsync(), "use --mode fedbuff"),
        ("fedper", FedAsync(), "has none"),
    ],
)
def test_methods_that_need_synchronous_rounds_are_refused(name: str, rule: StalenessRule, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async_loop(Bench(name), rule)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "async", "dp_noise": 1.0}, "dp_"),
        ({"mode": "async", "secure_sum": True}, "secure_sum"),
        ({"mode": "async", "robust": "median"}, "robust"),
        ({"mode": {"name": "fedbuff", "buffer": 0}}, "buffer"),
        ({"mode": {"name": "fedasync", "staleness": "constant", "a": 1.0}}, "leave it out"),
        ({"mode": "fedbuf"}, "fedbuff"),
        ({"clock": {"name": "equal", "bandwidth": 0}}, "bandwidth"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(None, settings)


def test_names_of_modes() -> None:
    assert MODES["async"].make({"buffer": 3}) == FedBuff(buffer=3)
    assert make_config(None, {"mode": "fedasync"}).speeds == Speeds()
    assert make_config(None, {}).speeds is None
    with pytest.raises(ConfigError, match="simulations"):
        Deployment.parse({"mode": "async"})
    with pytest.raises(ConfigError, match="stragglers"):
        async_loop(Bench("fedavg"), FedBuff(), schedule=Schedule(0.5, stragglers=0.1))
