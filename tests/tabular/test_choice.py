"""Partial pooling of advantages over sites, against its formulas and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kinfed.data.examples.problem import Problem
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.tabular.decision import Advantage, advantage, best_together, choose, shrunk
from kinfed.tabular.site_figures import HANDED, SiteFigures

NAN = math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sites_that_differ_by_chance_alone_share_one_estimate() -> None:
    one = shrunk(tensor(0.01, 0.02, 0.03), tensor(0.1, 0.1, 0.2))
    assert one.spread == 0
    mean = (0.01 / 0.01 + 0.02 / 0.01 + 0.03 / 0.04) / (1 / 0.01 + 1 / 0.01 + 1 / 0.04)
    assert one.mean == pytest.approx(mean)
    assert one.expected.tolist() == pytest.approx([mean] * 3)


def test_two_sites_by_hand() -> None:
    # Q(τ²) = (a − b)² / (2 (τ² + s²)) for equal errors, and M − 1 = 1: τ² = (a − b)² / 2 − s².
    a, b, s = 0.3, -0.1, 0.1
    one = shrunk(tensor(a, b), tensor(s, s))
    tau2 = (a - b) ** 2 / 2 - s**2
    assert one.spread == pytest.approx(math.sqrt(tau2))
    B = s**2 / (s**2 + tau2)
    assert one.expected.tolist() == pytest.approx([B * 0.1 + (1 - B) * a, B * 0.1 + (1 - B) * b])


def test_precise_sites_keep_their_own_and_vague_ones_take_the_others() -> None:
    one = shrunk(tensor(0.5, -0.5, 0.9), tensor(1e-6, 1e-6, 1e6))
    assert one.expected[:2].tolist() == pytest.approx([0.5, -0.5], abs=1e-6)
    assert float(one.expected[2]) == pytest.approx(one.mean, abs=1e-6)


def test_a_site_where_nothing_is_known_takes_the_mean() -> None:
    one = shrunk(tensor(0.1, NAN, 0.2), tensor(0.1, NAN, 0.1))
    assert float(one.expected[1]) == pytest.approx(one.mean)
    nothing = shrunk(tensor(NAN, NAN), tensor(NAN, NAN))
    assert nothing.expected.tolist() == [0.0, 0.0]


def test_pooling_is_nearer_to_the_truth_than_either_extreme() -> None:
    draw = np.random.default_rng(0)
    errors = {"own": 0.0, "mean": 0.0, "pooled": 0.0}
    for _ in range(20):
        truth = draw.normal(0.02, 0.05, 30)
        s = draw.uniform(0.02, 0.2, 30)
        a = truth + s * draw.normal(size=30)
        one = shrunk(torch.from_numpy(a), torch.from_numpy(s))
        for name, guess in (("own", a), ("mean", np.full(30, one.mean)), ("pooled", one.expected.numpy())):
            errors[name] += float(((guess - truth) ** 2).sum())
    assert errors["pooled"] < 0.9 * min(errors["own"], errors["mean"])


def expecting(*values: float) -> Advantage:
    return Advantage(tensor(*values), tensor(*[0.1] * len(values)), 0.0, 0.0, tensor(*values))


def test_a_site_takes_the_largest_and_alone_among_equals() -> None:
    advantages = {"one_model": expecting(0.0, -0.1, 0.2), "ditto": expecting(0.0, -0.2, 0.2)}
    assert choose(advantages, 3) == ["alone", "alone", "one_model"]
    assert best_together(advantages, 3) == ["one_model", "one_model", "one_model"]
    assert choose({}, 2) == ["alone", "alone"]
    assert best_together({}, 1) == [None]


def judged(right: list[list[int]]) -> Judged:
    """Sites whose rows are classified right (1) or wrong (0); all are of class 1."""
    owner = np.repeat(np.arange(len(right)), [len(one) for one in right])
    hits = np.concatenate([np.array(one) for one in right])
    output = np.stack([1.0 - hits, hits.astype(float)], 1)
    return Judged(output, np.ones(len(hits), np.int64), owner, len(right), Problem.of_classes(2))


def test_advantages_are_differences_on_the_same_draws() -> None:
    alone, other = judged([[1, 0] * 10, [1] * 10]), judged([[1, 0] * 10, [0] * 10])
    one = advantage(METRICS.named("accuracy"), other, alone)
    assert one.seen.tolist() == pytest.approx([0.0, -1.0])
    # Equal models differ in no draw: what is left is half a row, (0.5 / 2) / 20 and (1 / 2) / 10.
    assert one.error.tolist() == pytest.approx([0.5 / 40, 1 / 20])


def test_errors_count_positive_where_they_fall() -> None:
    outputs = np.zeros((4, 1))
    near = Judged(outputs, np.full(4, 0.5), np.zeros(4, np.int64), 1, Problem.of_numbers())
    far = Judged(outputs, np.full(4, 2.0), np.zeros(4, np.int64), 1, Problem.of_numbers())
    assert float(advantage(METRICS.named("rmse"), near, far).seen[0]) == pytest.approx(1.5)


def test_gains_of_sites_that_stay_alone_are_zero() -> None:
    figures = SiteFigures(
        METRICS.named("accuracy"), {"alone": judged([[1, 0] * 20] * 3), "ditto": judged([[1] * 40] * 3)}
    )
    assert figures.gain("alone", 0).value == 0
    assert figures.gain("ditto", 1).value == pytest.approx(0.5)
    assert figures.gain("ditto", 1).is_clear


def test_the_mean_gain_counts_every_site_alike_and_beside_it_every_row() -> None:
    alone, handed = [[1, 0] * 20, [1, 0] * 5, [1, 0] * 5], [[1] * 40, [1, 0] * 5, [1, 0] * 5]
    figures = SiteFigures(METRICS.named("accuracy"), {"alone": judged(alone), HANDED: judged(handed)})
    by_sites, by_rows = figures.overall()
    assert by_sites.value == pytest.approx(0.5 / 3)
    assert by_rows.value == pytest.approx(0.5 * 40 / 60)
    assert not by_sites.is_clear  # three sites, one of which gains
