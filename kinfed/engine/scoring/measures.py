"""What models are judged by, client by client: every measure is two sums over a client's examples.

    value of a client    = numerator / denominator       (its root, or 1 minus it, where the measure says so)
    value of all clients = Σ numerators / Σ denominators

so that a site tells two numbers per measure and no prediction, and sums over sites are what pooling all test examples
would give, with one exception that is on purpose: rankings (AUROC, average precision) and calibration compare examples
*within* a client only. Scores of two personal models are not on one scale. AUROC of all clients is the share of pairs
(one positive, one negative example of the same client) in the right order.

A denominator of 0 means that a measure is undefined there (AUROC at a site with one class): it is left out of means,
and said to be undefined, never 0.

Examples may count by a `weight` each, as if a row of weight 2 were there twice: sums, shares and pairs are then of
weights. Runs judge test examples without; `kinfed fit` with those of its rows.

`error_draws` are values of a measure over examples drawn anew from the client's own with replacement (the bootstrap),
where a client has few: an accuracy from eight rows should say how little it means. Their deviation is its standard
error, and as all models of a client are judged on the same draws, the deviation of the differences that of a gain.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.engine.scoring.measure_catalogue import CALIBRATION_BINS as CALIBRATION_BINS
from kinfed.engine.scoring.measure_catalogue import MEASURES as MEASURES
from kinfed.engine.scoring.measure_catalogue import Drawn
from kinfed.engine.scoring.measure_catalogue import Judged as Judged
from kinfed.engine.scoring.measure_catalogue import Measure as Measure
from kinfed.engine.scoring.measure_catalogue import Sums as Sums
from kinfed.engine.scoring.measure_catalogue import find_measure as find_measure
from kinfed.engine.scoring.measure_catalogue import headline_measure as headline_measure
from kinfed.engine.scoring.measure_catalogue import headline_name as headline_name
from kinfed.engine.scoring.measure_catalogue import measures_of as measures_of

REPLICATES = 100
OUTPUTS_AT_ONCE = 2_000_000  # rows times classes of bootstrap draws that are judged together
FEW_EXAMPLES = 500  # of a client, up to which the error of its figure is estimated
FEW_CLIENTS, SLOW_REPLICATES = 20, 25  # up to which that is done for measures that are slow, and how often


def client_sums(judged: Judged, headline: Measure | None = None) -> dict[str, Tensor]:
    """[n, 2] numerators and denominators of every measure of the problem, and of the headline where it is another."""
    measures = {one.name: one for one in (*measures_of(judged.problem), *([] if headline is None else [headline]))}
    return {name: torch.from_numpy(np.stack(one.sums(judged), 1).astype(np.float64)) for name, one in measures.items()}


def error_draws(measure: Measure, judged: Judged, ids: Tensor) -> Tensor:
    """[R, n] `bootstrap_draws` of the size that every evaluation can afford; NaN at clients with more than FEW_EXAMPLES
    or none, and at all of many clients where the measure is slow."""
    if measure.slow and judged.clients > FEW_CLIENTS:
        return no_draws(measure, judged.clients)
    return bootstrap_draws(measure, judged, ids, replicates=_replicates(measure), most=FEW_EXAMPLES)


def no_draws(measure: Measure, clients: int) -> Tensor:
    """[R, n] NaN: `error_draws` where nothing is known."""
    return torch.full((_replicates(measure), clients), torch.nan, dtype=torch.float64)


def _replicates(measure: Measure) -> int:
    return SLOW_REPLICATES if measure.slow else REPLICATES


def bootstrap_draws(
    measure: Measure, judged: Judged, ids: Tensor, *, replicates: int = REPLICATES, most: int | None = None
) -> Tensor:
    """[R, n] the measure over examples drawn anew with replacement from every client's own; NaN where it is undefined,
    and at clients with none or with more than `most`. Draws are named by `ids`: they are the same for all models, so
    that differences of two models are draws of the difference."""
    count = judged.examples
    start = np.r_[0, np.cumsum(count)[:-1]]
    few = (count > 0) if most is None else (count > 0) & (count <= most)
    owner = np.repeat(np.flatnonzero(few), count[few])
    if not len(owner):
        return torch.full((replicates, judged.clients), torch.nan, dtype=torch.float64)
    position = torch.from_numpy(np.concatenate([np.arange(c) for c in count[few]]))
    keys = rng.fold(rng.root(0, "bootstrap"), ids)[torch.from_numpy(owner)]
    values, together = [], max(1, OUTPUTS_AT_ONCE // (len(owner) * judged.output.shape[1]))
    for first in range(0, replicates, together):
        turn = torch.arange(first, min(first + together, replicates))  # [r]
        u = rng.to_unit(rng.at(rng.fold(keys, turn[:, None]), position)).numpy()  # [r, rows]
        index = start[owner] + np.minimum((u * count[owner]).astype(np.int64), count[owner] - 1)
        # Every replicate of a client is judged like a client of its own.
        apart = (np.arange(len(turn))[:, None] * judged.clients + owner).reshape(-1)
        drawn = Drawn(judged, index.reshape(-1), apart, len(turn) * judged.clients)
        sums = np.stack(measure.sums(drawn), 1)
        values.append(measure.value(torch.from_numpy(sums.astype(np.float64))).reshape(len(turn), -1))
    return torch.cat(values)


def deviation_of_draws(draws: Tensor) -> Tensor:
    """[n] the standard deviation of draws [R, n]; NaN where most of them are undefined."""
    known = ~torch.isnan(draws)
    number = known.sum(0)
    mean = torch.where(known, draws, 0.0).sum(0) / number.clamp_min(1)
    square = torch.where(known, (draws - mean) ** 2, 0.0).sum(0) / (number - 1).clamp_min(1)
    return torch.where(number > len(draws) // 2, square.sqrt(), torch.nan)
