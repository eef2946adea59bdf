"""Boosted trees as personal models: an ensemble as one flat row, its task and its torch module.

A row holds T complete trees of depth d, and ends in what says so:

    feature [T, I], threshold [T, I], missing [T, I], value [T, L, C], linear [p, C], base [C],
    inputs p, outputs, C, d, T, mark

with I = 2^d − 1 inner nodes (the root first, then level after level) and L = 2^d leaves. A value x ≤ threshold goes
left, a missing one (NaN) where `missing` is 1; where feature is −1 all do. Two classes have one score, the log-odds of
the second. A score is base + x'linear (missing values count as 0) + the value of a leaf of every tree. Structure is
part of the row, so that a row alone is a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.task import Task
from kinfed.errors import ModelError

TREE_MARK = -100.0  # at the end of a row
_HEADER = 6  # numbers at the end: inputs, outputs, scores, depth, trees, mark
_DEEPEST = 8  # levels: places of leaves are bytes
_AT_ONCE = 1 << 22  # comparisons held in memory
PREFIX = "trees."  # of names in a state dict


@dataclass(frozen=True)
class TreeShape:
    """Sizes of an ensemble."""

    inputs: int  # p
    outputs: int  # logits of classes, or 1
    scores: int  # C: 1 for two classes
    depth: int  # d
    trees: int  # T

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts of a row, in its order."""
        inner = (self.trees, 2**self.depth - 1)
        return {
            "feature": inner, "threshold": inner, "missing": inner, "value": (self.trees, 2**self.depth, self.scores),
            "linear": (self.inputs, self.scores), "base": (self.scores,),
        }  # fmt: skip

    @property
    def slots(self) -> tuple[ParameterSlot, ...]:
        """Columns of a row by name; the last hold its sizes."""
        slots, start = [], 0
        for name, shape in self.parts.items():
            stop = start + torch.Size(shape).numel()
            slots.append(ParameterSlot(PREFIX + name, shape, start, stop))
            start = stop
        return (*slots, ParameterSlot(PREFIX + "shape", (_HEADER,), start, start + _HEADER))

    @classmethod
    def of_row(cls, row: Tensor) -> TreeShape | None:
        """Shape of the ensemble that a row [W] is; None if it is no ensemble."""
        if len(row) < _HEADER or float(row[-1]) != TREE_MARK:
            return None
        numbers = row[-_HEADER:-1].tolist()
        if any(number != int(number) or not 0 <= number < 2**24 for number in numbers) or numbers[3] > _DEEPEST:
            return None
        shape = cls(*(int(number) for number in numbers))
        return shape if shape.slots[-1].stop == len(row) else None


@dataclass(frozen=True)
class EnsembleRows:
    """Ensembles of n clients, all of one shape."""

    shape: TreeShape
    feature: Tensor  # [n, T, I] whole numbers
    threshold: Tensor  # [n, T, I]
    missing: Tensor  # [n, T, I]
    value: Tensor  # [n, T, L, C]
    linear: Tensor  # [n, p, C]
    base: Tensor  # [n, C]

    def rows(self) -> Tensor:
        """float32 [n, W]"""
        s = self.shape
        end = torch.tensor([s.inputs, s.outputs, s.scores, s.depth, s.trees, TREE_MARK])
        flat = [part.to(torch.float32).reshape(len(self.base), -1) for part in self.parts]
        return torch.cat([*flat, end.expand(len(self.base), -1)], 1)

    @classmethod
    def of_parts(cls, shape: TreeShape, parts: Iterable[Tensor]) -> EnsembleRows:
        """The parts in the order of a row."""
        feature, threshold, missing, value, linear, base = parts
        return cls(shape, feature.to(torch.int64), threshold, missing, value, linear, base)

    @classmethod
    def of_rows(cls, theta: Tensor) -> EnsembleRows:
        shape = TreeShape.of_row(theta[0])
        assert shape is not None  # callers have seen the mark
        slots = shape.slots[:-1]
        return cls.of_parts(shape, (theta[:, one.start : one.stop].reshape(len(theta), *one.shape) for one in slots))

    def logits(self, x: Tensor) -> Tensor:
        """[n, B, outputs] of examples x [n, B, p]."""
        return as_logits(ensemble_scores(x, *self.parts), self.shape.outputs)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.feature, self.threshold, self.missing, self.value, self.linear, self.base


