"""Columns that not every site has: the common ones go through the model, the others through a part of each site's own.

A site lacks a column that fewer than 15 % of its training rows (from 20 rows on) have a value in. Such cells are
missing by design: they say nothing of a row. Gaps at a site that has the column do, and are a feature as ever. A column
that at least a fifth of the sites lack is an *own column*, where sites have 50 training rows on average. What it adds
to the outputs is learnt at each site that has it, from its own rows, and nothing of that leaves:

    z_i = b + x_i'β + Σ_c u_ic'γ_c,     minimize Σ_i loss(z_i, y_i) + (|β|² + λ |γ|²) / 2                        (1)

x_i are the common columns, u_ic what own column c becomes, both with mean 0, and loss that of logistic regression (one
for each class of several) or half the squared error of the standardized number. λ is one of PENALTIES by CLOSE_FOLDS
parts of the site's rows; the last is infinite, the effect zero, and comes first among equals.

Models are fed the effects u_ic'γ_c as features in the unit of their outputs, the same for all sites, and zero at sites
that lack the column; β is forgotten. The effect of a training row is that of a model which did not see it, so that who
learns from effects finds them as good as they will be on new rows. Beside it stands what the column buys: by how much
the loss falls on rows that were not learnt from, with the common columns and it, at the fixed penalty MODERATE.

(Instead, the weights of own columns in a network could stay with their site, as the last layer does in FedPer. Every
method would have to know of it, and trees and mixed models have no such weights.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.column_rule import choose_encoding
from kinfed.data.preprocessing.column_statistics import ReadTable, TableStatistics, lacks
from kinfed.data.preprocessing.encodings import Encoding, OwnColumn, PlainEncoding, SkippedColumn
from kinfed.data.preprocessing.text_scores import MOST_SCORES
from kinfed.errors import DataError

Array = np.ndarray[Any, Any]

LACKING_SITES = 0.2  # share of the sites that lack an own column, at least
ROWS_AT_SITE = 50  # training rows of a site on average, from which effects are learnt at sites
PENALTIES = (inf, 100.0, 25.0, 4.0, 1.0)  # λ
MODERATE = 4.0
CLOSE_FOLDS = 5
FEWEST_PERSONS = 5  # whose rows tell what a column buys
FEWEST_ROWS, FEWEST_OF_A_CLASS = 20, 8  # that an effect is learnt from
STEPS, CLOSE = 30, 1e-9  # of Newton's method: most of them, and the largest change that ends them


def outputs_of(problem: Problem) -> tuple[str, ...]:
    """Names of the outputs that own columns have an effect on: one for two classes or a number, one for each of several
    classes. Other kinds of problem have none, and all columns are common."""
    if problem.kind == "regression" and not problem.shape:
        return ("",)
    if not problem.classifies or problem.num_classes > MOST_SCORES:
        return ()
    return ("",) if problem.num_classes == 2 else tuple(f" on {name}" for name in problem.class_labels)


def read_own(record: object) -> list[OwnColumn]:
    """Own columns of a client, from JSON; DataError if they are none."""
    try:
        return _reader().validate_python(record)
    except ValidationError:
        raise DataError("the effects of a client's own columns cannot be read; export or save them again") from None


@functools.cache
def _reader() -> TypeAdapter[list[OwnColumn]]:
    return TypeAdapter(list[OwnColumn])


def as_own(
    encoding: Encoding | SkippedColumn, statistics: TableStatistics, scores: tuple[str, ...]
) -> Encoding | SkippedColumn:
    """An own column in place of the encoding that it would have as a common one; the encoding itself if it is one."""
    column, sites = statistics.columns[encoding.name], statistics.sites
    is_own = max(1, LACKING_SITES * sites) <= column.lacking_sites < statistics.large_sites
    if not (scores and is_own and isinstance(encoding, PlainEncoding) and statistics.rows >= ROWS_AT_SITE * sites):
        return encoding
    reason = f"{column.lacking_sites} of {sites} sites lack it: {encoding.reason} of its own at each that has it"
    return OwnColumn(encoding.name, reason, scores, encoding.kind, encoding.empty_sites)


@dataclass(frozen=True)
class RowsAtSite:
    """The training rows of a site: numbers of rows of the table, what is predicted, and whose they are."""

    rows: Array  # [m]
    labels: Array  # [m] classes, or numbers in standard deviations from the mean
    problem: Problem
    persons: Array | None = None  # [m]

    @property
    def targets(self) -> Array:
        """[m, S]"""
        if not self.problem.classifies:
            return self.labels.astype(np.float64)[:, None]
        first = 1 if self.problem.num_classes == 2 else 0
        return np.asarray(self.labels[:, None] == np.arange(first, self.problem.num_classes), np.float64)

    @property
    def whose(self) -> Array:
        """[m] the number of every row's person, from 0; every row is one of its own where persons are not known."""
        if self.persons is None:
            return np.arange(len(self.rows))
        return np.asarray(np.unique(self.persons, return_inverse=True)[1])

    @property
    def parts(self) -> Array:
        """[m] the part of every row; rows of a person are in one."""
        return np.asarray(self.whose % CLOSE_FOLDS)

    def mean_and_error(self, values: Array) -> tuple[float | None, float | None]:
        """The mean of values [m] with its standard error, as rows of a person are alike; none of too few persons."""
        of_persons = np.bincount(self.whose, weights=values - values.mean())
        if (persons := len(of_persons)) < FEWEST_PERSONS:
            return None, None
        square = float(np.square(of_persons).sum()) * persons / (persons - 1)
        return float(values.mean()), sqrt(square) / len(values)


