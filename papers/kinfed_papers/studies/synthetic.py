"""Self-FL's study on synthetic data, hundreds of repeats at once.

Chen et al., "Self-Aware Personalized Federated Learning", Appendix E.1: the two-level Gaussian task in two cases, at
participation rates from 0.1 to 1, against FedAvg, Ditto, pFedMe and Per-FedAvg. The loop of `server.loop` would need
two million rounds; here all repeats of a setting are one batch [R, M] (repeats, clients). Local training is its closed
form, exact for full batches; Self-FL decides by the same `algorithms.selffl.uncertainty.Rules` as the method itself.
The tests run every method here against its class in the loop.

Protocol, the same for all methods: θ^0 = 0, 20 rounds of FedAvg as a warm start, then 180 rounds; learning rate 1e-4,
50 local steps where the method does not choose them. The paper has 200 rounds and speaks of no warm start here.
(Starting at 1.6, as one may read the paper, starts at the truth: a smoothing average then beats the best possible
estimate.)

Steps: the paper takes them from (19), which divides η/σ_m² by a batch size that Appendix E.1 does not give. Its update
rule contracts by η/σ_m² a step, so the steps lead where they should with B = 1, and (19) is then (8). Self-FL runs so
here; one row has B = N_m, full batches, which is N_m times as many steps.

Algorithm 2 has nothing to estimate from: training to convergence ends at z_m in every round, σ_m² is 0, and (19) has no
solution. The row with estimates takes the least number of steps then, 1, as the method does.

Errors are mean absolute ones after the last round, against two references each: the truth (θ_0; θ_m), which no method
can reach, and the best estimate from the same data (θ^G; the θ^FL of the paper), which a method could.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kinfed.algorithms.selffl.uncertainty import UNKNOWN, Rules, Running, start_of
from kinfed.core import rng
from kinfed.errors import unknown_name
from kinfed.server import Schedule
from kinfed.theory import CASES, Case, TwoLevel, draw

RATES = (0.1, 0.2, 0.5, 0.8, 1.0)  # of participation

ERRORS: Mapping[str, str] = {
    "server": "global error, truth theta_0",
    "server_best": "global error, best estimate theta^G",
    "local": "local error, truth theta_m",
    "local_best": "local error, theta^FL of the paper",
}


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
        repeats = [draw(case, seed) for seed in seeds]
        return cls(
            case,
            tuple(seeds),
            torch.stack([world.theta.squeeze(1) for world in repeats]),
            torch.stack([world.z.squeeze(1) for world in repeats]),
            torch.stack([world.s for world in repeats]),
            torch.stack([world.federation.train.count.to(torch.float64) for world in repeats]),
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
        cohort = torch.argsort(rng.bits(keys, clients), dim=-1, stable=True)[..., :size]
        return torch.zeros(*keys.shape, clients, dtype=torch.bool).scatter_(-1, cohort, True)


@dataclass(frozen=True)
class Setting:
    """What a method is given: repeats of a case at one rate, from a common start."""

    worlds: Worlds
    active: Tensor  # bool [T, R, M]  who takes part in which round
    start: Tensor  # [R]  the server model before the first of these rounds
    protocol: Protocol
    participation: float

    @property
    def starts(self) -> Tensor:
        """[R, M] the start at every client."""
        return self.start[:, None].expand_as(self.worlds.z)

    @property
    def no_client(self) -> Tensor:
        """bool [R, M] False everywhere."""
        return torch.zeros_like(self.worlds.z, dtype=torch.bool)


class State(NamedTuple):
    """Final models of a method."""

    server: Tensor  # [R]
    personal: Tensor  # [R, M]


BatchedMethod = Callable[[Setting], State]


def toward(x: Tensor, target: Tensor, rate: Tensor, steps: Tensor | int) -> Tensor:
    """`repeat steps times: x -= rate * (x - target)`."""
    return target + (1 - rate) ** steps * (x - target)


def average(theta: Tensor, x: Tensor, weight: Tensor, c: float = 1.0) -> Tensor:
    """[R] θ + c Σ p_m (x_m − θ)."""
    p = weight / weight.sum(1, keepdim=True)
    return theta + c * (p * (x - theta[:, None])).sum(1)


def fedavg(setting: Setting, *, equal: bool = False, smooth: bool = False) -> State:
    worlds, protocol = setting.worlds, setting.protocol
    theta, own, seen = setting.start, setting.starts, setting.no_client
    weight = torch.ones_like(worlds.count) if equal else worlds.count
    for here in setting.active:
        x = toward(theta[:, None], worlds.z, protocol.lr / worlds.s, protocol.steps)
        own, seen = torch.where(here, x, own), seen | here
        theta = average(theta, x, weight * here, setting.participation if smooth else 1.0)
    return State(theta, torch.where(seen, own, theta[:, None]))


def ditto(setting: Setting, *, lam: float) -> State:
    worlds, protocol = setting.worlds, setting.protocol
    theta, own, seen = setting.start, setting.starts, setting.no_client
    curvature = 1 / worlds.s + lam
    for here in setting.active:
        pulled = (worlds.z / worlds.s + lam * theta[:, None]) / curvature  # optimum of f(v) + (λ/2)(v − θ)²
        own = torch.where(here, toward(own, pulled, protocol.lr * curvature, protocol.steps), own)
        seen = seen | here
        x = toward(theta[:, None], worlds.z, protocol.lr / worlds.s, protocol.steps)
        theta = average(theta, x, worlds.count * here)
    return State(theta, torch.where(seen, own, theta[:, None]))


def pfedme(
    setting: Setting,
    *,
    lam: float = 15.0,
    equal: bool = True,
    inner_steps: int | None = None,
    personal_lr: float = 0.0,
) -> State:
    """`inner_steps` steps of size `personal_lr` towards the proximal point, or all the way to it."""
    worlds, protocol = setting.worlds, setting.protocol
    theta, own, seen = setting.start, setting.starts, setting.no_client
    curvature = 1 / worlds.s + lam
    for here in setting.active:
        w = theta[:, None].expand_as(worlds.z)
        x = w
        for _ in range(protocol.steps):
            proximal = (worlds.z / worlds.s + lam * w) / curvature
            x = proximal if inner_steps is None else toward(x, proximal, personal_lr * curvature, inner_steps)
            w = w + protocol.lr * lam * (x - w)
        own, seen = torch.where(here, x, own), seen | here
        theta = average(theta, w, here.to(w.dtype) if equal else worlds.count * here)
    return State(theta, torch.where(seen, own, theta[:, None]))


def perfedavg(setting: Setting, *, adapt_steps: int = 1) -> State:
    """First order, α = β = the learning rate."""
    worlds, protocol = setting.worlds, setting.protocol
    theta, a = setting.start, protocol.lr / worlds.s
    for here in setting.active:
        x = toward(theta[:, None], worlds.z, a * (1 - a), protocol.steps)  # g(w̃) = (1 − α/s)(w − z)/s
        theta = average(theta, x, here.to(x.dtype))
    return State(theta, toward(theta[:, None], worlds.z, a, adapt_steps))


def selffl(setting: Setting, *, rules: Rules, augmented: bool = False) -> State:
    """Algorithm 1, or Algorithm 2 with training all the way to convergence."""
    worlds, protocol = setting.worlds, setting.protocol
    z, s, theta = worlds.z, worlds.s, setting.start
    own = trained = setting.starts  # what (18) starts from, and the personal model
    models = Running(torch.zeros(z.shape, dtype=torch.int64), torch.zeros_like(z)[..., None], torch.zeros_like(z))
    s0 = torch.full_like(theta, worlds.case.s0 if rules.known_variances else 0.0)
    uploaded = s if rules.known_variances else torch.full_like(s, UNKNOWN)
    step_size = rules.step_size(protocol.lr, worlds.count, worlds.count)
    default_steps = torch.full(z.shape, protocol.steps)
    c = rules.smoothing_weight(setting.participation)
    for here in setting.active:
        others = _as_sent(rules.sum_of_others(uploaded, s0, here))
        now = s if rules.known_variances else rules.own_variance(models)
        plan = rules.local_plan(now, _as_sent(s0)[:, None].expand_as(z), others, step_size, default_steps)
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
            uploaded = torch.where(here, _as_sent(rules.own_variance(models)), uploaded)
            s0 = rules.variance_between(y[..., None], s0, here)
        weight = rules.client_weights(uploaded, s0, here) if rules.use_agg else worlds.count * here
        theta = average(theta, y, weight, c)
    return State(theta, torch.where(models.n > 0, trained, theta[:, None]))


def _as_sent(x: Tensor) -> Tensor:
    """A message holds float32."""
    return x.to(torch.float32).to(torch.float64)


ESTIMATED = Rules(contraction="gd", l_max=None)
FULL_BATCHES = replace(ESTIMATED, contraction="paper")
KNOWN = replace(
    ESTIMATED, known_variances=True, domain="all"
)  # what is known of a client does not wait for it to be active


def only(part: str) -> Rules:
    """One of the three parts of the method, and smoothing."""
    return replace(KNOWN, use_init=part == "init", use_steps=part == "steps", use_agg=part == "agg")


def methods(case: Case) -> dict[str, BatchedMethod]:
    return {
        "FedAvg-w": fedavg,
        "FedAvg-e": partial(fedavg, equal=True),
        "control: FedAvg-w + smoothing": partial(fedavg, smooth=True),
        "Ditto, lambda 1": partial(ditto, lam=1.0),
        "Ditto, oracle lambda 1/s0": partial(ditto, lam=1 / case.s0),
        "pFedMe, lambda 15": pfedme,
        "pFedMe, lambda 15, weights by examples": partial(pfedme, equal=False),
        "Per-FedAvg, 1 step to adapt": perfedavg,
        "Per-FedAvg, 50 steps to adapt": partial(perfedavg, adapt_steps=50),
        "Self-FL, known variances": partial(selffl, rules=KNOWN),
        "Self-FL, estimated": partial(selffl, rules=ESTIMATED),
        "Self-FL, estimated, (19) with B = N": partial(selffl, rules=FULL_BATCHES),
        "Self-FL, known, exact posterior": partial(selffl, rules=replace(KNOWN, posterior="exact")),
        "Self-FL, estimated, exact posterior": partial(selffl, rules=replace(ESTIMATED, posterior="exact")),
        "Self-FL, known, no smoothing": partial(selffl, rules=replace(KNOWN, smoothing=1.0)),
        "Self-FL Algorithm 2, known": partial(selffl, rules=KNOWN, augmented=True),
        "Self-FL Algorithm 2, estimated": partial(selffl, rules=ESTIMATED, augmented=True),
        "known, start (18) only": partial(selffl, rules=only("init")),
        "known, steps (8) only": partial(selffl, rules=only("steps")),
        "known, weights (20) only": partial(selffl, rules=only("agg")),
    }


def absolute_errors(worlds: Worlds, state: State) -> dict[str, Tensor]:
    """[R] by the keys of ERRORS: |θ − θ_0|, |θ − θ^G|, and means over clients of |θ_m^T − θ_m| and |θ_m^T − θ_m^FL|."""
    best = worlds.model
    return {
        "server": (state.server - worlds.case.theta0).abs(),
        "server_best": (state.server - best.theta_G).abs(),
        "local": (state.personal - worlds.theta).abs().mean(1),
        "local_best": (state.personal - best.theta_FL).abs().mean(1),
    }


class StudyKey(NamedTuple):
    case: str
    method: str
    participation: float | None  # None for estimates that need no training
    error: str  # of ERRORS


class MeanError(NamedTuple):
    mean: float  # over the repeats
    standard_error: float


def run_study(
    repeats: int = 200,
    seed: int = 0,
    rates: Sequence[float] = RATES,
    protocol: Protocol | None = None,
    only_methods: Collection[str] | None = None,
) -> dict[StudyKey, MeanError]:
    """Every method (or some of `methods`) in every setting. Repeat r has the seed 1000·seed + r, so studies of up to
    1000 repeats with different seeds share no draw."""
    protocol = protocol or Protocol()
    names = methods(next(iter(CASES.values())))
    for label in only_methods or ():
        if label not in names:
            raise unknown_name("method of the study", label, names)
    table: dict[StudyKey, MeanError] = {}
    for name, case in CASES.items():
        worlds = Worlds.draw(case, [1000 * seed + r for r in range(repeats)])
        states: dict[tuple[str, float | None], State] = {(label, None): s for label, s in _without_training(worlds)}
        for rate in rates:
            states |= {(label, rate): s for label, s in _after_training(worlds, rate, protocol, only_methods)}
        for (label, participation), state in states.items():
            for error, values in absolute_errors(worlds, state).items():
                mean_error = MeanError(float(values.mean()), float(values.std() / len(values) ** 0.5))
                table[StudyKey(name, label, participation, error)] = mean_error
    return table


def _without_training(worlds: Worlds) -> Iterator[tuple[str, State]]:
    best = worlds.model
    yield "theta^G and every client alone (z)", State(best.theta_G, worlds.z)
    yield "theta^G and theta^FL of the paper", State(best.theta_G, best.theta_FL)
    yield "theta^G and exact posterior mean", State(best.theta_G, best.exact.theta_FL)


def _after_training(
    worlds: Worlds, rate: float, protocol: Protocol, only_methods: Collection[str] | None
) -> Iterator[tuple[str, State]]:
    start = torch.full((len(worlds.seeds),), protocol.start).to(worlds.z)
    warm = fedavg(Setting(worlds, worlds.active(rate, 1, protocol.warm), start, protocol, rate))
    active = worlds.active(rate, protocol.warm + 1, protocol.warm + protocol.rounds)
    setting = Setting(worlds, active, warm.server, protocol, rate)
    for label, method in methods(worlds.case).items():
        if only_methods is None or label in only_methods:
            yield label, method(setting)
