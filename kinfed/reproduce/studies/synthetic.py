"""Methods on the two-level Gaussian task, hundreds of repeats at once, for `kinfed.reproduce.studies.synthetic_study`.

All repeats of a setting are one batch [R, M] (repeats, clients). Local training is its closed form, exact for full
batches; Self-FL decides by the same `algorithms.selffl.uncertainty.Rules` as the method itself. The tests run every
method here against its class in the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kinfed.algorithms.selffl.uncertainty import UNKNOWN, Rules, Running, start_of
from kinfed.core import rng
from kinfed.server.loop import Schedule
from kinfed.theory.gaussian import Case, draw
from kinfed.theory.two_level import TwoLevel


@dataclass(frozen=True)
class Protocol:
    lr: float = 1e-4
    steps: int = 50
    warm: int = 20  # rounds of FedAvg before every method
    rounds: int = 180
    start: float = 0.0  # θ^0


@dataclass(frozen=True)
class Worlds:
    """R draws of a case."""

    case: Case
    seeds: tuple[int, ...]
    theta: Tensor  # [R, M]  θ_m
    z: Tensor  # [R, M]  θ_m^L
    s: Tensor  # [R, M]
    count: Tensor  # [R, M]  N_m

    @classmethod
    def draw(cls, case: Case, seeds: Sequence[int]) -> Worlds:
        drawn = [draw(case, seed) for seed in seeds]
        return cls(
            case,
            tuple(seeds),
            torch.stack([d.theta.squeeze(1) for d in drawn]),
            torch.stack([d.z.squeeze(1) for d in drawn]),
            torch.stack([d.s for d in drawn]),
            torch.stack([d.federation.train.count.to(torch.float64) for d in drawn]),
        )

    @property
    def model(self) -> TwoLevel:
        return TwoLevel(self.z, self.s, self.case.s0)

    def active(self, participation: float, first: int, last: int) -> Tensor:
        """bool [T, R, M]: who takes part in rounds first..last; the choice of `Schedule.active` for every seed."""
        clients = self.z.shape[1]
        size = len(Schedule(participation).active(0, 1, clients))
        keys = torch.stack([rng.root(seed, "sampling") for seed in self.seeds])
        keys = rng.fold(keys[None, :], torch.arange(first, last + 1)[:, None])
        chosen = torch.argsort(rng.bits(keys, clients), dim=-1, stable=True)[..., :size]
        return torch.zeros(*keys.shape, clients, dtype=torch.bool).scatter_(-1, chosen, True)


class State(NamedTuple):
    """Where a method ends."""

    server: Tensor  # [R]
    personal: Tensor  # [R, M]


Method = Callable[[Worlds, Tensor, Tensor, Protocol, float], State]
"""(worlds, who is active [T, R, M], start [R], protocol, participation) -> State"""


def toward(x: Tensor, target: Tensor, rate: Tensor, steps: Tensor | int) -> Tensor:
    """`repeat steps times: x -= rate * (x - target)`."""
    return target + (1 - rate) ** steps * (x - target)


def average(theta: Tensor, x: Tensor, weight: Tensor, c: float = 1.0) -> Tensor:
    """[R] θ + c Σ p_m (x_m − θ)."""
    p = weight / weight.sum(1, keepdim=True)
    return theta + c * (p * (x - theta[:, None])).sum(1)


def fedavg(
    worlds: Worlds, active: Tensor, start: Tensor, protocol: Protocol, participation: float,
    *, equal: bool = False, smooth: bool = False,
) -> State:  # fmt: skip
    theta, own, seen = start, start[:, None].expand_as(worlds.z), torch.zeros_like(worlds.z, dtype=torch.bool)
    weight = torch.ones_like(worlds.count) if equal else worlds.count
    for here in active:
        x = toward(theta[:, None], worlds.z, protocol.lr / worlds.s, protocol.steps)
        own, seen = torch.where(here, x, own), seen | here
        theta = average(theta, x, weight * here, participation if smooth else 1.0)
    return State(theta, torch.where(seen, own, theta[:, None]))


def ditto(
    worlds: Worlds, active: Tensor, start: Tensor, protocol: Protocol, participation: float, *, lam: float
) -> State:
    theta, own = start, start[:, None].expand_as(worlds.z)
    curvature = 1 / worlds.s + lam
    for here in active:
        pulled = (worlds.z / worlds.s + lam * theta[:, None]) / curvature  # optimum of f(v) + (λ/2)(v − θ)²
        own = torch.where(here, toward(own, pulled, protocol.lr * curvature, protocol.steps), own)
        x = toward(theta[:, None], worlds.z, protocol.lr / worlds.s, protocol.steps)
        theta = average(theta, x, worlds.count * here)
    return State(theta, own)


def pfedme(
    worlds: Worlds, active: Tensor, start: Tensor, protocol: Protocol, participation: float,
    *, lam: float = 15.0, equal: bool = True, inner_steps: int | None = None, personal_lr: float = 0.0,
) -> State:  # fmt: skip
    """`inner_steps` steps of size `personal_lr` towards the proximal point, or all the way to it."""
    theta, own, seen = start, start[:, None].expand_as(worlds.z), torch.zeros_like(worlds.z, dtype=torch.bool)
    curvature = 1 / worlds.s + lam
    for here in active:
        w = theta[:, None].expand_as(worlds.z)
        x = w
        for _ in range(protocol.steps):
            proximal = (worlds.z / worlds.s + lam * w) / curvature
            x = proximal if inner_steps is None else toward(x, proximal, personal_lr * curvature, inner_steps)
            w = w + protocol.lr * lam * (x - w)
        own, seen = torch.where(here, x, own), seen | here
        theta = average(theta, w, here.to(w.dtype) if equal else worlds.count * here)
    return State(theta, torch.where(seen, own, theta[:, None]))


def perfedavg(
    worlds: Worlds, active: Tensor, start: Tensor, protocol: Protocol, participation: float, *, adapt_steps: int = 1
) -> State:
    """First order, α = β = the learning rate."""
    theta, a = start, protocol.lr / worlds.s
    for here in active:
        x = toward(theta[:, None], worlds.z, a * (1 - a), protocol.steps)  # g(w̃) = (1 − α/s)(w − z)/s
        theta = average(theta, x, here.to(x.dtype))
    return State(theta, toward(theta[:, None], worlds.z, a, adapt_steps))


def selffl(
    worlds: Worlds, active: Tensor, start: Tensor, protocol: Protocol, participation: float,
    *, rules: Rules, augmented: bool = False,
) -> State:  # fmt: skip
    """Algorithm 1, or Algorithm 2 with training all the way to convergence."""
    z, s, theta = worlds.z, worlds.s, start
    own = trained = start[:, None].expand_as(z)  # what (18) starts from, and the personal model
    models = Running(torch.zeros(z.shape, dtype=torch.int64), torch.zeros_like(z)[..., None], torch.zeros_like(z))
    s0 = torch.full_like(theta, worlds.case.s0 if rules.known_variances else 0.0)
    uploaded = s if rules.known_variances else torch.full_like(s, UNKNOWN)
    step_size = rules.step_size(protocol.lr, worlds.count, worlds.count)
    default_steps = torch.full(z.shape, protocol.steps)
    c = rules.smoothing_weight(participation)
    for here in active:
        others = _sent(rules.sum_of_others(uploaded, s0, here))
        now = s if rules.known_variances else rules.own_variance(models)
        plan = rules.local_plan(now, _sent(s0)[:, None].expand_as(z), others, step_size, default_steps)
        ratio = plan.ratio * (models.n > 0)
        begin = start_of(theta[:, None, None], own[..., None], ratio).squeeze(-1) if rules.use_init else theta[:, None]
        x = toward(begin, z, protocol.lr / s, plan.steps)
        y = z if augmented else x  # the model that is judged
        added = models.add(y[..., None])
        models = Running(
            torch.where(here, added.n, models.n),
            torch.where(here[..., None], added.mean, models.mean),
            torch.where(here, added.m2, models.m2),
        )
        own, trained = torch.where(here, y, own), torch.where(here, x, trained)
        if not rules.known_variances:
            uploaded = torch.where(here, _sent(rules.own_variance(models)), uploaded)
            s0 = rules.variance_between(y[..., None], s0, here)
        weight = rules.client_weights(uploaded, s0, here) if rules.use_agg else worlds.count * here
        theta = average(theta, y, weight, c)
    return State(theta, torch.where(models.n > 0, trained, theta[:, None]))


def _sent(x: Tensor) -> Tensor:
    """A message holds float32."""
    return x.to(torch.float32).to(torch.float64)