def learn_at_site(
    own: Sequence[OwnColumn], read: ReadTable, common: Array, rows: RowsAtSite, where: str
) -> tuple[list[OwnColumn], dict[str, Array]]:
    """Own columns as a site has learnt them, and by name their effects [m, S] on its training rows. `common` [m, F] are
    the scaled features of its other columns."""
    own = [dataclasses.replace(one, held=_has(one.name, read, rows.rows)) for one in own]
    here = {one.name: _encoding_here(one, read, rows.rows) for one in own if one.held}
    held = {name: encoding for name, encoding in here.items() if encoding is not None}
    targets = rows.targets
    known = _known_outputs(targets, rows.problem)
    if not held or not known.any():
        return list(own), {}
    few = {name: read.cells[name].take(rows.rows) for name in held}
    raw = {name: one.encode(few[name], where)[0].astype(np.float64) for name, one in held.items()}
    scale = {name: np.array([std for _, std in one.scale]) for name, one in held.items()}
    blocks = {name: (raw[name] - raw[name].mean(0)) / scale[name] for name in held}
    for what, some in {"its common columns": common, "the target": targets, **blocks}.items():
        if not np.isfinite(some).all():
            raise DataError(
                f"effects of own columns at {where} cannot be learnt: among values of {what}, as models are fed "
                "them, some are not finite; correct them, or set own_columns=shared"
            )
    fits = _Fits(narrowed(common - common.mean(0)), blocks, targets[:, known], rows)
    penalty = min(PENALTIES, key=lambda one: float(fits.losses(one, tuple(held)).sum()))
    if penalty < inf:
        gamma, effects = fits.learn(penalty)
    learnt, fitted = [], {}
    for one in own:
        if one.name not in held:
            learnt.append(one)
            continue
        weights = np.zeros((blocks[one.name].shape[1], targets.shape[1]))
        effect = np.zeros_like(targets)
        if penalty < inf:
            weights[:, known] = gamma[one.name] / scale[one.name][:, None]
            effect[:, known] = effects[one.name]
        gain, error = rows.mean_and_error(fits.losses(inf, ()) - fits.losses(MODERATE, (one.name,)))
        fitted[one.name] = effect.astype(np.float32)
        learnt.append(dataclasses.replace(
            one, here=held[one.name], centre=tuple(raw[one.name].mean(0).tolist()),
            weights=tuple(map(tuple, weights.tolist())), gain=gain, gain_error=error,
        ))  # fmt: skip
    return learnt, fitted


def narrowed(common: Array) -> Array:
    """Features [m, F] in no more directions than there are rows: all sums x_i'β with their |β|² are those of before, so
    that (1) has the same minimum, and no fit grows with the square of F."""
    if common.shape[1] <= len(common):
        return common
    directions, lengths, _ = np.linalg.svd(common, full_matrices=False)
    return np.asarray(directions * lengths)


def _has(name: str, read: ReadTable, rows: Array) -> bool:
    present = 0 if name not in read.cells else int(read.cells[name].present()[rows].sum())
    return present > 0 and not lacks(len(rows), present)


def _encoding_here(one: OwnColumn, read: ReadTable, rows: Array) -> PlainEncoding | None:
    """What the column becomes at a site, by its own training rows; None of too few rows, or of a single value."""
    cells = read.cells[one.name]
    if len(rows) < FEWEST_ROWS:
        return None
    as_declared = cells.as_texts() if one.of == "category" else cells
    statistics = ReadTable({one.name: as_declared}, {one.name: one.of}, read.rows).collect(rows)[0]
    encoding = choose_encoding(one.name, statistics.columns[one.name], one.of, standardize=True)
    return encoding if isinstance(encoding, PlainEncoding) else None


