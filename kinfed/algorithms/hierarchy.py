"""Hierarchical clustering of models: few points in very many dimensions, so all is done on pairwise distances."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.clustering import coordinates

LINKAGES = ("ward", "complete", "average", "single")
METRICS = ("l2", "l1", "cosine")


def cosines(points: Tensor) -> np.ndarray:
    """[n, n] float64 cosine of every two rows; a row of zeros has the cosine 0 with all others."""
    x = points.to("cpu", torch.float64)
    norm = x.norm(dim=1, keepdim=True)
    x = torch.where(norm > 0, x / norm.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return np.asarray((x @ x.T).clamp(-1, 1).fill_diagonal_(1.0).numpy())


def distances(points: Tensor, metric: str, others: Tensor | None = None) -> np.ndarray:
    """[n, m] float64 distances of rows to the rows of `others`, by default to each other (zero on the diagonal)."""
    n = len(points)
    x = points if others is None else torch.cat([points, others])
    if metric == "l1":
        x = x.to("cpu", torch.float64)
        every = torch.cdist(x, x, p=1).numpy()
    elif metric == "l2":
        from scipy.spatial.distance import cdist  # slow to import, and not every method clusters

        flat = coordinates(x)
        every = cdist(flat, flat)
    else:
        every = 1.0 - cosines(x)
    return np.asarray(every[:n, :n] if others is None else every[:n, n:])


def agglomerate(
    points: Tensor, linkage: str, metric: str, *, clusters: int | None = None, threshold: float | None = None
) -> Tensor:
    """[n] int64 labels, numbered in the order of their first points: so many clusters, or as many as remain when
    all that lie within the threshold of each other (in the sense of the linkage) have been joined."""
    n = len(points)
    if n < 2:
        return torch.zeros(n, dtype=torch.int64)
    if threshold is not None:
        threshold = threshold * (1 + 1e-9) + 1e-300  # scikit-learn stops at the threshold; points at it belong in
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(
        clusters,
        metric="euclidean" if linkage == "ward" else "precomputed",
        linkage=linkage,
        distance_threshold=threshold,
    )
    label = model.fit(coordinates(points) if linkage == "ward" else distances(points, metric)).labels_
    _, first, label = np.unique(label, return_index=True, return_inverse=True)
    return torch.from_numpy(np.argsort(np.argsort(first))[label].astype(np.int64))
