"""A watch over a deployed model: does it still do as well as the site's own, do its sets cover, have columns moved?

New labelled rows are read in their order, as they came. Two e-processes are kept (kinfed.theory.certificates):

    harm        loss of the deployed model less that of the site's own: Brier's score halved, of numbers the squared
                error in units of (3 × the 90 % threshold)², at most 1; both lie in [0, 1]
    coverage    1 where a row is outside its prediction set, less 1 − level

An alarm is raised where one of them exceeds 1 / α (20 for 5 %). One may look after every row and stop at will: the
chance of a false alarm is at most α in all that time, each. The price is power: small harm takes many rows to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfed.data import Problem, as_table
from kinfed.data.sources import read_table
from kinfed.errors import ConfigError, DataError
from kinfed.serving import ModelPipeline, model_of_run
from kinfed.tabular.fit_result import RUNS, FitResult
from kinfed.tabular.portfolio import ALONE
from kinfed.theory import certificates

Floats = NDArray[np.float64]
LEVEL = 0.9  # of the sets whose coverage is watched
MOVED = 0.5  # standard deviations by which the mean of a column has moved to be named


@dataclass(frozen=True)
class Watch:
    rows: int
    harm: float  # mean loss of the deployed model less that of the other; positive is worse
    harm_evidence: Floats  # [n]
    covered: float | None  # share of rows inside their sets; None if the model has no sets
    coverage_evidence: Floats  # [n]; empty without sets
    moved: dict[str, float]  # by column: standard deviations by which its mean has moved, the largest first
    notes: Sequence[str]
    alpha: float = 0.05

    def alarm(self, evidence: Floats) -> int | None:
        """The first row after which the evidence is beyond 1 / α; None if there is none."""
        beyond = np.flatnonzero(evidence > 1 / self.alpha)
        return int(beyond[0]) + 1 if len(beyond) else None

    @property
    def is_alarmed(self) -> bool:
        return self.alarm(self.harm_evidence) is not None or self.alarm(self.coverage_evidence) is not None

    def sentences(self) -> list[str]:
        """What a person should know, alarms first."""
        texts = []
        row = self.alarm(self.harm_evidence)
        most = max(self.harm_evidence, default=1.0)
        if row is not None:
            texts.append(f"ALARM: since row {row} the rows show that the model is worse than the site's own.")
        else:
            evidence = f"evidence at most {most:.2g}, an alarm at {1 / self.alpha:g}"
            texts.append(f"No sign that the model is worse than the site's own ({evidence}).")
        if self.covered is not None:
            row = self.alarm(self.coverage_evidence)
            head = f"ALARM: since row {row} the rows show that sets" if row is not None else "Sets"
            texts.append(f"{head} of {LEVEL:.0%} hold the truth in {self.covered:.1%} of {self.rows} rows.")
        if self.moved:
            shown = ", ".join(
                f"{name} by {shift:+.1f}".replace("-", "−") for name, shift in list(self.moved.items())[:5]
            )
            texts.append(f"Columns whose mean has moved, in standard deviations of training rows: {shown}.")
        return [*texts, *self.notes]


def watch_models(
    model: ModelPipeline, against: ModelPipeline, table: Any, label_column: str, alpha: float = 0.05
) -> Watch:
    """Watch a model on new labelled rows, a file or a frame, in their order, beside the site's own model."""
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha is the chance of a false alarm, between 0 and 1; got {alpha:g}")
    rows = read_table(Path(table)) if isinstance(table, str | Path) else as_table(table)
    where = str(table) if isinstance(table, str | Path) else "the table"
    level = LEVEL if "sets" in model.about else None
    problem = model.inputs.problem
    truth = truth_of(rows, label_column, problem, where)
    one, other = model.predictions(rows, where=where, level=level), against.predictions(rows, where=where)
    if problem.is_regression:
        scale = float(problem.scale)  # type: ignore[arg-type]  # a single number has one
        threshold = model.set_threshold(LEVEL) if level is not None else scale
        reach = 3 * (threshold if isfinite(threshold) else scale)
        losses = [np.minimum(1.0, ((p.outputs.double().numpy() - truth) / reach) ** 2) for p in (one, other)]
        outside = np.abs(one.outputs.double().numpy() - truth) > threshold
    else:
        one_hot = np.eye(problem.num_classes)[truth]
        losses = [((p.outputs.double().numpy() - one_hot) ** 2).sum(1) / 2 for p in (one, other)]
        outside = np.array([problem.class_labels[i] not in inside for i, inside in zip(truth, one.sets, strict=True)]
                           if level is not None else [], dtype=bool)  # fmt: skip
    harm = losses[0] - losses[1]
    covered = None if level is None else float(1 - outside.mean())
    missed = np.where(outside, LEVEL, LEVEL - 1) if level is not None else np.zeros(0)
    evidence = [certificates.e_process(values) for values in (harm, missed)]
    moved = _moved(model, rows, where)
    return Watch(len(harm), float(harm.mean()), evidence[0], covered, evidence[1], moved, one.notes, alpha)


