"""A safe mixture of finished models, at a site that has them as files: nothing is trained, and nothing leaves the site.

For clients of a deployment and for new clients (`kinfed adopt`), which have a model that learnt with others, one of
their own, and labelled rows that trained and chose neither. Half of the rows set the shares
(kinfed.theory.safe_mixture): in expectation the log loss is at most that of the own model + log 2 / (n + 1). The other
half calibrates prediction sets, of own rows alone: given enough rows, coverage is exact over draws of them.

Of numbers, densities are normal around predictions, with the variance of the own model's residuals on the rows that
calibrate: shares depend on these by that one number, and coverage is about exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinfed.core import rng
from kinfed.data import Problem, as_table
from kinfed.data.sources import read_table
from kinfed.errors import ConfigError, DataError
from kinfed.serving import ModelPipeline
from kinfed.tabular.decision import reach_of
from kinfed.tabular.handover import LEVELS, density, halves
from kinfed.tabular.watch import truth_of
from kinfed.theory import certificates, safe_mixture

Floats = NDArray[np.float64]
SHOWN = 0.9  # the level of the sets that are told of


@dataclass(frozen=True)
class Insured:
    """A safe mixture, and what its rows say of it."""

    model: ModelPipeline
    shares: Floats  # [M] the own model first
    rows: int  # that set the shares
    most_it_costs: float  # in nats of expected log loss against the own model
    gain: float  # in log loss over the own model, each row judged by the shares that the rows before it left
    calibrated: int  # rows that calibrate sets
    covered: float  # share of them inside sets of 90 %, each by a threshold that it had no part in

    def sentences(self) -> list[str]:
        own, others = (f"{100 * share:.0f} %" for share in (self.shares[0], 1 - self.shares[0]))
        texts = [
            f"The mixture is {own} the own model and {others} what learnt with others. On average over rows like "
            f"these, this costs at most {self.most_it_costs:.3f} nats of log loss against the own model ({self.rows} "
            "rows); for accuracy nothing is promised.",
            f"On these rows it gains {self.gain:+.3f} nats.",
        ]
        if self.calibrated:
            texts.append(f"Sets of 90 % held the truth in {100 * self.covered:.0f} % of {self.calibrated} rows.")
        return texts


def insure(
    own: ModelPipeline, others: Sequence[ModelPipeline], table: Any, label_column: str, *,
    alone_prior: float = safe_mixture.ALONE_PRIOR, seed: int = 0,
) -> Insured:  # fmt: skip
    """The safe mixture of `own` with others by labelled rows, a file or a frame, that made none of them."""
    if not 0 < alone_prior < 1:
        raise ConfigError(f"alone_prior is the prior weight of the own model, between 0 and 1; got {alone_prior:g}")
    rows = read_table(Path(table)) if isinstance(table, str | Path) else as_table(table)
    where = str(table) if isinstance(table, str | Path) else "the table"
    if any(_encoding(one) != _encoding(own) for one in others):
        raise DataError(
            "the models do not make the same features of a row, so that they cannot be mixed; take models of one run, "
            "such as local beside the federated method"
        )
    if rows.num_rows < 2:
        raise DataError(f"{where} has {rows.num_rows} rows; some set shares and others calibrate sets, so give more")
    models, problem = [own, *others], own.inputs.problem
    truth = truth_of(rows, label_column, problem, where)
    outputs = np.stack([one.predictions(rows, where=where).outputs.double().numpy() for one in models])  # [M, n, ...]
    learning, setting = halves(np.arange(rows.num_rows), rng.root(seed, "insure"))
    if problem.is_regression:
        least = 1e-12 * float(np.ravel(problem.scale)[0]) ** 2
        variance = max(float(np.square(outputs[0, setting] - truth[setting]).mean()), least)
        log_p = density(outputs - truth, variance)
    else:
        p = np.take_along_axis(outputs, truth[None, :, None], 2)[..., 0]
        log_p = np.log(np.maximum(p, safe_mixture.LEAST))
    taken = np.array([0, *(m for m in range(1, len(models)) if _is_sound(outputs[m], problem))])
    prior, shares = safe_mixture.prior_weights(len(taken), alone_prior), np.zeros(len(models))
    result = safe_mixture.safe_shares(log_p[np.ix_(taken, learning)], prior)
    shares[taken] = result.shares
    mixed = np.tensordot(shares[taken], outputs[np.ix_(taken, setting)], 1)
    if problem.is_regression:
        scores = np.abs(mixed - truth[setting])
    else:
        scores = 1 - np.take_along_axis(mixed, truth[setting][:, None], 1)[:, 0]
    sets = {level: certificates.set_threshold(scores, [], level, borrowed=0.0) for level in LEVELS}
    model = ModelPipeline.mixture([models[m] for m in taken], result.shares.tolist()).with_sets(sets)
    return Insured(
        model, shares, len(learning), safe_mixture.most_it_costs(len(learning), alone_prior),
        float((-result.log_p[0] - result.predictive_loss).mean()), len(setting),
        certificates.covered_share(scores, [], SHOWN, borrowed=0.0),
    )  # fmt: skip


def _is_sound(outputs: Floats, problem: Problem) -> bool:
    """Tell whether a model has not diverged; one that has gets no share (kinfed.tabular.handover)."""
    low, high = reach_of(problem) if problem.is_single_number else (-math.inf, math.inf)
    return bool(((outputs >= low) & (outputs <= high)).all())


def _encoding(model: ModelPipeline) -> str:
    """What rows become before the module, as text; of kinds of module nothing."""
    return replace(model.inputs, options={}).to_json()
