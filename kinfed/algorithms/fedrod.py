"""Fed-RoD: a generic model trained as if classes were balanced, and a personal head on top of it.

Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, Algorithm 1,
with a linear personal head.

    generic, averaged:  min  CE(z + γ log N_mc, y)              over body and W (balanced softmax)
    personal, own:      min  CE(z + φ V_m' + v_m, y)            over V_m, v_m only, z and φ as constants

Both losses come from one forward pass: a step moves body and W by the first, V_m and v_m by the second. γ = 0 and a
personal rate of 0 are FedAvg, bit for bit. Generic and personal logits are linear in the same φ, so the personal model
is the current generic one with the head W + V_m, b + v_m: a row like any other. The generic model predicts without the
shift.

Decisions. V starts at 0, so that the personal model begins as the generic one (the paper starts it like W). A class
that a client lacks is left out of its balanced softmax; counts are of all its training examples and stay with it.
(Counted from batches, a class may be missed, and its examples then have an infinite loss.) Nothing of the personal loss
reaches the body, and the personal logits contain the generic ones; public codes err in both. V takes plain steps with
the local weight decay, at `personal_lr`, whatever the optimizer of the generic part. The hypernetwork variant is left
out.

Not private: class counts are in every example's gradient, as in FedLC.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts, personal_rate
from kinfed.algorithms.common.heads import class_counts, required_head
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Batch, Cohort, Deltas, Population, PrivacyProfile, Range, Task, Tree, logit_delta, option, sgd


@dataclass
class Client(Tree):
    v: Tensor  # [n, C, d_f] V, the personal head, never leaves the client
    v_bias: Tensor | None  # [n, C]; None if the model's head has no bias


@dataclass
class TwoHeads:
    """The generic loss of a step, and the personal heads' own steps beside it."""

    client: Client  # stepped in place
    shift: Tensor | None  # [n, C] γ log N_mc; None keeps the cross-entropy
    rate: float  # of the personal heads
    decay: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        if self.rate:
            self._step_personal(phi, z, batch, rows)
        return None if self.shift is None else logit_delta(z + self.shift[rows].unsqueeze(1), batch), None

    def _step_personal(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> None:
        """V ← V − η (∂CE(z + φ V' + v)/∂V + decay · V), and v alike; both at the φ and z of this step."""
        v, v_bias = self.client.v, self.client.v_bias
        own = z + torch.bmm(phi, v[rows].mT)
        delta = logit_delta(own if v_bias is None else own + v_bias[rows].unsqueeze(1), batch)
        keep = 1 - self.rate * self.decay
        v[rows] = keep * v[rows] - self.rate * torch.bmm(delta.mT, phi)
        if v_bias is not None:
            v_bias[rows] = keep * v_bias[rows] - self.rate * delta.sum(1)


@dataclass(frozen=True)
class FedRoD(AveragesOneModel[Client]):
    gamma: float = option(1.0, "γ: strength of balancing in the generic loss; 0 is cross-entropy", ge=0)
    personal_lr: float | None = option(
        None, "rate of the personal head; the common lr by default", ge=0, tune=Range(1e-3, 1.0)
    )
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes"})

    def __post_init__(self) -> None:
        super().__post_init__()
        # Or a rate below lr_floor would be refused in the first round only.
        personal_rate(self.training, self.personal_lr, 1)

    def check(self, task: Task, population: Population) -> None:
        required_head("Fed-RoD", task)

    def init_client(self, task: Task, data: Cohort) -> Client:
        head = task.head
        v = torch.zeros(len(data), head.outputs, head.inputs, device=task.device)
        return Client(v, None if head.dense.bias is None else torch.zeros_like(v[..., 0]))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        training, new = self.training, client.clone()
        shift = None
        if self.gamma:
            shift = self.gamma * class_counts(data.train, task.head.outputs).to(down.w.dtype).log()
        rate = personal_rate(training, self.personal_lr, data.round)
        two_heads = TwoHeads(new, shift, rate, training.weight_decay)
        u = sgd(task, down.w, data.train.batches(training), feature_loss=two_heads)
        return new, DeltaUp(u - down.w, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        weight, bias = task.head.split(down.w)
        own = None if bias is None or client.v_bias is None else bias + client.v_bias
        return task.head.join(down.w, weight + client.v, own)  # W + V_m, b + v_m

    def privacy(self, count: Tensor) -> PrivacyProfile | None:
        if not self.gamma:
            return None
        return PrivacyProfile(None, impossible="its numbers of examples by class, as the shift of a loss,")
