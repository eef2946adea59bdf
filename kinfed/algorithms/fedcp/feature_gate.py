"""FedCP's extension of a model: every feature is shared out between a personal and a common head by a learned gate.

    z = W_p (φ r) + b_p + W_g (φ s) + b_g,      (r, s) = softmax over the pair of a(φ v),  r + s = 1
    a = ReLU(LayerNorm(Linear(d_f → 2 d_f))),   v = Σ_c W_p[c], scaled to length 1

The head of the row is the personal one; the extension holds the common head and the gate's network.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kinfed.algorithms.common.heads import affine_norm


class FeatureGate:
    mark = -1

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        common, policy = split_gate(extra, weight, bias)
        share = torch.sigmoid(gate_logits(phi * context(weight).unsqueeze(1), policy))  # without noise
        return gated_logits(phi, share, weight, bias, common)


def policy_size(width: int) -> int:
    """R: the numbers of a gate on `width` features."""
    return 2 * width * (width + 1) + 4 * width


def split_gate(extra: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The common head [n, H], W before b, and the gate's network [n, R]."""
    common = weight[0].numel() + (0 if bias is None else bias.shape[1])
    return extra[:, :common], extra[:, common:]


def context(weight: Tensor) -> Tensor:
    """v [n, d_f] of heads W [n, C, d_f]."""
    return normalize(weight.sum(1), dim=-1)


def gate_logits(phi: Tensor, policy: Tensor) -> Tensor:
    """[n, B, d_f]: a of the personal part minus a of the common one; r is their sigmoid."""
    width = phi.shape[-1]
    square = 2 * width * width
    bias, weight = policy[:, None, square : square + 2 * width], policy[:, :square].view(-1, width, 2 * width)
    hidden = torch.baddbmm(bias, phi, weight)
    own, common = torch.relu(affine_norm(hidden, policy[:, square + 2 * width :])).chunk(2, -1)
    return own - common


def gated_logits(phi: Tensor, share: Tensor, weight: Tensor, bias: Tensor | None, common: Tensor) -> Tensor:
    """z [n, B, C] for the personal share r [n, B, d_f] of each feature."""
    common_weight = common[:, : weight[0].numel()].view_as(weight)
    z = torch.bmm(phi * share, weight.mT) + torch.bmm(phi * (1 - share), common_weight.mT)
    return z if bias is None else z + (bias + common[:, weight[0].numel() :]).unsqueeze(1)
