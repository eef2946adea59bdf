"""What is frozen below everything trained is computed once: the same gradients and models, only sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import MakeBatch
from kinfed.data.examples.batches import Batch
from kinfed.data.examples.features import Features
from kinfed.engine.task_factory import make_task
from kinfed.engine.training import frozen_features as module_under_test
from kinfed.engine.training.frozen_features import AfterStages, BeforeHead, frozen_prefix


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


class Staged(nn.Module):
    """Its `stages` come after a stem, and are not all of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.stages = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for stage in self.stages:
            h = torch.relu(stage(h))
        return self.fc(h)


def test_stages_that_are_not_the_forward_pass_are_no_cut(make_batch: MakeBatch) -> None:
    x = make_batch(1, 4, (6,), 3).x[0]
    assert frozen_prefix(make_task(Staged, frozen=("stem", "stages.0")), x) is None
    prefix = frozen_prefix(make_task(Staged, frozen=("stem", "stages")), x)
    assert prefix is not None
    assert prefix.cut == BeforeHead("fc")


class Dropping(nn.Linear):
    """Draws by a function, which only works for one client at a time and is not seen in its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_what_lies_above_is_tried_for_many_clients_at_once(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 4, (6,), 3)
    task = make_task(lambda: nn.Sequential(nn.Linear(6, 5), Dropping(5, 3)), frozen=("0",), example=batch.x[0])
    prefix = frozen_prefix(task, batch.x[0])
    assert prefix is not None
    above = prefix.upper_task(prefix.activations(Features(batch.x[0])))
    assert above.backend == task.backend == "rows"
