"""The error of a client's metric: values over examples drawn anew from the client's own with replacement.

An accuracy from eight rows should say how little it means. The deviation of the draws is its standard error, and as all
models of a client are judged on the same draws, the deviation of the differences that of a gain.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.engine.scoring.judged import Drawn, Judged
from kinfed.engine.scoring.metrics import Metric

REPLICATES = 100
OUTPUTS_AT_ONCE = 2_000_000  # rows times classes of bootstrap draws that are judged together
FEW_EXAMPLES = 500  # of a client, up to which the error of its figure is estimated
FEW_CLIENTS, SLOW_REPLICATES = 20, 25  # up to which that is done for metrics that are slow, and how often


def error_draws(metric: Metric, judged: Judged, ids: Tensor) -> Tensor:
    """[R, n] `bootstrap_draws` of the size that every evaluation can afford; NaN at clients with more than FEW_EXAMPLES
    or none, and at all of many clients where the metric is slow."""
    if metric.slow and judged.clients > FEW_CLIENTS:
        return no_draws(metric, judged.clients)
    return bootstrap_draws(metric, judged, ids, replicates=_replicates(metric), most=FEW_EXAMPLES)


def no_draws(metric: Metric, clients: int) -> Tensor:
    """[R, n] NaN: `error_draws` where nothing is known."""
    return torch.full((_replicates(metric), clients), torch.nan, dtype=torch.float64)


def _replicates(metric: Metric) -> int:
    return SLOW_REPLICATES if metric.slow else REPLICATES


def bootstrap_draws(
    metric: Metric, judged: Judged, ids: Tensor, *, replicates: int = REPLICATES, most: int | None = None
) -> Tensor:
    """[R, n] the metric over examples drawn anew with replacement from every client's own; NaN where it is undefined,
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
        sums = np.stack(metric.sums(drawn), 1)
        values.append(metric.value(torch.from_numpy(sums.astype(np.float64))).reshape(len(turn), -1))
    return torch.cat(values)


def deviation_of_draws(draws: Tensor) -> Tensor:
    """[n] the standard deviation of draws [R, n]; NaN where most of them are undefined."""
    known = ~torch.isnan(draws)
    number = known.sum(0)
    mean = torch.where(known, draws, 0.0).sum(0) / number.clamp_min(1)
    square = torch.where(known, (draws - mean) ** 2, 0.0).sum(0) / (number - 1).clamp_min(1)
    return torch.where(number > len(draws) // 2, square.sqrt(), torch.nan)
