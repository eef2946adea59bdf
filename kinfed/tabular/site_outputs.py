"""Outputs of the models of a run on every test row of every site: the ground of choices and gains."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Federation, Problem
from kinfed.engine import Judged, task_for
from kinfed.errors import ConfigError
from kinfed.runs import RunOutcome, constant_outputs
from kinfed.tabular.portfolio import Contender


def outputs_on_test(result: RunOutcome, label: str, contender: Contender) -> Tensor:
    """[T, C] float64 logits, or [T, 1] numbers in the target's own unit, of the rows `federation.test.rows`."""
    method = result.result(label)
    data = result.federations[method.seed]
    ids = torch.arange(data.num_clients)
    theta, server = method.evaluation.models if contender.model == "personal" else None, method.server_models
    if contender.model == "server" and server is not None:
        theta = server.models[torch.zeros_like(ids) if server.assignment is None else server.assignment.clamp_min(0)]
    if theta is None:
        raise ConfigError(f"{label} has no {contender.model} model to judge")
    test = data.cohort(ids, method.seed, 0).test
    out = torch.empty(int(test.count.sum()), data.problem.outputs, dtype=torch.float64)
    start, task = data.test.offsets[:-1], task_for(result.task, theta)
    done = torch.zeros_like(start)
    with torch.no_grad():
        for rows, batch in test.in_order():
            z, valid = task.logits(theta[rows], batch.x).to("cpu", torch.float64), batch.weight.cpu() > 0
            place = (start + done)[rows][:, None] + torch.arange(valid.shape[1])
            out[place[valid]] = z[valid]
            done[rows] += valid.sum(1)
    return data.problem.restored(out) if data.problem.is_regression else out


def judged_rows(outputs: Tensor, rows: Tensor, owner: Tensor, data: Federation) -> Judged:
    """The rows of `data` in order of their sites, each as often as its weight says; outputs of a regression are in the
    target's own unit."""
    problem, labels = data.problem, data.labels[rows]
    if problem.is_regression:
        problem = Problem.of_numbers()
    else:
        outputs = torch.nan_to_num(outputs, nan=0.0, posinf=1e30, neginf=-1e30)
    weight = None if data.weights is None else data.weights[rows].double().numpy()
    return Judged(outputs.numpy(), labels.numpy(), np.asarray(owner), data.num_clients, problem, weight=weight)


def judged_test(outputs: Tensor, data: Federation) -> Judged:
    return judged_rows(outputs, data.test.rows, data.test.owner, data)


def judged_baseline(data: Federation) -> Judged:
    """Every site's test rows by the shares of classes or the mean of its own training rows (kinfed.runs.baseline): what
    it takes no model to reach."""
    outputs = constant_outputs(data, torch.arange(data.num_clients))[data.test.owner]
    return judged_test(data.problem.restored(outputs) if data.problem.is_regression else outputs, data)


def judged_training(outputs: Tensor, data: Federation, places: Tensor) -> Judged:
    """The entries `places`, ascending, of `data.train.rows`; outputs [T, C] are of all of them."""
    train = data.train
    return judged_rows(outputs[places], train.rows[places], train.owner[places], data)
