"""FL+HC: some rounds of FedAvg, then one hierarchical clustering of everyone's update, then FedAvg in each cluster.

Briggs, Fan, Andras: Federated Learning with Hierarchical Clustering of Local Updates to Improve Training on Non-IID
Data, IJCNN 2020, Algorithm 1.

    rounds 1 … n₁        FedAvg
    round n₁ + 1         every client trains from w;  agglomerative clustering of Δ_i = θ_i − w, cut at T_d
    then                 FedAvg inside every cluster, on its own

Until round n₁ it is FedAvg; a cluster of one member is local training. The personal model is the cluster's.

Decisions:
  * The clustering round calls on all clients, whatever the participation, as the paper's does. After it a fraction C of
    every cluster is called per round, at least one client of each, so that no cluster waits for its members to be drawn
    by chance. Clients without a cluster (next point) are called like a cluster of their own.
  * A client missing in it all the same (lost, or its update not finite) is placed when first heard of: it is sent the
    w of the clustering round, trains from it, and joins the cluster whose mean update is nearest. That update tells
    where it belongs and is not averaged. Until then its model is that w.
  * The paper tunes T_d by hand. By default it is the `quantile` of all pairwise distances of updates.
    Ward's linkage measures the growth of variance rather than a distance of points, and is cut at the same number.
  * Updates are clustered. For L1 and L2 that is the same as clustering models; cosines of models would all be near 1.
    Distances are those of trainable parameters, without running statistics (of BatchNorm, say), which are averaged.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights
from kinfed.algorithms.common.clustering import HasClusters, Linkage, agglomerate, moved_by_cluster
from kinfed.author import Cohort, ConfigError, Population, RoundInfo, ServerModels, Task, example_counts, sgd
from kinfed.core import Nothing, Range, Tree, kernels, option, rng


@dataclass
class Server(Tree):
    model: Tensor  # [C, P], one until the clustering
    cluster: Tensor  # [N] int64 cluster of each client; after the clustering −1 for those not placed yet
    origin: Tensor  # [P] the model from which everyone trained for the clustering; until then the start
    centre: Tensor  # [C, T] mean update of every cluster's trainable parameters then; [0, T] before
    threshold: Tensor  # [] float64 T_d, 0 before


@dataclass(frozen=True)
class FLHC(HasClusters[Server, DeltaUp]):
    n1: int = option(10, "n₁, rounds of FedAvg before the clustering", ge=0, tune=Range(1, 20, whole=True))
    linkage: Linkage = option("ward", "distance of two clusters")
    metric: Literal["l2", "l1", "cosine"] = option("l2", "distance of two updates; ward needs l2")
    threshold: float | None = option(
        None, "T_d, up to which distance clusters are joined; by default the quantile decides", ge=0, infinite=True
    )
    quantile: float = option(
        0.5, "quantile of the pairwise distances that serves as T_d", ge=0, le=1, tune=Range(0.1, 0.9, log=False)
    )
    weights: Weights = option("examples", "weights of the averages: by N_m, or equal")

    single_updates = "groups clients by their updates"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linkage == "ward" and self.metric != "l2":
            raise ConfigError(
                f"ward's linkage is defined for metric l2 only; got {self.metric!r}; choose another linkage"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        w = task.init(population.seed)
        everyone = torch.zeros(population.num_clients, dtype=torch.int64)
        centre = w[task.trainable][None, :][:0].clone()
        return Server(w[None], everyone, w.clone(), centre, torch.zeros((), dtype=torch.float64))

    def _clusters_now(self, server: Server, round: RoundInfo) -> bool:
        """True where this round's updates decide the clusters: round n₁ + 1, or the next in which a client replies."""
        return round.number > self.n1 and not len(server.centre)

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        if self._clusters_now(server, round):
            return server, torch.arange(len(server.cluster))
        return server, self._sample(server, round) if len(server.centre) else active

    def _sample(self, server: Server, round: RoundInfo) -> Tensor:
        """Ids, ascending: max(⌊C n⌋, 1) of the n members of every cluster, drawn anew in every round."""
        called = []
        for c in torch.unique(server.cluster).tolist():
            members = (server.cluster == c).nonzero().squeeze(1)
            size = max(int(round.population.participation * len(members) + 1e-9), 1)  # as a Schedule rounds
            called.append(members[rng.choose(rng.fold(round.key("flhc"), c + 1), len(members), size)])
        return torch.cat(called).sort().values

    def client_update(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> tuple[Nothing, DeltaUp]:
        delta = sgd(task, down.w, data.train.batches(self.training)) - down.w
        return client, DeltaUp(delta, example_counts(self.weights, data))

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        cluster, model, origin = server.cluster.clone(), server.model, server.origin
        centre, threshold = server.centre, server.threshold
        counts, moved = cluster[ids] >= 0, up.delta[:, round.trainable]
        if self._clusters_now(server, round):
            label, threshold = self._clusters(moved)
            cluster.fill_(-1)
            cluster[ids] = label
            origin = server.model[0]
            model = origin.repeat(int(label.max()) + 1, 1)
            centre = torch.stack([moved[label == c].mean(0) for c in range(len(model))])
        elif not bool(counts.all()):
            late = (~counts).nonzero().squeeze(1)
            away = kernels.pairwise_distances(moved[late], self.metric, centre)
            cluster[ids[late]] = torch.from_numpy(away.argmin(1))
        label = torch.where(counts, cluster[ids], -1)
        model = moved_by_cluster(model, label, up.delta, up.count)
        return Server(model, cluster, origin, centre, threshold)

    def _clusters(self, updates: Tensor) -> tuple[Tensor, Tensor]:
        """Labels [n], and the threshold T_d []."""
        limit = self.threshold
        if limit is None:
            between = kernels.pairwise_distances(updates, self.metric)[np.triu_indices(len(updates), 1)]
            limit = float(np.quantile(between, self.quantile)) if len(between) else 0.0
        label = agglomerate(updates, self.linkage, self.metric, threshold=limit)
        return label, torch.tensor(limit, dtype=torch.float64)

    def server_models(self, server: Server) -> ServerModels:
        """The clusters' models; after them, if a client has no cluster yet, the one that everyone trained from."""
        placed = server.cluster >= 0
        if bool(placed.all()):
            return ServerModels(server.model, server.cluster)
        models = torch.cat([server.model, server.origin[None]])
        return ServerModels(models, torch.where(placed, server.cluster, len(server.model)))

    def figures(self, server: Server) -> dict[str, Any]:
        return {"clusters": len(server.model), "threshold": float(server.threshold), "assignment": server.cluster}
