"""APPLE: every client's model is a sum of all clients' core models, in proportions that it learns.

Luo, Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning, IJCAI 2022, Algorithm 1.

    client m:  min over its core c_m and its relations q_m [N]   f_m(x_m) + (μ r(t)/2) ‖q_m − q⁰‖²,   x_m = Σ_j q_mj c_j
    per step:  c_m ← c_m − η s_m ∇f_m(x_m);      q_mj ← q_mj − η_q (⟨∇f_m(x_m), c_j⟩ + μ r(t) (q_mj − q⁰_j)) for all j
    r(t) = (1 + cos(π t/T₀)) / 2 for t < T₀, then 0

Both steps have the gradient at the old x_m; other clients' cores stay during a round. All cores begin at the common
start, and q_m at q⁰ = 1/N, so that x_m is that start. Relations may become negative, and need not sum to 1.

s_m is q_mm in the paper (`core_step = "paper"`), the derivative of x_m in c_m. At q⁰ all models then move N times as
slowly as FedAvg's, and a client's own core contributes N² times less than a step alone: the authors train for hundreds
of rounds with momentum. The default, s_m = q_mm/‖q_m‖², takes the same direction with a length that does not depend on
N: where η_q = 0, q = q⁰ moves the mean of all cores as FedAvg with equal weights does (with one local step and all
clients to rounding), and q_mm = 1 with no other is local training. Over 30 rounds on digits (20 clients) it reaches
93.7 % where the paper's step reaches 70.2 %.

Decisions. q⁰ is 1/N; the paper's N_j/ΣN would have to be collected before the first round. The penalty has the factor
½, so its gradient is half of that in the authors' code. T₀ is counted in rounds, of which the authors take a tenth.
The relations of a client are as many as there are clients, a width that clients do not know: the server keeps them and
hands them back, and learns from them who makes use of whom. Downloads of some cores only are left out. A widely used
collection takes a mean over parameters where the inner product stands, and sends the mixture instead of the core.

What travels: all N cores down, the same for everybody, so the method is for few clients; `max_gb` refuses more. Running
statistics (of BatchNorm, say) are not summed: each client has its own, and one that has not trained the mean of all.
"""

from dataclasses import dataclass, replace
from math import cos, pi
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, RoundInfo
from kinfed.algorithms.common.averaging import check_memory
from kinfed.author import Cohort, ConfigError, Nothing, Population, Range, Task, Tree, each_step, gradient, option


@dataclass
class Server(Tree):
    cores: Tensor  # [N, P]
    q: Tensor  # [N, N] relations; row m is client m's
    known: Tensor  # [N] bool: has trained
    strength: Tensor  # [] float32 μ r(t) of the round


@dataclass
class Down(Tree):
    cores: Tensor  # [n, N, P], the same for all
    own: Tensor  # [n] int64: which of them is the client's
    q: Tensor  # [n, N]
    trained: Tensor  # [n] bool: its core is no longer the start
    strength: Tensor  # [n] float32 μ r(t)


@dataclass
class Up(Tree):
    core: Tensor  # [n, P]
    q: Tensor  # [n, N]


@dataclass(frozen=True)
class APPLE(Algorithm[Server, Nothing, Down, Up]):
    relation_lr: float = option(0.001, "η_q: step of the relations; 0 keeps them", ge=0, tune=Range(1e-4, 0.1))
    mu: float = option(0.1, "μ: strength of the pull of relations to equal ones", ge=0)
    pull_rounds: int = option(10, "T₀: rounds in which that pull fades away", ge=0)
    core_step: Literal["normalized", "paper"] = option("normalized", "s_m: q_mm/‖q_m‖², or the paper's q_mm")
    max_gb: float = option(4.0, "refuse cores and relations that take more than this many gigabytes", gt=0)

    traits = frozenset({"no momentum", "hands models on"})
    gradients = 1
    single_updates = "hands every client's core on to all others instead of averaging them"

    def check(self, task: Task, population: Population) -> None:
        n = population.num_clients
        what = f"APPLE sends every client the core models of all {n:,} and keeps all their relations"
        check_memory(what, 4 * n * (task.num_params + n), self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        n = population.num_clients
        cores = task.init(population.seed).repeat(n, 1)
        q = torch.full((n, n), 1 / n, dtype=cores.dtype, device=cores.device)
        return Server(cores, q, torch.zeros(n, dtype=torch.bool), torch.tensor(self.mu))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        t = round.number - 1
        fading = (1 + cos(pi * t / self.pull_rounds)) / 2 if t < self.pull_rounds else 0.0  # r(t)
        return replace(server, strength=torch.tensor(self.mu * fading)), active

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        return Down(server.cores.expand(n, -1, -1), ids, server.q[ids], server.known[ids], server.strength.expand(n))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        batches = data.train.batches(self.training)
        core, q, others = self._own_core(task, down), down.q.clone(), _others(task, down)
        tensors = (core, q, down.own.clone(), down.strength.clone())
        for batch, (c, relations, own, strength) in each_step(batches, *tensors):
            x = _mixture(task, c, relations, own, others)
            g = gradient(task, x, batch, self.training.weight_decay, training=True)
            slope = g[:, task.trainable]
            rows = torch.arange(len(own))
            share = relations[rows, own].clone()
            inner = slope @ others.T  # ⟨∇f(x), c_j⟩
            inner[rows, own] = (slope * c[:, task.trainable]).sum(1)
            c[:, task.trainable.stop :] = x[:, task.trainable.stop :]
            if self.core_step == "normalized":
                share /= relations.square().sum(1).clamp_min(torch.finfo(relations.dtype).tiny)
            c[:, task.trainable] -= (batches.lr * share)[:, None] * slope
            if self.relation_lr:
                pull = strength.to(relations)[:, None] * (relations - 1 / relations.shape[1])
                relations -= self.relation_lr * (inner + pull)
        return client, Up(core, q)

    def _own_core(self, task: Task, down: Down) -> Tensor:
        """[n, P]: models of clients that have not trained yet have the mean running statistics of all."""
        core = down.cores[torch.arange(len(down.own)), down.own].clone()
        behind = slice(task.trainable.stop, None)
        if core[:, behind].numel():
            mean = down.cores[0, :, behind].mean(0)
            core[:, behind] = torch.where(down.trained[:, None].to(core.device), core[:, behind], mean)
        return core

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        cores, q, known = server.cores.clone(), server.q.clone(), server.known.clone()
        cores[ids], q[ids], known[ids] = up.core, up.q, True
        return Server(cores, q, known, server.strength)

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return _mixture(task, self._own_core(task, down), down.q, down.own, _others(task, down))

    def place_newcomer(self, task: Task, server: Server, data: Cohort) -> Server:
        raise ConfigError(
            "APPLE's clients learn what every other client's core is worth to them while it runs, and a newcomer has "
            "not; run again with it, or adopt from another method"
        )

    def figures(self, server: Server) -> dict[str, Any]:
        size = server.q.abs()
        return {"own_share": float((size.diagonal() / size.sum(1).clamp_min(1e-12)).mean())}


def _others(task: Task, down: Down) -> Tensor:
    """[N, T] trainable columns of all cores as they were sent, which are the same for all clients of a round."""
    return down.cores[0][:, task.trainable]


def _mixture(task: Task, core: Tensor, q: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """x_m = Σ_j q_mj c_j [n, P] with the client's own core as it is now, and its running statistics."""
    rows = torch.arange(len(own))
    rest = q.clone()
    rest[rows, own] = 0.0
    x = core.clone()
    x[:, task.trainable] = q[rows, own][:, None] * core[:, task.trainable] + rest @ others
    return x
