"""What a network of many clients at once offers, whichever layers it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.contract.descent import Descent, ProximalTerm, StepwiseDescent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective


class StackedNet(ABC):
    """Forward and backward by hand on [n, ...] tensors, for rows theta [n, P] of n clients."""

    objective: Objective

    @classmethod
    @abstractmethod
    def from_module(cls, module: nn.Module, objective: Objective = CROSS_ENTROPY) -> Self | None:
        """The network of the module, or None where it is made of anything else."""

    def is_faster_stacked(self, num_params: int) -> bool:
        """Whether clients of so many parameters train faster together than one after the other."""
        return True

    def is_faster_compiled(self, num_params: int) -> bool:
        """Whether compiled loops, where there are any for such a network, are faster than both."""
        return True

    @abstractmethod
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] for x [n, B, ...]."""

    @abstractmethod
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(features [n, B, d_f], logits [n, B, C]) of one forward pass."""

    @abstractmethod
    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row, with the deltas of the feature loss."""

    @abstractmethod
    def descend_(
        self,
        theta: Tensor,
        batch: Batch,
        lr: float | Tensor,
        proximal: ProximalTerm | None = None,
        feature_loss: FeatureLoss | None = None,
    ) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place, without storing the gradient."""

    def descent(self, theta: Tensor, steps: int, terms: Terms, mask: Tensor | None) -> Descent | None:
        """Up to `steps` such steps, of all columns or those of mask [P] alone; None where all gradients are computed
        for that."""
        return StepwiseDescent(self.descend_, theta, terms) if mask is None else None

    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor | None:
        """[n, B] norm of every example's own gradient, where there is a shorter way than to compute each."""
        return None
