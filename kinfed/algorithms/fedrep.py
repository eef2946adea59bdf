"""FedRep: a shared representation; each client first fits its head to it, then improves it.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, Algorithm 1 (FedRep).

    client m:  `head_steps` steps on head_m with the representation fixed, then the usual steps on the
               representation with head_m fixed;  the server averages representations equally

Head and representation use batches of their own streams: fitting the head to the very batches on which the
representation is judged next would let it memorize them. An empty head is FedAvg with equal weights. Running
statistics (of BatchNorm, say) of the part that is fixed stay as they are, although its forward passes are training's.
"""

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.fedper import FedPer
from kinfed.author import Cohort, ColumnSplit, LocalTraining, PrivacyProfile, Task, Weights, gradient_steps, option, sgd


@dataclass(frozen=True)
class FedRep(FedPer):
    head_layers: int = option(1, "how many of the last layers form the head", ge=0)
    weights: Weights = option("equal", "weights of the average: equal (paper), or by N_m")
    head_steps: int | None = option(None, "steps on the head per round; the usual number by default", ge=1)

    @property
    def _head_training(self) -> LocalTraining:
        return self.training if self.head_steps is None else self.training.with_steps(self.head_steps)

    def train(self, task: Task, theta: Tensor, split: ColumnSplit, data: Cohort) -> Tensor:
        own = split.own_mask.to(theta.device)
        if split.own:
            theta = sgd(task, theta, data.train.batches(self._head_training, stream="head"), mask=own)
        return sgd(task, theta, data.train.batches(self.training, loop=1 if split.own else 0), mask=~own)

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps = self.training.num_steps(count) + self._head_training.num_steps(count)
        return gradient_steps(steps, weights=self.weights)
