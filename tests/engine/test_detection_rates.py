"""Relative false accepts as a metric: by hand, 1 for the start itself, and of all methods of a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import kinfed
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.personal.personal_models import mixture_rows, task_for
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.engine.task_factory import make_task


def logits(scores: list[float]) -> np.ndarray:
    return np.stack([np.zeros(len(scores)), np.array(scores)], 1)


def test_by_hand() -> None:
    """Three positive rows: 5 % of them, rounded up, is one miss. The model then accepts one of four, the start two."""
    positive = [1, 1, 1, 0, 0, 0, 0]
    model = logits([0.1, 0.8, 0.9, 0.85, 0.2, 0.0, 0.05])
    start = logits([0.3, 0.5, 0.9, 0.6, 0.7, 0.1, 0.4])
    data = Judged(model, np.array(positive), np.zeros(7, np.int64), 2, Problem.of_classes(2), start)
    accepted, of_start = METRICS.named("relative_false_accepts").sums(data)
    assert accepted.tolist() == [1, 0]
    assert of_start.tolist() == [2, 0]  # the second client has no rows: undefined


@pytest.fixture(scope="module")
def detectors() -> Federation:
    numbers = np.random.default_rng(5)
    y = numbers.integers(0, 2, 120)
    return Federation.from_arrays(numbers.normal(size=(120, 3)) + y[:, None], y, np.repeat(["a", "b"], 60))


def test_the_start_against_itself_is_one(detectors: Federation) -> None:
    task = make_task(lambda: nn.Linear(3, 2))
    task.problem, task.metric = detectors.problem, "relative_false_accepts"
    part = detectors.cohort(torch.arange(2), seed=4, round=1).test
    start = task.init(4).expand(2, -1)
    assert task.evaluate(start, part).metric("relative_false_accepts").tolist() == [1, 1]
    # Of a mixture as well, whose rows are wider than the start's.
    mixed = mixture_rows(start[:, None].repeat(1, 2, 1), torch.full((2, 2), 0.5))
    assert task_for(task, mixed).evaluate(mixed, part).metric("relative_false_accepts").tolist() == [1, 1]


def test_a_run_is_judged_by_it(detectors: Federation) -> None:
    result = kinfed.run(
        federation=detectors, algorithms="fedavg", rounds=4, seeds=(0,), model="mlr", participation=1.0,
        metric="relative_false_accepts",
    )  # fmt: skip
    entry = result.result()
    assert entry.metric == "relative_false_accepts"
    assert 0 <= entry.personal["relative_false_accepts"] < 1  # better than the random start
    assert "relative_false_accepts" not in result.baselines[0].personal
