"""How large a registered model is and how its gradients are computed, without building it: for `kinfed list models`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kinfed.core import imported
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.models import MODELS, build_model


@dataclass(frozen=True)
class ModelOutline:
    shape: tuple[int, ...]  # of the example that the figures are for
    classes: int
    trained: int  # parameters
    statistics: int  # running ones, beside them in a client's row
    frozen: int  # parameters that all clients share
    backend: str  # gradient path


def model_outline(name: str) -> ModelOutline | None:
    """The model with its default options for its registered example; None where it was registered without one."""
    facts = MODELS[name].facts
    if "example" not in facts:
        return None
    shape, classes = facts["example"]
    instead = imported(facts.get("outline"))

    def build() -> nn.Module:
        with torch.device("meta"):  # sizes without memory
            module: nn.Module = build_model(name, shape, classes) if instead is None else instead(shape, classes)
            return module

    task = make_task(build, device="meta")
    trained = task.trainable.stop
    frozen = sum(p.numel() for p in task.module.parameters() if not p.requires_grad)
    return ModelOutline(shape, classes, trained, task.num_params - trained, frozen, task.backend)
