"""What recipes of Self-FL measure beyond the figures of a run."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import torch

from kinfed.engine import task_for
from kinfed.records import RunFiles, RunRecord
from kinfed.runs import RunInputs, read_config
from kinfed_papers.recipe import Measurements

ROUGHNESS = "personal.second_difference"
TRAINING_ACCURACY = "train.accuracy"


def roughness(run: RunRecord) -> Measurements:
    """How much the accuracy of personal models bends: the mean absolute second difference |a_{t+1} − 2 a_t + a_{t−1}|
    of evaluations in the second half of the rounds. The paper sees "more stable convergence" in its curves and prints
    no number for it. Second differences, because a curve that still rises steadily is no rougher for that."""
    measured: Measurements = {}
    for trial in run.trials:
        curve = [
            (record.all_clients or record.metrics)["personal"]["accuracy"]
            for record in trial.rounds
            if "personal" in record.metrics
        ]
        late = curve[len(curve) // 2 :]
        moves = [after - before for before, after in pairwise(late)]
        bends = [abs(after - before) for before, after in pairwise(moves)]
        if bends:
            measured.setdefault(trial.algorithm, {}).setdefault(ROUGHNESS, {})[trial.seed] = fmean(bends)
    return measured


def training_accuracy(run: RunRecord) -> Measurements:
    """Accuracy of the personal models on their clients' training examples, weighted by these; needs saved models."""
    config = read_config(run.path)
    inputs = RunInputs(config)
    measured: Measurements = {}
    for label in config.algorithms:
        for seed in config.seeds:
            models = RunFiles(run.path).models(label, seed).personal
            data, task = inputs.federation(seed), inputs.task()
            score = task_for(task, models).score(models, data.cohort(torch.arange(len(data)), seed, 0).train)
            accuracy = float(score.correct.sum() / score.count.sum())
            measured.setdefault(label, {}).setdefault(TRAINING_ACCURACY, {})[seed] = accuracy
    return measured
