"""The local loop: SGD on every row, for clients with equal or unequal numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kinfed.core.tree import runs
from kinfed.data.batches import Batch, Batches
from kinfed.engine.base import Task
from kinfed.engine.descent import Pull, take_if_tensor


def sgd(
    task: Task,
    theta: Tensor,
    batches: Batches,
    *,
    lr: float | None = None,
    pull: Pull | None = None,
    drift: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """theta [n, P] after local training; the argument is left as it was.

        for every batch:  g <- gradient + lam * (theta - center) + drift + weight_decay * theta
                          theta <- theta - lr * g

    `lr` replaces the rate of the local training, `pull` is (lam, center [n, P]) with lam a number or one per client,
    `drift` is [n, P] or one for all ([P]), `mask` [P] confines training to some parameters. Momentum and weight decay
    are those of the local training. All of these concern trainable columns only; running statistics move with the
    forward passes, except those outside the mask, which stay."""
    training = batches.training
    rate = batches.lr if lr is None else lr
    trainable = task.trainable.stop
    if drift is not None:
        drift = drift.to(theta).expand_as(theta)
        if trainable < theta.shape[1]:
            drift = drift.clone()
            drift[:, trainable:] = 0
    order = _longest_first(batches.steps)
    if order is not None:
        back = torch.argsort(order)
        pull = None if pull is None else (take_if_tensor(pull[0], order), pull[1][order])
        drift = None if drift is None else drift[order]
        return sgd(task, theta[order], batches.take(order), lr=lr, pull=pull, drift=drift, mask=mask)[back]
    if training.momentum == 0 and mask is None and (training.weight_decay == 0 or pull is None):
        pull = toward_zero(theta, training.weight_decay) if pull is None else pull
        descent = task.descent(theta, len(batches), pull, drift)
        for rows, batch in batches.reusing_memory():
            assert isinstance(rows, slice)  # step counts fall
            descent.step(rows, batch, rate)
        return descent.result()
    x = theta.clone(memory_format=torch.contiguous_format)
    velocity = torch.zeros_like(x) if training.momentum else None
    trained = [task.trainable] if mask is None else runs(mask[:trainable])
    fixed = (
        [] if mask is None else [slice(b.start + trainable, b.stop + trainable) for b in runs(mask[trainable:] == 0)]
    )
    for rows, batch in batches.reusing_memory():
        now = x[rows]
        g = task.training_grad(now, batch)  # a task's own: it may even be `now` itself, so it is not changed in place
        for columns in fixed:  # the forward pass moved all running statistics
            now[:, columns] = theta[rows, columns]
        if pull is not None:
            lam = take_if_tensor(pull[0], rows)
            g = g + (lam[:, None] if isinstance(lam, Tensor) else lam) * (now - pull[1][rows])
        if drift is not None:
            g = g + drift[rows]
        if training.weight_decay:
            g = g.add(now, alpha=training.weight_decay)
        if velocity is not None:
            v = velocity[rows]
            v.mul_(training.momentum).add_(g)
            g = v
        for columns in trained:  # velocities of the other columns are never applied
            now[:, columns].add_(g[:, columns], alpha=-rate)
    return x


def gradient(task: Task, theta: Tensor, batch: Batch, weight_decay: float, *, training: bool = False) -> Tensor:
    """[n, P] gradient of every row's loss with weight decay, for methods with steps of their own; with `training` the
    running statistics of theta move in place. May be `theta` itself: not to be changed in place."""
    g = task.training_grad(theta, batch) if training else task.grad(theta, batch)
    if not weight_decay:
        return g
    g = g.clone()
    g[:, task.trainable].add_(theta[:, task.trainable], alpha=weight_decay)
    return g


def toward_zero(theta: Tensor, weight_decay: float) -> Pull | None:
    """Weight decay as a pull, for `task.descend_`."""
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
    """An order in which step counts fall, so that active rows are always a prefix (a view, not a copy);
    None where they already do."""
    if bool((steps[:-1] >= steps[1:]).all()):
        return None
    return torch.argsort(steps, descending=True, stable=True)
