"""FedPA: clients send where their posteriors lie and how sure they are of it, not only where they ended.

Al-Shedivat, Gillenwater, Xing, Rostamizadeh: Federated Learning via Posterior Averaging: A New Perspective and
Practical Algorithms, ICLR 2021, Algorithms 1 to 3.

    client m:  K local steps from w; after a share of them (burn-in) the iterates fall into l windows of equal length,
               and the mean of each is a posterior sample x_j (iterate-averaged SGD)
               Δ_m = Ŝ⁻¹ (w − x̄),   Ŝ = ρ_l I + (1 − ρ_l) Cov(x),   ρ_l = 1 / (1 + (l − 1) ρ)
    server:    w ← w − η_s Σ_m p_m Δ_m

For quadratic losses with exact samples Δ_m is the gradient where Ŝ is the covariance (ρ → ∞), and the only fixed point
is the minimum of the sum, whatever the number of local steps; FedAvg's is not. ρ = 0 is FedAvg of averaged iterates,
and with one sample of one iterate (l = 1, all but the last step as burn-in) FedAvg itself.

With D = [x_j − x̄], Ŝ = ρ_l (I + ρ D D'), so that Ŝ⁻¹ v = (v − ρ D (I + ρ D'D)⁻¹ D'v) / ρ_l: a system of l equations in
float64 and O(l² P) work. The authors reach the same by a recursion over samples. 1/ρ_l makes updates up to
1 + (l − 1) ρ times as long as FedAvg's where samples hardly differ; η_s is there to shorten them.

Decisions. The first `fedavg_rounds` rounds are FedAvg's, as the authors advise: posteriors at a random start say
little. A client with fewer steps than l after its burn-in has as many samples as steps. The server takes plain steps.
The personal model is the client's last iterate, as in FedAvg. Momentum is refused: its iterates are no samples.

Samples have trainable columns only; running statistics (of BatchNorm, say) are averaged as in FedAvg. A client holds l
models at a time, for as long as it trains.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp, Weights, example_counts, extrapolated
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, Collect, GradientStep, Population, Range, Task, Tree, option, run_program, sgd


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    sampling: Tensor  # [] bool: posteriors are sampled; otherwise the round is FedAvg's


Down = Server  # [n, P] and [n]


@dataclass(frozen=True)
class FedPA(DeploysLastModel[Server, Down, DeltaUp], AveragingAlgorithm[Server, Client, Down, DeltaUp]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    samples: int = option(5, "l: posterior samples of a client and round", ge=1)
    burn_in: float = option(0.5, "share of the local steps before the first sample", ge=0, lt=1)
    rho: float = option(
        0.1, "ρ: how much the covariance of samples counts; 0 is FedAvg of averaged iterates",
        ge=0, tune=Range(1e-3, 1.0),
    )  # fmt: skip
    server_lr: float = option(1.0, "η_s: rate of the server's step", gt=0, tune=Range(0.1, 1.5))
    fedavg_rounds: int = option(5, "rounds of FedAvg before the first samples", ge=0)

    traits = frozenset({"no momentum"})

    def init_server(self, task: Task, population: Population) -> Server:
        return Server(task.init(population.seed), torch.tensor(False))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        return replace(server, sampling=torch.tensor(round.number > self.fedavg_rounds)), active

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1), server.sampling.expand(len(ids)))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, DeltaUp]:
        if bool(down.sampling.any()):  # the same for all clients of a round
            theta, x, number = self._sample(task, down.w, data)
            delta = theta - down.w
            delta[:, task.trainable] = -posterior_delta(down.w[:, task.trainable], x, number, self.rho)
        else:
            theta = sgd(task, down.w, data.train.batches(self.training))
            delta = theta - down.w
        return Client(theta, torch.ones_like(client.seen)), DeltaUp(delta, example_counts(self.weights, data))

    def _sample(self, task: Task, w: Tensor, data: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """The last iterates [n, P], samples [n, l, T] with zeros behind a client's own number of them, and that
        number [n]."""
        batches = data.train.batches(self.training)
        after = batches.steps - torch.floor(self.burn_in * batches.steps).to(torch.int64)
        number = after.clamp_max(self.samples)
        length = after // number.clamp_min(1)  # of a window; what is left over belongs to the burn-in
        first = batches.steps - number * length
        theta = w.clone()
        x = w.new_zeros(len(w), self.samples, task.trainable.stop)
        program = (
            GradientStep("theta", batches.lr, decay=self.training.weight_decay),
            Collect("samples", "theta", "first", "length"),
        )
        models = {"theta": theta, "samples": x.view(len(w), -1)}
        run_program(task, [batches], program, models, {"first": first.double(), "length": length.double()})
        return theta, x, number

    def step(self, server: Server, mean: DeltaUp, round: RoundInfo) -> Server:
        rate = self.server_lr if bool(server.sampling) else 1.0
        w = extrapolated(server.w, mean.delta, rate, round.trainable)
        return Server(w, server.sampling)


def posterior_delta(w: Tensor, x: Tensor, number: Tensor, rho: float) -> Tensor:
    """[n, T]: Δ = Ŝ⁻¹ (w − x̄) of w [n, T] and the first `number` [n] of samples x [n, l, T]; 0 if there is none."""
    number = number.to(x.device)
    real = torch.arange(x.shape[1], device=x.device) < number[:, None]
    count = number.clamp_min(1).to(torch.float64)
    mean = (x.sum(1) / count[:, None].to(x)).to(x.dtype)
    distance = torch.where(number[:, None] > 0, w - mean, 0.0)
    if not rho or x.shape[1] == 1:
        return distance
    spread = torch.where(real[..., None], x - mean[:, None], 0.0)  # D'
    gram = torch.stack([d.to(torch.float64) @ d.to(torch.float64).T for d in spread])  # D'D
    inner = torch.einsum("nlt,nt->nl", spread, distance).to(torch.float64)
    system = torch.eye(x.shape[1], dtype=torch.float64, device=x.device) + rho * gram
    solution = torch.linalg.solve(system, inner)
    step = distance - rho * torch.einsum("nlt,nl->nt", spread, solution.to(x))
    return (1 + (count - 1) * rho)[:, None].to(x) * step
