"""Advantages of contenders by site, and choices by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kinfed.data import Federation
from kinfed.data.examples.problem import Problem
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.tabular.decision import Advantage, advantage, advantages_of, best_together, choose, covariance_of_draws
from kinfed.tabular.site_figures import HANDED, SiteFigures, mean_ahead


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def expecting(*values: float) -> Advantage:
    return Advantage(0.0, 0.0, tensor(*values), tensor(*[0.01] * len(values)))


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


def test_all_contenders_are_pooled_together_with_half_a_row_of_doubt() -> None:
    right = [[1, 0] * 10, [1] * 10, [0, 0, 1] * 5]
    same = judged(right)
    advantages = advantages_of(METRICS.named("accuracy"), {"alone": same, "twin": same, "copy": same})
    assert list(advantages) == ["twin", "copy"]
    for one in advantages.values():
        assert one.expected.tolist() == pytest.approx([0.0] * 3)
        assert bool((one.variance > 0).all())
    assert advantages_of(METRICS.named("accuracy"), {"alone": same}) == {}


def test_covariances_are_those_of_draws_that_are_defined() -> None:
    draws = np.random.default_rng(1).normal(size=(200, 2, 3))
    draws[:50, 0, 1], draws[:120, 1, 2] = np.nan, np.nan
    covariance = covariance_of_draws(draws)
    np.testing.assert_allclose(covariance[0], np.cov(draws[50:, 0].T))
    assert np.isnan(covariance[1]).all()


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


def test_the_mean_gain_in_log_loss_is_that_of_differences_by_hand() -> None:
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), 10)
    data = Federation.from_arrays(
        draw.normal(size=(40, 2)), draw.integers(0, 2, 40), owner, test_rows=np.arange(40) % 2 == 1
    )
    handed, alone = (torch.log_softmax(torch.from_numpy(draw.normal(size=(20, 2))), 1) for _ in range(2))
    truth = data.labels[data.test.rows]
    ahead = (handed - alone)[torch.arange(20), truth].numpy()
    by_site = np.array([ahead[data.test.owner.numpy() == k].mean() for k in range(4)])
    gain = mean_ahead(METRICS.named("log_loss"), data, handed, alone)
    reach = 3.182446 * by_site.std(ddof=1) / 2  # Student's t with three degrees of freedom
    assert [gain.value, gain.low, gain.high] == pytest.approx(
        [by_site.mean(), by_site.mean() - reach, by_site.mean() + reach], rel=1e-5
    )