def ensemble_scores(
    x: Tensor, feature: Tensor, threshold: Tensor, missing: Tensor, value: Tensor, linear: Tensor, base: Tensor
) -> Tensor:
    """[n, B, C]: base [n, C], the linear part, and the values of the leaves that examples x [n, B, p] reach."""
    n, trees, inner = feature.shape
    leaves, scores = value.shape[2:]
    first = torch.arange(trees, device=x.device) * inner  # of every tree, among the inner nodes of all
    place = torch.zeros(n, x.shape[1], trees, dtype=torch.int64, device=x.device)
    at_root = place
    for _ in range(leaves.bit_length() - 1):
        at = (first + place).flatten(1)
        j = feature.flatten(1).gather(1, at).view_as(at_root)
        cell = x.gather(2, j.clamp_min(0))
        left = cell <= threshold.flatten(1).gather(1, at).view_as(at_root)
        goes_left = missing.flatten(1).gather(1, at).view_as(at_root) > 0
        left = left | (torch.isnan(cell) & goes_left) | (j < 0)  # NaN is below nothing
        place = 2 * place + 2 - left.to(torch.int64)
    leaf = place - inner + torch.arange(trees, device=x.device) * leaves
    index = leaf.flatten(1)[..., None].expand(-1, -1, scores)
    level = base[:, None]
    if linear.shape[1]:  # before the first bins nothing is known of the inputs
        level = torch.baddbmm(level, torch.where(torch.isnan(x), 0.0, x), linear)
    return value.flatten(1, 2).gather(1, index).view(*leaf.shape, scores).sum(2) + level


def as_logits(score: Tensor, outputs: int) -> Tensor:
    """[..., outputs] of scores [..., C]: the log-odds of two classes are the logit of the second."""
    return score if score.shape[-1] == outputs else torch.cat([torch.zeros_like(score), score], -1)


class TreeTask(Task):
    """Rows of ensembles, for a task that says what is predicted. They are scored, stored and served; a gradient in
    them there is none."""

    backend = "trees"

    def __init__(self, task: Task, shape: TreeShape) -> None:
        self.task, self.shape, self.device = task, shape, task.device
        self.classifies, self.objective = task.classifies, task.objective
        self.problem, self.metric = task.problem, task.metric
        self.slots = shape.slots
        self.num_params = self.slots[-1].stop

    @property
    def plain_task(self) -> Task:
        return self.task.plain_task

    def init(self, seed: int, number: int = 0) -> Tensor:
        """An ensemble that says 0."""
        s = self.shape
        zeros = {name: torch.zeros(1, *shape) for name, shape in s.parts.items()}
        return EnsembleRows(s, **zeros | {"feature": zeros["feature"] - 1}).rows()[0].to(self.device)

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        raise ModelError("trees are grown and not trained by gradients of their numbers; set finetune to 0")

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        step = max(_AT_ONCE // max(x.shape[1] * self.shape.trees, 1), 1)
        parts = zip(torch.split(theta, step), torch.split(x.flatten(2), step), strict=True)
        blocks = [EnsembleRows.of_rows(rows).logits(some) for rows, some in parts]
        return torch.cat(blocks) if blocks else x.new_zeros(0, x.shape[1], self.shape.outputs)

    def scores_alone(self, theta: Tensor, part: object) -> bool:
        return True  # every example of every row by itself

    def module_of(self, row: Tensor) -> TreeModule:
        """A ready module of one row."""
        return TreeModule(tree_tensors(row)).eval()


def tree_tensors(row: Tensor) -> dict[str, Tensor]:
    """The state dict of a row's module."""
    shape = TreeShape.of_row(row)
    assert shape is not None  # a row with the mark
    return {slot.name: row[slot.start : slot.stop].reshape(slot.shape).detach().clone() for slot in shape.slots}


class TreeModule(nn.Module):
    """An ensemble as a module: examples [B, ...] to logits [B, outputs]."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        trees = nn.Module()  # its name is that of the parts in the state dict
        for name, tensor in tensors.items():
            trees.register_buffer(name.removeprefix(PREFIX), tensor)
        self.trees = trees
        self.outputs = int(tensors[PREFIX + "shape"][1])

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(self.trees.named_buffers())
        feature = parts["feature"].to(torch.int64)[None]
        others = (parts[name][None] for name in ("threshold", "missing", "value", "linear", "base"))
        return as_logits(ensemble_scores(x.flatten(1)[None], feature, *others), self.outputs)[0]
