"""FedALA: FedAvg whose clients start from an element-wise mix of their own model and the received one.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023, Algorithm 1.

    client m:  x = θ_m + (w − θ_m) ⊙ Ω_m  in the upper layers, w in the lower ones                               (4)
               Ω_m ← clip(Ω_m − η_w ∇f_m(x) ⊙ (w − θ_m), 0, 1)  batch by batch; θ_m and w stay                    (5)
               θ_m ← local training of all layers from x;  θ_m − w is averaged as in FedAvg

Ω begins at 1, where x is w. A client's first round is FedAvg's, since it has no model of its own yet; in its second one
Ω is learnt until it has settled, in later ones in one pass. η_w = 0 never moves Ω and is FedAvg, bit for bit. Ω stays
with the client.

Decisions. Upper layers are the last `upper_layers` (the authors' code counts tensors, of which a layer has two). Every
pass reads a random share s of the training examples, drawn anew; the authors' code takes one block of them, and repeats
it. Ω has settled when the mean losses of the last ten passes have a standard deviation below `tol`, the authors' rule
with the mean over a pass instead of its last batch; small values may never be reached, hence `max_passes`. tol = 0
takes `max_passes` and looks at no loss. Ω follows the plain loss, without weight decay.

The deployed model is the client's after its last training; beside it "mixed" is x at the present w and Ω, where the
next training would begin. Running statistics (of BatchNorm, say) start from those of w.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, gradient_steps
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts, own_or_server
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import ColumnSplit, Range, Task, Tree, each_step, last_layers, option, parse_patterns, sgd
from kinfed.data import Cohort, Population, Split

LAST_LOSSES = 10  # passes whose losses say whether Ω has settled


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the model after the last local training
    omega: Tensor  # [n, Q] Ω, shares of the received model in the parameters of the upper layers
    seen: Tensor  # [n] bool: has trained
    settled: Tensor  # [n] bool: has learnt Ω before


@dataclass(frozen=True)
class FedALA(AveragesOneModel[Client]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    upper_layers: int = option(1, "how many of the last layers are mixed element by element", ge=1)
    upper: str = option("", "layers that are mixed, by name or pattern, separated by commas, instead of upper_layers")
    weight_lr: float = option(1.0, "η_w: step of the shares Ω; 0 is FedAvg", ge=0, tune=Range(0.1, 10.0))
    share: float = option(0.8, "s: share of the training examples in a pass that learns Ω", gt=0, le=1)
    tol: float = option(0.01, "Ω has settled when losses of ten passes vary less than this; 0: never", ge=0)
    max_passes: int = option(50, "most passes until Ω has settled", ge=1)

    def split(self, task: Task) -> ColumnSplit:
        """The trainable columns of the upper layers are "own"."""
        upper = task.layer_mask(parse_patterns(self.upper) or last_layers(task.slots, self.upper_layers))
        upper[task.trainable.stop :] = False
        return ColumnSplit.from_mask(upper)

    def check(self, task: Task, population: Population) -> None:
        self.split(task)  # names that the model does not have

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        no_client = torch.zeros(len(data), dtype=torch.bool)
        return Client(start, torch.ones_like(self.split(task).take_own(start)), no_client, no_client.clone())

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        omega = client.omega
        if self.weight_lr and bool(client.seen.any()):
            omega = self._learn(task, client, down.w, data.train)
        begin = self._mix(task, client.theta, down.w, omega)
        theta = sgd(task, begin, data.train.batches(self.training))
        up = DeltaUp(theta - down.w, example_counts(self.weights, data))
        return Client(theta, omega, torch.ones_like(client.seen), client.seen), up

    def _mix(self, task: Task, theta: Tensor, w: Tensor, omega: Tensor) -> Tensor:
        """x [n, P] (4); exactly w where Ω is 1, and exactly θ where it is 0."""
        split = self.split(task)
        return split.join(torch.lerp(split.take_own(theta), split.take_own(w), omega), split.take_shared(w))

    def _learn(self, task: Task, client: Client, w: Tensor, train: Split) -> Tensor:
        """Ω [n, Q] of the clients that have a model of their own: one pass, or the first time until it has settled."""
        omega = client.omega.clone()
        losses = torch.zeros(len(omega), 0, dtype=torch.float64)
        learning, unsettled = client.seen.cpu(), ~client.settled.cpu()
        for number in range(self.max_passes):
            rows = learning.nonzero().squeeze(1)
            if not len(rows):
                break
            omega[rows], loss = self._pass(task, client.theta[rows], w[rows], omega[rows], train.take(rows), number)
            fresh = torch.full((len(omega), 1), torch.nan, dtype=torch.float64)
            fresh[rows, 0] = loss
            losses = torch.cat([losses, fresh], 1)[:, -LAST_LOSSES:]
            learning = learning & unsettled
            if losses.shape[1] == LAST_LOSSES:
                learning = learning & ~(losses.std(1, correction=0) < self.tol)
        return omega

    def _pass(
        self, task: Task, theta: Tensor, w: Tensor, omega: Tensor, train: Split, number: int
    ) -> tuple[Tensor, Tensor]:
        """Ω after one pass over a share of the examples, and the mean loss [n] of its batches; 0 if none is asked
        for."""
        split = self.split(task)
        slope = split.take_own(w - theta)
        omega, total = omega.clone(), torch.zeros(len(omega), dtype=torch.float64)
        batches = train.batches(self.training, self._pass_steps(train.count), stream=f"fedala-{number}")
        for batch, (o, own, received, direction, loss) in each_step(batches, omega, theta, w, slope, total):
            x = self._mix(task, own, received, o)
            if self.tol:
                loss += (batch.weight * task.losses(x, batch)).sum(1).to("cpu", torch.float64)
            g = split.take_own(task.grad(x, batch))
            o.sub_(self.weight_lr * g * direction).clamp_(0, 1)  # (5)
        return omega, total / batches.steps.clamp_min(1)

    def _pass_steps(self, count: Tensor) -> Tensor:
        """[n] batches of one pass."""
        return torch.ceil(self.share * count.to(torch.float64) / self.training.batch).to(torch.int64).clamp_min(1)

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> dict[str, Tensor]:
        own = own_or_server(client.seen, client.theta, down.w)
        return {"personal": own, "mixed": self._mix(task, own, down.w, client.omega)}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"omega": client.omega.mean(1)}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps = self.training.num_steps(count)
        if not self.weight_lr:
            return gradient_steps(steps, weights=self.weights)
        passes = self.max_passes * self._pass_steps(count)
        when = {"after how many passes the losses of its mixed model have settled": "tol = 0"} if self.tol else {}
        return gradient_steps(steps + passes, weights=self.weights, uncovered=when)
