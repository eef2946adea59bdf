"""Floco: rounds by hand with plain gradients, places by hand, FedAvg and one point for all as limits, planted kinds."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from method_bench import LR, TWO_STEPS, WORKS, by_hand, close, deep, gradient, models, run, server, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.floco import Floco, drawn, energy, places
from kinfed.core import rng
from kinfed.data import Federation
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.errors import ConfigError
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED

BODY = 35  # of the 47 numbers of `deep`; the head is the rest


def point(number: int, step: int, client: int, center: list[float], rho: float | None) -> list[float]:
    """α of a step, one number after the other; rho is None: of the whole simplex."""
    u = rng.uniform(rng.fold(rng.root(SEED, "floco"), number, step, client), len(center) + 1).flatten().tolist()
    waiting = [-math.log(1 - v) for v in u[:-1]]
    way = [v / sum(waiting) - c for v, c in zip(waiting, center, strict=True)]
    part = 1.0 if rho is None else u[-1] * min(1.0, rho / sum(abs(v) for v in way))
    return [c + part * v for c, v in zip(center, way, strict=True)]


def test_two_rounds_by_hand() -> None:
    """Round 1 with points of the whole simplex, round 2 with those of the regions that follow it."""
    rho = 0.3
    with by_hand(Floco(TWO_STEPS, corners=2, tau=1, rho=rho), model=deep) as loop:
        body, h = server(loop, "shared"), list(server(loop, "corners"))
        assert not torch.equal(h[0], h[1])
        center, radius = [[0.5, 0.5]] * 3, None
        for number in (1, 2):
            bodies, corners = [], []
            for m in range(3):
                own, (one, two) = body, h
                for step in range(2):
                    a, b = point(number, step, m, center[m], radius)
                    g = gradient(loop, m, torch.cat([own, a * one + b * two]))
                    own, one, two = own - LR * g[:BODY], one - LR * a * g[BODY:], two - LR * b * g[BODY:]
                bodies.append(own)
                corners.append(torch.stack([one, two]))
            changes = torch.stack([c - torch.stack(h) for c in corners]).flatten(1)
            report = loop.round()
            body, h = weighted(bodies), list(weighted(corners))
            close(server(loop, "shared"), body)
            close(server(loop, "corners"), torch.stack(h))
            assert (report.bytes_down, report.bytes_up) == (3 * 4 * (35 + 24 + 2 + 1), 3 * 4 * (35 + 24 + 1))
            if number == 1:
                close(server(loop, "change"), changes)
                close(server(loop, "center"), places(server(loop, "change"), 2))
                center, radius = server(loop, "center").tolist(), rho
        mixed = torch.stack([torch.cat([body, a * h[0] + b * h[1]]) for a, b in center])
        close(models(loop), mixed)
        middle = loop.algorithm.server_models(loop.server)
        assert middle is not None
        close(middle.models[0], torch.cat([body, (h[0] + h[1]) / 2]))


def test_places_by_hand() -> None:
    """On a line the outer two take the corners. The first component has κ = ±1.5, ±0.5 and the second is nothing, so
    that c = (1 ± κ / (1.5 z)) / 2, cut off: the energy of four places is least where the outer ones just reach corners.
    """
    change = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None] * torch.tensor([0.6, 0.8])
    c = places(change, 2)
    close(c.sum(1), torch.ones(4), 1e-12)
    wanted = torch.tensor([0.0, 1 / 3, 2 / 3, 1.0]).double()
    first = c[:, 0] if c[0, 0] < 0.5 else c[:, 1]
    close(first, wanted, 0.02)  # the scales go in steps of 3.5 percent
    assert energy(c) <= energy(torch.stack([wanted, 1 - wanted], 1)) * 1.05


@pytest.mark.parametrize("n", [1, 2, 5])
def test_clients_that_agree_share_the_middle(n: int) -> None:
    """What rounding leaves of their differences is no difference."""
    agreeing = torch.full((n, 12), 0.1) * (1 + 1e-7 * torch.arange(n)[:, None])
    close(places(agreeing, 3), torch.full((n, 3), 1 / 3).double(), 1e-6)


def test_places_do_not_depend_on_the_scale_of_changes() -> None:
    change = rng.normal(rng.root(2, "changes"), 60).view(6, 10)
    close(places(change, 3), places(1e-5 * change, 3), 1e-9)


def test_points_stay_in_their_region() -> None:
    keys = rng.fold(rng.root(1, "points"), torch.arange(2000))
    center = torch.tensor([0.7, 0.3, 0.0]).expand(2000, 3)
    for rho in (0.0, 0.1, 0.5, 2.0):
        alpha = drawn(keys, center, torch.full((2000,), rho))
        close(alpha.sum(1), torch.ones(2000))
        assert float(alpha.min()) >= -1e-6
        assert float((alpha - center).abs().sum(1).max()) <= rho + 1e-5
    close(alpha.mean(0), torch.full((3,), 1 / 3), 0.02)  # of the last, the whole simplex


DECAY = LocalTraining(batch=5, steps=4, weight_decay=0.05, lr_decay=0.9)


@pytest.mark.parametrize("work", [DECAY, WORKS["epochs"]])
@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_one_corner_is_fedavg(work: LocalTraining, weights: Literal["examples", "equal"]) -> None:
    ours = run(Floco(work, corners=1, tau=2, weights=weights))
    theirs = run(FedAvg(work, weights=weights))
    close(ours["server loss"], theirs["server loss"], 1e-5)
    close(torch.cat([ours["server.shared"], ours["server.corners"][0]]), theirs["server.w"], 1e-5)


def test_until_tau_all_clients_use_the_middle() -> None:
    with by_hand(Floco(TWO_STEPS, corners=3, tau=5), model=deep) as loop:
        for _ in range(3):
            loop.round()
        common = loop.algorithm.server_models(loop.server)
        assert common is not None
        close(models(loop), common.models.expand(3, -1))


def test_who_has_sent_nothing_keeps_the_whole_simplex() -> None:
    with by_hand(Floco(TWO_STEPS, corners=2, tau=1), model=deep, participation=0.67) as loop:
        active = loop.round().active
        known = server(loop, "known")
        assert int(known.sum()) == active == 2
        assert server(loop, "radius")[~known].tolist() == [2.0]
        assert server(loop, "center")[~known].tolist() == [[0.5, 0.5]]


def two_kinds(seed: int) -> Federation:
    """Twelve clients, every other one of which has the two classes the other way round."""
    clients, count = 12, 1200
    x = rng.normal(rng.root(seed, "planted"), count * 4).reshape(count, 4).to(torch.float32)
    rows = torch.arange(count)
    owner, test = rows % clients, rows >= 60 * clients
    y = ((x[:, 0] + x[:, 1] > 0).long() + owner) % 2
    return Federation(
        Features(x), y, Problem.of_classes(2), train=Ragged.grouped(rows[~test], owner[~test], clients),
        val=Ragged.empty(clients), test=Ragged.grouped(rows[test], owner[test], clients), names=list("abcdefghijkl"),
    )  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("seed", [3, 4, 5, 6, 7])
def test_clients_of_a_kind_have_their_end_of_the_simplex(seed: int) -> None:
    """A model for all knows nothing here, and neither does the middle."""
    method = Floco(LocalTraining(lr=0.5, batch=20, steps=5), corners=2, tau=3)
    with Bench(method, federation=two_kinds(seed), model=small).loop(chunk=None) as loop:
        for _ in range(20):
            loop.round()
        found = loop.evaluate()
        center, placed = loop.server.center[:, 0], loop.server.radius < 2
    assert found.personal is not None
    assert found.server_model is not None
    accuracy: list[Tensor] = [score.correct.sum() / score.count.sum() for score in (found.personal, found.server_model)]
    assert float(accuracy[0]) > 0.93
    assert float(accuracy[1]) < 0.6
    sides = [center[kind::2][placed[kind::2]] for kind in (0, 1)]
    assert int(placed.sum()) >= 10
    assert float(sides[0].max()) < float(sides[1].min()) or float(sides[1].max()) < float(sides[0].min())
    assert abs(float(sides[0].mean() - sides[1].mean())) > 0.5


def test_privacy_and_bad_settings() -> None:
    profile = Floco(TWO_STEPS).privacy(torch.tensor([4]))
    assert profile is not None
    assert {k: v.tolist() for k, v in (profile.per_round or {}).items()} == {1: [2]}
    assert list(profile.uncovered) == ["the number of training examples of each client"]
    with (
        pytest.raises(ConfigError, match="changes of the corners of all 3 clients"),
        by_hand(Floco(TWO_STEPS, max_gb=1e-9)),
    ):
        pass
    with pytest.raises(ConfigError, match="rho"):
        Floco(rho=2.5)
