"""Private training as a stage: who may still be asked, and what was asked of clients' examples."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from kinfed.privacy import PrivacyBudget, Record
from kinfed.updates.stages import Stage


class ExampleLevel(Stage):
    """Keeps a budget of the gradients that a private task takes (kinfed.privacy.budget)."""

    name = "privacy"

    def __init__(self, budget: PrivacyBudget) -> None:
        self.budget = budget

    def admitted(self, active: Tensor) -> Tensor:
        return self.budget.within_budget(active)

    def training(self, ids: Tensor) -> AbstractContextManager[Record]:
        return self.budget.recording(ids)

    def evaluating(self) -> AbstractContextManager[Record]:
        return self.budget.evaluating()

    def named(self) -> dict[str, Tensor]:
        return self.budget.named()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.budget.load(tensors)
