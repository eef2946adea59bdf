"""FD, federated distillation: models stay with the clients; what they share is their mean prediction for every class.

Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data, NeurIPS workshop on machine learning on the phone and other consumer devices,
2018, Algorithm 1.

    client m:  min_θ  f_m(θ) + γ mean of CE(F̂_m,y, softmax(z)) over its examples of classes with a target
    sends:     F̄_m,c = mean softmax(z) of its examples of class c
    server:    F̂_m,c = mean of F̄_j,c over the other clients j ≠ m that have the class

γ = 0 is local training, bit for bit, and so is everybody's first round, before there are targets. What travels is C²
numbers each way, whatever the model: clients may have several architectures.

Decisions. The paper calls normalized outputs logits; here they are probabilities. Means are over a clean pass of the
trained model (the paper adds predictions up while the weights move). The paper calls all clients in every round; with
partial participation the last means of everyone heard so far take part. A client alone with a class has no target for
it. A widely used library compares logits by their squared distance, with a mean that contains the client's own. The
paper's second half, augmentation by a common generative model of examples that clients upload, is another method.

The personal model is the client's own; there is no server model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.heads import class_means
from kinfed.algorithms.common.one_model import KeepsOwnModel, OwnModel
from kinfed.author import Batch, Cohort, Deltas, Population, Range, RoundInfo, Task, Tree, logit_delta, option, sgd


@dataclass
class Server(Tree):
    predictions: Tensor  # [N, C, C] F̄ as last sent; zeros for classes that a client lacks
    known: Tensor  # [N, C] bool: whose mean for which class


@dataclass
class Down(Tree):
    target: Tensor  # [n, C, C] F̂; zeros where unknown
    known: Tensor  # [n, C] bool


@dataclass
class Up(Tree):
    predictions: Tensor  # [n, C, C] F̄
    known: Tensor  # [n, C] bool: the client has the class


@dataclass(frozen=True)
class ClassTargets:
    """γ CE(F̂_y, softmax(z)) of examples whose class has a target, beside the cross-entropy."""

    target: Tensor  # [n, C, C]
    known: Tensor  # [n, C] bool
    gamma: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        client = rows.to(batch.y.device)[:, None]
        weight = self.gamma * batch.weight * self.known[client, batch.y]
        return logit_delta(z, batch) + weight[..., None] * (torch.softmax(z, -1) - self.target[client, batch.y]), None


@dataclass(frozen=True)
class FD(KeepsOwnModel[Server, Down, Up]):
    gamma: float = option(1.0, "γ: strength of the distillation; 0 is local training", ge=0, tune=Range(0.1, 10.0))

    traits = frozenset({"needs classes", "any architecture"})
    acts_at = "head"
    leaks = "the mean prediction for its examples of every class"
    single_updates = "sends every client the mean of the others' predictions"

    def init_server(self, task: Task, population: Population) -> Server:
        N, C = population.num_clients, task.head.outputs
        known = torch.zeros(N, C, dtype=torch.bool, device=task.device)
        return Server(torch.zeros(N, C, C, device=task.device), known)

    def download(self, server: Server, ids: Tensor) -> Down:
        own = ids.to(server.known.device)
        total = server.predictions.sum(0, dtype=torch.float64) - server.predictions[own]
        others = server.known.sum(0) - server.known[own].to(torch.int64)
        target = total / others.clamp_min(1)[..., None]  # F̂
        known = others > 0
        return Down(torch.where(known[..., None], target, 0.0).to(server.predictions.dtype), known)

    def client_update(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> tuple[OwnModel, Up]:
        feature_loss = None
        if self.gamma and bool(down.known.any()):
            feature_loss = ClassTargets(down.target, down.known, self.gamma)
        theta = sgd(task, client.theta, data.train.batches(self.training), feature_loss=feature_loss)
        sums = task.class_predictions(theta, data.train)
        return OwnModel(theta), Up(class_means(sums).to(theta.dtype), sums.count > 0)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        predictions, known = server.predictions.clone(), server.known.clone()
        predictions[ids], known[ids] = up.predictions, up.known
        return Server(predictions, known)
