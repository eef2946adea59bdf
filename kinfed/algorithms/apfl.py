"""APFL: each client mixes a model of its own with the global one, and learns how much.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, 2020, Algorithm 1.

    v̄_m = α_m v_m + (1 − α_m) w_m,     α_m ← α_m − η ⟨∇f_m(v̄_m), v_m − w_m⟩

Per step:  v ← v − η α ∇f(v̄),   w_m ← w_m − η ∇f(w_m);  the server averages w_m. α = 0 is FedAvg's global model for
everyone, α = 1 local training.

Decisions: parameters are mixed (a widely used implementation mixes outputs); α moves once per round, on the first
batch, as in the authors' code (`alpha_every_step` for the paper's text); no extra 0.02 α term; v is never
overwritten by the mixture. In the first round v = w, so α stays where it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import each_step, gradient, toward_zero
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]


@dataclass
class Client(Tree):
    v: Tensor  # [n, P]
    alpha: Tensor  # [n] float64 in [0, 1]


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class APFL(Algorithm[Server, Client, Down, Up]):
    alpha: float = 0.5
    """α at the start, in [0, 1]."""
    adaptive: bool = True
    """Learn α; otherwise it stays."""
    alpha_every_step: bool = False
    """Move α at every step instead of once per round."""
    weights: str = "equal"
    """Weights of the average: "equal" (paper) or "examples"."""

    takes_momentum = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha lies in [0, 1]; got {self.alpha}")
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed))

    def init_client(self, task: Task, data: Cohort) -> Client:
        alpha = torch.full((len(data),), self.alpha, dtype=torch.float64, device=task.device)
        return Client(task.init(data.seed).expand(len(data), -1), alpha)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        eta, decay = batches.lr, self.training.weight_decay
        w, v, alpha = down.w.clone(), client.v.clone(), client.alpha.clone()
        for batch, (w_m, v_m, a) in each_step(batches, w, v, alpha):
            g = gradient(task, mixture(v_m, w_m, a), batch, decay)  # ∇f(v̄)
            if self.adaptive and (self.alpha_every_step or batch.step == 0):
                slope = (g * (v_m - w_m)).sum(1, dtype=torch.float64)  # ⟨∇f(v̄), v − w⟩
                a.sub_(eta * slope).clamp_(0, 1)
            v_m.sub_(g * (eta * a)[:, None].to(g.dtype))
            task.descend_(w_m, batch, eta, toward_zero(w_m, decay))
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return Client(v, alpha), Up(w - down.w, count)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.w + mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count))

    def averaged(self) -> str:
        return "delta"

    def gradients(self, count: Tensor) -> dict[int, Tensor]:
        return {2: self.training.num_steps(count)}

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return mixture(client.v, down.w, client.alpha)

    def global_model(self, server: Server) -> Tensor:
        return server.w

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"alpha": client.alpha}


def mixture(v: Tensor, w: Tensor, alpha: Tensor) -> Tensor:
    """α v + (1 − α) w, exactly w at α = 0."""
    return torch.lerp(w, v, alpha[:, None].to(w.dtype))
