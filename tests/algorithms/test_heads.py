"""What methods at features and logits ask of a model, and class counts."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, by_hand, linear
from torch import nn

from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.common.heads import class_counts
from kinfed.errors import ConfigError
from kinfed.testing import tiny_federation

AT_LOGITS = ("fedlc", "fedntd", "fedrod")
AT_FEATURES = ("moon", "fedproto", "feddbe", "fedpac", "fedas", "pfedfda", "fedcp", "gpfl")


def headless() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())


@pytest.mark.parametrize("name", [*AT_LOGITS, *AT_FEATURES])
def test_a_model_without_a_last_linear_layer_is_refused(name: str) -> None:
    title = ALGORITHMS[name].title
    with (
        pytest.raises(ConfigError, match=f"{title} .* last linear layer of a model, which this one lacks"),
        by_hand(make_algorithm(name, ALL), model=headless),
    ):
        pass


@pytest.mark.parametrize("name", AT_FEATURES)
def test_features_that_nobody_trains_are_refused(name: str) -> None:
    title = ALGORITHMS[name].title
    with (
        pytest.raises(ConfigError, match=f"{title} .* trains no layer but '1': its features are fixed"),
        by_hand(make_algorithm(name, ALL), model=linear),
    ):
        pass


def test_class_counts_are_of_all_examples() -> None:
    """In any order of clients."""
    data = tiny_federation((3, 1, 9, 5))
    ids = torch.tensor([2, 1, 3])
    counts = class_counts(data.cohort(ids, seed=0, round=1).train, 3)
    assert counts.tolist() == [[int((data.labels[data.train[k]] == c).sum()) for c in range(3)] for k in ids.tolist()]
