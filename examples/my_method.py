"""FedExP as a plugin: a method outside the package that joins every comparison.

    kinfed run --plugin examples/my_method.py --algorithms fedexp,fedavg

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023. FedAvg whose server
goes further along the mean of the updates Δ_m the less they agree:

    w ← w + η_g mean Δ_m,      η_g = max(1, mean ‖Δ_m‖² / (2 (‖mean Δ_m‖² + ε)))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kinfed
from kinfed.author import (
    Algorithm,
    Cohort,
    DeltaUp,
    ModelDown,
    Population,
    PrivacyProfile,
    Range,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    extrapolated,
    gradient_steps,
    mean_update,
    option,
    own_or_server,
    sgd,
)


@dataclass
class Server(Tree):
    w: Tensor  # [P] the model
    rate: Tensor  # [] float64 η_g of the last round


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the models after the last local training
    seen: Tensor  # [n] bool: has trained


@kinfed.register("algorithm", "fedexp", title="FedExP", summary="FedAvg that extrapolates where updates disagree")
@dataclass(frozen=True)
class FedExP(Algorithm[Server, Client, ModelDown, DeltaUp]):
    eps: float = option(1e-3, "ε: keeps η_g small where the mean update is", gt=0, tune=Range(1e-4, 0.1))

    single_updates = "measures the size of every single update"

    def init_server(self, task: Task, population: Population) -> Server:
        return Server(task.init(population.seed), torch.tensor(1.0, dtype=torch.float64))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1), torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown(server.w.expand(len(ids), -1))  # the same model for everyone: a view, not a copy

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        theta = sgd(task, down.w, data.train.batches(self.training))
        return Client(theta, torch.ones_like(client.seen)), DeltaUp(theta - down.w, None)

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        mean = mean_update(up.delta, None)
        size = up.delta[:, round.trainable].to(torch.float64).square().sum(1).mean()  # mean ‖Δ_m‖²
        rate = size / (2 * (mean[round.trainable].to(torch.float64).square().sum() + self.eps))
        rate = rate.clamp_min(1.0).cpu()  # η_g
        return Server(extrapolated(server.w, mean, float(rate), round.trainable), rate)

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return own_or_server(client.seen, client.theta, down.w)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(server.w[None])

    def figures(self, server: Server) -> dict[str, float]:
        return {"server_rate": float(server.rate)}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        return gradient_steps(self.training.num_steps(count))
