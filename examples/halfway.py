"""A method of one's own, complete: every client uses the point halfway between its own model and the server's.

Run it:  python examples/halfway.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kinfed
from kinfed.author import (
    AveragingAlgorithm,
    Cohort,
    DeltaUp,
    ModelDown,
    ModelState,
    Population,
    PrivacyProfile,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    gradient_steps,
    option,
    sgd,
)


@dataclass
class Client(Tree):
    v: Tensor  # [n, P] own models, one row per client; they never leave


@dataclass(frozen=True)
class Halfway(AveragingAlgorithm[ModelState, Client, ModelDown, DeltaUp]):
    share: float = option(0.5, "share of the own model in the mixture", ge=0, le=1)

    def init_server(self, task: Task, population: Population) -> ModelState:
        return ModelState(task.init(population.seed))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def download(self, server: ModelState, ids: Tensor) -> ModelDown:
        return ModelDown(server.w.expand(len(ids), -1))  # the same model for everyone: a view, not a copy

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        batches = data.train.batches(self.training)
        v = sgd(task, client.v, batches)  # alone
        w = sgd(task, down.w, batches)  # together, on the same batches
        return Client(v), DeltaUp(w - down.w, None)

    def step(self, server: ModelState, mean: DeltaUp, round: RoundInfo) -> ModelState:
        return ModelState(server.w + mean.delta)

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return torch.lerp(down.w, client.v, self.share)

    def server_models(self, server: ModelState) -> ServerModels:
        return ServerModels(server.w[None])

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps({2: self.training.num_steps(count)})  # two gradients on every batch


def main() -> None:
    methods = [Halfway(), Halfway(share=1.0), Halfway(share=0.0), "fedavg"]
    result = kinfed.run(algorithms=methods, rounds=20, seeds=(0,), participation=1.0)
    for one in result.results:
        print(f"{one.label}: {100 * one.personal['accuracy']:.1f}% personal accuracy")


if __name__ == "__main__":
    main()
