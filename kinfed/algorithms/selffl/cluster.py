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
k-means on the clients' last models (their trainable parameters), which the server then keeps; the nearest
representatives keep their numbers.

Limits: a single cluster is (20) alone without smoothing (`selffl` with use_init and use_steps off); a cluster for each
client is `selffl` where all take part, and with fewer it is `selffl` with a memory.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.clustering import k_means, match_labels
from kinfed.algorithms.selffl import selffl
from kinfed.algorithms.selffl.selffl import SelfFLClients, Up, variance_figures
from kinfed.algorithms.selffl.uncertainty import UNKNOWN, positive_variance
from kinfed.author import ConfigError, Population, RoundInfo, Task, option, rng, take_rows, weighted_mean
from kinfed.core import kernels
from kinfed.theory import others_sum

DEFAULT_CLUSTERS = 5


@dataclass
class Server(selffl.Server):
    """`s0` is the spread of the representatives, 0 until there are two; `others` Σ 1/(s_0 + s_c) over the other
    clusters."""

    group: Tensor  # [K] int64  cluster of each client
    rep: Tensor  # [G, P]  representatives
    seen: Tensor  # [G] bool  that there is one
    last: Tensor  # [K, T]  last trainable parameters of each client with groups="contexts"; else [0, T]
    age: Tensor  # [] int64  aggregations since clusters were found


@dataclass(frozen=True)
class SelfFLCluster(SelfFLClients):
    smoothing: float | Literal["participation"] = option(1.0, "c in θ ← (1 − c) θ + c θ̂; 1 is none", gt=0, le=1)
    domain: Literal["active", "all"] = option("all", "always all: every cluster takes part in every round")
    clusters: int | None = option(
        None,
        f"find this many clusters by k-means; if none is given, the population's groups, or {DEFAULT_CLUSTERS} if it "
        "has none",
        ge=1,
    )
    recluster_every: int = option(10, "rounds between two k-means", ge=1)
    groups: Literal["variance", "contexts"] = option(
        "variance", "what k-means sees: log σ_m² (variance) or the clients' last models (contexts)"
    )

    single_updates = "groups clients and remembers an average of every group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.domain != "all":
            raise ConfigError(f"all clusters take part in every round, so domain is all; got {self.domain!r}")
        if not self.use_agg:
            raise ConfigError(
                "selffl_cluster is an aggregation (20) of clusters; use selffl with use_agg=false instead"
            )
        if self.known_variances:
            raise ConfigError(
                "known variances are those of clients, not of clusters; use selffl for known_variances=true, or "
                "known_variances=false here"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        theta, clients = task.init(population.seed), population.num_clients
        group, count = torch.zeros(clients, dtype=torch.int64), min(self.clusters or DEFAULT_CLUSTERS, clients)
        if self.has_groups(population) and population.groups is not None:
            group, count = population.groups.clone(), population.num_groups
        s = torch.full((clients,), UNKNOWN, dtype=torch.float64)
        s0, rep, seen = torch.zeros((), dtype=s.dtype), theta.new_zeros(count, len(theta)), torch.zeros(count).bool()
        last = theta.new_zeros(clients if self.groups == "contexts" else 0, len(theta[task.trainable]))
        return Server(theta, s0, s, torch.zeros_like(s), group, rep, seen, last, torch.tensor(0))

    def has_groups(self, population: Population) -> bool:
        """True where clusters are the population's groups; otherwise they are found."""
        return population.groups is not None and self.clusters is None and self.groups == "variance"

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        w = self.precision(self.cluster_variance(server), server.s0)
        return replace(server, others=others_sum(torch.where(server.seen, w, 0), 0)[server.group]), active

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        server = server.clone()
        server.s[ids] = up.s.to(server.s)
        if self.groups == "contexts":
            server.last[ids] = (server.theta + up.delta)[:, round.trainable]
        for c in sorted(set(server.group[ids].tolist())):
            rows = (server.group[ids] == c).nonzero().squeeze(1)
            delta = take_rows(up.delta, rows)
            spread = self.variance_between(delta[:, round.trainable], torch.zeros_like(server.s0))
            server.rep[c] = server.theta + weighted_mean(delta, self.client_weights(server.s[ids[rows]], spread))
            server.seen[c] = True
        delta = server.rep[server.seen] - server.theta
        server.s0 = self.variance_between(delta[:, round.trainable], server.s0)
        step = weighted_mean(delta, self.client_weights(self.cluster_variance(server)[server.seen], server.s0))
        server.theta = server.theta + self.smoothing_weight(round.population.participation) * step
        server.age = server.age + 1
        if not self.has_groups(round.population) and int(server.age) == self.recluster_every:
            self.recluster_(server, round)
            server.age = torch.zeros_like(server.age)
        return server

    def cluster_variance(self, server: Server) -> Tensor:
        """[G] s_c: mean of the members' known s_m; −1 where none is known."""
        known = server.s >= 0
        total = torch.zeros(len(server.rep), dtype=torch.float64, device=server.s.device)
        total.index_add_(0, server.group[known], server.s[known])
        count = torch.bincount(server.group[known], minlength=len(server.rep))
        return torch.where(count > 0, total / count.clamp_min(1), UNKNOWN)

    def recluster_(self, server: Server, round: RoundInfo) -> None:
        """Find the clusters of the clients whose variance is known; the others join the largest. In place."""
        known = server.s >= 0
        if not bool(known.any()):
            return
        seed = rng.numpy_seed(rng.fold(round.population.key("selffl-clusters"), round.number))
        find = self.similar_models if self.groups == "contexts" else self.similar_variances
        label = find(server, known, seed)
        server.group[known] = label.to(server.group)
        server.group[~known] = torch.bincount(label).argmax().to(server.group)
        server.seen &= torch.bincount(label, minlength=len(server.rep)).to(server.seen.device) > 0

    def similar_models(self, server: Server, known: Tensor, seed: int) -> Tensor:
        """[n] groups of similar models; as long as there are not enough representatives to match, in any order."""
        uploads, present = server.last[known], server.seen.nonzero().squeeze(1)
        label = k_means(kernels.coordinates(uploads), len(server.rep), seed).label
        if int(label.max()) >= len(present):
            return label
        x = kernels.coordinates(uploads, server.rep[present, : uploads.shape[1]])
        return present.cpu()[match_labels(label, x[: len(uploads)], x[len(uploads) :])]

    def similar_variances(self, server: Server, known: Tensor, seed: int) -> Tensor:
        """[n] groups of similar variance, from least to most uncertain."""
        level = positive_variance(server.s[known], server.s0).log().cpu().numpy()
        order = np.argsort(level, kind="stable")  # so that clients' numbers do not matter
        interval = k_means(level[order, None], len(server.rep), seed).label
        # On a line clusters are intervals: counting the changes numbers them from least to most uncertain.
        changes = torch.cat([torch.zeros(1, dtype=torch.bool), interval[1:] != interval[:-1]])
        label = torch.empty_like(interval)
        label[torch.from_numpy(order)] = changes.cumsum(0)
        return label

    def figures(self, server: Server) -> dict[str, Any]:
        return variance_figures(server) | {"clusters": int(server.seen.sum()), "group": server.group}
