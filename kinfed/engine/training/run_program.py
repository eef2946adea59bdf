"""Update programs of several models (kinfed.engine.contract.update_program) with every batch of every client.

In one compiled call per cohort where the task has one (kinfed.engine.compiled.fused_kernels), else one step
after the other in torch: that says what they mean, and is the oracle of the compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kinfed.core import kernels
from kinfed.data import Batch, Batches
from kinfed.engine.contract.descent import ProximalTerm
from kinfed.engine.contract.task import Task
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Mix, Norm, changes
from kinfed.engine.training.sgd import gradient, toward_zero


def run_program(
    task: Task,
    streams: Sequence[Batches],
    program: Sequence[Instruction],
    models: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor] | None = None,
) -> None:
    """Run the program with every batch, in place; with several streams of batches, one of each at every step."""
    numbers = numbers or {}
    whole_program = task.whole_program(streams, models)
    if whole_program is not None:
        whole_program(program, models, numbers)
        return
    kept, changed = {**models, **numbers}, {name for step in program for name in changes(step)}
    others = [iter(stream) for stream in streams[1:]]
    for active, batch in streams[0]:
        batches = [batch, *(next(other)[1] for other in others)]
        now = {name: tensor[active] for name, tensor in kept.items()}
        for step in program:
            _execute(task, step, now, batches)
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


def _execute(task: Task, step: Instruction, now: dict[str, Tensor], batches: Sequence[Batch]) -> None:
    match step:
        case GradientStep():
            _descend(task, step, now, batches[step.stream])
        case Gradient():
            at = now[step.at]
            _put(now, step.result, gradient(task, at, batches[step.stream], step.decay, training=True))
            _take_statistics(task, now[step.result], at)
        case Mix():
            share = now[step.share] if isinstance(step.share, str) else step.share
            _put(now, step.result, mixture(now[step.base], now[step.toward], share, task.trainable))
        case Add():
            base, direction = now[step.base], now[step.direction]
            scale = _scale(step.scale, step.number, now, base)
            _put(now, step.result, base + scale * direction)
            _take_statistics(task, now[step.result], direction)
        case Norm():
            length = kernels.norm(now[step.model][:, task.trainable]).clamp_min(step.least)
            _put(now, step.number, step.scale * length**step.power)
        case Collect():
            _collect(step, now, batches[0].step, now[step.model][:, task.trainable])


def _put(now: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Write to a model or number that is kept; one that lasts for a batch becomes a copy, to be changed at will."""
    if name in now:
        now[name].copy_(value)
    else:
        now[name] = value.clone()


def _take_statistics(task: Task, model: Tensor, source: Tensor) -> None:
    model[:, task.trainable.stop :] = source[:, task.trainable.stop :]


def _scale(scale: float, number: str | None, now: Mapping[str, Tensor], like: Tensor) -> float | Tensor:
    return scale if number is None else (scale * now[number])[:, None].to(like)


def _collect(step: Collect, now: Mapping[str, Tensor], number: int, model: Tensor) -> None:
    begin, width = now[step.begin], now[step.width]
    inside = number >= begin
    window = torch.where(inside, (number - begin) // width, 0).to(model.device, torch.int64)
    share = torch.where(inside, 1 / width, 0.0).to(model)
    windows = now[step.result].view(len(model), -1, model.shape[1])
    windows[torch.arange(len(model), device=model.device), window] += share[:, None] * model


def _descend(task: Task, step: GradientStep, now: dict[str, Tensor], batch: Batch) -> None:
    model = now[step.model]
    if step.at is None or step.at == step.model:
        proximal = _proximal(step, now)
        for _ in range(step.times):
            task.descend_(model, batch, step.rate, proximal)
        return
    at = now[step.at]
    g = gradient(task, at, batch, step.decay, training=step.measures)
    change = g * _scale(step.rate, step.number, now, g)
    if step.learn is not None and not (step.learn.first_only and batch.step):
        learn = step.learn
        slope = (g * (now[learn.toward] - now[learn.base])).sum(1, dtype=torch.float64)
        now[learn.number].sub_(learn.rate * slope).clamp_(0, 1)
    model[:, task.trainable].sub_(change[:, task.trainable])
    if step.measures:
        _take_statistics(task, model, at)


def _proximal(step: GradientStep, now: dict[str, Tensor]) -> ProximalTerm | None:
    """Proximal term and weight decay in one: λ (θ − c) + κ θ = (λ + κ) (θ − c λ / (λ + κ))."""
    lam, center = (0.0, None) if step.proximal is None else (step.proximal[0], now[step.proximal[1]])
    total = lam + step.decay
    if center is None or not total:
        return toward_zero(now[step.model], step.decay)
    return total, center * (lam / total) if step.decay else center
