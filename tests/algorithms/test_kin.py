"""Kin: its limits (Local, FedAvg, Ditto), shares and temperatures by hand, groups that exist and groups that do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_bench import WORKS, server
from torch import Tensor, nn

import kinfed
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.kin import kin as module
from kinfed.algorithms.kin.groups import centres, find_groups, no_sketches, sketch, with_sketches
from kinfed.algorithms.kin.kin import COMMON, GROUPED, TRIAL, Kin
from kinfed.algorithms.kin.shares import (
    LEAST,
    TEMPERATURES,
    UNKNOWN,
    VARIANCES,
    Evidence,
    calibrated,
    evidence,
    share_grid,
)
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.objective import make_objective
from kinfed.engine.personal.personal_models import MixtureTask, module_for, task_for
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ModelError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule

WORK = LocalTraining(lr=0.2, batch=10, steps=5)
UNIT = TEMPERATURES.index(1.0)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def planted(groups: int, clients: int = 12, examples: int = 40) -> tuple[Federation, Tensor]:
    """Groups of clients with names of their own for the same four classes; who is of which."""
    draw = np.random.default_rng(5)
    group = np.arange(clients) % groups
    kind = draw.integers(0, 4, (clients, examples))
    x = 2.0 * np.eye(4, 6)[kind] + 0.7 * draw.normal(size=(clients, examples, 6))
    y = (kind + group[:, None]) % 4
    owner = np.repeat(np.arange(clients), examples)
    data = Federation.from_arrays(x.reshape(-1, 6), y.reshape(-1), owner, num_classes=4)
    return data.with_validation(0.25, 0), torch.from_numpy(group)


@contextmanager
def simulated(method: Any, data: Federation, participation: float = 1.0) -> Iterator[Loop]:
    task = make_task(dense)
    pool = LocalPool(method, task, data, 0, workers=1)
    try:
        yield Loop(method, task, pool, data.population(0), Schedule(participation))
    finally:
        pool.close()


def same_partition(a: Tensor, b: Tensor) -> bool:
    return bool(((a[:, None] == a) == (b[:, None] == b)).all())


# What it coincides with.


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_alone_is_local_together_is_fedavg_and_adapted_a_running_mean_of_its_fine_tuned_models(
    training: LocalTraining,
) -> None:
    data, _ = planted(1)

    def states(method: Any) -> list[dict[str, Tensor]]:
        """After every round."""
        with simulated(method, data) as loop:
            rounds = []
            for _ in range(3):
                loop.round()
                rounds.append({name: tensor.clone() for name, tensor in loop.state().items()})
            return rounds

    kin, fedavg = states(Kin(training, max_groups=1)), states(FedAvg(training))
    assert torch.equal(kin[-1]["clients.rows.alone"], states(Local(training))[-1]["clients.rows.theta"])
    assert torch.equal(kin[-1]["server.w"], fedavg[-1]["server.w"])
    one, two, three = (state["clients.rows.theta"] for state in fedavg)
    assert torch.equal(kin[0]["clients.rows.adapted"], one)
    torch.testing.assert_close(kin[2]["clients.rows.adapted"], one / 4 + two / 4 + three / 2)


# Shares.


def losses_by_hand(task: Any, models: list[Tensor], data: Federation, client: int, t: list[float]) -> Tensor:
    """[B, J] float64"""
    rows = data.val[client]
    x, y = data.features.gather(rows), data.labels[rows]
    z = [task.module_of(theta[client])(x).detach().double() for theta in models]
    return torch.stack([nn.functional.cross_entropy(z[j] / t[j], y, reduction="none") for j in range(len(z))], 1)


def test_shares_by_hand() -> None:
    """The fixed point of EM under the prior, at the temperatures that were sent."""
    data, _ = planted(1)
    task = make_task(dense)
    cohort = data.cohort(torch.arange(12), 0, 1)
    start = task.init(0).expand(12, -1)
    models = [start, sgd(task, start, cohort.train.batches(WORK)), task.init(1).expand(12, -1)]
    validation = evidence(task, models, cohort.val)
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(12, -1)
    place = torch.tensor([UNIT, UNIT + 2, UNIT - 1]).expand(12, -1)
    pi = validation.shares(prior, place, 4.0)
    torch.testing.assert_close(pi.sum(1), torch.ones(12, dtype=torch.float64))
    for m in (0, 7):
        losses = losses_by_hand(task, models, data, m, [1.0, 2.0, 2**-0.5])
        q = torch.softmax(pi[m].log() - losses, 1)
        wanted = (4.0 * prior[m] + q.sum(0)) / (4.0 + len(losses))
        torch.testing.assert_close(pi[m], wanted, atol=1e-3, rtol=0)
        torch.testing.assert_close(validation.total_losses()[m, 1, UNIT + 2], losses[:, 1].sum(), atol=1e-5, rtol=1e-5)


def test_little_evidence_leaves_the_prior_and_much_does_not() -> None:
    data, _ = planted(1)
    task = make_task(dense)
    cohort = data.cohort(torch.arange(12), 0, 1)
    start = task.init(0).expand(12, -1)
    good = sgd(task, start, cohort.train.batches(WORK.with_steps(60)))
    validation = evidence(task, [start, good, start], cohort.val)
    prior = torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64).expand(12, -1)
    place = torch.full((12, 3), UNIT)
    torch.testing.assert_close(validation.shares(prior, place, 1e9), prior, atol=1e-6, rtol=0)
    assert bool((validation.shares(prior, place, 0.1)[:, 1] > 0.9).all())
    nothing = evidence(task, [start, good, start], replace(cohort.val, count=torch.zeros(12, dtype=torch.int64)))
    assert torch.equal(nothing.shares(prior, place, 2.0), prior)


def test_a_calibrated_model_has_logits_divided_by_the_temperature() -> None:
    task = make_task(dense)
    theta = torch.stack([task.init(0), task.init(1)])
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    cool = calibrated(task, theta, torch.tensor([0, len(TEMPERATURES) - 1]))
    wanted = task.logits(theta, x) / torch.tensor([0.5, 8.0])[:, None, None]
    torch.testing.assert_close(task.logits(cool, x), wanted)


def test_the_server_sends_the_temperature_with_the_least_loss_and_the_mean_of_shares() -> None:
    """After the second round, the first in which clients measure."""
    method, (data, _) = Kin(WORK, max_groups=1), planted(1)
    with simulated(method, data) as loop:
        loop.round()
        task, cohort = loop.task, data.cohort(torch.arange(12), 0, 2)
        down = method.download(loop.server, cohort.ids)
        assert down.temperature.tolist() == [[UNIT] * 3] * 12
        assert down.prior.tolist() == [[1 / 3] * 3] * 12
        state: Any = loop.pool.clients.take(cohort.ids)
        _, up = method.client_update(task, state, down, cohort)
        assert bool((up.examples > 0).all())
        loop.round()
        then = method.download(loop.server, cohort.ids)
        assert then.temperature[0].tolist() == up.loss.sum(0).argmin(1).tolist()
        torch.testing.assert_close(then.prior[0], 0.9 * up.pi.mean(0) + 0.1 / 3)
        loop.round()
        assert torch.equal(method.download(loop.server, cohort.ids).prior, then.prior)  # nobody measures


def test_shares_that_were_not_measured_in_a_round_do_not_count_again() -> None:
    """Of two replies one has measured: the population's mean is that one's, a tenth of the way to equal shares."""
    method, (data, _) = Kin(WORK, max_groups=1), planted(1)
    with simulated(method, data) as loop:
        everyone = data.cohort(torch.arange(12), 0, 1)
        down = method.download(loop.server, everyone.ids)
        _, up = method.client_update(loop.task, method.init_client(loop.task, everyone), down, everyone)
        assert not bool(up.examples.any())  # in nobody's first round
        pi, examples = up.pi.clone(), up.examples.clone()
        pi[3], examples[3] = torch.tensor([0.7, 0.2, 0.1]), 9.0
        told = RoundInfo(1, data.population(0))
        new = method.aggregate(loop.server, everyone.ids, replace(up, pi=pi, examples=examples, loss=up.loss + 1), told)
        torch.testing.assert_close(new.prior, 0.9 * pi[3] + 0.1 / 3)


def test_a_trial_compares_models_after_local_steps() -> None:
    """What a client's own steps repair is no reason for groups: it sends the loss of the model that it sends back."""
    method, (data, _) = Kin(WORK), planted(1)
    with simulated(method, data) as loop:
        everyone = data.cohort(torch.arange(12), 0, 1)
        down = method.download(loop.server, everyone.ids)
        _, up = method.client_update(loop.task, method.init_client(loop.task, everyone), down, everyone)
        for m in (0, 5):
            losses = losses_by_hand(loop.task, [down.w + up.delta], data, m, [1.0])
            torch.testing.assert_close(up.trial[m], losses.mean(), atol=1e-5, rtol=1e-5)


