"""A method of one's own, complete: every client uses the point halfway between its own model and the global one.

Run it:  python examples/halfway.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kinfed
from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task


@dataclass
class Server(Tree):
    w: Tensor  # [P] the global model


@dataclass
class Client(Tree):
    v: Tensor  # [n, P] own models, one row per client; they never leave


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]


@dataclass(frozen=True)
class Halfway(Algorithm[Server, Client, Down, Up]):
    share: float = 0.5
    """Share of the own model in the mixture."""

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))  # the same model for everyone: a view, not a copy

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        v = sgd(task, client.v, batches)  # alone
        w = sgd(task, down.w, batches)  # together, on the same batches
        return Client(v), Up(w - down.w)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.w + mean_of(up.delta, torch.ones(len(ids))))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.lerp(down.w, client.v, self.share)

    def global_model(self, server: Server) -> Tensor:
        return server.w


def main() -> None:
    from kinfed.runs.build import build_federation
    from kinfed.runs.config import make_config

    federation = build_federation(make_config(), seed=0)
    for method in (Halfway(), Halfway(share=1.0), Halfway(share=0.0)):
        loop = kinfed.simulate(federation, "mlp", method)
        for _ in loop.rounds(20):
            pass
        score = loop.evaluate().personal
        assert score is not None
        print(f"share {method.share}: {100 * float(score.correct.sum() / score.count.sum()):.1f}% personal accuracy")


if __name__ == "__main__":
    main()
