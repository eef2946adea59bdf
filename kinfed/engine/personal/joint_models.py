"""Joint models: two bodies under one head that reads the features of both (FENDA, PerFCL).

    z = W_1 φ_1 + W_2 φ_2 + b        one row: [2 P + 1], two plain models of which the second has no bias, and a mark

The sum of two models' logits is such a head; the second head's bias stays 0, so that b is learned once. In a step each
body sees the logits of the other, in evaluation mode, from before it: without dropout and running statistics the
gradient is exactly that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kinfed.core import take_rows
from kinfed.data import Batch
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.feature_loss import Deltas, FeatureLoss, is_separable, on_rows
from kinfed.engine.personal.wider_task import WiderTask
from kinfed.engine.task_factory import Task

JOINT = -0.25  # the mark at the end of a row; those of extensions are whole numbers
PREFIX = "halves."  # of the names of parameters in a file


class JointTask(WiderTask):
    """Rows [n, 2 P + 1]. `pulls` are losses at the features of the two bodies, which add their dφ."""

    backend = "joint"
    kind = "a model of two bodies"

    def __init__(self, task: Task, pulls: tuple[FeatureLoss | None, FeatureLoss | None] = (None, None)) -> None:
        super().__init__(task)
        self.pulls = pulls
        P = task.num_params
        self.num_params = 2 * P + 1
        parts = [
            replace(slot, name=f"{PREFIX}{half}.{slot.name}", start=half * P + slot.start, stop=half * P + slot.stop)
            for half in (0, 1)
            for slot in task.slots
        ]
        self.slots = (*parts, ParameterSlot("mark", (1,), 2 * P, 2 * P + 1))

    def of_rows(self, order: Tensor) -> Task:
        return JointTask(self.task, (on_rows(self.pulls[0], order), on_rows(self.pulls[1], order)))

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Views: both models, [n, P] each."""
        P = self.task.num_params
        return theta[:, :P], theta[:, P : 2 * P]

    def init(self, seed: int, number: int = 0) -> Tensor:
        first, second = (self.task.init(seed, 2 * number + half)[None] for half in (0, 1))
        return joint_rows(self.task, first, second)[0]

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        first, second = self.split(theta)
        return self.task.logits(first, x) + self.task.logits(second, x)

    def _joined(self, grad: Callable[..., Tensor], theta: Tensor, batch: Batch) -> Tensor:
        before = self.split(theta.clone())  # a gradient of training moves running statistics
        halves = [
            grad(half, batch, _HalfLoss(self.task, other, pull))
            for half, other, pull in zip(self.split(theta), before[::-1], self.pulls, strict=True)
        ]
        return torch.cat([*halves, torch.zeros_like(theta[:, -1:])], 1)

    def trained_columns(self) -> Tensor:
        """bool [2 P + 1]: trainable parameters, but for the second bias."""
        half = torch.zeros(self.task.num_params, dtype=torch.bool)
        half[self.task.trainable] = True
        return torch.cat([half, half & ~second_bias(self.task), torch.zeros(1, dtype=torch.bool)]).to(self.device)

    def module_of(self, row: Tensor) -> JointModule:
        """A ready module with the parameters of one row."""
        make = self._modules().module_of
        first, second = self.split(row[None])
        return JointModule(make(first[0]), make(second[0])).eval()


@dataclass(frozen=True)
class _HalfLoss:
    """The loss of the whole at the features and logits of one half, and what pulls at these features."""

    task: Task
    other: Tensor  # [n, P]
    pull: FeatureLoss | None

    @property
    def is_separable(self) -> bool:
        return self.pull is None or is_separable(self.pull)

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        whole = z + self.task.logits(take_rows(self.other, rows), batch.x)
        dphi = None if self.pull is None else self.pull(phi, z, batch, rows)[1]
        return self.task.objective.delta(whole, batch.y, batch.weight), dphi


class JointModule(nn.Module):
    """The sum of what two modules answer."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.halves = nn.ModuleList([first, second])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.halves
        out: Tensor = first(x) + second(x)
        return out


def second_bias(task: Task) -> Tensor:
    """bool [P]: the columns of the head's bias."""
    mask = torch.zeros(task.num_params, dtype=torch.bool)
    dense = task.head.dense
    if dense.bias is not None:
        mask[dense.bias : dense.bias + dense.outputs] = True
    return mask


def joint_rows(task: Task, first: Tensor, second: Tensor) -> Tensor:
    """[n, 2 P + 1] of models [n, P] each; what bias the second has is left out."""
    second = torch.where(second_bias(task).to(second.device), 0.0, second)
    return torch.cat([first, second, first.new_full((len(first), 1), JOINT)], 1)