def test_a_client_that_never_trained_deploys_the_servers_model() -> None:
    method, (data, _) = Kin(WORK), planted(1)
    with simulated(method, data, participation=0.5) as loop:
        loop.round()
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.took_part is not None
        assert evaluation.models is not None
        _, pi = MixtureTask(loop.task, 3).split(evaluation.models)
        outside = ~evaluation.took_part
        assert bool(outside.any())
        torch.testing.assert_close(pi[outside], torch.tensor([LEAST, 1 - 2 * LEAST, LEAST]).expand(6, -1))


def test_numbers_are_predicted_by_the_mean_of_the_mixture() -> None:
    """Shares by normal densities around each candidate's prediction, at the variances that were sent."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=(240, 4))
    y = x @ np.array([1.0, -1.0, 0.5, 0.0]) + 0.1 * draw.normal(size=240)
    data = Federation.from_arrays(x, y, np.repeat(np.arange(6), 40)).with_validation(0.25, 0)
    task = make_task(lambda: nn.Linear(4, 1), objective=make_objective(data.problem))
    method = Kin(LocalTraining(lr=0.1, batch=10, steps=10))
    pool = LocalPool(method, task, data, 0, workers=1)
    loop = Loop(method, task, pool, data.population(0), Schedule())
    for _ in range(5):
        loop.round()
    evaluation = loop.evaluate(keep_models=True)
    models, pi = MixtureTask(task, 3).split(evaluation.models)  # type: ignore[arg-type]
    rows = data.test[2]
    inputs = data.features.gather(rows)
    parts = torch.stack([task.module_of(theta[2])(inputs)[:, 0] for theta in models], -1)
    whole = MixtureTask(task, 3).module_of(evaluation.models[2])(inputs)[:, 0]  # type: ignore[index]
    torch.testing.assert_close(whole, parts @ pi[2])
    cohort = data.cohort(torch.arange(6), 0, 6)
    validation = evidence(task, models, cohort.val)
    wanted = (task.logits(models[0], cohort.val.features.gather(data.val[1])[None].expand(6, -1, -1))[1, :, 0]).double()
    square = (wanted - data.targets[data.val[1]]).square()
    torch.testing.assert_close(validation.total_losses()[1, 0, VARIANCES.index(1.0)], square.sum() / 2)
    assert evaluation.personal is not None
    assert float(evaluation.personal.loss.sum() / evaluation.personal.count.sum()) < 0.1  # of a variance of 1
    pool.close()


# Groups.


def test_sketches_keep_what_directions_have_in_common() -> None:
    numbers = torch.Generator().manual_seed(0)
    base, noise = torch.randn(3, 4000, generator=numbers), torch.randn(9, 4000, generator=numbers)
    direction = base.repeat(3, 1) + 0.5 * noise
    unit = nn.functional.normalize(direction, dim=1)
    small = sketch(direction, 7)
    assert float((small @ small.T - unit @ unit.T).abs().max()) < 0.25  # four standard deviations of 1/√256
    assert same_partition(find_groups(small, 8, 0.1, 0), torch.arange(9) % 3)  # type: ignore[arg-type]
    assert find_groups(sketch(noise, 7), 8, 0.1, 0) is None
    assert find_groups(small[:3], 8, 0.1, 0) is None  # too few to say
    assert bool((sketch(torch.zeros(2, 50), 7) == 0).all())


@pytest.mark.parametrize("clients", [12, 40_000])
def test_new_sketches_leave_those_before_as_they_were(clients: int) -> None:
    """Of 40,000 clients, few enough are known for the others not to be copied."""
    before, known, ids = no_sketches(clients, torch.zeros(1)), torch.tensor([1, 2, 5]), torch.tensor([2, 7])
    before[known] = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    kept, new = before.clone(), torch.ones(2, 256)
    after = with_sketches(before, known, ids, new)
    assert torch.equal(after, kept.index_copy(0, ids, new))
    assert torch.equal(before, kept)


def test_centres_are_means() -> None:
    points = torch.tensor([[0.0, 2.0], [4.0, 0.0], [2.0, 4.0]])
    assert centres(points, torch.tensor([1, 0, 1])).tolist() == [[4.0, 0.0], [1.0, 3.0]]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_groups_that_exist_are_found_tried_and_kept(participation: float) -> None:
    data, group = planted(3)
    with simulated(Kin(WORK), data, participation) as loop:
        phases = []
        for _ in range(24):
            loop.round()
            phases.append(int(server(loop, "phase")))
        assert phases == sorted(phases)
        assert {COMMON, TRIAL, GROUPED} == set(phases)
        known = server(loop, "group") >= 0
        assert same_partition(server(loop, "group")[known], group[known])
        evaluation = loop.evaluate()
        assert evaluation.personal is not None
        personal = float(evaluation.personal.correct.sum() / evaluation.personal.count.sum())
        alone = evaluation.alternatives["alone"]
        assert personal > 0.8
        assert personal >= float(alone.correct.sum() / alone.count.sum())


def test_groups_that_do_not_exist_are_not_kept() -> None:
    data, _ = planted(1)
    with simulated(Kin(WORK, clearness=-1.0), data) as loop:  # any grouping is tried
        phases = []
        for _ in range(14):
            loop.round()
            phases.append(int(server(loop, "phase")))
        assert TRIAL in phases
        assert phases[-1] == COMMON
        assert len(server(loop, "omega")) == 0
        assert bool((server(loop, "group") == module.NONE).all())


def test_a_trial_trains_common_and_group_models_in_turns() -> None:
    data, _ = planted(3)
    with simulated(Kin(WORK, trial=4), data) as loop:
        while int(server(loop, "phase")) != TRIAL:
            loop.round()
        w, omega = server(loop, "w"), server(loop, "omega")
        assert torch.equal(omega, w.expand(len(omega), -1))
        assert bool((server(loop, "loss") == UNKNOWN).all())
        loop.round()
        assert not torch.equal(server(loop, "w"), w)
        assert torch.equal(server(loop, "omega"), omega)
        w = server(loop, "w")
        loop.round()
        assert torch.equal(server(loop, "w"), w)
        assert not torch.equal(server(loop, "omega"), omega)
        assert bool((server(loop, "loss") >= 0).all())


def judged(gain: list[float], rounds: int) -> int:
    """The phase after a trial's round with these differences of losses."""
    method, n = Kin(WORK, trial=6), len(gain)
    data, _ = planted(1)
    state = method.init_server(make_task(dense), data.population(0))
    loss = torch.stack([1.0 + torch.tensor(gain, dtype=torch.float64), torch.ones(n, dtype=torch.float64)], 1)
    state = replace(
        state, phase=torch.tensor(TRIAL), since=torch.tensor(5), loss=loss, group=torch.arange(n) % 2,
        omega=state.w.repeat(2, 1), centre=torch.zeros(2, module.BUCKETS),
    )  # fmt: skip
    return int(method._judge(state, RoundInfo(4 + rounds, data.population(0))).phase)


