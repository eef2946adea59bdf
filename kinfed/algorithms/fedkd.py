"""FedKD: every client's own mentor and a common mentee teach each other, the more the better both know the batch.

Wu, Wu, Lyu, Huang, Xie: Communication-efficient Federated Learning via Knowledge Distillation, Nature Communications
13, 2022.

    mentor t (own), mentee s (common, averaged), on a batch with D = CE_t + CE_s:
    L_t = CE_t + KL(p_s ‖ p_t)/D + h L_h/D
    L_s = CE_s + KL(p_t ‖ p_s)/D + h L_h/D,      L_h = mean |φ_t − W φ_s|² / d_t

W [d_t, d_s] is the client's own, takes steps of L_h/D at the common rate, and makes features of other widths
comparable. The mentee goes down and its change comes back; mentors may be of any architecture and never leave. What
the paper saves is the size of the mentee beside that of the mentor: give the server a smaller model (the first that
`--models` names is the server's).

Decisions. D is a constant of a step (a widely used library lets gradients through it, and averages the divergence over
classes, too, which makes it C times as weak). Both take their step from what the other says before it, by models in
evaluation mode. φ is the input of the last layer; the paper also compares hidden layers and attention, which need not
match here. Its second half, singular vectors of updates in place of these, belongs to what happens to any update on
the way: `--compress`. Mentee and mentor have the common rate.

The personal model is the mentor. Not private: D compares the examples of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown
from kinfed.algorithms.common.heads import linear_start
from kinfed.algorithms.common.mutual import MutualLearning
from kinfed.author import Batch, Cohort, Deltas, FeatureLoss, Range, Task, Tree, cross_entropy, logit_delta, option
from kinfed.core import rng, take_rows


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the mentor, never leaves the client
    projection: Tensor  # [n, d_t, d_s] W


@dataclass(frozen=True)
class Lesson:
    """CE + KL(p_teacher ‖ p)/D + h L_h/D of mentors, or of mentees, whose step is the second on a batch and moves W."""

    task: Task  # of the teachers
    teacher: Tensor  # [n, P_t]
    W: Tensor  # [n, d_t, d_s]
    hidden: float
    rate: float | None  # of W; None for mentors

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        phi_teacher, says = self.task.features_and_logits(take_rows(self.teacher, rows), batch.x)
        D = cross_entropy(z, batch) + cross_entropy(says, batch)
        weight = batch.weight[..., None] / D.clamp_min(torch.finfo(D.dtype).eps)[:, None, None]
        dz = logit_delta(z, batch) + weight * (torch.softmax(z, -1) - torch.softmax(says, -1))
        if not self.hidden:
            return dz, None
        W = take_rows(self.W, rows)
        phi_t, phi_s = (phi, phi_teacher) if self.rate is None else (phi_teacher, phi)
        dphi_t = 2 * self.hidden / phi_t.shape[-1] * weight * (phi_t - phi_s @ W.mT)
        if self.rate is None:
            return dz, dphi_t
        dphi_s = -(dphi_t @ W)
        self.W[rows] = W + self.rate * torch.bmm(dphi_t.mT, phi_s)
        return dz, dphi_s


@dataclass(frozen=True)
class FedKD(MutualLearning[Client]):
    hidden: float = option(1.0, "h: strength of the loss at features; 0 leaves it out", ge=0, tune=Range(0.01, 10.0))

    leaks = "how well both models know its batches, as the weight of a loss,"

    def init_client(self, task: Task, data: Cohort) -> Client:
        theta = task.init(data.seed)
        wide, narrow = task.head.inputs, task.server_task.head.inputs
        drawn = linear_start(rng.root(data.seed, "fedkd"), narrow, wide)[: narrow * wide]
        W = drawn.view(narrow, wide).T.to(theta)
        return Client(theta.expand(len(data), -1), W.expand(len(data), -1, -1))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        W = client.projection.clone(memory_format=torch.contiguous_format)
        theta, w = self.train_both(task, client.theta, down.w, data, W)
        return Client(theta, W), self.update(w, down, data)

    def lessons(
        self, task: Task, theta: Tensor, w: Tensor, batch: Batch, rate: float, own: list[Tensor]
    ) -> tuple[FeatureLoss, FeatureLoss]:
        (W,) = own
        to_mentor = Lesson(task.server_task, w, W, self.hidden, None)
        return to_mentor, Lesson(task, theta, W, self.hidden, rate)
