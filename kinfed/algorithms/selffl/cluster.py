"""Cluster-level Self-FL: the server averages groups of clients, and remembers each group while it is absent.

Chen et al., Self-Aware Personalized Federated Learning, https://arxiv.org/abs/2204.08069, Appendix E.4. The text
describes the idea; the formulas below are ours.

    rep_c = Σ w_m θ_m / Σ w_m over the active members, w_m = 1/(s_0c + s_m), s_0c their spread; kept while none is
    s_c   = mean s_m of the members          s_0 = spread of the representatives (17)
    θ     = Σ_c rep_c / (s_0 + s_c) / Σ_c 1/(s_0 + s_c)     over all clusters that have a representative

Clients do as in `selffl`, the others being the other clusters: S_{-m} sums over them. Every cluster takes part in every
round, so there is no smoothing unless asked for.

Groups are those of the population (device types); without any, or with `clusters` given, they are found by k-means on
log s_m, anew every `recluster_every` rounds. They are numbered from least to most uncertain, and a number keeps its
representative. Clients of unknown variance belong to the largest group until the next time; with fewer distinct
variances than clusters there are fewer clusters. With `groups="contexts"` they are found as CGPFL's contexts are, by
k-means on the clients' last models, which the server then keeps; the nearest representatives keep their numbers.

Limits: a single cluster is (20) alone without smoothing (`selffl` with use_init and use_steps off); a cluster for each
client is `selffl` where all take part, and with fewer it is `selffl` with a memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.base import mean_of
from kinfed.algorithms.cgpfl.cgpfl import matched
from kinfed.algorithms.clustering import coordinates, k_means
from kinfed.algorithms.selffl.selffl import Client, Down, SelfFL, SelfFLClient, Up, scalar
from kinfed.algorithms.selffl.uncertainty import UNKNOWN, positive
from kinfed.core import rng
from kinfed.core.tree import Tree, take_rows
from kinfed.data.federation import Cohort, Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError
from kinfed.theory.two_level import others_sum

USUAL_CLUSTERS = 5


@dataclass
class Server(Tree):
    theta: Tensor  # [P]
    c: Tensor  # [] weight of the new average
    s0: Tensor  # [] float64  spread of the representatives; 0 until there are two
    s: Tensor  # [K] float64  σ_m² as last uploaded; −1 unknown
    others: Tensor  # [K] float64  Σ 1/(s_0 + s_c) over the other clusters, in the planned round
    group: Tensor  # [K] int64  cluster of each client
    rep: Tensor  # [G, P]  representatives
    seen: Tensor  # [G] bool  that there is one
    last: Tensor  # [K, P]  last model of each client with groups="contexts"; else [0, P]
    every: Tensor  # [] int64  rounds between clusterings; 0 where groups are given
    round: Tensor  # [] int64
    key: Tensor  # [] int64  of k-means' draws


@dataclass(frozen=True)
class SelfFLCluster(SelfFLClient[Server, Client, Down, Up]):
    smoothing: float | str = 1.0
    """c in θ ← (1 − c) θ + c θ̂; 1 is none."""
    domain: str = "all"
    """All clusters take part."""
    clusters: int | None = None
    """Find so many clusters by k-means; where none is given, the population's groups, or 5 if it has none."""
    recluster_every: int = 10
    """Rounds between two k-means."""
    groups: str = "variance"
    """What k-means sees: log σ_m² ("variance") or the clients' last models ("contexts")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.domain != "all":
            raise ConfigError(f"all clusters take part in every round, so domain is all; got {self.domain!r}")
        if not self.use_agg:
            raise ConfigError(
                "selffl_cluster is an aggregation (20) of clusters; use selffl with use_agg=false instead"
            )
        if self.known:
            raise ConfigError(
                "known variances are those of clients, not of clusters; use selffl for known=true, or known=false here"
            )
        if self.clusters is not None and self.clusters < 1:
            raise ConfigError(f"clusters must be at least 1; got {self.clusters}")
        if self.recluster_every < 1:
            raise ConfigError(f"recluster_every must be at least 1; got {self.recluster_every}")
        if self.groups not in ("variance", "contexts"):
            raise ConfigError(f"groups is variance or contexts; got {self.groups!r}")

    @property
    def _client(self) -> SelfFL:
        """The client's side, which is Algorithm 1's."""
        own = ("clusters", "recluster_every", "groups")
        return SelfFL(self.training, **{name: value for name, value in self.options().items() if name not in own})

    def init_server(self, task: Task, clients: Population) -> Server:
        theta = task.init(clients.seed)
        if clients.groups is not None and self.clusters is None and self.groups == "variance":
            group, count, every = clients.groups.clone(), clients.num_groups, 0
        else:
            group = torch.zeros(clients.num_clients, dtype=torch.int64)
            count = min(self.clusters or USUAL_CLUSTERS, clients.num_clients)
            every = self.recluster_every
        s = torch.full((clients.num_clients,), UNKNOWN, dtype=torch.float64)
        return Server(
            theta,
            scalar(self.smoothing_weight(clients.participation)),
            scalar(0.0),
            s,
            torch.zeros_like(s),
            group,
            theta.new_zeros(count, len(theta)),
            torch.zeros(count, dtype=torch.bool),
            theta.new_zeros(clients.num_clients if self.groups == "contexts" else 0, len(theta)),
            torch.tensor(every),
            torch.tensor(0),
            clients.key("selffl-clusters"),
        )

    def init_client(self, task: Task, data: Cohort) -> Client:
        return self._client.init_client(task, data)

    def prepare(self, server: Server, ids: Tensor) -> Server:
        w = self.precision(self.cluster_variance(server), server.s0)
        return replace(server, others=others_sum(torch.where(server.seen, w, 0), 0)[server.group])

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        s0, others = server.s0.to(torch.float32), server.others[ids].to(torch.float32)
        return Down(server.theta.expand(n, -1), s0.expand(n), others)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        return self._client.client_update(task, client, down, data)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        server = server.map(lambda tensor: tensor.clone())
        server.s[ids] = up.s.to(server.s)
        if self.groups == "contexts":
            server.last[ids] = server.theta + up.delta
        for c in sorted(set(server.group[ids].tolist())):
            rows = (server.group[ids] == c).nonzero().squeeze(1)
            delta = take_rows(up.delta, rows)
            weight = self.weights(server.s[ids[rows]], self.between(delta, torch.zeros_like(server.s0)))
            server.rep[c] = server.theta + mean_of(delta, weight)
            server.seen[c] = True
        far = server.rep[server.seen] - server.theta
        server.s0 = self.between(far, server.s0)
        step = mean_of(far, self.weights(self.cluster_variance(server)[server.seen], server.s0))
        server.theta = server.theta + float(server.c) * step
        server.round = server.round + 1
        if int(server.every) and int(server.round) % int(server.every) == 0:
            self.recluster_(server)
        return server

    def cluster_variance(self, server: Server) -> Tensor:
        """[G] s_c: mean of the members' known s_m; −1 where none is known."""
        known = server.s >= 0
        total = torch.zeros(len(server.rep), dtype=torch.float64, device=server.s.device)
        total.index_add_(0, server.group[known], server.s[known])
        count = torch.bincount(server.group[known], minlength=len(server.rep))
        return torch.where(count > 0, total / count.clamp_min(1), UNKNOWN)

    def recluster_(self, server: Server) -> None:
        known = server.s >= 0
        if not bool(known.any()):
            return
        seed = rng.numpy_seed(rng.fold(server.key.cpu(), server.round.cpu()))
        label = self.contexts(server, known, seed) if self.groups == "contexts" else self.levels(server, known, seed)
        server.group[known] = label.to(server.group)
        server.group[~known] = torch.bincount(label).argmax().to(server.group)
        server.seen &= torch.bincount(label, minlength=len(server.rep)).to(server.seen.device) > 0

    def contexts(self, server: Server, known: Tensor, seed: int) -> Tensor:
        """[n] groups of similar models; as long as there are not enough representatives to match, in any order."""
        uploads, there = server.last[known], server.seen.nonzero().squeeze(1)
        found = k_means(coordinates(uploads), len(server.rep), seed).label
        if int(found.max()) >= len(there):
            return found
        x = coordinates(uploads, server.rep[there])
        return there.cpu()[matched(found, x[: len(uploads)], x[len(uploads) :])]

    def levels(self, server: Server, known: Tensor, seed: int) -> Tensor:
        """[n] groups of similar variance, from least to most uncertain."""
        level = positive(server.s[known], server.s0).log().cpu().numpy()
        order = np.argsort(level, kind="stable")  # so that clients' numbers do not matter
        ordered = level[order, None]
        found = k_means(ordered, len(server.rep), seed).label
        # On a line clusters are intervals: counting the changes numbers them from least to most uncertain.
        changes = torch.cat([torch.zeros(1, dtype=torch.bool), found[1:] != found[:-1]])
        label = torch.empty_like(found)
        label[torch.from_numpy(order)] = changes.cumsum(0)
        return label

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._client.personalize(task, client, down, data)

    def global_model(self, server: Server) -> Tensor:
        return server.theta

    def server_figures(self, server: Server) -> dict[str, Any]:
        return {
            "sigma0_sq": float(server.s0),
            "clients_with_variance": int((server.s >= 0).sum()),
            "clusters": int(server.seen.sum()),
            "group": server.group,
        }

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return self._client.client_figures(client)
