"""Points on the simplex: shares that are not negative and add up to 1."""

import torch
from torch import Tensor


def nearest_shares(points: Tensor) -> Tensor:
    """[n, k] float64: the point of the simplex that is nearest to each row.

    It is max(v − τ, 0), with τ such that it adds up to 1: of the numbers of v in falling order the first ρ count, as
    long as the next one is above the τ that it would give (Held, Wolfe, Crowder 1974)."""
    v = points.to(torch.float64)
    falling = v.sort(1, descending=True).values
    rank = torch.arange(1, v.shape[1] + 1, dtype=torch.float64, device=v.device)
    tau = (falling.cumsum(1) - 1) / rank
    rho = (falling > tau).sum(1, keepdim=True) - 1
    return (v - tau.gather(1, rho)).clamp_min(0)
