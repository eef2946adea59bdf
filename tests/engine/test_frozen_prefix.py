"""What is frozen below everything trained is computed once: the same gradients and models, only sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import MakeBatch
from torch import Tensor, nn

from kinfed.data.batches import Batch
from kinfed.data.features import Features
from kinfed.engine import frozen_prefix as module_under_test
from kinfed.engine.frozen_prefix import AfterStages, BeforeHead, frozen_prefix
from kinfed.engine.task import make_task


class Body(nn.Module):
    """No stages: only the last layer can be split off."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(torch.relu(self.norm(self.first(x)))))


class Squashed(Body):
    """Does not end with its last layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], tuple[int, ...], object, str]] = {
    "body": (Body, ("first", "norm"), (6,), BeforeHead("fc"), "stacked"),
    "dense end": (chain, ("0", "1"), (2, 8, 8), AfterStages(4), "stacked"),
    "conv below": (chain, ("0",), (2, 8, 8), AfterStages(1), "rows"),
}


def on(activations: Tensor, batch: Batch) -> Batch:
    return replace(batch, x=activations)


@pytest.mark.parametrize("name", CASES)
def test_gradients_steps_and_models_are_those_of_the_whole(make_batch: MakeBatch, name: str) -> None:
    build, frozen, shape, cut, backend = CASES[name]
    task, batch = make_task(build, frozen=frozen), make_batch(2, 4, shape, 3)
    prefix = frozen_prefix(task, batch.x[0])
    assert prefix is not None
    assert prefix.cut == cut
    above = prefix.upper_task(prefix.activations(Features(batch.x[0])))
    assert above.backend == backend
    assert above.slots == task.slots
    assert above.constants_digest() == task.constants_digest()
    h = prefix.activations(Features(batch.x.flatten(0, 1))).raw.unflatten(0, (2, 4))
    theta = torch.stack([task.init(0), task.init(1)])
    assert torch.equal(above.init(1), task.init(1))
    torch.testing.assert_close(above.grad(theta, on(h, batch)), task.grad(theta, batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(above.logits(theta, h), task.logits(theta, batch.x), rtol=1e-5, atol=1e-6)
    one, other = theta.clone(), theta.clone()
    for step in range(3):
        above.descend_(one, on(h, replace(batch, step=step)), 0.1)
        task.descend_(other, replace(batch, step=step), 0.1)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    whole = above.module_of(one[0])  # takes examples, not activations
    torch.testing.assert_close(whole(batch.x[0]).detach(), above.logits(one, h)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "frozen", "shape"),
    [
        (lambda: Body(0.5), ("first", "norm"), (6,)),  # drops before the last layer
        (Squashed, ("first", "norm"), (6,)),
        (Body, ("first",), (6,)),  # statistics move below
        (Body, ("fc",), (6,)),  # nothing below is frozen
        (chain, ("4",), (2, 8, 8)),
        (chain, (), (2, 8, 8)),
    ],
)
def test_nothing_is_cut_off_where_it_would_not_be_exact(
    make_batch: MakeBatch, build: Callable[[], nn.Module], frozen: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    assert frozen_prefix(make_task(build, frozen=frozen), make_batch(1, 4, shape, 3).x[0]) is None


def test_large_activations_live_in_a_file(make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(1, 300, (6,), 3)
    prefix = frozen_prefix(make_task(Body, frozen=("first", "norm")), batch.x[0])
    assert prefix is not None
    in_memory = prefix.activations(Features(batch.x[0])).raw
    monkeypatch.setattr(module_under_test, "MEMORY_BYTES", 100)
    assert torch.equal(prefix.activations(Features(batch.x[0])).raw, in_memory)
