"""FedMD: own models that agree on public examples.

Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation, 2019, Algorithm 1.

    first:     client m trains on the labelled public examples (`public_steps`), then on its own
    round:     f̄ = mean over clients of their logits on the public examples                     (communicate, aggregate)
               digest:   `digest_steps` steps of min mean |z − f̄| (or |z − f̄|²) over public examples and classes
               revisit:  the usual steps on its own examples

`digest_steps = 0` with `public_steps = 0` is local training, bit for bit; so is, without public steps, everybody's
first round. What travels is U C numbers each way, whatever the model.

Decisions. The logits of a round are those of the models it ends with, and guide the next one; they are averaged
equally over the clients of the round. Every round uses all public examples (the paper: a subset). Digest is plain SGD
at the common rate, on batches of its own. Algorithm 1 lets a party approach the consensus and names no distance; the
authors' code takes the mean absolute error of logits, which is the default here (`l2`: the mean squared one). A
public example belongs to no client: the federation sets them aside for all methods of a comparison alike, from training
data (kinfed run --public).

The personal model is the client's own; before its first training, the common start. There is no server model. Not
private: what a model says of public examples is computed from it without noise.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.distillation import OwnModels, digest, public_examples, public_scores
from kinfed.algorithms.common.one_model import Client
from kinfed.author import AveragingAlgorithm, Cohort, Population, Range, RoundInfo, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    consensus: Tensor  # [U, C] f̄
    known: Tensor  # [] bool: there is one


Down = Server  # [n, U, C] and [n]


@dataclass
class Up(Tree):
    scores: Tensor  # [n, U, C] logits of the public examples


@dataclass(frozen=True)
class FedMD(OwnModels[Server, Client, Down, Up], AveragingAlgorithm[Server, Client, Down, Up]):
    digest_steps: int = option(
        20, "steps towards the consensus per round; 0: none", ge=0, tune=Range(5, 50, whole=True)
    )
    public_steps: int = option(20, "steps on labelled public examples in a client's first round; 0: none", ge=0)
    distance: Literal["l1", "l2"] = option("l1", "between logits and consensus: mean absolute, or mean squared error")

    fields = ("scores",)

    def init_server(self, task: Task, population: Population) -> Server:
        assert population.pool is not None  # refused without
        consensus = torch.zeros(int(population.pool.count[0]), task.head.outputs, device=task.device)
        return Server(consensus, torch.zeros((), dtype=torch.bool, device=task.device))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        public, theta = public_examples(data), client.theta
        new = (~client.seen).nonzero().squeeze(1)
        if self.public_steps and len(new):
            theta = theta.clone(memory_format=torch.contiguous_format)
            batches = public.take(new).batches(self.training.with_steps(self.public_steps), stream="public")
            theta[new] = sgd(task, theta[new], batches)
        if self.digest_steps and bool(down.known.any()):
            theta = digest(task, theta, public, down.consensus, self._slope, self.training, self.digest_steps)
        theta = sgd(task, theta, data.train.batches(self.training))  # revisit
        return Client(theta, torch.ones_like(client.seen)), Up(public_scores(task, theta, public))

    def _slope(self, z: Tensor, target: Tensor) -> Tensor:
        gap = z - target
        return (2 * gap if self.distance == "l2" else gap.sign()) / z.shape[-1]

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        return self.step(server, Up(up.scores.mean(0)), round)

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        return Server(mean.scores, torch.ones_like(server.known))