def watch_site(result: FitResult, site: str, table: Any, label_column: str | None = None, alpha: float = 0.05) -> Watch:
    """Watch what a site was handed by a fit in a folder, beside the model that it trained alone."""
    label = label_column or result.target
    if not label:
        raise ConfigError("which column holds the truth? Give --label-column")
    if result.folder is None:
        raise ConfigError("the site's own model is in the folder of a fit; fit with out=FOLDER")
    result.site(site)
    alone = model_of_run(result.folder / RUNS / result.contender(ALONE).run, site, ALONE)
    return watch_models(result.model(site), alone, table, label, alpha)


def _moved(model: ModelPipeline, rows: Any, where: str) -> dict[str, float]:
    """Features whose mean lies further than MOVED training deviations from that of training rows."""
    learnt = model.inputs.preprocessing
    if learnt is None or learnt.mean is None or learnt.std is None:
        return {}
    features, _ = model.encode(rows, where)
    raw = features.raw.double()
    shift = (raw.mean(0) - learnt.mean.double()) / learnt.std.double()
    named = zip(learnt.features, shift.tolist(), strict=True)
    return dict(sorted(((name, by) for name, by in named if abs(by) > MOVED), key=lambda pair: -abs(pair[1])))


def truth_of(rows: Any, column: str, problem: Problem, where: str) -> NDArray[Any]:
    """[n] the numbers of classes, or the numbers, in a column of a table."""
    if column not in rows.column_names:
        raise DataError(f"{where} has no column {column!r}; it has {', '.join(rows.column_names)}")
    if not (problem.classifies or problem.is_single_number):
        raise ConfigError(f"this is for classes or single numbers, and the problem is {problem.in_words()}")
    cells = rows[column].to_pylist()
    return _numbers(cells, column) if problem.is_regression else _classes(cells, problem.class_labels, column)


def _numbers(cells: list[Any], column: str) -> Floats:
    try:
        values = np.array([float(cell) for cell in cells])
    except (TypeError, ValueError):
        raise DataError(f"column {column} must hold a number in every row") from None
    if not np.isfinite(values).all():
        raise DataError(f"column {column} must hold a number in every row")
    return values


def _classes(cells: list[Any], labels: list[str], column: str) -> NDArray[np.int64]:
    place = {label: index for index, label in enumerate(labels)}
    texts = ["" if cell is None else str(cell).strip() for cell in cells]
    if unknown := sorted({text for text in texts if text not in place}):
        raise DataError(
            f"column {column} holds {', '.join(map(repr, unknown[:3]))}, which the model does not know; its classes "
            f"are {', '.join(labels)}"
        )
    return np.array([place[text] for text in texts], dtype=np.int64)
