"""The schedule of rounds: which clients take part, drop out or are slow; and a clock for simulations: how long clients
of different speed take for their work and their messages.

    seconds of client k = g_k · step_seconds · c_k · j + (bytes down + up) / (bandwidth · b_k),
    c_k = exp(spread · z),   b_k = exp(bandwidth_spread · z),   j = exp(jitter · z),      z ~ N(0, 1)

g_k is the number of gradients of a round, as the method declares them (Ditto takes two for each step); c_k and b_k are
the client's own for the whole run, j is drawn anew each time. All are hashes of the seed and the client, so that
methods of a seed meet the same clients, and synchronous and asynchronous rounds can be compared over simulated time.

A synchronous round takes as long as the slowest client whose update it waits for; the server's own work takes no time.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import Registry, check_options, option, rng
from kinfed.server.participation import Participation
from kinfed.updates import ClientSampling


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


@dataclass(frozen=True)
class Schedule(Participation):
    """Participation and failures: pure functions of the seed and the round, equal for all methods."""

    first_round: int = 1
    clock: Clock | None = field(default=None, compare=False)  # of a simulation: how long clients take
    evaluates: Tensor | None = field(default=None, compare=False)  # [n] clients to evaluate, ascending; None: all
    members: Tensor | None = field(default=None, compare=False)  # [n] who may take part, ascending; None: all

    def size(self, num_clients: int) -> int:
        """How many clients are called in a round; with Poisson sampling, on average (rounded)."""
        return max(int(self.participation * num_clients + 1e-9), 1)  # 0.29 * 100 is 28.999... in floating point

    def active(self, seed: int, round: int, num_clients: int) -> Tensor:
        """Ids, ascending: max(floor(C K), 1), uniformly without replacement; by Poisson any number, also none. Of these
        the members: a client that is none is one that does not come."""
        return self.present(self._drawn(seed, round, num_clients))

    def present(self, ids: Tensor) -> Tensor:
        """Keep the clients that are members."""
        return ids if self.members is None else ids[torch.isin(ids, self.members)]

    def _drawn(self, seed: int, round: int, num_clients: int) -> Tensor:
        key = rng.fold(rng.root(seed, "sampling"), round)
        if self.sampling == "poisson":
            ids = torch.arange(num_clients)
            return ids[rng.uniform(rng.fold(key, ids), 1).squeeze(1) < self.participation]
        size = self.size(num_clients)
        if size == num_clients:
            return torch.arange(num_clients)
        return rng.choose(key, num_clients, size)

    def calls(self, seed: int, rounds: range, num_clients: int) -> Tensor:
        """int64 [K]: in how many of these rounds each client is called."""
        active = [self.active(seed, number, num_clients) for number in rounds]
        return torch.bincount(torch.cat([torch.zeros(0, dtype=torch.int64), *active]), minlength=num_clients)

    def evaluated(self, seed: int, rounds: range, num_clients: int, count: int) -> Tensor:
        """[count] ids, ascending: a sample of clients to evaluate, the same for all methods of a seed. Drawn uniformly
        from the clients that the rounds call, and from others only where these are too few: what a method does for a
        client shows in those that take part."""
        if count >= num_clients:
            return torch.arange(num_clients)
        key = rng.root(seed, "evaluated clients")
        called: Tensor = torch.unique(torch.cat([self.active(seed, number, num_clients) for number in rounds]))
        if len(called) >= count:
            return called[rng.choose(key, len(called), count)]
        everyone = torch.arange(num_clients)
        others = everyone[~torch.isin(everyone, called)]
        more = others[rng.choose(key, len(others), count - len(called))]
        ids: Tensor = torch.cat([called, more]).sort().values
        return ids

    def client_sampling(self, num_clients: int) -> ClientSampling:
        """Sampling that epsilon of whole clients is computed from. Dropping out hides no client."""
        rate = self.participation if self.sampling == "poisson" else self.size(num_clients) / num_clients
        return ClientSampling(self.sampling, rate)

    def expected_replies(self, num_clients: int, *, keeps_stragglers: bool) -> float:
        """How many updates a round has on average."""
        replies = self.client_sampling(num_clients).rate * num_clients * (1 - self.dropout)
        return replies if keeps_stragglers else replies * (1 - self.stragglers)

    def dropouts(self, seed: int, round: int, ids: Tensor) -> Tensor:
        """bool [n]: who never replies in this round."""
        return rng.uniform(rng.fold(rng.root(seed, "dropout"), round, ids), 1).squeeze(1) < self.dropout

    def completed_share(self, seed: int, round: int, ids: Tensor) -> Tensor:
        """[n] share of the local work done: 1, or uniform on (0, 1) for stragglers."""
        u = rng.uniform(rng.fold(rng.root(seed, "stragglers"), round, ids), 2)
        return torch.where(u[:, 0] < self.stragglers, u[:, 1], 1.0)
