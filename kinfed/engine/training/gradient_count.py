"""Counts of gradients, by the engine and not by what methods declare.

    count = GradientCount()
    loop = ... counting(task, count) ...
    count.examples                       gradients of single examples' losses at a model, of all clients together

A counting task is the task that it was made of, with the same backend and the same bits: every way to a gradient (one
batch, a step, a whole compiled loop, a program) adds how many examples it was taken of. A way that uses another one is
counted once. A method that differentiates without the task is not seen here; its processor time is.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from kinfed.data import Batch, Batches
from kinfed.engine.contract.descent import PLAIN, Descent, GradientPieces, ProximalTerm, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.task import Task, WholeLoop, WholeProgram
from kinfed.engine.contract.update_program import Gradient, GradientStep, Instruction

AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass
class GradientCount:
    """Gradients of single examples, as of all models of all clients."""

    examples: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _inside: threading.local = field(default_factory=threading.local, repr=False)

    @contextmanager
    def of(self, examples: Callable[[], int]) -> Iterator[None]:
        """Count what is computed inside once, however it is computed."""
        if getattr(self._inside, "counts", False):
            yield
            return
        number = examples()
        with self._lock:
            self.examples += number
        self._inside.counts = True
        try:
            yield
        finally:
            self._inside.counts = False


def counting(task: AnyTask, count: GradientCount) -> AnyTask:
    """The same task, whose gradients are counted. The task that is given is left as it is."""
    counted = copy.copy(task)
    kind = type(task)
    counted.__class__ = type(f"Counting{kind.__name__}", (_Counting, kind), {})
    counted.__dict__["_count"] = count
    return counted


class _Counting(Task):
    """In front of a task's own class; tasks that methods make around this one go through it."""

    _count: GradientCount

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        with self._count.of(lambda: _examples(batch)):
            return super().grad(theta, batch, feature_loss)  # type: ignore[safe-super]  # of the task's own class

    def training_grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        with self._count.of(lambda: _examples(batch)):
            return super().training_grad(theta, batch, feature_loss)

    def gradient_pieces(self, mask: Tensor | None) -> GradientPieces:
        pieces = super().gradient_pieces(mask)

        def gradient(theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None) -> list[Tensor]:
            with self._count.of(lambda: _examples(batch)):
                return pieces.gradient(theta, batch, feature_loss)

        return replace(pieces, gradient=gradient)

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, proximal: ProximalTerm | None = None,
        feature_loss: FeatureLoss | None = None,
    ) -> None:  # fmt: skip
        with self._count.of(lambda: _examples(batch)):
            super().descend_(theta, batch, lr, proximal, feature_loss)

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        with self._count.of(lambda: _examples(batch)):
            super().take_step_(theta, batch, lr, terms)

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        loop = super().descent(theta, steps, terms, mask)
        return None if loop is None else _CountingDescent(loop, self._count)

    def whole_loop(self, batches: Batches) -> WholeLoop | None:
        loop = super().whole_loop(batches)
        if loop is None:
            return None

        def counted(
            theta: Tensor, rate: float, terms: Terms, mask: Tensor | None, moments: Mapping[str, Tensor]
        ) -> None:
            with self._count.of(lambda: _all_examples(batches)):
                loop(theta, rate, terms, mask, moments)

        return counted

    def whole_program(self, streams: Sequence[Batches], models: Mapping[str, Tensor]) -> WholeProgram | None:
        run = super().whole_program(streams, models)
        if run is None:
            return None

        def counted(program: Sequence[Instruction], rows: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> None:
            with self._count.of(
                lambda: sum(_gradients(step) * _all_examples(streams[_stream(step)]) for step in program)
            ):
                run(program, rows, numbers)

        return counted

    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        with self._count.of(lambda: _examples(batch)):
            return super().example_norms(theta, batch, feature_loss)


class _CountingDescent(Descent):
    def __init__(self, loop: Descent, count: GradientCount) -> None:
        self._loop, self._count = loop, count

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        with self._count.of(lambda: _examples(batch)):
            self._loop.step(rows, batch, lr)

    def result(self) -> Tensor:
        return self._loop.result()


def _examples(batch: Batch) -> int:
    return int(torch.count_nonzero(batch.weight)) if batch.may_pad else batch.weight.numel()


def _all_examples(batches: Batches) -> int:
    """Examples of all batches together, from the numbers of steps alone."""
    count, steps, most = batches.split.count, batches.steps, batches.training.batch
    if batches.training.epochs is None:
        return int((steps * count.clamp_max(most)).sum())
    per_epoch = ((count + most - 1) // most).clamp_min(1)
    return int((steps // per_epoch * count + steps % per_epoch * most).sum())


def _gradients(step: Instruction) -> int:
    return step.times if isinstance(step, GradientStep) else int(isinstance(step, Gradient))


def _stream(step: Instruction) -> int:
    return step.stream if isinstance(step, GradientStep | Gradient) else 0
