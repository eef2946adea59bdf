"""FedDyn: local losses that are corrected until their minima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021,
Algorithm 1.

    min_w  (1/N) Σ_m f_m(w)

    client m:  θ_m ≈ argmin f_m(θ) − ⟨g_m, θ⟩ + (α/2) ‖θ − w‖²  from θ = w;      g_m ← g_m − α (θ_m − w)
    server:    h ← h − (α/N) Σ_A (θ_m − w);      w ← mean_A θ_m − h/α

g_m is the client's gradient where its local problem is solved exactly; at the optimum all θ_m are equal. h is the mean
of all clients' g_m, also of absent ones, at any participation. Both begin at 0, so the first local training is
FedProx's with μ = α, bit for bit. No limit is FedAvg: with α → 0 the server still adds up past updates.

The local gradient is ∇f(θ) + α (θ − (w + g_m/α)), a pull to a shifted centre. Released code has the square of the norm
wrong (a pull of constant size) or leaves out the α θ that the authors' code hides in the optimizer's weight decay;
there losses grow without bound. Momentum is allowed, as g_m follows from where the client ends, not from gradients.

w carries the correction −h/α and is what is sent. The server's model is the mean of the last round's θ_m, which the
convergence result is about; `server_model` = "sent" shows w instead. Clients weigh equally. The authors' α_m for
unequal sizes and their clipping to norm 10 are left out (`clip` of the local training is at hand).

g_m, h and the correction have trainable columns only; running statistics (of BatchNorm, say) are averaged.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import RoundInfo, ServerModels, check_stable
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, mean_update, own_or_server
from kinfed.algorithms.common.one_model import OneModel
from kinfed.author import Cohort, Population, Range, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    w: Tensor  # [P] what is sent
    h: Tensor  # [T] the mean of all clients' g_m
    mean: Tensor  # [P] of the models of the last round


@dataclass
class Client(Tree):
    g: Tensor  # [n, T] g_m, estimates of the clients' gradients
    theta: Tensor  # [n, P] the last local model
    seen: Tensor  # [n] bool: has trained


@dataclass(frozen=True)
class FedDyn(OneModel[Server, Client, ModelDown, DeltaUp]):
    alpha: float = option(0.1, "α: strength of the regularizer", gt=0, tune=Range(1e-3, 1.0))
    server_model: Literal["mean", "sent"] = option(
        "mean", "the server's model: the mean of the last round's, or the corrected one that is sent"
    )

    single_updates = "adds up all updates for ever to follow the mean of the clients' gradients"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stable("FedDyn's step", "alpha", self.training.lr, self.alpha)

    def init_server(self, task: Task, population: Population) -> Server:
        w = task.init(population.seed)
        return Server(w, torch.zeros_like(w[task.trainable]), w.clone())

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        return Client(torch.zeros_like(start[:, task.trainable]), start, torch.zeros(len(data), dtype=torch.bool))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        center = down.w.clone()
        center[:, task.trainable] += client.g / self.alpha
        theta = sgd(task, down.w, data.train.batches(self.training), proximal=(self.alpha, center))
        delta = theta - down.w
        g = client.g - self.alpha * delta[:, task.trainable]  # g_m ← g_m − α (θ_m − w)
        return Client(g, theta, torch.ones_like(client.seen)), DeltaUp(delta, None)

    def heard(self, task: Task, before: Client, after: Client, down: ModelDown, up: DeltaUp) -> Client:
        return replace(after, g=before.g - self.alpha * up.delta[:, task.trainable])

    def invariant(self, task: Task, server: Server, clients: Client) -> tuple[Tensor, Tensor]:
        return server.h, clients.g.mean(0)

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        total = up.delta[:, round.trainable].sum(0, dtype=torch.float64)
        h = server.h - (self.alpha / round.population.num_clients * total).to(server.h.dtype)
        mean = server.w + mean_update(up.delta, None)
        w = mean.clone()
        w[round.trainable] -= h / self.alpha  # w ← mean_A θ_m − h/α
        return Server(w, h, mean)

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.theta, down.w)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels((server.mean if self.server_model == "mean" else server.w)[None])
