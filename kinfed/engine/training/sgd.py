"""The local loop: steps of an optimizer on every row, for clients with equal or unequal numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kinfed.core import copied_rows, runs
from kinfed.data import Batch, Batches
from kinfed.engine.contract.descent import Descent, ProximalTerm, Terms, take_if_tensor
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.task import Task
from kinfed.engine.training.optimizers import blank_moments, clipped, make_optimizer


def sgd(
    task: Task,
    theta: Tensor,
    batches: Batches,
    *,
    lr: float | None = None,
    proximal: ProximalTerm | None = None,
    drift: Tensor | None = None,
    mask: Tensor | None = None,
    feature_loss: FeatureLoss | None = None,
) -> Tensor:
    """theta [n, P] after local training; the argument is left as it was.

        for every batch:  g <- gradient + lam * (theta - center) + drift, of norm `clip` at most
                          theta <- theta moved along g by the optimizer

    With plain SGD the last line is theta - lr * (g + weight_decay * theta). `lr` replaces the rate of the local
    training, `proximal` is (lam, center [n, P]) with lam a number or one per client, `drift` is [n, P] or one for all
    ([P]), `mask` [P] confines training to some parameters, `feature_loss` changes the loss at features and logits.
    Optimizer, weight decay and clip are those of the local training. Like the proximal term and drift they concern
    trainable columns only; running statistics move with the forward passes, except those outside the mask, which
    stay."""
    training = batches.training
    rate = batches.lr if lr is None else lr
    trainable = task.trainable.stop
    if drift is not None:
        drift = drift.to(theta).expand_as(theta)
        if trainable < theta.shape[1]:
            drift = drift.clone()
            drift[:, trainable:] = 0
    terms = Terms(proximal, drift, feature_loss)
    whole_loop = task.whole_loop(batches) if feature_loss is None else None
    if whole_loop is not None:
        x = theta.clone(memory_format=torch.contiguous_format)
        columns = [slice(0, x.shape[1])] if mask is None else runs(mask)
        with _remembered(batches, columns, x) as remembered:
            blank = blank_moments(training, columns, x) if remembered is None else remembered
            whole_loop(x, rate, terms, mask, blank)
        return x
    order = _longest_first(batches.steps)
    if order is not None:
        some = vars(terms.rows(order, len(theta)))
        return sgd(task, theta[order], batches.take(order), lr=lr, mask=mask, **some)[torch.argsort(order)]
    descent = _plain_descent(task, theta, batches, terms, mask)
    if descent is not None:
        for rows, batch in batches.reusing_memory():
            assert isinstance(rows, slice)  # step counts fall
            descent.step(rows, batch, rate)
        return descent.result()
    x = copied_rows(theta)
    pieces = task.gradient_pieces(mask)
    fixed = (
        [] if mask is None else [slice(trainable + b.start, trainable + b.stop) for b in runs(mask[trainable:] == 0)]
    )
    largest = training.largest_gradient
    with _remembered(batches, pieces.columns, x) as moments:
        optimizer = make_optimizer(training, pieces.columns, x, moments)
        for rows, batch in batches.reusing_memory():
            assert isinstance(rows, slice)  # step counts fall
            now = x[rows]
            # A task's own: it may even be a view of `now`, so it is not changed in place. The rows of a feature loss
            # are those of `now`: step counts fall, so the clients that still train are the first ones.
            gradient = pieces.gradient(now, batch, feature_loss)
            for block in fixed:  # the forward pass moved all running statistics
                now[:, block] = theta[rows, block]
            gradient = [
                _with_terms(g, now[:, block], block, rows, terms)
                for g, block in zip(gradient, pieces.columns, strict=True)
            ]
            optimizer.step(rows, now, gradient if largest is None else clipped(gradient, largest), rate)
            del gradient  # before the next one is computed: its memory serves that one
    return x


def _plain_descent(task: Task, theta: Tensor, batches: Batches, terms: Terms, mask: Tensor | None) -> Descent | None:
    """The task's own loop, where every step is lr times the gradient with these terms; None where it needs more."""
    training, trainable, proximal = batches.training, task.trainable.stop, terms.proximal
    no_terms = proximal is None and terms.drift is None and training.weight_decay == 0
    if not training.is_plain or not (trainable == theta.shape[1] or no_terms):
        return None
    if (training.weight_decay and proximal is not None) or (mask is not None and terms.drift is not None):
        return None
    decay = toward_zero(theta, training.weight_decay) if proximal is None else proximal
    return task.descent(theta, len(batches), replace(terms, proximal=decay), mask)


def _with_terms(g: Tensor, now: Tensor, block: slice, rows: slice, terms: Terms) -> Tensor:
    """The gradient of some columns with proximal term and drift; a new tensor where there is any."""
    if terms.proximal is not None:
        lam = take_if_tensor(terms.proximal[0], rows)
        g = g + (lam[:, None] if isinstance(lam, Tensor) else lam) * (now - terms.proximal[1][rows, block])
    return g if terms.drift is None else g + terms.drift[rows, block]


def _remembered(
    batches: Batches, columns: Sequence[slice], theta: Tensor
) -> AbstractContextManager[dict[str, Tensor] | None]:
    """Moments of this loop in the clients' memory, to be changed in place and stored at the end. None where the loop
    starts anew: because the training says so, or outside of a client's round, where there is no memory."""
    view = batches.split.memory
    if view is None or batches.training.optimizer_state == "reset":
        return nullcontext()
    return view.of_loop(batches.loop, blank_moments(batches.training, columns, theta))


def gradient(task: Task, theta: Tensor, batch: Batch, weight_decay: float, *, training: bool = False) -> Tensor:
    """[n, P] gradient of every row's loss with weight decay, for methods with steps of their own; with `training` the
    running statistics of theta move in place. May be `theta` itself: not to be changed in place."""
    g = task.training_grad(theta, batch) if training else task.grad(theta, batch)
    if not weight_decay:
        return g
    g = g.clone()
    g[:, task.trainable].add_(theta[:, task.trainable], alpha=weight_decay)
    return g


def toward_zero(theta: Tensor, weight_decay: float) -> ProximalTerm | None:
    """Weight decay as a proximal term, for `task.descend_`."""
    return (weight_decay, theta.new_zeros(1).expand_as(theta)) if weight_decay else None


def each_step(batches: Batches, *rows: Tensor) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yield (batch, [active rows of every tensor]) per step, for methods with a loop of their own.

    Change the yielded rows in place; the tensors given [n, ...] then hold the result, whichever clients have
    finished before others."""
    for active, batch in batches:
        views = [tensor[active] for tensor in rows]
        yield batch, views
        if not isinstance(active, slice):  # the views are copies
            for tensor, view in zip(rows, views, strict=True):
                tensor[active] = view


def _longest_first(steps: Tensor) -> Tensor | None:
    """An order in which step counts fall, so that active rows are a prefix (a view); None where they already do."""
    if bool((steps[:-1] >= steps[1:]).all()):
        return None
    return torch.argsort(steps, descending=True, stable=True)
