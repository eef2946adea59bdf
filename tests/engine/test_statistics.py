"""Running statistics (BatchNorm and others) live in the row: they train, and travel, like plain torch has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import MakeBatch
from kinfed.data.examples.batches import Batch
from kinfed.engine.contract.columns import ColumnSplit
from kinfed.engine.task_factory import make_task
from kinfed.errors import ModelError


class Block(nn.Module):
    """A residual block as people write it, with a shortcut that skips pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.downsample(x))


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(2, 4, 2), Block(4, 8, 2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(x).mean((2, 3)))


class MovingMean(nn.Module):
    """A buffer of a user's own, replaced (not changed in place) by every training forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.fc(x - self.mean)


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(144, 3)
    )


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (ResidualNet, (2, 8, 8)),
    "dense": (dense, (6,)),
    "instance norm": (instance_norm, (2, 8, 8)),
    "user's own": (MovingMean, (6,)),
}


def step_of(batch: Batch, step: int) -> Batch:
    return replace(batch, x=batch.x.roll(step, 1) * (1 + 0.1 * step), y=batch.y.roll(step, 1), step=step)


@pytest.mark.parametrize("name", MODULES)
def test_twenty_steps_are_those_of_plain_torch(make_batch: MakeBatch, name: str) -> None:
    build, shape = MODULES[name]
    task = make_task(build)
    assert task.backend == "rows"
    assert not task.slots[-1].trainable
    theta = torch.stack([task.init(0), task.init(1)])
    plain = [task.module_of(row).train() for row in theta]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in plain]
    batch = make_batch(2, 6, shape, 3)
    for step in range(20):
        now = step_of(batch, step)
        task.descend_(theta, now, 0.05)
        for i, (module, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(module(now.x[i]), now.y[i], reduction="none") * now.weight[i]).sum().backward()
            optimizer.step()
    z = task.logits(theta, batch.x)
    for i, module in enumerate(plain):
        torch.testing.assert_close(theta[i], task.flatten(module.state_dict()), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(z[i], module.eval()(batch.x[i]).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODULES)
def test_a_gradient_alone_changes_nothing_and_one_of_training_moves_statistics(
    make_batch: MakeBatch, name: str
) -> None:
    build, shape = MODULES[name]
    task = make_task(build)
    theta, batch = task.init(0).repeat(2, 1), make_batch(2, 5, shape, 3)
    before = theta.clone()
    g = task.grad(theta, batch)
    assert torch.equal(theta, before)
    assert bool((g[:, task.trainable.stop :] == 0).all())
    assert torch.equal(task.training_grad(theta, batch), g)
    assert torch.equal(theta[:, task.trainable], before[:, task.trainable])
    assert not torch.equal(theta, before)


@pytest.mark.parametrize("name", ["residual", "dense"])
def test_padding_enters_no_statistics(make_batch: MakeBatch, name: str) -> None:
    build, shape = MODULES[name]
    task = make_task(build)
    theta, batch = task.init(0)[None].clone(), make_batch(1, 4, shape, 3)
    padded = replace(
        batch,
        x=torch.cat([batch.x, 100 + torch.zeros_like(batch.x)], 1),
        y=torch.cat([batch.y, batch.y], 1),
        weight=torch.cat([batch.weight, torch.zeros_like(batch.weight)], 1),
    )
    other = theta.clone()
    task.descend_(theta, batch, 0.1)
    task.descend_(other, padded, 0.1)
    assert torch.equal(theta, other)


def test_a_single_value_per_channel_is_normalized_by_running_statistics(make_batch: MakeBatch) -> None:
    task = make_task(dense)
    theta = task.init(0)[None].clone()
    for step in range(3):  # statistics that are not those of the start
        task.descend_(theta, step_of(make_batch(1, 6, (6,), 3), step), 0.1)
    alone = make_batch(1, 1, (6,), 3)
    before = theta.clone()
    g = task.training_grad(theta, alone)
    assert torch.equal(theta, before)
    module = task.module_of(theta[0])  # in evaluation mode: by running statistics
    nn.functional.cross_entropy(module(alone.x[0]), alone.y[0]).backward()
    wanted = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    wanted |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    torch.testing.assert_close(g[0], task.flatten(wanted), rtol=1e-6, atol=1e-6)


def test_one_image_of_several_pixels_has_statistics_of_its_own(make_batch: MakeBatch) -> None:
    task = make_task(ResidualNet)
    theta = task.init(0)[None].clone()
    before = theta.clone()
    task.descend_(theta, make_batch(1, 1, (2, 16, 16), 3), 0.1)
    assert bool(torch.isfinite(theta).all())
    assert not torch.equal(theta, before)


def test_a_batch_without_examples_moves_nothing(make_batch: MakeBatch) -> None:
    task = make_task(dense)
    theta, batch = task.init(0)[None].clone(), make_batch(1, 3, (6,), 3)
    before = theta.clone()
    task.descend_(theta, replace(batch, weight=torch.zeros_like(batch.weight)), 0.1)
    assert torch.equal(theta, before)


def test_pulls_leave_statistics_alone(make_batch: MakeBatch) -> None:
    task = make_task(dense)
    batch, center = make_batch(1, 6, (6,), 3), torch.full((1, task.num_params), 7.0)
    plain, pulled = task.init(0)[None].clone(), task.init(0)[None].clone()
    task.descend_(plain, batch, 0.1)
    task.descend_(pulled, batch, 0.1, (0.5, center))
    behind = slice(task.trainable.stop, None)
    assert torch.equal(plain[:, behind], pulled[:, behind])
    assert not torch.equal(plain, pulled)


def test_normalization_layers_are_known_by_type_and_split_with_their_statistics() -> None:
    task = make_task(ResidualNet)
    norms = task.norm_layers()
    assert norms == tuple(f"blocks.{b}.{name}" for b in (0, 1) for name in ("bn1", "bn2", "downsample.1"))
    split = ColumnSplit.owning(task.slots, norms)
    own = [slot.name for slot in task.slots if bool(split.own_mask[slot.start])]
    assert all("bn" in name or "downsample.1" in name for name in own)
    assert sum(name.endswith("running_var") for name in own) == 6
    assert task.layer_names()[-1] == "fc"  # statistics lie at the end of the row, but are no layers of their own


def test_the_start_is_the_modules_own() -> None:
    task = make_task(dense)
    state = task.state_dict(task.init(3))
    assert bool((state["1.running_var"] == 1).all())
    assert bool((state["1.running_mean"] == 0).all())
    assert state["1.num_batches_tracked"] == 0


class Positions(nn.Module):
    """A table that `state_dict` has and nothing moves, beside statistics; moved after all in the pass `moves_in`."""

    table: Tensor
    mean: Tensor
    noise: Tensor

    def __init__(self, moves_in: int = 0, in_place: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("noise", torch.randn(6))  # another one for every seed
        self.register_buffer("mean", torch.zeros(6))
        self.moves_in, self.in_place, self.passes = moves_in, in_place, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.passes += self.moves_in > 0  # who counts is refused where a model is tried
            if self.passes == self.moves_in > 0:
                self.table = self.table.add_(1) if self.in_place else self.table + 1
        return self.fc((x + 0.1 * self.table + self.noise) - self.mean)


def test_a_table_that_never_moves_is_a_constant(make_batch: MakeBatch) -> None:
    batch = make_batch(2, 4, (6,), 3)
    task = make_task(Positions, example=batch.x[0])
    assert [slot.name for slot in task.slots] == ["fc.weight", "fc.bias", "noise", "mean"]
    assert "table" in task.layout.constants(task.module)
    assert task.module_of(task.init(0)).state_dict().keys() == Positions().state_dict().keys()
    same = make_task(Positions, shape=(6,))  # a node without an example at hand
    assert (same.slots, same.constants_digest()) == (task.slots, task.constants_digest())
    row = make_task(Positions)  # nothing is known of the examples: all may move
    assert [slot.name for slot in row.slots][2:] == ["table", "noise", "mean"]
    theta, whole = task.init(0).repeat(2, 1), row.init(0).repeat(2, 1)
    for one, model in ((task, theta), (row, whole)):
        for _ in range(3):
            one.descend_(model, batch, 0.1)
    named, wanted = task.unflatten(theta), row.unflatten(whole)
    assert all(torch.equal(named[name], wanted[name]) for name in named)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_constant_that_moves_after_all_is_refused(make_batch: MakeBatch, in_place: bool) -> None:
    batch = make_batch(1, 4, (6,), 3)
    task = make_task(lambda: Positions(moves_in=6, in_place=in_place), shape=(6,))
    theta = task.init(0)[None].clone()
    for _ in range(5):
        task.descend_(theta, batch, 0.1)
    with pytest.raises(ModelError, match=r"moved the buffer 'table', which did not move when the model was tried"):
        task.descend_(theta, batch, 0.1)
    moving = make_task(lambda: Positions(moves_in=1, in_place=in_place), shape=(6,))
    assert "table" in [slot.name for slot in moving.slots]


def test_models_that_take_no_example_keep_their_buffers_in_the_row() -> None:
    task = make_task(Positions, shape=(5,))
    assert [slot.name for slot in task.slots][2:] == ["table", "noise", "mean"]
