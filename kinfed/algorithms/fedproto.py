"""FedProto: models stay with the clients; what they share is the mean feature of every class, its prototype.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022,
Algorithm 1.

    client m:  min_θ  f_m(θ) + λ R,   R = mean of |φ − C̄_y|² / d_f over its examples of classes with a prototype
    prototypes:  C_m,c = mean φ of its examples of class c,   C̄_c = mean of C_m,c over the clients that have the class

λ = 0 is local training, bit for bit, and so is everybody's first round, before there are prototypes.

Decisions. R is a mean over the d_f features (released code); `reduce = "sum"` is the squared distance itself, λ then
being d_f times as strong. Prototypes are means over a clean pass of the trained model (public codes collect features
while the weights move). Clients count equally in C̄, as in the released code, or by their examples of the class; the
paper's formula divides by the number of clients *and* weighs by shares, which shrinks prototypes, and is not followed.
A class that no client sent in a round keeps its prototype.

The personal model predicts by its own head. Beside it, "nearest_prototype" predicts as the paper does, by the nearest
C̄_c of the known classes: argmin |φ − C̄_c|² is argmax of 2 C̄_c φ − |C̄_c|², a linear head, so it is a row like any
other. It needs a last layer with a bias. There is no server model, and what travels is C (d_f + 1) numbers each way.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.heads import class_means, mean_prototypes
from kinfed.algorithms.common.one_model import KeepsOwnModel, OwnModel
from kinfed.author import Deltas, Range, RoundInfo, Task, Tree, Weights, counts_examples, option, sgd
from kinfed.data import Batch, Cohort, Population

NEVER = -1e9  # the logit of a class without a prototype: below all others, and finite


@dataclass
class Server(Tree):
    prototypes: Tensor  # [C, d_f] C̄; zeros where unknown
    known: Tensor  # [C] bool


Down = Server  # [n, C, d_f] and [n, C]


@dataclass
class Up(Tree):
    prototypes: Tensor  # [n, C, d_f] C_m; zeros for classes that the client lacks
    # [n, C] what each counts in the mean: examples of the class, or 1; 0 for classes it lacks
    weight: Tensor = field(metadata=counts_examples())


@dataclass(frozen=True)
class PrototypePull:
    """λ |φ − C̄_y|² of examples whose class has a prototype, times `scale`."""

    prototypes: Tensor  # [n, C, d_f]
    known: Tensor  # [n, C] bool
    lam: float
    scale: float  # 1/d_f for a mean over features

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        client = rows.to(batch.y.device)[:, None]
        weight = batch.weight * self.known[client, batch.y]
        return None, 2 * self.lam * self.scale * weight[..., None] * (phi - self.prototypes[client, batch.y])


@dataclass(frozen=True)
class FedProto(KeepsOwnModel[Server, Down, Up]):
    lam: float = option(1.0, "λ: strength of the pull to prototypes; 0 is local training", ge=0, tune=Range(0.1, 10.0))
    reduce: Literal["mean", "sum"] = option("mean", "R over features: their mean (released code), or their sum")
    weights: Weights = option("equal", "weights of clients in a prototype: equal, or by their examples of the class")

    traits = frozenset({"needs classes", "any architecture"})
    acts_at = "body"
    leaks = "the mean features of its examples of every class"
    single_updates = "sends prototypes of the classes each client has, and every class is averaged over other clients"

    def init_server(self, task: Task, population: Population) -> Server:
        head = task.head
        prototypes = torch.zeros(head.outputs, head.inputs, device=task.device)
        return Server(prototypes, torch.zeros(head.outputs, dtype=torch.bool, device=task.device))

    def client_update(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> tuple[OwnModel, Up]:
        feature_loss = None
        if self.lam and bool(down.known.any()):
            scale = 1 / task.head.inputs if self.reduce == "mean" else 1.0
            feature_loss = PrototypePull(down.prototypes, down.known, self.lam, scale)
        theta = sgd(task, client.theta, data.train.batches(self.training), feature_loss=feature_loss)
        sums = task.class_sums(theta, data.train)
        means = class_means(sums)  # C_m,c
        weight = sums.count if self.weights == "examples" else sums.count > 0
        return OwnModel(theta), Up(means.to(theta.dtype), weight.to(theta.dtype))

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        prototypes, new = mean_prototypes(up.prototypes, up.weight, server.prototypes)  # C̄
        return Server(prototypes, server.known | new)

    def personalize(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        head = task.head
        if head.dense.bias is None:
            return client.theta
        bias = torch.where(down.known, -down.prototypes.square().sum(-1), NEVER)
        return {"personal": client.theta, "nearest_prototype": head.join(client.theta, 2 * down.prototypes, bias)}
