"""The arithmetic of Self-FL: what clients' uncertainties imply for starting points, steps and weights.

Chen et al., "Self-Aware Personalized Federated Learning", https://arxiv.org/abs/2204.08069. Equation numbers are
those of that version. Every function takes tensors of any leading shape with clients on one axis, so the three
variants of the method (`kinfed.algorithms.selffl`, one row per client) and the study on synthetic data
(`kinfed_papers.studies.synthetic`, repeats by clients) run the same lines.

    s_m   intra-client uncertainty σ_m²: how much client m's models vary from one of its rounds to the next
    s_0   inter-client uncertainty σ_0²: how much clients' models differ
    w_m = 1/(s_0 + s_m)       S = S_{-m} = Σ_{k≠m} w_k

A variance that is not known yet is written −1 (messages may hold only finite numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kinfed.core import Range, check_options, kernels, option
from kinfed.errors import ConfigError
from kinfed.theory import log_shrink, others_sum, precision_of_others, shrink

UNKNOWN = -1.0
MIN_ROUNDS = 2  # models of a client that make a variance
MANY_STEPS = 1_000_000  # where nothing else caps them


class Running(NamedTuple):
    """Mean and spread of a sequence of vectors without keeping them (Eq. 21): 2 scalars and one vector each."""

    n: Tensor  # [...] int64    vectors seen: the client's own count of active rounds (Remark C.1)
    mean: Tensor  # [..., P]    x̄
    m2: Tensor  # [...] float64 Σ_i ‖x_i − x̄‖²

    def add(self, x: Tensor) -> Running:
        """Welford's update. Eq. (22) as printed lacks the square on (x̄_t − x̄_{t−1}) and is not Eq. (21).

        With d = x − x̄ the increment ⟨x − x̄_old, x − x̄_new⟩ is (1 − 1/n) ‖d‖²: never negative. As many rows at a
        time as stay in cache, so that models pass through memory once."""
        n = self.n + 1
        share = 1 / n.to(torch.float64)
        weight, mean = share.to(x.device, x.dtype)[..., None], torch.empty_like(x)
        height = max(2 * kernels.IN_CACHE // max(x[:1].numel(), 1), 1)
        squares = []
        for new, old, into, w in zip(*(torch.split(t, height) for t in (x, self.mean, mean, weight)), strict=True):
            d = torch.sub(new, old, out=into)
            squares.append(kernels.squared_norm(d))
            torch.addcmul(old, d, w, out=into)
        return Running(n, mean, self.m2 + (1 - share) * torch.cat(squares).to(self.m2.device))


class LocalPlan(NamedTuple):
    """Work of a client in a round: FedAvg's where it is not `ready`."""

    ready: Tensor  # bool: all uncertainties are known
    ratio: Tensor  # w_m/S of (18), capped; 0 where not ready
    rho: Tensor  # right-hand side of (19): the weight of the others; −1 where not ready
    raw: Tensor  # l_m of (19), a real number; 0 where a step leaps past the optimum; −1 where not ready
    steps: Tensor  # int64: steps to take

    def summary(self) -> Tensor:
        """[..., 3] ρ, l_m as a real number, and the steps taken, for a report."""
        return torch.stack([self.rho, self.raw, self.steps.to(self.raw)], -1)


