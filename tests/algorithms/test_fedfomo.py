"""FedFomo and FedFomo-MA: weights and steps worked by hand, the server's choices, bytes, memory, and who finds whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_bench import info
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed import simulate
from kinfed.algorithms.fedfomo import affinity
from kinfed.algorithms.fedfomo.affinity import Affinity, mixing_weights, validation_or_train, weigh
from kinfed.algorithms.fedfomo.fedfomo import Client, Down, FedFomo
from kinfed.algorithms.fedfomo.fomo_server import Server, Up
from kinfed.algorithms.fedfomo.model_averages import FedFomoMA
from kinfed.algorithms.local import Local
from kinfed.core import rng
from kinfed.core.kernels import weighted_sum
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, check_variant, tiny_federation, tiny_model
from kinfed.testing.workbench import hooked
from kinfed.theory.gaussian import GaussianTask

STEP = LocalTraining(lr=0.1, batch=100, steps=1)
MODEL_BYTES = 4 * 115  # tiny_model has 115 float32 parameters
KEY = rng.root(3, "test")


def numbers(train: list[list[float]], val: list[list[float]]) -> tuple[Federation, GaussianTask]:
    """Clients who estimate a number: the loss of θ is the mean of (θ − x)² / 2, its gradient θ − mean(x)."""
    parts = [*train, *val]
    flat = torch.tensor([x for part in parts for x in part])
    rows = torch.arange(len(flat)).split([len(part) for part in parts])
    k = len(train)
    federation = Federation(
        Features(flat[:, None]), torch.zeros(len(flat), dtype=torch.int64), Problem.of_classes(1),
        Ragged.of(rows[:k]), Ragged.of(rows[k:]), Ragged.empty(k), [str(i) for i in range(k)],
    )  # fmt: skip
    return federation, GaussianTask(torch.ones(k), 1.0)


def loop_over(
    method: Any, federation: Federation, task: Any, schedule: Schedule | None = None, chunk: int | None = None
) -> Loop:
    pool = LocalPool(method, task, federation, 0, workers=1, chunk=chunk)
    return Loop(method, task, pool, federation.population(0), schedule or Schedule())


def state(old: list[float], theta: list[float], seen: bool = True) -> Client:
    n = len(old)
    return Client(
        torch.tensor(old)[:, None],
        torch.tensor(theta)[:, None],
        torch.full((n,), seen),
        torch.zeros(n, dtype=torch.bool),
        torch.zeros(n, dtype=torch.int64),
    )


def sent(*models: float) -> Down:
    return Down(torch.tensor(models).reshape(1, -1, 1), torch.zeros(1, 0, 1))


def updated(method: FedFomo, client: Client, down: Down, val: list[float], train: float = 0.0) -> tuple[Client, Up]:
    federation, task = numbers([[train]], [val])
    return method.client_update(task, client, down, federation.cohort(torch.tensor([0]), 0, 1))


# One client's combination.


@pytest.mark.parametrize(
    ("norm", "own", "other", "mixed"),
    [
        ("l2", 2.5, 0.5, 10 / 6),
        ("l1", 2.5, 0.5, 10 / 6),
        ("l2sq", 2.5, 0.1, (2.5 + 0.1 * 5) / 2.6),
        ("none", 2.5, 2.5, 3.0),
    ],
)
def test_a_combination_worked_by_hand(norm: str, own: float, other: float, mixed: float) -> None:
    # Validation examples 2 and 4: L(0) = 5, L(1) = L(5) = 2.5. Distances from 0: 1 and 5.
    client, up = updated(
        FedFomo(training=STEP, models=3, norm=norm), state([0.0], [1.0]), sent(5.0), [2.0, 4.0], train=7.0
    )
    torch.testing.assert_close(up.w, torch.tensor([[own, other, 0.0]]))
    torch.testing.assert_close(client.old, torch.tensor([[mixed]]))
    torch.testing.assert_close(client.theta, torch.tensor([[mixed - 0.1 * (mixed - 7.0)]]))
    assert torch.equal(up.theta, client.theta)
    assert bool(client.seen)
    assert not bool(client.kept)


def test_worse_models_weigh_nothing_but_are_reported_with_their_sign() -> None:
    # L(0) = 5 as above; L(-1) = 8.5 at distance 1; L(3) = 0.5 at distance 3.
    client, up = updated(FedFomo(training=STEP, models=3), state([0.0], [-1.0]), sent(3.0), [2.0, 4.0])
    torch.testing.assert_close(up.w, torch.tensor([[-3.5, 1.5, 0.0]]))
    assert client.old.item() == 3.0


def test_without_a_positive_weight_the_last_training_is_discarded() -> None:
    client, up = updated(FedFomo(training=STEP, models=2), state([3.0], [9.0]), sent(-5.0), [2.0, 4.0], train=13.0)
    assert bool((up.w < 0).all())
    assert client.old.item() == 3.0
    assert bool(client.kept)
    torch.testing.assert_close(client.theta, torch.tensor([[4.0]]))  # 3 − 0.1 (3 − 13): training restarts at θ^old


def test_identical_models_change_nothing() -> None:
    client, up = updated(FedFomo(training=STEP, models=3), state([1.7], [1.7]), sent(1.7, 1.7), [2.0, 4.0])
    assert torch.equal(up.w, torch.zeros(1, 3))
    assert torch.equal(client.old, torch.tensor([[1.7]]))


def test_a_better_model_beside_an_unchanged_own_one_gets_all_the_weight() -> None:
    client, _ = updated(FedFomo(training=STEP, models=3), state([1.7], [1.7]), sent(2.9, 1.7), [2.0, 4.0])
    assert torch.equal(client.old, torch.tensor([[2.9]]))


def test_a_model_with_a_loss_that_is_not_finite_weighs_nothing_and_is_counted() -> None:
    client, up = updated(FedFomo(training=STEP, models=3), state([0.0], [1.0]), sent(1e30, 5.0), [2.0, 4.0])
    torch.testing.assert_close(up.w, torch.tensor([[2.5, 0.0, 0.5]]))
    assert client.unusable.tolist() == [1]
    w, unusable = weigh(torch.tensor([[torch.nan, 1.0]]), [torch.ones(1, 2)] * 2, torch.zeros(1, 2), "l1", slice(0, 2))
    assert w.tolist() == [[0.0, 0.5]]
    assert unusable.tolist() == [1]


def test_a_model_at_the_same_place_weighs_nothing_whatever_its_loss_seems_to_be() -> None:
    """Equal models have equal losses up to rounding; a distance of zero must not blow the rounding up."""
    base = torch.ones(1, 2)
    w, _ = weigh(torch.tensor([[1e-7, 1e-7]], dtype=torch.float64), [base.clone(), base + 1], base, "l1", slice(None))
    assert w.tolist() == [[0.0, pytest.approx(5e-8)]]


def test_a_bad_baseline_leaves_everything_as_it_is() -> None:
    client, up = updated(FedFomo(training=STEP, models=2), state([1e30], [1.0]), sent(3.0), [2.0, 4.0])
    assert torch.equal(up.w, torch.zeros(1, 2))
    assert client.unusable.tolist() == [2]


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), min_size=1, max_size=5),
)
def test_shares_lie_in_the_simplex_or_are_all_zero(rows: list[list[float]]) -> None:
    w = torch.tensor(rows, dtype=torch.float64)
    share = mixing_weights(w)
    assert bool(((share >= 0) & (share <= 1)).all())
    positive = (w > 0).any(1)
    torch.testing.assert_close(share.sum(1), positive.to(torch.float64))
    assert bool((share[w <= 0] == 0).all())


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 100))
def test_a_combination_stays_between_its_models(clients: int, models: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = [torch.from_numpy(draw.normal(size=(clients, 7)).astype(np.float32)) for _ in range(models)]
    share = mixing_weights(torch.from_numpy(draw.normal(size=(clients, models))))
    mixed = weighted_sum(rows, share)
    some = share.sum(1) > 0
    stacked = torch.stack(rows, 1)[some]
    assert bool((mixed[some] <= stacked.amax(1) + 1e-5).all())
    assert bool((mixed[some] >= stacked.amin(1) - 1e-5).all())


def test_a_client_without_validation_examples_is_judged_by_its_training_examples() -> None:
    federation, task = numbers([[1.0, 2.0], [3.0], [4.0]], [[5.0, 6.0], [], [7.0]])
    part = validation_or_train(federation.cohort(torch.tensor([1, 0, 2]), 0, 1))
    assert part.count.tolist() == [1, 2, 1]
    lists = [federation.features.raw[part.rows[s : s + c], 0].tolist() for s, c in zip(part.start, part.count)]  # noqa: B905
    assert lists == [[3.0], [5.0, 6.0], [7.0]]
    assert task.mean_loss(torch.zeros(3, 1), part).tolist() == [4.5, 15.25, 24.5]


def test_alone_and_always_improving_it_is_local_training() -> None:
    federation, task = numbers([[1.0, 3.0], [-2.0]], [[], []])  # judged by training examples: every step improves
    ours = loop_over(FedFomo(training=STEP, models=1), federation, task)
    theirs = loop_over(Local(training=STEP), federation, task)
    for _ in range(4):
        ours.round()
        theirs.round()
    fomo, local = ours.pool.clients.take(torch.arange(2)), theirs.pool.clients.take(torch.arange(2))
    assert torch.equal(fomo.named()["theta"], local.named()["theta"])


# Newcomers.


@pytest.mark.parametrize(("newcomers", "start"), [("train", 0.0), ("combine", 3.0)])
def test_a_newcomer_weighs_models_and_starts_as_asked(newcomers: str, start: float) -> None:
    method = FedFomo(training=STEP, models=2, newcomers=newcomers)
    client, up = updated(method, state([0.0], [0.0], seen=False), sent(3.0), [2.0, 4.0])
    torch.testing.assert_close(up.w, torch.tensor([[0.0, 1.5]]))
    assert client.old.item() == start
    assert not bool(client.kept)


def test_a_client_that_never_trained_is_evaluated_with_a_combination() -> None:
    federation, task = numbers([[0.0]], [[2.0, 4.0]])
    cohort = federation.cohort(torch.tensor([0]), 0, 1)
    method = FedFomo(training=STEP, models=2)
    assert method.personalize(task, method.init_client(task, cohort), sent(3.0), cohort)["post_federate"].item() == 3.0
    average = FedFomoMA(training=STEP, models=2)
    down = average.download(
        server_of(2, theta=torch.tensor([[1.0], [3.0]]), plan=torch.tensor([[0, 1]] * 2)), torch.tensor([0])
    )
    client = average.init_client(task, cohort)
    assert average.personalize(task, client, down, cohort)["post_federate"].item() == 2.0
    trained, _ = average.client_update(task, client, down, cohort)
    assert trained.theta.item() == 0.0  # from the common start, 0, one step towards 0
    eager, _ = replace(average, newcomers="combine").client_update(task, client, down, cohort)
    torch.testing.assert_close(eager.theta, torch.tensor([[1.8]]))


# The server.


def server_of(k: int, P: int = 1, **changes: Any) -> Server:
    made = FedFomo(models=3).init_server(GaussianTask(torch.ones(k), 1.0, P), population(k))
    return replace(made, **changes)


def population(k: int) -> Any:
    return numbers([[0.0]] * k, [[0.0]] * k)[0].population(0)


def dense(P: Affinity, k: int) -> Tensor:
    return P.rows(torch.arange(k), torch.arange(k))


def kept(P: Tensor) -> Affinity:
    return Affinity.identity().replaced(torch.arange(len(P)), torch.arange(P.shape[1]), P)


@given(st.integers(1, 6), st.integers(0, 99))
def test_pairs_that_met_are_the_whole_matrix(k: int, seed: int) -> None:
    """Bit for bit, after many rounds of sums, for any clients and others; and only they are kept."""
    draw = torch.Generator().manual_seed(seed)
    P, pairs, met = torch.eye(k, dtype=torch.float64), Affinity.identity(), set()
    for _ in range(5):
        ids = torch.randperm(k, generator=draw)[: 1 + seed % k].sort().values
        others = torch.stack([torch.randperm(k, generator=draw)[: 1 + seed % 3] for _ in ids])
        w = torch.randn(others.shape, generator=draw, dtype=torch.float64)
        before = pairs.clone()
        P, after = P.index_put((ids[:, None], others), w, accumulate=True), pairs.added(ids, others, w)
        assert torch.equal(pairs.value, before.value)
        pairs, met = after, met | {(int(i), int(n)) for i, row in zip(ids, others, strict=True) for n in row}
    assert torch.equal(dense(pairs, k), P)
    assert len(pairs.pair) == len(met)
    some = torch.randperm(k, generator=draw)
    assert torch.equal(pairs.rows(some[:2], some), P[some[:2]][:, some])


def test_the_server_of_very_many_clients_is_small() -> None:
    """Of what a matrix of all pairs would be, 80 GB, nothing is kept before clients meet."""
    k = 100_000
    method = FedFomo(models=3)
    by_client = {"theta": torch.zeros(k, 1), "heard": torch.full((k, 3), -1), "mix": torch.zeros(k, 3).double()}
    server = server_of(4, uploaded=torch.ones(k, dtype=torch.int64), **by_client)
    up = Up(torch.ones(2, 1), torch.tensor([[0.5, -2.0, 1.5], [0.0, 3.0, -0.25]]), None)
    ids = torch.tensor([7, 99_999])
    plan = torch.full((k, 3), -1)
    plan[ids] = torch.tensor([[7, 2, 99_999], [99_999, 0, 1]])
    new = method.aggregate(replace(server, plan=plan), ids, up, info(1))
    assert sum(tensor.nbytes for tensor in new.affinity.named().values()) == 16 * 6
    chosen = affinity.choose_models(new.affinity, ids, server.uploaded > 0, 1, 0.0, KEY)
    assert chosen.tolist() == [[99_999], [0]]


def test_the_server_adds_signed_weights_to_its_affinities() -> None:
    method = FedFomo(models=3)
    server = server_of(4, plan=torch.tensor([[0, 2, 3], [1, 0, 2], [-1, -1, -1], [3, 2, 0]]))
    up = Up(torch.tensor([[7.0], [9.0]]), torch.tensor([[0.5, -2.0, 1.5], [0.0, 3.0, -0.25]]), None)
    new = method.aggregate(server, torch.tensor([0, 3]), up, info(1))
    assert dense(new.affinity, 4).tolist() == [[1.5, 0, -2, 1.5], [0, 1, 0, 0], [0, 0, 1, 0], [-0.25, 0, 3, 1]]
    assert new.theta.squeeze(1).tolist() == [7, 0, 0, 9]
    assert new.uploaded.tolist() == [1, 0, 0, 1]
    assert new.heard.tolist() == [[0, 2, 3], [-1] * 3, [-1] * 3, [3, 2, 0]]
    assert new.mix.tolist() == [[0.25, 0, 0.75], [0] * 3, [0] * 3, [0, 1, 0]]
    assert new.plan.shape == (4, 0)
    figures = method.figures(new)
    assert figures["weights"].tolist() == [[0.25, 0, 0, 0.75], [0] * 4, [0] * 4, [0, 0, 1, 0]]
    assert figures["own_share"] == 0.125
    scaled = replace(method, affinity_update="abs_sum").aggregate(
        server, torch.tensor([3]), up.take(slice(1, 2)), info(1)
    )
    assert dense(scaled.affinity, 4)[3].tolist() == [pytest.approx(-0.25 / 2.75), 0, pytest.approx(3 / 2.75), 1]


def test_the_best_are_sent_first() -> None:
    P = torch.tensor([[9, 1, 4, 2, 3], [0, 9, 0, 5, 1], [8, 7, 6, 5, 4.0]], dtype=torch.float64)
    P = torch.cat([P, torch.zeros(2, 5, dtype=torch.float64)])
    everyone = torch.ones(5, dtype=torch.bool)
    assert affinity.choose_models(kept(P), torch.tensor([0, 2]), everyone, 3, 0.0, KEY).tolist() == [
        [2, 4, 3],
        [0, 1, 3],
    ]
    some = torch.tensor([True, True, False, True, True])
    assert affinity.choose_models(kept(P), torch.tensor([0, 1, 2]), some, 2, 0.0, KEY).tolist() == [
        [4, 3],
        [3, 4],
        [0, 1],
    ]


def picks(values: list[float], explore: float, times: int = 1000, count: int = 2) -> Tensor:
    """[times, count]: what so many clients, all with these affinities to six others, are sent."""
    P = torch.zeros(6 + times, 6 + times, dtype=torch.float64)
    P[6:, :6] = torch.tensor(values, dtype=torch.float64)
    ids = torch.arange(6, 6 + times)
    return affinity.choose_models(kept(P), ids, torch.arange(6 + times) < 6, count, explore, KEY)


def test_equal_affinities_have_an_equal_chance() -> None:
    chosen = picks([0.0] * 6, 0.0)
    often = torch.bincount(chosen.reshape(-1), minlength=6)
    assert float((often - 1000 / 3).abs().max()) < 75  # standard deviation 15
    assert bool((chosen[:, 0] != chosen[:, 1]).all())


def test_exploration_takes_random_models_with_its_probability() -> None:
    falling = [6.0, 5, 4, 3, 2, 1]
    assert bool((picks(falling, 0.0) == torch.tensor([0, 1])).all())
    first = torch.bincount(picks(falling, 0.3)[:, 0], minlength=6) / 1000
    assert abs(float(first[0]) - (0.7 + 0.3 / 6)) < 0.07  # standard deviation 0.014
    assert float((first[1:] - 0.05).abs().max()) < 0.035  # standard deviation 0.007
    always = torch.bincount(picks(falling, 1.0).reshape(-1), minlength=6)
    assert float((always - 1000 / 3).abs().max()) < 75


@given(st.integers(2, 9), st.floats(0, 1), st.integers(0, 50), st.data())
def test_choices_are_distinct_available_others_and_do_not_depend_on_company(
    k: int, explore: float, seed: int, data: st.DataObject
) -> None:
    available = torch.tensor(data.draw(st.lists(st.booleans(), min_size=k, max_size=k)))
    available[:2] = True
    count = data.draw(st.integers(0, int(available.sum()) - 1))
    P = torch.from_numpy(np.random.default_rng(seed).integers(0, 3, (k, k)).astype(np.float64))
    ids = torch.arange(k)
    chosen = affinity.choose_models(kept(P), ids, available, count, explore, KEY)
    for client in range(k):
        row = chosen[client].tolist()
        assert len(set(row)) == count
        assert client not in row
        assert all(bool(available[other]) for other in row)
        assert affinity.choose_models(kept(P), ids[client : client + 1], available, count, explore, KEY).tolist() == [
            row
        ]


def test_many_clients_are_chosen_for_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    P = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 20)))
    arguments = (kept(P), torch.arange(20), torch.ones(20, dtype=torch.bool), 4, 0.3, KEY)
    whole = affinity.choose_models(*arguments)
    monkeypatch.setattr(affinity, "ROWS_AT_ONCE", 3)
    assert torch.equal(affinity.choose_models(*arguments), whole)


def test_exploration_fades() -> None:
    subtracts = FedFomo()
    assert [round(subtracts.exploration(t), 12) for t in (0, 1, 5, 6, 7)] == [0.3, 0.25, 0.05, 0.0, 0.0]
    multiplies = FedFomo(decay="multiply")
    assert [round(multiplies.exploration(t), 6) for t in (0, 1, 2)] == [0.3, 0.285, 0.27075]


def test_what_is_on_offer() -> None:
    """Clients 0, 1 and 3 have uploaded, client 3 in the last round; everybody weighs its own model too."""
    server = server_of(4, uploaded=torch.tensor([1, 1, 0, 2]))
    any_upload, previous = FedFomo(models=9), FedFomo(models=9, available="previous_round")
    plan = any_upload.plan(server, torch.tensor([0, 3]), info(3))[0].plan
    assert [plan[0, 0].item(), plan[3, 0].item()] == [0, 3]
    assert [sorted(plan[0].tolist()), sorted(plan[3].tolist())] == [[0, 1, 3]] * 2
    assert plan[1].tolist() == plan[2].tolist() == [-1] * 3
    assert previous.plan(server, torch.tensor([0, 1]), info(3))[0].plan[:2].tolist() == [[0, 3], [1, 3]]
    assert previous.plan(server, torch.tensor([3]), info(3))[0].plan[3].tolist() == [3]


def test_all_clients_of_a_round_are_sent_equally_many() -> None:
    """A newcomer could be sent three models, but a client that is one of the three can only be sent two."""
    server = server_of(4, uploaded=torch.tensor([1, 1, 0, 2]))
    method = FedFomo(models=9)
    assert sorted(method.plan(server, torch.tensor([2]), info(3))[0].plan[2].tolist()) == [0, 1, 2, 3]
    plan = method.plan(server, torch.tensor([0, 2]), info(3))[0].plan
    assert plan.shape == (4, 3)
    assert set(plan[2, 1:].tolist()) < {0, 1, 3}
    ma = (
        FedFomoMA(models=9).plan(server, torch.tensor([0, 2]), info(3))[0].plan
    )  # here a newcomer has no model of its own
    assert [sorted(ma[0].tolist()), sorted(ma[2].tolist())] == [[0, 1, 3]] * 2


def test_a_client_downloads_the_models_of_its_plan() -> None:
    server = server_of(4, theta=torch.tensor([[10.0], [11.0], [12.0], [13.0]]), plan=torch.tensor([[0, 2, 3]] * 4))
    down = FedFomo(models=3).download(server, torch.tensor([0, 1]))
    assert down.models.squeeze(2).tolist() == [[12, 13], [12, 13]]


# Groups of clients that the server finds.


def test_groups_of_clients_are_found_in_the_affinities() -> None:
    block = torch.block_diag(*[torch.full((3, 3), 6.0)] * 3)
    label = affinity.groups(block, 3, seed=1)
    assert label.reshape(3, 3).unique(dim=1).shape == (3, 1)
    assert len(label.unique()) == 3
    assert affinity.groups(torch.eye(2), 5, seed=1).tolist() == [0, 1]


def test_group_averages_are_weighted_by_examples_and_sent_to_everyone() -> None:
    P = torch.block_diag(torch.full((2, 2), 9.0), torch.full((2, 2), 9.0)).to(torch.float64)
    server = server_of(4, affinity=kept(P), plan=torch.arange(4)[:, None])
    method = FedFomo(models=3, subglobal=2)
    up = Up(torch.tensor([[1.0], [5.0], [10.0], [20.0]]), torch.zeros(4, 3), torch.tensor([1.0, 3.0, 4.0, 1.0]))
    new = method.aggregate(server, torch.arange(4), up, info(1))
    assert sorted(new.averages.squeeze(1).tolist()) == [4.0, 8.0, 12.0]  # (1 + 15)/4, their mean, (40 + 20)/5
    assert new.averages[-1].item() == 8.0
    down = method.download(method.plan(new, torch.tensor([2]), info(2))[0], torch.tensor([2]))
    assert down.averages.shape == (1, 3, 1)
    client, up = updated(method, state([0.0], [0.0]), replace(sent(0.0, 0.0), averages=down.averages), [8.0])
    assert up.w.tolist() == [[0.0, 0.0, 0.0]]  # averages take part in the combination, not in the affinities
    assert 4.0 < client.old.item() < 12.0


# Bytes and memory.


def bytes_of(loop: Loop, rounds: int) -> list[tuple[int, int]]:
    reports = list(loop.rounds(rounds))
    return [(r.bytes_down // (r.active * MODEL_BYTES), r.bytes_up // r.active - MODEL_BYTES) for r in reports]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedFomo(training=STEP, models=4), [(0, 16), (3, 16), (3, 16)]),  # (M − 1) d down, d + M up
        (FedFomo(training=STEP, models=9), [(0, 36), (5, 36), (5, 36)]),  # there are only five others
        (FedFomo(training=STEP, models=1), [(0, 4), (0, 4)]),
        (FedFomo(training=STEP, models=4, subglobal=2), [(0, 20), (6, 20)]),  # 2 averages, their average; 1 count up
        (FedFomoMA(training=STEP, models=4), [(0, 16), (6, 16), (6, 16)]),  # (M + 2) d down
        (FedFomoMA(training=STEP, models=4, combine="client"), [(0, 16), (5, 16)]),
    ],
)
def test_bytes_are_those_of_the_cost_table(method: Any, expected: list[tuple[int, int]]) -> None:
    federation = tiny_federation().with_validation(0.25, 0)
    assert bytes_of(loop_over(method, federation, make_task(tiny_model)), len(expected)) == expected


def test_while_few_models_exist_only_these_are_sent() -> None:
    """One client per round: the first has nobody to hear from, the next hears one, or none if it is the same."""
    federation = tiny_federation().with_validation(0.25, 0)
    schedule = Schedule(participation=1 / 6)
    loop = loop_over(FedFomo(training=STEP, models=4), federation, make_task(tiny_model), schedule)
    known: set[int] = set()
    for number in range(1, 8):
        (active,) = schedule.active(0, number, 6).tolist()
        assert bytes_of(loop, 1) == [(min(3, len(known - {active})), 16)]
        known.add(active)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that comes into being."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:
                Largest.elements = max(Largest.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("method", [FedFomo(training=STEP, models=5), FedFomoMA(training=STEP, models=5)])
def test_nothing_holds_all_clients_downloads_at_once(method: Any) -> None:
    """With 40 clients in chunks of 2, no new tensor is larger than two clients' messages."""
    federation = tiny_federation((4,) * 40, test=1).with_validation(0.25, 0)
    watching: list[str] = []

    def watched(name: str) -> Any:
        def call(inner: Any, *args: Any) -> Any:
            watching.append(name)
            with Largest():
                return inner(*args)

        return call

    stages = ("plan", "download", "client_update", "aggregate", "personalize")
    loop = loop_over(hooked(method, **{s: watched(s) for s in stages}), federation, make_task(tiny_model), chunk=2)
    Largest.elements = 0
    for _ in loop.rounds(3):
        pass
    loop.evaluate()
    assert set(watching) == set(stages)
    assert 2 * 4 * 115 <= Largest.elements <= 2 * 7 * 115


