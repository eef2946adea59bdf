"""FedGen: the server learns to generate features of every class, and clients train their heads on these, too.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Algorithm 1.

    client m:  min_θ  f_m(θ) + α E CE(h(G(y, ε); θ^p), y),   y ~ p̂, ε ~ N(0, I);   h the head, θ^p its parameters
    server:    averages what is shared, then G ← `server_steps` steps of Adam on E CE(mean_m h(G(y, ε); θ_m^p), y)

G is Linear, ReLU, Linear from (ε, one-hot y) to the d_f features, p̂ the shares of classes among the examples of the
round. `share = "model"` averages the whole model, `"head"` the last layer alone: bodies stay with the clients then, and
may be of several architectures. α = 0 is FedAvg with its model deployed as it is, or LG-FedAvg with one shared layer,
bit for bit.

Decisions. A mean of the outputs of linear heads is the output of their mean, so that the server needs nothing but
averages: those of the heads, which it has, and of class shares. Released code also weighs heads by their counts of the
class, matches predictions on the own examples to those on generated ones, and rewards diverse features: left out, like
the batch normalization inside of G. Every step of a client draws as many features as a batch has examples, for
(seed, round, step, client). Before the first round G knows nothing, and clients do without it.

The personal model is the shared part with what the client keeps. Not private: class shares leave a client.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, relu

from kinfed.algorithms.common.averaging import Weights, example_counts
from kinfed.algorithms.common.heads import class_counts, linear_start
from kinfed.algorithms.common.partial import Client, SharesPart
from kinfed.author import AveragingAlgorithm, ColumnSplit, RoundInfo, ServerModels, each_step, exact, toward_zero
from kinfed.core import Range, Tree, option, rng
from kinfed.data import Cohort, Population
from kinfed.engine import Task, sgd

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


@dataclass
class Down(Tree):
    shared: Tensor  # [n, G]
    generator: Tensor  # [n, R] two layers, weights [in, out] before biases
    labels: Tensor  # [n, C] p̂; zeros before there is a generator


@dataclass
class Server(Tree):
    shared: Tensor  # [G]
    generator: Tensor  # [R]
    labels: Tensor  # [C] p̂
    moments: Tensor  # [2, R] of Adam
    steps: Tensor  # [] int64 so far


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    labels: Tensor = field(metadata=exact())  # [n, C] shares of classes among the client's examples
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FedGen(SharesPart[Server, Client, Down, Up], AveragingAlgorithm[Server, Client, Down, Up]):
    share: Literal["model", "head"] = option("model", "what is averaged: whole models, or their heads alone")
    alpha: float = option(
        1.0, "α: strength of generated features in training; 0 leaves them out", ge=0, tune=Range(0.1, 10.0)
    )
    noise: int = option(16, "numbers of ε", ge=1)
    hidden: int = option(32, "hidden units of the generator", ge=1)
    server_steps: int = option(50, "steps on the generator per round", ge=0)
    server_lr: float = option(1e-2, "their rate", gt=0, tune=Range(1e-3, 0.1))
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes", "no momentum", "draws by client"})  # features
    fields = ("delta", "labels")
    acts_at = "head"
    leaks = "the shares of classes among its examples"

    def split(self, task: Task) -> ColumnSplit:
        head = ColumnSplit.from_mask(task.head.mask).swapped()
        return head if self.share == "head" else ColumnSplit.from_mask(torch.zeros_like(task.head.mask))

    def init_server(self, task: Task, population: Population) -> Server:
        head, key = task.head, population.key("fedgen")
        first = linear_start(rng.fold(key, 0), self.noise + head.outputs, self.hidden)
        G = torch.cat([first, linear_start(rng.fold(key, 1), self.hidden, head.inputs)]).to(task.device)
        shared = super().init_server(task, population).shared
        return Server(shared, G, torch.zeros(head.outputs).to(G), torch.zeros(2, len(G)).to(G), torch.tensor(0))

    def download(self, server: Server, ids: Tensor) -> Down:
        sent = Down(server.shared, server.generator, server.labels)
        return sent.map(lambda tensor: tensor.expand(len(ids), *tensor.shape))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(self.split(task).take_own(task.init(data.seed)).expand(len(data), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        split = self.split(task)
        theta, batches = split.join(client.own, down.shared), data.train.batches(self.training)
        if self.alpha and bool(down.labels.any()):
            theta = theta.clone(memory_format=torch.contiguous_format)
            key = rng.fold(rng.root(data.seed, "fedgen"), data.round)
            for batch, (now, G, labels) in each_step(batches, theta, down.generator, down.labels):
                y, phi = self.generate(rng.fold(key, batch.step, batch.ids), G, labels, task.head.inputs)
                dz = torch.softmax(task.head.logits(now, phi), -1) - y
                task.descend_(now, batch, batches.lr, toward_zero(now, self.training.weight_decay))
                weight, bias = task.head.split(now)
                rate = batches.lr * self.alpha / y.shape[1]
                weight -= rate * torch.bmm(dz.mT, phi)  # ∂CE(h(G(y, ε)), y)/∂θ^p
                if bias is not None:
                    bias -= rate * dz.sum(1)
        else:
            theta = sgd(task, theta, batches)
        counts = class_counts(data.train, task.head.outputs).to(theta.dtype)
        up = Up(
            split.take_shared(theta) - down.shared, counts / counts.sum(1, keepdim=True),
            example_counts(self.weights, data),
        )  # fmt: skip
        return Client(split.take_own(theta)), up

    def generate(self, key: Tensor, G: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """One-hot y ~ p̂ [n, B, C] and features [n, B, d_f] of generators G [n, R], as many as a batch has examples,
        with a key [n] for the draws of each and p̂ [n, C]."""
        (n, C), B = labels.shape, self.training.batch
        top = labels.double().cumsum(1)
        u = rng.uniform(rng.fold(key, 0), B).to(top.device) * top[:, -1:]
        y = one_hot(torch.searchsorted(top, u, right=True).clamp_max(C - 1), C).to(G.dtype)
        noise = rng.normal(rng.fold(key, 1), B * self.noise).view(n, B, self.noise).to(G)
        cut = (self.noise + C + 1) * self.hidden
        hidden = relu(_layer(torch.cat([noise, y], -1), G[:, :cut], self.hidden))
        return y, _layer(hidden, G[:, cut:], width)

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        assert round.server_task is not None  # the loop gives it
        task = round.server_task
        split, shared = self.split(task), server.shared + mean.delta
        new = replace(server, shared=shared, labels=mean.labels)
        if not self.alpha:
            return new
        w = split.join(
            split.take_own(task.init(round.population.seed))[None], shared[None]
        )  # of which only θ^p is read
        key, G, (m, v), t = round.key("fedgen"), server.generator[None], server.moments.unbind(0), int(server.steps)
        for step in range(self.server_steps):
            with torch.enable_grad():
                leaf = G.detach().requires_grad_()
                y, phi = self.generate(rng.fold(key, torch.tensor([step])), leaf, mean.labels[None], task.head.inputs)
                loss = cross_entropy(task.head.logits(w, phi)[0], y[0])
                (slope,) = torch.autograd.grad(loss, leaf)
            t += 1
            m, v = torch.lerp(slope[0], m, BETAS[0]), torch.lerp(slope[0].square(), v, BETAS[1])
            G = G - self.server_lr * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
        return replace(new, generator=G[0], moments=torch.stack([m, v]), steps=torch.tensor(t))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self.split(task).join(client.own, down.shared)

    def server_models(self, server: Server) -> ServerModels | None:
        return ServerModels(server.shared[None]) if self.share == "model" else None


def _layer(x: Tensor, numbers: Tensor, outputs: int) -> Tensor:
    """x [n, B, in] through layers of `numbers` [n, ...], weights [in, out] before biases."""
    square = x.shape[-1] * outputs
    return torch.baddbmm(numbers[:, None, square:], x, numbers[:, :square].view(len(x), -1, outputs))
