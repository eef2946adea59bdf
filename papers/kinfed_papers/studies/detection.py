"""Detectors of a run against the model they started from: false accepts where false rejects are the same.

    by_method = detections("runs/wakeword")
    by_method["selffl", 0].personal["A", "normal"].ratio         below 1: fewer false accepts than the common start

For runs whose data have two classes (the second is to be detected) and tags (the state a device is in), with a common
start: `pretrain` or `warm_start`. The start is the baseline. It works at the threshold at which it rejects a given
share of all positive test examples, whatever their type and state; every type and state is then compared by itself, at
the false rejects that the baseline has there (`relative_false_accepts`). Examples of several clients of a
type are put together, each scored by its own client's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kinfed.data import Federation
from kinfed.engine import Task, task_for
from kinfed.engine.scoring import FALSE_REJECT, false_accepts_at, operating_points
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers import FinishedRun
from kinfed.runs import RunInputs

MIN_FALSE_REJECTS = 20  # fewer than this make a rate at which nothing can be compared
_EXAMPLES_AT_ONCE = 500


@dataclass(frozen=True)
class RelativeFalseAccepts:
    """Two detectors compared where they miss equally often; all rates in [0, 1]."""

    ratio: float | None  # false accepts of the model per false accept of the baseline; None if the baseline has none
    false_reject: float  # of both
    false_accept: float  # of the model
    baseline_false_accept: float
    baseline_threshold: float  # the one given, or the one it had to be moved to


ByCell = Mapping[tuple[str, str], RelativeFalseAccepts]  # (type, state)


@dataclass(frozen=True)
class Detections:
    """A method under one seed. Cells in which the two rates do not exist are absent."""

    personal: ByCell
    server_model: ByCell | None  # the server model, if there is one


def detections(folder: Path | str, false_reject: float = FALSE_REJECT) -> dict[tuple[str, int], Detections]:
    """Every method and seed of a finished run that kept its models, against the run's common start."""
    folder = Path(folder)
    by_method: dict[tuple[str, int], Detections] = {}
    inputs: RunInputs | None = None
    for seed in FinishedRun.open(folder).config.seeds:
        run = FinishedRun.open(folder, seed)
        inputs = inputs or RunInputs(run.config)
        task, data, start = inputs.task(), inputs.federation(seed), run.start()
        if start is None:
            raise ConfigError(
                f"{folder} has no common start to compare with; run it with --set pretrain=... or --warm-start"
            )
        baseline = scores(task, start.expand(len(data), -1), data)
        threshold = operating_threshold(baseline, data, false_reject)
        for label in run.config.algorithms:
            models = run.files.models(label, seed)
            server_model = None
            if models.server_model is not None:
                server_model = by_cell(
                    scores(task, models.server_model.expand(len(data), -1), data), baseline, data, threshold
                )
            personal = by_cell(scores(task, models.personal, data), baseline, data, threshold)
            by_method[label, seed] = Detections(personal, server_model)
    return by_method


@torch.no_grad()
def scores(task: Task, theta: Tensor, data: Federation) -> Tensor:
    """[T] log-odds of detection for every entry of data.test.rows, by the model theta[k] of its client k."""
    if data.num_classes != 2:
        raise DataError(f"a detector tells two classes apart; these data have {data.num_classes}")
    model = task_for(task, theta)
    out = []
    for client, rows in enumerate(data.test.lists()):
        for part in torch.split(rows, _EXAMPLES_AT_ONCE):
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


def by_cell(scores: Tensor, baseline: Tensor, data: Federation, threshold: float) -> ByCell:
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
                cells[group, tag] = relative_false_accepts(scores[here], baseline[here], positive[here], threshold)
            except DataError:  # too few positive examples for an operating point, or a diverged model's scores
                continue
    return cells


def relative_false_accepts(
    scores: Tensor, baseline_scores: Tensor, positive: Tensor, baseline_threshold: float
) -> RelativeFalseAccepts:
    """FA(model) / FA(baseline) with the model's threshold set so that FR(model) / FR(baseline) = 1; lower is better.

    `positive` [N] bool marks the examples that should be accepted; an example is accepted if score >= threshold.
    The baseline works at its given threshold. Where it rejects no positive there, the ratio of false rejects does
    not exist, and it is moved to the lowest threshold with at least 20 false rejects.
    Operating points are joined by straight lines, so that examples with equal scores, which no threshold can
    separate, give the rate expected if they were split at random. Among thresholds with the same false rejects the
    one with fewest false accepts counts, for the baseline as for the model: a model against itself gives exactly 1.
    """
    if positive.dtype != torch.bool:
        raise ValueError(f"positive must be bool, one entry per example; got {positive.dtype}")
    for name, values in (("scores", scores), ("baseline_scores", baseline_scores)):
        if values.shape != positive.shape or values.dim() != 1:
            raise ValueError(f"{name} must be [N] like positive {list(positive.shape)}; got {list(values.shape)}")
        if not torch.isfinite(values).all():
            raise DataError(f"{name} holds values that are not finite; a ROC needs one finite score per example")
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        raise DataError(
            f"false rejects and false accepts need positive and negative examples; got {positives} and {negatives}"
        )

    rejected = int((positive & (baseline_scores < baseline_threshold)).sum())
    if rejected == 0:
        if positives < MIN_FALSE_REJECTS:
            raise DataError(
                f"the baseline rejects none of {positives} positive examples at threshold {baseline_threshold:g}, and "
                f"another operating point needs at least {MIN_FALSE_REJECTS}; add positive test examples or "
                "raise the threshold"
            )
        thresholds, rejects, _ = operating_points(baseline_scores, positive)
        first = int((rejects >= MIN_FALSE_REJECTS).nonzero()[0])
        baseline_threshold, rejected = thresholds[first].item(), int(rejects[first])
    accepted = false_accepts_at(rejected, scores, positive)
    baseline_accepted = false_accepts_at(rejected, baseline_scores, positive)
    return RelativeFalseAccepts(
        ratio=accepted / baseline_accepted if baseline_accepted else None,
        false_reject=rejected / positives,
        false_accept=accepted / negatives,
        baseline_false_accept=baseline_accepted / negatives,
        baseline_threshold=baseline_threshold,
    )
