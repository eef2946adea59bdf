"""FL+HC: some rounds of FedAvg, then one hierarchical clustering of everyone's update, then FedAvg in each cluster.

Briggs, Fan, Andras: Federated Learning with Hierarchical Clustering of Local Updates to Improve Training on Non-IID
Data, IJCNN 2020, Algorithm 1.

    rounds 1 … n₁        FedAvg
    round n₁ + 1         every client trains from w;  agglomerative clustering of Δ_i = θ_i − w, cut at T_d
    then                 FedAvg inside every cluster, on its own

Until round n₁ it is FedAvg; a cluster of one member is local training. The personal model is the cluster's.

Decisions:
  * The clustering round calls on all clients, whatever the participation, as the paper's does.
  * Who is missing in it all the same (lost, or its update not finite) is placed when first heard of: it is sent the
    w of the clustering round, trains from it, and joins the cluster whose mean update is nearest. That update tells
    where it belongs and is not averaged. Until then its model is that w.
  * The paper tunes T_d by hand. Where none is given it is the `quantile` of all pairwise distances of updates.
    Ward's linkage measures the growth of variance rather than a distance of points, and is cut at the same number.
  * Updates are clustered. For L1 and L2 that is the same as clustering models; cosines of models would all be near 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, best_fit, mean_of
from kinfed.algorithms.hierarchy import LINKAGES, METRICS, agglomerate, distances
from kinfed.core.tree import Nothing, Tree, take_rows
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    model: Tensor  # [C, P], one until the clustering
    cluster: Tensor  # [N] int64 cluster of each client; after the clustering −1 for those not placed yet
    origin: Tensor  # [P] the model from which everyone trained for the clustering; until then the start
    centre: Tensor  # [C, P] mean update of every cluster then; [0, P] before
    threshold: Tensor  # [] float64 T_d, 0 before
    round: Tensor  # [] int64 completed rounds


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] Δ_i
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FLHC(Algorithm[Server, Nothing, Down, Up]):
    n1: int = 10
    """n₁, rounds of FedAvg before the clustering."""
    linkage: str = "ward"
    """Distance of two clusters: "ward", "complete", "average" or "single"."""
    metric: str = "l2"
    """Distance of two updates: "l2", "l1" or "cosine" (ward needs l2)."""
    threshold: float | None = None
    """T_d, up to which distance clusters are joined; by `quantile` where none is given."""
    quantile: float = 0.5
    """Quantile of the pairwise distances that serves as T_d."""
    weights: str = "examples"
    """Weights of the averages: "examples" (N_m) or "equal"."""

    def __post_init__(self) -> None:
        if self.n1 < 0:
            raise ConfigError(f"n1 must not be negative; got {self.n1}")
        if self.linkage not in LINKAGES or self.metric not in METRICS:
            raise ConfigError(
                f"linkage is one of {', '.join(LINKAGES)} and metric one of {', '.join(METRICS)}; "
                f"got {self.linkage!r} and {self.metric!r}"
            )
        if self.linkage == "ward" and self.metric != "l2":
            raise ConfigError(
                f"ward's linkage is defined for metric l2 only; got {self.metric!r}; choose another linkage"
            )
        if self.threshold is not None and not self.threshold >= 0:
            raise ConfigError(f"threshold is a distance; got {self.threshold}")
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"quantile lies in [0, 1]; got {self.quantile}")
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")

    def init_server(self, task: Task, clients: Population) -> Server:
        w = task.init(clients.seed)
        everyone = torch.zeros(clients.num_clients, dtype=torch.int64)
        return Server(
            w[None], everyone, w.clone(), w.new_empty(0, len(w)), torch.zeros((), dtype=torch.float64), torch.tensor(0)
        )

    def call(self, server: Server, active: Tensor) -> Tensor:
        return torch.arange(len(server.cluster)) if int(server.round) == self.n1 else active

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(self.global_models(server, ids))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return client, Up(sgd(task, down.w, data.train.batches(self.training)) - down.w, count)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        cluster, model, origin, centre, threshold = (
            server.cluster.clone(), server.model.clone(), server.origin, server.centre, server.threshold,
        )  # fmt: skip
        counts = cluster[ids] >= 0
        if int(server.round) == self.n1:
            label, threshold = self._clusters(up.delta)
            cluster.fill_(-1)
            cluster[ids] = label
            origin = server.model[0]
            model = origin.repeat(int(label.max()) + 1, 1)
            centre = torch.stack([up.delta[label == c].mean(0) for c in range(len(model))])
        elif not bool(counts.all()):
            late = (~counts).nonzero().squeeze(1)
            cluster[ids[late]] = torch.from_numpy(distances(up.delta[late], self.metric, centre).argmin(1))
        label = torch.where(counts, cluster[ids], -1)
        for c in torch.unique(label[counts]).tolist():
            rows = (label == c).nonzero().squeeze(1)
            weight = torch.ones(len(rows)) if up.count is None else up.count[rows]
            model[c] += mean_of(take_rows(up.delta, rows), weight)
        return Server(model, cluster, origin, centre, threshold, server.round + 1)

    def _clusters(self, updates: Tensor) -> tuple[Tensor, Tensor]:
        """Labels [n], and the threshold T_d []."""
        limit = self.threshold
        if limit is None:
            between = distances(updates, self.metric)[np.triu_indices(len(updates), 1)]
            limit = float(np.quantile(between, self.quantile)) if len(between) else 0.0
        label = agglomerate(updates, self.linkage, self.metric, threshold=limit)
        return label, torch.tensor(limit, dtype=torch.float64)

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return down.w

    def adopt(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers join the cluster whose model fits their training examples best."""
        cluster = server.cluster.clone()
        cluster[data.ids] = best_fit(task, server.model, data).to(cluster)
        return replace(server, cluster=cluster)

    def global_models(self, server: Server, ids: Tensor) -> Tensor:
        cluster = server.cluster[ids]
        placed = (cluster >= 0)[:, None].to(server.model.device)
        model = take_rows(server.model, cluster.clamp_min(0))
        return model if bool(placed.all()) else torch.where(placed, model, server.origin)

    def server_figures(self, server: Server) -> dict[str, Any]:
        return {
            "clusters": len(server.model),
            "threshold": float(server.threshold),
            "cluster": server.cluster,
        }
