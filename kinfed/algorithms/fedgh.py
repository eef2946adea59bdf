"""FedGH: models stay with the clients; the server trains one head for all, on the mean features of their classes.

Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header, ACM Multimedia 2023,
Algorithm 1.

    client m:  θ_m = (body_m, H) with the received head H, then the usual steps on both
    sends:     R_m,c = mean φ of its examples of class c
    server:    H ← H − η ∇ mean of CE(H(R_m,c), c) over all pairs (m, c) of the round, `server_steps` times

Bodies may be of any architecture with as many features. With `server_steps` 0 everyone's head begins every round at the
common start.

Decisions. Pairs are few, so that a step of the server is on all of them (released code and a widely used library go
through them once, in shuffled batches): nothing depends on an order. R are means over a clean pass of the trained
model. That library's global head is client 0's own head, which its local training then changes; here it is the
server's.

The personal model is the client's own after its last training; beside it "global_head" has the current H on the
client's body. There is no server model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kinfed.algorithms.common.heads import class_means
from kinfed.algorithms.common.one_model import KeepsOwnModel, OwnModel
from kinfed.author import Cohort, Population, Range, RoundInfo, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    weight: Tensor  # [C, d_f] of H
    bias: Tensor | None  # [C]; None if heads have none


Down = Server  # [n, C, d_f] and [n, C]


@dataclass
class Up(Tree):
    prototypes: Tensor  # [n, C, d_f] R; zeros for classes that the client lacks
    known: Tensor  # [n, C] bool: the client has the class


@dataclass(frozen=True)
class FedGH(KeepsOwnModel[Server, Down, Up]):
    server_lr: float = option(0.1, "η of the server's steps on its head", gt=0, tune=Range(0.01, 1.0))
    server_steps: int = option(20, "such steps per round, each on all mean features that came; 0: none", ge=0)

    traits = frozenset({"needs classes", "any architecture"})
    acts_at = "body"
    leaks = "the mean features of its examples of every class"
    single_updates = "trains a head on every client's mean features"

    def init_server(self, task: Task, population: Population) -> Server:
        weight, bias = task.head.split(task.init(population.seed)[None])
        return Server(weight[0].clone(), None if bias is None else bias[0].clone())

    def download(self, server: Server, ids: Tensor) -> Down:
        return server.map(lambda tensor: tensor.expand(len(ids), *tensor.shape))

    def client_update(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> tuple[OwnModel, Up]:
        received = task.head.join(client.theta, down.weight, down.bias)
        theta = sgd(task, received, data.train.batches(self.training))
        sums = task.class_sums(theta, data.train)
        return OwnModel(theta), Up(class_means(sums).to(theta.dtype), sums.count > 0)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        R, c = up.prototypes[up.known], up.known.nonzero()[:, 1]
        H, b = server.weight.clone(), None if server.bias is None else server.bias.clone()
        target = one_hot(c, len(H)).to(H.dtype)
        for _ in range(self.server_steps):
            z = R @ H.T if b is None else torch.addmm(b, R, H.T)
            delta = (torch.softmax(z, -1) - target) / len(R)
            H -= self.server_lr * (delta.T @ R)
            if b is not None:
                b -= self.server_lr * delta.sum(0)
        return Server(H, b)

    def personalize(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> dict[str, Tensor]:
        return {"personal": client.theta, "global_head": task.head.join(client.theta, down.weight, down.bias)}
