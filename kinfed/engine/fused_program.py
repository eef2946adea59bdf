"""Moves of several models (kinfed.engine.moves) as the tables that compiled loops (kinfed.engine.fused_moves) read.

One row per move, of whole numbers (`what`) and of numbers (`amount`). Models and clients' numbers are places in the
tables of their addresses and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kinfed.engine.moves import GradientStep, Mix, Move

MIX, STEP = range(2)
# Of `what`. RESULT: the model that changes. AT: the base of a mixture, or where the gradient is taken. OTHER: toward
# which one mixes, or the center of a pull.
KIND, RESULT, AT, OTHER, NUMBER, TIMES, STREAM, LEARNT, BASE, TOWARD, FIRST_ONLY = range(11)
RATE, LAM, DECAY, LEARN_RATE = range(4)  # of `amount`. RATE: the share of a mixture, too
NONE = -1  # instead of a place


@dataclass(frozen=True)
class Program:
    what: np.ndarray  # [moves, 11] int64
    amount: np.ndarray  # [moves, 4] float64
    models: tuple[str, ...]  # those that are kept, and then those that last for one batch
    numbers: tuple[str, ...]

    @property
    def learns(self) -> bool:
        return bool((self.what[:, LEARNT] != NONE).any())


def make_program(moves: Sequence[Move], models: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> Program:
    passing = dict.fromkeys(move.result for move in moves if isinstance(move, Mix) and move.result not in models)
    names = (*models, *passing)
    place = {name: number for number, name in enumerate(names)}
    value = {None: NONE} | {name: number for number, name in enumerate(numbers)}
    what, amount = np.zeros((len(moves), 11), np.int64), np.zeros((len(moves), 4))
    for move, whole, real in zip(moves, what, amount, strict=True):
        whole[LEARNT] = NONE
        if isinstance(move, Mix):
            by, share = (move.share, 1.0) if isinstance(move.share, str) else (None, move.share)
            whole[:NUMBER] = MIX, place[move.result], place[move.base], place[move.toward]
            whole[NUMBER], real[RATE] = value[by], share
        else:
            _describe(move, place, value, whole, real)
    return Program(what, amount, names, tuple(numbers))


def _describe(
    move: GradientStep, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    lam, center = (0.0, NONE) if move.pull is None else (move.pull[0], place[move.pull[1]])
    whole[:NUMBER] = STEP, place[move.model], place[move.at or move.model], center
    whole[[NUMBER, TIMES, STREAM]] = value[move.number], move.times, move.stream
    real[:LEARN_RATE] = move.rate, lam, move.decay
    if (learn := move.learn) is not None:
        whole[LEARNT:] = value[learn.number], place[learn.base], place[learn.toward], learn.first_only
        real[LEARN_RATE] = learn.rate
