"""Gradients of many clients at once, by hand: dense layers and LSTM."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.backends.dense import FeedForwardNet
from kinfed.engine.backends.lstm import RecurrentNet
from kinfed.engine.contract.descent import PLAIN, Descent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.rows.module_task import Build, ModuleTask
from kinfed.errors import ModelError

StackedNet = FeedForwardNet | RecurrentNet


class StackedTask(ModuleTask):
    backend = "stacked"

    def __init__(
        self, build: Build, device: torch.device | str = "cpu", *, net: StackedNet | None = None, **others: Any
    ) -> None:
        """`net` is that of the module, where there is one already."""
        self._known_net = net
        super().__init__(build, device, **others)

    def _prepare(self) -> None:
        net = self._known_net or (stacked_net(self.module, self.objective) if self.is_plain else None)
        if net is None:
            raise ModelError(
                "the stacked path takes chains of Flatten, Linear, ReLU and Tanh only, or LSTM, LastOutput and Linear"
            )
        self.net = net

    def with_head(self, name: str) -> Self:
        task = super().with_head(name)
        if task.head.dense != self.head.dense:
            raise ModelError(f"the model's output is that of layer {self.head.name!r}, not of {name!r}")
        return task

    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net.features_and_logits(theta, x)

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        return self.net.grad(theta, batch, feature_loss)

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        self.net.take_step_(theta, batch, lr, terms)

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        if isinstance(self.net, FeedForwardNet):
            return self.net.descent(theta, steps, terms, mask)
        return super().descent(theta, steps, terms, mask)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.net.logits(theta, x)

    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        if isinstance(self.net, FeedForwardNet):
            return self.net.example_norms(theta, batch, feature_loss)
        return super().example_norms(theta, batch, feature_loss)


def stacked_net(module: nn.Module, objective: Objective = CROSS_ENTROPY) -> StackedNet | None:
    """The hand-written network of many clients at once, where there is one for this module."""
    return FeedForwardNet.from_module(module, objective) or RecurrentNet.from_module(module, objective)
