"""Augmented Self-FL: beside its personal model, each client trains one to convergence and is judged by that.

Chen et al., Self-Aware Personalized Federated Learning, https://arxiv.org/abs/2204.08069, Algorithm 2 (Appendix D).

Algorithm 1 takes the early-stopped θ_m^t for the client's own optimum. Here training goes on from θ_m^t to a local
optimum θ_{m,t}, which replaces it in the variances (23), (25), the starting point (24) and the average (26). The
personal model is θ_m^t.

Cost: training to convergence at every client in every round, and both models travel up, although the server uses
θ_{m,t} only: the algorithm says so, and the doubled bytes are what the paper counts.

"Until convergence" is not defined in the paper. Here: epoch by epoch, until the client's training loss changes by
less than `tol` of itself over an epoch, or after `max_extra` epochs.

With full batches every θ_{m,t} is the same point, its variance over rounds is 0, and (19) asks for a single step: the
method needs mini-batch noise, or known variances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.selffl.selffl import Down, SelfFL, SelfFLClient, Server, plan_figures
from kinfed.algorithms.selffl.selffl import Up as OneModelUp
from kinfed.algorithms.selffl.uncertainty import Running
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]  θ_m^t, early-stopped: the personal model
    optimum: Tensor  # [n, P]  θ_{m,t}
    mean: Tensor  # [n, P]  of its optima so far
    m2: Tensor  # [n] float64
    rounds: Tensor  # [n] int64
    last: Tensor  # [n, 3] float64  as in Algorithm 1


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]  θ_m^t − θ
    optimum: Tensor  # [n, P]  θ_{m,t} − θ
    s: Tensor  # [n]  σ_m²; −1 unknown
    count: Tensor | None  # [n] examples; only without (26)


@dataclass(frozen=True)
class SelfFLAugmented(SelfFLClient[Server, Client, Down, Up]):
    tol: float = 1e-4
    """Trained to convergence when an epoch changes the training loss by less than this share of it."""
    max_extra: int = 10
    """Most epochs after the early stop."""

    private = False
    leaks = ("models trained until the loss on training examples settles",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tol >= 0:
            raise ConfigError(f"tol must not be negative; got {self.tol}")
        if self.max_extra < 1:
            raise ConfigError(f"max_extra is a number of epochs of at least 1; got {self.max_extra}")

    @property
    def _server(self) -> SelfFL:
        """The server's side, which is Algorithm 1's with θ_{m,t} for θ_m^t."""
        rules = {name: value for name, value in self.options().items() if name not in ("tol", "max_extra")}
        return SelfFL(self.training, **rules)

    def init_server(self, task: Task, clients: Population) -> Server:
        return self._server.init_server(task, clients)

    def init_client(self, task: Task, data: Cohort) -> Client:
        fresh = self._server.init_client(task, data)
        return Client(fresh.theta, fresh.theta, fresh.mean, fresh.m2, fresh.rounds, fresh.last)

    def prepare(self, server: Server, ids: Tensor) -> Server:
        return self._server.prepare(server, ids)

    def download(self, server: Server, ids: Tensor) -> Down:
        return self._server.download(server, ids)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        past = Running(client.rounds.cpu(), client.mean, client.m2.cpu())  # (23)
        plan = self.decide(task, past, down.s0, down.others, data)
        start = self.start(down.theta, client.optimum, plan)  # (24)
        theta = sgd(task, start, data.train.batches(self.local_work, plan.steps))
        optimum = self.converge(task, theta, data)
        optima = past.add(optimum)
        s = self.variance(task, optima, data).to(torch.float32)
        count = None if self.use_agg else data.train.count.to(torch.float32)
        return (
            Client(theta, optimum, optima.mean, optima.m2, optima.n, plan.summary()),
            Up(theta - down.theta, optimum - down.theta, s, count),
        )

    def converge(self, task: Task, theta: Tensor, data: Cohort) -> Tensor:
        """θ after further epochs, each client until its training loss settles. Each epoch has an order of its own."""
        x = theta.clone()
        epoch = replace(self.training, steps=None, epochs=1)
        left = torch.arange(len(data))
        before = task.mean_loss(x, data.train)
        for number in range(self.max_extra):
            part = data.train.take(left)
            x[left] = sgd(task, x[left], part.batches(epoch, stream=f"converge-{number}"))
            after = task.mean_loss(x[left], part)
            moving = (after - before).abs() > self.tol * before.abs()  # false for NaN: a diverged client stops
            left, before = left[moving], after[moving]
            if not len(left):
                break
        return x

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return self._server.aggregate(server, ids, OneModelUp(up.optimum, up.s, up.count))  # (25), (26)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.where((client.rounds > 0)[:, None].to(down.theta.device), client.theta, down.theta)

    def global_model(self, server: Server) -> Tensor:
        return server.theta

    def server_figures(self, server: Server) -> dict[str, Any]:
        return self._server.server_figures(server)

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        variance = self.own_variance(Running(client.rounds, client.mean, client.m2))
        return {"sigma_m_sq": variance, "rounds_active": client.rounds} | plan_figures(client.last)