def test_the_evidence_of_a_trial_by_hand() -> None:
    """Mean differences in standard errors: 4.2 (kept), 1.7 (goes on, not for ever), −1.7 (refused)."""
    clear, between = [0.4, 0.5, 0.1, 0.6, 0.3, 0.2], [0.4, -0.2, 0.3, 0.5, -0.1, 0.1]
    assert judged(clear, 5) == TRIAL  # too early
    assert judged(clear, 6) == GROUPED
    assert judged(between, 6) == TRIAL
    assert judged(between, 30) == COMMON
    assert judged([-g for g in between], 6) == COMMON


def test_who_comes_after_groups_were_found_joins_the_nearest() -> None:
    method, (data, group) = Kin(WORK), planted(3)
    with simulated(method, data) as loop:
        while int(server(loop, "phase")) != GROUPED:
            loop.round()
        state = loop.server.named()["group"].clone()
        wanted = int(state[4])
        state[4] = module.NONE
        loop.server = replace(loop.server, group=state)
        loop.round()
        assert int(server(loop, "group")[4]) == wanted
        newcomers = data.cohort(torch.tensor([5]), 0, 9)
        placed = method.place_newcomer(loop.task, loop.server, newcomers)
        assert int(placed.group[5]) == int(server(loop, "group")[5])
        assert same_partition(placed.group, group)