# Model averages.


def test_averages_and_weights_worked_by_hand() -> None:
    """Models 0, 6 and 12 of clients 0, 1, 2: avg 6, without them 9, 6 and 3. Client 0's target is 2:
    L(6) = 8, L(9) = 24.5, L(6) = 8, L(3) = 0.5, so w = 16.5, 0, −7.5: everything for its own model, 0."""
    federation, task = numbers([[0.0]] * 3, [[2.0]] * 3)
    theta = torch.tensor([[0.0], [6.0], [12.0]])
    server = server_of(3, theta=theta, uploaded=torch.ones(3, dtype=torch.int64))
    server = replace(server, plan=torch.tensor([[0, 1, 2]] * 3))
    method = FedFomoMA(training=STEP, models=3, combine="client")
    down = method.download(server, torch.tensor([0]))
    assert down.averages.squeeze(2).tolist() == [[6, 9, 6, 3]]
    assert down.start.shape == (1, 0, 1)
    data = federation.cohort(torch.tensor([0]), 0, 2)
    client = replace(method.init_client(task, data), seen=torch.tensor([True]))
    _, up = method.client_update(task, client, down, data)
    assert up.w.tolist() == [[16.5, 0.0, -7.5]]
    assert method.personalize(task, client, down, data)["post_federate"].item() == 0.0
    divided = replace(method, norm="l2").client_update(task, client, down, data)[1]
    assert divided.w.tolist() == [[5.5, 0.0, -2.5]]  # |9 − 6| = 3; no distance, no weight; |3 − 6| = 3


