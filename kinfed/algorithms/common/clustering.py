"""Clusters of models, which are few points in very many dimensions: k-means and hierarchies.

k-means sees points only through distances, and n points span at most n dimensions. So the points (and the centres
it starts from) are first written in an orthonormal basis of their span, and k-means then works on [n, n] numbers
instead of [n, P]: the cost of clustering stays small beside a round of training.

Everything is in float64 and on one thread, and the points are put in an order of their own first, so that neither
the machine's cores nor the numbering of clients decide who belongs to whom.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, Literal

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from kinfed.algorithms.base import Algorithm, Server, ServerModels, Up
from kinfed.algorithms.common.averaging import ModelDown, best_fit, mean_update
from kinfed.core import Nothing, kernels, take_rows
from kinfed.data import Cohort
from kinfed.engine import Task

Array = np.ndarray[Any, np.dtype[Any]]
Linkage = Literal["ward", "complete", "average", "single"]

RESOLUTION = 1e-7  # of distances, in parts of the largest: what products of float64 can tell apart
MAX_ITERATIONS = 300


@dataclass(frozen=True)
class Clusters:
    label: Tensor  # [n] int64
    cost: float  # Σ_i weight_i ‖x_i − c_label(i)‖², weights summing to one


def num_distinct(x: Array) -> int:
    """Number of the points [n, D] that differ by more than the coordinates' resolution."""
    return len(np.unique(_twins(x)))


def _twins(x: Array) -> Array:
    """[n] for every point the first one that it coincides with."""
    x = x - x.mean(0)
    square = _squares(x)
    near = square[:, None] + square - 2 * x @ x.T <= RESOLUTION**2 * square.max()
    np.fill_diagonal(near, True)
    first = np.arange(len(x))
    for i in range(len(x)):
        if first[i] == i:  # only a point that is its own first one can be another's
            first[i:][near[i, i:] & (first[i:] == np.arange(i, len(x)))] = i
    return first


def k_means(x: Array, k: int, seed: int, weight: Array | None = None, start: Array | None = None) -> Clusters:
    """The best of ten k-means++ runs on the points x [n, D], of one from Ward's hierarchy, and of one from the centres
    `start` if given. In as many dimensions as there are points, random starts alone mostly end beside the optimum.

    Points that coincide stay together, so there are fewer clusters than k if there are fewer distinct points.
    Clusters are numbered from the one that reaches nearest to the mean of all points."""
    share = _shares(x, weight)
    distinct, twin = np.unique(_twins(x), return_inverse=True)
    order = np.argsort(_squares(x[distinct] - share @ x), kind="stable")  # not by the clients' numbers
    points, together = x[distinct][order], np.bincount(twin, weights=share)[order]
    k = min(k, len(points))
    label = np.zeros(len(points), np.int64)
    cost = _cost(points, label, together)
    if k > 1:
        from scipy.cluster.hierarchy import fcluster, linkage  # slow to import, and not every method clusters
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning

        model = KMeans(k, n_init=10, tol=0.0, max_iter=MAX_ITERATIONS, random_state=seed)
        with warnings.catch_warnings(), _threads().limit(limits=1):
            warnings.simplefilter("ignore", ConvergenceWarning)  # points just beyond the resolution
            label = model.fit(points, sample_weight=together * len(points)).labels_.astype(np.int64)
        cost = _cost(points, label, together)
        joined = fcluster(linkage(points, "ward"), k, "maxclust") - 1
        starts = [_means(points, joined, together, np.zeros((joined.max() + 1, points.shape[1])))]
        for centres in starts if start is None else [*starts, start]:
            other = lloyd(points, centres, together)
            if other.cost < cost:
                label, cost = other.label.numpy(), other.cost
    first = {old: new for new, old in enumerate(dict.fromkeys(label.tolist()))}
    cluster = np.empty(len(distinct), np.int64)
    cluster[order] = [first[j] for j in label.tolist()]
    return Clusters(torch.from_numpy(cluster[twin]), cost)


def k_means_path(x: Array, seeds: Sequence[int], weight: Array | None = None) -> list[Clusters]:
    """k-means with 1, 2, ..., len(seeds) clusters. Each is also tried from the one before and the point farthest from
    its centre, so that the cost never rises."""
    share = _shares(x, weight)
    path: list[Clusters] = []
    start = x[:1]
    for k, seed in enumerate(seeds, 1):
        path.append(k_means(x, k, seed, weight, start))
        label = path[-1].label.numpy()
        centre = _means(x, label, share, np.zeros((int(label.max()) + 1, x.shape[1])))
        farthest = _squares(x - centre[label]).argmax()
        start = np.concatenate([centre, x[farthest, None]])
    return path


