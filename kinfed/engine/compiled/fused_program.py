"""Update programs (kinfed.engine.contract.update_program) as the tables that compiled loops
(kinfed.engine.compiled.program_steps) read.

One row per instruction, of whole numbers (`what`) and of numbers (`amount`). Models and clients' numbers are places in
the tables of their addresses and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Mix, Norm, changes

MIX, STEP, GRADIENT, ADD, NORM, COLLECT = range(6)
# Of `what`. RESULT: the model that changes. AT: the base of a mixture or sum, where the gradient is taken, or what is
# measured or collected. OTHER: toward which one mixes, what is added, or the center of a proximal term. NUMBER: what a
# rate is multiplied with, or where windows begin. LEARNT: the number that changes, or the width of windows.
KIND, RESULT, AT, OTHER, NUMBER, TIMES, STREAM, LEARNT, BASE, TOWARD, FIRST_ONLY = range(11)
# Of `amount`. RATE: the share of a mixture, or the scale of a sum or norm, too.
RATE, LAM, DECAY, LEARN_RATE, POWER, LEAST = range(6)
NONE = -1  # instead of a place


@dataclass(frozen=True)
class Program:
    what: np.ndarray  # [instructions, 11] int64
    amount: np.ndarray  # [instructions, 6] float64
    models: tuple[str, ...]  # those that are kept, and then those that last for one batch
    numbers: tuple[str, ...]  # the same

    @property
    def gradients(self) -> int:
        """Gradients that are computed with every batch."""
        kind = self.what[:, KIND]
        return int(self.what[(kind == STEP) | (kind == GRADIENT), TIMES].sum())

    @property
    def learns(self) -> bool:
        return bool(((self.what[:, KIND] == STEP) & (self.what[:, LEARNT] != NONE)).any())


def make_program(
    program: Sequence[Instruction], models: Mapping[str, Tensor], numbers: Mapping[str, Tensor]
) -> Program:
    all_numbers = tuple(dict.fromkeys([*numbers, *(step.number for step in program if isinstance(step, Norm))]))
    changed = [name for step in program for name in changes(step) if name not in all_numbers]
    names = tuple(dict.fromkeys([*models, *changed]))
    place = {name: number for number, name in enumerate(names)}
    value = {None: NONE} | {name: number for number, name in enumerate(all_numbers)}
    what, amount = np.zeros((len(program), 11), np.int64), np.zeros((len(program), 6))
    what[:, [OTHER, NUMBER, LEARNT]], what[:, TIMES] = NONE, 1
    for step, whole, real in zip(program, what, amount, strict=True):
        _describe(step, place, value, whole, real)
    return Program(what, amount, names, all_numbers)


def _describe(
    step: Instruction, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    match step:
        case Mix():
            share_by, share = (step.share, 1.0) if isinstance(step.share, str) else (None, step.share)
            whole[:TIMES] = MIX, place[step.result], place[step.base], place[step.toward], value[share_by]
            real[RATE] = share
        case Add():
            direction, factor = place[step.direction], value[step.number]
            whole[:TIMES] = ADD, place[step.result], place[step.base], direction, factor
            real[RATE] = step.scale
        case Gradient():
            whole[:OTHER], whole[STREAM] = (GRADIENT, place[step.result], place[step.at]), step.stream
            real[[RATE, DECAY]] = -1.0, step.decay  # a step of length -1 from zero
        case Norm():
            whole[[KIND, AT, LEARNT]] = NORM, place[step.model], value[step.number]
            real[[RATE, POWER, LEAST]] = step.scale, step.power, step.least
        case Collect():
            whole[:OTHER] = COLLECT, place[step.result], place[step.model]
            whole[[NUMBER, LEARNT]] = value[step.begin], value[step.width]
        case GradientStep():
            _describe_step(step, place, value, whole, real)


def _describe_step(
    step: GradientStep, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    lam, center = (0.0, NONE) if step.proximal is None else (step.proximal[0], place[step.proximal[1]])
    whole[:NUMBER] = STEP, place[step.model], place[step.at or step.model], center
    whole[[NUMBER, TIMES, STREAM]] = value[step.number], step.times, step.stream
    real[:LEARN_RATE] = step.rate, lam, step.decay
    if (learn := step.learn) is not None:
        whole[LEARNT:] = value[learn.number], place[learn.base], place[learn.toward], learn.first_only
        real[LEARN_RATE] = learn.rate
