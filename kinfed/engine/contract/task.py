"""The contract between algorithms and models: what a task is.

A task knows a model as a flat row of parameters, its loss, and its gradient for many rows at once; `theta [n, P]` holds
one model per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kinfed.core import runs
from kinfed.data import Batch, Batches, Problem, Split
from kinfed.engine.contract import columns
from kinfed.engine.contract.class_sums import ClassSums, class_sums
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.descent import Descent, Pull, StepwiseDescent
from kinfed.engine.contract.feature_loss import Cut
from kinfed.engine.contract.gradient_pieces import GradientPieces
from kinfed.engine.contract.head import Head
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.contract.update_program import Move
from kinfed.engine.scoring.bootstrap import no_draws
from kinfed.engine.scoring.judged import Judged
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.score import OutputCollector, Score
from kinfed.errors import ModelError


class Task(ABC):
    """The contract between algorithms and models."""

    num_params: int
    slots: tuple[ParameterSlot, ...]  # from left to right: all trainable parameters, then all running statistics
    device: torch.device = torch.device("cpu")
    backend: str = "custom"  # how gradients are computed
    one_row_at_a_time: bool = False  # the pool then sends cohorts of one client to its worker threads
    shares_rows: bool = False  # calls of a whole loop use idle threads: small cohorts need not be cut into chunks
    classifies: bool = True  # outputs are logits of classes: accuracy is defined
    objective: Objective = CROSS_ENTROPY
    problem: Problem | None = None  # by whose metrics models are scored; None: by loss and accuracy alone
    metric: str | None = None  # the headline metric of the run; None: the problem's own

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
    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row, with zeros for running statistics. Theta
        stays as it is. A `cut` changes the loss at features and logits (kinfed.engine.contract.feature_loss); a task
        without a head refuses it."""

    def training_grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        """The gradient of a step of training: as `grad`, and the running statistics of theta move in place, as in any
        training forward pass of torch."""
        return self.grad(theta, batch) if cut is None else self.grad(theta, batch, cut)

    def gradient_pieces(self, mask: Tensor | None) -> GradientPieces:
        """The gradient of a step of training for the optimizer of a local loop, which trains the columns of mask [P]
        alone (None: all that can be trained)."""
        columns = [self.trainable] if mask is None else runs(mask[self.trainable])

        def gradient(theta: Tensor, batch: Batch, cut: Cut | None) -> list[Tensor]:
            g = self.training_grad(theta, batch, cut)
            return [g[:, block] for block in columns]

        return GradientPieces(columns, gradient)

    @abstractmethod
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] for theta [n, P] and x [n, B, ...], by models in evaluation mode."""

    @property
    def head(self) -> Head:
        """The last linear layer, where the model ends in one."""
        raise ModelError(f"{type(self).__name__} has no last linear layer, and so no features")

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(features [n, B, d_f], logits [n, B, C]) of one forward pass, by models in evaluation mode and without
        gradients; features are the input of the head."""
        raise ModelError(f"{type(self).__name__} has no last linear layer, and so no features")

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, d_f] the input of the head, for theta [n, P] and x [n, B, ...], as in `cut`."""
        return self.cut(theta, x)[0]

    @torch.no_grad()
    def logits_of(self, theta: Tensor, phi: Tensor) -> Tensor:
        """[n, B, C] what the head of theta [n, P] makes of features [n, B, d_f], without gradients."""
        return self.head.logits(theta, phi)

    def class_sums(self, theta: Tensor, split: Split, scatter: bool = False) -> ClassSums:
        """Features of each client's examples summed by class, in one pass; `scatter` adds Σ φ φ'."""
        return class_sums(self.features, theta, split, self.head.inputs, self.head.outputs, scatter)

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None, cut: Cut | None = None
    ) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place; running statistics move, too."""
        g = self.training_grad(theta, batch, cut)[:, self.trainable]
        x = theta[:, self.trainable]
        if pull is not None:
            lam, center = pull
            lam = lam[:, None] if isinstance(lam, Tensor) else lam
            g = g + lam * (x - center[:, self.trainable])
        x -= (lr[:, None] if isinstance(lr, Tensor) else lr) * g

    def descent(
        self,
        theta: Tensor,
        steps: int,
        pull: Pull | None = None,
        drift: Tensor | None = None,
        cut: Cut | None = None,
    ) -> Descent:
        """Up to `steps` such steps, with `drift` [n, P] added to every gradient. A task may know a faster way than one
        `descend_` after the other."""
        return StepwiseDescent(self.descend_, theta, pull, drift, cut)

    def partial_descent(
        self, theta: Tensor, mask: Tensor, steps: int, pull: Pull | None = None, cut: Cut | None = None
    ) -> Descent | None:
        """Steps that train the columns of mask [P] alone, and compute no gradient of the others; nor do running
        statistics outside of it move. None where the task knows no such way: then gradients are computed of all."""
        return None

    def descend_often_(self, theta: Tensor, batch: Batch, times: int, lr: float | Tensor, pull: Pull | None) -> None:
        """`times` times `descend_` on the same batch, towards a proximal point, say."""
        for _ in range(times):
            self.descend_(theta, batch, lr, pull)

    def runs_whole_loops(self, batches: Batches) -> bool:
        """Whether `train_` takes all steps of this local training; else `sgd` leads through it batch by batch."""
        return False

    def train_(
        self,
        theta: Tensor,
        batches: Batches,
        rate: float,
        pull: Pull | None,
        drift: Tensor | None,
        mask: Tensor | None,
        moments: Mapping[str, Tensor],
    ) -> None:
        """All steps of `sgd` (which see) in place, where the task `runs_whole_loops`. `moments` of the optimizer
        (kinfed.engine.training.optimizers) change in place, too."""
        raise NotImplementedError(f"{type(self).__name__} trains batch by batch")

    def runs_moves(self, streams: Sequence[Batches], models: Mapping[str, Tensor]) -> bool:
        """Whether `move_` takes all steps on these batches and models."""
        return False

    def move_(
        self,
        streams: Sequence[Batches],
        moves: Sequence[Move],
        models: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],
    ) -> None:
        """All of `train_models` (kinfed.engine.training.run_program) in place, where the task `runs_moves`."""
        raise NotImplementedError(f"{type(self).__name__} moves models batch by batch")

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] the loss of every example."""
        return self.objective.losses(self.logits(theta, batch.x), batch.y)

    def example_norms(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        """[n, B] Euclidean norm of every example's own gradient. One example of each row at a time: there is never
        a gradient per example and parameter in memory. A cut must be separable."""
        one = torch.ones(len(batch), 1, device=theta.device)
        columns = [
            replace(batch, x=batch.x[:, b : b + 1], y=batch.y[:, b : b + 1], weight=one, sample=None)
            for b in range(batch.y.shape[1])
        ]
        grads = (self.grad(theta, column) if cut is None else self.grad(theta, column, cut) for column in columns)
        return torch.stack([torch.linalg.vector_norm(g, dim=1) for g in grads], 1)

    @torch.no_grad()
    def score(self, theta: Tensor, part: Split) -> Score:
        """Correct predictions and summed loss of each row's model on each client's examples."""
        return self._scored(theta, part, None)

    def _scored(self, theta: Tensor, part: Split, outputs: OutputCollector | None) -> Score:
        """`score`, with the outputs of all examples handed to a collector, where there is one."""
        n = len(part.count)
        correct = torch.zeros(n, dtype=torch.float64)
        loss = torch.zeros(n, dtype=torch.float64)
        for rows, batch in part.in_order():
            z = self.logits(theta[rows], batch.x)
            if outputs is not None:
                outputs.add(rows, z, batch)
            losses = self.objective.losses(z, batch.y)
            if self.classifies:
                # NaN has no largest entry; a model that gives it is never right, whatever argmax says.
                hit = (z.argmax(-1) == batch.y) & (batch.weight > 0) & torch.isfinite(losses)
                correct[rows] += hit.sum(1).to("cpu", torch.float64)
            # A zero weight must hide a padded example even where its loss is not finite.
            losses = torch.where(batch.weight > 0, losses, 0.0)
            loss[rows] += losses.sum(1).to("cpu", torch.float64)
        return Score(correct, loss, part.count)

    @torch.no_grad()
    def evaluate(self, theta: Tensor, part: Split) -> Score:
        """`score`, and the metrics of the problem, where the task has one: what is reported of a model."""
        n, problem = len(part.count), self.problem
        if problem is None:
            return self.score(theta, part)
        headline = METRICS.headline(problem, self.metric)
        if not int(part.count.sum()):
            names = sorted(one.name for one in METRICS.of_problem(problem, headline))
            nothing = {name: torch.zeros(n, 2, dtype=torch.float64) for name in names}
            return replace(self.score(theta, part), sums=nothing, error_or_draws=no_draws(headline, n))
        outputs = OutputCollector(n)
        score = self._scored(theta, part, outputs)
        judged = outputs.judged(problem)
        if headline.needs_start:
            start = self.start_model(part.seed).expand(n, -1)
            output = judged_outputs(self.plain_task, start, part, problem).output
            judged = replace(judged, start_output=output)
        return score.judged_by(headline, judged, part.ids)

    @property
    def plain_task(self) -> Task:
        """The task of the models that methods start from; that of wider rows is made of it."""
        return self

    def start_model(self, seed: int) -> Tensor:
        """[P] of the plain task: where all methods of the seed begin."""
        return self.plain_task.init(seed)

    def mean_loss(self, theta: Tensor, part: Split) -> Tensor:
        """[n] mean loss in float64, weighted where examples count unequally; clients without examples get NaN."""
        if part.weights is None:
            score = self.score(theta, part)
            return score.loss / score.count
        loss, weight = torch.zeros(2, len(part.count), dtype=torch.float64)
        for rows, batch in part.in_order():
            losses = torch.where(batch.weight > 0, self.losses(theta[rows], batch), 0.0) * batch.weight
            loss[rows] += losses.sum(1).to("cpu", torch.float64)
            weight[rows] += batch.weight.sum(1).to("cpu", torch.float64)
        mean: Tensor = loss / weight
        return mean

    def scores_alone(self, theta: Tensor, part: Split) -> bool:
        """Whether scores of these models do not depend, to the last bit, on which clients are scored together."""
        return len(part.count) == 1

    def scores_in_place(self, theta: Tensor, part: Split) -> bool:
        """Whether these models are scored on examples where they lie, so that scoring several fetches none twice."""
        return False

    def layer_mask(self, patterns: tuple[str, ...]) -> Tensor:
        """bool [P]: parameters that these names or patterns choose (kinfed.engine.contract.columns)."""
        return columns.layer_mask(self.slots, patterns)

    def norm_layers(self) -> tuple[str, ...]:
        """Normalization layers with columns of the row, by their type."""
        return ()

    def frozen_digest(self) -> str:
        """Of frozen parameters, which whoever trains the same rows must have, too; "" where there are none."""
        return ""

    def layer_names(self) -> tuple[str, ...]:
        """Modules that own parameters, in the order of the forward pass as declared."""
        return columns.layer_names(self.slots)


def judged_outputs(task: Task, theta: Tensor, part: Split, problem: Problem) -> Judged:
    """What models theta [n, P] say of their clients' examples, of which there is at least one."""
    outputs = OutputCollector(len(part.count))
    for rows, batch in part.in_order():
        outputs.add(rows, task.logits(theta[rows], batch.x), batch)
    return outputs.judged(problem)
