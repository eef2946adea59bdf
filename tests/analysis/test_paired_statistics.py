"""Intervals and leads over seeds, against scipy's tests and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from report_fixture import write_run

from kinfed.analysis import metric_style
from kinfed.analysis.comparison import HABITUAL_HUES, Comparison, compare
from kinfed.analysis.statistics import (
    MOST_SEEDS,
    Gain,
    Interval,
    adjusted_rand,
    difference,
    gains,
    interval,
    seeds_to_decide,
)
from kinfed.records import load_runs

ONE, OTHER = {0: 0.9, 1: 0.7, 2: 0.75}, {10: 0.6, 11: 0.5, 12: 0.66, 13: 0.45}


def test_seeds_that_do_not_belong_together_have_welch_s_interval():
    lead = difference(ONE, OTHER)
    oracle = scipy.stats.ttest_ind([*ONE.values()], [*OTHER.values()], equal_var=False).confidence_interval(0.95)
    assert lead is not None
    assert (lead.likely.low, lead.likely.high) == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    assert (lead.n, lead.likely.n, lead.ahead) == (3, 3, None)  # the fewer seeds, and no pair
    assert lead.spread == pytest.approx(math.hypot(np.std([*ONE.values()], ddof=1), np.std([*OTHER.values()], ddof=1)))
    exact = difference({0: 0.9, 1: 0.9, 2: 0.9}, {5: 0.7, 6: 0.7})
    assert exact is not None
    assert exact.likely == Interval(exact.mean, exact.mean, exact.mean, 2)


@pytest.mark.parametrize(("one", "other"), [({}, OTHER), (ONE, {}), ({0: 0.9}, OTHER), (ONE, {9: 0.4}), ({}, {})])
def test_a_lead_needs_two_seeds_on_either_side(one: dict[int, float], other: dict[int, float]):
    assert difference(one, other) is None


def test_so_many_seeds_would_decide_and_one_fewer_would_not():
    margin = interval({0: 0.01, 1: 0.05, 2: -0.02})
    assert margin is not None
    seeds = seeds_to_decide(margin)
    assert seeds is not None
    deviation = float(np.std([0.01, 0.05, -0.02], ddof=1))

    def reach(n: int) -> float:
        return float(scipy.stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)

    assert reach(seeds) < margin.mean <= reach(seeds - 1)
    scale = margin.mean / (reach(MOST_SEEDS) + 1e-12)  # a wider spread, which the last number that is tried decides
    wide = Interval(margin.mean, 0.0, margin.mean + (margin.high - margin.mean) * scale, 3)
    assert seeds_to_decide(wide) == MOST_SEEDS
    assert seeds_to_decide(Interval(0.0, -1.0, 1.0, 3)) is None


def test_the_gain_of_a_client_has_student_s_interval_of_its_test_rows():
    own = Gain("a", 0, 20, 2, 0.1, error=0.05).likely
    assert own is not None
    reach = float(scipy.stats.t.ppf(0.975, 1)) * 0.05
    assert (own.low, own.high, own.n) == pytest.approx((0.1 - reach, 0.1 + reach, 2))
    assert Gain("a", 0, 20, 1, 0.1, error=0.05).likely is None
    assert Gain("a", 0, 20, 9, 0.1, error=math.nan).likely is None


def test_methods_have_colours_and_figures_the_digits_that_count():
    assert len(set(HABITUAL_HUES.values())) == len(HABITUAL_HUES)
    loss = metric_style("loss")
    assert loss.for_values([0.0, math.nan, math.inf, 0.0729, 0.07]).digits == 4
    assert loss.for_values([72.9]).digits == 1
    assert loss.for_values([0.0, math.inf]).digits == loss.digits


def test_runs_are_compared_that_share_data_with_every_run_of_their_group(tmp_path: Path):
    """The second has a seed with each of the others, which have none in common and name other partitions."""
    of = {"a": (0,), "b": (0, 1), "c": (1,)}
    for name, seeds in of.items():
        write_run(tmp_path / name, algorithms=("local", "ditto"), clients=4, rounds=5, seeds=seeds)
    config = tmp_path / "c" / "config.json"
    record = json.loads(config.read_text())
    record["config"]["partition"] = {"name": "iid"}
    config.write_text(json.dumps(record))
    runs = load_runs([tmp_path / name for name in of])
    groups = [[run.label for run in one.runs] for one in compare(runs)]
    assert groups == [["a", "b"], ["c"]]
    both = compare(runs)[0]
    assert both.seeds == 1
    assert both.kinds == ("personal", "server")  # which local training has none of
    assert Comparison(both.runs, ()).seeds == 0


def test_a_client_without_a_figure_has_no_gain(tmp_path: Path):
    folder = write_run(tmp_path / "a", algorithms=("local", "ditto"), clients=3, rounds=5, seeds=(0,))
    lines = (folder / "clients.csv").read_text().splitlines()
    column = lines[0].split(",").index("personal_accuracy")
    cells = [line.split(",") for line in lines]
    without = next(row for row in cells if row[0] == "ditto")
    without[column] = ""
    (folder / "clients.csv").write_text("\n".join(map(",".join, cells)) + "\n")
    comparison = compare(load_runs([folder]))[0]
    ditto = next(one for one in comparison.methods if one.family == "ditto")
    assert {one.client for one in gains(comparison, ditto)} == {row[2] for row in cells[1:]} - {without[2]}


def test_partitions_are_of_the_same_clients():
    assert adjusted_rand([0, 0, 1, 1], [1, 1, 0, 0]) == 1
    with pytest.raises(ValueError, match="longer"):
        adjusted_rand([0, 0, 1], [0, 0, 1, 1])
