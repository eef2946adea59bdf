"""FedEM: every client's data are a mixture of K unknown distributions; K shared models, own proportions.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021,
Algorithm 1 (FedEM).

    min_{θ, π}  − Σ_m Σ_j log Σ_k π_mk exp(−f(θ_k; x_j, y_j)),     f the loss of an example

    E:  q_jk ∝ π_mk exp(−f(θ_k; x_j, y_j))                   with the components and proportions of the round's start
    M:  π_mk ← mean_j q_jk;   θ_k ← SGD on Σ_j q_jk f(θ_k; x_j, y_j);   the server averages every θ_k by examples

The personal model is the mixture Σ_k π_mk softmax(θ_k(x)), a row of K (P + 1) numbers (engine.mixture). K = 1 is FedAvg
with weights by examples. π never leaves the client.

K identical starts would never separate: components start from K different random models, of which the first is the
common start of all methods (a warm start moves that one alone).

Decisions: q of a batch is computed from the round's first components when the batch comes, not stored for every
example. A component that has lost all examples keeps π = 1e-8, so that it can come back. A client that has not been
called yet takes one E and one M step for its proportions on its training data, as the paper does for clients unseen in
training; the others keep the proportions of their last round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import Weights, example_counts
from kinfed.author import AveragingAlgorithm, Batch, Cohort, DeltaUp, Population, Range, Split, Tree, option, take_rows
from kinfed.engine import MixtureTask, Task, mixture_rows, sgd

LEAST = 1e-8  # weight of a component that no example speaks for: it can still come back


@dataclass
class Server(Tree):
    theta: Tensor  # [K, P] components


@dataclass
class Client(Tree):
    pi: Tensor  # [n, K] float64 proportions, π_m; a row sums to one
    seen: Tensor  # [n] bool


Down = Server  # [n, K, P]


Up = DeltaUp  # [n, K, P] and [n]


@dataclass(frozen=True)
class FedEM(AveragingAlgorithm[Server, Client, Down, Up]):
    components: int = option(
        3, "K, the number of shared models; 1 is FedAvg", ge=1, tune=Range(1, 4, log=False, whole=True)
    )
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes"})
    # Through π every example has a say in the weight of every other.
    leaks = "updates weighted by proportions computed from all of its examples"

    def init_server(self, task: Task, population: Population) -> Server:
        return Server(torch.stack([task.init(population.seed, k) for k in range(self.components)]))

    def init_client(self, task: Task, data: Cohort) -> Client:
        pi = torch.full((len(data), self.components), 1 / self.components, dtype=torch.float64, device=task.device)
        return Client(pi, torch.zeros(len(data), dtype=torch.bool, device=task.device))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        pi = proportions(task, down.theta, client.pi, data.train)
        start = mixture_rows(down.theta, client.pi)
        maximization = ExpectedLoss(task, self.components, start, data.ids)
        trained = sgd(maximization, start, data.train.batches(self.training), mask=maximization.mask(self.training))
        theta = trained[:, : down.theta[0].numel()].reshape(down.theta.shape)
        seen = torch.ones_like(client.seen)
        return Client(pi, seen), Up(theta - down.theta, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        pi, new = client.pi, (~client.seen).nonzero().squeeze(1)
        if len(new):
            pi = pi.clone()
            pi[new] = proportions(task, down.theta[new], pi[new], data.train.take(new.cpu()))
        return mixture_rows(down.theta, pi)

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {f"pi_{k}": client.pi[:, k] for k in range(self.components)}


def proportions(task: Task, theta: Tensor, pi: Tensor, split: Split) -> Tensor:
    """[n, K] float64: one E and M step, mean_j q_jk over all examples of the split."""
    total, mixture = torch.zeros_like(pi), MixtureTask(task, pi.shape[1])
    for rows, batch in split.in_order():
        q = mixture.responsibilities(theta[rows].unbind(1), pi[rows], batch)
        total[rows] += (q * batch.weight[..., None]).sum(1, dtype=torch.float64)
    mean = (total / split.count.to(total.device)[:, None]).clamp_min(LEAST)
    return mean / mean.sum(1, keepdim=True)


class ExpectedLoss(MixtureTask):
    """Σ_k q_k f(θ_k), with q from the components and proportions that the round began with: what the M step lowers."""

    def __init__(self, task: Task, components: int, start: Tensor, ids: Tensor) -> None:
        super().__init__(task, components)
        self.start = start  # [n, K (P + 1)]
        self.sorted, self.place = ids.sort()

    def weighted(self, theta: Tensor, batch: Batch) -> list[Batch]:
        rows = self.place[torch.searchsorted(self.sorted, batch.ids)]
        return super().weighted(take_rows(self.start, rows), batch)
