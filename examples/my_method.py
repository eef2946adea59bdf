"""SCAFFOLD as a plugin: a method outside the package that joins every comparison.

    kinfed run --plugin examples/my_method.py --algorithms scaffold,fedavg

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020, Algorithm 1 with option II.

    y ← y − η (∇f_i(y) − c_i + c);      c_i⁺ = c_i − c + (x − y) / (K η);      x ← x + mean Δy,  c ← c + |S|/N mean Δc
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kinfed
from kinfed.algorithms.facade import (
    Algorithm,
    Cohort,
    Population,
    PrivacyProfile,
    Range,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    gradient_steps,
    mean_update,
    option,
    own_or_server,
    sgd,
)


@dataclass
class Server(Tree):
    x: Tensor  # [P] the model
    c: Tensor  # [P] its control variate, the mean of all clients'


@dataclass
class Client(Tree):
    c: Tensor  # [n, P] own control variates
    y: Tensor  # [n, P] the models after the last local training
    seen: Tensor  # [n] bool: has trained


@dataclass
class Down(Tree):
    x: Tensor  # [n, P]
    c: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] y − x
    delta_c: Tensor  # [n, P] c_i⁺ − c_i


@kinfed.register("algorithm", "scaffold", title="SCAFFOLD", summary="FedAvg whose clients correct their drift")
@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Client, Down, Up]):
    server_lr: float = option(1.0, "η_g: rate of the server's step", gt=0, tune=Range(0.1, 1.0))

    traits = frozenset({"no momentum", "no weight decay"})  # c_i is the mean gradient of plain steps
    averages = ("delta", "delta_c")

    def init_server(self, task: Task, population: Population) -> Server:
        x = task.init(population.seed)
        return Server(x, torch.zeros_like(x))

    def init_client(self, task: Task, data: Cohort) -> Client:
        y = task.init(data.seed).expand(len(data), -1)
        return Client(torch.zeros_like(y), y, torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.x.expand(len(ids), -1), server.c.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        drift = down.c - client.c
        y = sgd(task, down.x, batches, drift=drift)  # y ← y − η (g(y) − c_i + c)
        steps = batches.steps.clamp_min(1).to(y)[:, None]
        c = (down.x - y) / (steps * batches.lr) - drift  # c_i − c + (x − y) / (K η)
        c = torch.where(batches.steps.to(y.device)[:, None] > 0, c, client.c)  # who took no step learnt nothing
        return Client(c, y, torch.ones_like(client.seen)), Up(y - down.x, c - client.c)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        share = len(ids) / round.population.num_clients  # |S| / N
        x = server.x + self.server_lr * mean_update(up.delta, None)
        return Server(x, server.c + share * mean_update(up.delta_c, None))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.y, down.x)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(server.x[None])

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps(self.training.num_steps(count))
