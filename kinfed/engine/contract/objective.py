"""Objectives of training: the loss of an example, and its derivative at the model's output.

    CROSS_ENTROPY                      classes: y int64, a logit per class
    SQUARED, ABSOLUTE, Huber(delta)    numbers: y float32, standardized (kinfed.data.examples.problem), one output

Every gradient path begins its way back with `delta` or, where autograd goes back, with `losses`; they are one formula
each, written here and nowhere else.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfed.core import check_options, option
from kinfed.data import Problem
from kinfed.errors import ConfigError, unknown_name


class Objective(ABC):
    name: str
    classifies: bool = False  # whether outputs are logits of classes

    @abstractmethod
    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        """[...] the loss of every example, for z [..., C] and y [...]; autograd may go through it."""

    @abstractmethod
    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """[..., C] weight * ∂loss/∂z. May overwrite z."""


class CrossEntropy(Objective):
    name = "cross_entropy"
    classifies = True

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        # torch's own, in one kernel, where there is a gradient to come; it wants classes on the second axis. Views that
        # change nothing would cost 30 µs of a step, there and back.
        if z.dim() == 2:
            return nn.functional.cross_entropy(z, y, reduction="none")
        flat = nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), reduction="none")
        return flat.view(y.shape)

    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return output_delta(z, y, weight)


class _ByResidual(Objective):
    """Losses of r = z - y, one number per example."""

    @abstractmethod
    def slope(self, r: Tensor) -> Tensor:
        """∂loss/∂r."""

    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.slope(z - y[..., None]).mul_(weight[..., None])


class Squared(_ByResidual):
    """r²/2: the mean of the target is learned."""

    name = "squared"

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        return (z[..., 0] - y).square() / 2

    def slope(self, r: Tensor) -> Tensor:
        return r


class Absolute(_ByResidual):
    """|r|: the median is learned, and outliers pull no harder than others."""

    name = "absolute"

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        return (z[..., 0] - y).abs()

    def slope(self, r: Tensor) -> Tensor:
        return r.sign_()


@dataclass(frozen=True)
class Huber(_ByResidual):
    """r²/2 for |r| ≤ δ, beyond that δ (|r| − δ/2): δ → ∞ is `squared`, and δ times `absolute` is its limit δ → 0."""

    threshold: float = option(1.0, "δ: residuals beyond so many standard deviations of the target pull alike", gt=0)
    name = "huber"

    def __post_init__(self) -> None:
        check_options(self, "loss huber")

    def losses(self, z: Tensor, y: Tensor) -> Tensor:
        size = (z[..., 0] - y).abs()
        inside = size.clamp_max(self.threshold)
        return inside * (size - inside / 2)

    def slope(self, r: Tensor) -> Tensor:
        return r.clamp_(-self.threshold, self.threshold)


CROSS_ENTROPY, SQUARED, ABSOLUTE = CrossEntropy(), Squared(), Absolute()
LOSSES = ("auto", "cross_entropy", "squared", "absolute", "huber")


def make_objective(problem: Problem, loss: str = "auto", huber_delta: float = 1.0) -> Objective:
    """The objective of a problem: cross-entropy of classes; of numbers the loss of that name, squared where none is."""
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    if not problem.is_regression:
        if loss not in ("auto", "cross_entropy"):
            raise ConfigError(f"loss = {loss} is for numbers, and the problem is {problem.in_words()}; leave it out")
        return CROSS_ENTROPY
    if loss == "cross_entropy":
        raise ConfigError("loss = cross_entropy is for classes, and the problem is a regression; use squared or huber")
    choices: dict[str, Objective] = {"auto": SQUARED, "squared": SQUARED, "absolute": ABSOLUTE}
    return choices.get(loss) or Huber(huber_delta)


def output_delta(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """weight * (softmax(z) - onehot(y)): the gradient of the weighted cross-entropy. Overwrites the logits."""
    delta = _softmax_(logits)
    delta.scatter_add_(-1, y[..., None], delta.new_full((), -1.0).expand(*y.shape, 1))
    return delta.mul_(weight[..., None])


def _softmax_(z: Tensor) -> Tensor:
    """softmax(z, -1); may overwrite z."""
    if z.shape[-1] >= 16:
        return torch.softmax(z, -1)
    # torch's kernel works along the last axis with vectors of 16 and falls back to single numbers below that: for
    # ten classes these three passes over everything take a quarter of its time.
    z = z.sub_(z.amax(-1, keepdim=True)).exp_()
    return z.div_(z.sum(-1, keepdim=True))