def test_the_client_forms_the_same_combination_from_averages() -> None:
    """avg + Σ w* (N − 1) (avg − avg_{−n}) is Σ w* θ_n: a curious client can take the averages apart."""
    theta = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32))
    server = server_of(4, 5, theta=theta, plan=torch.tensor([[0, 1, 2, 3]] * 4))
    method = FedFomoMA(models=4, combine="client")
    down = method.download(server, torch.tensor([0]))
    recovered = 4 * down.averages[:, :1] - 3 * down.averages[:, 1:]
    torch.testing.assert_close(recovered[0], theta)
    federation, _ = numbers([[0.0]], [[0.0]])
    task = GaussianTask(torch.ones(1), 1.0, 5)
    client = method.init_client(task, federation.cohort(torch.tensor([0]), 0, 1))
    client = replace(client, seen=torch.tensor([True]))
    w = torch.tensor([[0.5, -1.0, 1.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(method._start(task, client, down, w)[0], 0.25 * theta[0] + 0.75 * theta[2])
    nothing = method._start(task, client, down, -w.abs())
    torch.testing.assert_close(nothing[0], theta.mean(0))


def test_the_server_combines_the_latest_uploads_by_the_last_weights() -> None:
    theta = torch.tensor([[1.0], [2.0], [4.0]])
    server = server_of(
        3,
        theta=theta,
        plan=torch.tensor([[0, 1]] * 3),
        heard=torch.tensor([[0, 2, -1], [-1, -1, -1], [2, 0, 1]]),
        mix=torch.tensor([[0.25, 0.75, 0.0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64),
    )
    down = FedFomoMA(models=3).download(server, torch.arange(3))
    assert down.start.squeeze().tolist() == [0.25 + 3.0, 1.5, 1.5]  # the average of {1, 2} where nothing was weighed


def test_weights_of_one_round_decide_the_start_of_the_next() -> None:
    federation, task = numbers([[0.0], [6.0], [12.0]], [[1.0], [6.0], [12.0]])
    training = LocalTraining(lr=1.0, batch=9, steps=1)  # one step lands on the client's own number
    loop = loop_over(FedFomoMA(training=training, models=3), federation, task)
    for _ in loop.rounds(2):
        pass
    assert isinstance(loop.server, Server)
    first = loop.server.mix[0, loop.server.heard[0] == 0]
    assert first.item() == 1.0  # client 0's own model is the only one that brings the average towards 1
    models = loop.evaluate(keep_models=True).models
    assert models is not None
    assert models[0].item() == 0.0
    assert bool(loop.server.uploaded.eq(2).all())


def test_with_one_model_there_is_nothing_to_average() -> None:
    federation, task = numbers([[2.0]], [[2.0]])
    loop = loop_over(FedFomoMA(training=STEP, models=2), federation, task)
    for _ in loop.rounds(3):
        pass
    theta = loop.pool.clients.take(torch.tensor([0])).named()["theta"]
    torch.testing.assert_close(theta, torch.tensor([[2 * (1 - 0.9**3)]]))


# What is reported.


def test_both_moments_of_evaluation_are_reported() -> None:
    federation = tiny_federation().with_validation(0.25, 0)
    task = make_task(tiny_model)
    loop = loop_over(FedFomo(training=STEP), federation, task)
    for _ in loop.rounds(3):
        pass
    mixed = loop.evaluate(keep_models=True)
    loop.algorithm = loop.pool.algorithm = replace(loop.algorithm, evaluate="post_train")  # type: ignore[type-var]
    trained = loop.evaluate(keep_models=True)
    assert set(mixed.alternatives) == {"post_train"}
    assert set(trained.alternatives) == {"post_federate"}
    assert trained.models is not None
    assert mixed.models is not None
    assert torch.equal(trained.models, loop.pool.clients.take(torch.arange(6)).named()["theta"])
    assert not torch.equal(trained.models, mixed.models)
    assert torch.equal(mixed.alternatives["post_train"].loss, trained.personal.loss)  # type: ignore[union-attr]
    assert torch.equal(trained.alternatives["post_federate"].loss, mixed.personal.loss)  # type: ignore[union-attr]


def test_a_simulation_without_validation_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="with_validation"):
        simulate(tiny_federation(), tiny_model, "fedfomo")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedFomo, {"models": 0}),
        (FedFomo, {"epsilon": 1.1}),
        (FedFomo, {"epsilon_decay": -0.1}),
        (FedFomo, {"decay": "halve"}),
        (FedFomo, {"norm": "l3"}),
        (FedFomo, {"available": "all"}),
        (FedFomo, {"newcomers": "wait"}),
        (FedFomo, {"affinity_update": "sum"}),
        (FedFomo, {"evaluate": "best"}),
        (FedFomo, {"subglobal": -1}),
        (FedFomoMA, {"models": 1}),
        (FedFomoMA, {"combine": "both"}),
    ],
)
def test_bad_options_are_refused(method: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).split("_")[0]):
        method(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedfomo", {"subglobal": 2, "available": "previous_round", "newcomers": "combine", "norm": "l1"}),
        ("fedfomo_ma", {"combine": "client", "norm": "l2", "models": 3, "evaluate": "post_train"}),
    ],
)
def test_the_contract_holds_with_other_options(name: str, options: dict[str, Any]) -> None:
    check_variant(name, options=options)


