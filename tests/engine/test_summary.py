"""Metrics against figures worked out by hand, and properties that hold for any federation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.score import summarize
from kinfed.records.run_record import has_diverged


def counts(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sizes(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_four_clients_by_hand() -> None:
    # accuracies 1/2, 1, 0, 3/4; 20 test examples, 12 correct
    found = summarize(counts(5, 4, 0, 3), counts(10, 1, 8, 2), sizes(10, 4, 2, 4), sizes(30, 10, 50, 10))
    assert found["accuracy"] == pytest.approx(12 / 20)
    assert found["accuracy_mean"] == pytest.approx(2.25 / 4)
    deviations = [0.5 - 0.5625, 1 - 0.5625, 0 - 0.5625, 0.75 - 0.5625]
    assert found["accuracy_std"] == pytest.approx(math.sqrt(sum(d * d for d in deviations) / 4))
    assert found["worst10"] == 0.0  # ceil(4/10) = 1 client: the third
    assert found["top10"] == 0.0  # the third has most training examples
    assert found["loss"] == pytest.approx(21 / 20)
    assert list(found) == ["accuracy", "accuracy_mean", "accuracy_std", "worst10", "top10", "loss"]


def test_ten_percent_rounds_up() -> None:
    correct = torch.arange(30, dtype=torch.float64)
    found = summarize(correct, correct, torch.full((30,), 100), torch.arange(30))
    assert found["worst10"] == pytest.approx((0 + 1 + 2) / 300)
    assert found["top10"] == pytest.approx((29 + 28 + 27) / 300)
    found = summarize(correct[:21], correct[:21], torch.full((21,), 100), torch.arange(21))
    assert found["worst10"] == pytest.approx((0 + 1 + 2) / 300)


def test_top10_weighs_by_examples_and_prefers_lower_ids() -> None:
    # 11 clients: two count. Sizes 9, 7, 9, 9, 1, ...: the clients 0 and 2, not 3.
    n_train = sizes(9, 7, 9, 9, *[1] * 7)
    n_test = sizes(10, 1, 30, 5, *[1] * 7)
    correct = counts(1, 0, 27, 5, *[0] * 7)
    assert summarize(correct, correct, n_test, n_train)["top10"] == pytest.approx(28 / 40)


def test_clients_without_test_examples_are_in_no_figure() -> None:
    """Ten clients beside an eleventh without test data: one counts as 10%, and the largest is not the absent one."""
    nan = float("nan")
    with_absent = summarize(
        counts(*range(10), 0), counts(*[1.0] * 10, nan), sizes(*[10] * 10, 0), sizes(*range(10), 99)
    )
    without = summarize(counts(*range(10)), counts(*[1.0] * 10), sizes(*[10] * 10), sizes(*range(10)))
    assert with_absent == without
    assert without["worst10"] == 0.0
    assert without["top10"] == pytest.approx(0.9)


def test_a_task_without_accuracy_gives_the_loss_only() -> None:
    assert summarize(None, counts(6, 2), sizes(3, 1), sizes(1, 1)) == {"loss": 2.0}


def test_figures_that_do_not_exist_are_absent() -> None:
    assert summarize(counts(0, 0), counts(0, 0), sizes(0, 0), sizes(5, 5)) == {}
    assert summarize(counts(), counts(), sizes(), sizes()) == {}


def test_a_diverged_model_shows_in_the_loss() -> None:
    nan = float("nan")
    assert math.isnan(summarize(None, counts(nan, 1), sizes(1, 1), sizes(1, 1))["loss"])


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, False),
        ({"loss": math.inf}, True),
        ({"loss": 99.0, "accuracy": 0.1}, False),
        ({"loss": 101.0, "accuracy": 0.9}, True),
        ({"loss": 1e9}, False),  # in a unit of its own
        ({"loss": 1e4, "rmse": 1e9}, False),  # in the target's unit; the loss is in standard deviations
        ({"loss": 1e7, "rmse": 1e-3}, True),
        ({"loss": 2.0, "rmse": 3.0, "r2": -1e9}, False),  # targets that hardly vary inside a client
    ],
)
def test_models_that_ran_away(metrics: dict[str, float], expected: bool) -> None:
    assert has_diverged(metrics) == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=40))
def test_bounds_and_plain_loops(clients: list[tuple[int, float, int]]) -> None:
    """Against a textbook computation with Python lists."""
    n_test = [n for n, _, _ in clients]
    correct = [float(int(n * share)) for n, share, _ in clients]
    n_train = [t for _, _, t in clients]
    found = summarize(counts(*correct), counts(*correct), sizes(*n_test), sizes(*n_train))
    rows = [(c / n, n, t, i) for i, (c, n, t) in enumerate(zip(correct, n_test, n_train, strict=True)) if n]
    if not rows:
        assert found == {}
        return
    tenth = -(-len(rows) // 10)
    accuracies = [r[0] for r in rows]
    largest = sorted(rows, key=lambda r: (-r[2], r[3]))[:tenth]
    assert found["accuracy"] == pytest.approx(sum(correct) / sum(n_test))
    assert found["accuracy_mean"] == pytest.approx(sum(accuracies) / len(rows))
    assert found["worst10"] == pytest.approx(sum(sorted(accuracies)[:tenth]) / tenth)
    assert found["top10"] == pytest.approx(sum(r[0] * r[1] for r in largest) / sum(r[1] for r in largest))
    assert found["worst10"] <= found["accuracy_mean"] + 1e-12


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one entry per client.*'loss': \[1\]"):
        summarize(counts(1, 2), counts(1), sizes(2, 2), sizes(1, 1))
    with pytest.raises(ValueError, match="client 1 has 3 correct of 2 test examples"):
        summarize(counts(1, 3), counts(1, 1), sizes(2, 2), sizes(1, 1))
    with pytest.raises(ValueError, match="negative"):
        summarize(None, counts(1), sizes(-1), sizes(1))


def test_a_metric_of_ones_own_is_in_every_summary() -> None:
    METRICS.register("best", lambda scores: None if scores.accuracy is None else scores.accuracy.max().item())
    try:
        assert summarize(counts(1, 3), counts(1, 1), sizes(2, 4), sizes(1, 1))["best"] == 0.75
        assert "best" not in summarize(None, counts(1), sizes(1), sizes(1))
    finally:
        METRICS.unregister("best")
