"""FedNTD: FedAvg whose clients keep what the received model thinks of the classes an example does not have.

Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
NeurIPS 2022.

    client m:  min_θ  f_m(θ) + β τ² KL( softmax_{c≠y}(z_w/τ) ‖ softmax_{c≠y}(z/τ) ),   z_w = z of the received model w

Messages are FedAvg's. β = 0 is FedAvg, bit for bit, and so are two classes: one not-true class leaves nothing to
distil. At the first step of a round z = z_w and the term is 0.

Decisions: z_w comes from w in evaluation mode on the batch itself, augmented where that is. τ = 1 as in the paper's
main experiments (the class in the released code has 3; a widely used library has β = 0, which is FedAvg).

Under privacy the term is an example's own: w is the server's, and the gradient is clipped with the term in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Batch, Cohort, Deltas, Range, Task, logit_delta, option, separable, sgd, take_rows


def not_true_softmax(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """[n, B, C] softmax(z/τ) over the classes c ≠ y, and 0 at y."""
    return torch.softmax((z / tau).scatter(-1, y[..., None], -torch.inf), -1)


@dataclass(frozen=True)
class NotTrueDistillation:
    task: Task
    w: Tensor  # [n, P] the received model
    beta: float
    tau: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        q = not_true_softmax(self.task.logits(take_rows(self.w, rows), batch.x), batch.y, self.tau)
        p = not_true_softmax(z, batch.y, self.tau)
        distillation = self.beta * self.tau * batch.weight[..., None] * (p - q)  # ∂/∂z β τ² KL(q ‖ p)
        return logit_delta(z, batch) + distillation, None


@dataclass(frozen=True)
class FedNTD(FedAvg):
    beta: float = option(1.0, "β: strength of the distillation; 0 is FedAvg", ge=0, tune=Range(0.1, 10.0))
    tau: float = option(1.0, "τ: temperature of both softmaxes", gt=0)

    traits = frozenset({"needs classes", "state to deploy"})
    acts_at = "head"

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        if not self.beta:
            return super().train(task, w, data)
        feature_loss = separable(NotTrueDistillation(task, w, self.beta, self.tau))
        return sgd(task, w, data.train.batches(self.training), feature_loss=feature_loss)
