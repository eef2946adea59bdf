"""The contract between algorithms and models: what a task is.

A task knows a model as a flat row of parameters, its loss, and its gradient for many rows at once; `theta [n, P]` holds
one model per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.data.batches import Batch, Split
from kinfed.engine import columns
from kinfed.engine.columns import ParameterSlot
from kinfed.engine.descent import Descent, Pull, StepwiseDescent


@dataclass
class Score:
    """Sums over some examples, one entry per client."""

    correct: Tensor  # [n] float64
    loss: Tensor  # [n] float64
    count: Tensor  # [n] int64


class Task(ABC):
    """The contract between algorithms and models."""

    num_params: int
    slots: tuple[ParameterSlot, ...]  # from left to right: all trainable parameters, then all running statistics
    device: torch.device = torch.device("cpu")
    backend: str = "custom"  # how gradients are computed
    one_row_at_a_time: bool = False  # the pool then sends cohorts of one client to its worker threads
    classifies: bool = True  # accuracy is defined

    @property
    def trainable(self) -> slice:
        """The columns of a row that gradients move, [0, T). Those behind them, [T, P), hold running statistics (of
        BatchNorm, say): forward passes of training move them, averages mix them, and nothing else may: no pull, no
        weight decay, no momentum, no server optimizer, no distance, no extrapolation (a variance must not become
        negative)."""
        return slice(0, max((slot.stop for slot in self.slots if slot.trainable), default=0))

    @abstractmethod
    def init(self, seed: int, number: int = 0) -> Tensor:
        """[P] starting point; `number` gives further independent ones."""

    @abstractmethod
    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row, with zeros for running statistics. Theta
        stays as it is."""

    def training_grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """The gradient of a step of training: as `grad`, and the running statistics of theta move in place, as in any
        training forward pass of torch."""
        return self.grad(theta, batch)

    @abstractmethod
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] for theta [n, P] and x [n, B, ...], by models in evaluation mode."""

    def descend_(self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place; running statistics move, too."""
        g = self.training_grad(theta, batch)[:, self.trainable]
        x = theta[:, self.trainable]
        if pull is not None:
            lam, center = pull
            lam = lam[:, None] if isinstance(lam, Tensor) else lam
            g = g + lam * (x - center[:, self.trainable])
        x -= (lr[:, None] if isinstance(lr, Tensor) else lr) * g

    def descent(self, theta: Tensor, steps: int, pull: Pull | None = None, drift: Tensor | None = None) -> Descent:
        """Up to `steps` such steps, with `drift` [n, P] added to every gradient. A task may know a faster way than one
        `descend_` after the other."""
        return StepwiseDescent(self.descend_, theta, pull, drift)

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] cross-entropy of every example."""
        z = self.logits(theta, batch.x)
        return torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None]).squeeze(-1)

    def example_norms(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] Euclidean norm of every example's own gradient. One example of each row at a time: there is never
        a gradient per example and parameter in memory."""
        one = torch.ones(len(batch), 1, device=theta.device)
        columns = [
            replace(batch, x=batch.x[:, b : b + 1], y=batch.y[:, b : b + 1], weight=one, sample=None)
            for b in range(batch.y.shape[1])
        ]
        return torch.stack([torch.linalg.vector_norm(self.grad(theta, column), dim=1) for column in columns], 1)

    @torch.no_grad()
    def score(self, theta: Tensor, part: Split) -> Score:
        """Correct predictions and summed loss of each row's model on each client's examples."""
        n = len(part.count)
        correct = torch.zeros(n, dtype=torch.float64)
        loss = torch.zeros(n, dtype=torch.float64)
        for rows, batch in part.in_order():
            z = self.logits(theta[rows], batch.x)
            nll = torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None]).squeeze(-1)
            # NaN has no largest entry; a model that gives it is never right, whatever argmax says.
            hit = (z.argmax(-1) == batch.y) & (batch.weight > 0) & torch.isfinite(nll)
            # A zero weight must hide a padded example even where its loss is not finite.
            nll = torch.where(batch.weight > 0, nll, 0.0)
            correct[rows] += hit.sum(1).to("cpu", torch.float64)
            loss[rows] += nll.sum(1).to("cpu", torch.float64)
        return Score(correct, loss, part.count)

    def mean_loss(self, theta: Tensor, part: Split) -> Tensor:
        """[n] mean loss in float64; clients without examples get NaN."""
        score = self.score(theta, part)
        return score.loss / score.count

    def layer_mask(self, patterns: tuple[str, ...]) -> Tensor:
        """bool [P]: parameters that these names or patterns choose (kinfed.engine.columns)."""
        return columns.layer_mask(self.slots, patterns)

    def norm_layers(self) -> tuple[str, ...]:
        """Normalization layers with columns of the row, by their type."""
        return ()

    def layer_names(self) -> tuple[str, ...]:
        """Modules that own parameters, in the order of the forward pass as declared."""
        return columns.layer_names(self.slots)
