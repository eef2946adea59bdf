"""Training some layers alone: the numbers of training all and putting the others back, without their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.engine.contract.descent import ProximalTerm
from kinfed.engine.contract.feature_loss import FeatureLoss, logit_delta
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.testing import tiny_federation

CLASSES, CLIENTS = 3, 6


class Own(nn.Module):
    """A module as users write it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), norm, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(relu(self.norm(self.body(x.flatten(1)))))
        return out


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "dense": (
        "stacked",
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, CLASSES, bias=False)
        ),
    ),
    "convolutions": (
        "rows",
        lambda: nn.Sequential(
            nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 2, bias=False), nn.Flatten(), nn.Linear(3, CLASSES)
        ),
    ),
    "own": ("rows", lambda: Own(nn.LayerNorm(8))),
    "statistics": ("rows", lambda: Own(nn.BatchNorm1d(8))),
    "dropout": ("rows", lambda: Own(nn.Dropout(0.3))),
}


def task_of(name: str) -> ModuleTask:
    backend, build = MODELS[name]
    return make_task(build, backend=backend)


def mask_of(task: ModuleTask, which: str) -> Tensor:
    """A layer, or all others; running statistics move with the latter only."""
    layers = task.layer_names()
    mask = task.layer_mask((layers[{"first": 0, "last": -1, "all but last": -1}[which]],))
    return ~mask if which == "all but last" else mask


def train(
    task: ModuleTask,
    mask: Tensor | None,
    weight_decay: float = 0.0,
    proximal: ProximalTerm | None = None,
    feature_loss: FeatureLoss | None = None,
    *,
    clients: Sequence[int] = range(CLIENTS),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    federation = tiny_federation()
    federation = replace(federation, features=Features(federation.features.raw.view(-1, 1, 2, 2)))
    data = federation.cohort(torch.tensor(clients), 0, 1)
    theta = torch.stack([task.init(0, k) for k in clients])
    training = LocalTraining(lr=0.1, batch=5, steps=None, epochs=3, weight_decay=weight_decay, **options)
    return theta, sgd(
        task, theta, data.train.batches(training), mask=mask, proximal=proximal, feature_loss=feature_loss
    )


def at_shifted_logits(phi: Tensor, z: Tensor, batch, rows: Tensor):  # type: ignore[no-untyped-def]
    return logit_delta(z + 0.1 * rows[:, None, None], batch), 0.01 * batch.weight[..., None] * phi


@pytest.mark.parametrize("terms", ["plain", "weight decay", "proximal", "feature loss"])
@pytest.mark.parametrize("which", ["first", "last", "all but last"])
@pytest.mark.parametrize("name", MODELS)
def test_some_layers_train_as_if_the_others_were_put_back(
    name: str, which: str, terms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(name)
    mask = mask_of(task, which)
    near = torch.stack([task.init(1, k) for k in range(CLIENTS)])
    proximal = (torch.linspace(0, 1, CLIENTS), near) if terms == "proximal" else None
    decay = 0.05 if terms == "weight decay" else 0.0
    feature_loss = at_shifted_logits if terms == "feature loss" else None
    calls = []
    short = type(task).descent
    monkeypatch.setattr(type(task), "descent", lambda *args: calls.append(1) or short(*args))
    theta, ours = train(task, mask, decay, proximal, feature_loss)
    # Terms that concern trainable columns only go the long way where there are other ones.
    assert bool(calls) == (name != "statistics" or terms in ("plain", "feature loss"))
    monkeypatch.setattr(type(task), "descent", lambda *args: None)
    _, wanted = train(task, mask, decay, proximal, feature_loss)
    assert torch.allclose(ours, wanted, atol=1e-6)
    assert torch.equal(ours[:, ~mask], theta[:, ~mask])
    assert not bool((ours == theta)[:, mask].all(1).any())


@pytest.mark.parametrize("name", MODELS)
def test_a_mask_inside_a_layer_goes_the_long_way(name: str) -> None:
    task = task_of(name)
    mask = torch.zeros(task.num_params, dtype=torch.bool)
    assert task.descent(task.init(0)[None], 1, mask=mask) is None
    mask[1] = True
    assert task.descent(task.init(0)[None], 1, mask=mask) is None


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"optimizer": "adamw"}])
def test_layers_below_the_first_trained_one_are_not_differentiated(options: dict[str, Any]) -> None:
    """Numbers that are not finite on the way back to the body would show."""

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x

        @staticmethod
        def backward(ctx, delta):  # type: ignore[no-untyped-def]
            raise AssertionError("the body is differentiated")

    class Model(Own):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(Root.apply(relu(self.body(x.flatten(1)))))
            return out

    task = make_task(lambda: Model(nn.Identity()), backend="rows")
    train(task, mask_of(task, "last"), **options)
    with pytest.raises(AssertionError, match="the body"):
        train(task, mask_of(task, "first"), **options)


@pytest.mark.parametrize("which", ["all", "last"])
@pytest.mark.parametrize("name", ["own", "statistics", "dropout"])
def test_optimizers_give_a_client_the_same_bits_alone_and_among_others(name: str, which: str) -> None:
    task = task_of(name)
    mask = None if which == "all" else mask_of(task, which)
    options = {"momentum": 0.9, "nesterov": True, "clip": 0.1}
    _, together = train(task, mask, 0.01, **options)
    for k in range(CLIENTS):
        theta, alone = train(task, mask, 0.01, clients=[k], **options)
        assert torch.equal(alone[0], together[k])
        assert not torch.equal(alone, theta)
