"""GPFL's extension of a model: features pass a valve that a condition sets, before the head reads them.

    CoV(φ, k) = ReLU(φ (1 + γ(k)) + β(k)),      γ and β each LayerNorm(ReLU(Linear(d_f → d_f)))
    z = W CoV(φ, k) + b

The extension holds the two networks of the valve and the client's condition k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kinfed.algorithms.common.heads import affine_norm


class FeatureValve:
    mark = -2

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        size = valve_size(phi.shape[-1])
        out = torch.bmm(through_valve(phi, extra[:, size:], extra[:, :size]), weight.mT)
        return out if bias is None else out + bias.unsqueeze(1)


def valve_size(width: int) -> int:
    """R: the numbers of a valve on `width` features."""
    return 2 * (width * width + width) + 4 * width


def through_valve(phi: Tensor, condition: Tensor, valve: Tensor) -> Tensor:
    """CoV [n, B, d_f] of φ [n, B, d_f] and k [n, d_f]."""
    width = phi.shape[-1]
    gamma, beta = (_setting(condition, part, width).unsqueeze(1) for part in valve.chunk(2, 1))
    return torch.relu(phi * (1 + gamma) + beta)


def _setting(condition: Tensor, network: Tensor, width: int) -> Tensor:
    """[n, d_f] what one of the two networks makes of k."""
    square = width * width
    weight = network[:, :square].view(-1, width, width)
    hidden = torch.bmm(condition.unsqueeze(1), weight).squeeze(1) + network[:, square : square + width]
    return affine_norm(torch.relu(hidden).unsqueeze(1), network[:, square + width :]).squeeze(1)
