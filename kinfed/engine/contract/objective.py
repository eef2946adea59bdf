"""Objectives of training: the loss of an example, and its derivative at the model's output.

    CROSS_ENTROPY                      classes: y int64, a logit per class
    SQUARED, ABSOLUTE, Huber(delta)    numbers: y float32, standardized (kinfed.data.examples.problem), one output
    ExampleLoss                        any other: one value per example, for outputs and targets of any shape

Every gradient path begins its way back with `delta` or, where autograd goes back, with `losses`; they are one formula
each, written here, in kinfed.engine.contract.losses, or by a user:

    @kinfed.register("loss", "asymmetric", kinds=("regression",))
    def asymmetric(z, y):                                    # z [N, 1] outputs, y [N] standardized targets
        r = z[:, 0] - y
        return torch.where(r > 0, 2 * r.square(), r.square())    # [N]: one value per example

A loss is a mean over examples of such values, so that weights of examples, clipping of single gradients and their noise
stay exact. The one loss that is not, Cox's partial likelihood, says so (`couples`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.core import check_options, option
from kinfed.data import Problem
from kinfed.engine.contract.loss_names import LOSSES, fitting_losses, loss_name
from kinfed.errors import ConfigError, KinfedError, ModelError


class Objective(ABC):
    name: str
    classifies: bool = False  # whether outputs are logits of classes
    couples: bool = False  # whether the loss of an example depends on the others of its batch
    of_residual: bool = False  # whether it is a loss of z - y, one number
    nats: float = 1.0  # -log of a likelihood per unit of the loss

    @abstractmethod
    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """[...] the loss of every example, for z [..., C] and y [...]; autograd may go through it. `weight` [...] is 0
        for padding, which matters where examples are coupled."""

    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """[..., C] weight * ∂loss/∂z. May overwrite z."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            total = (self.losses(leaf, y, weight) * weight).sum()
            return torch.autograd.grad(total, leaf)[0]

    @property
    def example_target(self) -> Tensor:
        """[*shape] a target that any problem of this kind may have."""
        return torch.zeros((), dtype=torch.int64 if self.classifies else torch.float32)

    @classmethod
    def of(cls, problem: Problem, number: float | None) -> Objective:
        """The objective of a problem, with the number that a user gave."""
        if number is not None:
            raise ConfigError(f"loss {cls.name} takes no number; got {number:g}")
        return cls()


class CrossEntropy(Objective):
    name = "cross_entropy"
    classifies = True

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        # torch's own, in one kernel, if a gradient follows; it wants classes on the second axis. Views that
        # change nothing would cost 30 µs of a step, there and back.
        if z.dim() == 2:
            return nn.functional.cross_entropy(z, y, reduction="none")
        flat = nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), reduction="none")
        return flat.view(y.shape)

    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return output_delta(z, y, weight)


