"""FedAvg: one model for all, the average of what clients make of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, Algorithm 1 (FederatedAveraging).

    min_w  Σ_m p_m f_m(w),      p_m ∝ N_m ("examples") or 1 ("equal")

The personal model is the client's own after its last local training (fine-tuned); the global model is evaluated
beside it. A client never active has no own model and uses the current global one.

`smoothing` c < 1 keeps w ← (1 − c) w + c ŵ. With c = "participation" it is the smoothing average of Self-FL and
nothing else of it: the control that must stand beside Self-FL.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import AveragingAlgorithm, Cohort, Population, RoundInfo, Task, Tree, difference, option, sgd


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    c: Tensor  # [] weight of the new average


@dataclass(frozen=True)
class FedAvg(DeploysLastModel[Server, ModelDown, DeltaUp], AveragingAlgorithm[Server, Client, ModelDown, DeltaUp]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    smoothing: float | Literal["participation"] = option(
        1.0, "c in w ← (1 − c) w + c ŵ: a number, or the participation rate", gt=0, le=1
    )

    traits = frozenset({"state to deploy"})

    def init_server(self, task: Task, population: Population) -> Server:
        c = population.participation if isinstance(self.smoothing, str) else self.smoothing
        return Server(task.init(population.seed), torch.tensor(c, dtype=torch.float64))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        u = self.train(task, down.w, data)
        up = DeltaUp(difference(u, down.w), example_counts(self.weights, data))
        return Client(u, torch.ones_like(client.seen)), up

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        """Local training from the received model; what related methods change."""
        return sgd(task, w, data.train.batches(self.training))

    def step(self, server: Server, mean: DeltaUp, round: RoundInfo) -> Server:
        w = torch.add(server.w, mean.delta, alpha=float(server.c), out=mean.delta)  # w + c Σ p_m (u_m − w)
        return Server(w, server.c)
