"""Baselines without a model: the share of each class, or the mean, of a client's own training rows.

Every client predicts the same for all its test rows: the class that most of its training rows have, with the shares of
classes there as probabilities ((n_c + 1) / (n + C), so that a class it has never seen has a chance), or the mean of its
training target. A method that does no better has learnt nothing of the features. It costs nothing and sends nothing, is
the same for all methods of a seed, and stands in every table of results, never among the methods that are ranked.
"""

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Federation, Problem
from kinfed.engine import METRICS, Judged, Objective, Score
from kinfed.records import Baseline
from kinfed.runs.results import ClientTable

MAJORITY, MEAN = "majority class", "mean"


def baseline_name(problem: Problem) -> str:
    return MEAN if problem.is_regression else MAJORITY


def constant_outputs(data: Federation, ids: Tensor) -> Tensor:
    """[n, C] what each client of `ids` predicts for all its rows: log-probabilities, or the standardized mean."""
    if not data.problem.is_regression:
        counts = data.class_counts()[ids].to(torch.float64) + 1
        return (counts / counts.sum(1, keepdim=True)).log()
    train = data.train
    sums = torch.zeros(len(train), dtype=torch.float64).index_add_(0, train.owner, data.targets[train.rows].double())
    return (sums / train.count)[ids, None]


def baseline_score(data: Federation, ids: Tensor, objective: Objective, metric: str | None) -> Score:
    """The sums of every client's test rows, as of any model."""
    test = data.test.take(ids)
    output, target = constant_outputs(data, ids)[test.owner], data.targets[test.rows]
    target = target.to(torch.float64) if data.problem.is_regression else target
    losses = objective.losses(output, target)
    judged = Judged(output.numpy(), target.numpy(), test.owner.numpy(), len(ids), data.problem)
    right = np.zeros(len(losses)) if data.problem.is_regression else judged.predicted == judged.target
    correct = torch.from_numpy(judged.total(right).astype(np.float64))
    score = Score(correct, torch.from_numpy(judged.total(losses.numpy())), test.count)
    return score.judged_by(METRICS.headline(data.problem, metric), judged, ids)


def make_baseline(
    seed: int, score: Score, ids: Tensor, clients: ClientTable, problem: Problem, metric: str | None
) -> Baseline:
    metrics = score.summary(clients.n_train[ids], not problem.is_regression)
    values = score.metric(METRICS.headline(problem, metric).name).tolist()
    names = [clients.names[k] for k in ids.tolist()]
    by_client = {name: None if value != value else value for name, value in zip(names, values, strict=True)}
    return Baseline(seed, baseline_name(problem), metrics, by_client)
