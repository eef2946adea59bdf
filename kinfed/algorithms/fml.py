"""FML, federated mutual learning: every client's own model and a common one teach each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning, 2020, Algorithm 1.

    own model:     L_local = α CE(z_local, y) + (1 − α) KL(p_meme ‖ p_local)
    common model:  L_meme = β CE(z_meme, y) + (1 − β) KL(p_local ‖ p_meme),   p = softmax(z)

The meme goes down and its change comes back; own models may be of any architecture and never leave. α = 1 is local
training of these, β = 1 makes the meme FedAvg's model (to rounding).

Decisions. Both take their step on a batch from what the other says before it, by models in evaluation mode; steps are
plain, without momentum. α and β of a half are ours. A widely used library averages the divergence over classes, too,
which makes it C times as weak.

Under privacy both terms are an example's own, and a batch costs two gradients. The personal model is the own one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown
from kinfed.algorithms.common.mutual import MutualLearning
from kinfed.algorithms.common.one_model import OwnModel
from kinfed.author import Batch, Cohort, Deltas, FeatureLoss, Range, Task, logit_delta, option, separable, take_rows


@dataclass(frozen=True)
class Imitation:
    """share · CE + (1 − share) KL(p_teacher ‖ p), whose slopes in z are p − y and p − p_teacher."""

    task: Task  # of the teachers
    teacher: Tensor  # [n, P_t]
    share: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        if self.share == 1:
            return None, None
        says = torch.softmax(self.task.logits(take_rows(self.teacher, rows), batch.x), -1)
        gap = batch.weight[..., None] * (torch.softmax(z, -1) - says)
        return self.share * logit_delta(z, batch) + (1 - self.share) * gap, None


@dataclass(frozen=True)
class FML(MutualLearning[OwnModel]):
    alpha: float = option(
        0.5, "α: share of the examples in the own model's loss; 1 is local training", ge=0, le=1,
        tune=Range(0.1, 0.9, log=False),
    )  # fmt: skip
    beta: float = option(
        0.5, "β: the same for the common model; 1 is FedAvg", ge=0, le=1, tune=Range(0.1, 0.9, log=False)
    )

    def init_client(self, task: Task, data: Cohort) -> OwnModel:
        return OwnModel(task.init(data.seed).expand(len(data), -1))

    def client_update(self, task: Task, client: OwnModel, down: ModelDown, data: Cohort) -> tuple[OwnModel, DeltaUp]:
        theta, w = self.train_both(task, client.theta, down.w, data)
        return OwnModel(theta), self.update(w, down, data)

    def lessons(
        self, task: Task, theta: Tensor, w: Tensor, batch: Batch, rate: float, own: list[Tensor]
    ) -> tuple[FeatureLoss, FeatureLoss]:
        to_own, to_meme = Imitation(task.server_task, w, self.alpha), Imitation(task, theta, self.beta)
        return separable(to_own), separable(to_meme)
