"""Local: every client trains alone. The yardstick of personalization: below it, federating hurts.

    min f_m(θ_m)   separately for every client

All clients start from the same vector as every other method of the seed. Only active clients train in a round
(as in FedFomo's comparison), so a method's gain over Local is not a gain in gradient steps.
"""

from dataclasses import dataclass

from kinfed.algorithms.common.one_model import KeepsOwnModel, OwnModel
from kinfed.author import AveragingAlgorithm, Cohort, Nothing, Population, Task, sgd


@dataclass(frozen=True)
class Local(KeepsOwnModel[Nothing, Nothing, Nothing], AveragingAlgorithm[Nothing, OwnModel, Nothing, Nothing]):
    traits = frozenset({"keeps stragglers"})  # it is not waited for
    fields = ()  # nothing is sent
    gradients = 1

    def init_server(self, task: Task, population: Population) -> Nothing:
        return Nothing()

    def client_update(self, task: Task, client: OwnModel, down: Nothing, data: Cohort) -> tuple[OwnModel, Nothing]:
        return OwnModel(sgd(task, client.theta, data.train.batches(self.training))), Nothing()
