"""A clock for simulations: how long clients of different speed take for their work and their messages.

    seconds of client k = g_k · step_seconds · c_k · j + (bytes down + up) / (bandwidth · b_k),
    c_k = exp(spread · z),   b_k = exp(bandwidth_spread · z),   j = exp(jitter · z),      z ~ N(0, 1)

g_k is the number of gradients of a round, as the method declares them (Ditto takes two for each step); c_k and b_k are
the client's own for the whole run, j is drawn anew each time. All are hashes of the seed and the client, so that
methods of a seed meet the same clients, and synchronous and asynchronous rounds can be compared over simulated time.

A synchronous round takes as long as the slowest client whose update it waits for; the server's own work takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import Registry, check_options, option, rng


@dataclass(frozen=True)
class Speeds:
    """How fast clients are. Its fields are its options."""

    step_seconds: float = option(0.1, "seconds of a gradient on a batch at the median client", ge=0)
    spread: float = option(1.0, "of clients' computing speeds: standard deviation of their logarithm", ge=0, le=5)
    bandwidth: float = option(1e6, "bytes per second, both ways, at the median client", gt=0)
    bandwidth_spread: float = option(1.0, "of clients' bandwidths: standard deviation of their logarithm", ge=0, le=5)
    jitter: float = option(0.0, "the same for a factor on computing that is drawn for every round", ge=0, le=5)

    def __post_init__(self) -> None:
        check_options(self)


CLOCKS: Registry[type[Speeds]] = Registry("clock")
CLOCKS.register("lognormal", Speeds, summary="clients whose computing and bandwidth differ, lognormally")
CLOCKS.register(
    "equal", Speeds, summary="clients that are all as fast", preset={"spread": 0.0, "bandwidth_spread": 0.0}
)


def gradients_per_round(algorithm: AnyAlgorithm, count: Tensor) -> Tensor:
    """[K] float64: gradients on batches that clients with `count` examples take in a round, as the method declares them
    to privacy; one for each local step where it declares none."""
    profile = algorithm.privacy(count)
    if profile is None or not profile.per_round:
        return algorithm.training.num_steps(count).double()
    return torch.stack([k * batches.double() for k, batches in profile.per_round.items()]).sum(0)


@dataclass(frozen=True)
class Clock:
    """The times that the clients of one run take."""

    speeds: Speeds
    gradients: Tensor  # [K] of a round
    seed: int

    def seconds(self, ids: Tensor, number: Tensor | int, nbytes: float, effort: Tensor | None = None) -> Tensor:
        """[n] float64: duration of these clients' round `number`, with messages of `nbytes` bytes together."""
        speeds = self.speeds
        work = self.gradients[ids] * speeds.step_seconds * torch.exp(speeds.spread * self._normal("speed", ids))
        if speeds.jitter:
            work = work * torch.exp(speeds.jitter * self._normal("jitter", ids, number))
        if effort is not None:
            work = work * effort
        return work + nbytes / (speeds.bandwidth * torch.exp(speeds.bandwidth_spread * self._normal("bandwidth", ids)))

    def _normal(self, purpose: str, ids: Tensor, number: Tensor | int = 0) -> Tensor:
        return rng.normal(rng.fold(rng.root(self.seed, f"clock {purpose}"), number, ids), 1).squeeze(1)
