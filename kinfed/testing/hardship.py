"""Checks of a method under failures of a federation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import RoundInfo
from kinfed.core import Tree
from kinfed.data import Federation
from kinfed.server import Schedule
from kinfed.testing.workbench import Bench, State, check, expect, expect_equal, hooked, outcome, state_of


@check
def outsiders_are_left_alone(bench: Bench) -> None:
    """A client that is not called keeps its state, bit for bit; one that was never called has none."""
    active: set[int] = set()
    ever: set[int] = set()
    before: State = {}

    def others() -> State:
        """States of those called before but not now."""
        states = loop.pool.states()
        called = torch.isin(states["ids"], torch.tensor(sorted(ever - active), dtype=torch.int64))
        return {name: tensor[called] for name, tensor in states.items()} if bool(called.any()) else {}

    def plan(inner: Any, server: Tree, sampled: Tensor, round: RoundInfo) -> tuple[Tree, Tensor]:
        planned, ids = inner(server, sampled, round)
        active.clear()
        active.update(ids.tolist())
        before.clear()
        before.update(others())
        return planned, ids

    with bench.loop(Schedule(participation=0.34), algorithm=hooked(bench.algorithm, plan=plan)) as loop:
        for _ in range(4):
            loop.round()
            expect_equal(others(), before, "clients that are not called keep their state")
            ever |= active
            expect(set(loop.pool.states()["ids"].tolist()) == ever, "only clients that were called have a state")


@dataclass(frozen=True)
class _Loses(Schedule):
    """Loses one client in the second round."""

    dropout: float = 0.5
    client: int = 0

    def dropouts(self, seed: int, round: int, ids: Tensor) -> Tensor:
        return (ids == self.client) & (round == 2)


def _poisonable(federation: Federation) -> tuple[Federation, Callable[[Tensor], None]]:
    """A copy, and a function that makes the training (and validation) features of some clients NaN."""
    features = replace(federation.features, raw=federation.features.raw.clone())
    copy = replace(federation, features=features)

    def poison(ids: Tensor) -> None:
        for k in ids.tolist():
            features.raw[torch.cat([copy.train[k], copy.val[k]])] = torch.nan

    return copy, poison


@check
def poisoned_clients_are_rejected(bench: Bench) -> None:
    """A client whose training ends in NaN is as good as lost: named, without effect on others, its state kept.

    The NaN come from its features, so data that cannot hold any (tokens, bytes) leave nothing to check."""
    if not bench.federation.features.raw.is_floating_point():
        return
    everyone = torch.arange(len(bench.federation))
    victim = len(everyone) // 2
    with bench.loop(_Loses(client=victim), rounds=2, chunk=1) as loop:
        without = state_of(loop)
    federation, poison = _poisonable(bench.federation)
    with bench.loop(Schedule(), rounds=1, federation=federation, chunk=1) as loop:
        poison(torch.tensor([victim]))
        report = loop.round()
        if not report.active:  # a method that has all it needs
            return
        alone = report.rejected == [victim] and report.dropped == 1
        expect(alone, f"the update of client {victim}, and no other, is rejected; rejected were {report.rejected}")
        expect_equal(state_of(loop), without, "a rejected update leaves what a lost one would")
        for name, tensor in state_of(loop).items():
            expect(bool(torch.isfinite(tensor).all()), f"NaN of one client gets nowhere; it is in {name}")
        before = state_of(loop)
        poison(everyone)
        report = loop.round()
        asked = report.active  # a method that needs one message of a client does not ask again
        expect(len(report.rejected) == asked, f"all {asked} updates are rejected; rejected were {report.rejected}")
        expect_equal(state_of(loop), before, "a round of rejected updates leaves every state as it was")


@check
def odd_sizes_work(bench: Bench) -> None:
    """The fewest clients that the method allows, with one example each; epochs; a client without test examples."""
    fewest, training = bench.fewest, bench.algorithm.training
    by_epoch = replace(bench.algorithm, training=replace(training, batch=3, epochs=2, steps=None))
    for sizes, test, method in (
        ((1,) * fewest, 1, bench.algorithm),
        ((2,) * fewest, 0, bench.algorithm),
        ((1, 3, 5, *(4,) * fewest), 2, by_epoch),
    ):
        data = bench.resized(sizes, test)
        with bench.loop(Schedule(), algorithm=replace(method), federation=data, chunk=None) as loop:
            for _ in range(3):
                report = loop.round()
                who = [sizes[k] for k in report.rejected]
                expect(not who, f"clients with {sizes} examples train; updates of those with {who} are not finite")
            for name, tensor in outcome(loop).items():
                expect(bool(torch.isfinite(tensor).all()), f"clients with {sizes} examples leave {name} finite")


@check
def losses_are_survived(bench: Bench) -> None:
    """Drop-outs and stragglers: every round ends, and what remains is finite."""
    schedule = Schedule(participation=0.5, dropout=0.5, stragglers=0.5)
    dropped = 0
    with bench.loop(schedule) as loop:
        for _ in range(6):
            report = loop.round()
            dropped += report.dropped
            expect(not report.rejected, f"nothing is rejected where no data are bad; rejected were {report.rejected}")
        expect(dropped > 0, "drop-outs are counted")
        for name, tensor in outcome(loop).items():
            expect(bool(torch.isfinite(tensor).all()), f"drop-outs and stragglers leave {name} finite")


@check
def never_called_clients_have_the_servers_model(bench: Bench) -> None:
    """A client that took part in no round deploys the server's model, if the server has one and clients keep a state;
    one that did has a model of its own, and the two are told apart."""
    with bench.loop(Schedule(participation=0.34), rounds=2) as loop:
        replied = set(loop.pool.states()["ids"].tolist())
        evaluation = loop.evaluate(keep_models=True)
        models = bench.algorithm.server_models(loop.server)
        took_part, theta = evaluation.took_part, evaluation.models
        assert took_part is not None
        assert theta is not None
        evaluated = set(took_part.nonzero().squeeze(1).tolist())
        expect(
            evaluated == replied, f"clients {sorted(replied)} took part; the evaluation says {sorted(evaluated)} did"
        )
        state = loop.pool.states().keys() - {"ids"}
        if models is None or not state or bench.algorithm.finetune or bool(took_part.all()):
            return
        outside = (~took_part).nonzero().squeeze(1)
        shared = models.rows(outside)
        same = theta.shape[1] != shared.shape[1] or torch.equal(theta[outside], shared)
        expect(same, "clients that took part in no round deploy the server's model")


@check
def it_learns(bench: Bench) -> None:
    """On three well separated classes personal models are well above chance after a few rounds; on other targets they
    are better than the outputs 0 of a model that has learned nothing, such as the mean of all."""
    with bench.loop(Schedule(), rounds=12, chunk=None) as loop:
        score = loop.evaluate().personal
        assert score is not None
        accuracy, loss = (float(total.sum() / score.count.sum()) for total in (score.correct, score.loss))
    if not bench.federation.problem.has_classes:
        data = bench.federation
        nothing = torch.zeros(len(data.test.rows), data.problem.outputs)
        constant = float(bench.make_task().objective.losses(nothing, data.targets[data.test.rows]).mean())
        expect(loss < constant, f"the personal loss is below that of outputs 0, {constant:.3f}; got {loss:.3f}")
        return
    chance = 1 / bench.federation.num_classes
    wanted = chance + (1 - chance) / 3
    expect(accuracy >= wanted, f"personal accuracy reaches {wanted:.2f} (chance is {chance:.2f}); got {accuracy:.2f}")
