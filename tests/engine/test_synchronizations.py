"""Readiness for devices that compute while the host goes on: no local step waits for a number from the device.

There is no GPU here. What makes the host wait there (`.item()`, `bool(tensor)`) is an operation on the CPU too, and is
counted: twice as many steps must not have more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Federation
from kinfed.engine.sgd import sgd
from kinfed.engine.task import make_task

WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


class Waits(TorchDispatchMode):
    """Counts operations whose result the host must wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in WAITS
        return func(*args, **(kwargs or {}))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def image() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def waits(build: Callable[[], nn.Module], backend: str, steps: int, **training: Any) -> int:
    x = torch.arange(3 * 12 * 16).reshape(36, 16).to(torch.float32) / 576
    data = Federation.from_arrays(x, torch.arange(36) % 3, torch.arange(36) % 3, test_fraction=0.0)
    task = make_task(build, backend=backend)
    cohort = data.cohort(torch.arange(3), 0, 1)
    theta = task.init(0).expand(3, -1)
    with Waits() as counter:
        sgd(task, theta, cohort.train.batches(LocalTraining(lr=0.1, batch=4, steps=steps, **training)))
    return counter.count


def test_the_counter_counts() -> None:
    with Waits() as counter:
        bool(torch.ones(2).sum() > 1)
        torch.ones(1).item()
    assert counter.count >= 2


@pytest.mark.parametrize("training", [{}, {"momentum": 0.9}, {"optimizer": "adamw"}], ids=str)
@pytest.mark.parametrize(("build", "backend"), [(dense, "stacked"), (dense, "vmap"), (image, "vmap")])
def test_no_step_waits_for_the_device(build: Callable[[], nn.Module], backend: str, training: dict[str, Any]) -> None:
    # Three steps go through the examples once, so four and eight have the same kinds of steps.
    few, many = (waits(build, backend, steps, **training) for steps in (4, 8))
    assert many == few


def test_clipping_waits_once_in_a_step() -> None:
    """Whether any gradient is too long is asked before all are shortened; said in docs/scaling.md."""
    assert waits(dense, "stacked", 8, clip=1.0) - waits(dense, "stacked", 4, clip=1.0) == 4
