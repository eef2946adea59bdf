"""FENDA: a body of one's own beside the common one, and a head of one's own that reads the features of both.

Kim, Kumar, Ma, Kim: Federated Neural Domain Adaptation, 2020; Tavakoli, Emerson, Ayromlou, Jewell, Krishnan, Zhang,
Verma, Dolatabadi: FENDA-FL, 2023.

    z = W_l φ_l(x) + W_g φ_g(x) + b       φ_l of the client's own body, φ_g of the common one
    client m:  min over both bodies, W_l, W_g and b   f_m
    server:    the common body by examples;   the own body and the head never leave

Both bodies are that of the model. The personal model is a joint row: two models whose logits are added, of which the
second has no bias (kinfed.engine.personal.joint_models). With W_l held at 0 it is FedPer.

Decisions. The common body starts where all methods start, the own one at another draw: equal bodies would learn the
same. The head starts as torch starts a layer of twice as many inputs. In a step, each body sees the logits of the other
in evaluation mode, which only models with dropout or running statistics notice. A batch costs two gradients.

Under privacy the loss is an example's own; each body's gradients are clipped by themselves. There is no server model.
"""

import math
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm
from kinfed.algorithms.base import Client as AnyClient
from kinfed.algorithms.common.averaging import DeltaUp, Weights, example_counts
from kinfed.algorithms.common.partial import Server, SharesPart
from kinfed.author import Cohort, FeatureLoss, Task, Tree, option
from kinfed.engine import JointTask, joint_rows, sgd


@dataclass
class Client(Tree):
    own: Tensor  # [n, P] the own body, W_l and b
    head: Tensor  # [n, H] W_g; no bias


Down = Server  # [n, G]


@dataclass(frozen=True)
class TwoBodies(
    SharesPart[Server, AnyClient, Down, DeltaUp], AveragingAlgorithm[Server, AnyClient, Down, DeltaUp],
    Generic[AnyClient],
):  # fmt: skip
    """What FENDA and PerFCL have in common."""

    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    acts_at = "body"
    gradients = 2

    def start(self, task: Task, data: Cohort) -> Client:
        """Both bodies and the head as they begin."""
        split = self.split(task)
        own, head = task.init(data.seed, 1), split.take_own(task.init(data.seed)) / math.sqrt(2)
        own = split.join(split.take_own(own[None]) / math.sqrt(2), split.take_shared(own[None]))
        return Client(own.expand(len(data), -1), head.expand(len(data), -1))

    def train(
        self, task: Task, client: Any, down: Down, data: Cohort,
        pulls: tuple[FeatureLoss | None, FeatureLoss | None] = (None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The own body with its part of the head [n, P], the other part [n, H] and the common body [n, G] after local
        training. `pulls` are losses at the features of the own body, and of the common one."""
        joint = JointTask(task, pulls)
        rows = self.personalize(task, client, down, data)
        theta = sgd(joint, rows, data.train.batches(self.training), mask=joint.trained_columns())
        own, common = joint.split(theta)
        split = self.split(task)
        return own, split.take_own(common), split.take_shared(common)

    def update(self, shared: Tensor, down: Down, data: Cohort) -> DeltaUp:
        return DeltaUp(shared - down.shared, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Any, down: Down, data: Cohort) -> Tensor:
        return joint_rows(task, client.own, self.split(task).join(client.head, down.shared))


@dataclass(frozen=True)
class FENDA(TwoBodies[Client]):
    def init_client(self, task: Task, data: Cohort) -> Client:
        return self.start(task, data)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, DeltaUp]:
        own, head, shared = self.train(task, client, down, data)
        return Client(own, head), self.update(shared, down, data)
