"""Local training of one round: the settings of a client's steps, and the learning rate and number of steps they give.

The settings are also those of a run, whose options the command line shows, so this file needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal

from kinfed.core import changed_repr, check_options, option
from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class TrainingSettings:
    """Settings of a client's local steps."""

    lr: float = option(0.05, "Learning rate of local training.", gt=0)
    batch: int = option(20, "Batch size.", ge=1)
    steps: int | None = option(20, "Local steps per round (default 20).", ge=1)
    epochs: int | None = option(None, "Local epochs per round instead of steps.", ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = option("sgd", "Local optimizer, as in torch.optim.")
    momentum: float = option(0.0, "Momentum of local training with sgd, in [0, 1).", ge=0, lt=1)
    nesterov: bool = option(False, "Nesterov's form of momentum.")
    betas: tuple[float, float] = option(
        (0.9, 0.999), "Decay of the means of gradients and of their squares, with adam and adamw."
    )
    eps: float = option(1e-8, "Added to the denominator in adam and adamw.", gt=0)
    weight_decay: float = option(0.0, "Weight decay of local training.", ge=0)
    clip: float | None = option(
        None, "Clip a client's gradient to this norm (default: no clipping).", gt=0, infinite=True
    )
    optimizer_state: Literal["reset", "kept"] = option(
        "reset", "Momentum or moments: reset in every round, or kept by each client."
    )
    lr_decay: float = option(1.0, "Factor on the learning rate after every round, in (0, 1].", gt=0, le=1)
    lr_floor: float = option(0.0, "The learning rate does not decay below this.", ge=0)
    augment: str | None = option(None, "Augmentation of training images: crop, flip or crop_flip.")


@dataclass(frozen=True, repr=False)
class LocalTraining(TrainingSettings):
    """Local training of one round: optimizer, learning rate, batch size, and `steps` or `epochs`, not both.

    Example:

        >>> training = kinfed.LocalTraining(lr=0.1, batch=10, steps=None, epochs=2, lr_decay=0.5)
        >>> training.rate(round=3), training.num_steps(torch.tensor([5, 25])).tolist()
        (0.025, [2, 6])
    """

    poisson: bool = option(False, "Draw every example for a batch on its own with chance batch/n (privacy needs it).")

    def __repr__(self) -> str:
        return changed_repr(self, always=("lr", "batch"))

    def __post_init__(self) -> None:
        check_options(self, "local training")
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"local work needs either steps or epochs; got steps={self.steps}, epochs={self.epochs}")
        if self.poisson and self.epochs is not None:
            raise ConfigError(
                "Poisson sampling (which privacy needs) draws every batch anew and knows no epochs; give steps instead"
            )
        for name in ("batch", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value != int(value):
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value}")
        if self.lr_floor > self.lr:
            raise ConfigError(f"lr_floor must lie between 0 and lr={self.lr}; got {self.lr_floor}")
        if self.augment is not None:
            from kinfed.data.examples.augment import AUGMENTATIONS

            if self.augment not in AUGMENTATIONS:
                raise unknown_name("augmentation", self.augment, AUGMENTATIONS)
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Refuse settings that the optimizer does not have."""
        if self.optimizer != "sgd" and self.momentum:
            reason = f"{self.optimizer} has betas; got momentum={self.momentum}"
            raise ConfigError(f"momentum is a setting of optimizer = sgd; {reason}")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov is a form of momentum, of which there is none; set momentum, such as 0.9")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are two numbers in [0, 1), such as 0.9 and 0.999; got {self.betas}")
        if self.optimizer_state == "kept" and not self.has_moments:
            remedy = "set momentum, or optimizer = adamw"
            raise ConfigError(f"optimizer_state = kept: plain SGD has nothing to keep; {remedy}")

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer remembers gradients from step to step."""
        return self.optimizer != "sgd" or self.momentum > 0

    @property
    def is_plain(self) -> bool:
        """Whether every step is lr times the gradient."""
        return not self.has_moments and self.largest_gradient is None

    @property
    def largest_gradient(self) -> float | None:
        """The norm to which gradients are clipped; None if they are not."""
        return None if self.clip == inf else self.clip

    def rate(self, round: int) -> float:
        """Learning rate of a round (rounds count from 1)."""
        return max(self.lr * self.lr_decay ** max(round - 1, 0), self.lr_floor)

    def num_steps(self, count: Tensor) -> Tensor:
        """Steps of clients with `count` examples, int64 [n]."""
        if self.epochs is None:
            return count.new_full(count.shape, self.steps or 0)
        return self.epochs * ((count + self.batch - 1) // self.batch)

    def with_steps(self, steps: int) -> LocalTraining:
        return replace(self, steps=steps, epochs=None)
