"""The two-level Gaussian task: clients estimate a mean, and everything they could do is known in closed form.

    θ_m ~ N(θ_0, s0)      x_mi ~ N(θ_m, v), i = 1..N_m      z_m = mean_i x_mi ~ N(θ_m, s_m),   s_m = v / N_m

It is the model behind Self-FL (`kinfed.theory.two_level`) as a federation with a task, so that every method runs on it
through the same loop and pools as on real data, and can be checked against an exact answer:

    loss_m(θ) = Σ_i (θ − x_mi)² / (2 v)     gradient (θ − z_m) / s_m     l steps: z_m + (1 − η/s_m)^l (θ − z_m)

A mini-batch stands for all N_m examples, so its gradient is (θ − mean of the batch) / s_m, and a batch of at least
N_m examples makes gradient descent exact.

CASES holds the two settings of Chen et al., "Self-Aware Personalized Federated Learning", Appendix E.1.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Batch, Features, Federation, Problem, Ragged, Split
from kinfed.engine import FeatureLoss, ParameterSlot, Score, Task, refuse_feature_loss
from kinfed.errors import ConfigError
from kinfed.theory.two_level import Posterior, TwoLevel


@dataclass(frozen=True)
class Case:
    """Distribution that a federation is drawn from."""

    s0: float  # variance of clients' parameters around theta0
    low: int  # N_m is uniform on low..high
    high: int
    clients: int = 20
    theta0: float = 1.6
    v: float = 0.1  # variance of one example
    dims: int = 1  # independent coordinates, each with these variances
    test: int = 10  # test examples of every client

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"clients need 1 <= low <= high training examples; got {self.low}..{self.high}")
        if self.s0 < 0 or not self.v > 0:
            raise ConfigError(f"s0 is a variance >= 0 and v one > 0; got s0={self.s0}, v={self.v}")
        for name, least in (("clients", 1), ("dims", 1), ("test", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}")


CASES: Mapping[str, Case] = MappingProxyType({
    "homogeneous": Case(s0=0.001, low=10, high=20),  # Case 1
    "heterogeneous": Case(s0=1.0, low=10, high=200),  # Case 2
})  # fmt: skip


@dataclass(frozen=True)
class GaussianWorld:
    """One draw of a case: what the clients hold, and the truth that only we know."""

    case: Case
    federation: Federation
    theta: Tensor  # [K, d] float64  θ_m
    z: Tensor  # [K, d] float64  θ^L, the mean of each client's training examples as stored
    s: Tensor  # [K] float64  s_m

    def task(self, start: float = 0.0, dtype: torch.dtype = torch.float32) -> GaussianTask:
        return GaussianTask(self.s, self.case.s0, self.case.dims, start, dtype)

    def model(self, posterior: Posterior = "paper") -> TwoLevel:
        """Closed forms of this draw; estimates are [K] for one coordinate, [K, d] for more."""
        return TwoLevel(self.z.squeeze(1) if self.case.dims == 1 else self.z, self.s, self.case.s0, posterior)


def draw(case: Case | str, seed: int) -> GaussianWorld:
    """The federation of a case (or of its name in CASES) under a seed."""
    if isinstance(case, str):
        if case not in CASES:
            raise ConfigError(f"case is one of {', '.join(CASES)}, or a Case; got {case!r}")
        case = CASES[case]
    ids = torch.arange(case.clients)
    width = case.high - case.low + 1
    u = rng.uniform(rng.fold(rng.root(seed, "gaussian-sizes"), ids), 1).squeeze(1)
    count = case.low + (u * width).to(torch.int64)
    key = rng.fold(rng.root(seed, "gaussian-parameters"), ids)
    theta = case.theta0 + case.s0**0.5 * rng.normal(key, case.dims)
    # Test examples come after the training examples of the same stream, so that `test` does not change training.
    held = count + case.test
    owner = torch.repeat_interleave(ids, held)
    place = torch.arange(len(owner)) - (torch.cumsum(held, 0) - held)[owner]
    noise = rng.normal(rng.fold(rng.root(seed, "gaussian-examples"), owner, place), case.dims)
    x = (theta[owner] + case.v**0.5 * noise).to(torch.float32)
    rows = torch.arange(len(owner))
    trains = place < count[owner]
    train = Ragged.grouped(rows[trains], owner[trains], case.clients)
    test, names = Ragged.grouped(rows[~trains], owner[~trains], case.clients), [str(k) for k in range(case.clients)]
    federation = Federation(
        Features(x), torch.zeros(len(x), dtype=torch.int64), problem=Problem.of_classes(1),
        train=train, val=Ragged.empty(case.clients), test=test, names=names,
        description={"dataset": "gaussian", "theta0": case.theta0, "s0": case.s0, "v": case.v, "seed": seed},
    )  # fmt: skip
    total = torch.zeros(case.clients, case.dims, dtype=torch.float64)
    total.index_add_(0, owner[trains], x[trains].to(torch.float64))
    n = count.to(torch.float64)
    return GaussianWorld(case, federation, theta, total / n[:, None], case.v / n)


class GaussianTask(Task):
    """θ [n, d]: a row is a client's estimate of its mean. `known_variances` and `known_s0` let a method that can
    use the true variances ask for them."""

    backend = "gaussian"
    classifies = False

    def __init__(
        self, s: Tensor, s0: float, dims: int = 1, start: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> None:
        self.s = s.to(torch.float64)  # [K]
        self.s0 = s0
        self._start = torch.full((dims,), start, dtype=dtype)  # θ^0
        self._dtype = dtype
        self.num_params = dims
        self.slots = (ParameterSlot("theta", (dims,), 0, dims),)

    def starting_at(self, start: Tensor) -> GaussianTask:
        """The same task with θ^0 = start [d]; this one is left as it is."""
        task = copy.copy(self)
        task._start = start.detach().clone()
        return task

    def init(self, seed: int, number: int = 0) -> Tensor:
        start = self._start
        if number:
            start = start + rng.normal(rng.fold(rng.root(seed, "gaussian-init"), number), self.num_params)
        return start.to(self._dtype, copy=True)

    def known_variances(self, ids: Tensor) -> Tensor:
        """[n] float64: s_m of each coordinate of θ^L."""
        return self.s[ids]

    def known_s0(self) -> float:
        return self.s0

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        refuse_feature_loss(feature_loss, "a Gaussian model")
        pull = (theta[:, None] - batch.x) * batch.weight[..., None]
        return pull.sum(1) / self.s[batch.ids].to(theta.dtype)[:, None]

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, d]: the value predicted for every example, which is θ."""
        return theta[:, None].expand(-1, x.shape[1], -1)

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B]: an example stands for all N_m, hence s_m and not v below."""
        return (theta[:, None] - batch.x).square().sum(-1) / (2 * self.s[batch.ids].to(theta.dtype)[:, None])

    @torch.no_grad()
    def score(self, theta: Tensor, part: Split) -> Score:
        loss = torch.zeros(len(part.count), dtype=torch.float64)
        for rows, batch in part.in_order():
            loss[rows] += (self.losses(theta[rows], batch) * batch.weight).sum(1).to(torch.float64)
        return Score(torch.zeros_like(loss), loss, part.count)
