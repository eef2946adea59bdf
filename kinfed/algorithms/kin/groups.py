"""Groups of clients that are alike, by where training alone has led them.

All clients begin alone at the same model. The direction in which a client's own model left it says what its data ask
for, whatever the common model does meanwhile, and directions of clients with the same task point alike after a few
rounds. A sketch of the direction is enough to compare them: coordinates are added up in D buckets with random signs,
which keeps inner products up to noise of about 1/√D (Charikar, Chen, Farach-Colton: Finding Frequent Items in Data
Streams, 2002).
"""

import mmap

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.clustering import k_means
from kinfed.core import LARGE, rng

BUCKETS = 256  # D


def sketch(direction: Tensor, seed: int) -> Tensor:
    """[n, D] float32 unit vectors from directions [n, P]; zero if there is no direction yet."""
    key = rng.root(seed, "kin-sketch")
    draw = rng.bits(key, direction.shape[1]).to(direction.device)
    bucket, sign = draw.remainder(BUCKETS), 1 - 2 * (draw.div(BUCKETS, rounding_mode="floor").remainder(2))
    sums = direction.new_zeros(len(direction), BUCKETS).index_add_(1, bucket, direction * sign)
    return torch.nn.functional.normalize(sums, dim=1)


def no_sketches(clients: int, like: Tensor) -> Tensor:
    """Zeros [clients, D] of the type and on the device of `like`. Of very many on the processor, memory is taken for
    only those that are written to: small pages, which the system clears at the first touch."""
    nbytes = clients * BUCKETS * like.element_size()
    if nbytes <= LARGE or like.device.type != "cpu":
        return like.new_zeros(clients, BUCKETS)
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(clients, BUCKETS)


def with_sketches(sketches: Tensor, known: Tensor, ids: Tensor, new: Tensor) -> Tensor:
    """A copy of sketches [N, D] with new ones for the clients `ids`. All but the `known` rows [m] are zero: where these
    are few of very many, only they are copied."""
    if 4 * len(known) > len(sketches) or sketches.device.type != "cpu":
        return sketches.index_copy(0, ids.to(sketches.device), new)
    copy = no_sketches(len(sketches), sketches)
    copy[known] = sketches[known]
    copy[ids] = new
    return copy


def find_groups(sketches: Tensor, most: int, least_silhouette: float, seed: int) -> Tensor | None:
    """[n] int64: the group of each client, numbered from 0; None if no grouping stands out.

    k-means for every number of groups from 2 to `most`; the one whose clients are best inside their group and apart
    from the next (the mean silhouette) is taken, if that is clear enough."""
    n = len(sketches)
    if n < 4:
        return None
    from sklearn.metrics import silhouette_score  # slow to import

    points = sketches.cpu().numpy().astype(np.float64)
    best, chosen = least_silhouette, None
    for k in range(2, min(most, n // 2) + 1):
        label = k_means(points, k, seed).label
        if len(torch.unique(label)) < 2:
            continue
        value = float(silhouette_score(points, label.numpy()))
        if value > best:
            best, chosen = value, label
    return chosen


def centres(sketches: Tensor, label: Tensor) -> Tensor:
    """[K, D]: the mean sketch of each group."""
    groups = int(label.max()) + 1
    total = sketches.new_zeros(groups, sketches.shape[1]).index_add_(0, label, sketches)
    return total / torch.bincount(label, minlength=groups)[:, None]
