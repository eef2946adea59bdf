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

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def confidence(clients: int, examples: float, delta: float = 0.05) -> float:
    """2 sqrt(ln(N/δ) / m)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta is a probability in (0, 1); got {delta}")
    return 2 * math.sqrt(math.log(clients / delta) / examples)


def complexity(contexts: int, parameters: int, examples: float) -> float:
    """sqrt((K/m) G(d, m)), with G = d ln(e m/d) as in the theorem for m ≥ d.

    For fewer examples than parameters that may be negative. Then the number of ways to label m examples, 2^m, bounds
    the growth function that it stands for, and G = m ln 2."""
    d, m = parameters, examples
    growth = d * math.log(math.e * m / d) if m >= d else m * math.log(2)
    return math.sqrt(contexts / m * growth)


def cost(theta: ArrayLike, omega: ArrayLike, examples: ArrayLike) -> float:
    """Σ_i (m_i/m) min_k ‖θ_i − ω_k‖² of personal models [N, P], context models [K, P] and examples [N].

    The page of a run has the distance to a client's own context instead of the nearest, which is at least this: only
    who holds all personal models can take the minimum."""
    models, share = np.asarray(omega), np.asarray(examples, np.float64)
    nearest = [min(float(((row - w).astype(np.float64) ** 2).sum()) for w in models) for row in np.asarray(theta)]
    return float(share @ np.array(nearest) / share.sum())


def label_discrepancy(train: ArrayLike, test: ArrayLike) -> NDArray[Any]:
    """[N] total variation ½ Σ_y |p(y) − q(y)|, in [0, 1], between the labels of every client's training and test
    examples, from counts [N, C]. NaN for a client without examples in one of them."""
    counts = np.asarray(train, np.float64), np.asarray(test, np.float64)
    with np.errstate(invalid="ignore"):
        p, q = (rows / rows.sum(1, keepdims=True) for rows in counts)
    return np.asarray(np.abs(p - q).sum(1) / 2)
