"""Bases of methods whose server has one model w: it goes down, changes of it come back, clients deploy what they like.

`OneModel` says what follows from the server's model alone, `AveragesOneModel` also adds the mean change to it. Clients
of `DeploysLastModel` deploy the model of their last local training, or the server's until there is one.
"""

from dataclasses import dataclass
from typing import Any, Generic, Self

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, AveragingAlgorithm, Down, Server, Up
from kinfed.algorithms.base import Client as AnyClient
from kinfed.author import Cohort, DeltaUp, ModelDown, ModelState, Population, ServerModels, Task, Tree, own_or_server


@dataclass(frozen=True)
class OneModel(Algorithm[Server, AnyClient, Down, Up]):
    """A server with a model `w` [P], of which `init_server` and `download` know nothing else, and clients that take one
    gradient for each local step and send their numbers of examples where the option `weights` says so."""

    gradients = 1

    def init_server(self, task: Task, population: Population) -> Any:
        return ModelState(task.server_task.init(population.seed))

    def download(self, server: Any, ids: Tensor) -> Any:
        return ModelDown(server.w.expand(len(ids), -1))

    def server_models(self, server: Any) -> ServerModels | None:
        return ServerModels(server.w[None])


@dataclass(frozen=True)
class AveragesOneModel(
    OneModel[ModelState, AnyClient, ModelDown, DeltaUp],
    AveragingAlgorithm[ModelState, AnyClient, ModelDown, DeltaUp],
    Generic[AnyClient],
):
    """A server that only averages changes of its model."""


@dataclass
class OwnModel(Tree):
    """A client that keeps a model of its own."""

    theta: Tensor  # [n, P] never leaves the client


@dataclass(frozen=True)
class KeepsOwnModel(Algorithm[Server, OwnModel, Down, Up], Generic[Server, Down, Up]):
    """Clients that go on training the model they have, and deploy it."""

    def init_client(self, task: Task, data: Cohort) -> OwnModel:
        return OwnModel(task.init(data.seed).expand(len(data), -1))

    def personalize(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        return client.theta


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the last local model
    seen: Tensor  # [n] bool: has trained

    @classmethod
    def start(cls, task: Task, data: Cohort, *more: Tensor) -> Self:
        """Clients that have the common start and have not trained; `more` is what a derived class keeps."""
        return cls(task.init(data.seed).expand(len(data), -1), torch.zeros(len(data), dtype=torch.bool), *more)


@dataclass(frozen=True)
class DeploysLastModel(OneModel[Server, Client, Down, Up], Generic[Server, Down, Up]):
    """Clients that deploy the model of their last local training; until there is one, what the server sends as `w`."""

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data)

    def personalize(self, task: Task, client: Client, down: Any, data: Cohort) -> Tensor | dict[str, Tensor]:
        return own_or_server(client.seen, client.theta, down.w)
