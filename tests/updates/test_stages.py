"""The road of an update: the order of stages, what they may do, and rounds that are transactions on every pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import Algorithm, RoundInfo
from kinfed.core import Tree
from kinfed.data import Moments
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing.workbench import WORK, Bench, tiny_federation
from kinfed.updates import CODECS, STAGES
from kinfed.updates.codecs import QSGD, Codec, TopK
from kinfed.updates.compression import Compression
from kinfed.updates.robust import Median, RobustAverage
from kinfed.updates.screening import Screening
from kinfed.updates.stages import Road, SentUpdates, Stage, Updates

CLIENTS = 6
WITH_INVARIANT = [name for name in ALGORITHMS if type(make_algorithm(name, WORK)).invariant is not Algorithm.invariant]


class LosesSome(Stage):
    """Refuses the update of every client whose number and round are both odd, or both even."""

    name = "loses_some"
    refuses = True

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        lost = (updates.ids + round.number) % 2 == 0
        return updates.without({row: "lost" for row in lost.nonzero().squeeze(1).tolist()})


class UsesNone(Stage):
    """Leaves every second round unused."""

    name = "uses_none"
    refuses = True

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        return updates.unused("not today") if round.number % 2 else updates


ROADS: dict[str, list[Stage]] = {
    "nothing": [],
    "qsgd:1": [Compression(QSGD(levels=1))],
    "qsgd:7": [Compression(QSGD(levels=7))],
    "topk": [Compression(TopK(0.1), ("delta",))],
    "largest norm": [Screening(0.35, None)],
    "some are lost": [LosesSome()],
    "rounds are lost": [UsesNone()],
    "all of it": [Compression(QSGD(levels=3)), Screening(1.5, None), LosesSome()],
}


def all_states(loop: Loop) -> Any:
    pool = loop.pool
    assert isinstance(pool, LocalPool)
    return pool.clients.take(torch.arange(CLIENTS))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", WITH_INVARIANT)
def test_what_server_and_clients_remember_together_survives_every_stage(name: str, road: str) -> None:
    """c = mean c_m, h = mean g_m, w = mean θ_m, after every round, whoever took part and whatever was lost."""
    with Bench(name).loop(Schedule(0.67, dropout=0.2), chunk=2, stages=ROADS[road]) as loop:
        moved = 0.0
        for _ in range(6):
            loop.round()
            pair = loop.algorithm.invariant(loop.task, loop.server, all_states(loop))
            assert pair is not None
            of_server, of_clients = pair
            scale = float(of_server.abs().max().clamp_min(1e-3))
            torch.testing.assert_close(of_server, of_clients, rtol=0, atol=1e-5 * scale)
            moved = max(moved, scale)
    assert moved > 1e-3  # something was learnt


def test_who_declares_an_invariant() -> None:
    assert set(WITH_INVARIANT) >= {"scaffold", "feddyn", "mrmtl", "l2sgd", "mocha_deep"}


@pytest.mark.parametrize("name", ["ditto", "scaffold", "fedfomo", "apfl"])
def test_a_refused_update_leaves_its_client_as_it_was(name: str) -> None:
    with Bench(name).loop(Schedule(), chunk=4, stages=[LosesSome()]) as loop:
        for number in range(1, 4):
            before, ids = all_states(loop), torch.arange(CLIENTS)
            report = loop.round()
            refused = ids[(ids + number) % 2 == 0]
            assert report.rejected == refused.tolist()
            after = all_states(loop)
            for one, other in zip(before.named().values(), after.named().values(), strict=True):
                assert torch.equal(one[refused], other[refused])
            assert any(
                not torch.equal(one, other)
                for one, other in zip(before.named().values(), after.named().values(), strict=True)
            )


def test_holding_states_back_changes_nothing_where_nothing_is_refused() -> None:
    class RefusesNobody(Stage):
        name = "refuses_nobody"
        refuses = True

    def states(stages: Sequence[Stage]) -> dict[str, Tensor]:
        training = replace(WORK, momentum=0.9, optimizer_state="kept")
        with Bench("ditto").loop(
            Schedule(0.67), algorithm=make_algorithm("ditto", training), chunk=2, stages=stages
        ) as loop:
            for _ in range(4):
                loop.round()
            return loop.state()

    plain, held = states([]), states([RefusesNobody()])
    assert plain.keys() == held.keys()
    assert all(torch.equal(plain[name], held[name]) for name in plain)


def test_stages_come_in_one_order_whoever_names_them() -> None:
    screening, codec, own = Screening(1.0, None), Compression(QSGD()), LosesSome()
    robust = RobustAverage(Median(), make_algorithm("fedavg", WORK))
    assert list(Road([robust, own, screening, codec])) == [codec, screening, own, robust]
    assert set(STAGES) >= {"compression", "screening", "robust", "secure_sum", "user_level", "staleness", "privacy"}


def test_stages_that_cannot_stand_side_by_side_are_refused() -> None:
    from kinfed.updates.secure_sum import SecureSettings, SecureSum

    secure = SecureSum(SecureSettings(), ("delta",), 10)
    with pytest.raises(ConfigError, match="sees only their sum"):
        Road([secure, RobustAverage(Median(), make_algorithm("fedavg", WORK))])
    with pytest.raises(ConfigError, match="largest_norm judges single updates"):
        Road([Screening(1.0, None), secure])


# ---- a stage of one's own ----


class Halved(Stage):
    """Clients send half of what they learnt, and remember how often."""

    name = "halved"
    remembers = True

    def __init__(self) -> None:
        self.rounds = torch.tensor(0)

    def at_client(self, up: Tree, memory: Moments, key: Tensor) -> SentUpdates:
        delta: Tensor = up.delta  # type: ignore[attr-defined]
        sent = memory.tensors.get("times", torch.zeros(len(delta)))
        return SentUpdates(replace(up, delta=0.5 * delta), Moments({"times": sent + 1}), up.nbytes)  # type: ignore[type-var]

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        self.rounds = self.rounds + 1
        return updates

    def named(self) -> dict[str, Tensor]:
        return {"rounds": self.rounds}

    def load(self, tensors: Any) -> None:
        self.rounds = tensors["rounds"]


@contextmanager
def halved() -> Iterator[Loop]:
    with kinfed.simulate(tiny_federation(), "mlr", "fedavg", training=WORK, stages=[Halved()]) as loop:
        yield loop


def test_a_stage_of_ones_own_changes_updates_and_is_part_of_checkpoints() -> None:
    with (
        kinfed.simulate(tiny_federation(), "mlr", "fedavg", training=WORK) as plain,
        halved() as loop,
        halved() as again,
    ):
        start = plain.server.w.clone()  # type: ignore[attr-defined]
        plain.round()
        loop.round()
        moved, half = (float((one.server.w - start).norm()) for one in (plain, loop))  # type: ignore[attr-defined]
        assert half == pytest.approx(moved / 2, rel=1e-5)
        again.load(1, {name: tensor.clone() for name, tensor in loop.state().items()})
        for one in (loop, again):
            one.round()
        assert all(torch.equal(tensor, again.state()[name]) for name, tensor in loop.state().items())
        times = loop.state()["clients.halved.rows.times"]
        assert int(loop.state()["halved.rounds"]) == 2
        assert times.tolist() == [2.0] * len(times)


@dataclass(frozen=True)
class Silent(Codec):
    """Says nothing."""

    def nbytes(self, d: int) -> int:
        return 0

    def encode(self, rows: Tensor, key: Tensor) -> Tensor:
        return torch.zeros(len(rows), 0, dtype=torch.uint8)

    def decode(self, code: Tensor, d: int) -> Tensor:
        return torch.zeros(len(code), d)


def test_who_is_not_heard_has_sent_nothing() -> None:
    """A codec that says nothing: the server and what it shares with clients stay as they were."""
    assert "silent" not in CODECS
    with Bench("scaffold").loop(Schedule(), stages=[Compression(Silent())]) as loop:
        for _ in range(2):
            loop.round()
        assert float(loop.server.c.abs().max()) == 0  # type: ignore[attr-defined]
        assert float(all_states(loop).c.abs().max()) == 0
