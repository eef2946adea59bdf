"""MR-MTL: models of one's own, held near the mean of all clients' models.

Liu, Hu, Wu, Smith: On Privacy and Personalization in Cross-Silo Federated Learning, NeurIPS 2022, Algorithm 1 (mean-
regularized multi-task learning).

    min  Σ_m f_m(θ_m) + (λ/2) ‖θ_m − w‖²,      w = (1/N) Σ_m θ_m

    client m:  θ_m by local steps of f_m + (λ/2) ‖· − w‖² from its own θ_m;      server: w ← w + (1/N) Σ_A change of θ_m

λ = 0 is local training, bit for bit. One model is trained where Ditto trains two, so that a batch costs one gradient:
under differential privacy less noise, which is the paper's point. There the pull is added to the noisy gradient, as it
depends on no example; the authors' code clips it with each example's gradient.

The server adds changes to w and divides by all N clients, so that w is the mean of all current models whichever clients
took part (the authors call all clients in every round, where it is the same). All begin at w. Clients weigh equally.
`mocha_deep` with lam1 = 0 and lam2 = λ/2 is the same recursion; it does not send running statistics (of BatchNorm,
say) and has no server model. Here they are part of the mean, and the pull leaves them alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import check_stable
from kinfed.algorithms.common.averaging import FOLLOWS_MEAN
from kinfed.algorithms.common.one_model import KeepsOwnModel, OneModel, OwnModel
from kinfed.author import Cohort, DeltaUp, ModelDown, ModelState, Range, RoundInfo, Task, option, sgd


@dataclass(frozen=True)
class MRMTL(KeepsOwnModel[ModelState, ModelDown, DeltaUp], OneModel[ModelState, OwnModel, ModelDown, DeltaUp]):
    lam: float = option(0.5, "λ: how firmly own models are held near the mean of all", ge=0, tune=Range(1e-2, 1.9))

    single_updates = FOLLOWS_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stable("MR-MTL's step", "lam", self.training.lr, self.lam)

    def client_update(self, task: Task, client: OwnModel, down: ModelDown, data: Cohort) -> tuple[OwnModel, DeltaUp]:
        proximal = (self.lam, down.w) if self.lam else None
        theta = sgd(task, client.theta, data.train.batches(self.training), proximal=proximal)  # ∇f(θ) + λ (θ − w)
        return OwnModel(theta), DeltaUp(theta - client.theta, None)

    def heard(self, task: Task, before: OwnModel, after: OwnModel, down: ModelDown, up: DeltaUp) -> OwnModel:
        return OwnModel(before.theta + up.delta)

    def invariant(self, task: Task, server: ModelState, clients: OwnModel) -> tuple[Tensor, Tensor]:
        return server.w, clients.theta.mean(0)

    def aggregate(self, server: ModelState, ids: Tensor, up: DeltaUp, round: RoundInfo) -> ModelState:
        change = up.delta.sum(0, dtype=torch.float64) / round.population.num_clients
        return ModelState(server.w + change.to(server.w.dtype))
