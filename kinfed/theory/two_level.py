"""The two-level Gaussian model behind Self-FL, in closed form.

    θ_m ~ N(θ_0, s0)      z_m | θ_m ~ N(θ_m, s_m)      m = 1..M,   flat prior on θ_0

z_m is what client m learns alone, s_m how uncertain that is, s0 how much clients differ. What a client can
gain from the others follows from w_m = 1/(s0 + s_m) and S_{-m} = Σ_{k≠m} w_k.

Chen et al., "Self-Aware Personalized Federated Learning", https://arxiv.org/abs/2204.08069, Sections 2, 3.1
and F. Equation numbers are those of that version.

The others enter an estimate of θ_m as one number, INIT_m (7), that is given some precision Q_m:

    θ^FL = (z_m/s_m + Q_m INIT_m) / (1/s_m + Q_m) = (1 − ρ_m) z_m + ρ_m INIT_m,    ρ_m = Q_m / (1/s_m + Q_m)

* ``posterior="paper"``: Q = S_{-m}, Equation (3), the posterior mean if client m's own parameter were θ_0.
* ``posterior="exact"``: Q = 1/(s0 + 1/S_{-m}), the posterior mean under the model above, where the others
  speak of θ_m only through θ_0, which is itself a draw of variance s0 away. Equal at s0 = 0 and s0 = ∞.

The difference matters. The paper's estimate has a larger expected error than z_m, so it is worse than not federating,
exactly when s0 > s_m + 1/S_{-m}, although its GAIN is never below 1. ``mse`` is the true expected error.

Limits: s0 = 0 (one parameter for all) gives θ^FL = θ^G; s0 = ∞ or a single client gives θ^FL = z_m, gain 1.

Vectors: weights are scalars, so estimates may have a last axis of d coordinates. s and s0 are then both
variances per coordinate or both traces (Section 3.2): ρ, INIT and gain are the same either way, and ``v_G``,
``v_FL``, ``mse`` come out in the unit of s. ``steps`` needs them per coordinate, because gradient descent
contracts a coordinate by 1 − η/s of that coordinate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Posterior = Literal["paper", "exact"]
Numbers = Tensor | np.ndarray[Any, Any] | Sequence[float] | float


def precision_of_others(S: Tensor, s0: Tensor | float, posterior: Posterior) -> Tensor:
    """Q_m: how precisely INIT_m is believed to tell θ_m, from S = S_{-m}."""
    return S if posterior == "paper" else 1 / (s0 + 1 / S)


def shrink(s: Tensor, Q: Tensor) -> Tensor:
    """ρ = Q/(1/s + Q), the weight of the others."""
    return 1 / (1 + 1 / (s * Q))


def log_shrink(s: Tensor, Q: Tensor) -> Tensor:
    """ln ρ, exact also where ρ rounds to 1."""
    return -torch.log1p(1 / (s * Q))


def others_sum(x: Tensor, dim: int) -> Tensor:
    """``x.sum(dim, keepdim=True) - x`` without the subtraction, which cancels if one client outweighs all."""
    count = x.shape[dim]
    zero = torch.zeros_like(x.narrow(dim, 0, 1))
    before = torch.cat([zero, x.narrow(dim, 0, count - 1).cumsum(dim)], dim)
    after = torch.cat([x.narrow(dim, 1, count - 1).flip(dim).cumsum(dim).flip(dim), zero], dim)
    return before + after


class Iterate(NamedTuple):
    """One state of the generic iteration, or its limit, or a bound on its distance to (θ^G, θ^FL)."""

    server: Tensor  # [...] or [..., d]
    personal: Tensor  # [..., M] or [..., M, d]; a bound is [...], the maximum over clients


@dataclass(frozen=True, eq=False, init=False)
class TwoLevel:
    """The model with everything known; quantities of the paper are its properties.

    The last axis of s is the clients; axes before it are a batch (repeats, settings) and broadcast. z has as
    many axes as s for scalar parameters, one more for vectors: next to s [3] a z of [3, 5] holds vectors and
    one of [5, 3] is refused; next to s [1, 3] the latter is five repeats of three clients."""

    z: Tensor  # [..., M] or [..., M, d]   θ^L, what each client has learned alone
    s: Tensor  # [..., M]                  its variance v^L, positive and finite
    s0: Tensor  # [...]                    variance between clients, 0 and ∞ included
    posterior: Posterior

    def __init__(self, z: Numbers, s: Numbers, s0: Numbers, posterior: Posterior = "paper") -> None:
        z, s, s0 = (torch.as_tensor(x, dtype=torch.float64) for x in (z, s, s0))
        if posterior not in ("paper", "exact"):
            raise ValueError(f'posterior must be "paper" or "exact"; got {posterior!r}')
        if s.dim() == 0 or s.shape[-1] == 0:
            raise ValueError(f"s needs a last axis with one variance per client; got shape {list(s.shape)}")
        if z.dim() - s.dim() not in (0, 1) or z.shape[s.dim() - 1] != s.shape[-1]:
            raise ValueError(
                "z must have as many axes as s, or one more for the coordinates of a vector, and as many "
                f"clients; got z {list(z.shape)} and s {list(s.shape)} "
                "(for repeats over one set of variances give s a leading axis of 1)"
            )
        _require(bool(z.isfinite().all()), "every estimate z must be finite", z)
        _require(bool((s.isfinite() & (s > 0)).all()), "every variance s_m must be positive and finite", s)
        _require(bool((s0 >= 0).all()), "s0 must be 0 or more (infinity included)", s0)
        try:
            batch = np.broadcast_shapes(z.shape[: s.dim() - 1], s.shape[:-1], s0.shape)
        except ValueError as error:
            raise ValueError(
                "the axes before the client axis must broadcast; "
                f"got z {list(z.shape)}, s {list(s.shape)}, s0 {list(s0.shape)}"
            ) from error
        z, s, s0 = z.expand(*batch, *z.shape[s.dim() - 1 :]), s.expand(*batch, s.shape[-1]), s0.expand(batch)
        for name, value in {"z": z, "s": s, "s0": s0, "posterior": posterior}.items():
            object.__setattr__(self, name, value)

    @property
    def exact(self) -> "TwoLevel":
        return replace(self, posterior="exact")

    @property
    def clients(self) -> int:
        return self.s.shape[-1]

    # ---- weights, kept relative to the largest so that s0 = ∞ is their limit (equal) and not 0/0 ----

    @cached_property
    def _heaviest(self) -> Tensor:
        """[...]  1/max_m w_m."""
        return self.s0 + self.s.amin(-1)

    @cached_property
    def _relative(self) -> Tensor:
        """[..., M]  w_m / max_k w_k."""
        excess = self.s - self.s.amin(-1, keepdim=True)
        return 1 / (1 + excess / self._heaviest[..., None])

    @cached_property
    def _relative_others(self) -> Tensor:
        return others_sum(self._relative, -1)

    @property
    def w(self) -> Tensor:
        """[..., M]  1/(s0 + s_m)"""
        return self._relative / self._heaviest[..., None]

    @property
    def p(self) -> Tensor:
        """[..., M]  w_m / Σ w_k, the aggregation weights of (14)."""
        return self._relative / self._relative.sum(-1, keepdim=True)

    @cached_property
    def S(self) -> Tensor:
        """[..., M]  S_{-m} = Σ_{k≠m} w_k"""
        return self._relative_others / self._heaviest[..., None]

    @cached_property
    def Q(self) -> Tensor:
        """[..., M]  the precision given to INIT_m: the one place where the two posteriors differ."""
        return precision_of_others(self.S, self.s0[..., None], self.posterior)

    # ---- the quantities of Section 2 ----

    @cached_property
    def theta_G(self) -> Tensor:
        """[...] or [..., d]  (2), the posterior mean of θ_0."""
        return self.aggregate(self.z)

    @property
    def v_G(self) -> Tensor:
        """[...]  (2), the posterior variance of θ_0."""
        return self._heaviest / self._relative.sum(-1)

    @cached_property
    def init(self) -> Tensor:
        """INIT_m (7) = θ^G − (w_m/S_{-m})(z_m − θ^G) (12): the estimate of θ_0 by everyone else."""
        return self.mean_of_others(self.z)

    @cached_property
    def rho(self) -> Tensor:
        """[..., M]  right-hand side of (8): how far θ^FL is drawn from z_m to INIT_m."""
        return shrink(self.s, self.Q)

    @cached_property
    def own_weight(self) -> Tensor:
        """[..., M]  1 − ρ_m, with its own relative accuracy."""
        return 1 / (1 + self.s * self.Q)

    @cached_property
    def theta_FL(self) -> Tensor:
        """(3), the estimate of θ_m from everyone's data."""
        return self._per_client(self.own_weight) * self.z + self._per_client(self.rho) * self.init

    @property
    def v_FL(self) -> Tensor:
        """[..., M]  the variance (3) claims for θ^FL; true for the exact posterior, see ``mse``."""
        return self.s * self.own_weight

    @property
    def gain(self) -> Tensor:
        """[..., M]  GAIN_m = v^L / v^FL, at least 1; a claim to the extent that v_FL is one."""
        return 1 + self.s * self.Q

    # ---- expected squared errors E|estimate − θ_m|² under the model ----

    def mse_of(self, weight_of_others: Tensor, own_weight: Tensor | None = None) -> Tensor:
        """[..., M]  of (1 − r) z_m + r INIT_m, where r = 0 is learning alone.

        z_m − θ_m and INIT_m − θ_m are independent with variances s_m and s0 + 1/S_{-m}. Where s and s0 are
        traces this is the trace of the error covariance, whatever the covariances they are traces of."""
        own = 1 - weight_of_others if own_weight is None else own_weight
        error = weight_of_others * (weight_of_others * (self.s0[..., None] + 1 / self.S))
        return own**2 * self.s + torch.where(weight_of_others > 0, error, 0)

    @property
    def mse(self) -> Tensor:
        """[..., M]  of θ^FL. With the exact posterior it equals v_FL, the least any weight can reach."""
        return self.mse_of(self.rho, self.own_weight)

    @property
    def mse_global(self) -> Tensor:
        """[..., M]  of θ^G taken as client m's model: θ^G = p_m z_m + (1 − p_m) INIT_m."""
        return self.mse_of(self._relative_others / self._relative.sum(-1, keepdim=True), self.p)

    # ---- reaching θ^FL by early-stopped gradient descent ----

    def steps(self, eta: float) -> Tensor:
        """[..., M]  l_m = ln ρ_m / ln(1 − η/s_m): steps of size η from INIT_m to θ^FL (8), a real number.

        Increases with s_m, up to 1/(η Q_m): with noisier data there is less way to go, but each step does
        less still. ∞ where ρ = 0 (nothing to hold on to: train to the end)."""
        self._require_contraction(eta)
        return log_shrink(self.s, self.Q) / torch.log1p(-eta / self.s)

    def rounded_shrink(self, eta: float) -> Tensor:
        """[..., M]  (1 − η/s_m)^l, what ρ_m becomes when l_m is rounded to whole steps, at least one."""
        return (1 - eta / self.s) ** self.steps(eta).round().clamp(min=1)

    def descend(self, start: Tensor, eta: float, steps: Tensor | int) -> Tensor:
        """(6): ``repeat steps times: x = x - eta * (x - z) / s``, beginning at x = start."""
        self._require_contraction(eta)
        left = self._per_client((1 - eta / self.s) ** steps)
        return (1 - left) * self.z + left * start

    # ---- the generic iteration of Section 3.1 ----

    def aggregate(self, personal: Tensor) -> Tensor:
        """(14): Σ p_m θ_m."""
        return (self._per_client(self.p) * personal).sum(self._axis)

    def mean_of_others(self, personal: Tensor) -> Tensor:
        """Σ_{k≠m} w_k θ_k / S_{-m} for every m. A single client has no others and is left where it is."""
        if self.clients == 1:
            return personal
        total = others_sum(self._per_client(self._relative) * personal, self._axis)
        return total / self._per_client(self._relative_others)

    def rounds(self, start: Numbers, shrink: Tensor | None = None) -> Iterator[Iterate]:
        """Generic Self-FL without end: first everyone at ``start``, then the state after each round.

        ``shrink`` is ρ unless given, e.g. ``rounded_shrink(eta)`` for whole steps. θ_m^{t,INIT} (13) is taken
        as the mean of the others' models, which it equals because θ^{t-1} is the weighted mean of all (34)."""
        others, own = self._mixing(shrink)
        start = torch.as_tensor(start, dtype=torch.float64)
        server = start.expand_as(self.theta_G)
        personal = server.unsqueeze(self._axis).expand_as(self.z)
        while True:
            yield Iterate(server, personal)
            personal = own * self.z + others * self.mean_of_others(personal)
            server = self.aggregate(personal)

    def fixed_point(self, shrink: Tensor | None = None) -> Iterate:
        """Limit of ``rounds``: the solution of θ_m = (1 − ρ_m) z_m + ρ_m Σ_{k≠m} w_k θ_k / S_{-m}.

        Not θ^FL: the iteration averages the others' personal models where (7) has their z. Writing the mean
        of the others through X = Σ p_k θ_k turns the system into shrinkage towards X, solved in O(M):

            θ_m = (1 − κ_m) z_m + κ_m X        X = Σ p_m (1 − κ_m) z_m / Σ p_m (1 − κ_m)
            κ_m = ρ_m (1 + w_m/S_{-m}) / (1 + ρ_m w_m/S_{-m})
        """
        if self.clients == 1:
            return Iterate(self.theta_G, self.z)
        others, own = self._mixing(shrink)
        relative, rest = self._per_client(self._relative), self._per_client(self._relative_others)
        damping = 1 + others * (relative / rest)
        stay = own / damping
        pull = others * (1 + relative / rest) / damping
        server = (relative * stay * self.z).sum(self._axis) / (relative * stay).sum(self._axis)
        return Iterate(server, stay * self.z + pull * server.unsqueeze(self._axis))

    def bound(self, t: int, start: Numbers, shrink: Tensor | None = None) -> Iterate:
        """Proposition 3.1 with its O_p(M^{-1/2}) written out, on |θ^t − θ^G| and max_m |θ_m^t − θ_m^FL|.

        Let q = max ρ_m and C = max |start − θ_m^FL|. A mean of others is no farther from its limit than the
        farthest of them, so a round shortens the largest distance to the fixed point (X, x) by a factor q:

            max_m |θ_m^t − θ_m^FL| <= C q^t + (1 + q^t) gap,       gap = max_m |x_m − θ_m^FL|
                   |θ^t − θ^G|     <= (C + gap) q^t + |X − θ^G|

        The terms that stay are the statistical error. (The printed proof drops a factor 1/(1 − q) on it in
        (44); going through the fixed point needs none.)"""
        start = torch.as_tensor(start, dtype=torch.float64).expand_as(self.theta_G).unsqueeze(self._axis)
        limit = self.fixed_point(shrink)
        decay = (self.rho if shrink is None else shrink).amax(-1) ** t
        C = self._length(start - self.theta_FL).amax(-1)
        gap = self._length(limit.personal - self.theta_FL).amax(-1)
        return Iterate((C + gap) * decay + self._length(limit.server - self.theta_G), C * decay + (1 + decay) * gap)

    # ---- shapes ----

    @property
    def _vectors(self) -> bool:
        return self.z.dim() > self.s.dim()

    @property
    def _axis(self) -> int:
        """Axis of clients in z."""
        return -2 if self._vectors else -1

    def _per_client(self, weight: Tensor) -> Tensor:
        return weight[..., None] if self._vectors else weight

    def _length(self, x: Tensor) -> Tensor:
        return x.norm(dim=-1) if self._vectors else x.abs()

    def _mixing(self, shrink: Tensor | None) -> tuple[Tensor, Tensor]:
        """ρ and 1 − ρ, ready to multiply z."""
        if shrink is None:
            return self._per_client(self.rho), self._per_client(self.own_weight)
        _require(bool(((shrink >= 0) & (shrink < 1)).all()), "every shrink factor must lie in [0, 1)", shrink)
        return self._per_client(shrink), self._per_client(1 - shrink)

    def _require_contraction(self, eta: float) -> None:
        least = float(self.s.min())
        if not 0 < eta < least:
            raise ValueError(
                f"a step shrinks the distance to z by 1 − eta/s_m, which (8) needs between 0 and 1: "
                f"0 < eta < {least:.6g}, the smallest s_m; got eta={eta:g}"
            )


def _require(holds: bool, wanted: str, values: Tensor) -> None:
    if not holds:
        low, high = (float(values.min()), float(values.max())) if values.numel() else (float("nan"), float("nan"))
        raise ValueError(f"{wanted}; got values from {low:g} to {high:g}")
