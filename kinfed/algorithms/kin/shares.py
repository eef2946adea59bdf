"""Shares of a client's candidate models, from its own validation examples and what the others found.

    p(y | x) = Σ_j π_j p_j(y | x),     π ~ Dirichlet(s m),     m: the mean of the clients' π, nearer to equal shares

The shares π maximize the expected log-likelihood of validation examples that no candidate was trained on, by EM; the
prior counts like s further examples, shared out as in the population. Eight examples alone would decide little; with
none at all a client does as the others do.

Candidates are calibrated first: a model that trained long on few examples is too sure of itself, and a mixture of
probabilities would let others speak for it only because of that. Clients send the losses of every candidate at a few
temperatures T, and the server picks the T with the least loss over all clients, one for each kind of candidate.
Logits divided by T are those of the same network with its last layer divided by T; where a model does not end in a
linear layer, T stands beside it in the mixture that is deployed (kinfed.engine.personal.personal_models).

**Safe shares** (`Evidence.safe_shares`) are the insurance of kinfed.theory.safe_mixture on a grid of shares: the weight
of a mixture π is its prior times its likelihood, and what is deployed is the mean of the weighted mean share over 0, 1,
..., n examples. The prior is 1/2 on alone by itself, the rest by how near π is to the population's m. In expectation
the log loss is at most that of alone + log 2 / (n + 1). It is not strict here: temperatures and trials of groups have
seen the same examples, and `refit` trains the candidates once more.

A candidate that diverged (its parameters, or what it says of validation examples, are not finite or absurd) has no
share: a prediction that is not finite spoils a mixture however small its share.

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
from kinfed.theory import safe_mixture

TEMPERATURES = tuple(2.0 ** (k / 2) for k in range(-2, 7))  # 1/2 to 8
VARIANCES = tuple(4.0**k for k in range(-5, 4))  # 1/1024 to 64
STEPS = 30  # of EM; shares of three candidates move by less than a thousandth after that
EQUAL = 0.1  # by which m is drawn towards equal shares
GRID = 10  # steps of shares from 0 to 1 in a grid of them
ALONE_PRIOR, LEAST_P = safe_mixture.ALONE_PRIOR, safe_mixture.LEAST
LEAST = 1e-4  # share of a candidate that is not used: its logarithm is finite
UNKNOWN = -1.0  # in place of a mean loss; losses are never negative
WORST = 1e6  # loss of a model that diverged
LARGEST = 1e6  # times the largest parameter of a client's smallest candidate (or 1): a larger one diverged


@dataclass(frozen=True)
class Evidence:
    """Losses of J candidates at G temperatures on the validation examples of n clients, in pieces as they are read."""

    pieces: list[tuple[Tensor | slice, Tensor, Tensor]]  # clients, losses [m, B, J, G] and weights [m, B], float64
    count: Tensor  # [n] float64 examples
    healthy: Tensor  # [n, J] bool: did not diverge; all of a client whose candidates all did, as nothing is better

    def shares(self, prior: Tensor, temperature: Tensor, strength: float) -> Tensor:
        """π [n, J] float64 under the prior m [n, J], at temperatures given by their places [n, J] in TEMPERATURES. A
        candidate that diverged has none."""
        prior = self.without_diverged(prior)
        pi, calibrated = prior, self._calibrated(temperature)
        for _ in range(STEPS):
            expected = strength * prior
            for rows, losses, weight in calibrated:
                q = torch.softmax(pi[rows].log()[:, None] - losses, -1)  # E: which candidate an example speaks for
                expected[rows] += (q * weight[..., None]).sum(1)
            pi = expected / (strength + self.count)[:, None]  # M: the mean of the posterior
        return pi

    def safe_shares(self, prior: Tensor, temperature: Tensor, strength: float) -> Tensor:
        """π [n, J] float64 that can hardly cost more than the first candidate alone; arguments as of `shares`."""
        grid = share_grid(prior.shape[1]).to(prior)  # [E, J], candidate 0 by itself first
        near = strength * self.without_diverged(prior) @ grid.clamp_min(LEAST).log().T  # log Dirichlet(s m), [n, E]
        near[:, 0] = -torch.inf
        log_weight = torch.log_softmax(near, 1) + math.log(1 - ALONE_PRIOR)
        log_weight[:, 0] = math.log(ALONE_PRIOR)
        total, steps = log_weight.exp(), torch.ones_like(self.count)  # W_0
        for rows, losses, weight in self._calibrated(temperature):
            least = losses.amin(-1, keepdim=True)
            p = torch.exp(least - losses) @ grid.T * torch.exp(-least)
            log_p = p.clamp_min(LEAST_P).log() * weight[..., None]
            passed = log_weight[rows][:, None] + log_p.cumsum(1)  # [m, B, E] log W_i, not normalized
            counted = (weight > 0).to(passed.dtype)
            total[rows] += (torch.softmax(passed, -1) * counted[..., None]).sum(1)
            steps[rows] += counted.sum(1)
            log_weight[rows] = passed[:, -1]
        return self.without_diverged(total / steps[:, None] @ grid)

    def _calibrated(self, temperature: Tensor) -> list[tuple[Tensor | slice, Tensor, Tensor]]:
        """Pieces with losses [m, B, J] at the temperatures of places [n, J]."""
        return [
            (rows, losses.gather(3, temperature[rows][:, None, :, None].expand(-1, losses.shape[1], -1, 1))[..., 0], w)
            for rows, losses, w in self.pieces
        ]

    def without_diverged(self, shares: Tensor) -> Tensor:
        """[n, J] shares of the healthy candidates alone; where they have none, equal ones."""
        if bool(self.healthy.all()):
            return shares
        healthy_shares = torch.where(self.healthy, shares, 0.0)
        total = healthy_shares.sum(1, keepdim=True)
        equal = self.healthy / self.healthy.sum(1, keepdim=True)
        return torch.where(total > 0, healthy_shares / total.clamp_min(1e-300), equal)

    def stand_ins(self, candidates: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The candidates [n, P], each replaced by the client's first healthy one where it diverged: numbers that are
        not finite would spoil a mixture whatever their share."""
        if bool(self.healthy.all()):
            return tuple(candidates)
        rows, first = torch.arange(len(self.healthy), device=self.healthy.device), self.healthy.int().argmax(1)
        healthy = torch.stack(list(candidates), 1)[rows, first]
        return tuple(torch.where(self.healthy[:, j, None], one, healthy) for j, one in enumerate(candidates))

    def total_losses(self) -> Tensor:
        """[n, J, G] float64"""
        total = self.count.new_zeros(*self.healthy.shape, len(TEMPERATURES))
        for rows, losses, weight in self.pieces:
            total[rows] += (losses * weight[..., None, None]).sum(1)
        return total


