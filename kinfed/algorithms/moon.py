"""MOON: FedAvg whose features are drawn to those of the received model and away from those of the client's last one.

Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021.

    client m:  min_θ  f_m(θ) + μ l_con
    l_con = −log( exp(cos(φ, φ_w)/τ) / (exp(cos(φ, φ_w)/τ) + exp(cos(φ, φ_prev)/τ)) )                          (3)
          = log(1 + exp((cos(φ, φ_prev) − cos(φ, φ_w))/τ)),   φ_w of the received, φ_prev of the last own model

Messages are FedAvg's; the last own model never leaves. μ = 0 is FedAvg, bit for bit, and so is a client's first round,
in which it has no model of its own: φ_prev is φ_w and the two pulls cancel.

Decisions. φ is the input of the model's last linear layer. The paper adds a projection network before the contrast;
it is part of the model: build one in, and it is averaged with the rest. φ_w and φ_prev come from evaluation mode. A
vector of zeros (after ReLU) has no direction: its cosine is 0 and has no slope. One past model, as in the paper's
experiments. The second form of (3) does not overflow, however small τ is.

Under privacy the term is an example's own: both models are what private training led to.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, example_counts, own_or_server
from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Batch, Cohort, Deltas, Range, Task, option, separable, sgd, take_rows


def cosine_and_slope(phi: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """cos(φ, a) [n, B, 1] and its gradient in φ [n, B, d_f], a/(|φ||a|) − cos φ/|φ|²; both 0 where φ or a is 0."""
    length, other_length = phi.norm(dim=-1, keepdim=True), other.norm(dim=-1, keepdim=True)
    usable = (length > 0) & (other_length > 0)
    direction = phi / torch.where(usable, length, 1.0)
    other_direction = other / torch.where(usable, other_length, 1.0)
    cosine = torch.where(usable, (direction * other_direction).sum(-1, keepdim=True), 0.0)
    slope = (other_direction - cosine * direction) / torch.where(usable, length, 1.0)
    return cosine, torch.where(usable, slope, 0.0)


@dataclass(frozen=True)
class ModelContrast:
    task: Task
    near: Tensor  # [n, P] the model whose features attract
    far: Tensor  # [n, P] the one whose features repel
    mu: float | Tensor  # or [n]
    tau: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        near, to_near = cosine_and_slope(phi, self.task.features(take_rows(self.near, rows), batch.x))
        far, to_far = cosine_and_slope(phi, self.task.features(take_rows(self.far, rows), batch.x))
        s = torch.sigmoid((far - near) / self.tau)
        mu = self.mu[rows, None, None] if isinstance(self.mu, Tensor) else self.mu
        return None, mu * batch.weight[..., None] * (s / self.tau) * (to_far - to_near)  # μ ∂l_con/∂φ


@dataclass(frozen=True)
class MOON(FedAvg):
    mu: float = option(1.0, "μ: strength of the contrast; 0 is FedAvg", ge=0, tune=Range(0.1, 10.0))
    tau: float = option(0.5, "τ: temperature of the contrast", gt=0)

    traits = frozenset()  # the contrast is with the client's last model
    acts_at = "body"

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        feature_loss = None
        if self.mu and bool(client.seen.any()):  # else the two pulls cancel for all
            prev = own_or_server(client.seen, client.theta, down.w)
            feature_loss = separable(ModelContrast(task, down.w, prev, self.mu, self.tau))
        u = sgd(task, down.w, data.train.batches(self.training), feature_loss=feature_loss)
        return Client(u, torch.ones_like(client.seen)), DeltaUp(u - down.w, example_counts(self.weights, data))