# Options.


def test_one_merged_model_is_of_the_models_size() -> None:
    data, _ = planted(1)
    with simulated(Kin(WORK, deploy="merged"), data) as loop:
        for _ in range(3):
            loop.round()
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.models is not None
        assert evaluation.models.shape == (12, loop.task.num_params)


def test_refitting_trains_alone_and_together_on_validation_examples_as_well_after_shares_are_known() -> None:
    data, _ = planted(1)
    plain, refitting = Kin(WORK), Kin(WORK, refit=2)
    with simulated(plain, data) as loop:
        for _ in range(3):
            loop.round()
        cohort = data.cohort(torch.arange(12), 0, 4)
        client: Any = loop.pool.clients.take(cohort.ids)
        down = plain.download(loop.server, cohort.ids)
        before = plain.personalize(loop.task, client, down, cohort)
        after = refitting.personalize(loop.task, client, down, cohort)
        lists = [torch.cat([data.train[m], data.val[m]]).numpy() for m in range(12)]
        every = replace(data, train=Ragged.of(lists), val=Ragged.empty(12)).cohort(cohort.ids, 0, 4).train
        batches = every.batches(WORK.with_steps(10), stream="refit")
        assert torch.equal(after["alone"], sgd(loop.task, client.alone, batches))
        assert torch.equal(after["adapted"], sgd(loop.task, down.w, batches))
        assert torch.equal(after["together"], before["together"])
        task = MixtureTask(loop.task, 3)
        assert torch.equal(task.split(after["personal"])[1], task.split(before["personal"])[1])  # shares
    assert refitting.privacy(data.train.count) is None


