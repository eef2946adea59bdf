"""MAPPER: each client mixes a model of its own with the global one, in the best of a few proportions.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning, 2020
(arXiv 2002.10619), model interpolation, algorithm MAPPER.

    min over h_c, (h_k, λ_k):   Σ_k f_k(λ_k h_k + (1 − λ_k) h_c),     λ_k in a grid Λ

A client's turn: for every λ in Λ it trains h_k(λ) at the received h_c; it keeps the λ_k whose mixture has the least
loss on its training examples, and then trains h_c under that mixture. The server averages h_c. Λ = {0} is FedAvg's
global model for everyone, λ_k = 1 local training.

Decisions: parameters are mixed, as APFL here does, so that what a client deploys is one model (the paper mixes
hypotheses; for linear models both are the same). h_k(λ) goes on from the kept h_k, not from a new draw. The paper steps
h_c once for one client at a time; here called clients take the steps of their local work, and their h_c are averaged.
Batches of a turn are the same for every λ and for h_c.

Running statistics (of BatchNorm, say) are measured, not mixed: those of h_k are the mixture's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.apfl import Client, own_statistics
from kinfed.algorithms.common.averaging import best_fit
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import (
    Cohort,
    DeltaUp,
    GradientStep,
    Mix,
    ModelDown,
    Range,
    Task,
    Weights,
    example_counts,
    mixture,
    option,
    run_program,
)


@dataclass(frozen=True)
class MAPPER(AveragesOneModel[Client]):
    grid: int = option(
        5, "size of Λ: 0, 1/4, ..., 1; each value costs a local training", ge=1, tune=Range(2, 6, log=False, whole=True)
    )
    weights: Weights = option("equal", "weights of the average: equal, or by N_m")

    traits = frozenset({"no momentum"})
    leaks = "an update in the proportion that has the lowest loss on its training examples"

    def init_client(self, task: Task, data: Cohort) -> Client:
        n = len(data)
        start = task.init(data.seed).expand(n, -1)
        return Client(start, torch.zeros(n, dtype=torch.float64, device=task.device), torch.zeros(n, dtype=torch.bool))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        batches = data.train.batches(self.training)
        eta, decay = batches.lr, self.training.weight_decay
        start, n = own_statistics(task, client, down.w), torch.arange(len(data))
        candidates, mixtures = [], []  # h_k(λ) and λ h_k(λ) + (1 − λ) h_c, by λ
        shares = torch.linspace(0, 1, self.grid, dtype=torch.float64, device=task.device)  # Λ
        for lam in shares:
            v = start.clone()
            program = (Mix("mixed", "w", "v", float(lam)), GradientStep("v", eta * float(lam), at="mixed", decay=decay))
            run_program(task, [batches], program, {"w": down.w.clone(), "v": v})  # h_k ← h_k − η λ ∇f(h_λ)
            candidates.append(v)
            mixtures.append(mixture(down.w, v.clone(), lam.expand(len(data)), task.trainable))
        best = best_fit(task, mixtures, data.train).to(task.device)  # λ_k
        v, share = torch.stack(candidates)[best, n], shares[best]
        w = down.w.clone()
        program = (Mix("mixed", "w", "v", "share"), GradientStep("w", eta, at="mixed", number="rest", decay=decay))
        run_program(task, [batches], program, {"w": w, "v": v.clone()}, {"share": share, "rest": 1 - share})
        up = DeltaUp(w.sub_(down.w), example_counts(self.weights, data))  # h_c ← h_c − η (1 − λ_k) ∇f(h_λ)
        return Client(v, share, torch.ones_like(client.seen)), up

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return mixture(down.w, own_statistics(task, client, down.w), client.alpha, task.trainable)

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"share": client.alpha}
