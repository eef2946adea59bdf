"""FedPHP: FedAvg in which each client keeps a moving average of its models, and lets it guide the next training.

Li, Zhan, Shao, Li, Song: FedPHP: Federated Personalization with Inherited Private Models, ECML PKDD 2021.

    client m:  θ from w by local training of  (1 − λ) f_m(θ) + λ MMD²(φ_θ, φ_v),   features of the same batch
               v_m ← (1 − μ_t) θ + μ_t v_m,   μ_t = μ min(t/T, 1)
    MMD²(φ, ψ) = Σ_ab p_a p_b (k(φ_a, φ_b) + k(ψ_a, ψ_b) − 2 k(φ_a, ψ_b)),   p the weights of the batch's examples
    k(a, b) = mean over s of exp(−‖a − b‖² / (s σ²)),   s = ¼, ½, 1, 2, 4

v_m, the inherited private model, never leaves the client and is what it deploys. Messages are FedAvg's. λ = 0 trains as
FedAvg, bit for bit, and so does a client's first round, in which it has inherited nothing; μ = 0 keeps the last model.

Decisions. σ² is the mean squared distance between φ and ψ in the batch, a constant in the gradient, so that λ means the
same for features of any size; public code has fixed widths. After its first training a client's v is that model; public
code mixes it with the random start. The paper's T is the number of rounds and t the round; here T is an option, and t
counts rounds of the run, with those of a warm start. Of the paper's ways to pass knowledge on this is the one with MMD.
φ_v comes from evaluation mode.

Under privacy the term is refused: it compares examples with one another. λ = 0 is admitted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, example_counts
from kinfed.algorithms.common.heads import required_body
from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Batch, Cohort, Deltas, Population, Range, Task, logit_delta, option, sgd, take_rows

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # s


def mmd_slope(phi: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """[n, B, d_f]: the gradient of MMD²(φ, ψ) in φ, for features [n, B, d_f] and weights p [n, B]."""
    across = torch.cdist(phi, other, compute_mode="donot_use_mm_for_euclid_dist").square()
    within = torch.cdist(phi, phi, compute_mode="donot_use_mm_for_euclid_dist").square()
    width = (weight[:, :, None] * weight[:, None] * across).sum((1, 2), keepdim=True)  # σ²
    width = width.clamp_min(torch.finfo(phi.dtype).tiny ** 0.5)
    slopes = []
    for square, points in ((within, phi), (across, other)):
        # ∂k(a, b)/∂a = −(2/(s σ²)) exp(−‖a − b‖²/(s σ²)) (a − b), summed over b with weights
        pull = sum(torch.exp(-square / (s * width)) / s for s in SCALES) / (len(SCALES) * width)
        pull = pull * weight[:, None]
        slopes.append(-2 * (pull.sum(2, keepdim=True) * phi - pull @ points))
    return 2 * weight[..., None] * (slopes[0] - slopes[1])


@dataclass(frozen=True)
class Inheritance:
    """(1 − λ) cross-entropy + λ MMD² to the features of the inherited model, of clients that have one."""

    task: Task
    v: Tensor  # [n, P]
    lam: Tensor  # [n] λ; 0 for clients that have inherited nothing

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        lam = self.lam[rows].to(phi)[:, None, None]
        inherited = self.task.features(take_rows(self.v, rows), batch.x)
        return (1 - lam) * logit_delta(z, batch), lam * mmd_slope(phi, inherited, batch.weight)


@dataclass(frozen=True)
class FedPHP(FedAvg):
    """A client's `theta` is v_m."""

    lam: float = option(
        0.1, "λ: share of the features' distance to the inherited model's", ge=0, lt=1, tune=Range(0.01, 0.5)
    )
    mu: float = option(0.9, "μ: most that a client keeps of its inherited model", ge=0, le=1)
    growth: int = option(40, "T: rounds over which that share grows from 0 to μ", ge=1)

    traits = frozenset({"needs classes"})

    def check(self, task: Task, population: Population) -> None:
        if self.lam:
            required_body("FedPHP", task)

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        feature_loss = None
        if self.lam and bool(client.seen.any()):
            feature_loss = Inheritance(task, client.theta, self.lam * client.seen.to(client.theta.dtype))
        theta = sgd(task, down.w, data.train.batches(self.training), feature_loss=feature_loss)
        keep = self.mu * min(data.round / self.growth, 1.0) * client.seen.to(theta)  # μ_t
        v = torch.lerp(theta, client.theta, keep[:, None])
        up = DeltaUp(theta - down.w, example_counts(self.weights, data))
        return Client(v, torch.ones_like(client.seen)), up

    def privacy(self, count: Tensor) -> PrivacyProfile | None:
        if not self.lam:
            return super().privacy(count)
        return PrivacyProfile(None, impossible="what a loss makes of its examples that compares them with one another")