class Named(nn.Module):
    """The network of `dense`, as many write it: its output are logarithms of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.net(x), 1)


def test_models_that_end_otherwise_are_deployed_at_the_temperatures_of_their_shares() -> None:
    """Whether the last layer is divided by T or T stands beside the model, the mixture is the same function."""
    data, _ = planted(1)
    example = data.features.gather(torch.arange(2))
    ends_linear, ends_otherwise = make_task(dense, example=example), make_task(Named, example=example)
    assert ends_otherwise.no_features.startswith("the model's output is not that of 'net.2'")
    cohort = data.cohort(torch.arange(12), 0, 1)
    start = ends_linear.init(0).expand(12, -1)
    trained = sgd(ends_linear, start, cohort.train.batches(WORK.with_steps(60)))
    down = module.Down(
        start, torch.full((12, 3), 1 / 3, dtype=torch.float64), torch.tensor([UNIT + 4, UNIT, UNIT - 1]).expand(12, -1)
    )
    client = module.Client(trained, start, torch.zeros(12, 3), torch.ones(12, dtype=torch.int64))
    method, test = Kin(WORK), data.features.gather(data.test[3])
    rows = {task: method.personalize(task, client, down, cohort)["personal"] for task in (ends_linear, ends_otherwise)}
    first, second = (torch.softmax(module_for(task, row[3])(test), 1) for task, row in rows.items())
    torch.testing.assert_close(first, second)
    many = (task_for(task, row).logits(row[3:4], test[None]) for task, row in rows.items())
    torch.testing.assert_close(*(torch.softmax(z, -1) for z in many))
    at_one = method.personalize(ends_otherwise, client, replace(down, temperature=torch.full((12, 3), UNIT)), cohort)
    plain = torch.softmax(module_for(ends_otherwise, at_one["personal"][3])(test), 1)
    assert float((plain - second).detach().abs().max()) > 0.01
    with pytest.raises(ModelError, match="at temperatures of their own is not trained"):
        task_for(ends_otherwise, rows[ends_otherwise]).grad(
            rows[ends_otherwise], next(iter(cohort.train.batches(WORK)))
        )


def test_a_model_that_ends_otherwise_runs_and_is_read_back_with_its_temperatures(tmp_path: Path) -> None:
    data, _ = planted(2)
    settings = {"rounds": 5, "steps": 20, "seeds": (0,), "participation": 1.0, "eval_every": 0, "progress": False}
    result = kinfed.run(algorithms="kin", federation=data, model=Named, out=tmp_path / "run", **settings)
    x = data.features.gather(data.test[1])
    here, there = (
        result.personal_model("1").module,
        kinfed.load(tmp_path / "run").personal_model("1", build=Named).module,
    )
    assert here.temperature is not None
    assert set(here.temperature[:-1].tolist()) != {1.0}
    torch.testing.assert_close(here(x), there(x))


def diverging(kind: str) -> tuple[Any, Any, Any]:
    """A task, candidates of 12 clients, and their cohort; at client 4 `together` diverged, at client 5 all did."""
    data, _ = planted(1)
    task, cohort = make_task(dense), data.cohort(torch.arange(12), 0, 1)
    start = task.init(0).expand(12, -1)
    models = [start.clone(), sgd(task, start, cohort.train.batches(WORK)), start.clone()]
    bad = {"not a number": torch.nan, "absurd": 1e30, "far off": 1e5}[kind]
    models[1][4, -1 if kind == "far off" else slice(None)] = bad * (1e4 if kind == "far off" else 1)
    for theta in models:
        theta[5] = torch.nan
    return task, tuple(models), cohort


@pytest.mark.parametrize("deploy", ["mixture", "merged"])
@pytest.mark.parametrize("kind", ["not a number", "absurd", "far off"])
def test_a_candidate_that_diverged_has_no_share_and_spoils_nothing(kind: str, deploy: Any) -> None:
    task, (alone, together, adapted), cohort = diverging(kind)
    method = Kin(WORK, deploy=deploy)
    prior = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64).expand(12, -1)
    down = module.Down(together, prior, torch.full((12, 3), UNIT))
    replies = torch.ones(12, dtype=torch.int64)
    replies[4:6] = 0 if deploy == "merged" else 1  # whoever never trained deploys the server's, unless that diverged
    row = method.personalize(task, module.Client(alone, adapted, prior, replies), down, cohort)["personal"]
    assert bool(torch.isfinite(row[[0, 4, 11]]).all())
    assert not bool(torch.isfinite(row[5]).all())  # nothing is better: a run says that it diverged
    if deploy == "mixture":
        pi = MixtureTask(task, 3).split(row)[1]
        assert pi[4].tolist() == pytest.approx([0.5, 0.0, 0.5], abs=1e-6)  # alike, as both are the start
        assert float(pi[0, 1]) > 0.3


def test_training_alone_goes_on_where_training_together_diverges() -> None:
    """Parameters of 1e30 make every step from the common model infinite; alone is Local's model all the same."""
    data, _ = planted(1)
    with simulated(Kin(WORK), data) as loop, simulated(Local(WORK), data) as local:
        loop.server = replace(loop.server, w=torch.full_like(loop.server.w, 1e30))
        for _ in range(3):
            loop.round()
            local.round()
        assert torch.equal(loop.state()["clients.rows.alone"], local.state()["clients.rows.theta"])
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.models is not None
        pi = MixtureTask(loop.task, 3).split(evaluation.models)[1]
        torch.testing.assert_close(pi, torch.tensor([1.0, 0.0, 0.0]).expand(12, -1))


