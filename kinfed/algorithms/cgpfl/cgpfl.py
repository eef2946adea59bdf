"""CGPFL: K context models instead of one global model, found by clustering what the clients send.

Tang, Guo, Guo: Personalized Federated Learning with Contextualized Generalization, IJCAI 2022, Algorithm 1.

    min_Θ  (1/N) Σ_i [ f_i(θ_i) + (λ/2) ‖θ_i − ω_k(i)‖² ]
    s.t.   (Ω, k) minimizes (1/N) Σ_i ‖θ_i − ω_k(i)‖²            the k-means cost

A client receives its context model ω, takes S proximal steps of θ per batch, then one step of its copy of ω, for R
local rounds (the work's steps), and sends the copy back; the server clusters the copies (k-means++).
K = 1 with `restart` is pFedMe with equal weights and β = α. K = N leaves every client alone with its own ω.

Decisions where the paper is silent or its letter does not work (docs/cgpfl.md has the measurements):
  * `pull`. The printed step is ω − β (2/N) (ω − θ) with a β that is never given; with β = lr, 60% of the *initial*
    model remains after all rounds. The step is parametrized as ω − pull (ω − θ); the default pull = lr λ is pFedMe's
    step, which the K = 1 equivalence claimed by the paper requires. β = pull N / 2 is among the figures.
  * θ_i carries over from round to round (Θ_I^0 is an input of Algorithm 1); `restart` begins at the received ω.
  * Contexts keep their identity: once they differ, k-means starts from the current Ω, so α < 1 averages like with
    like. A context that has lost all its clients is moved to the reply that fits its own context worst.
  * The paper calls all clients in every round. Here a context whose clients are not called stays as it is, whatever
    the others send; clients that are not called keep their context (`recluster="active"`) or take part with their last
    upload ("all"). A client that has never replied belongs to no context yet (−1) and is sent the mean of the
    contexts: sent one of them, it would hardly get away from it. With "all", as long as clients reply for the first
    time, their contexts are found afresh and matched with the old ones: the first few say little about those to come.
  * Weight decay is part of f_i; momentum, which proximal steps do not have, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, best_fit, mean_of
from kinfed.algorithms.clustering import Array, Clusters, coordinates, distances, k_means, lloyd
from kinfed.core import rng
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import each_step
from kinfed.engine.task import Task
from kinfed.errors import ConfigError

NONE = -1  # the context of a client that has not replied yet


@dataclass
class Server(Tree):
    omega: Tensor  # [K, P] context models
    context: Tensor  # [N] int64, context of each client; −1 before its first reply
    start: Tensor  # [P] for clients without context: mean of the contexts, each counted by its clients
    last: Tensor  # [N, P] last upload of each client with recluster="all", else [0, P]
    moved: Tensor  # [] int64 clients that changed their context in the last round
    spread: Tensor  # [] float64 mean ‖ω̃_i − mean of its context‖² over the clustered uploads
    round: Tensor  # [] int64 completed rounds
    key: Tensor  # [] int64 for k-means' random starts


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]
    seen: Tensor  # [n] bool
    apart: Tensor  # [n] float64 ‖θ_i − ω‖² after the last round, ω as received; for the report


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
        if not 0 < self._pull(self.training.lr) <= 1:
            raise ConfigError(f"pull (by default lr * lam) must lie in (0, 1]; got {self._pull(self.training.lr):g}")
        if not 0 < self._inner_lr(self.training.lr) * self.lam < 2:
            raise ConfigError(f"the proximal steps are unstable for personal_lr * lam >= 2; got lam = {self.lam}")
        if self.recluster not in ("active", "all"):
            raise ConfigError(f"recluster is active or all; got {self.recluster!r}")
        if self.training.momentum:
            raise ConfigError(
                f"the proximal steps of {type(self).__name__} have no momentum; got {self.training.momentum}: "
                "set this method's own momentum to 0"
            )

    def _pull(self, lr: float) -> float:
        """Of a round, decaying in step with the common rate."""
        return lr * self.lam if self.pull is None else self.pull

    def _inner_lr(self, lr: float) -> float:
        return lr if self.personal_lr is None else self.personal_lr * lr / self.training.lr

    def check(self, task: Task, clients: Population) -> None:
        super().check(task, clients)
        if self.contexts > clients.num_clients:
            raise ConfigError(f"{self.contexts} contexts need as many clients; got {clients.num_clients}")

    def init_server(self, task: Task, clients: Population) -> Server:
        n, w = clients.num_clients, task.init(clients.seed)
        return Server(
            omega=w.repeat(self.contexts, 1),
            context=torch.full((n,), NONE),
            start=w.clone(),
            last=w.new_zeros(n if self.recluster == "all" else 0, len(w)),
            moved=torch.tensor(0),
            spread=torch.tensor(0.0, dtype=torch.float64),
            round=torch.tensor(0),
            key=clients.key("contexts"),
        )

    def init_client(self, task: Task, data: Cohort) -> Client:
        n = len(data)
        apart = torch.zeros(n, dtype=torch.float64, device=task.device)
        return Client(task.init(data.seed).expand(n, -1), torch.zeros(n, dtype=torch.bool), apart)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(self.global_models(server, ids))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        eta, pull = self._inner_lr(batches.lr), self._pull(batches.lr)
        # With weight decay κ: λ (θ − ω) + κ θ = (λ + κ) (θ − ω λ/(λ + κ))
        hold = self.lam + self.training.weight_decay
        own = client.seen[:, None].to(down.omega.device) & (not self.restart)
        omega, theta = down.omega.clone(), torch.where(own, client.theta, down.omega)
        for batch, (w, x) in each_step(batches, omega, theta):
            centre = w * (self.lam / hold) if self.training.weight_decay else w
            for _ in range(self.inner_steps):
                task.descend_(x, batch, eta, (hold, centre))  # θ ← θ − η (∇f(θ) + λ (θ − ω))
            w.lerp_(x, pull)  # ω ← ω − β (2/N) (ω − θ)
        apart = (theta - down.omega).square_().sum(1, dtype=torch.float64)
        return Client(theta, torch.ones_like(client.seen), apart), Up(omega)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        server, members, uploads = self.gather(server, ids, up)
        found = self.assign(server, members, uploads)
        omega, context = server.omega.clone(), server.context.clone()
        context[members] = found.label.to(context)
        for k in torch.unique(found.label).tolist():
            mine = uploads[found.label == k]
            omega[k].lerp_(mean_of(mine, torch.ones(len(mine))), self.alpha)  # Ω ← (1 − α) Ω + α Ω_I P
        changed = (context != server.context) & (server.context >= 0)
        return replace(
            server,
            omega=omega,
            context=context,
            start=mean_of(omega, torch.bincount(context[context >= 0], minlength=len(omega))),
            moved=changed.sum(),
            spread=torch.tensor(found.cost, dtype=torch.float64),
            round=server.round + 1,
        )

    def gather(self, server: Server, ids: Tensor, up: Up) -> tuple[Server, Tensor, Tensor]:
        """The server with the uploads it keeps, and who is to be clustered by which upload [n, P]."""
        if self.recluster == "active":
            return server, ids, up.omega
        known = server.context >= 0
        known[ids] = True
        last = server.last.index_copy(0, ids.to(server.last.device), up.omega)
        members = known.nonzero().squeeze(1)
        return replace(server, last=last), members, last[members]

    def assign(self, server: Server, members: Tensor, uploads: Tensor) -> Clusters:
        """The context of each upload [n, P]: by k-means from the current contexts, or afresh."""

        def afresh() -> Clusters:
            seed = rng.numpy_seed(rng.fold(server.key, server.round))
            return k_means(coordinates(uploads), len(server.omega), seed)

        if bool((server.omega == server.omega[:1]).all()):
            return afresh()
        x = coordinates(uploads, server.omega)
        points, centres = x[: len(uploads)], x[len(uploads) :]
        if self.recluster == "all" and bool((server.context[members] < 0).any()):
            found = afresh()
            return Clusters(matched(found.label, points, centres), found.cost)
        absent = server.context >= 0
        absent[members] = False
        held = torch.bincount(server.context[absent], minlength=len(centres)) > 0
        return lloyd(points, centres, held=held.cpu().numpy())

    def gradients(self, count: Tensor) -> dict[int, Tensor] | None:
        return {self.inner_steps: self.training.num_steps(count)}

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.where(client.seen[:, None].to(down.omega.device), client.theta, down.omega)

    def adopt(self, task: Task, server: Server, data: Cohort) -> Server:
        """Newcomers join the context, of those that have clients, whose model fits their training examples best."""
        used = torch.unique(server.context[server.context >= 0])
        context = server.context.clone()
        context[data.ids] = used[best_fit(task, server.omega[used], data)]
        return replace(server, context=context)

    def global_models(self, server: Server, ids: Tensor) -> Tensor:
        context = server.context[ids]
        own = server.omega[context.clamp_min(0)]
        if bool((context < 0).any()):
            own = torch.where((context >= 0)[:, None].to(own.device), own, server.start)
        return own

    def server_figures(self, server: Server) -> dict[str, Any]:
        return {
            "contexts": len(server.omega),
            "contexts_in_use": int(torch.unique(server.context[server.context >= 0]).numel()),
            "moved": int(server.moved),
            "spread": float(server.spread),
            "beta": self._pull(self.training.lr) * len(server.context) / 2,
            "context": server.context,
            "distances": distances(server.omega),
        }

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"squared_distance_to_context": client.apart}


def matched(label: Tensor, points: Array, centres: Array) -> Tensor:
    """Labels 0..K' − 1 of the points replaced by numbers of the centres: those whose distances to the clusters' means,
    squared, have the least sum (Hungarian method)."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and a node never needs it

    means = np.stack([points[label.numpy() == j].mean(0) for j in range(int(label.max()) + 1)])
    apart = ((means[:, None] - centres[None]) ** 2).sum(-1)
    return torch.from_numpy(linear_sum_assignment(apart)[1])[label]
