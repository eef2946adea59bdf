"""Part of the model is shared, the rest stays with the client: what FedPer, FedRep and others have in common.

    θ_m = (shared, own_m);   clients train both, the server averages the shared part, own parts never leave

The personal model joins the current shared part and the client's own, as its last training left it; a client that has
not trained yet has the common initial one. Running statistics (of BatchNorm, say) go with their layer: own layers keep
them, shared ones have them averaged.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.algorithms.base import Client as AnyClient
from kinfed.algorithms.base import Down as AnyDown
from kinfed.algorithms.base import Server as AnyServer
from kinfed.algorithms.base import Up as AnyUp
from kinfed.algorithms.common.averaging import DeltaUp, Weights, example_counts
from kinfed.author import AveragingAlgorithm, Cohort, ColumnSplit, ConfigError, Population, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the shared parameters


@dataclass
class Client(Tree):
    own: Tensor  # [n, P − G] parameters that never leave the client


Down = Server  # [n, G]


Up = DeltaUp  # [n, G] and [n]


@dataclass(frozen=True)
class SharesPart(Algorithm[AnyServer, AnyClient, AnyDown, AnyUp]):
    """A server that has a part of the model, `shared`; unless `split` says another, all but the last linear layer."""

    def split(self, task: Task) -> ColumnSplit:
        """Columns of a row that stay with the client, and those that are shared."""
        return ColumnSplit.from_mask(task.head.mask)

    def sent_columns(self, task: Task) -> Tensor:
        return self.split(task).shared_mask

    def init_server(self, task: Task, population: Population) -> Any:
        return Server(self.split(task).take_shared(task.init(population.seed)).clone())

    def at_start(self, task: Task, shared: Tensor, seed: int) -> Tensor:
        """[n, P]: models of a shared part [n, G] and the common initial one of all else."""
        split = self.split(task)
        own = split.take_own(task.init(seed)).to(shared)
        return split.join(own.expand(len(shared), -1), shared)


@dataclass(frozen=True)
class PartlyShared(SharesPart[Server, Client, Down, Up], AveragingAlgorithm[Server, Client, Down, Up]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    gradients = 1

    def train(self, task: Task, theta: Tensor, split: ColumnSplit, data: Cohort) -> Tensor:
        """Local training of the joined models [n, P]."""
        return sgd(task, theta, data.train.batches(self.training))

    def check(self, task: Task, population: Population) -> None:
        if not self.split(task).shared:
            raise ConfigError(
                f"{type(self).__name__} must leave some layers to share, but all of {', '.join(task.layer_names())} "
                "stay with the clients; choose a deeper model or fewer own layers"
            )

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(self.split(task).take_own(task.init(data.seed)).expand(len(data), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        split = self.split(task)
        theta = self.train(task, split.join(client.own, down.shared), split, data)
        delta = split.take_shared(theta) - down.shared
        return Client(split.take_own(theta)), Up(delta, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self.split(task).join(client.own, down.shared)
