"""MOCHA-deep: models of one's own, held near the mean of all clients' models. Not MOCHA, but what stands for it in
comparisons of networks.

Multi-task learning with a mean regularizer (Evgeniou and Pontil, KDD 2004), run on networks under the name MOCHA by
Liang et al. (LG-FedAvg, 2020) and by users of their code, FedFomo among them. It has no dual, no convexity and,
by default, no learned relations; the method of Smith et al. (2017) is `mocha`.

    min_W  Σ_i f_i(w_i) + λ₁ ‖w_i‖² + λ₂ ‖w_i − w̄‖²,      w̄ = mean of all clients' models

λ₁ = λ₂ = 0 is local training, bit for bit. w̄ is the one received at the start of the round:

    w_i ← w_i − η (∇f_i(w_i) + 2 λ₁ w_i + 2 λ₂ (w_i − w̄))

The second part is the gradient in w_i of λ₂ tr(W Ω Wᵀ) with Ω = I − 11ᵀ/m, the regularizer that the released code is
after; it builds Ω from a matrix of ones instead of I, which pulls the *sum* of all models to zero. So no agreement with
published rows of this name is to be expected. Other differences: w̄ is taken over all m clients as last known, not over
the active ones, and no parameter is left out (the code drops the last d mod 4000).

`learn_omega` learns Ω from the models, as MOCHA does: Σ = (WᵀW)^½, scaled to mean eigenvalue 1, eigenvalues not below
`omega_floor`, Ω = Σ⁻¹. Client i is then sent its own centre −Σ_j≠i Ω_ij w_j / Ω_ii and strength Ω_ii, and the server
keeps all models (m d numbers) instead of their mean.

Relations, means and pulls concern trainable parameters, which alone travel; running statistics (of BatchNorm, say) stay
with the clients' own models.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import FOLLOWS_MEAN, ChangeUp
from kinfed.author import Algorithm, Cohort, ConfigError, Population, Range, RoundInfo, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    models: Tensor  # [1, T] the mean w̄ of all; with learn_omega [m, T], all of them as last known
    omega: Tensor | None  # [m, m] float64, with learn_omega


@dataclass
class Client(Tree):
    w: Tensor  # [n, P] own model


@dataclass
class Down(Tree):
    center: Tensor  # [n, T] w̄, or the client's own centre with learn_omega
    strength: Tensor | None  # [n] Ω_ii, with learn_omega


Up = ChangeUp  # [n, T] how far the trainable parameters have moved


@dataclass(frozen=True)
class MochaDeep(Algorithm[Server, Client, Down, Up]):
    lam1: float = option(1e-4, "λ₁: how firmly models are held near zero", ge=0, tune=Range(1e-6, 1e-2))
    lam2: float = option(1e-2, "λ₂: how firmly models are held near the mean of all", ge=0, tune=Range(1e-3, 0.9))
    learn_omega: bool = option(
        False, "learn the relations Ω of clients from their models instead of holding all near one mean"
    )
    omega_floor: float = option(
        0.1, "least eigenvalue of Σ (mean 1) with learn_omega: no pull is stronger than λ₂ / omega_floor", gt=0, le=1
    )

    gradients = 1
    single_updates = FOLLOWS_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        strongest = 2 * (self.lam1 + self.lam2 / (self.omega_floor if self.learn_omega else 1))
        if not self.training.lr * strongest < 2:
            raise ConfigError(
                f"the pulls of 2 (lam1 + lam2) = {strongest:g} (with learn_omega lam2 / omega_floor) overshoot where "
                f"lr times that is 2 or more; got lr={self.training.lr}; lower lr, lam1 or lam2"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        m, start = population.num_clients, task.init(population.seed)[task.trainable].clone()
        if not self.learn_omega:
            return Server(start[None], None)
        return Server(start.repeat(m, 1), torch.eye(m, dtype=torch.float64) - 1 / m)

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def download(self, server: Server, ids: Tensor) -> Down:
        if server.omega is None:
            return Down(server.models.expand(len(ids), -1), None)
        centers = [_center(server.omega[i], server.models, i) for i in ids.tolist()]
        strength = server.omega.diagonal()[ids].to(torch.float32)
        return Down(torch.stack(centers), strength)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        proximal = self._proximal(down)
        if proximal is not None:  # a row is as wide as a model; behind the trainable columns nothing is pulled
            strength, center = proximal
            proximal = strength, torch.nn.functional.pad(center, (0, task.num_params - center.shape[1]))
        w = sgd(task, client.w, data.train.batches(self.training), proximal=proximal)
        return Client(w), Up((w - client.w)[:, task.trainable])

    def heard(self, task: Task, before: Client, after: Client, down: Down, up: Up) -> Client:
        w = after.w.clone()
        w[:, : up.delta.shape[1]] = before.w[:, : up.delta.shape[1]] + up.delta
        return Client(w)

    def invariant(self, task: Task, server: Server, clients: Client) -> tuple[Tensor, Tensor]:
        own = clients.w[:, : server.models.shape[1]]
        return server.models.squeeze(0), own if self.learn_omega else own.mean(0)

    def _proximal(self, down: Down) -> tuple[float | Tensor, Tensor] | None:
        """2 λ₁ w + 2 λ₂ s (w − c) is one pull of strength 2 (λ₁ + λ₂ s), towards c λ₂ s / (λ₁ + λ₂ s)."""
        if not self.lam1 and not self.lam2:
            return None
        if down.strength is None:
            return 2 * (self.lam1 + self.lam2), down.center * (self.lam2 / (self.lam1 + self.lam2))
        near = self.lam2 * down.strength
        total = (self.lam1 + near).clamp_min(torch.finfo(near.dtype).tiny)
        return 2 * total, down.center * (near / total)[:, None]

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        if server.omega is None:
            change = up.delta.sum(0, dtype=torch.float64) / round.population.num_clients
            return Server(server.models + change.to(server.models.dtype), None)
        models = server.models.clone()
        models[ids] += up.delta
        return Server(models, self._omega(models))

    def _omega(self, models: Tensor) -> Tensor:
        w = models.to("cpu", torch.float64)
        value, vector = torch.linalg.eigh(w @ w.T)
        root = value.clamp_min(0).sqrt()
        root = (root / root.mean().clamp_min(torch.finfo(root.dtype).tiny)).clamp_min(self.omega_floor)
        omega: Tensor = (vector / root) @ vector.T
        return omega

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return client.w

    def figures(self, server: Server) -> dict[str, Any]:
        if server.omega is None:
            return {}
        return {"strongest_pull": self.lam2 * float(server.omega.diagonal().max())}


def _center(omega: Tensor, models: Tensor, i: int) -> Tensor:
    """[T]: −Σ_j≠i Ω_ij w_j / Ω_ii, where the pull of the others on client i is zero."""
    others = -omega / omega[i]
    others[i] = 0
    return others.to(models) @ models
