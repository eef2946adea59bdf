"""Readiness for devices that compute while the host goes on: no local step waits for a number from the device.

There is no GPU here. What makes the host wait there (`.item()`, `bool(tensor)`) is an operation on the CPU too, and is
counted: twice as many steps must not have more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.engine.task_factory import RowsTask, make_task
from kinfed.engine.training.sgd import sgd

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


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))


class OwnModule(nn.Module):
    """No chain of layers: through autograd, client after client."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)))


def normalized() -> nn.Module:
    """With running statistics, which move in every step."""
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def adapted() -> nn.Module:
    return kinfed.lora(dense(), "0", rank=2, train="2")


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 4)), nn.LSTM(4, 5, batch_first=True), LastOutput(), nn.Linear(5, 3))


def federation(build: Callable[[], nn.Module]) -> Federation:
    x = torch.arange(3 * 12 * 16).reshape(36, 16).to(torch.float32) / 576
    examples = x.reshape(36, 1, 4, 4) if build is cnn else x
    return Federation.from_arrays(examples, torch.arange(36) % 3, torch.arange(36) % 3, test_fraction=0.0)


def waits(build: Callable[[], nn.Module], backend: str, steps: int, **training: Any) -> int:
    task = make_task(build, backend=backend)
    cohort = federation(build).cohort(torch.arange(3), 0, 1)
    theta = task.init(0).expand(3, -1)
    with Waits() as counter:
        sgd(task, theta, cohort.train.batches(LocalTraining(lr=0.1, batch=4, steps=steps, **training)))
    return counter.count


def test_the_counter_counts() -> None:
    with Waits() as counter:
        bool(torch.ones(2).sum() > 1)
        torch.ones(1).item()
    assert counter.count >= 2


@pytest.mark.parametrize(
    "training", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"optimizer": "adamw"}], ids=str
)
@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (dense, "stacked"),
        (dense, "vmap"),
        (image, "vmap"),
        (cnn, "rows"),
        (OwnModule, "rows"),
        (normalized, "rows"),
        (recurrent, "rows"),
        (adapted, "batched"),
    ],
)
def test_no_step_waits_for_the_device(build: Callable[[], nn.Module], backend: str, training: dict[str, Any]) -> None:
    # Three steps go through the examples once, so four and eight have the same kinds of steps. The first call of a
    # process makes keys that later ones know.
    _, few, many = (waits(build, backend, steps, **training) for steps in (4, 4, 8))
    assert many == few


@pytest.mark.parametrize("training", [{}, {"optimizer": "adamw"}], ids=str)
def test_steps_need_no_number_of_a_device_that_has_none(training: dict[str, Any]) -> None:
    """On torch's meta device, where nothing can be copied to the host or looked at. Other paths than the stacked one
    have generators, which there are none of there."""
    task = make_task(dense, backend="stacked", device="meta")
    cohort = federation(dense).on(torch.device("meta")).cohort(torch.arange(3), 0, 1)
    theta = torch.empty(3, task.num_params, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        bool(theta.sum() > 0)
    out = sgd(task, theta, cohort.train.batches(LocalTraining(lr=0.1, batch=4, steps=4, **training)))
    assert out.shape == theta.shape


def test_the_convolutional_path_is_the_one_by_hand() -> None:
    task = make_task(cnn, backend="rows")
    assert isinstance(task, RowsTask)
    assert task.net is not None


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"optimizer": "adamw"}], ids=str)
@pytest.mark.parametrize(("build", "backend"), [(dense, "stacked"), (cnn, "rows"), (OwnModule, "rows")])
def test_clipping_waits_once_in_a_step(build: Callable[[], nn.Module], backend: str, optimizer: dict[str, Any]) -> None:
    """Whether any gradient is too long is asked before all are shortened; said in docs/scaling.md."""
    _, few, many = (waits(build, backend, steps, clip=1.0, **optimizer) for steps in (4, 4, 8))
    assert many - few == 4


METHODS: dict[str, dict[str, Any]] = {
    "ditto": {}, "fedprox": {}, "scaffold": {}, "feddyn": {}, "apfl": {}, "pfedme": {"lam": 5.0}, "perfedavg": {},
    "perfedavg_hf": {}, "fedrep": {}, "fedper": {}, "fedbabu": {}, "apple": {}, "fedproto": {}, "moon": {},
    "fedrod": {}, "fedlc": {}, "selffl": {}, "fedfomo": {}, "mrmtl": {}, "kin": {},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_no_local_step_of_a_method_waits_for_the_device(method: str) -> None:
    """In a client's first round, with twice as many steps; what is asked once in a round is no part of it. FedNTD,
    FedCP and FedEM are not among them: they look at row numbers and keys in every step, which the host holds."""

    def in_a_round(steps: int) -> int:
        task, data = make_task(dense, backend="stacked"), federation(dense)
        algorithm = make_algorithm(method, LocalTraining(lr=0.1, batch=4, steps=steps), METHODS[method])
        everyone, cohort = torch.arange(3), data.cohort(torch.arange(3), 0, 1)
        down = algorithm.download(algorithm.init_server(task, data.population(0)), everyone)
        client = algorithm.init_client(task, cohort)
        with Waits() as counter:
            algorithm.client_update(task, client, down, cohort)
        return counter.count

    _, few, many = (in_a_round(steps) for steps in (4, 4, 8))
    assert many == few
