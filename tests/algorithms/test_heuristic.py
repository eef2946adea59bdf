"""CGPFL-Heur: Eq. (11) by hand, the number of planted contexts, and the round in which it is chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kinfed.algorithms.base import EXAMPLE_COUNT, RoundInfo
from kinfed.algorithms.cgpfl.cgpfl import CGPFL, NONE, Server, Up
from kinfed.algorithms.cgpfl.heuristic import CGPFLHeur, balance, smallest
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule

WORK = LocalTraining(lr=0.05, batch=10, steps=5)
CLASSES, WIDTH = 10, 10
D = WIDTH * CLASSES + CLASSES


def planted(contexts: int, clients: int, examples: int = 40, seed: int = 0) -> Federation:
    """Each context names the ten classes in a random order of its own."""
    draw = np.random.default_rng(seed)
    orders = np.stack([draw.permutation(CLASSES) for _ in range(contexts)])
    means = 2 * draw.normal(size=(CLASSES, WIDTH))
    kind = draw.integers(0, CLASSES, (clients, examples))
    x = means[kind] + draw.normal(size=(clients, examples, WIDTH))
    y = orders[np.arange(clients) % contexts][np.arange(clients)[:, None], kind]
    owner = np.repeat(np.arange(clients), examples)
    return Federation.from_arrays(x.reshape(-1, WIDTH), y.reshape(-1), owner, num_classes=CLASSES, seed=seed)


@contextmanager
def simulated(method: Any, federation: Federation, participation: float = 1.0, seed: int = 0) -> Iterator[Loop]:
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, CLASSES)))
    pool = LocalPool(method, task, federation, seed, workers=1)
    try:
        yield Loop(method, task, pool, federation.population(seed), Schedule(participation))
    finally:
        pool.close()


def solved(method: CGPFLHeur, uploads: Any, count: Any, clients: int | None = None) -> Server:
    """The server after one round with these uploads; all others of `clients` are not called."""
    uploads = torch.tensor(uploads)
    population = Population(clients or len(uploads), seed=0)
    server = method.init_server(make_task(lambda: nn.Linear(1, uploads.shape[1], bias=False)), population)
    up = Up(uploads, torch.tensor(count))
    return method.aggregate(server, torch.arange(len(uploads)), up, RoundInfo(1, population))


# Eq. (11).


def test_the_curve_by_hand() -> None:
    """Uploads 0, 1, 9 on a line with weights 1, 1, 2 of 4; then K = 2 puts 0 and 1 together."""
    method = CGPFLHeur(training=WORK, max_contexts=3, mu=1.0)
    server = solved(method, [[0.0], [1.0], [9.0]], [1.0, 1.0, 2.0])
    mean = (0 + 1 + 18) / 4
    wanted = [(mean**2 + (1 - mean) ** 2 + 2 * (9 - mean) ** 2) / 4, (0.25 + 0.25) / 4, 0.0]
    assert server.choice.cost.tolist() == pytest.approx(wanted)
    first = [math.sqrt(k / 4 * math.log(4 * math.e)) for k in (1, 2, 3)]
    assert server.choice.complexity.tolist() == pytest.approx(first)
    assert len(server.omega) == 2  # e = 19.3, 1.2, 1.3
    assert server.context.tolist() in ([0, 0, 1], [1, 1, 0])
    assert sorted(server.omega.flatten().tolist()) == [0.5, 9.0]  # contexts themselves are equal averages
    assert float(server.choice.mu) == 1.0


@pytest.mark.parametrize(("mu", "contexts"), [(0.0, 1), (1e-3, 1), (1.0, 2), (1e6, 3)])
def test_mu_decides_between_few_and_close(mu: float, contexts: int) -> None:
    server = solved(CGPFLHeur(training=WORK, max_contexts=3, mu=mu), [[0.0], [1.0], [9.0]], [1.0, 1.0, 2.0])
    assert len(server.omega) == contexts


def test_the_automatic_mu_gives_both_terms_the_same_range() -> None:
    first, cost = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 5.0, 4.0])
    assert balance(first, cost) == pytest.approx(0.5)
    assert balance(first, torch.ones(3)) == 0.0
    assert balance(first[:1], cost[:1]) == 0.0


def test_of_equal_values_the_first_is_taken() -> None:
    assert smallest(torch.tensor([2.0, 3.0, 2.0])) == 0
    assert smallest(torch.tensor([2.0 + 1e-12, 3.0, 2.0], dtype=torch.float64)) == 0  # ends equal up to rounding
    assert smallest(torch.tensor([2.0, 1.0, 1.0])) == 1


def test_equal_uploads_make_one_context() -> None:
    server = solved(CGPFLHeur(training=WORK), [[1.0, 2.0]] * 6, [3.0] * 6)
    assert server.choice.cost.tolist() == [0.0, 0.0, 0.0]
    assert len(server.omega) == 1
    assert server.omega.tolist() == [[1.0, 2.0]]


def test_contexts_are_tried_up_to_half_the_clients() -> None:
    uploads = np.arange(7.0)[:, None].tolist()
    assert len(solved(CGPFLHeur(training=WORK), uploads, [1.0] * 7).choice.cost) == 3
    assert len(solved(CGPFLHeur(training=WORK, max_contexts=2), uploads, [1.0] * 7).choice.cost) == 2
    assert (
        len(solved(CGPFLHeur(training=WORK), uploads[:2], [1.0] * 2, clients=10).choice.cost) == 2
    )  # only two replied
    assert len(solved(CGPFLHeur(training=WORK), uploads[:1], [1.0], clients=1).choice.cost) == 1


# Planted contexts.


@pytest.mark.parametrize("contexts", [2, 3, 4, 5, 6])
def test_the_number_of_planted_contexts_is_found(contexts: int) -> None:
    for seed in range(2):
        with simulated(CGPFLHeur(training=WORK), planted(contexts, 40, seed=seed), seed=seed) as loop:
            loop.round()
            server: Any = loop.server
            assert len(server.choice.cost) == 20
            assert all(b <= a for a, b in itertools.pairwise(server.choice.cost.tolist()))
            assert len(server.omega) == contexts
            label, wanted = server.context, torch.arange(40) % contexts
            assert ((label[:, None] == label) == (wanted[:, None] == wanted)).all()


def test_a_factor_tells_overlapping_contexts_apart() -> None:
    """Ten contexts on a ring, each sharing two of its three classes with its neighbours."""
    draw = np.random.default_rng(0)
    kind = (np.arange(40)[:, None] % 10 + draw.integers(0, 3, (40, 40))) % 10
    x = (2 * draw.normal(size=(CLASSES, WIDTH)))[kind] + draw.normal(size=(40, 40, WIDTH))
    data = Federation.from_arrays(x.reshape(-1, WIDTH), kind.reshape(-1), np.repeat(np.arange(40), 40))
    found = {}
    for factor in (1.0, 2.0):
        with simulated(CGPFLHeur(training=LocalTraining(lr=0.05, batch=10, steps=20), mu_factor=factor), data) as loop:
            loop.round()
            figures = loop.algorithm.figures(loop.server)
            assert figures["mu"] == pytest.approx(factor * balance(figures["complexity"], figures["cost"]))
            found[factor] = figures["contexts"]
    assert found[1.0] < found[2.0]
    assert 9 <= found[2.0] <= 10


def test_a_single_context_is_taken_for_a_few() -> None:
    """What the automatic μ cannot do: both ends of the curve are equal, and some value in between is lower by noise."""
    with simulated(CGPFLHeur(training=WORK), planted(1, 40)) as loop:
        loop.round()
        assert 2 <= len(loop.server.named()["omega"]) <= 6


# When it is chosen.


def test_the_chosen_number_is_fixed_and_the_rest_is_cgpfl() -> None:
    federation = planted(3, 12)
    with (
        simulated(CGPFLHeur(training=WORK), federation) as loop,
        simulated(CGPFL(training=WORK, contexts=3), federation) as other,
    ):
        for _ in range(4):
            loop.round()
            other.round()
            assert torch.equal(loop.server.named()["omega"], other.server.named()["omega"])
            assert torch.equal(loop.server.named()["context"], other.server.named()["context"])


def test_it_can_wait() -> None:
    """Before the choice there is one context; who is absent in the round of the choice then belongs to none."""
    federation = planted(3, 12)
    with simulated(CGPFLHeur(training=WORK, solve_rounds=3), federation, 0.5) as loop:
        for number in range(1, 4):
            assert len(loop.server.named()["omega"]) == 1
            assert len(loop.server.named()["choice.cost"]) == 0
            loop.round()
            active = loop.schedule.active(0, number, 12)
            server: Any = loop.server
        assert len(server.omega) > 1
        absent = torch.ones(12, dtype=torch.bool)
        absent[active] = False
        assert (server.context[absent] == NONE).all()
        assert (server.context[active] >= 0).all()


def test_all_last_uploads_are_weighed_where_asked() -> None:
    federation = planted(3, 12)
    method = CGPFLHeur(training=WORK, solve_rounds=8, recluster="all")
    with simulated(method, federation, 0.34) as loop:
        for _ in range(8):
            loop.round()
        server: Any = loop.server
        known = server.context >= 0
        assert int(known.sum()) > 4  # more than are called in a round
        assert (server.choice.count[known] == 30).all()
        assert len(server.choice.cost) == 6


def test_bytes_by_hand() -> None:
    """One model down; one model and the number of examples up."""
    with simulated(CGPFLHeur(training=WORK), planted(2, 8), 0.5) as loop:
        report = loop.round()
        assert report.bytes_down == 4 * D * 4
        assert report.bytes_up == 4 * (D + 1) * 4


def test_figures_have_the_same_names_before_and_after_the_choice() -> None:
    with simulated(CGPFLHeur(training=WORK, solve_rounds=2), planted(2, 8)) as loop:
        names = []
        for _ in range(2):
            loop.round()
            names.append(loop.algorithm.figures(loop.server).keys())
        assert names[0] == names[1] >= {"mu", "cost", "complexity", "contexts", "distances"}
        figures = loop.algorithm.figures(loop.server)
        assert len(figures["cost"]) == len(figures["complexity"]) == 4
        e = figures["complexity"] + figures["mu"] * figures["cost"]
        assert smallest(e) + 1 == figures["contexts"]


def test_numbers_of_examples_are_not_covered_by_epsilon() -> None:
    profile = CGPFLHeur(training=WORK).privacy(torch.tensor([3]))
    assert profile.uncovered == {EXAMPLE_COUNT: ""}


def test_a_round_without_replies_does_not_skip_the_choice() -> None:
    """Nobody replied in rounds 1 and 2; K is chosen with the first replies."""
    method, population = CGPFLHeur(training=WORK, max_contexts=3, mu=1.0), Population(3, seed=0)
    server = method.init_server(make_task(lambda: nn.Linear(1, 1, bias=False)), population)
    up = Up(torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([1.0, 1.0, 2.0]))
    assert len(method.aggregate(server, torch.arange(3), up, RoundInfo(3, population)).omega) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contexts": 3}, "chooses the number of contexts itself"),
        ({"mu": -1.0}, "mu must be at least 0"),
        ({"mu": math.nan}, "mu must be at least 0"),
        ({"mu_factor": 0.0}, "mu_factor must be positive"),
        ({"mu": 1.0, "mu_factor": 2.0}, "leave out one"),
        ({"solve_rounds": 0}, "must be at least 1"),
        ({"max_contexts": 0}, "must be at least 1"),
        ({"alpha": 2.0}, "alpha must be in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CGPFLHeur(**{"training": WORK, **options})
