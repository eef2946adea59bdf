"""Moves of several models (kinfed.engine.moves) with every batch of every client.

In one compiled call per cohort where the task has one (kinfed.engine.fused_moves), else move by move in torch: that
says what moves mean, and is the oracle of the compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kinfed.data.batches import Batch, Batches
from kinfed.engine.base import Task
from kinfed.engine.descent import Pull
from kinfed.engine.moves import GradientStep, Mix, Move, changes
from kinfed.engine.sgd import gradient, toward_zero


def train_models(
    task: Task,
    streams: Sequence[Batches],
    moves: Sequence[Move],
    models: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor] | None = None,
) -> None:
    """The moves with every batch, in place. Of several streams of batches a client takes one of each at every step."""
    numbers = numbers or {}
    if task.runs_moves(streams, models):
        task.move_(streams, moves, models, numbers)
        return
    kept, changed = {**models, **numbers}, {name for move in moves for name in changes(move)}
    others = [iter(stream) for stream in streams[1:]]
    for active, batch in streams[0]:
        batches = [batch, *(next(other)[1] for other in others)]
        now = {name: tensor[active] for name, tensor in kept.items()}
        for move in moves:
            if isinstance(move, Mix):
                _mix(task, move, now)
            else:
                _descend(task, move, now, batches[move.stream])
        if not isinstance(active, slice):  # these are copies
            for name in changed & kept.keys():
                kept[name][active] = now[name]


def mixture(base: Tensor, toward: Tensor, share: float | Tensor, trainable: slice) -> Tensor:
    """[n, P] of `Mix`."""
    if isinstance(share, Tensor):
        share = share[:, None].to(base.dtype)
    mixed = torch.lerp(base, toward, share)
    mixed[:, trainable.stop :] = toward[:, trainable.stop :]
    return mixed


def _mix(task: Task, move: Mix, now: dict[str, Tensor]) -> None:
    share = now[move.share] if isinstance(move.share, str) else move.share
    mixed = mixture(now[move.base], now[move.toward], share, task.trainable)
    if move.result in now:
        now[move.result].copy_(mixed)
    else:
        now[move.result] = mixed


def _descend(task: Task, move: GradientStep, now: dict[str, Tensor], batch: Batch) -> None:
    model = now[move.model]
    if move.at is None or move.at == move.model:
        pull = _pull(move, now)
        if move.times == 1:
            task.descend_(model, batch, move.rate, pull)
        else:
            task.descend_often_(model, batch, move.times, move.rate, pull)
        return
    at, behind = now[move.at], slice(task.trainable.stop, None)
    g = gradient(task, at, batch, move.decay, training=True)
    step = g * (move.rate if move.number is None else (move.rate * now[move.number])[:, None].to(g.dtype))
    if move.learn is not None and not (move.learn.first_only and batch.step):
        learn = move.learn
        slope = (g * (now[learn.toward] - now[learn.base])).sum(1, dtype=torch.float64)
        now[learn.number].sub_(learn.rate * slope).clamp_(0, 1)
    model.sub_(step)
    model[:, behind] = at[:, behind]


def _pull(move: GradientStep, now: dict[str, Tensor]) -> Pull | None:
    """Pull and weight decay in one: λ (θ − c) + κ θ = (λ + κ) (θ − c λ / (λ + κ))."""
    lam, center = (0.0, None) if move.pull is None else (move.pull[0], now[move.pull[1]])
    total = lam + move.decay
    if center is None or not total:
        return toward_zero(now[move.model], move.decay)
    return total, center * (lam / total) if move.decay else center
