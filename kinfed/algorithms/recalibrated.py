"""One model with a client's own intercept: FedAvg's model for all, whose output every client shifts and, if asked,
scales to fit its own examples.

What a statistician tries before any personal model: clients differ in level (how frequent a class is, how high a number
lies) more often than in shape. Training is FedAvg's; the personal model has the logits

    a z(x) + b,   (a, b) = argmin Σ_i f(a z_i + b, y_i) + λ/2 (|b|² + (a − 1)²)      over the client's training examples

with a = 1 unless `slope` (recalibration: Platt's scaling, of several classes with one slope). λ is the number of
examples that the common model counts for: λ → ∞ is the server's model. For numbers b is n / (n + λ) times the mean
residual (standardized), a random intercept's posterior mean whose variance ratio is λ. Convex: Newton's steps, halved
where they overshoot. A client that joins later needs its examples and no training. Nothing else is sent.

The intercept is fitted to examples that also trained the common model, so it corrects a little less than it would on
fresh ones. It is computed from examples without noise, so it is refused under differential privacy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.author import Cohort, ConfigError, ModelDown, Population, Range, Task, option

STEPS, HALVINGS = 20, 12  # of Newton's method, and of one step
ENOUGH = 1e-10  # of the decrease of the mean loss that a step promises: no further steps


@dataclass(frozen=True)
class Recalibrated(FedAvg):
    slope: bool = option(False, "scale the output as well (a), not only shift it (b)")
    lam: float = option(3.0, "λ: the number of examples that the common model counts for", gt=0, tune=Range(0.1, 100.0))

    traits = frozenset()
    acts_at = "head"
    leaks = "an intercept fitted to its examples, in its personal model,"

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        a, b = self.fit(task, down.w, data)
        weight, bias = task.head.split(down.w)
        assert bias is not None  # as init_server has seen
        return task.head.join(down.w, weight * a[:, None, None].to(weight), bias * a[:, None].to(bias) + b.to(bias))

    def fit(self, task: Task, w: Tensor, data: Cohort) -> tuple[Tensor, Tensor]:
        """a [n] and b [n, C] in float64."""
        pieces = [
            (rows, task.logits(w[rows], batch.x).double(), batch.y, batch.weight.double())
            for rows, batch in data.train.in_order()
        ]
        n, C = len(data), task.head.outputs
        start = torch.zeros(n, C + 1, dtype=torch.float64, device=task.device)  # (b, a − 1)
        free = torch.ones(C + 1, dtype=torch.float64, device=task.device)
        free[C] = float(self.slope)

        def at(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _objective(pieces, beta, self.lam, task.classifies)

        beta = _newton(at, start, free)
        return 1 + beta[:, C], beta[:, :C]

    def init_server(self, task: Task, population: Population) -> Server:
        if task.head.split(task.init(population.seed)[None])[1] is None:
            raise ConfigError(
                f"an intercept needs a bias in the last layer, {task.head.name!r}; build it with bias=True"
            )
        return super().init_server(task, population)


# Clients, their logits z [m, B, C], targets [m, B] and weights [m, B]
Piece = tuple[Tensor | slice, Tensor, Tensor, Tensor]


def _objective(pieces: list[Piece], beta: Tensor, lam: float, classifies: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Value [n], gradient [n, C + 1] and Hessian [n, C + 1, C + 1] at β = (b, a − 1)."""
    C = beta.shape[1] - 1
    value, gradient = lam / 2 * beta.square().sum(1), lam * beta
    hessian = (lam * torch.eye(C + 1, dtype=beta.dtype, device=beta.device)).expand(len(beta), -1, -1).clone()
    for rows, z, y, weight in pieces:
        shifted = z * (1 + beta[rows, C])[:, None, None] + beta[rows, None, :C]
        # ∂(a z + b)_c / ∂β is 1 at b_c and z_c at a.
        if classifies:
            p = torch.softmax(shifted, 2)
            truth = torch.nn.functional.one_hot(y.long(), C).to(p)
            losses = -torch.log_softmax(shifted, 2).gather(2, y.long()[..., None])[..., 0]
            delta, curvature = p - truth, torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
        else:
            losses, delta = (shifted[..., 0] - y).square() / 2, shifted - y[..., None]
            curvature = torch.ones_like(shifted)[..., None]
        value[rows] += (losses * weight).sum(1)
        J = torch.cat([torch.eye(C, dtype=z.dtype, device=z.device).expand(*z.shape, C), z[..., None]], 3)
        gradient[rows] += torch.einsum("mbcj,mbc,mb->mj", J, delta, weight)
        hessian[rows] += torch.einsum("mbci,mbcd,mbdj,mb->mij", J, curvature, J, weight)
    return value, gradient, hessian


def _newton(at: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], beta: Tensor, free: Tensor) -> Tensor:
    """Minima β [n, J] of convex functions, over the entries that are `free` [J]."""
    value, gradient, hessian = at(beta)
    for _ in range(STEPS):
        fixed = torch.diag(1 - free)
        step = torch.linalg.solve(hessian * free * free[:, None] + fixed, gradient * free)
        if bool(((gradient * step).sum(1) <= ENOUGH * (1 + value.abs())).all()):
            break
        size = torch.ones_like(value)
        for _ in range(HALVINGS):
            worse = at(beta - size[:, None] * step)[0] > value
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        beta = beta - size[:, None] * step
        value, gradient, hessian = at(beta)
    return beta
