"""Losses of boosted trees: gradient g and curvature h of every row at its score, in numpy.

squared      g = F − y                 h = 1              one score, the standardized number
logistic     g = p − y                 h = p (1 − p)      two classes, one score: the log-odds of the second
softmax      g_c = p_c − [y = c]       h_c = p_c (1 − p_c)   a score per class, one tree for all of them
poisson      g = e^F − y / mean        h = e^F            counts; one score, the log of their ratio to the mean
survival     g = Σ_k ∂_k               h = Σ_k ∂²_k       one score, the log hazard ratio of all periods k, of the loss
                                                          discrete_time
others       g of the objective        h = 1              absolute and Huber losses of numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinfed.engine.contract.losses import DiscreteTime, Poisson
from kinfed.engine.contract.objective import Objective, Squared
from kinfed.engine.contract.task import Task
from kinfed.errors import ConfigError

Array = np.ndarray[Any, Any]
LARGEST = 30.0  # log-odds that are told from certainty
LEAST_CURVATURE = 1e-6  # of a class that is as good as certain
FITTING = {  # objectives, by kind of problem
    "binary": Objective, "multiclass": Objective, "regression": Objective, "counts": Poisson, "survival": DiscreteTime,
}  # fmt: skip


@dataclass(frozen=True)
class TreeLoss:
    """The loss of a problem with `outputs` logits, or one number."""

    objective: Objective
    outputs: int

    @classmethod
    def of_task(cls, task: Task) -> TreeLoss:
        """The loss that models of the task are trained with."""
        problem = task.problem
        if problem is None:
            return cls(task.objective, task.head.outputs)
        return cls(task.objective, 1 if problem.kind == "survival" else problem.outputs)

    @classmethod
    def check(cls, task: Task) -> None:
        problem = task.problem
        if problem is None:
            return
        if problem.kind not in FITTING or (problem.kind != "survival" and problem.shape):
            raise ConfigError(
                f"trees learn classes, a number, counts and survival, and this is {problem.in_words()}; leave them out"
            )
        if type(task.objective) is not FITTING[problem.kind] and problem.kind in ("counts", "survival"):
            raise ConfigError(f"trees learn {problem.kind} by the loss of loss=auto; got {task.objective.name}")

    @property
    def scores(self) -> int:
        """C: scores of a row; one for two classes."""
        return 1 if self.outputs == 2 and self.objective.classifies else self.outputs

    @property
    def least_share(self) -> float:
        """Curvature of one row at most: what a number of rows means in sums of h. Of survival it has no bound."""
        return 0.25 if self.objective.classifies or isinstance(self.objective, DiscreteTime) else 1.0

    @property
    def is_logarithmic(self) -> bool:
        """Whether scores are logarithms, of which a whole step of Newton may go too far."""
        return self.objective.classifies or isinstance(self.objective, Poisson | DiscreteTime)

    @property
    def has_variance(self) -> bool:
        """Whether residuals have a variance φ of their own; that of classes is given by their probabilities."""
        return not self.objective.classifies and not isinstance(self.objective, DiscreteTime)

    def gradients(self, score: Array, y: Array) -> Array:
        """float32 [R, ..., 2C]: g, then h, at scores [R, ..., C] for targets y [R], of survival [R, 2]."""
        if isinstance(self.objective, DiscreteTime):
            died, outlived = self._periods(score, y)
            hazard = self._hazard(score)
            share = hazard / np.expm1(np.maximum(hazard, 1e-12))
            g = np.where(died, -share, np.where(outlived, hazard, 0)).sum(-1, keepdims=True)
            curvature = share * (hazard / -np.expm1(-np.maximum(hazard, 1e-12)) - 1)
            h = np.where(died, np.maximum(curvature, LEAST_CURVATURE), np.where(outlived, hazard, 0))
            return np.concatenate([g, h.sum(-1, keepdims=True)], -1).astype(np.float32)
        y = y.reshape(-1, *(1 for _ in score.shape[1:]))
        if not self.objective.classifies:
            if isinstance(self.objective, Poisson):
                ratio = np.exp(np.clip(score, -LARGEST, LARGEST))
                return np.concatenate([ratio - (y / self.objective.mean).astype(np.float32), ratio], -1)
            if isinstance(self.objective, Squared):
                g = score - y.astype(np.float32)
            else:
                z, target = (
                    torch.from_numpy(score.copy()),
                    torch.from_numpy(np.broadcast_to(y, score.shape)[..., 0].copy()),
                )
                g = self.objective.delta(z, target.to(z.dtype), torch.ones(target.shape)).numpy()
            return np.concatenate([g, np.ones_like(g)], -1)
        p = self.probabilities(score)
        target = (y == np.arange(1, 2) if self.scores == 1 else y == np.arange(self.scores)).astype(np.float32)
        return np.concatenate([p - target, np.maximum(p * (1 - p), np.float32(LEAST_CURVATURE))], -1)

    def probabilities(self, score: Array) -> Array:
        """[..., C] of every class, or of the second of two."""
        if self.scores == 1:
            p: Array = 1 / (1 + np.exp(-np.clip(score, -LARGEST, LARGEST)))
            return p
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return p

    def _hazard(self, score: Array) -> Array:
        """[R, ..., K] cumulative hazards within every period."""
        assert isinstance(self.objective, DiscreteTime)
        hazards: Array = np.array(self.objective.problem.hazards) * np.exp(np.clip(score, -LARGEST, LARGEST))
        return hazards

    def _periods(self, score: Array, y: Array) -> tuple[Array, Array]:
        """bool [R, 1, ..., K]: whether a row has its event in a period, and whether it outlives it."""
        assert isinstance(self.objective, DiscreteTime)
        ends, shape = np.array(self.objective.problem.periods), (-1, *(1 for _ in score.shape[1:]))
        time, event = y[:, 0].reshape(shape), y[:, 1].reshape(shape) > 0
        number, column = np.searchsorted(ends.astype(y.dtype), time), np.arange(len(ends))
        died = (column == number) & event
        return died, (column < number) | ((column == number) & ~event & (ends.astype(y.dtype) == time))

    def losses(self, score: Array, y: Array) -> Array:
        """[R, ...] the loss of every row, as reports have it."""
        if isinstance(self.objective, DiscreteTime):
            died, outlived = self._periods(score, y)
            hazard = self._hazard(score)
            of_event = -np.log(-np.expm1(-np.maximum(hazard, 1e-30)))
            sums: Array = np.where(died, of_event, np.where(outlived, hazard, 0)).sum(-1)
            return sums.astype(np.float32)
        if isinstance(self.objective, Squared):
            return (score[..., 0] - y.reshape(-1, *(1 for _ in score.shape[2:]))) ** 2 / 2
        shape = score.shape[:-1]
        z = torch.from_numpy(np.ascontiguousarray(score))
        if self.outputs != self.scores:
            z = torch.cat([torch.zeros_like(z), z], -1)
        target = torch.from_numpy(np.broadcast_to(y.reshape(-1, *(1 for _ in shape[1:])), shape).copy())
        target = target.to(torch.int64 if self.objective.classifies else z.dtype)
        losses: Array = self.objective.losses(z, target).numpy()
        return losses

    def start(self, share: Array) -> Array:
        """[..., C] scores of a model without features, from the mean of `targets`."""
        score = np.log(np.maximum(share, 1e-6)) if isinstance(self.objective, Poisson) else share
        if self.objective.classifies:
            share = np.clip(share, 1e-6, 1 - 1e-6)
            other = np.log(1 - share) if self.scores == 1 else np.log(share).mean(-1, keepdims=True)
            score = np.log(share) - other
        return np.asarray(score, np.float32)

    def targets(self, y: Array) -> Array:
        """float32 [R, C]: numbers whose mean tells `start`: the target, or whether a row is of the class."""
        if isinstance(self.objective, DiscreteTime):  # the hazard of all training rows is the start
            return np.zeros((len(y), 1), np.float32)
        if not self.objective.classifies:
            unit = self.objective.mean if isinstance(self.objective, Poisson) else 1.0
            return np.asarray(y[:, None] / unit, np.float32)
        classes = np.arange(1, 2) if self.scores == 1 else np.arange(self.scores)
        return np.asarray(y[:, None] == classes, np.float32)
