"""Intervals of predictions by what a model knows of itself: models of lmm and glmm carry the variance of their
coefficients, and the server's that between sites.

    regression    the number:                     η ± t √(x'Vx + σ²)
    binary        the chance of the second class: 1 / (1 + exp(−(η ± t √x'Vx)))
    counts        the count: quantiles of Poisson(exp(η + e)), e ~ N(0, x'Vx)

The variance between K sites is known by K − 1 degrees of freedom. It is a part of the whole variance alone, so that t
has those of Satterthwaite (Biometrics Bulletin 2, 1946), (x'Vx + σ²)² (K − 1) / (x'Vx)²: K − 1 where nothing else
varies, and as good as normal where a row's own noise is most of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special, stats
from torch import Tensor

from kinfed.data import Problem
from kinfed.errors import ConfigError

KINDS = ("regression", "binary", "counts")
NODES = 41  # of the quadrature over what is not known of a count's mean

Known = tuple[Tensor, Tensor, Tensor]  # variance of the linear predictor [B], of a row's noise [1], degrees of freedom
Array = NDArray[np.float64]


def ends(problem: Problem, level: float, outputs: Tensor, known: Sequence[Known | None]) -> Tensor:
    """[n, 2] of outputs [n, C], in the target's unit."""
    if not 0 < level < 1:
        raise ConfigError(f"an interval holds the truth with a chance between 0 and 1; got {level:g}")
    parts = [part for part in known if part is not None]
    if len(parts) < len(known) or not parts:
        raise ConfigError("this model does not know how far its predictions are off; those of lmm and glmm do")
    spread = torch.cat([part[0] for part in parts]).double().numpy()
    noise, freedom = (float(parts[0][place]) for place in (1, 2))
    total = spread + noise
    degrees = np.full(len(total), np.inf)
    if freedom > 0:
        degrees = freedom * (total / np.maximum(spread, 1e-300)) ** 2
    reach = stats.t.ppf((1 + level) / 2, degrees) * np.sqrt(total)
    z = outputs.double().numpy()
    if problem.kind == "regression":
        pair = problem.restored(np.stack([z[:, 0] - reach, z[:, 0] + reach], 1))
    elif problem.kind == "binary":
        eta = z[:, 1] - z[:, 0]
        pair = special.expit(np.stack([eta - reach, eta + reach], 1))
    else:
        deviation = reach / stats.norm.ppf((1 + level) / 2)  # wider where few sites say how they differ
        pair = _counts(np.log(float(np.ravel(problem.mean)[0])) + z[:, 0], deviation, level)
    return torch.from_numpy(np.asarray(pair, dtype=np.float32))


def _counts(eta: Array, deviation: Array, level: float) -> Array:
    """[n, 2]: the smallest counts that are exceeded with chances of at most (1 ± level) / 2."""
    point, weight = np.polynomial.hermite_e.hermegauss(NODES)
    mean = np.exp(np.clip(eta[:, None] + deviation[:, None] * point, -700, 700))
    weight = weight / weight.sum()
    pair = np.zeros((len(eta), 2))
    for place, chance in enumerate(((1 - level) / 2, (1 + level) / 2)):
        low, high = np.full(len(eta), -1.0), np.full(len(eta), 1.0)
        while (short := special.pdtr(high[:, None], mean) @ weight < chance).any():
            high[short] *= 2
        while (open_ := high - low > 1).any():
            middle = np.floor((low + high) / 2)
            reached = special.pdtr(np.maximum(middle, 0)[:, None], mean) @ weight >= chance
            high, low = np.where(open_ & reached, middle, high), np.where(open_ & ~reached, middle, low)
        pair[:, place] = high
    return pair
