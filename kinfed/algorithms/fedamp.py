"""FedAMP: own models, each held near a mix of all clients' models in which close ones count most.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021,
Algorithm 1; HeurFedAMP is its Section "heuristic improvement".

    min  Σ_m f_m(θ_m) + λ Σ_{i<j} A(‖θ_i − θ_j‖²),      A(x) = 1 − exp(−x/σ)

    server:    u_i = Σ_j ξ_ij θ_j,      ξ_ij = α A'(‖θ_i − θ_j‖²) = (α/σ) exp(−‖θ_i − θ_j‖²/σ) for j ≠ i
               ξ_ii = 1 − Σ_{j≠i} ξ_ij
    client i:  θ_i ≈ argmin f_i(θ) + (λ/2α) ‖θ − u_i‖²  by local steps

    attention = "cosine" (HeurFedAMP), with ξ_ii fixed:
               ξ_ij = (1 − ξ_ii) exp(s cos(θ_i, θ_j)) / Σ_{h≠i} exp(s cos(θ_i, θ_h))

λ = 0 is local training, bit for bit. ξ_ii = 1 is not: there the client is held near where its round began.

Squared distances of networks are hundreds of times σ, exp underflows and nothing is shared; so σ is in units of the
mean squared distance of the known models, and α in the shares with it (`relative`, off for the formula as it stands).
Where the shares of others add up to more than 1 − `self_weight` they are scaled to that, since u_i must stay a mean;
the paper has α small enough. The journal shows the mean own share and how many clients were scaled.

The paper calls all clients in every round. Here all last known models take part; a client that never trained has none.
It is given the mean of those that are known and begins there, as beside models that have trained for long the common
start is far from everything (with λ = 0 it begins there all the same). All others start from their own model (`start`;
the paper asks only for the minimum). A widely used collection computes the hold from values without a gradient: its
FedAMP is local training.

Distances and cosines are of trainable columns; running statistics (of BatchNorm, say) are never pulled. The server
keeps N models, and `max_gb` refuses what would not fit.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, RoundInfo
from kinfed.algorithms.common.averaging import check_memory, own_or_server
from kinfed.algorithms.common.one_model import Client
from kinfed.author import ConfigError, Range, Task, Tree, cosines, option, pairwise_squared_distances, sgd
from kinfed.data import Cohort, Population


@dataclass
class Server(Tree):
    theta: Tensor  # [N, P] last known models
    known: Tensor  # [N] bool: has sent one
    xi: Tensor  # [N, N] float64 ξ, rows sum to 1
    scaled: Tensor  # [N] bool: the shares of others were scaled down


@dataclass
class Down(Tree):
    u: Tensor  # [n, P] the mix


@dataclass
class Up(Tree):
    theta: Tensor  # [n, P]


@dataclass(frozen=True)
class FedAMP(Algorithm[Server, Client, Down, Up]):
    attention: Literal["distance", "cosine"] = option("distance", "what makes models close: FedAMP's, or HeurFedAMP's")
    lam: float = option(
        1.0, "λ: own models are held near the mix by λ/α; 0 is local training", ge=0, tune=Range(0.01, 1.9)
    )
    alpha: float = option(1.0, "α: step of the mix", gt=0)
    sigma: float = option(1.0, "σ: distance at which models stop to count, for distances", gt=0, tune=Range(0.1, 10))
    relative: bool = option(True, "σ is in units of the mean squared distance of models")
    self_weight: float = option(0.5, "ξ_ii with cosines; the least ξ_ii with distances", ge=0, le=1)
    sharpness: float = option(10.0, "s in exp(s cos), for cosines", ge=0)
    start: Literal["own", "mix"] = option("own", "where local training begins")
    max_gb: float = option(4.0, "refuse models that take more than this many gigabytes of the server's memory", gt=0)

    gradients = 1
    single_updates = "keeps every single model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.training.lr * self.lam / self.alpha < 2:
            raise ConfigError(
                "FedAMP's step is unstable for lr * lam / alpha >= 2; got "
                f"{self.training.lr} * {self.lam} / {self.alpha}; lower lr or lam, or raise alpha"
            )

    def check(self, task: Task, population: Population) -> None:
        n = population.num_clients
        what = f"FedAMP's server keeps the models of all {n:,} clients, and a share for each pair of them"
        check_memory(what, 4 * n * (task.num_params + 2 * n), self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        n = population.num_clients
        no_client = torch.zeros(n, dtype=torch.bool)
        return Server(task.init(population.seed).repeat(n, 1), no_client, torch.eye(n, dtype=torch.float64), no_client)

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data)

    def download(self, server: Server, ids: Tensor) -> Down:
        # One row at a time, so that the mix does not depend on who is asked for with it.
        mixes = [server.xi[i].to(server.theta) @ server.theta for i in ids.tolist()]
        return Down(torch.stack(mixes) if mixes else server.theta[:0])

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        proximal = (self.lam / self.alpha, down.u) if self.lam else None
        begin = down.u
        if self.start == "own":
            begin = own_or_server(client.seen, client.theta, down.u) if self.lam else client.theta
        theta = sgd(task, begin, data.train.batches(self.training), proximal=proximal)  # ∇f(θ) + (λ/α) (θ − u)
        return Client(theta, torch.ones_like(client.seen)), Up(theta)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        theta, known = server.theta.clone(), server.known.clone()
        theta[ids], known[ids] = up.theta, True
        return Server(theta, known, *self._mixing(theta[:, round.trainable], known))

    def _mixing(self, models: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """ξ [N, N] of models [N, T] as last known, and who was scaled [N]."""
        members = known.nonzero().squeeze(1)
        n = len(members)
        share = self._shares(models[members]) if n > 1 else torch.zeros(n, n, dtype=torch.float64)
        total = share.sum(1)
        too_much = total > 1 - self.self_weight + 1e-12
        share *= torch.where(too_much, (1 - self.self_weight) / total, 1.0)[:, None]
        share.diagonal().copy_(1 - share.sum(1))  # ξ_ii
        xi = known.to(torch.float64).div(n).repeat(len(known), 1)  # a client without a model: the mean of all others'
        xi[members] = 0.0
        xi[members[:, None], members] = share
        scaled = torch.zeros_like(known)
        scaled[members] = too_much
        return xi, scaled

    def _shares(self, models: Tensor) -> Tensor:
        """[n, n] float64 ξ_ij of n > 1 models [n, T], 0 on the diagonal."""
        n = len(models)
        if self.attention == "cosine":
            closeness = self.sharpness * torch.from_numpy(cosines(models))
            return (1 - self.self_weight) * torch.softmax(closeness.fill_diagonal_(-torch.inf), 1)
        square = pairwise_squared_distances(models).cpu().fill_diagonal_(0.0)
        unit = square.sum() / (n * (n - 1)) if self.relative else torch.tensor(1.0, dtype=torch.float64)
        nearness = torch.exp(-square / (self.sigma * unit.clamp_min(torch.finfo(torch.float64).tiny)))
        return (self.alpha / self.sigma * nearness).fill_diagonal_(0.0)  # α A'(‖θ_i − θ_j‖²)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.theta, down.u)

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers have no model yet and are given the mean of all that are known."""
        if not bool(server.known.any()):
            return server
        return Server(server.theta, server.known, *self._mixing(server.theta[:, task.trainable], server.known))

    def figures(self, server: Server) -> dict[str, Any]:
        if not bool(server.known.any()):
            return {}
        own = server.xi.diagonal()[server.known]
        return {"own_share": float(own.mean()), "scaled_clients": float(server.scaled.sum())}
