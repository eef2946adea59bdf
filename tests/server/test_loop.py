"""Who takes part, what is lost, what is counted, and what one round does to the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp as Up
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.algorithms.fedprox import FedProx
from kinfed.algorithms.local import Local
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.testing.workbench import SEED, expect_equal, hooked, outcome

WORK = LocalTraining(batch=5, steps=4)
MODEL_BYTES = 4 * 115  # tiny_model has 115 float32 parameters


class Watch:
    """Records what a loop asks of a method."""

    def __init__(self, method: Any, plan: Callable[..., Any] | None = None, **hooks: Callable[..., Any]) -> None:
        self._choose = plan or (lambda inner, *arguments: inner(*arguments))
        self.planned: list[list[int]] = []
        self.downloaded: list[list[int]] = []
        self.aggregated: list[list[int]] = []
        self.steps: dict[int, int] = {}
        self.rounds: list[int] = []
        self.method = hooked(
            method,
            plan=self._plan,
            download=self._download,
            client_update=self._client_update,
            aggregate=self._aggregate,
            **hooks,
        )

    def _plan(self, inner: Any, server: Any, ids: Tensor, round: RoundInfo) -> Any:
        server, ids = self._choose(inner, server, ids, round)
        self.planned.append(ids.tolist())
        return server, ids

    def _download(self, inner: Any, server: Any, ids: Tensor) -> Any:
        self.downloaded.append(ids.tolist())
        return inner(server, ids)

    def _client_update(self, inner: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        steps = data.train.batches(self.method.training).steps
        self.steps |= dict(zip(data.ids.tolist(), steps.tolist(), strict=True))
        self.rounds.append(data.round)
        return inner(task, client, down, data)

    def _aggregate(self, inner: Any, server: Any, ids: Tensor, up: Any, round: RoundInfo) -> Any:
        self.aggregated.append(ids.tolist())
        return inner(server, ids, up, round)


@dataclass(frozen=True)
class LosesAll(Schedule):
    dropout: float = 0.5

    def dropouts(self, seed: int, round: int, ids: Tensor) -> Tensor:
        return torch.ones(len(ids), dtype=torch.bool)


# The schedule.


@pytest.mark.parametrize(
    ("participation", "clients", "active"),
    [(0.1, 20, 2), (0.29, 100, 29), (0.57, 100, 57), (0.3, 10, 3), (0.35, 10, 3), (0.999, 10, 9), (1.0, 7, 7),
     (0.01, 20, 1), (0.5, 1, 1), (1.0, 1, 1)],
)  # fmt: skip
def test_as_many_clients_as_the_share_says(participation: float, clients: int, active: int) -> None:
    ids = Schedule(participation).active(0, 1, clients)
    assert len(ids) == active
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert set(ids.tolist()) <= set(range(clients))


@given(st.integers(1, 100), st.integers(1, 400), st.integers(0, 2**31), st.integers(1, 500))
def test_the_share_is_exact_in_hundredths(percent: int, clients: int, seed: int, round: int) -> None:
    ids = Schedule(percent / 100).active(seed, round, clients)
    assert len(ids) == max(int(Fraction(percent, 100) * clients), 1)
    assert bool((ids[1:] > ids[:-1]).all())
    assert 0 <= int(ids[0]) <= int(ids[-1]) < clients


def test_sampling_is_uniform_and_fresh_every_round() -> None:
    rounds, clients, size = 1500, 10, 3
    schedule = Schedule(0.3)
    member = torch.zeros(rounds, clients, dtype=torch.float64)
    for t in range(rounds):
        member[t, schedule.active(5, t + 1, clients)] = 1
    share = size / clients
    spread = (share * (1 - share) / rounds) ** 0.5
    assert float((member.mean(0) - share).abs().max()) < 4 * spread
    together = member.T @ member / rounds  # pairs of the same round: 3/10 * 2/9
    off_diagonal = ~torch.eye(clients, dtype=torch.bool)
    assert float((together[off_diagonal] - share * 2 / 9).abs().max()) < 4.5 * (share * 2 / 9 / rounds) ** 0.5
    again = (member[1:] * member[:-1]).sum(1).mean()  # of the next round: 3 * 3/10
    assert float(again) == pytest.approx(size * share, abs=0.08)


def test_seeds_sample_differently() -> None:
    schedule = Schedule(0.5)
    draws = {tuple(schedule.active(seed, 1, 20).tolist()) for seed in range(8)}
    assert len(draws) == 8


def test_all_methods_of_a_seed_are_sampled_alike() -> None:
    called = []
    for method in (FedAvg(training=WORK), Ditto(training=WORK), Local(training=WORK), FedProx(training=WORK)):
        watch = Watch(method)
        with Bench(method).loop(Schedule(0.5), algorithm=watch.method) as loop:
            for _ in range(5):
                loop.round()
        called.append(watch.planned)
    assert called[0] == called[1] == called[2] == called[3]
    assert len({tuple(ids) for ids in called[0]}) > 1


@pytest.mark.parametrize("participation", [0.0, -0.1, 1.0001, float("nan")])
def test_participation_outside_the_unit_interval_is_refused(participation: float) -> None:
    with pytest.raises(ConfigError, match=r"participation must be in \(0, 1\]; got"):
        Schedule(participation)


@pytest.mark.parametrize("name", ["dropout", "stragglers"])
@pytest.mark.parametrize("chance", [-0.1, 1.0, float("nan")])
def test_chances_outside_the_unit_interval_are_refused(name: str, chance: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be in"):
        Schedule(**{name: chance})


@pytest.mark.parametrize("what", ["dropouts", "completed_share"])
def test_what_happens_to_a_client_does_not_depend_on_the_others(what: str) -> None:
    schedule = Schedule(dropout=0.4, stragglers=0.4)
    fate: Callable[[int, int, Tensor], Tensor] = getattr(schedule, what)
    everyone, some = torch.arange(50), torch.tensor([3, 17, 42])
    assert torch.equal(fate(1, 2, some), fate(1, 2, everyone)[some])
    assert not torch.equal(fate(1, 2, everyone), fate(1, 3, everyone))
    assert not torch.equal(fate(1, 2, everyone), fate(2, 2, everyone))


def test_losses_and_efforts_come_at_their_rate() -> None:
    schedule = Schedule(dropout=0.2, stragglers=0.3)
    ids = torch.arange(20_000)
    lost, effort = schedule.dropouts(0, 1, ids), schedule.completed_share(0, 1, ids)
    assert float(lost.double().mean()) == pytest.approx(0.2, abs=0.012)
    slow = effort < 1
    assert float(slow.double().mean()) == pytest.approx(0.3, abs=0.013)
    assert float(effort[slow].mean()) == pytest.approx(0.5, abs=0.015)
    assert float(effort.min()) >= 0
    assert float(effort.max()) == 1
    assert float((lost & slow).double().mean()) == pytest.approx(0.06, abs=0.007)  # independent of each other


# One round.


def test_drop_outs_are_counted_paid_for_and_change_nothing() -> None:
    schedule = Schedule(dropout=0.4)
    watch = Watch(FedAvg(training=WORK))
    lost_ever = 0
    with Bench(watch.method).loop(schedule, algorithm=watch.method) as loop:
        for number in range(1, 6):
            everyone = torch.arange(6)
            lost = schedule.dropouts(SEED, number, everyone)
            report = loop.round()
            lost_ever += int(lost.sum())
            assert (report.active, report.dropped, report.rejected) == (6, int(lost.sum()), [])
            assert watch.planned[-1] == everyone.tolist()  # the plan is made for all who are called
            assert watch.aggregated[-1] == everyone[~lost].tolist()
            assert report.bytes_down == 6 * MODEL_BYTES  # the message was sent all the same
            assert report.bytes_up == int((~lost).sum()) * (MODEL_BYTES + 4)
    assert lost_ever > 3
    assert all(watch.downloaded)  # nobody is asked for the message of no client


def test_fedavg_drops_stragglers_and_fedprox_keeps_their_part() -> None:
    schedule = Schedule(stragglers=0.5)
    effort = schedule.completed_share(SEED, 1, torch.arange(6))
    slow = effort < 1
    assert 0 < int(slow.sum()) < 6
    for method, keeps in ((FedAvg(training=WORK), False), (FedProx(training=WORK), True), (Local(training=WORK), True)):
        watch = Watch(method)
        size = 0 if isinstance(method, Local) else MODEL_BYTES
        with Bench(method).loop(schedule, algorithm=watch.method, chunk=2) as loop:
            report = loop.round()
        kept = torch.ones(6, dtype=torch.bool) if keeps else ~slow
        steps = torch.ceil(effort * 4).clamp_min(1).to(torch.int64)
        assert watch.aggregated == [kept.nonzero().squeeze(1).tolist()]
        assert watch.steps == {k: int(steps[k]) for k in kept.nonzero().squeeze(1).tolist()}
        assert report.dropped == int((~kept).sum())
        assert report.bytes_down == 6 * size
        assert report.bytes_up == int(kept.sum()) * (size + 4 if size else 0)


def test_rejected_updates_were_sent_and_are_counted() -> None:
    bench = Bench(FedAvg(training=WORK))
    raw = bench.federation.features.raw.clone()
    data = replace(bench.federation, features=replace(bench.federation.features, raw=raw))
    raw[data.train[3]] = torch.inf
    with bench.loop(Schedule(), federation=data) as loop:
        report = loop.round()
        assert (report.rejected, report.dropped) == ([3], 1)
        assert report.bytes_up == 6 * (MODEL_BYTES + 4)
        raw[data.train.rows] = torch.nan
        report = loop.round()
        assert (report.rejected, report.dropped) == ([0, 1, 2, 3, 4, 5], 6)
        assert report.bytes_up == 6 * (MODEL_BYTES + 4)


@dataclass(frozen=True)
class Plans(FedAvg):
    """Writes its plan into the server state, as methods do that choose what to send."""

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        return Server(server.w + 1, server.c), active


@pytest.mark.parametrize("method", [FedAvg(training=WORK), Plans(training=WORK)], ids=["FedAvg", "Plans"])
def test_a_round_without_replies_leaves_the_server_as_it_was(method: FedAvg) -> None:
    watch = Watch(method)
    with Bench(method).loop(LosesAll(participation=0.5), algorithm=watch.method) as loop:
        before = loop.server.clone()
        report = loop.round()
        assert torch.equal(loop.server.named()["w"], before.named()["w"])
        assert (report.round, report.active, report.dropped, report.bytes_up) == (1, 3, 3, 0)
        assert report.bytes_down == 3 * MODEL_BYTES
        assert watch.aggregated == []
        assert loop.pool.clients.seen.tolist() == []
        assert loop.round().round == 2  # time goes on


def test_the_plan_reaches_downloads_and_aggregation() -> None:
    with Bench(Plans(training=replace(WORK, lr=1e-12))).loop(Schedule()) as loop:
        start = loop.server.named()["w"].clone()
        loop.round()
        torch.testing.assert_close(loop.server.named()["w"], start + 1)


def test_rounds_count_from_one_or_from_where_a_warm_start_ended() -> None:
    for first in (1, 6):
        watch = Watch(FedAvg(training=WORK))
        data, task = tiny_federation(), make_task(tiny_model)
        pool = LocalPool(watch.method, task, data, SEED)
        loop = Loop(watch.method, task, pool, data.population(SEED), Schedule(first_round=first))
        assert loop.completed == first - 1
        assert [loop.round().round for _ in range(2)] == [first, first + 1]
        assert loop.completed == first + 1
        assert set(watch.rounds) == {first, first + 1}  # batches and learning rate are of those rounds
        pool.close()


def test_rounds_are_run_as_they_are_asked_for() -> None:
    with Bench("fedavg").loop() as loop:
        three = loop.rounds(3)
        assert loop.completed == 0
        assert next(three).round == 1
        assert loop.completed == 1
        assert [report.round for report in three] == [2, 3]
        assert [report.round for report in loop.rounds(2)] == [4, 5]
        assert list(loop.rounds(0)) == []


def test_a_loaded_run_goes_on_from_its_round() -> None:
    with Bench("fedavg").loop() as first, Bench("fedavg").loop() as second:
        list(first.rounds(3))
        second.load(3, {name: tensor.clone() for name, tensor in first.state().items()})
        assert second.completed == 3
        assert first.round().round == second.round().round == 4
        assert torch.equal(first.server.named()["w"], second.server.named()["w"])


def test_a_method_may_call_on_other_clients_than_those_sampled() -> None:
    watch = Watch(FedAvg(training=WORK), plan=lambda inner, server, ids, round: (server, torch.tensor([1, 4])))
    with Bench("fedavg").loop(Schedule(0.5), algorithm=watch.method) as loop:
        report = loop.round()
        assert (report.active, report.dropped) == (2, 0)
        assert watch.planned == watch.aggregated == [[1, 4]]
        assert sorted(loop.pool.clients.seen.tolist()) == [1, 4]


def test_methods_are_told_the_participation_that_happens() -> None:
    data, task = tiny_federation(), make_task(tiny_model)
    method = FedAvg(training=WORK, smoothing="participation")

    def loop(clients: Population, schedule: Schedule | None) -> Loop:
        return Loop(method, task, LocalPool(method, task, data, SEED), clients, schedule)

    assert float(loop(data.population(SEED), Schedule(0.5)).server.named()["c"]) == 0.5
    without = loop(data.population(SEED, 0.34), None)
    assert float(without.server.named()["c"]) == 0.34
    assert without.round().active == 2
    without.pool.close()


def test_a_method_may_refuse_the_population() -> None:
    @dataclass(frozen=True)
    class NeedsMany(FedAvg):
        def check(self, task: Any, population: Population) -> None:
            raise ConfigError(f"7 clients at least; got {population.num_clients}")

    with (
        pytest.raises(ConfigError, match="7 clients at least; got 6"),
        Bench("fedavg").loop(algorithm=NeedsMany(training=WORK)),
    ):
        pass


# Evaluation and checkpoints.


def test_evaluation_covers_all_clients_on_the_split_asked_for() -> None:
    with Bench("fedavg").loop(Schedule(0.5)) as loop:
        loop.round()
        for split in ("train", "test", "val"):
            found = loop.evaluate(split)
            assert found.ids.tolist() == list(range(6))
            assert found.personal is not None
            assert found.server_model is not None
            assert found.personal.count.tolist() == loop.pool.federation.split(split).count.tolist()
            assert found.models is None
        with pytest.raises(ConfigError, match="a split is one of train, val, test; got 'tset'"):
            loop.evaluate("tset")
    with Bench("local").loop() as loop:
        assert loop.evaluate().server_model is None


def test_evaluation_plans_for_all_clients() -> None:
    watch = Watch(FedAvg(training=WORK))
    with Bench(watch.method).loop(Schedule(0.5), algorithm=watch.method) as loop:
        loop.evaluate()
        assert watch.planned == [[0, 1, 2, 3, 4, 5]]


def test_the_global_score_is_that_of_the_servers_model_not_of_the_plan() -> None:
    with Bench(Plans(training=WORK)).loop(Schedule()) as loop:
        start = loop.server.named()["w"].clone()
        found = loop.evaluate()
        assert torch.equal(loop.server.named()["w"], start)  # the plan was for the evaluation only
        cohort = loop.pool.federation.cohort(torch.arange(6), SEED, 0)
        by_hand = loop.task.score(start.expand(6, -1), cohort.test)
        assert found.server_model is not None
        assert torch.equal(found.server_model.loss, by_hand.loss)


def test_states_of_another_method_are_refused() -> None:
    with Bench("fedavgm").loop() as other, Bench("fedavg").loop() as loop:
        other.round()
        with pytest.raises(
            CheckpointError, match=r"server state has fields \['m', 'w'\]; the method keeps \['c', 'w'\]"
        ):
            loop.load(1, other.state())
        assert loop.completed == 0
    with Bench("ditto").loop() as other, Bench("fedavg").loop() as loop:
        other.round()
        mixed = {name: t for name, t in other.state().items() if name.startswith("clients.")}
        mixed |= {name: t for name, t in loop.state().items() if name.startswith("server.")}
        with pytest.raises(CheckpointError, match=r"client state has fields \['v'\]"):
            loop.load(1, mixed)


def test_aggregate_sees_messages_in_the_order_of_ids() -> None:
    """Clients train sorted by size; the rows of `up` must still belong to the ids beside them."""
    found: dict[int, float] = {}

    def aggregate(inner: Any, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        assert up.count is not None
        found.update(zip(ids.tolist(), up.count.tolist(), strict=True))
        return inner(server, ids, up, round)  # type: ignore[no-any-return]

    method = hooked(FedAvg(training=WORK), aggregate=aggregate)
    with Bench(method).loop(Schedule(), algorithm=method, chunk=4) as loop:
        loop.round()
        assert list(found) == [0, 1, 2, 3, 4, 5]
        assert list(found.values()) == loop.pool.federation.train.count.tolist()


def test_arrays_that_no_method_keeps_are_refused() -> None:
    with Bench("fedavg").loop() as loop:
        with pytest.raises(CheckpointError, match="holds no extra; was it written by kinfed"):
            loop.load(1, loop.state() | {"extra": torch.zeros(3)})
        assert loop.completed == 0


@pytest.mark.parametrize("name", ["selffl", "cfl"])
def test_bits_do_not_depend_on_the_number_of_torch_threads(name: str) -> None:
    """Models that are long enough for torch to cut a sum of all their numbers among its threads."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)
        )

    def run(threads: int) -> dict[str, Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with Bench(make_algorithm(name, WORK), model=model).loop(Schedule(0.8), chunk=None) as loop:
                for _ in range(3):
                    loop.round()
                assert torch.get_num_threads() == threads  # the caller's own number is as it was
                return outcome(loop)
        finally:
            torch.set_num_threads(before)

    expect_equal(run(2), run(1), "two threads give the bits of one")
