"""Baselines without a model: the share of each class, the mean, or the hazard, of a client's own training rows.

Every client predicts the same for all its test rows: the class that most of its training rows have, with the shares of
classes there as probabilities ((n_c + 1) / (n + C), so that a class it has never seen has a chance), the mean of its
training target, or the chance of outliving each period that its training rows had (with one event in all more, shared
out as those of all clients). A method that does no better has learnt nothing of the features. It costs nothing and
sends nothing, is the same for all methods of a seed, and stands in every table of results, never among the methods that
are ranked.
"""

import numpy as np
import torch
from torch import Tensor

from kinfed.data import IGNORED, Federation, Problem
from kinfed.engine import METRICS, Judged, Objective, Score
from kinfed.engine.scoring import position_sums
from kinfed.records import Baseline
from kinfed.runs.results import ClientTable

MAJORITY = "majority class"
NAMES = {
    "regression": "mean", "counts": "mean", "survival": "hazard", "ordinal": "shares of classes",
    "multilabel": "shares of labels", "dense": "shares of classes",
}  # fmt: skip


def baseline_name(problem: Problem) -> str:
    return NAMES.get(problem.kind, MAJORITY)


def constant_outputs(data: Federation, ids: Tensor) -> Tensor:
    """[n, ...] what each client of `ids` predicts for all its rows, as outputs of a model."""
    problem = data.problem
    if problem.classifies:
        counts = data.class_counts()[ids].to(torch.float64) + 1
        return (counts / counts.sum(1, keepdim=True)).log()
    if problem.kind == "ordinal":
        counts = data.class_counts()[ids].to(torch.float64) + 1
        return torch.logit(1 - (counts / counts.sum(1, keepdim=True)).cumsum(1)[:, :-1])
    return torch.stack([_constant(problem, data.targets[rows].double()) for rows in data.train.take(ids).lists()])


def _constant(problem: Problem, targets: Tensor) -> Tensor:
    """[...] outputs for one client's training targets [n, ...]."""
    if problem.kind == "survival":
        ends, hazards = (torch.tensor(values, dtype=torch.float64) for values in (problem.periods, problem.hazards))
        time, event = targets[:, :1], targets[:, 1:] > 0
        column, number = torch.arange(len(ends)), torch.searchsorted(ends, time.contiguous())
        died = ((column == number) & event).sum(0)
        outlived = ((column < number) | ((ends == time) & ~event)).sum(0)
        prior = hazards / hazards.sum()  # one event more, as rare in a period as everywhere
        chance = (died + prior) / (died + outlived + prior / -torch.expm1(-hazards))
        ratio = (-torch.log1p(-chance.clamp_max(0.999)) / hazards).log()
        return (hazards * ratio.exp()).sum().div(hazards.sum()).log()[None] if problem.proportional else ratio
    if problem.kind == "counts":
        mean = float(problem.mean)  # type: ignore[arg-type]  # counts have one
        return ((targets.sum() + 0.5) / (len(targets) * mean + 0.5)).log()[None]
    if problem.kind == "dense":
        known = targets[targets != IGNORED].long()
        counts = torch.bincount(known, minlength=problem.num_classes).double() + 1
        return (counts / counts.sum()).log().expand(*problem.shape, -1)
    known = (~targets.isnan()).sum(0)
    if problem.kind == "multilabel":
        return torch.logit((targets.nansum(0) + 0.5) / (known + 1))
    means = targets.nansum(0) / known.clamp_min(1)
    return means if problem.shape else means[None]


def baseline_score(
    data: Federation, ids: Tensor, objective: Objective, metric: str | None, shape: tuple[int, ...] | None = None
) -> Score:
    """The sums of every client's test rows, as of any model. `shape` is that of models' outputs for an example: they
    may have the classes of positions on their first axis, and a loss of one's own is written for that."""
    test = data.test.take(ids)
    output, target = constant_outputs(data, ids)[test.owner], data.targets[test.rows]
    target = target.to(torch.float64) if target.is_floating_point() else target
    losses = objective.losses(output if shape in (None, output.shape[1:]) else output.movedim(-1, 1), target)
    if data.problem.kind == "dense":
        output = position_sums(output[:, None], target[:, None], data.problem)[:, 0]
    judged = Judged(output.numpy(), target.numpy(), test.owner.numpy(), len(ids), data.problem)
    right = judged.predicted == judged.target if data.problem.classifies else np.zeros(len(losses))
    correct = torch.from_numpy(judged.total(right).astype(np.float64))
    score = Score(correct, torch.from_numpy(judged.total(losses.numpy())), test.count)
    return score.judged_by(METRICS.headline(data.problem, metric), judged, ids)


def make_baseline(
    seed: int, score: Score, ids: Tensor, clients: ClientTable, problem: Problem, metric: str | None
) -> Baseline:
    metrics = score.summary(clients.n_train[ids], problem.classifies)
    values = score.metric(METRICS.headline(problem, metric).name).tolist()
    names = [clients.names[k] for k in ids.tolist()]
    by_client = {name: None if value != value else value for name, value in zip(names, values, strict=True)}
    return Baseline(seed, baseline_name(problem), metrics, by_client)
