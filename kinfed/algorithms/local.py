"""Local: every client trains alone. The yardstick of personalization: below it, federating hurts.

    min f_m(θ_m)   separately for every client

All clients start from the same vector as every other method of the seed. Only active clients train in a round
(as in FedFomo's comparison), so a method's gain over Local is not a gain in gradient steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, RoundInfo
from kinfed.author import Cohort, Nothing, Population, Task, Tree, sgd


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]


@dataclass(frozen=True)
class Local(AveragingAlgorithm[Nothing, Client, Nothing, Nothing]):
    traits = frozenset({"keeps stragglers"})  # nobody waits for it
    fields = ()  # nothing is sent
    gradients = 1

    def init_server(self, task: Task, population: Population) -> Nothing:
        return Nothing()

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def download(self, server: Nothing, ids: Tensor) -> Nothing:
        return Nothing()

    def client_update(self, task: Task, client: Client, down: Nothing, data: Cohort) -> tuple[Client, Nothing]:
        return Client(sgd(task, client.theta, data.train.batches(self.training))), Nothing()

    def step(self, server: Nothing, mean: Nothing, round: RoundInfo) -> Nothing:
        return server

    def personalize(self, task: Task, client: Client, down: Nothing, data: Cohort) -> Tensor:
        return client.theta