@dataclass(frozen=True)
class Rules:
    """The options of Self-FL and the formulas that depend on them."""

    use_init: bool = option(
        True, "start local training at the mean of the others (18); otherwise at the received model"
    )
    use_steps: bool = option(True, "number of local steps by (19); otherwise the common one")
    use_agg: bool = option(True, "average with weights w_m (20); otherwise by numbers of examples")
    l_max: int | None = option(
        40, "largest number of steps; the paper's 40 for images; none leaves it to (19)",
        ge=1, tune=Range(10, 100, whole=True),
    )  # fmt: skip
    l_init: int | None = option(None, "steps while a client's variance is unknown; the common number by default", ge=1)
    fixed_epochs: int | None = option(
        None, "train this many epochs always and skip (19); the paper's 2 for Sent140", ge=1
    )
    smoothing: float | Literal["participation"] = option(
        "participation", "c in θ ← (1 − c) θ + c θ̂: a number, 1 being none, or the participation rate", gt=0, le=1
    )
    var_m: Literal["mean", "sum"] = option(
        "mean", "s_m is the mean over rounds of ‖x − x̄‖² (Eq. 21) or the sum (Sec. 3.2)"
    )
    var0: Literal["mean", "sum"] = option("sum", "s_0 is the sum over clients of ‖x − x̄‖² (Sec. 3.2) or the mean")
    domain: Literal["active", "all"] = option(
        "active", "S sums over the active clients of the round or over all with a known variance"
    )
    r_max: float = option(
        1.0, "cap on w_m/S in (18), inf for none; without it two active clients can drive each other to infinity",
        gt=0, infinite=True,
    )  # fmt: skip
    contraction: Literal["paper", "gd", "sum", "mean"] = option(
        "paper",
        "how a step shrinks the distance to the optimum in (19): by 1 − a with a = η/(B s) (paper), η/s (gd: full "
        "gradients of a loss with curvature 1/s, which is (8), the NeurIPS version's steps), η B/(N s) "
        "(sum of the batch) or η/(N s) (mean of the batch)",
    )
    posterior: Literal["paper", "exact"] = option(
        "paper", "ρ with the precision S for the others (paper, (3)) or 1/(s_0 + 1/S), which the model implies (exact)"
    )
    l_rule: Literal["log", "first_order"] = option(
        "log", "l = ln ρ / ln(1 − a) (log, (19)) or −ln ρ / a (first_order, defined for every a)"
    )
    known_variances: bool = option(
        False, "take s_m and s_0 from the task, where it knows them, instead of estimating them"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.fixed_epochs is not None and not self.use_steps:
            raise ConfigError("fixed_epochs replaces the steps of (19); leave it out with use_steps=false")

    def smoothing_weight(self, participation: float) -> float:
        return participation if isinstance(self.smoothing, str) else self.smoothing

    # ---- uncertainties ----

    def own_variance(self, models: Running) -> Tensor:
        """[...] s_m from a client's past models (16), −1 if there are fewer than two."""
        n = models.n.to(torch.float64)
        s = models.m2 / n.clamp_min(1) if self.var_m == "mean" else models.m2
        return torch.where(models.n >= MIN_ROUNDS, s, UNKNOWN)

    def variance_between(self, x: Tensor, previous: Tensor, among: Tensor | None = None) -> Tensor:
        """[...] s_0 from the models x [n, P] of this round (17); the previous one if there are fewer than two.

        With `among` [..., n], which says what rows count, x is [..., n, P]. Models may be given relative to a common
        one."""
        if among is None:
            count, square = torch.tensor(len(x)), kernels.spread(x)
        else:
            count, here = among.sum(-1), among[..., None].to(x.dtype)
            mean = (x * here).sum(-2, keepdim=True) / count.clamp_min(1)[..., None, None]
            square = kernels.squared_norm((x - mean) * here).sum(-1)
        square = square.to(previous.device)
        if self.var0 == "mean":
            square = square / count.clamp_min(1)
        return torch.where(count >= 2, square, previous)

    # ---- what follows from them ----

    def precision(self, s: Tensor, s0: Tensor) -> Tensor:
        """w = 1/(s_0 + s), 0 where s is unknown."""
        return torch.where(s >= 0, 1 / (s0 + positive_variance(s, s0)), 0)

    def sum_of_others(self, s: Tensor, s0: Tensor, active: Tensor) -> Tensor:
        """[..., K] S_{-m} over the domain, for every client whether in it or not."""
        w = self.precision(s, s0[..., None])
        return others_sum(w if self.domain == "all" else torch.where(active, w, 0), -1)

    def client_weights(self, s: Tensor, s0: Tensor, among: Tensor | None = None) -> Tensor:
        """[..., n] w_m of (20), up to a factor; clients of unknown variance count like the mean of the others."""
        estimated = s >= 0 if among is None else (s >= 0) & among
        w = torch.where(estimated, self.precision(s, s0[..., None]), 0)
        mean = w.sum(-1, keepdim=True) / estimated.sum(-1, keepdim=True).clamp_min(1)
        mean = torch.where(mean > 0, mean, 1)
        weight = torch.where(estimated, w, mean)
        return weight if among is None else torch.where(among, weight, 0)

    def local_plan(
        self, s: Tensor, s0: Tensor, S: Tensor, step_size: Tensor | float, default_steps: Tensor
    ) -> LocalPlan:
        """Elementwise over clients. `step_size` is a·s, the numerator of the contraction rate; `default_steps` are
        those of clients that are not ready."""
        ready = (s >= 0) & (S > 0)
        if not self.known_variances:
            ready = ready & (s0 > 0)
        # Harmless numbers where not ready, so that the formulas below are defined everywhere.
        s0, S = torch.where(ready, s0, 1.0), torch.where(ready, S, 1.0)
        s = torch.where(ready, positive_variance(s, s0), 1.0)
        ratio = (1 / ((s0 + s) * S)).clamp_max(self.r_max)
        Q = precision_of_others(S, s0, self.posterior)
        a = step_size / s
        if self.l_rule == "first_order":
            raw = -log_shrink(s, Q) / a
        else:
            # As a → 1 the number of steps falls to 0; beyond, a single step leaps past the optimum.
            raw = torch.where(a < 1, log_shrink(s, Q) / torch.log1p(-a.clamp_max(1.0)), 0.0)
        steps = default_steps
        if self.use_steps and self.fixed_epochs is None:
            cap = MANY_STEPS if self.l_max is None else self.l_max
            steps = torch.where(ready, raw.round().clamp(1, cap).to(torch.int64), default_steps)
        rho, raw = torch.where(ready, shrink(s, Q), UNKNOWN), torch.where(ready, raw, UNKNOWN)
        return LocalPlan(ready, torch.where(ready, ratio, 0.0), rho, raw, steps)

    def step_size(self, lr: float, batch: Tensor, count: Tensor) -> Tensor:
        """[...] a·s for clients with `count` examples and batches of `batch` of them."""
        batch, count = batch.to(torch.float64), count.to(torch.float64)
        rules = {"paper": lr / batch, "sum": lr * batch / count, "mean": lr / count, "gd": torch.full_like(count, lr)}
        return rules[self.contraction]


def positive_variance(s: Tensor, s0: Tensor) -> Tensor:
    """s kept away from 0, where 1/s does not exist: a client whose models never move."""
    return torch.maximum(s, 1e-12 * s0.clamp_min(1.0))


def start_of(theta: Tensor, own: Tensor, ratio: Tensor) -> Tensor:
    """(18): θ − (w_m/S)(θ_m − θ), the mean of the others where θ is the mean of all."""
    return torch.lerp(theta, own, -ratio.to(theta.device, theta.dtype)[..., None])