class _ByResidual(Objective):
    """Losses of r = z - y, one number per example; of several numbers the mean over those that are known."""

    of_residual = True

    @classmethod
    def of(cls, problem: Problem, number: float | None) -> Objective:
        own = cls.with_number(number) if number is not None else cls()
        return Several(own, problem) if problem.shape else own

    @classmethod
    def with_number(cls, number: float) -> Objective:
        raise ConfigError(f"loss {cls.name} takes no number; got {number:g}")

    @abstractmethod
    def slope(self, r: Tensor) -> Tensor:
        """∂loss/∂r."""

    def delta(self, z: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self.slope(z - y[..., None]).mul_(weight[..., None])


class Squared(_ByResidual):
    """r²/2: the mean of the target is learned."""

    name = "squared"

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return (z[..., 0] - y).square() / 2

    def slope(self, r: Tensor) -> Tensor:
        return r


class Absolute(_ByResidual):
    """|r|: the median is learned, and outliers pull no harder than others."""

    name = "absolute"

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return (z[..., 0] - y).abs()

    def slope(self, r: Tensor) -> Tensor:
        return r.sign_()


@dataclass(frozen=True)
class Huber(_ByResidual):
    """r²/2 for |r| ≤ δ, beyond that δ (|r| − δ/2): δ → ∞ is `squared`, and δ times `absolute` is its limit δ → 0."""

    threshold: float = option(1.0, "δ: residuals beyond this many standard deviations of the target pull alike", gt=0)
    name = "huber"

    def __post_init__(self) -> None:
        check_options(self, "loss huber")

    @classmethod
    def with_number(cls, number: float) -> Objective:
        return cls(number)

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        size = (z[..., 0] - y).abs()
        inside = size.clamp_max(self.threshold)
        return inside * (size - inside / 2)

    def slope(self, r: Tensor) -> Tensor:
        return r.clamp_(-self.threshold, self.threshold)


@dataclass(frozen=True)
class Quantile(_ByResidual):
    """τ (y − z) below the target and (1 − τ)(z − y) above it: the quantile of level τ is learned."""

    level: float = option(0.5, "τ: the share of targets below what is predicted", gt=0, lt=1)
    name = "quantile"

    def __post_init__(self) -> None:
        check_options(self, "loss quantile")

    @classmethod
    def with_number(cls, number: float) -> Objective:
        return cls(number)

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        r = z[..., 0] - y
        return torch.maximum(-self.level * r, (1 - self.level) * r)

    def slope(self, r: Tensor) -> Tensor:
        return (r >= 0).to(r.dtype) - self.level


CROSS_ENTROPY, SQUARED, ABSOLUTE = CrossEntropy(), Squared(), Absolute()


class ExampleLoss(Objective):
    """A loss of one value per example, of outputs and targets of any shape."""

    def __init__(self, name: str, problem: Problem) -> None:
        self.name, self.problem, self.shape = name, problem, problem.shape  # of one example's target
        self.classifies = problem.classifies

    @property
    def example_target(self) -> Tensor:
        dtype = torch.int64 if self.problem.num_classes else torch.float32
        return torch.full(self.shape, float(self.problem.kind == "survival")).to(dtype)

    @abstractmethod
    def values(self, z: Tensor, y: Tensor) -> Tensor:
        """[N] for outputs z [N, ...] and targets y [N, *shape]."""

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        leading = y.shape[: y.dim() - len(self.shape)]
        if len(leading) == 1:
            return self.values(z, y)
        flat = self.values(z.reshape(-1, *z.shape[len(leading) :]), y.reshape(-1, *self.shape))
        return flat.view(leading)


class Several(ExampleLoss):
    """The mean of a loss over the numbers of an example that are known (not NaN)."""

    def __init__(self, single: Objective, problem: Problem) -> None:
        super().__init__(single.name, problem)
        self._single = single

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        losses = self._single.losses(z.reshape(y.shape)[..., None], torch.where(known, y, 0.0))
        return known_mean(losses, known)


def known_mean(values: Tensor, known: Tensor) -> Tensor:
    """[N] means of values [N, ...] over those that are known; 0 where none is."""
    total = torch.where(known, values, 0.0).flatten(1).sum(1)
    return total / known.flatten(1).sum(1).clamp_min(1)


class OwnLoss(ExampleLoss):
    """A user's function or module of outputs [N, ...] and targets [N, ...]."""

    def __init__(self, name: str, problem: Problem, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(name, problem)
        if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
            raise ConfigError(f"loss {name} has parameters of its own; what is trained is in the model")
        self._function = function

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        try:
            values = self._function(z, y)
        except KinfedError:
            raise
        except Exception as error:  # the code of a stranger may raise anything
            shapes = f"outputs {list(z.shape)} and targets {list(y.shape)}"
            raise ModelError(f"loss {self.name} fails on {shapes}: {type(error).__name__}: {error}") from error
        if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
            answer = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ModelError(
                f"loss {self.name} must give one value per example, [{len(y)}]; got {answer}. Leave out means over the "
                'batch (reduction="none"), and take means over what belongs to one example'
            )
        return values


def make_objective(problem: Problem, loss: str | Callable[..., Any] = "auto", huber_delta: float = 1.0) -> Objective:
    """The objective of a problem: the loss of that name, with a number behind a colon where it takes one
    ("quantile:0.9"); a function or nn.Module of outputs and targets; or "auto", the problem's own."""
    if not isinstance(loss, str):
        return OwnLoss(loss_name(loss), problem, loss)
    name, _, number = loss.partition(":")
    fitting = fitting_losses(problem.kind)
    name = fitting[0] if name == "auto" else name
    entry = LOSSES[name]
    if problem.kind not in entry.facts.get("kinds", (problem.kind,)):
        others = ", ".join(fitting)
        raise ConfigError(
            f"loss = {name} is not for this problem, which is {problem.in_words()}; leave it out, or choose {others}"
        )
    function = entry.target
    if not (isinstance(function, type) and issubclass(function, Objective)):
        if number:
            raise ConfigError(f"loss {name} takes no number; got {loss!r}")
        return OwnLoss(name, problem, function() if isinstance(function, type) else function)
    if name == "huber" and not number:
        number = str(huber_delta)
    try:
        value = float(number) if number else None
    except ValueError:
        raise ConfigError(f"the number behind loss {name} should be one, such as {name}:0.5; got {loss!r}") from None
    return function.of(problem, value)


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
