"""Ranks over federations against values by hand, and what intervals and critical differences are."""

from __future__ import annotations

import math

import pytest

from kinfed.analysis import rankings

# Demšar (2006), table 6: four methods on fourteen data sets; his critical difference is 1.25, with q = 2.569.
DEMSAR = (4, 14, 1.25)
TABLE = {
    "a": {"x": {0: 0.9, 1: 0.8}, "y": {0: 0.7, 1: 0.7}, "z": {0: 0.6, 1: 0.8}},
    "b": {"x": {0: 0.5, 1: 0.6}, "y": {0: 0.9, 1: 0.7}, "z": {0: 0.7, 1: 0.7}},
    "c": {"x": {0: math.nan, 1: 0.9}, "y": {0: 0.1, 1: 0.2}, "z": {0: 0.1, 1: 0.0}},
}


def test_equal_scores_share_their_places_and_what_is_not_finite_is_last():
    scores = {"a": 0.5, "b": math.nan, "c": 0.9, "d": 0.5}
    assert rankings.places(scores) == {"a": 2.5, "b": 4, "c": 1, "d": 2.5}
    assert rankings.places(scores, lower_is_better=True) == {"a": 1.5, "b": 4, "c": 3, "d": 1.5}


def test_mean_ranks_are_of_means_over_seeds():
    assert rankings.mean_ranks(TABLE) == {"a": pytest.approx((1 + 2 + 1.5) / 3), "b": (2 + 1 + 1.5) / 3, "c": 3.0}


def test_the_critical_difference_is_the_published_one():
    methods, federations, published = DEMSAR
    assert rankings.critical_difference(methods, federations) == pytest.approx(published, abs=0.005)


def test_groups_hold_all_methods_within_the_critical_difference():
    ranks = {"a": 1.0, "b": 1.8, "c": 2.4, "d": 4.0}
    assert rankings.alike(ranks, 1.0) == [["a", "b"], ["b", "c"]]
    assert rankings.alike(ranks, 0.1) == []
    assert rankings.alike({"a": 1.0, "b": 2.0}, 1.0) == []  # which differ by the critical difference
    assert rankings.alike(ranks, 10.0) == [["a", "b", "c", "d"]]


def test_an_interval_holds_the_rank_and_is_a_point_where_draws_change_nothing():
    for name, one in rankings.rank_intervals(TABLE, draws=200).items():
        assert one.low <= one.mean <= one.high
        assert one.mean == pytest.approx(rankings.mean_ranks(TABLE)[name])
    same = {name: {place: {0: value, 1: value} for place in "xyz"} for name, value in (("a", 0.9), ("b", 0.1))}
    assert [(one.low, one.high) for one in rankings.rank_intervals(same, draws=50).values()] == [(1, 1), (2, 2)]


def test_the_interval_of_a_mean_is_as_wide_as_its_standard_error():
    values = {"a": {f"f{i}": {0: float(i % 2)} for i in range(100)}}
    one = rankings.mean_intervals(values)["a"]
    assert one.mean == 0.5
    assert one.high - one.low == pytest.approx(2 * 1.96 * 0.5 / 10, rel=0.1)
    assert one.high + one.low == pytest.approx(1.0, abs=0.005)


def test_the_worst_share_has_one_client_at_least():
    assert rankings.worst_share([0.5, 0.1, 0.9], 0.1) == 0.1
    assert rankings.worst_share([i / 100 for i in range(100)], 0.1) == pytest.approx(0.045)


def test_rankings_that_agree_correlate_fully():
    ranks = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert rankings.rank_correlation(ranks, ranks) == pytest.approx(1)
    assert rankings.rank_correlation(ranks, {"a": 9.0, "b": 5.0, "c": 1.0}) == pytest.approx(-1)
    assert rankings.rank_correlation(ranks, {"a": 4.0, "b": 4.0, "c": 4.0}) == 0
