"""The contract between algorithms and models: what a task is.

A task knows a model as a flat row of parameters, its loss, and its gradient for many rows at once; `theta [n, P]` holds
one model per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kinfed.core import runs
from kinfed.data import Batch, Batches, Packing, Problem, Split
from kinfed.engine.contract import columns
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.descent import PLAIN, Descent, GradientPieces, ProximalTerm, StepwiseDescent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.head import ClassSums, Head, class_sums
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.contract.update_program import Instruction
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.engine.scoring.score import OutputCollector, Score, no_draws
from kinfed.errors import ModelError

# Theta, the rate, terms without a feature loss, the mask, and the optimizer's moments; theta and these change in place.
WholeLoop = Callable[[Tensor, float, Terms, Tensor | None, Mapping[str, Tensor]], None]
# A program, the models and the numbers that it changes in place.
WholeProgram = Callable[[Sequence[Instruction], Mapping[str, Tensor], Mapping[str, Tensor]], None]


class Task(ABC):
    """The contract between algorithms and models: what a method may ask of a model, for n clients at once.

    Models are rows theta [n, P]. `init` is the start of all, `grad(theta, batch)` [n, P] the gradients of a batch,
    `losses` and `logits` what models make of examples, `score` their sums over a split. How a backend computes them is
    its own affair; methods train by `kinfed.author.sgd` and `run_program`, which use its fastest way."""

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
    packing: Packing | None = None  # of several inputs in an example; None: it is one
    no_features: str = ""  # why features cannot be read, as a trial of the model on examples showed
    of_server: Task | None = None  # the task of the server's model, where clients have architectures of their own

    @property
    def trainable(self) -> slice:
        """The columns of a row that gradients move, [0, T). Those behind them, [T, P), hold running statistics (of
        BatchNorm, say): forward passes of training move them, averages mix them, and nothing else may: no
        proximal term, no weight decay, no momentum, no server optimizer, no distance, no extrapolation (a variance must
        not become negative)."""
        return slice(0, max((slot.stop for slot in self.slots if slot.trainable), default=0))

    @abstractmethod
    def init(self, seed: int, number: int = 0) -> Tensor:
        """[P] starting point; `number` gives further independent ones."""

    @abstractmethod
    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row, 0 for running statistics. Theta stays as it is. A
        `feature_loss` changes the loss at features and logits; a task without a head refuses it."""

    def training_grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """The gradient of a step of training: as `grad`, and the running statistics of theta move in place."""
        return self.grad(theta, batch) if feature_loss is None else self.grad(theta, batch, feature_loss)

    def gradient_pieces(self, mask: Tensor | None) -> GradientPieces:
        """The gradient of a step of training for an optimizer, of the columns of mask [P] (None: of all trainable)."""
        columns = [self.trainable] if mask is None else runs(mask[self.trainable])

        def gradient(theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None) -> list[Tensor]:
            g = self.training_grad(theta, batch, feature_loss)
            return [g[:, block] for block in columns]

        return GradientPieces(columns, gradient)

    @abstractmethod
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, ...] outputs for theta [n, P] and x [n, B, ...], by models in evaluation mode."""

    @property
    def head(self) -> Head:
        """The last linear layer, where the model ends in one."""
        raise ModelError(f"{type(self).__name__} has no last linear layer, and so no features")

    @property
    def feature_head(self) -> Head:
        """The head, where its input can be read as features and its output is the model's."""
        if self.no_features:
            raise ModelError(self.no_features)
        return self.head

    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(features [n, B, d_f], the input of the head; logits [n, B, C]), in evaluation mode and without gradients."""
        raise ModelError(f"{type(self).__name__} has no last linear layer, and so no features")

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, d_f] the input of the head, for theta [n, P] and x [n, B, ...], as in `features_and_logits`."""
        return self.features_and_logits(theta, x)[0]

    @torch.no_grad()
    def logits_of(self, theta: Tensor, phi: Tensor) -> Tensor:
        """[n, B, C] what the head of theta [n, P] makes of features [n, B, d_f], without gradients."""
        return self.head.logits(theta, phi)

    def class_sums(self, theta: Tensor, split: Split, scatter: bool = False) -> ClassSums:
        """Features of each client's examples summed by class, in one pass; `scatter` adds Σ φ φ'."""
        return class_sums(self.features, theta, split, self.head.inputs, self.head.outputs, scatter)

    def class_predictions(self, theta: Tensor, split: Split) -> ClassSums:
        """Probabilities that each client's examples are given, softmax(z), summed by class in place of features."""
        C = self.head.outputs
        return class_sums(lambda rows, x: torch.softmax(self.logits(rows, x), -1), theta, split, C, C, False)

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, proximal: ProximalTerm | None = None,
        feature_loss: FeatureLoss | None = None,
    ) -> None:  # fmt: skip
        """theta <- theta - lr * (grad + lam * (theta - center)), in place; running statistics move, too."""
        self.take_step_(theta, batch, lr, Terms(proximal, None, feature_loss))

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        """`descend_` with the proximal term and the feature loss of `terms`; their drift is the loop's to add."""
        g = self.training_grad(theta, batch, terms.feature_loss)[:, self.trainable]
        x = theta[:, self.trainable]
        if terms.proximal is not None:
            lam, center = terms.proximal
            lam = lam[:, None] if isinstance(lam, Tensor) else lam
            g = g + lam * (x - center[:, self.trainable])
        x -= (lr[:, None] if isinstance(lr, Tensor) else lr) * g

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        """A loop of up to `steps` such steps. A task may know a faster way than one `descend_` after the other.

        With a mask [P] they train its columns alone, and compute no gradient of the others; nor do running statistics
        outside of it move. None if the task knows no such way: then gradients are computed of all."""
        return StepwiseDescent(self.take_step_, theta, terms) if mask is None else None

    def of_rows(self, order: Tensor) -> Task:
        """The task for theta[order], by a caller who trains rows in another order: a task whose own loss knows rows by
        their positions tells it of those that they had."""
        return self

    def whole_loop(self, batches: Batches) -> WholeLoop | None:
        """All steps of `sgd` in one call; None if the task has none for this training: then batch by batch."""
        return None

    def whole_program(self, streams: Sequence[Batches], models: Mapping[str, Tensor]) -> WholeProgram | None:
        """All of `run_program` in one call; None if the task has none for these batches and models."""
        return None

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] the loss of every example."""
        return self.objective.losses(self.logits(theta, batch.x), batch.y, batch.weight)

    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """[n, B] Euclidean norm of every example's own gradient. One example of each row at a time: there is never
        a gradient per example and parameter in memory. A feature loss must be separable."""
        one = torch.ones(len(batch), 1, device=theta.device)
        columns = (
            replace(batch, x=batch.x[:, b : b + 1], y=batch.y[:, b : b + 1], weight=one, sample=None)
            for b in range(batch.y.shape[1])
        )
        hook = () if feature_loss is None else (feature_loss,)
        grads = (self.grad(theta, column, *hook) for column in columns)
        return torch.stack([torch.linalg.vector_norm(g, dim=1) for g in grads], 1)

    @torch.no_grad()
    def score(self, theta: Tensor, part: Split) -> Score:
        """Correct predictions and summed loss of each row's model on each client's examples."""
        return self._scored(theta, part, None)

    def _scored(self, theta: Tensor, part: Split, outputs: OutputCollector | None) -> Score:
        """`score`, with the outputs of all examples handed to a collector, if any."""
        n = len(part.count)
        correct = torch.zeros(n, dtype=torch.float64)
        loss = torch.zeros(n, dtype=torch.float64)
        for rows, batch in part.in_order():
            z = self.logits(theta[rows], batch.x)
            if outputs is not None:
                outputs.add(rows, z, batch)
            losses = self.objective.losses(z, batch.y, batch.weight)
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
        outputs = OutputCollector(n, problem)
        score = self._scored(theta, part, outputs)
        judged = outputs.judged()
        if headline.needs_start:
            start = self.start_model(part.seed).expand(n, -1)
            output = judged_outputs(self.plain_task, start, part, problem).output
            judged = replace(judged, start_output=output)
        return score.judged_by(headline, judged, part.ids)

    @property
    def plain_task(self) -> Task:
        """The task of the models that methods start from; that of wider rows is made of it."""
        return self

    @property
    def server_task(self) -> Task:
        """The task of the model that the server holds: this one, unless clients have architectures of their own."""
        return self if self.of_server is None else self.of_server

    def start_model(self, seed: int) -> Tensor:
        """[P] of the plain task: where all methods of the seed begin."""
        return self.plain_task.init(seed)

    def mean_loss(self, theta: Tensor, part: Split) -> Tensor:
        """[n] mean loss in float64, weighted where examples count unequally; clients without examples get NaN."""
        if part.weights is None:
            score = self.score(theta, part)
            return score.loss / score.count
        return self.mean_losses([theta], part)[:, 0]

    def mean_losses(self, models: Sequence[Tensor], split: Split) -> Tensor:
        """[n, len(models)] as `mean_loss` has them, of several models [n, P] on examples that are fetched once."""
        total = torch.zeros(len(split.count), len(models), dtype=torch.float64)
        weight = torch.zeros(len(split.count), dtype=torch.float64)
        for rows, batch in split.in_order():
            real = batch.weight > 0
            weight[rows] += batch.weight.sum(1).to("cpu", torch.float64)
            for number, theta in enumerate(models):
                losses = torch.where(real, self.losses(theta[rows], batch), 0.0) * batch.weight
                total[rows, number] += losses.sum(1).to("cpu", torch.float64)
        return total / weight[:, None]

    def scores_alone(self, theta: Tensor, part: Split) -> bool:
        """Whether scores of these models do not depend, to the last bit, on which clients are scored together."""
        return len(part.count) == 1

    def layer_mask(self, patterns: tuple[str, ...]) -> Tensor:
        """bool [P]: parameters that these names or patterns choose (kinfed.engine.contract.columns)."""
        return columns.layer_mask(self.slots, patterns)

    def norm_layers(self) -> tuple[str, ...]:
        """Normalization layers with columns of the row, by their type."""
        return ()

    def frozen_digest(self) -> str:
        """A digest of frozen parameters, which all nodes that train the same rows must share; "" without any."""
        return ""

    def layer_names(self) -> tuple[str, ...]:
        """Modules that own parameters, in the order of the forward pass as declared."""
        return columns.layer_names(self.slots)


def judged_outputs(task: Task, theta: Tensor, part: Split, problem: Problem) -> Judged:
    """Outputs of models theta [n, P] on their clients' examples, of which there is at least one."""
    outputs = OutputCollector(len(part.count), problem)
    for rows, batch in part.in_order():
        outputs.add(rows, task.logits(theta[rows], batch.x), batch)
    return outputs.judged()
