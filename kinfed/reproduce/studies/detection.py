"""Detectors of a run against the model they started from: false accepts where false rejects are the same.

    by_method = detections("runs/wakeword")
    by_method["selffl", 0].personal["A", "normal"].ratio         below 1: fewer false accepts than the common start

For runs whose data have two classes (the second is to be detected) and tags (the state a device is in), with a common
start: `pretrain` or `warm_start`. The start is the baseline. It works at the threshold at which it rejects a given
share of all positive test examples, whatever their type and state; every type and state is then compared by itself, at
the false rejects that the baseline has there (runs.metrics.relative_false_accepts). Examples of several clients of a
type are put together, each scored by its own client's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinfed.data.federation import Federation
from kinfed.engine.mixture import task_for
from kinfed.engine.task import Task
from kinfed.errors import ConfigError, DataError
from kinfed.runs.adopt import FinishedRun
from kinfed.runs.experiment import Experiment
from kinfed.runs.folder import RunFolder
from kinfed.runs.metrics import RelativeFalseAccepts, relative_false_accepts
from kinfed.runs.observer import NullObserver

FALSE_REJECT = 0.05
_AT_ONCE = 500

ByCell = Mapping[tuple[str, str], RelativeFalseAccepts]  # (type, state) -> what was found


@dataclass(frozen=True)
class Detections:
    """A method under one seed. Cells in which the two rates do not exist are absent."""

    personal: ByCell
    server_model: ByCell | None  # the server model, where there is one


def detections(folder: Path | str, false_reject: float = FALSE_REJECT) -> dict[tuple[str, int], Detections]:
    """Every method and seed of a finished run that kept its models, against the run's common start."""
    folder = Path(folder)
    found: dict[tuple[str, int], Detections] = {}
    experiment: Experiment | None = None
    for seed in FinishedRun.open(folder).config.seeds:
        run = FinishedRun.open(folder, seed)
        experiment = experiment or Experiment(run.config, None, None, NullObserver(), lambda: False)
        task, data, start = experiment.task(), experiment.federation(seed), run.start()
        if start is None:
            raise ConfigError(
                f"{folder} has no common start to compare with; run it with --set pretrain=... or --warm-start"
            )
        baseline = scores(task, start.expand(len(data), -1), data)
        threshold = operating_threshold(baseline, data, false_reject)
        for label in run.config.algorithms:
            models = RunFolder(folder).read_models(label, seed)
            server_model = None
            if models.server_model is not None:
                server_model = by_cell(
                    scores(task, models.server_model.expand(len(data), -1), data), baseline, data, threshold
                )
            personal = by_cell(scores(task, models.personal, data), baseline, data, threshold)
            found[label, seed] = Detections(personal, server_model)
    return found


@torch.no_grad()
def scores(task: Task, theta: Tensor, data: Federation) -> Tensor:
    """[T] log-odds of detection for every entry of data.test.rows, by the model theta[k] of its client k."""
    if data.num_classes != 2:
        raise DataError(f"a detector tells two classes apart; these data have {data.num_classes}")
    model = task_for(task, theta)
    out = []
    for client, rows in enumerate(data.test.lists()):
        for part in torch.split(rows, _AT_ONCE):
            z = model.logits(theta[client : client + 1], data.features.gather(part)[None])[0]
            out.append((z[:, 1] - z[:, 0]).to("cpu", torch.float64))
    return torch.cat(out)


def operating_threshold(baseline: Tensor, data: Federation, false_reject: float = FALSE_REJECT) -> float:
    """The lowest threshold at which the baseline rejects at least this share of all positive test examples."""
    if not 0 < false_reject < 1:
        raise ConfigError(f"false_reject is a share of positive examples between 0 and 1; got {false_reject}")
    positive = baseline[data.labels[data.test.rows] == 1].sort().values
    if len(positive) < 2:
        raise DataError(f"an operating point needs positive test examples; there are {len(positive)}")
    return float(positive[min(math.ceil(false_reject * len(positive)), len(positive) - 1)])


def by_cell(found: Tensor, baseline: Tensor, data: Federation, threshold: float) -> ByCell:
    """Relative false accepts for every type of client and state of example."""
    if data.tags is None or data.tag_names is None or data.groups is None or data.group_names is None:
        raise DataError("detection is told by group of clients and tag of examples; these data have not both")
    rows, owner = data.test.rows, data.test.owner
    positive = data.labels[rows] == 1
    cells = {}
    for g, group in enumerate(data.group_names):
        for t, tag in enumerate(data.tag_names):
            here = (data.groups[owner] == g) & (data.tags[rows] == t)
            if not bool(positive[here].any()) or bool(positive[here].all()):
                continue
            try:
                cells[group, tag] = relative_false_accepts(found[here], baseline[here], positive[here], threshold)
            except DataError:  # too few positive examples for an operating point, or a diverged model's scores
                continue
    return cells
