"""FedLC: FedAvg whose clients calibrate logits by their own class counts, so that rare classes keep a margin.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.

    client m:  min_θ  CE(z − τ N_mc^(−1/4), y),   N_mc its examples of class c

Messages are FedAvg's, and τ = 0 is FedAvg, bit for bit. Models predict without the shift.

Decisions. The loss as printed leaves the true class out of the denominator, −(s_y − log Σ_{c≠y} exp s_c), and has no
lower bound; here the sum is over all classes, the cross-entropy of s. A class that a client lacks is shifted to −∞:
it drops out of the client's softmax, and its weights of the last layer stay; `floor` counts it as that many
instead. The counts are of all training examples of the client and stay there. (One public code sums them over clients
at the server, which gives everybody the same shift; another counts what a loader passes that drops incomplete batches.)

Not private: a count in the shift lets every example of a client into the gradient of every other, so clipping
examples one by one bounds nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.common.heads import class_counts
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Batch, Cohort, Deltas, PrivacyProfile, Range, Task, logit_delta, option, sgd


@dataclass(frozen=True)
class ShiftedLogits:
    """Cross-entropy at z + shift; −∞ leaves a class out. A client must not lack the classes of its examples."""

    shift: Tensor  # [n, C]

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return logit_delta(z + self.shift[rows].unsqueeze(1), batch), None


@dataclass(frozen=True)
class FedLC(FedAvg):
    tau: float = option(1.0, "τ: size of the margins; 0 is FedAvg", ge=0, tune=Range(0.1, 1.0))
    floor: float = option(0.0, "what a class counts as that a client lacks; 0 leaves it out of the softmax", ge=0)

    traits = frozenset({"needs classes", "state to deploy"})
    acts_at = "head"

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        if not self.tau:
            return super().train(task, w, data)
        count = class_counts(data.train, task.head.outputs).to(w.dtype).clamp_min(self.floor)
        feature_loss = ShiftedLogits(-self.tau * count.pow(-0.25))  # s = z − τ N^(−1/4)
        return sgd(task, w, data.train.batches(self.training), feature_loss=feature_loss)

    def privacy(self, count: Tensor) -> PrivacyProfile | None:
        if not self.tau:
            return super().privacy(count)
        return PrivacyProfile(None, impossible="its numbers of examples by class, as the shift of a loss,")
