"""A memory of a client's own examples beside its model: predictions are mixed with those of the nearest neighbours.

Marfoq, Neglia, Vidal, Kameni: Personalized Federated Learning through Local Memorization, ICML 2022 (kNN-Per).

    p(y | x) = λ p_kNN(y | x) + (1 − λ) softmax(z(x))
    p_kNN(c) ∝ Σ over the k nearest stored examples of class c of exp(−|φ(x) − φ_i|²/d_f)

The memory holds (φ, y) of a client's training examples, under the very model that it stands beside; it is an extension
of the model's row (kinfed.engine.ExtendedTask). λ is chosen from 0, 0.1, ..., 1 by accuracy on the client's
validation examples, the smallest of the best; 0.5 for a client without any. The released code scores the grid on test
data. The kernel is the released code's (its index returns squared distances).
"""

import torch
from torch import Tensor

from kinfed.algorithms.common.heads import features_by_client
from kinfed.core import rng
from kinfed.data import Cohort, Split
from kinfed.engine import Task, extended_rows

GRID = tuple(step / 10 for step in range(11))  # of λ
WITHOUT_VALIDATION = 0.5
EMPTY = -1.0  # the label of a place in memory that holds no example
LEAST = 1e-8  # probability of a class that neither neighbours nor model speak for


class Neighbours:
    """Numbers of the extension: λ, k, the labels [N], then the features [N d_f]."""

    mark = -3

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        """log p, so that softmax and cross-entropy are those of the mixture; z itself where λ = 0."""
        z = torch.bmm(phi, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), phi, weight.mT)
        share = extra[:, :1, None]
        p = share * vote(phi, extra, z.shape[-1]) + (1 - share) * torch.softmax(z, -1)
        return torch.where(share > 0, p.clamp_min(LEAST).log(), z)


def vote(phi: Tensor, extra: Tensor, classes: int) -> Tensor:
    """p_kNN [n, B, C] of features [n, B, d_f]."""
    width = phi.shape[-1]
    size = (extra.shape[1] - 2) // (width + 1)
    labels, stored = extra[:, 2 : 2 + size], extra[:, 2 + size :].view(-1, size, width)
    distance = torch.cdist(phi, stored).square() / width
    distance = torch.where((labels == EMPTY).unsqueeze(1), torch.inf, distance)
    k = min(int(extra[0, 1]), size)
    near, place = distance.topk(k, -1, largest=False)
    label = labels.unsqueeze(1).expand_as(distance).gather(-1, place).to(torch.int64).clamp_min(0)
    return torch.zeros(*phi.shape[:2], classes, device=phi.device).scatter_add_(-1, label, torch.softmax(-near, -1))


def with_neighbours(
    task: Task, theta: Tensor, data: Cohort, k: int, *, share: float | None = None, capacity: int
) -> Tensor:
    """[n, P + E + 1]: models theta [n, P] with a memory of at most `capacity` training examples of each client. `share`
    is λ; None: by validation examples."""
    extra = _memory(task, theta, data.train, k, capacity)
    extra[:, 0] = share_by_validation(task, theta, extra, data.val) if share is None else share
    return extended_rows(theta, extra, Neighbours())


def _memory(task: Task, theta: Tensor, split: Split, k: int, capacity: int) -> Tensor:
    """[n, E] with λ = 0; as wide for all clients of the federation, whatever the cohort."""
    size, width = min(capacity, split.longest), task.head.inputs
    labels = torch.full((len(theta), size), EMPTY)
    stored = torch.zeros(len(theta), size, width)
    for i, (phi, y) in enumerate(features_by_client(task, theta, split)):
        if len(y) > size:
            some = rng.choose(rng.root(split.seed, "memory"), len(y), size)
            phi, y = phi[some], y[some]
        labels[i, : len(y)], stored[i, : len(y)] = y.to(labels.dtype), phi
    settings = torch.tensor([0.0, float(k)]).expand(len(theta), 2)
    return torch.cat([settings, labels, stored.flatten(1)], 1).to(theta)


@torch.no_grad()
def share_by_validation(task: Task, theta: Tensor, extra: Tensor, val: Split) -> Tensor:
    """[n] λ of every client."""
    grid = torch.tensor(GRID, device=theta.device)
    hits = torch.zeros(len(theta), len(GRID), dtype=torch.int64, device=theta.device)
    for rows, batch in val.in_order():
        phi, z = task.features_and_logits(theta[rows], batch.x)
        near, model = vote(phi, extra[rows], z.shape[-1]), torch.softmax(z, -1)
        mixed = grid * near.unsqueeze(-1) + (1 - grid) * model.unsqueeze(-1)  # [n, B, C, λ]
        right = (mixed.argmax(2) == batch.y.unsqueeze(-1)) & (batch.weight > 0).unsqueeze(-1)
        hits[rows] += right.sum(1)
    best = grid[(hits == hits.max(1, keepdim=True).values).to(torch.int64).argmax(1)]  # the first of the best
    return torch.where(val.count.to(theta.device) > 0, best, WITHOUT_VALIDATION)
