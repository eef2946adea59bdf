"""FedAS: FedPer whose clients first align the received body with their own features, and whose server weighs bodies by
Fisher information.

Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024.

    client m:  μ_c = its mean φ of class c under its own body, as its last training left it
               received body ← `align_epochs` passes of SGD on Σ_c mean over its examples of class c of |φ − μ_c|²/d_f
               (body, head_m) ← the usual steps, both together
               F_m = trace of the empirical Fisher information after training, mean_b ‖∇f_b‖²
    server:    body ← Σ_m F_m body_m / Σ F        (equal weights where all F are 0)

Without alignment (`align_epochs` 0) and with `fisher` off it is FedPer with equal weights, bit for bit.

Decisions. Alignment is plain SGD at `align_lr`, on batches of its own, with dz = 0; in a batch, classes count equally
whatever their share (released code). A client's first round has no old body and no alignment. F is a mean over
examples, so that it does not grow with a client's data; `fisher = "batch"` is the released code's sum over batches of
the squared norm of the batch's gradient, which does. Under models with running statistics an example's gradient is
that of a batch of one (kinfed.engine.rows.layout). More F is more weight: converged clients lose weight.

The personal model is the client's own, as its training left it (released code); beside it, "current_body" has the
server's current body under the client's head, which is also the model before the first training. There is no server
model. Not private with either part: F, and class means in the loss, are computed from examples other than by gradients.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, PrivacyProfile, gradient_steps
from kinfed.algorithms.common.heads import class_means
from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.common.partial import Down, Server, SharesPart
from kinfed.author import Batch, Cohort, Deltas, LocalTraining, Range, Split, Task, Tree, option, own_or_server, sgd


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    fisher: Tensor | None  # [n] F; absent with equal weights


@dataclass(frozen=True)
class Alignment:
    """Σ_c mean over the batch's examples of class c of |φ − μ_c|²/d_f, and nothing else."""

    means: Tensor  # [n, C, d_f] μ

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        classes = self.means.shape[1]
        member = torch.nn.functional.one_hot(batch.y, classes) * (batch.weight > 0)[..., None]  # [n, B, C]
        size = member.sum(1).clamp_min(1)  # [n, C] examples of the class in the batch
        share = (member / size.unsqueeze(1)).sum(-1)  # [n, B]
        target = self.means[rows.to(batch.y.device)[:, None], batch.y]
        return torch.zeros_like(z), 2 / phi.shape[-1] * share[..., None] * (phi - target)


@dataclass(frozen=True)
class FedAS(SharesPart[Server, Client, Down, Up], AveragingAlgorithm[Server, Client, Down, Up]):
    align_epochs: int = option(1, "passes that align the received body with own features; 0: none", ge=0)
    align_lr: float = option(0.01, "rate of alignment", gt=0, tune=Range(1e-3, 0.3))
    fisher: Literal["example", "batch", "off"] = option(
        "example", "weights of the average: mean squared gradient of examples, the sum over batches, or equal weights"
    )

    traits = frozenset({"needs classes"})
    acts_at = "body"

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client.start(task, data)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        split = self.split(task)
        theta = split.join(split.take_own(client.theta), down.shared)
        old = client.seen.nonzero().squeeze(1)
        if self.align_epochs and len(old):
            theta[old] = self._align(task, client.theta[old], theta[old], data.train.take(old))
        theta = sgd(task, theta, data.train.batches(self.training))
        up = Up(split.take_shared(theta) - down.shared, self._fisher(task, theta, data.train))
        return Client(theta, torch.ones_like(client.seen)), up

    def _align(self, task: Task, own: Tensor, received: Tensor, split: Split) -> Tensor:
        """[n, P] models whose features of each class come near to those of `own` [n, P]."""
        means = class_means(task.class_sums(own, split)).to(own.dtype)
        training = LocalTraining(lr=self.align_lr, batch=self.training.batch, steps=None, epochs=self.align_epochs)
        body = ~task.head.mask.to(own.device)
        return sgd(task, received, split.batches(training, stream="align"), mask=body, feature_loss=Alignment(means))

    def _fisher(self, task: Task, theta: Tensor, split: Split) -> Tensor | None:
        """[n] F of the models on all training examples."""
        if self.fisher == "off":
            return None
        total = torch.zeros(len(theta), dtype=torch.float64, device=theta.device)
        if self.fisher == "example":
            for rows, batch in split.in_order():
                squares = torch.where(batch.weight > 0, task.example_norms(theta[rows], batch), 0.0)
                total[rows] += squares.to(torch.float64).square().sum(1)
            return (total / split.count.to(total)).to(theta.dtype)
        one_pass = LocalTraining(batch=self.training.batch, steps=None, epochs=1)
        for rows, batch in split.batches(one_pass, stream="fisher"):
            total[rows] += task.grad(theta[rows], batch).to(torch.float64).square().sum(1)
        return total.to(theta.dtype)

    def weight(self, up: Up) -> Tensor | None:
        return up.fisher if up.fisher is not None and bool((up.fisher > 0).any()) else None

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> dict[str, Tensor]:
        split = self.split(task)
        current = split.join(split.take_own(client.theta), down.shared)
        return {"personal": own_or_server(client.seen, client.theta, current), "current_body": current}

    @property
    def single_updates(self) -> str:
        weighs = "weighs updates by a number that every client computes for itself; set fisher to off"
        return "" if self.fisher == "off" else weighs

    def privacy(self, count: Tensor) -> PrivacyProfile:
        if self.fisher != "off":
            return PrivacyProfile(None, impossible="the Fisher information of its examples")
        if self.align_epochs:
            return PrivacyProfile(None, impossible="its class means of features, through the loss of alignment,")
        return gradient_steps(self.training.num_steps(count))
