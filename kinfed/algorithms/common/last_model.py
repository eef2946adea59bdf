"""What FedAvg and methods that go on from it have in common: clients deploy the model of their last local training, and
who has not trained yet uses what the server sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, PrivacyProfile, Server, ServerModels, Up, gradient_steps
from kinfed.algorithms.common.averaging import ModelDown, Weights, own_or_server
from kinfed.core import Tree, option
from kinfed.data import Cohort
from kinfed.engine import Task


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the last local model
    seen: Tensor  # [n] bool: has trained


@dataclass(frozen=True)
class DeploysLastModel(Algorithm[Server, Client, ModelDown, Up], Generic[Server, Up]):
    """Of servers with a model `w` [P], and clients that take one gradient for each local step."""

    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        return Client(start, torch.zeros(len(data), dtype=torch.bool))

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.theta, down.w)

    def server_models(self, server: Any) -> ServerModels:
        return ServerModels(server.w[None])

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps(self.training.num_steps(count), weights=self.weights)
