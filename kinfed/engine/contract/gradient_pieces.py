"""Gradients in pieces, as the optimizers of local loops take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kinfed.data import Batch
from kinfed.engine.contract.feature_loss import FeatureLoss


@dataclass(frozen=True)
class GradientPieces:
    """How a task gives the gradient of some trainable columns: in the blocks in which it has them, since joining them
    would cost a pass over memory in every step."""

    columns: list[slice]  # from left to right
    # (theta [n, P], batch, feature loss) -> [n, width] for every block; running statistics of theta move in place.
    # Pieces may be views of theta and are not to be changed.
    gradient: Callable[[Tensor, Batch, FeatureLoss | None], list[Tensor]]
