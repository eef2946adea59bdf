"""Runs of partly frozen models: trained on activations, identified by their weights, exported whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kinfed
from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.errors import KinfedError
from kinfed.runs.run_inputs import RunInputs
from kinfed.serving.export import export_model

SETTINGS = {"algorithms": ["fedavg", "fedper"], "rounds": 3, "seeds": [0], "steps": 3, "batch": 4, "eval_every": 0}


def pretrained(value: float = 1.0) -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        module[0].weight.copy_(torch.linspace(-value, value, 30).view(6, 5))
    return module


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.decode(torch.relu(self.encode(x)))))


def inputs_of(federation: Federation, **settings: object) -> RunInputs:
    return RunInputs(make_config(None, SETTINGS | settings), federation, pretrained)


def test_activations_take_the_place_of_examples_and_results_stay(federation: Federation) -> None:
    results = {}
    for cache in (True, False):
        inputs = inputs_of(federation, frozen="[01]", cache=cache)
        task, data = inputs.training_parts(0, inputs.algorithms["fedavg"])
        assert (task.backend, data.features.shape) == (("stacked", (6,)) if cache else ("vmap", (5,)))
        results[cache] = kinfed.run(federation=federation, model=pretrained, frozen="[01]", cache=cache, **SETTINGS)
    for label in ("fedavg", "fedper"):
        ours, theirs = (results[cache].result(label, 0).evaluation.models for cache in (True, False))
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_augmented_examples_are_not_replaced(federation: Federation) -> None:
    inputs = inputs_of(federation, frozen="[01]")
    augmented = kinfed.algorithms.make_algorithm("fedavg", inputs.config.training, {})
    object.__setattr__(augmented.training, "augment", "flip")
    assert inputs.training_parts(0, augmented)[1] is inputs.federation(0)


def test_a_run_is_not_resumed_with_other_frozen_weights(federation: Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kinfed.run(federation=federation, model=pretrained, frozen="[01]", out=out, **SETTINGS)
    kinfed.run(federation=federation, model=pretrained, frozen="[01]", out=out, resume=True, **SETTINGS)
    other = lambda: pretrained(2.0)  # noqa: E731
    with pytest.raises(KinfedError, match="frozen weights"):
        kinfed.run(federation=federation, model=other, frozen="[01]", out=out, resume=True, **SETTINGS)


def test_exported_models_are_whole(federation: Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = kinfed.run(federation=federation, model=pretrained, frozen="[01]", out=out, **SETTINGS)
    exported = export_model(out, "2", "fedper", 0, tmp_path / "model.safetensors")
    module = pretrained(3.0)
    module.load_state_dict(load_file(exported.path))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    wanted = result.personal_model("2", "fedper").module(x)
    torch.testing.assert_close(module.eval()(x), wanted)


def test_exported_models_hold_tied_parameters_under_all_names(federation: Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = kinfed.run(federation=federation, model=Tied, out=out, **SETTINGS)
    module = Tied()
    module.load_state_dict(load_file(export_model(out, "1", "fedavg", 0, tmp_path / "model.safetensors").path))
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module.eval()(x), result.personal_model("1", "fedavg").module(x))