def test_bytes_by_hand() -> None:
    """Down: a model, three shares, three places of temperatures. Up: its change, a sketch, the trial's loss, three
    shares, losses at all temperatures of three models, and the numbers of validation and training examples."""
    data, _ = planted(1, clients=3)
    with simulated(Kin(WORK), data) as loop:
        report = loop.round()
    P = (6 * 8 + 8) + (8 * 4 + 4)
    assert report.bytes_down == 3 * (4 * P + 3 * 8 + 3 * 8)
    assert report.bytes_up == 3 * (4 * P + 4 * module.BUCKETS + 8 * (1 + 3 + 3 * len(TEMPERATURES) + 1) + 4)


def evidence_of(p: torch.Tensor) -> Evidence:
    """Evidence from probabilities p [n, B, J] of the truth, at every temperature the same."""
    losses = -p.double().log()[..., None].expand(*p.shape, len(TEMPERATURES))
    weight = torch.ones(p.shape[:2], dtype=torch.float64)
    return Evidence([(slice(None), losses, weight)], weight.sum(1), torch.ones(len(p), p.shape[2], dtype=torch.bool))


def test_safe_shares_are_those_of_the_theory_on_a_grid() -> None:
    grid = share_grid(3)
    assert grid.shape == (66, 3)
    assert grid[0].tolist() == [1.0, 0.0, 0.0]
    p = torch.rand(2, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prior, at_one = torch.tensor([[0.2, 0.5, 0.3]] * 2, dtype=torch.float64), torch.full((2, 3), UNIT)
    shares = evidence_of(p).safe_shares(prior, at_one, 10.0)
    weight = torch.exp(10.0 * (prior[0] * grid.clamp_min(1e-4).log()).sum(1))
    weight[0] = 0
    weight = 0.5 * weight / weight.sum()
    weight[0] = 0.5
    for k in range(2):
        W, mean = weight.clone(), weight @ grid
        for i in range(7):
            W = W * (grid @ p[k, i])
            W /= W.sum()
            mean = mean + W @ grid
        assert shares[k].tolist() == pytest.approx((mean / 8).tolist())
    unseen = Evidence([], torch.zeros(1, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool))
    nothing = unseen.safe_shares(prior[:1], at_one[:1], 10.0)
    assert nothing[0].tolist() == pytest.approx((weight @ grid).tolist())


def test_safe_shares_cost_less_than_promised_where_alone_is_best_and_follow_what_is_better() -> None:
    draw = torch.Generator().manual_seed(1)
    noise = 0.1 * torch.rand(400, 21, 3, generator=draw, dtype=torch.float64)
    prior = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64).expand(400, 3)
    places = torch.full((400, 3), UNIT)
    for best in range(3):
        p = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64) + 0.3 * (torch.arange(3) == best) - noise
        shares = evidence_of(p[:, :20]).safe_shares(prior, places, 10.0)
        fresh = (shares * p[:, 20]).sum(1).log() - p[:, 20, 0].log()
        assert float(fresh.mean()) >= -math.log(2) / 21
        assert float(shares[:, best].mean()) > (0.8, 0.45, 0.3)[best]
