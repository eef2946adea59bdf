"""CGPFL-Heur: CGPFL that chooses the number of contexts itself, after the first round(s).

Tang, Guo, Guo: Personalized Federated Learning with Contextualized Generalization, IJCAI 2022, Section 4.4, Eq. (11).

    e(K) = sqrt( (K/m) G(d, m) ) + μ cost(K),       K̂ = argmin over K = 1 .. N/2
    cost(K) = Σ_i (m_i/m) min_k ‖w_i − c_k‖²

The first term grows with K (more models to learn from the same m examples), the cost falls. Both terms, the whole
curve and K̂ are among the figures. K̂ is fixed afterwards; until it is chosen there is one context.

Decisions:
  * G(d, m) = d ln(e m/d) as printed for m ≥ d; for fewer examples than parameters it may be negative, and the bound
    2^m on the growth function applies instead, G = m ln 2.
  * The paper calls μ "appropriate" and gives none. The automatic μ makes the first term rise by as much over the whole
    range as the cost falls, so that neither wins by its scale. It finds well separated contexts exactly, takes
    overlapping ones together, and cannot find that there is only one: e is equal at both ends, and noise
    makes it lower in between (docs/cgpfl.md has the measurements). `mu_factor` is best chosen on validation rows: twice
    the automatic μ finds the ten overlapping contexts of the paper's split, and costs accuracy if all are alike.
  * The server clusters the uploaded copies w_i: θ_i, which the bound speaks of, never leave the clients.
  * Every K is also tried from the best K − 1 contexts and the upload farthest from them, so that the cost never rises.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.cgpfl.bound import complexity
from kinfed.algorithms.cgpfl.cgpfl import CGPFL, NONE, Client, Server, Up
from kinfed.algorithms.common.clustering import k_means_path
from kinfed.author import EXAMPLE_COUNT, Cohort, ConfigError, ModelDown, Population, PrivacyProfile, RoundInfo, Task
from kinfed.core import Range, kernels, option, rng


@dataclass(frozen=True)
class CGPFLHeur(CGPFL):
    contexts: int = option(1, "contexts before K̂ is chosen; always one", ge=1)
    mu: float | None = option(None, "μ of Eq. (11); chosen automatically by default", ge=0)
    mu_factor: float = option(
        1.0,
        "times the automatic μ: above 1 tells apart contexts that are closer to each other, and finds more in noise",
        gt=0, tune=Range(0.5, 4.0),
    )  # fmt: skip
    max_contexts: int | None = option(None, "largest K tried; N/2 by default", ge=1)
    solve_rounds: int = option(1, "rounds before K̂ is chosen (paper: the first only)", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contexts != 1:
            raise ConfigError(
                f"CGPFL-Heur chooses the number of contexts itself; got contexts = {self.contexts}: use cgpfl for a "
                "given number, or max_contexts for the largest one to try"
            )
        if self.mu is not None and self.mu_factor != 1:
            raise ConfigError("mu_factor multiplies the automatic mu; leave out one of mu and mu_factor")

    def init_server(self, task: Task, population: Population) -> Server:
        server = super().init_server(task, population)
        count = torch.zeros(population.num_clients, dtype=torch.float64)
        return replace(server, choice=replace(server.choice, count=count))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, Up]:
        client, up = super().client_update(task, client, down, data)
        return client, replace(up, count=data.train.count.to(torch.float32))

    def choose_contexts(self, server: Server, members: Tensor, uploads: Tensor, round: RoundInfo) -> Server:
        """The server with K̂ contexts, all alike still: clustering separates them. A client not clustered now gets no
        part in that, and belongs to no context until its next reply."""
        if len(server.choice.cost) or round.number < self.solve_rounds:
            return server
        count = server.choice.count[members].cpu()
        context = torch.full_like(server.context, NONE)
        context[members] = server.context[members]
        most = max(1, min(len(members), self.max_contexts or len(server.context) // 2))
        seeds = [rng.numpy_seed(rng.fold(round.key("contexts"), k)) for k in range(1, most + 1)]
        uploads = uploads[:, round.trainable]
        path = k_means_path(kernels.coordinates(uploads), seeds, count.numpy())
        cost = torch.tensor([clusters.cost for clusters in path], dtype=torch.float64)
        d, m = uploads.shape[1], float(count.sum())
        first = torch.tensor([complexity(k, d, m) for k in range(1, most + 1)], dtype=torch.float64)
        mu = self.mu_factor * balance(first, cost) if self.mu is None else self.mu
        best = smallest(first + mu * cost) + 1  # K̂
        choice = replace(server.choice, complexity=first, cost=cost, mu=torch.tensor(mu, dtype=torch.float64))
        return replace(server, omega=server.omega[:1].repeat(best, 1), context=context, choice=choice)

    def figures(self, server: Server) -> dict[str, Any]:
        choice = server.choice
        terms = {"mu": float(choice.mu), "complexity": choice.complexity, "cost": choice.cost}
        return super().figures(server) | terms

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return replace(super().privacy(count), uncovered={EXAMPLE_COUNT: ""})


def balance(first: Tensor, cost: Tensor) -> float:
    """μ with which the cost falls by as much as the first term rises over the whole range; 0 where it does not fall."""
    fall = float(cost[0] - cost[-1])
    return float(first[-1] - first[0]) / fall if fall > 0 else 0.0


def smallest(e: Tensor) -> int:
    """Place of the least e, the first of equals; with the automatic μ the two ends are equal, up to rounding."""
    return int((e <= e.min() * (1 + 1e-9)).nonzero()[0])
