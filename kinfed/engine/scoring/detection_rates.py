"""Detectors compared where they miss equally often: false accepts at a number of false rejects, and the measure
`relative_false_accepts`, FA(model) / FA(start) with FR(model) = FR(start), below 1 where a model is better than the one
that all methods start from.

The measure works client by client: at the number of false rejects that is FALSE_REJECT of the client's own positive
rows, rounded up, on the straight lines between thresholds. Sums over clients are those of false accepts. It needs the
start's predictions beside the model's, which are computed only where it is a run's headline.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FALSE_REJECT = 0.05  # the share of positive rows that a detector misses where it is compared


def relative_sums(
    scores: np.ndarray, start_scores: np.ndarray, positive: np.ndarray, owner: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """[n] false accepts of the model, and of the start; both 0 at a client without positive or negative rows."""
    accepted = np.zeros((2, clients))
    ends = np.searchsorted(owner, np.arange(clients + 1))
    for client in range(clients):
        rows = slice(ends[client], ends[client + 1])
        own = torch.from_numpy(positive[rows])
        positives = int(own.sum())
        if 0 < positives < len(own):
            rejected = math.ceil(FALSE_REJECT * positives)
            for place, one in enumerate((scores, start_scores)):
                accepted[place, client] = false_accepts_at(rejected, torch.from_numpy(one[rows]), own)
    return accepted[0], accepted[1]


def false_accepts_at(rejected: int, scores: Tensor, positive: Tensor) -> float:
    """The false accepts that come with a number of false rejects, on the straight lines between thresholds."""
    _, rejects, accepts = operating_points(scores, positive)
    # The last point that rejects no more: of several with equal rejects, the one with fewest accepts.
    below = int(torch.searchsorted(rejects, float(rejected), right=True)) - 1
    if rejects[below] == rejected:
        return accepts[below].item()
    step = (rejected - rejects[below]) / (rejects[below + 1] - rejects[below])
    return (accepts[below] + step * (accepts[below + 1] - accepts[below])).item()


def operating_points(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every distinct score as a threshold, ascending, then infinity: (threshold, false rejects, false accepts)."""
    ordered, order = scores.to(torch.float64).sort()
    distinct, sizes = torch.unique_consecutive(ordered, return_counts=True)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0).cpu()])  # examples below each threshold
    positives_below = torch.cat([torch.zeros(1), positive[order].cpu().cumsum(0)]).to(torch.float64)[first]
    negatives_below = first - positives_below
    thresholds = torch.cat([distinct.cpu(), torch.tensor([torch.inf], dtype=torch.float64)])
    return thresholds, positives_below, negatives_below[-1] - negatives_below
