"""The schedule of rounds: which clients take part, drop out or are slow."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.server.clock import Clock
from kinfed.server.participation import Participation
from kinfed.updates import ClientSampling


@dataclass(frozen=True)
class Schedule(Participation):
    """Participation and failures: pure functions of the seed and the round, equal for all methods."""

    first_round: int = 1
    clock: Clock | None = field(default=None, compare=False)  # of a simulation: how long clients take
    evaluates: Tensor | None = field(default=None, compare=False)  # [n] clients to evaluate, ascending; None: all

    def size(self, num_clients: int) -> int:
        """How many clients are called in a round; with Poisson sampling, on average (rounded)."""
        return max(int(self.participation * num_clients + 1e-9), 1)  # 0.29 * 100 is 28.999... in floating point

    def active(self, seed: int, round: int, num_clients: int) -> Tensor:
        """Ids in ascending order: max(floor(C K), 1) of them, uniformly without replacement; with Poisson sampling
        any number of them, also none."""
        key = rng.fold(rng.root(seed, "sampling"), round)
        if self.sampling == "poisson":
            ids = torch.arange(num_clients)
            return ids[rng.uniform(rng.fold(key, ids), 1).squeeze(1) < self.participation]
        size = self.size(num_clients)
        if size == num_clients:
            return torch.arange(num_clients)
        return rng.choose(key, num_clients, size)

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
        is_called = torch.zeros(num_clients, dtype=torch.bool)
        is_called[called] = True
        others = (~is_called).nonzero().squeeze(1)
        more = others[rng.choose(key, len(others), count - len(called))]
        ids: Tensor = torch.cat([called, more]).sort().values
        return ids

    def client_sampling(self, num_clients: int) -> ClientSampling:
        """Sampling that epsilon of whole clients is computed from. Nobody is counted as hidden by dropping out."""
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
