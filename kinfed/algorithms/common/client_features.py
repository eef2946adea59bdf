"""Features of all examples of each client, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.engine import Task


@torch.no_grad()
def features_by_client(task: Task, theta: Tensor, split: Split) -> list[tuple[Tensor, Tensor]]:
    """(φ [N, d_f], y [N]) of every client's examples under its model in theta [n, P], on the processor and in the order
    of the split."""
    width = task.head.inputs
    pieces = [[(torch.empty(0, width), torch.empty(0, dtype=torch.int64))] for _ in theta]
    everyone = torch.arange(len(theta))
    for rows, batch in split.in_order():
        phi, valid = task.features(theta[rows], batch.x).cpu(), (batch.weight > 0).cpu()
        for place, i in enumerate(everyone[rows].tolist()):
            pieces[i].append((phi[place][valid[place]], batch.y[place].cpu()[valid[place]]))
    return [(torch.cat([phi for phi, _ in parts]), torch.cat([y for _, y in parts])) for parts in pieces]
