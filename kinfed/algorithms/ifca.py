"""IFCA: K models on the server; each client takes part in the one that fits its data best.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, Algorithm 1
(model averaging). HypCluster (Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization, 2020) is the same with
averages by number of examples: `hypcluster`.

    client i:  j = argmin_k f_i(ω_k) on its *training* data, train ω_j;   server: ω_j ← mean of the models of cluster j

K = 1 is FedAvg, by default with equal weights. An empty cluster stays as it was; ties go to the lower number. The
personal model is ω_j with j chosen afresh on training data (a released script chooses it on test data).

K identical starts would never separate, so the default start is K independent random models; `init="kmeans"` lets
everyone train once from a common start and takes the k-means centres of the results (a "good initialization"). Its
first round calls on all clients, whatever the participation; distances are those of trainable parameters, without
running statistics (of BatchNorm, say). The first random start is that of all methods of the seed; with a warm start
only this one is warm, the others are random as ever: use "kmeans" after a warm start.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.clustering import k_means, moved_by_cluster, num_distinct
from kinfed.author import Algorithm, Cohort, Population, RoundInfo, Task, Weights, best_fit, example_counts, option, sgd
from kinfed.core import Nothing, Range, Tree, kernels, rng


@dataclass
class Server(Tree):
    omega: Tensor  # [K, P]
    cluster: Tensor  # [N] int64 last known choice, −1 before the first
    started: Tensor  # [] bool: the models are apart; False until the k-means start


@dataclass
class Down(Tree):
    omega: Tensor  # [n, K, P]; the common start once ([n, 1, P]) before k-means


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] θ − ω_j
    cluster: Tensor  # [n] int64 j
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class IFCA(Algorithm[Server, Nothing, Down, Up]):
    clusters: int = option(4, "K, the number of models", ge=1, tune=Range(2, 6, log=False, whole=True))
    init: Literal["random", "kmeans"] = option(
        "random", "start of the models: independent, or the centres of everyone's first training"
    )
    weights: Weights = option("equal", "weights of the averages: equal (paper), or by N_m")

    leaks = "the number of the model with the lowest loss on training examples"
    single_updates = "averages the updates of each cluster by themselves"

    def init_server(self, task: Task, population: Population) -> Server:
        same = self.init == "kmeans"
        omega = torch.stack([task.init(population.seed, 0 if same else k) for k in range(self.clusters)])
        cluster = torch.full((population.num_clients,), -1, dtype=torch.int64)
        return Server(omega, cluster, torch.tensor(not same))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        """The round whose results are the k-means start calls on everybody."""
        return server, active if bool(server.started) else torch.arange(len(server.cluster))

    def download(self, server: Server, ids: Tensor) -> Down:
        omega = server.omega if bool(server.started) else server.omega[:1]  # still all alike: one is enough
        return Down(omega.expand(len(ids), -1, -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        j = self._best(task, down, data)
        omega = down.omega[torch.arange(len(j)), j]
        delta = sgd(task, omega, data.train.batches(self.training)) - omega
        return client, Up(delta, j, example_counts(self.weights, data))

    def _best(self, task: Task, down: Down, data: Cohort) -> Tensor:
        """[n] argmin_k f_i(ω_k) on training data."""
        return best_fit(task, down.omega.unbind(1), data.train).to(down.omega.device)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        cluster = server.cluster.clone()
        label = cluster[ids] = up.cluster.cpu()
        if not bool(server.started):
            # All from one model: their differences are those of the models.
            x = kernels.coordinates(up.delta[:, round.trainable])
            seed = rng.numpy_seed(round.population.key("ifca"))
            label = k_means(x, min(self.clusters, num_distinct(x)), seed).label
            cluster[ids] = label
        return Server(moved_by_cluster(server.omega, label, up.delta, up.count), cluster, torch.tensor(True))

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return down.omega[torch.arange(len(data)), self._best(task, down, data)]

    def figures(self, server: Server) -> dict[str, Any]:
        used = torch.unique(server.cluster[server.cluster >= 0])
        return {"clusters_in_use": len(used), "assignment": server.cluster}
