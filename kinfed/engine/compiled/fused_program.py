"""Moves of several models (kinfed.engine.contract.update_program) as the tables that compiled loops
(kinfed.engine.compiled.program_steps) read.

One row per move, of whole numbers (`what`) and of numbers (`amount`). Models and clients' numbers are places in the
tables of their addresses and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Mix, Move, Norm, changes

MIX, STEP, GRADIENT, ADD, NORM, COLLECT = range(6)
# Of `what`. RESULT: the model that changes. AT: the base of a mixture or sum, where the gradient is taken, or what is
# measured or collected. OTHER: toward which one mixes, what is added, or the center of a pull. NUMBER: what a rate is
# multiplied with, or where windows begin. LEARNT: the number that changes, or the width of windows.
KIND, RESULT, AT, OTHER, NUMBER, TIMES, STREAM, LEARNT, BASE, TOWARD, FIRST_ONLY = range(11)
# Of `amount`. RATE: the share of a mixture, or the scale of a sum or norm, too.
RATE, LAM, DECAY, LEARN_RATE, POWER, LEAST = range(6)
NONE = -1  # instead of a place


@dataclass(frozen=True)
class Program:
    what: np.ndarray  # [moves, 11] int64
    amount: np.ndarray  # [moves, 6] float64
    models: tuple[str, ...]  # those that are kept, and then those that last for one batch
    numbers: tuple[str, ...]  # the same

    @property
    def gradients(self) -> int:
        """With every batch."""
        kind = self.what[:, KIND]
        return int(self.what[(kind == STEP) | (kind == GRADIENT), TIMES].sum())

    @property
    def learns(self) -> bool:
        return bool(((self.what[:, KIND] == STEP) & (self.what[:, LEARNT] != NONE)).any())


def make_program(moves: Sequence[Move], models: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> Program:
    all_numbers = tuple(dict.fromkeys([*numbers, *(move.number for move in moves if isinstance(move, Norm))]))
    changed = [name for move in moves for name in changes(move) if name not in all_numbers]
    names = tuple(dict.fromkeys([*models, *changed]))
    place = {name: number for number, name in enumerate(names)}
    value = {None: NONE} | {name: number for number, name in enumerate(all_numbers)}
    what, amount = np.zeros((len(moves), 11), np.int64), np.zeros((len(moves), 6))
    what[:, [OTHER, NUMBER, LEARNT]], what[:, TIMES] = NONE, 1
    for move, whole, real in zip(moves, what, amount, strict=True):
        _describe(move, place, value, whole, real)
    return Program(what, amount, names, all_numbers)


def _describe(
    move: Move, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    match move:
        case Mix():
            share_by, share = (move.share, 1.0) if isinstance(move.share, str) else (None, move.share)
            whole[:TIMES] = MIX, place[move.result], place[move.base], place[move.toward], value[share_by]
            real[RATE] = share
        case Add():
            direction, factor = place[move.direction], value[move.number]
            whole[:TIMES] = ADD, place[move.result], place[move.base], direction, factor
            real[RATE] = move.scale
        case Gradient():
            whole[:OTHER], whole[STREAM] = (GRADIENT, place[move.result], place[move.at]), move.stream
            real[[RATE, DECAY]] = -1.0, move.decay  # a step of length -1 from zero
        case Norm():
            whole[[KIND, AT, LEARNT]] = NORM, place[move.model], value[move.number]
            real[[RATE, POWER, LEAST]] = move.scale, move.power, move.least
        case Collect():
            whole[:OTHER] = COLLECT, place[move.result], place[move.model]
            whole[[NUMBER, LEARNT]] = value[move.begin], value[move.width]
        case GradientStep():
            _describe_step(move, place, value, whole, real)


def _describe_step(
    move: GradientStep, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    lam, center = (0.0, NONE) if move.pull is None else (move.pull[0], place[move.pull[1]])
    whole[:NUMBER] = STEP, place[move.model], place[move.at or move.model], center
    whole[[NUMBER, TIMES, STREAM]] = value[move.number], move.times, move.stream
    real[:LEARN_RATE] = move.rate, lam, move.decay
    if (learn := move.learn) is not None:
        whole[LEARNT:] = value[learn.number], place[learn.base], place[learn.toward], learn.first_only
        real[LEARN_RATE] = learn.rate