def _known_outputs(targets: Array, problem: Problem) -> Array:
    """bool [S]: outputs that the rows tell enough of."""
    if not problem.classifies:
        return np.ones(targets.shape[1], bool)
    rows = targets.sum(0)
    return np.asarray(np.minimum(rows, len(targets) - rows) >= FEWEST_OF_A_CLASS)


@dataclass
class _Fits:
    """Fits of (1) to the rows of a site and to parts of them."""

    common: Array  # [m, F]
    blocks: Mapping[str, Array]  # [m, F_c] of own columns
    targets: Array  # [m, S]
    rows: RowsAtSite

    def __post_init__(self) -> None:
        self._losses: dict[tuple[float, tuple[str, ...]], Array] = {}

    def losses(self, penalty: float, names: tuple[str, ...]) -> Array:
        """[m] the loss of every row under models that did not see it, with these own columns: log loss of classes,
        squared error of numbers."""
        key = (penalty, () if penalty == inf else names)
        if key not in self._losses:
            outputs = np.zeros_like(self.targets)
            x, penalties = self._design(*key)
            for out, beta in self._left_out(x, penalties):
                outputs[out] = x[out] @ beta
            self._losses[key] = self._loss(outputs)
        return self._losses[key]

    def learn(self, penalty: float) -> tuple[dict[str, Array], dict[str, Array]]:
        """γ [F_c, S] of every own column from all rows, and the effects [m, S] on each by a model that did not see
        it."""
        x, penalties = self._design(penalty, tuple(self.blocks))
        places, start = {}, 1 + self.common.shape[1]
        for name, block in self.blocks.items():
            places[name] = slice(start, start + block.shape[1])
            start += block.shape[1]
        beta = self._fit(x, penalties, self.targets)
        effects = {name: np.zeros_like(self.targets) for name in places}
        for out, part in self._left_out(x, penalties):
            for name, place in places.items():
                effects[name][out] = x[out, place] @ part[place]
        return {name: beta[place] for name, place in places.items()}, effects

    def _left_out(self, x: Array, penalties: Array) -> list[tuple[Array, Array]]:
        """For every part its rows, and the coefficients [P, S] by all others."""
        parts = self.rows.parts
        outside = [parts == part for part in range(CLOSE_FOLDS) if (parts == part).any()]
        return [(out, self._fit(x[~out], penalties, self.targets[~out])) for out in outside if not out.all()]

    def _design(self, penalty: float, names: tuple[str, ...]) -> tuple[Array, Array]:
        """[m, P] with the ones first, and the penalty of each column."""
        blocks = [self.blocks[name] for name in names] if penalty < inf else []
        x = np.concatenate([np.ones((len(self.common), 1)), self.common, *blocks], 1)
        penalties = np.ones(x.shape[1])
        penalties[0] = 0.0
        penalties[1 + self.common.shape[1] :] = penalty
        return x, penalties

    def _fit(self, x: Array, penalties: Array, targets: Array) -> Array:
        if not self.rows.problem.classifies:
            # A constant intercept is no loss where all rows of a part are one.
            return np.linalg.solve(x.T @ x + np.diag(penalties), x.T @ targets)
        return np.stack([logistic(x, penalties, y) for y in targets.T], 1)

    def _loss(self, outputs: Array) -> Array:
        if not self.rows.problem.classifies:
            return np.asarray(((outputs - self.targets) ** 2).sum(1))
        sure = np.where(self.targets > 0.5, outputs, -outputs)
        return np.asarray(np.logaddexp(0.0, -sure).sum(1))


def logistic(x: Array, penalties: Array, y: Array) -> Array:
    """[P] the minimum of the penalized logistic loss, by Newton's method; a step that does not lower it is halved."""
    beta, value = np.zeros(x.shape[1]), inf
    step = np.zeros_like(beta)
    for _ in range(STEPS):
        while True:
            z = x @ (beta + step)
            new = float(np.logaddexp(0.0, np.where(y > 0.5, -z, z)).sum() + penalties @ (beta + step) ** 2 / 2)
            if new <= value or np.abs(step).max() < CLOSE:
                break
            step /= 2
        beta, value = beta + step, min(new, value)
        p = 1 / (1 + np.exp(-np.clip(z, -500, 500)))
        gradient = x.T @ (y - p) - penalties * beta
        curve = (x * np.maximum(p * (1 - p), 1e-12)[:, None]).T @ x + np.diag(penalties)
        step = np.linalg.solve(curve, gradient)
        if not np.isfinite(step).all():
            raise DataError("features that are not finite have no effects; correct them, or leave the column out")
        if np.abs(step).max() < CLOSE:
            break
    return beta
