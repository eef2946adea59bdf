"""What methods at features and logits ask of a model, and class counts."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, by_hand, linear
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.common.heads import class_counts
from kinfed.data import Federation
from kinfed.errors import ConfigError, KinfedError
from kinfed.runs import NullObserver
from kinfed.testing import tiny_federation

AT_LOGITS = ("fedlc", "fedntd", "fedrod", "fd", "fml", "fedkd", "fedgen")
AT_FEATURES = ("moon", "fedproto", "fedtgp", "fedgh", "feddbe", "fedpac", "fedas", "pfedfda", "fedcp", "gpfl")


def headless() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())


@pytest.mark.parametrize("name", [*AT_LOGITS, *AT_FEATURES])
def test_a_model_without_a_last_linear_layer_is_refused(name: str) -> None:
    title = ALGORITHMS[name].title
    with (
        pytest.raises(ConfigError, match=f"{title} works at .* last linear layer, which this one does not end in"),
        by_hand(make_algorithm(name, ALL), model=headless),
    ):
        pass


class Probabilities(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(x), 1)


def test_models_that_end_in_log_softmax_run_or_are_refused_before_anything_trains() -> None:
    """All methods: whoever works at features says so at once, the others train (kin at temperatures beside the model,
    pFedSim by the parameters of the last layer, which it only compares)."""
    rounds = []

    class Rounds(NullObserver):
        def round(self, label: str, *_: object) -> None:
            rounds.append(label)

    x, y = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3
    data = Federation.from_arrays(x.numpy(), y.numpy(), torch.arange(120).numpy() // 30)
    settings = {"rounds": 2, "steps": 2, "seeds": (0,), "participation": 1.0, "progress": False}
    refused = set()

    def model() -> nn.Module:
        return Probabilities(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    for name in ALGORITHMS:
        rounds.clear()
        try:
            kinfed.run(algorithms=name, federation=data, model=model, observer=Rounds(), **settings)
        except KinfedError as error:
            assert not rounds
            if "the model's output is not that of" in str(error):
                refused.add(name)
    others = {"fedphp", "knnper", "fedbe", "fedmd", "ktpfl", "fedavg_intercept", "fedavg_recalibrated"}
    others |= {"floco", "fenda", "perfcl", "pefll"}
    assert refused == {*AT_LOGITS, *AT_FEATURES, *others}


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
