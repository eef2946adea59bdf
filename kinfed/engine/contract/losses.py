"""Losses of counts, survival, ordered classes, several labels, and classes of positions.

Outputs mean what kinfed.data.examples.problem says: ratios to what all training rows have, where that has a unit.
"""

import torch
from torch import Tensor, nn

from kinfed.data import IGNORED, Problem
from kinfed.engine.contract.objective import ExampleLoss, Objective, known_mean
from kinfed.errors import ConfigError

LEAST_GAP = 1e-6  # between thresholds, whose order a model may get wrong


class _OfProblem(ExampleLoss):
    """A loss that knows its problem, and perhaps a number."""

    label: str
    takes_number = False

    def __init__(self, problem: Problem, number: float | None = None) -> None:
        super().__init__(self.label, problem)
        self.number = number

    @classmethod
    def of(cls, problem: Problem, number: float | None) -> Objective:
        if number is not None and (not cls.takes_number or number < 0):
            wanted = "a number of 0 or more" if cls.takes_number else "no number"
            raise ConfigError(f"loss {cls.label} takes {wanted}; got {number:g}")
        return cls(problem, number)


class Focal(_OfProblem):
    """-(1 - p)^γ log p of the class's probability p; γ = 0 is the cross-entropy. Lin et al. 2017, equation 4."""

    label, takes_number = "focal", True

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        log_p = -nn.functional.cross_entropy(z, y, reduction="none")
        return -((1 - log_p.exp()).clamp_min(1e-12) ** (2.0 if self.number is None else self.number)) * log_p


class Poisson(_OfProblem):
    """(μ - y + y log(y / μ)) / mean, with μ = mean · exp(z): half the deviance. Its minimum over constants is the mean,
    and its curvature there is 1, whatever the size of the counts. Quasi-Poisson models have the same estimates."""

    label = "poisson"

    def __init__(self, problem: Problem, number: float | None = None) -> None:
        super().__init__(problem, number)
        self.mean = float(problem.mean)  # type: ignore[arg-type]  # counts have one
        self.nats = self.mean

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        ratio, target = z[:, 0], y / self.mean
        return ratio.exp() - target + torch.xlogy(target, target) - target * ratio


class NegativeBinomial(Poisson):
    """Half the deviance of counts with variance μ + α μ², times (1 + α mean) / mean, so that its curvature at the mean
    is 1; α → 0 is `poisson`."""

    label, takes_number = "negative_binomial", True

    def __init__(self, problem: Problem, number: float | None = None) -> None:
        super().__init__(problem, number)
        self.alpha = max(problem.dispersion if number is None else number, 1e-6)
        self.nats = self.mean / (1 + self.alpha * self.mean)

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        mu, alpha = self.mean * z[:, 0].exp(), self.alpha
        excess = (y + 1 / alpha) * (torch.log1p(alpha * mu) - torch.log1p(alpha * y))
        return (torch.xlogy(y, y / self.mean) - y * z[:, 0] + excess) / self.nats


class ProportionalOdds(_OfProblem):
    """-log P(class), from outputs z_k = logit P(class > k): falling in k, as thresholds in an order make them.

    σ(a) - σ(b) = σ(a) σ(-b) (1 - exp(b - a)), whose logarithm is finite wherever a > b."""

    label = "proportional_odds"

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        log_above, log_below = nn.functional.logsigmoid(z), nn.functional.logsigmoid(-z)
        zero = z.new_zeros(len(z), 1)
        gap = (z[:, :-1] - z[:, 1:]).clamp_min(LEAST_GAP)
        between = torch.cat([zero, torch.log(-torch.expm1(-gap)), zero], 1)
        log_p = torch.cat([zero, log_above], 1) + torch.cat([log_below, zero], 1) + between
        return -log_p.gather(1, y[:, None])[:, 0]


class BinaryLabels(_OfProblem):
    """The mean over known labels of the cross-entropy of each."""

    label = "binary_labels"

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        known = ~y.isnan()
        truth = torch.where(known, y, 0.0)
        return known_mean(nn.functional.binary_cross_entropy_with_logits(z, truth, reduction="none"), known)


class Positions(_OfProblem):
    """The mean over positions with a class of their cross-entropy; logits lie on the last axis, or on the second, as
    convolutions have them."""

    label = "positions"

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        flat = positions_last(z, self.problem).flatten(0, -2)
        losses = nn.functional.cross_entropy(flat, y.flatten(), reduction="none", ignore_index=IGNORED)
        return known_mean(losses.view(y.shape), y != IGNORED)


def positions_last(z: Tensor, problem: Problem) -> Tensor:
    """[N, *shape, C] logits of positions, from these or from [N, C, *shape]."""
    if z.shape[1:] == (*problem.shape, problem.num_classes):
        return z
    return z.movedim(1, -1)


class DiscreteTime(_OfProblem):
    """-log likelihood of grouped survival times (Prentice and Gloeckler 1978), for outputs z_k, log hazard ratios.

    The cumulative hazard within period k is H_k exp(z_k), with H_k that of all training rows. An example outlives the
    periods that end at or before its time, Σ H_k exp(z_k); an event adds -log(1 - exp(-H_k exp(z_k))) of its period.
    One censored within a period counts up to the end of the one before, and beyond the last period nothing counts. With
    one output for all periods this is a proportional-hazards model, and Cox's coefficients are its limit for short
    periods. It is a sum over examples: weights, clipping and privacy are exact."""

    label = "discrete_time"

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        hazard = z.new_tensor(self.problem.hazards) * z.exp()  # [N, periods]; a single output counts for all
        ends = z.new_tensor(self.problem.periods)
        time, event = y[:, :1], y[:, 1:] > 0
        number = torch.searchsorted(ends, time.contiguous())  # of the period that a time lies in
        column = torch.arange(len(ends), device=z.device)
        outlived = (column < number) | ((column == number) & ~event & (ends == time))
        here = (column == number) & event
        died = -torch.log(-torch.expm1(-hazard.clamp_min(1e-30)))
        return torch.where(here, died, torch.where(outlived, hazard, 0.0)).sum(1)


class CoxPartial(_OfProblem):
    """Cox's partial likelihood (Breslow's ties) inside a batch: for an event, log Σ_risk exp(η) - η, and 0 otherwise.

    The risk set of an event is *the rows of the same client in the same batch* whose time is not shorter; in an
    evaluation, of the same client's rows that are scored together, 256 at most. A larger batch is a better
    approximation of the whole likelihood, and a batch with one row teaches nothing. Rows with weights count so in risk
    sets. The value of an example depends on others of its batch, so that there is no gradient of a single example:
    private training is refused (`discrete_time` is a sum over examples). Only the order of risks is learned; the
    hazard of all training rows gives the level of survival curves."""

    label, couples = "partial_likelihood", True

    def values(self, z: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError  # `losses` sees whole batches

    def losses(self, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        eta, time, event = z[..., 0], y[..., 0], y[..., 1]  # [..., B]
        weight = torch.ones_like(eta) if weight is None else weight
        real = weight > 0
        mean = weight.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
        log_weight = (weight / mean.clamp_min(1e-30)).log()
        at_risk = (time[..., None, :] >= time[..., :, None]) & real[..., None, :]  # [..., event, row]
        at_risk = at_risk | torch.eye(eta.shape[-1], dtype=torch.bool, device=eta.device)  # padding is finite, too
        terms = (eta + torch.where(real, log_weight, 0.0))[..., None, :].expand_as(at_risk)
        total = torch.where(at_risk, terms, -torch.inf).logsumexp(-1)
        return event * (total - eta)
