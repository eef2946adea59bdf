"""Shares of a client's candidate models, from its own validation examples and what the others found.

    p(y | x) = Σ_j π_j p_j(y | x),     π ~ Dirichlet(s m),     m: the mean of the clients' π, nearer to equal shares

The shares π maximize the expected log-likelihood of validation examples that no candidate was trained on, by EM; the
prior counts like s further examples, shared out as in the population. Eight examples alone would decide little; with
none at all a client does as the others do.

Candidates are calibrated first: a model that trained long on few examples is too sure of itself, and a mixture of
probabilities would let others speak for it only because of that. Clients send the losses of every candidate at a few
temperatures T, and the server picks the T with the least loss over all clients, one for each kind of candidate.
Logits divided by T are those of the same network with its last layer divided by T.

Where models predict a number, p_j(y | x) is normal around the prediction, with the variance T (of a standardized
target), and the client predicts the mean of the mixture. Of counts, survival and other targets it is the likelihood of
the task's loss, uncalibrated, and outputs are averaged where they are linear.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kinfed.author import Split, Task
from kinfed.engine import Objective
from kinfed.errors import ModelError

TEMPERATURES = tuple(2.0 ** (k / 2) for k in range(-2, 7))  # 1/2 to 8
VARIANCES = tuple(4.0**k for k in range(-5, 4))  # 1/1024 to 64
STEPS = 30  # of EM; shares of three candidates move by less than a thousandth after that
EQUAL = 0.1  # by which m is drawn towards equal shares
LEAST = 1e-4  # share of a candidate that is not used: its logarithm is finite
UNKNOWN = -1.0  # in place of a mean loss; losses are never negative
WORST = 1e6  # loss of a model that diverged


@dataclass(frozen=True)
class Evidence:
    """Losses of J candidates at G temperatures on the validation examples of n clients, in pieces as they are read."""

    pieces: list[tuple[Tensor | slice, Tensor, Tensor]]  # clients, losses [m, B, J, G] and weights [m, B], float64
    count: Tensor  # [n] float64 examples
    candidates: int  # J

    def shares(self, prior: Tensor, temperature: Tensor, strength: float) -> Tensor:
        """π [n, J] float64 under the prior m [n, J], at temperatures given by their places [n, J] in TEMPERATURES."""
        pi = prior
        calibrated = [
            (rows, losses.gather(3, temperature[rows][:, None, :, None].expand(-1, losses.shape[1], -1, 1))[..., 0], w)
            for rows, losses, w in self.pieces
        ]
        for _ in range(STEPS):
            expected = strength * prior
            for rows, losses, weight in calibrated:
                q = torch.softmax(pi[rows].log()[:, None] - losses, -1)  # E: which candidate an example speaks for
                expected[rows] += (q * weight[..., None]).sum(1)
            pi = expected / (strength + self.count)[:, None]  # M: the mean of the posterior
        return pi

    def total_losses(self) -> Tensor:
        """[n, J, G] float64"""
        total = self.count.new_zeros(len(self.count), self.candidates, len(TEMPERATURES))
        for rows, losses, weight in self.pieces:
            total[rows] += (losses * weight[..., None, None]).sum(1)
        return total


def evidence(task: Task, candidates: Sequence[Tensor], split: Split) -> Evidence:
    """Evidence for candidate models, each [n, P]."""
    # Passes that read features notice a head that is declared last and does not give the logits.
    logits = (lambda theta, x: task.features_and_logits(theta, x)[1]) if can_calibrate(task) else task.logits
    losses_of: Callable[[Tensor, Tensor], Tensor] = _losses if task.classifies else _normal_losses
    if not task.classifies and not task.objective.of_residual:
        losses_of = partial(_own_losses, task.objective)
    pieces: list[tuple[Tensor | slice, Tensor, Tensor]] = []
    count = torch.zeros(len(split.count), dtype=torch.float64, device=task.device)
    for rows, batch in split.in_order():
        weight = batch.weight.to(torch.float64)
        losses = torch.stack([losses_of(logits(theta[rows], batch.x), batch.y) for theta in candidates], 2)
        pieces.append((rows, losses.masked_fill((weight == 0)[..., None, None], 0.0), weight))  # padding
        count[rows] += weight.sum(1)
    return Evidence(pieces, count, len(candidates))


def _losses(logits: Tensor, y: Tensor) -> Tensor:
    """[m, B, G] float64 of logits [m, B, C] at every temperature."""
    logits = logits.to(torch.float64)
    at = [cross_entropy((logits / t).flatten(0, 1), y.flatten(), reduction="none").view(y.shape) for t in TEMPERATURES]
    return torch.stack(at, -1).nan_to_num(nan=WORST).clamp_max(WORST)


def _normal_losses(z: Tensor, y: Tensor) -> Tensor:
    """[m, B, G] float64 −log N(y; z, T) without its constant, of predictions [m, B, 1] at every variance."""
    square = (z[..., 0].to(torch.float64) - y).square()
    return torch.stack([(square / t + math.log(t)) / 2 for t in VARIANCES], -1).nan_to_num(nan=WORST).clamp_max(WORST)


def _own_losses(objective: Objective, z: Tensor, y: Tensor) -> Tensor:
    """[m, B, G] float64 −log likelihood by the task's own loss, the same at every temperature."""
    losses = (objective.nats * objective.losses(z, y)).to(torch.float64)
    return losses.nan_to_num(nan=WORST).clamp(0.0, WORST)[..., None].expand(*losses.shape, len(TEMPERATURES))


def can_calibrate(task: Task) -> bool:
    """True where the model predicts classes and ends in a linear layer."""
    if not task.classifies:
        return False
    try:
        _ = task.head
    except ModelError:
        return False
    return True


def calibrated(task: Task, theta: Tensor, temperature: Tensor) -> Tensor:
    """Models [n, P] whose logits are divided by the temperature at each place [n] in TEMPERATURES; as they are where
    the model predicts numbers, or does not end in a linear layer."""
    if not can_calibrate(task):
        return theta
    t = theta.new_tensor(TEMPERATURES)[temperature]
    weight, bias = task.head.split(theta)
    return task.head.join(theta, weight / t[:, None, None], None if bias is None else bias / t[:, None])


def population_mean(pi: Tensor) -> Tensor:
    """m [J] float64: the mean of clients' shares [n, J], a tenth of the way to equal ones. Clients' shares follow m and
    m follows them, round after round: without that tenth it ends where some candidate has almost nothing, and errs
    there with clients whose own examples are too few to object."""
    return (1 - EQUAL) * pi.mean(0) + EQUAL / pi.shape[1]
