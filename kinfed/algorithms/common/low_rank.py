"""The adapters of a model as matrices: A [r, in] and B [out, r] of every adapted layer, and R [out, in] where servers
correct it (kinfed.lora)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.author import ConfigError, Task
from kinfed.engine import ParameterSlot


@dataclass(frozen=True)
class Adapter:
    layer: str
    A: ParameterSlot
    B: ParameterSlot
    R: ParameterSlot | None

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def matrix(theta: Tensor, slot: ParameterSlot) -> Tensor:
    """[..., rows, columns] of theta [..., P], a view."""
    return theta[..., slot.start : slot.stop].view(*theta.shape[:-1], *slot.shape)


def adapters_of(method: str, task: Task, *, residual: bool) -> list[Adapter]:
    """The trained adapters of a model; a ConfigError if it has none, or no residuals although they are needed."""
    slots = {slot.name: slot for slot in task.slots}
    layers = [name.removesuffix(".lora_A") for name in slots if name.endswith(".lora_A")]
    adapters = [
        Adapter(layer, slots[f"{layer}.lora_A"], slots[f"{layer}.lora_B"], slots.get(f"{layer}.residual"))
        for layer in layers
    ]
    if not adapters or (residual and any(adapter.R is None for adapter in adapters)):
        lacking = "residuals, which it corrects," if adapters else "adapters of which both matrices are trained"
        option = ", residual=True" if residual else ""
        setting = " and model.lora_residual=true" if residual else ""
        raise ConfigError(
            f"{method} needs {lacking} and the model has none; use kinfed.lora(model, targets{option}), or --model "
            f"minilm with lora_rank above 0{setting}"
        )
    return adapters


def residual_columns(adapters: list[Adapter], width: int) -> Tensor:
    """bool [P]: the residuals, which no client trains or sends."""
    mask = torch.zeros(width, dtype=torch.bool)
    for adapter in adapters:
        if adapter.R is not None:
            mask[adapter.R.start : adapter.R.stop] = True
    return mask


def rank_columns(adapters: list[Adapter], width: int, rank: int) -> Tensor:
    """bool [P]: what a client has that trains the first `rank` ranks of every adapter; everything else is complete."""
    mask = torch.ones(width, dtype=torch.bool)
    for adapter in adapters:
        matrix(mask, adapter.A)[rank:] = False
        matrix(mask, adapter.B)[:, rank:] = False
    return mask


def mean_product(theta: Tensor, adapter: Adapter, share: Tensor) -> Tensor:
    """[out, in] float64 Σ_m p_m B_m A_m of rows [n, P] with shares p [n] that add up to 1."""
    A, B = matrix(theta, adapter.A).double(), matrix(theta, adapter.B).double()
    return torch.einsum("n,nor,nri->oi", share.to(A), B, A)
