"""k-means on models, which are few points in very many dimensions.

k-means sees points only through distances, and n points span at most n dimensions. So the points (and the centres
it starts from) are first written in an orthonormal basis of their span, exactly, and scikit-learn then works on
[n, n] numbers instead of [n, P]: the cost of clustering stays small beside a round of training.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor


@dataclass(frozen=True)
class Clusters:
    label: Tensor  # [n] int64
    cost: float  # Σ_i weight_i ‖x_i − c_label(i)‖², weights summing to one


def coordinates(points: Tensor) -> np.ndarray:
    """Rows with the same pairwise distances as `points` [n, P], in at most n dimensions (float64)."""
    x = points.to("cpu", torch.float64)
    x = x - x.mean(0)
    gram = (x @ x.T).numpy()
    values, vectors = np.linalg.eigh(gram)
    # Eigenvalues that should be zero come out as rounding errors, whose roots would tell equal points apart.
    values = np.where(values > 1e-13 * np.abs(values).max(), values, 0.0)
    return np.asarray(vectors * np.sqrt(values))


def num_distinct(x: np.ndarray) -> int:
    """How many of the points differ, up to rounding of the coordinates."""
    near = cdist(x, x) <= 1e-7 * np.linalg.norm(x)
    return int((~np.tril(near, -1).any(1)).sum())  # those that no earlier point equals


def k_means(
    x: np.ndarray, k: int, seed: int, start: np.ndarray | None = None, weight: np.ndarray | None = None
) -> Clusters:
    """Clusters of coordinates x [n, D]; from `start` [k, D] where given, else the best of ten k-means++ runs."""
    share = np.full(len(x), 1.0 / len(x)) if weight is None else weight / weight.sum()
    model = KMeans(
        k, init="k-means++" if start is None else start, n_init=10 if start is None else 1, random_state=seed
    )
    # A handful of small points: threads would cost more than they do.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than k: the caller counts them
        label = model.fit(x, sample_weight=share * len(x)).labels_
    if start is None:
        # Numbered in the order of their first points: which of several equally good runs won does not show.
        _, first, label = np.unique(label, return_index=True, return_inverse=True)
        label = np.argsort(np.argsort(first))[label]
    centre = np.stack([np.average(x[label == j], axis=0, weights=share[label == j]) for j in np.unique(label)])
    own = centre[np.searchsorted(np.unique(label), label)]
    cost = float((share * ((x - own) ** 2).sum(1)).sum())
    return Clusters(torch.from_numpy(label.astype(np.int64)), cost)
