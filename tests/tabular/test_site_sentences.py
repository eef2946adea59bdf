"""What people read of a site: right for few rows, one class, numbers and shares."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from kinfed.data.examples.problem import Problem
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.tabular.fit_result import ColumnWorth, ContenderRecord, Estimate, FitResult, SiteRecord
from kinfed.tabular.portfolio import BASELINE
from kinfed.tabular.site_figures import SiteFigures
from kinfed.tabular.site_sentences import Wording

BINARY = Problem.of_classes(2, ["benign", "malignant"])


def figures(labels: list[int], scores: list[float], others: list[float], metric: str = "auroc") -> SiteFigures:
    """Of one site: alone, and with one model for all."""
    judged = {
        name: Judged(np.stack([np.zeros(len(labels)), np.array(values)], 1), np.array(labels),
                     np.zeros(len(labels), np.int64), 1, BINARY)
        for name, values in (("alone", scores), ("one_model", others), (BASELINE, [0.0] * len(labels)))
    }  # fmt: skip
    return SiteFigures(METRICS.named(metric), judged)


def test_a_ranking_is_as_sure_as_the_rarer_class_allows() -> None:
    """Twenty rows and two of a class: Student's t for two, cut at what is possible; with one there is no interval."""
    negatives = list(np.linspace(-1, 1, 18))
    one = figures([1] + [0] * 18, [2.0, *negatives], [0.5, *negatives])
    assert one.gain("one_model", 0).low is None
    assert one.value("alone", 0) == Estimate(1.0)
    two = figures([1, 1] + [0] * 18, [0.1, 0.5, *negatives], [0.1, 0.8, *negatives])
    gain, alone = two.gain("one_model", 0), two.value("alone", 0)
    assert alone.value is not None
    assert gain.high == pytest.approx(1 - alone.value)  # nothing is better than 100 %
    assert alone.high == 1.0
    # Accuracy compares no classes: all rows stand behind it.
    assert (
        figures([1] + [0] * 18, [2.0, *negatives], [0.5, *negatives], "accuracy").gain("one_model", 0).low is not None
    )


def test_supports_of_measures() -> None:
    judged = Judged(np.zeros((5, 2)), np.array([0, 1, 1, 1, 0]), np.array([0, 0, 0, 0, 1]), 2, BINARY)
    assert METRICS.named("auroc").support(judged).tolist() == [1, 0]
    assert METRICS.named("accuracy").support(judged).tolist() == [4, 1]


def site(**changes: object) -> SiteRecord:
    figures_of_site = {
        "baseline": Estimate(0.5), "alone": Estimate(0.8, 0.7, 0.9), "one_model": Estimate(0.85, 0.8, 0.9),
        "with_others": Estimate(0.85, 0.8, 0.9), "deployed": Estimate(0.85, 0.8, 0.9),
        "gain": Estimate(0.05, -0.02, 0.12), "gain_together": Estimate(0.05, -0.02, 0.12),
    }  # fmt: skip
    plain = SiteRecord("Süd", 60, 60, 20, 12, "one_model", "one_model", 0.03, 0.03, **figures_of_site,
                       rare_class="malignant")  # fmt: skip
    return replace(plain, **changes)


def result(problem: Problem = BINARY, metric: str = "auroc", **changes: object) -> FitResult:
    contenders = tuple(
        ContenderRecord(name, title, method, "server" if name == "one_model" else "personal", "mlr", {}, 0.8, 0.0, 0.0)
        for name, title, method in (("alone", "alone", "local"), ("one_model", "one model for all", "fedavg"))
    )
    plain = FitResult(problem, metric, "t.csv", {"rounds": 3, "seed": 0}, 1, {}, contenders, (site(), site(site="Ost")),
                      Estimate(0.03, -0.01, 0.07), (), 100, "growth", class_rows=(94, 6))  # fmt: skip
    return replace(plain, **changes)


def test_a_site_with_one_class_is_told_why_it_has_no_figure() -> None:
    nothing = {name: Estimate(None) for name in ("alone", "deployed", "gain")}
    one_class = site(test_rows=8, rare_rows=0, **nothing)
    sentence = Wording(result()).sentence(one_class)
    assert sentence.startswith("Süd ")
    assert all(fact in sentence for fact in ("AUROC", "8 test rows", "benign"))
    assert not any(character in sentence for character in "%+−")  # no figure, no gain
    assert "1 test row is" in Wording(result()).sentence(replace(one_class, test_rows=1))


def test_few_rows_of_a_class_are_named_with_it() -> None:
    words = Wording(result())
    assert words.rows(site(rare_rows=2)) == "20 test rows, 2 of them of class malignant"
    assert words.rows(site()) == "20 test rows"
    unsure = site(rare_rows=1, gain=Estimate(0.05))
    sentence = words.sentence(unsure)
    assert "+5.0 points" in sentence
    assert "too few test rows" in sentence
    assert "95 %" not in sentence


def test_errors_are_written_in_digits_that_count_and_fall_where_there_is_a_gain() -> None:
    numbers = site(
        rare_rows=None, alone=Estimate(56.8437), deployed=Estimate(55.901), gain=Estimate(0.9427, -1.855, 3.742)
    )
    words = Wording(result(Problem("regression", mean=152.3, scale=77.75), "rmse", sites=(numbers, numbers),
                           overall=Estimate(1.716, 0.1, 3.3), class_rows=()))  # fmt: skip
    sentence, overall = words.sentence(numbers), words.overall()
    assert re.findall(r"[+−]?\d+\.\d+", sentence) == ["56.8", "55.9", "+0.9", "−1.9", "+3.7"]
    assert "within chance" in sentence
    assert re.findall(r"[+−]\d+\.\d+", overall)[-3:] == ["+1.7", "+0.1", "+3.3"]
    assert "less RMSE" in overall
    assert words.predicted() == "growth, a number (mean 152, standard deviation 77.8 in training rows)"


@pytest.mark.parametrize(
    ("overall", "conclusion"),
    [
        (Estimate(0.03, -0.01, 0.07), "do not show that learning with the others helps, nor that it harms"),
        (Estimate(0.03, 0.01, 0.05), "on average, learning with the others helps"),
        (Estimate(-0.03, -0.05, -0.01), "on average, sites do better alone"),
    ],
)
def test_what_follows_for_all_sites_is_said(overall: Estimate, conclusion: str) -> None:
    assert conclusion in Wording(result(overall=overall)).overall()


def test_two_sites_do_not_tell_what_a_column_buys_elsewhere_unless_they_agree() -> None:
    """Student's t of one degree of freedom: 12.7 standard errors each side."""
    worths = [ColumnWorth("dose", "north", False, None, None)]
    for east, west, told in ((0.10, 0.30, "no use is to be expected"), (0.10, 0.11, "it would buy about 0.105")):
        sites = [ColumnWorth("dose", name, True, gain, 0.01) for name, gain in (("east", east), ("west", west))]
        ((_, sentence),) = Wording(result(own_columns=(*worths, *sites))).own_columns()
        assert told in sentence
    assert "0.041 to 0.169" in sentence


def test_what_is_predicted_has_its_classes_with_their_rows() -> None:
    assert Wording(result()).predicted() == "growth, which is benign (94 training rows) or malignant (6)"
    many = Problem.of_classes(8, [f"c{n}" for n in range(8)])
    words = Wording(result(many, "accuracy", class_rows=(1,) * 8, target=""))
    assert words.predicted() == "the target, which is c0, c1, c2, c3, c4 or one of 3 others"
