"""CGPFL: K context models instead of one global model, found by clustering what the clients send.

Tang, Guo, Guo: Personalized Federated Learning with Contextualized Generalization, IJCAI 2022, Algorithm 1.

    min_Θ  (1/N) Σ_i [ f_i(θ_i) + (λ/2) ‖θ_i − ω_k(i)‖² ]
    s.t.   (Ω, k) minimizes (1/N) Σ_i ‖θ_i − ω_k(i)‖²            the k-means cost

A client receives its context model ω, takes S proximal steps of θ per batch, then one step of its copy of ω, for R
local rounds (the work's steps), and sends the copy back; the server clusters the copies (k-means++).
K = 1 with `restart` is pFedMe with equal weights and β = α. K = N leaves every client alone with its own ω.

Decisions where the paper is silent or its letter does not work:
  * `pull`. The printed step is ω − β (2/N) (ω − θ) with a β that is never given; with β = lr, 60% of the *initial*
    model remains after all rounds. The step is parametrized as ω − pull (ω − θ); the default pull = lr λ is pFedMe's
    step, which the K = 1 equivalence claimed by the paper requires. β = pull N / 2 is among the figures.
  * θ_i carries over from round to round (Θ_I^0 is an input of Algorithm 1); `restart` begins at the received ω.
  * Contexts keep their identity: after the first round k-means starts from the current Ω, so α < 1 averages like
    with like. Fewer distinct replies than K: they are clustered afresh and matched to the nearest old contexts; a
    context without members stays as it was.
  * Inactive clients keep their context (`recluster="active"`), or take part with their last upload ("all").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from kinfed import rng
from kinfed.algorithm import Algorithm
from kinfed.clustering import coordinates, k_means, num_distinct
from kinfed.data.federation import Cohort, Population
from kinfed.errors import ConfigError
from kinfed.local import each_step
from kinfed.task import Task
from kinfed.tree import Tree


@dataclass
class Server(Tree):
    omega: Tensor  # [K, P] context models
    context: Tensor  # [N] int64, context of each client
    last: Tensor  # [N, P] last upload of each client with recluster="all", else [0, P]
    known: Tensor  # [N] bool, clients that have uploaded
    round: Tensor  # [] int64 completed rounds
    key: Tensor  # [] int64 for k-means' random starts


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]
    seen: Tensor  # [n] bool


@dataclass
class Down(Tree):
    omega: Tensor  # [n, P]


@dataclass
class Up(Tree):
    omega: Tensor  # [n, P] the client's copy ω̃_i after R local rounds


@dataclass(frozen=True)
class CGPFL(Algorithm[Server, Client, Down, Up]):
    contexts: int = 4
    """K, the number of context models."""
    lam: float = 12.0
    """λ: how firmly personal models are held near the context model."""
    inner_steps: int = 5
    """S: proximal steps per batch."""
    alpha: float = 1.0
    """α of ω ← (1 − α) ω + α mean of the context's members."""
    pull: float | None = None
    """Step of the local ω towards θ, in (0, 1]; lr · λ where none is given."""
    personal_lr: float | None = None
    """η of the proximal steps; the common lr where none is given."""
    restart: bool = False
    """Begin each round's θ at the received context model (as pFedMe) instead of the client's last θ."""
    recluster: str = "active"
    """Cluster the replies of the round ("active") or everyone's last upload ("all")."""

    def __post_init__(self) -> None:
        if self.contexts < 1 or self.inner_steps < 1:
            raise ConfigError(f"contexts and inner_steps must be at least 1; got {self.contexts}, {self.inner_steps}")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha lies in (0, 1]; got {self.alpha}")
        if not 0 < self._pull(self.work.lr) <= 1:
            raise ConfigError(f"pull (by default lr * lam) must lie in (0, 1]; got {self._pull(self.work.lr):g}")
        if not 0 < self._inner_lr(self.work.lr) * self.lam < 2:
            raise ConfigError(f"the proximal steps are unstable for personal_lr * lam >= 2; got lam = {self.lam}")
        if self.recluster not in ("active", "all"):
            raise ConfigError(f"recluster is active or all; got {self.recluster!r}")

    def _pull(self, lr: float) -> float:
        return lr * self.lam if self.pull is None else self.pull

    def _inner_lr(self, lr: float) -> float:
        return lr if self.personal_lr is None else self.personal_lr * lr / self.work.lr

    def check(self, task: Task, clients: Population) -> None:
        super().check(task, clients)
        if self.contexts > clients.num_clients:
            raise ConfigError(f"{self.contexts} contexts need as many clients; got {clients.num_clients}")

    def init_server(self, task: Task, clients: Population) -> Server:
        n, w = clients.num_clients, task.init(clients.seed)
        return Server(
            w.repeat(self.contexts, 1),
            torch.zeros(n, dtype=torch.int64),
            w.new_zeros(n if self.recluster == "all" else 0, len(w)),
            torch.zeros(n, dtype=torch.bool),
            torch.tensor(0),
            clients.key("contexts"),
        )

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1), torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.omega[server.context[ids]])

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.work)
        eta, pull = self._inner_lr(batches.lr), self._pull(batches.lr)
        own = client.seen[:, None].to(down.omega.device) & (not self.restart)
        omega, theta = down.omega.clone(), torch.where(own, client.theta, down.omega)
        for batch, (w, x) in each_step(batches, omega, theta):
            for _ in range(self.inner_steps):
                task.descend_(x, batch, eta, (self.lam, w))  # θ ← θ − η (∇f(θ) + λ (θ − ω))
            w.lerp_(x, pull)  # ω ← ω − β (2/N) (ω − θ)
        return Client(theta, torch.ones_like(client.seen)), Up(omega)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        known, last = server.known.clone(), server.last
        known[ids] = True
        members, uploads = ids, up.omega
        if self.recluster == "all":
            last = last.clone()
            last[ids] = up.omega
            members = known.nonzero().squeeze(1)
            uploads = last[members]
        label = self._assign(server, uploads)
        omega, context = server.omega.clone(), server.context.clone()
        context[members] = label
        for k in torch.unique(label).tolist():
            mean = uploads[label == k].to(torch.float64).mean(0).to(omega.dtype)
            omega[k].lerp_(mean, self.alpha)  # Ω ← (1 − α) Ω + α Ω_I P
        return Server(omega, context, last, known, server.round + 1, server.key)

    def _assign(self, server: Server, uploads: Tensor) -> Tensor:
        """[n] the context of each upload: k-means from the current contexts, afresh where they do not differ yet."""
        k, n = len(server.omega), len(uploads)
        x = coordinates(torch.cat([uploads, server.omega]))
        points, centres = x[:n], x[n:]
        seed = rng.numpy_seed(rng.fold(server.key, server.round))
        distinct = num_distinct(points)
        if distinct >= k and num_distinct(centres) == k:
            return k_means(points, k, seed, centres).label
        label = k_means(points, min(k, distinct), seed).label
        if not bool(server.round):
            return label
        means = torch.stack([torch.from_numpy(points)[label == j].mean(0) for j in torch.unique(label)])
        rows, columns = linear_sum_assignment(torch.cdist(means, torch.from_numpy(centres)).square().numpy())
        return torch.from_numpy(columns)[torch.searchsorted(torch.from_numpy(rows), label)]

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.where(client.seen[:, None].to(down.omega.device), client.theta, down.omega)

    def global_models(self, server: Server, ids: Tensor) -> Tensor:
        return server.omega[server.context[ids]]

    def server_figures(self, server: Server) -> dict[str, Any]:
        n = len(server.context)
        return {
            "contexts": len(server.omega),
            "beta": self._pull(self.work.lr) * n / 2,
            "context": server.context,
            "distances": torch.cdist(server.omega.to(torch.float64), server.omega.to(torch.float64)),
        }
