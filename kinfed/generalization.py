"""The terms of CGPFL's bound on the generalization error, as far as they can be computed.

Tang, Guo, Guo: Personalized Federated Learning with Contextualized Generalization, IJCAI 2022, Theorem 4.2. With
probability 1 − δ, the clients' excess risk, weighted by their examples, is at most

    2 sqrt( ln(N/δ) / m )                        confidence: N clients, m examples in all
    + sqrt( (d K/m) ln(e m/d) )                  complexity: K models of d parameters
    + (λ + L/2) Σ_i (m_i/m) min_k ‖θ_i − ω_k‖²   cost: how far personal models are from their contexts
    + Σ_i (m_i/m) ( 2 B λ_H(D_i) + disc(D_i, D̃_i) )

K = 1 is the bound of methods with one global model. More contexts raise the complexity and lower the cost.

What cannot be computed: L, B and the suprema over all models, λ_H (largest disagreement of two models, Eq. 9) and disc
(largest difference of a model's loss between the client's distribution and its examples, Eq. 10). For disc there is a
stand-in: the total variation between the labels of a client's training and test examples. It bounds disc from above
for losses in [0, 1] where the two parts differ in how often classes occur and in nothing else.

These are figures for readers. Test examples enter the last one, so nothing of this may guide training; CGPFL-Heur uses
the complexity and the cost of uploads, which are known to its server.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def confidence(clients: int, examples: float, delta: float = 0.05) -> float:
    """2 sqrt(ln(N/δ) / m)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta is a probability in (0, 1); got {delta}")
    return 2 * math.sqrt(math.log(clients / delta) / examples)


def complexity(contexts: Tensor, parameters: int, examples: float) -> Tensor:
    """sqrt((K/m) G(d, m)) for every K, with G = d ln(e m/d) as in the theorem for m ≥ d.

    For fewer examples than parameters that may be negative. Then the number of ways to label m examples, 2^m, bounds
    the growth function that it stands for, and G = m ln 2."""
    d, m = parameters, examples
    growth = d * math.log(math.e * m / d) if m >= d else m * math.log(2)
    return torch.sqrt(contexts.to(torch.float64) / m * growth)


def cost(theta: Tensor, omega: Tensor, examples: Tensor) -> float:
    """Σ_i (m_i/m) min_k ‖θ_i − ω_k‖² of personal models [N, P], context models [K, P] and examples [N]."""
    share = examples.to(torch.float64) / examples.sum()
    nearest = torch.full((len(theta),), torch.inf, dtype=torch.float64)
    for model in omega:
        apart = torch.stack([(row - model).to(torch.float64).square().sum() for row in theta])
        nearest = torch.minimum(nearest, apart.cpu())
    return float((share * nearest).sum())


def label_discrepancy(train: Tensor, test: Tensor) -> Tensor:
    """[N] total variation ½ Σ_y |p(y) − q(y)|, in [0, 1], between the labels of every client's training and test
    examples, from counts [N, C]. NaN for a client without examples in one of them."""
    p, q = (counts.to(torch.float64) / counts.sum(1, keepdim=True) for counts in (train, test))
    return (p - q).abs().sum(1) / 2