# Who finds whom.


def pairs_of_digits(seed: int, per_group: int = 3) -> Federation:
    """Five groups of clients; a group shares two digits."""
    digits = load_digits()
    draw = np.random.default_rng(seed)
    owner = np.zeros(len(digits.target), np.int64)
    for group in range(5):
        rows = draw.permutation(np.flatnonzero(digits.target // 2 == group))
        owner[rows] = group * per_group + np.arange(len(rows)) % per_group
    names = np.array([f"{k:02d}" for k in range(5 * per_group)])
    x = (digits.images / 16).astype(np.float32)
    groups = {name: k // per_group for k, name in enumerate(names)}
    return Federation.from_arrays(x, digits.target, names[owner], groups=groups, seed=seed).with_validation(0.2, seed)


@pytest.mark.parametrize("foreign", [False, True])
def test_clients_find_those_who_hold_their_target_distribution(foreign: bool) -> None:
    """15 clients, 5 groups of 3, M = 5, 12 rounds: the two highest affinities lie in the group of the target."""
    hits, accuracy = [], []
    for seed in range(2):
        data = pairs_of_digits(seed)
        assert data.groups is not None
        target = data.groups
        if foreign:
            data = data.with_foreign_targets(seed)
            target = data.groups[torch.tensor(data.description["target_of"])]
        loop = simulate(
            data, "mlr", "fedfomo", seed=seed, training=LocalTraining(lr=0.2, batch=10, steps=None, epochs=2), workers=1
        )
        for _ in loop.rounds(12):
            pass
        assert isinstance(loop.server, Server)
        P = dense(loop.server.affinity, 15).fill_diagonal_(-torch.inf)
        top = P.topk(2, 1).indices
        hits.append((data.groups[top] == target[:, None]).to(torch.float64).mean())
        score = loop.evaluate().personal
        assert score is not None
        accuracy.append((score.correct / score.count).mean())
    assert torch.stack(hits).mean() > 0.85
    assert torch.stack(accuracy).mean() > 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_averages_also_show_who_helps(seed: int) -> None:
    """FedFomo-MA: what an average loses without a model tells clients of the same digits from others, though nobody is
    sent a single model."""
    data = pairs_of_digits(seed)
    training = LocalTraining(lr=0.2, batch=10, steps=None, epochs=2)
    loop = simulate(data, "mlr", "fedfomo_ma", seed=seed, training=training, workers=1)
    for _ in loop.rounds(12):
        pass
    assert isinstance(loop.server, Server)
    assert data.groups is not None
    top = dense(loop.server.affinity, 15).fill_diagonal_(-torch.inf).topk(2, 1).indices
    assert float((data.groups[top] == data.groups[:, None]).double().mean()) > 0.7  # by chance 0.14


def test_an_evaluation_combines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The combination and the last trained model come from one call: judging the candidates is what costs."""
    calls, combine = [], FedFomo._combine

    def counted(self: FedFomo, *args: Any) -> Any:
        calls.append(1)
        return combine(self, *args)

    with Bench(FedFomo(training=LocalTraining(batch=5, steps=2), models=2)).loop(chunk=100) as loop:
        loop.round()
        monkeypatch.setattr(FedFomo, "_combine", counted)
        assert set(loop.evaluate().alternatives) == {"post_train"}
    assert len(calls) == 1