def share_grid(candidates: int) -> Tensor:
    """[E, J] float64 all shares in steps of 1 / GRID, those of the first candidate by itself first."""
    places = torch.cartesian_prod(*[torch.arange(GRID, -1, -1)] * candidates).view(-1, candidates)
    return places[places.sum(1) == GRID].to(torch.float64) / GRID


def evidence(task: Task, candidates: Sequence[Tensor], split: Split) -> Evidence:
    """Evidence for candidate models, each [n, P]."""
    # Where no trial has seen it, passes that read features notice a head that does not give the logits.
    logits = (lambda theta, x: task.features_and_logits(theta, x)[1]) if can_calibrate(task) else task.logits
    losses_of: Callable[[Tensor, Tensor], Tensor] = _losses if task.classifies else _normal_losses
    if not task.classifies and not task.objective.of_residual:
        losses_of = partial(_own_losses, task.objective)
    pieces: list[tuple[Tensor | slice, Tensor, Tensor]] = []
    count = torch.zeros(len(split.count), dtype=torch.float64, device=task.device)
    healthy = _healthy_rows(task, candidates)
    for rows, batch in split.in_order():
        weight = batch.weight.to(torch.float64)
        losses = torch.stack([losses_of(logits(theta[rows], batch.x), batch.y) for theta in candidates], 2)
        losses = losses.masked_fill((weight == 0)[..., None, None], 0.0)  # padding
        pieces.append((rows, losses, weight))
        healthy[rows] &= (losses[..., -1] < WORST).all(1)  # at the temperature that forgives most
        count[rows] += weight.sum(1)
    return Evidence(pieces, count, healthy | ~healthy.any(1, keepdim=True))


def _healthy_rows(task: Task, candidates: Sequence[Tensor]) -> Tensor:
    """[n, J] bool: parameters are finite, and of a size that training reaches. The outputs of a few validation examples
    do not show it where a diverged network happens to be flat."""
    size = torch.stack([theta[:, task.trainable].abs().amax(1).nan_to_num(nan=torch.inf) for theta in candidates], 1)
    finite = torch.stack([torch.isfinite(theta).all(1) for theta in candidates], 1)
    return finite & (size <= LARGEST * size.amin(1, keepdim=True).clamp_min(1.0))


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
        _ = task.feature_head
    except ModelError:
        return False
    return True


def calibrated(task: Task, theta: Tensor, temperature: Tensor) -> Tensor:
    """Models [n, P] that end in a linear layer, with logits divided by the temperature at each place [n] in
    TEMPERATURES; as they are where the model predicts numbers, or ends otherwise."""
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
