"""Relative false accepts against figures worked out by hand. Whole runs of detectors are in test_wakeword."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kinfed.errors import DataError
from kinfed_papers.studies.detection import relative_false_accepts


def scored(positives: list[float], negatives: list[float]) -> tuple[Tensor, Tensor]:
    flags = torch.tensor([True] * len(positives) + [False] * len(negatives))
    return torch.tensor(positives + negatives), flags


def test_relative_false_accepts_by_hand() -> None:
    baseline, positive = scored([0.2, 0.5, 0.7, 0.9], [0.1, 0.3, 0.55, 0.8])
    # At 0.4 the baseline misses 0.2 and accepts 0.55 and 0.8: FR 1/4, FA 2/4.
    model, _ = scored([0.4, 0.5, 0.8, 0.9], [0.1, 0.2, 0.3, 0.6])
    # The model misses one of four between 0.4 and 0.5, where it accepts 0.6 only.
    found = relative_false_accepts(model, baseline, positive, 0.4)
    assert found.ratio == pytest.approx(1 / 2)
    assert (found.false_reject, found.false_accept, found.baseline_false_accept) == (0.25, 0.25, 0.5)
    assert found.baseline_threshold == 0.4


@pytest.mark.parametrize("threshold", [0.31, 0.5, 0.55, 0.6])
def test_a_model_against_itself_is_one_at_any_threshold(threshold: float) -> None:
    scores, positive = scored([0.3, 0.5, 0.6, 0.9], [0.1, 0.2, 0.55, 0.7])
    assert relative_false_accepts(scores, scores, positive, threshold).ratio == 1.0


def test_equal_scores_are_split_by_interpolation() -> None:
    baseline, positive = scored([0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0])  # at 0.5: FR 1/4, FA 2/4
    model, _ = scored([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5])  # says nothing: from (FR 0, FA 1) to (1, 0)
    found = relative_false_accepts(model, baseline, positive, 0.5)
    assert found.false_accept == pytest.approx(0.75)
    assert found.ratio == pytest.approx(1.5)
    model, _ = scored([0.5, 0.5, 0.9, 0.9], [0.5, 0.1, 0.1, 0.9])  # one of the two tied: between FA 2/4 and 1/4
    assert relative_false_accepts(model, baseline, positive, 0.5).false_accept == pytest.approx(1.5 / 4)


def test_a_baseline_without_false_rejects_moves_to_twenty() -> None:
    positives = [i / 100 for i in range(30)]
    baseline, positive = scored(positives, [0.0, 0.1, 0.195, 0.205, 0.4])
    model, _ = scored(positives, [0.0, 0.1, 0.11, 0.12, 0.4])
    found = relative_false_accepts(model, baseline, positive, 0.0)
    assert found.baseline_threshold == pytest.approx(0.195)  # the lowest score that rejects 0.00 .. 0.19
    assert found.false_reject == pytest.approx(20 / 30)
    assert found.baseline_false_accept == pytest.approx(2 / 5)  # at 0.2, with the same false rejects as 0.195
    assert found.ratio == pytest.approx(1 / 2)


def test_a_baseline_that_rejects_everything() -> None:
    scores, positive = scored([0.1, 0.2], [0.3, 0.4])
    found = relative_false_accepts(scores, scores, positive, 1.0)
    assert (found.false_reject, found.false_accept, found.ratio) == (1.0, 0.0, None)


def test_what_has_no_operating_point_is_refused() -> None:
    scores, positive = scored([0.5, 0.6], [0.1])
    with pytest.raises(DataError, match=r"rejects none of 2 positive examples.*at least 20"):
        relative_false_accepts(scores, scores, positive, 0.2)
    with pytest.raises(DataError, match="got 3 and 0"):
        relative_false_accepts(scores, scores, torch.ones(3, dtype=torch.bool), 0.2)
    with pytest.raises(DataError, match="not finite"):
        relative_false_accepts(scores * torch.nan, scores, positive, 0.55)
    with pytest.raises(ValueError, match="must be bool"):
        relative_false_accepts(scores, scores, positive.long(), 0.55)
    with pytest.raises(ValueError, match=r"\[N\] like positive \[3\]; got \[2\]"):
        relative_false_accepts(scores[:2], scores, positive, 0.55)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), min_size=2, max_size=40),
    st.integers(1, 6),
)
def test_interpolated_rates_lie_on_the_roc(examples: list[tuple[int, int, bool]], threshold: int) -> None:
    """Against thresholds tried one by one: the false accepts lie between those of the neighbouring thresholds."""
    positive = torch.tensor([flag for _, _, flag in examples])
    model = torch.tensor([float(a) for a, _, _ in examples])
    baseline = torch.tensor([float(b) for _, b, _ in examples])
    rejected = int((positive & (baseline < threshold)).sum())
    if rejected == 0 or positive.all():
        return
    found = relative_false_accepts(model, baseline, positive, float(threshold))
    points = [(int((positive & (model < t)).sum()), int((~positive & (model >= t)).sum())) for t in range(8)]
    false_accepts = found.false_accept * int((~positive).sum())
    exact = [fa for fr, fa in points if fr == rejected]
    if exact:
        assert false_accepts == pytest.approx(min(exact))
    else:
        fewest = max(fa for fr, fa in points if fr > rejected)
        most = min(fa for fr, fa in points if fr < rejected)
        assert fewest - 1e-9 <= false_accepts <= most + 1e-9
