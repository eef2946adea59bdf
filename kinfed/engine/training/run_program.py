"""Update programs of several models (kinfed.engine.contract.update_program) with every batch of every client.

In one compiled call per cohort where the task has one (kinfed.engine.compiled.program_steps), else step by step in
torch: that says what the steps mean, and is the oracle of the compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kinfed.core import kernels
from kinfed.data import Batch, Batches
from kinfed.engine.contract.descent import Pull
from kinfed.engine.contract.task import Task
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Mix, Move, Norm, changes
from kinfed.engine.training.sgd import gradient, toward_zero


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
            _make_move(task, move, now, batches)
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


def _make_move(task: Task, move: Move, now: dict[str, Tensor], batches: Sequence[Batch]) -> None:
    match move:
        case GradientStep():
            _descend(task, move, now, batches[move.stream])
        case Gradient():
            at = now[move.at]
            _put(now, move.result, gradient(task, at, batches[move.stream], move.decay, training=True))
            _take_statistics(task, now[move.result], at)
        case Mix():
            share = now[move.share] if isinstance(move.share, str) else move.share
            _put(now, move.result, mixture(now[move.base], now[move.toward], share, task.trainable))
        case Add():
            base, direction = now[move.base], now[move.direction]
            scale = _scale(move.scale, move.number, now, base)
            _put(now, move.result, base + scale * direction)
            _take_statistics(task, now[move.result], direction)
        case Norm():
            length = kernels.norm(now[move.model][:, task.trainable]).clamp_min(move.least)
            _put(now, move.number, move.scale * length**move.power)
        case Collect():
            _collect(move, now, batches[0].step, now[move.model][:, task.trainable])


def _put(now: dict[str, Tensor], name: str, value: Tensor) -> None:
    """In place of a model or number that is kept; one that lasts for a batch becomes a copy, which moves may change."""
    if name in now:
        now[name].copy_(value)
    else:
        now[name] = value.clone()


def _take_statistics(task: Task, model: Tensor, source: Tensor) -> None:
    model[:, task.trainable.stop :] = source[:, task.trainable.stop :]


def _scale(scale: float, number: str | None, now: Mapping[str, Tensor], like: Tensor) -> float | Tensor:
    return scale if number is None else (scale * now[number])[:, None].to(like)


def _collect(move: Collect, now: Mapping[str, Tensor], step: int, model: Tensor) -> None:
    begin, width = now[move.begin], now[move.width]
    inside = step >= begin
    window = torch.where(inside, (step - begin) // width, 0).to(model.device, torch.int64)
    share = torch.where(inside, 1 / width, 0.0).to(model)
    windows = now[move.result].view(len(model), -1, model.shape[1])
    windows[torch.arange(len(model), device=model.device), window] += share[:, None] * model


def _descend(task: Task, move: GradientStep, now: dict[str, Tensor], batch: Batch) -> None:
    model = now[move.model]
    if move.at is None or move.at == move.model:
        pull = _pull(move, now)
        if move.times == 1:
            task.descend_(model, batch, move.rate, pull)
        else:
            task.descend_often_(model, batch, move.times, move.rate, pull)
        return
    at = now[move.at]
    g = gradient(task, at, batch, move.decay, training=move.measures)
    step = g * _scale(move.rate, move.number, now, g)
    if move.learn is not None and not (move.learn.first_only and batch.step):
        learn = move.learn
        slope = (g * (now[learn.toward] - now[learn.base])).sum(1, dtype=torch.float64)
        now[learn.number].sub_(learn.rate * slope).clamp_(0, 1)
    model[:, task.trainable].sub_(step[:, task.trainable])
    if move.measures:
        _take_statistics(task, model, at)


def _pull(move: GradientStep, now: dict[str, Tensor]) -> Pull | None:
    """Pull and weight decay in one: λ (θ − c) + κ θ = (λ + κ) (θ − c λ / (λ + κ))."""
    lam, center = (0.0, None) if move.pull is None else (move.pull[0], now[move.pull[1]])
    total = lam + move.decay
    if center is None or not total:
        return toward_zero(now[move.model], move.decay)
    return total, center * (lam / total) if move.decay else center
