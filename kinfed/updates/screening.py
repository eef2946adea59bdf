"""Updates are looked at before the server uses them: what a method cannot have sent is left out, with the reason.

A pool of unknown clients compares each reply with an `UpdateSpec` as it comes; whatever the pool, the
stage `Screening` looks at the rows that the server gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms import COUNT, AnyAlgorithm, RoundInfo
from kinfed.engine import Task
from kinfed.updates.stages import Stage, Updates


@dataclass(frozen=True)
class UpdateSpec:
    """Fields and shapes of an update [1, ...] of one client."""

    fields: Mapping[str, tuple[torch.Size, torch.dtype]]
    largest_norm: float = 0.0  # of everything in it that has more than one number, together; 0: no bound
    trained: Tensor | None = None  # as `trained_columns` has them

    @classmethod
    def from_update(
        cls, up: Mapping[str, Tensor], largest_norm: float = 0.0, trained: Tensor | None = None
    ) -> UpdateSpec:
        return cls({name: (tensor.shape, tensor.dtype) for name, tensor in up.items()}, largest_norm, trained)

    def violation(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Why this is no update of the method; None if it is one."""
        if tensors.keys() != self.fields.keys():
            return f"an update has {', '.join(sorted(self.fields))}; got {', '.join(sorted(tensors))}"
        for name, tensor in tensors.items():
            shape, dtype = self.fields[name]
            if tensor.shape != shape or tensor.dtype != dtype:
                return f"{name} is {dtype} of shape {list(shape)}; got {tensor.dtype} of shape {list(tensor.shape)}"
        return violations(tensors, 1, self.largest_norm, self.trained).get(0)


def trained_columns(algorithm: AnyAlgorithm, task: Task) -> Tensor | None:
    """bool [G]: which columns of the rows in an update are trainable parameters, of which alone norms and distances
    are taken; None if all are. The others are running statistics."""
    trained = (torch.arange(task.num_params) < task.trainable.stop)[algorithm.sent_columns(task).cpu()]
    return None if bool(trained.all()) else trained


def violations(
    tensors: Mapping[str, Tensor], rows: int, largest_norm: float = 0.0, trained: Tensor | None = None
) -> dict[int, str]:
    """Reasons, by row, why an update cannot be used: not finite, a negative number of examples, or longer than allowed,
    which counts trainable parameters only (`trained_columns`)."""
    reasons: dict[int, str] = {}
    square = torch.zeros(rows, dtype=torch.float64)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        flat = tensor.reshape(rows, -1)
        finite = torch.isfinite(flat.sum(1, dtype=torch.float64))  # one pass; the sum of float32 cannot overflow
        for row in (~finite).nonzero().squeeze(1).tolist():
            reasons.setdefault(row, f"its update holds NaN or infinity ({name})")
        if name == COUNT:
            for row in (finite & (flat < 0).any(1)).nonzero().squeeze(1).tolist():
                reasons.setdefault(row, f"a number of examples is not negative; got {float(flat[row].min()):g}")
        elif largest_norm and tensor.dim() > 1:
            if trained is not None and tensor.shape[-1] == len(trained):
                flat = tensor[..., trained.to(tensor.device)].reshape(rows, -1)
            square += torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).cpu().square()
    norm = square.sqrt()
    for row in (norm > largest_norm).nonzero().squeeze(1).tolist() if largest_norm else []:
        reasons.setdefault(row, f"its update has norm {float(norm[row]):.3g}, and largest_norm is {largest_norm:g}")
    return reasons


class Screening(Stage):
    """Leaves out updates that no client of the method can have sent, and those that are too long."""

    name = "screening"
    refuses = True

    def __init__(self, largest_norm: float, trained: Tensor | None) -> None:
        """`largest_norm`: of an update that is used; 0: no bound. `trained`: as `trained_columns` has them."""
        self.largest_norm, self.trained = largest_norm, trained

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        # Rows of a tree have one shape and type: that is settled before.
        named = updates.rows.named()
        return updates.without(violations(named, len(updates.ids), self.largest_norm, self.trained))