def lloyd(x: Array, start: Array, weight: Array | None = None, held: Array | None = None) -> Clusters:
    """k-means on the points x [n, D] from the centres `start` [k, D]; a centre keeps its number.

    A centre without points is moved to the point farthest from its own centre, as long as a cluster has points that
    differ; unless it is `held` [k] by someone who is not among the points: then it stays as it is."""
    share, k = _shares(x, weight), len(start)
    keep = np.zeros(k, bool) if held is None else held
    tolerance = RESOLUTION**2 * _squares(np.concatenate([x, start]) - x.mean(0)).max()
    centre, label = start.astype(np.float64), np.full(len(x), -1)
    for _ in range(MAX_ITERATIONS):
        new = np.stack([_squares(x - c) for c in centre], 1).argmin(1)
        for j in np.flatnonzero((np.bincount(new, minlength=k) == 0) & ~keep):
            away = _squares(x - _means(x, new, share, centre)[new])
            if away.max() <= tolerance:
                break
            new[away.argmax()] = j
        if (new == label).all():
            break
        label = new
        centre = _means(x, label, share, centre)
    return Clusters(torch.from_numpy(label.astype(np.int64)), _cost(x, label, share))


def match_labels(label: Tensor, points: Array, centres: Array) -> Tensor:
    """Labels 0..K' − 1 of the points replaced by numbers of the centres: those whose distances to the clusters' means,
    squared, have the least sum (Hungarian method)."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and a node never needs it

    means = np.stack([points[label.numpy() == j].mean(0) for j in range(int(label.max()) + 1)])
    distance = ((means[:, None] - centres[None]) ** 2).sum(-1)
    return torch.from_numpy(linear_sum_assignment(distance)[1])[label]


def agglomerate(
    points: Tensor, linkage: Linkage, metric: str, *, clusters: int | None = None, threshold: float | None = None
) -> Tensor:
    """[n] int64 labels, numbered in the order of their first points: a given number of clusters, or as many as remain
    when all that lie within the threshold of each other (in the sense of the linkage) have been joined."""
    n = len(points)
    if n < 2:
        return torch.zeros(n, dtype=torch.int64)
    if threshold is not None:
        threshold = threshold * (1 + 1e-9) + 1e-300  # scikit-learn stops at the threshold; points at it belong in
    from sklearn.cluster import AgglomerativeClustering

    ward = linkage == "ward"
    known = "euclidean" if ward else "precomputed"
    model = AgglomerativeClustering(clusters, metric=known, linkage=linkage, distance_threshold=threshold)
    label = model.fit(kernels.coordinates(points) if ward else kernels.pairwise_distances(points, metric)).labels_
    _, first, label = np.unique(label, return_index=True, return_inverse=True)
    return torch.from_numpy(np.argsort(np.argsort(first))[label].astype(np.int64))


def moved_by_cluster(models: Tensor, label: Tensor, delta: Tensor, count: Tensor | None) -> Tensor:
    """Models [C, P] plus the mean change, of changes [n, P], in each cluster; a label [n] below 0 counts for none."""
    models = models.clone()
    for c in torch.unique(label[label >= 0]).tolist():
        rows = (label == c).nonzero().squeeze(1)
        models[c] += mean_update(take_rows(delta, rows), None if count is None else count[rows])
    return models


@dataclass(frozen=True)
class HasClusters(Algorithm[Server, Nothing, ModelDown, Up], Generic[Server, Up]):
    """A server with a `model` for every `cluster` of clients, who deploy it as they get it."""

    gradients = 1

    def download(self, server: Any, ids: Tensor) -> ModelDown:
        return ModelDown(self.server_models(server).rows(ids))

    def personalize(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> Tensor:
        return down.w

    def place_newcomer(self, task: Task, server: Any, data: Cohort) -> Any:
        return replace(server, cluster=join_best_cluster(task, server.model, server.cluster, data))

    def server_models(self, server: Any) -> ServerModels:
        return ServerModels(server.model, server.cluster)


def join_best_cluster(task: Task, models: Tensor, cluster: Tensor, data: Cohort) -> Tensor:
    """[K] the clusters of all clients, where these newcomers join the one whose model [C, P] fits their training
    examples best."""
    cluster = cluster.clone()
    candidates = [w.expand(len(data), -1) for w in models]
    cluster[data.ids] = best_fit(task, candidates, data.train).to(cluster)
    return cluster


def _means(x: Array, label: Array, share: Array, otherwise: Array) -> Array:
    """[k, D] the centre of every cluster; that of an empty one as given."""
    centre = otherwise.copy()
    for j in np.unique(label):
        members = label == j
        centre[j] = (share[members, None] * x[members]).sum(0) / share[members].sum()
    return centre


def _cost(x: Array, label: Array, share: Array) -> float:
    centre = _means(x, label, share, np.zeros((int(label.max()) + 1, x.shape[1])))
    return float((share * _squares(x - centre[label])).sum())


def _shares(x: Array, weight: Array | None) -> Array:
    return np.full(len(x), 1.0 / len(x)) if weight is None else np.asarray(weight / weight.sum())


def _squares(difference: Array) -> Array:
    return np.asarray((difference**2).sum(1))


@cache
def _threads() -> Any:
    """The thread pools of this process; finding them takes longer than clustering a handful of points."""
    return ThreadpoolController()
