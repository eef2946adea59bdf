"""SCAFFOLD: FedAvg whose clients correct the drift of their local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020, Algorithm 1 with option II.

    min_w  (1/N) Σ_m f_m(w)

    client m:  y ← y − η (∇f_m(y) + c − c_m), K_m times from y = w;      c_m⁺ = c_m − c + (w − y) / (K_m η)
    server:    w ← w + η_g mean_A (y_m − w);      c ← c + (1/N) Σ_A (c_m⁺ − c_m)

A control variate c_m estimates the client's gradient, c is the mean of all N clients' (also of absent ones, so
the last sum is divided by N and not by the number of replies). At the optimum every corrected step vanishes: with many
local steps the limit is the minimum of the mean, which FedAvg misses. All begin at c = c_m = 0, and the first round is
FedAvg's with equal weights, bit for bit. A client that is away keeps its c_m.

What travels: w and c down; up y − w and K_m η. The paper also sends c_m⁺ − c_m, which is −c − (y − w) / (K_m η): the
server forms it from the rest, and a reply is half as long. η is the rate of the round, which decays where training says
so; code that divides by the first round's rate makes control variates too small by the decay.

Momentum, other optimizers and clipping are refused: (w − y) / (K_m η) would not be a mean of gradients. Weight decay is
part of f_m, and so of c_m. The objective weighs clients equally; weights by examples would need q_m in both sums.
Option I (c_m as the gradient at w of all examples, one more pass) is left out: the authors found II cheaper and run it.

Control variates have trainable columns only; running statistics (of BatchNorm, say) take the mean, and no longer step.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, RoundInfo, gradient_steps
from kinfed.algorithms.common.averaging import extrapolated, mean_update, own_or_server
from kinfed.algorithms.common.one_model import OneModel
from kinfed.author import Cohort, Population, Range, Task, Tree, option, renewed, sgd, weighted_mean


@dataclass
class Server(Tree):
    w: Tensor  # [P] the model
    c: Tensor  # [T] its control variate, the mean of all clients'


@dataclass
class Client(Tree):
    c: Tensor  # [n, T] own control variates c_m
    y: Tensor  # [n, P] the models after the last local training
    seen: Tensor  # [n] bool: has trained


Down = Server  # [n, P] and [n, T]


@dataclass
class Up(Tree):
    delta: Tensor = field(metadata=renewed())  # [n, P] y − w
    length: Tensor  # [n] float32 K_m η, by which a sum of gradients became y − w


@dataclass(frozen=True)
class Scaffold(OneModel[Server, Client, Down, Up]):
    server_lr: float = option(1.0, "η_g: rate of the server's step", gt=0, tune=Range(0.1, 1.5))

    traits = frozenset({"no momentum"})  # c_m is a mean gradient
    single_updates = (
        "divides each client's update by its steps to follow control variates, beside the mean of the updates"
    )

    def init_server(self, task: Task, population: Population) -> Server:
        w = task.init(population.seed)
        return Server(w, torch.zeros_like(w[task.trainable]))

    def init_client(self, task: Task, data: Cohort) -> Client:
        y = task.init(data.seed).expand(len(data), -1)
        return Client(torch.zeros_like(y[:, task.trainable]), y, torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1), server.c.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        drift = torch.nn.functional.pad(down.c - client.c, (0, task.num_params - client.c.shape[1]))
        y = sgd(task, down.w, batches, drift=drift)  # y ← y − η (∇f(y) + c − c_m)
        up = Up(y - down.w, batches.lr * batches.steps.to(torch.float32))
        c = client.c + _control_change(up, down.c)  # c_m⁺
        return Client(c, y, torch.ones_like(client.seen)), up

    def heard(self, task: Task, before: Client, after: Client, down: Down, up: Up) -> Client:
        return replace(after, c=before.c + _control_change(up, down.c))

    def invariant(self, task: Task, server: Server, clients: Client) -> tuple[Tensor, Tensor]:
        return server.c, clients.c.mean(0)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        w = extrapolated(server.w, mean_update(up.delta, None), self.server_lr, round.trainable)
        change = -server.c - _mean_gradient(up, server.c.shape[0])  # of the active clients, on average
        moved = int((up.length > 0).sum()) / round.population.num_clients
        return Server(w, server.c + moved * change)  # c ← c + (1/N) Σ_A (c_m⁺ − c_m)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.y, down.w)

    def privacy(self, count: Tensor) -> PrivacyProfile:
        by_epoch = {"how many batches each client has": "steps instead of epochs"} if self.training.epochs else {}
        return gradient_steps(self.training.num_steps(count), uncovered=by_epoch)


def _control_change(up: Up, c: Tensor) -> Tensor:
    """[n, T]: c_m⁺ − c_m = −c − Δ_m / (K_m η), for c [n, T]; 0 for clients that took no step and learnt nothing."""
    change = (up.delta[:, : c.shape[1]] / -up.length.to(up.delta)[:, None]).sub_(c)
    change[(up.length <= 0).to(change.device)] = 0.0
    return change


def _mean_gradient(up: Up, trainable: int) -> Tensor:
    """[T]: the mean of Δ_m / (K_m η) over the clients that took a step; 0 where none did."""
    weight = torch.where(up.length > 0, 1 / up.length, 0.0)
    steps = int((up.length > 0).sum())
    delta = up.delta[:, :trainable]
    return weighted_mean(delta, weight) * (float(weight.sum()) / steps) if steps else torch.zeros_like(delta[0])
