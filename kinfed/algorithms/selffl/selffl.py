"""Self-FL: every client decides by its own uncertainty where to start, how long to train, and how much it counts.

Chen, Ding, Tramel, Wu, Sahu, Avestimehr, Zhang: Self-Aware Personalized Federated Learning, 2022,
https://arxiv.org/abs/2204.08069 (NeurIPS 2022), Algorithm 1. Formulas and options: `algorithms.selffl.uncertainty`.

    θ_m ~ N(θ_0, s_0),  θ_m^L ~ N(θ_m, s_m):   θ_m^FL = (1 − ρ_m) θ_m^L + ρ_m (mean of the others)

A client starts at the mean of the others (18) and stops after the l_m steps that leave the share ρ_m of the way
to its own optimum (19); the server weighs clients by w_m = 1/(s_0 + s_m) (20) and smooths with the participation
rate. s_m is the variance of the client's models over its own rounds (16), s_0 that of the clients of a round (17).

With use_init, use_steps, use_agg and smoothing all off this is FedAvg, bit for bit; with smoothing alone it is
`fedavg_smooth`, the control without which no result of Self-FL says anything: with smoothing, only the number of steps
adds to it on images; without, start and steps both add to FedAvg (docs/selffl.md). s_0 → ∞ is local training with equal
weights, s_0 = 0 one model for all.

Deviations, each because the text leaves no other way or contradicts itself:
  * Clients cannot form Σ_{k≠m} from the θ and s_0 they are sent, so the server sends S_{-m}, one more scalar. It
    subtracts m's own term itself: it knows which value it last received, also after a lost reply.
  * At the start of its update a client has only its models of earlier rounds; (18) and (19) use their variance, and
    the one that includes the new model is uploaded (as Algorithm 2 says in (23)).
  * Two models make a variance. Until then, and until two clients have replied, a client does as in FedAvg; in (20)
    it counts like the mean of those known. A client that has never trained starts at θ: θ does not contain it.
  * (22) lacks a square; the variance is that of (21). Normalisations: `var_m`, `var0`, `domain` (docs/selffl.md).
  * w_m/S in (18) is capped at `r_max`: with few active clients the printed rule extrapolates and diverges.
  * η/(B s_m) ≥ 1 leaves (19) without a solution; its continuous extension is the least number of steps, 1.
  * The gradient of a batch is its mean, as everywhere here. Algorithm 1 writes a sum with the same learning rate:
    `reduction = sum`. (19) does not know of it.
  * All variances are those of trainable parameters. Running statistics (of BatchNorm, say) are averaged with the same
    weights (20), but (18) extrapolates, which a variance does not survive: there they are those of θ.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import EXAMPLE_COUNT, Algorithm, PrivacyProfile, RoundInfo, ServerModels, gradient_steps
from kinfed.algorithms.selffl.uncertainty import UNKNOWN, LocalPlan, Rules, Running, start_of
from kinfed.author import AveragingAlgorithm, Cohort, ConfigError, Task, Tree, option, own_or_server, sgd, weighted_mean
from kinfed.data import LocalTraining, Population
from kinfed.theory import GaussianTask


@dataclass
class Server(Tree):
    theta: Tensor  # [P]
    s0: Tensor  # [] float64  σ_0²; 0 until two clients have replied
    s: Tensor  # [K] float64  σ_m² as last uploaded; −1 unknown
    others: Tensor  # [K] float64  S_{-m} of the planned round


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]  θ_m
    mean: Tensor  # [n, T]  of the trainable parameters of its models so far
    m2: Tensor  # [n] float64  Σ ‖θ_m − mean‖² over them
    rounds: Tensor  # [n] int64  how many: the client's own clock
    last: Tensor  # [n, 3] float64  ρ, l_m before rounding and cap, steps taken in its last round: for the report
    optimum: Tensor | None = None  # [n, P]  θ_{m,t} of Algorithm 2, which takes the place of θ_m in `mean` and `m2`


@dataclass
class Down(Tree):
    theta: Tensor  # [n, P]
    s0: Tensor  # [n]
    others: Tensor  # [n]  S_{-m}


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]  θ_m − θ
    s: Tensor  # [n]  σ_m²; −1 unknown
    count: Tensor | None  # [n] examples; only without (20)
    optimum: Tensor | None = None  # [n, P]  θ_{m,t} − θ of Algorithm 2


@dataclass(frozen=True)
class SelfFLClients(Rules, Algorithm[Any, Client, Down, Up]):
    """The clients' side, which is the same whatever the server keeps."""

    reduction: Literal["mean", "sum"] = option(
        "mean",
        "a step follows the mean of a batch's gradients, or their sum, as Algorithm 1 writes it: with batches of B "
        "examples that is B times the learning rate",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        Algorithm.__post_init__(self)

    def check(self, task: Task, population: Population) -> None:
        training = self.local_training  # refuses epochs that do not go with the way batches are drawn
        if self.reduction == "sum" and (training.epochs is not None or training.poisson):
            raise ConfigError(
                "reduction = sum needs batches of one size; epochs end with a smaller one and privacy draws its own: "
                "give steps, or reduction = mean"
            )
        if self.known_variances:
            gaussian_task(task)

    @property
    def local_training(self) -> LocalTraining:
        if self.fixed_epochs is None:
            return self.training
        return replace(self.training, steps=None, epochs=self.fixed_epochs)

    def default_steps(self, count: Tensor) -> Tensor:
        """[n] int64: steps of clients with `count` examples while (19) cannot tell."""
        steps = self.local_training.num_steps(count)
        if self.l_init is not None and self.use_steps and self.fixed_epochs is None:
            steps = torch.full_like(steps, self.l_init)
        return steps

    def init_client(self, task: Task, data: Cohort) -> Client:
        n, start = len(data), task.init(data.seed)
        mean, m2 = torch.zeros_like(start[task.trainable]).expand(n, -1), torch.zeros(n, dtype=torch.float64)
        last = torch.tensor([UNKNOWN, UNKNOWN, 0.0], dtype=torch.float64).expand(n, -1)
        return Client(start.expand(n, -1), mean, m2, torch.zeros(n, dtype=torch.int64), last)

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        s0, others = server.s0.to(torch.float32), server.others[ids].to(torch.float32)
        return Down(server.theta.expand(n, -1), s0.expand(n), others)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        past = Running(client.rounds.cpu(), client.mean, client.m2.cpu())
        plan = self.decide(task, past, down, data)
        start = down.theta
        if self.use_init:
            own = client.theta if client.optimum is None else client.optimum
            start = start_of(down.theta, own, plan.ratio)  # (18), (24)
            start[:, task.trainable.stop :] = down.theta[:, task.trainable.stop :]
        train, training = data.train, self.local_training
        if self.reduction == "sum":
            train = train.scaled(train.count.clamp_max(training.batch))
        theta = sgd(task, start, train.batches(training, plan.steps))
        optimum = self.find_optimum(task, theta, data)
        models = past.add((theta if optimum is None else optimum)[:, task.trainable])
        s = self.variance(task, models, data).to(torch.float32)
        count = None if self.use_agg else data.train.count.to(torch.float32)
        up = Up(theta - down.theta, s, count, None if optimum is None else optimum - down.theta)
        return Client(theta, models.mean, models.m2, models.n, plan.summary(), optimum), up

    def decide(self, task: Task, past: Running, down: Down, data: Cohort) -> LocalPlan:
        """(18) and (19), in float64."""
        training, count = self.local_training, data.train.count
        s, s0, others = self.variance(task, past, data), down.s0.cpu().double(), down.others.cpu().double()
        step_size = self.step_size(training.rate(data.round), count.clamp_max(training.batch), count)
        plan = self.local_plan(s, s0, others, step_size, self.default_steps(count))
        return plan._replace(ratio=plan.ratio * (past.n > 0))  # θ does not contain a client that has never trained

    def variance(self, task: Task, models: Running, data: Cohort) -> Tensor:
        """[n] float64 s_m: of the models so far (16), or the true one where it is to be used."""
        return gaussian_task(task).known_variances(data.ids) if self.known_variances else self.own_variance(models)

    def find_optimum(self, task: Task, theta: Tensor, data: Cohort) -> Tensor | None:
        """[n, P]: the models that clients are judged by in place of θ_m [n, P]; None in Algorithm 1: by θ_m itself."""
        return None

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return own_or_server(client.rounds > 0, client.theta, down.theta)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(server.theta[None])

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        rho, raw, steps = client.last.unbind(1)
        variance = self.own_variance(Running(client.rounds, client.mean, client.m2))
        last = {"weight_of_others": rho, "raw_steps": raw, "steps": steps.to(torch.int64)}
        return {"sigma_m_sq": variance, "rounds_active": client.rounds, **last}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps: Tensor | None = self.default_steps(count)
        if self.use_steps and self.fixed_epochs is None:
            steps = None if self.l_max is None else self.default_steps(count).clamp_min(self.l_max)
        return gradient_steps(steps, uncovered={} if self.use_agg else {EXAMPLE_COUNT: "use_agg = true"})


@dataclass(frozen=True)
class SelfFL(SelfFLClients, AveragingAlgorithm[Server, Client, Down, Up]):
    @property
    def uses_variances(self) -> bool:
        """False for the control, whose server estimates nothing from the updates: it needs their average alone."""
        return self.use_init or self.use_steps or self.use_agg

    @property
    def single_updates(self) -> str:
        if not self.uses_variances:
            return ""
        return "estimates the variance between clients from their updates and weighs clients by variances they report"

    def init_server(self, task: Task, population: Population) -> Server:
        s = torch.full((population.num_clients,), UNKNOWN, dtype=torch.float64)
        s0 = 0.0
        if self.known_variances:
            truth = gaussian_task(task)
            s, s0 = truth.known_variances(torch.arange(population.num_clients)), truth.known_s0()
        return Server(task.init(population.seed), torch.tensor(s0, dtype=torch.float64), s, torch.zeros_like(s))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        takes_part = torch.zeros(len(server.s), dtype=torch.bool, device=server.s.device)
        takes_part[active] = True
        return replace(server, others=self.sum_of_others(server.s, server.s0, takes_part)), active

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        c = self.smoothing_weight(round.population.participation)
        return replace(server, theta=server.theta + c * mean.delta)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        if not self.uses_variances:
            return super().aggregate(server, ids, up, round)
        models = up.delta if up.optimum is None else up.optimum  # relative to θ
        s = server.s.cpu().clone()
        s[ids] = up.s.cpu().to(torch.float64)
        s0 = server.s0.cpu()
        if not self.known_variances:
            s0 = self.variance_between(models[:, round.trainable], s0)  # (17), (25)
        weight = self.client_weights(s[ids], s0) if up.count is None else up.count
        step = weighted_mean(models, weight)  # (20), (26)
        c = self.smoothing_weight(round.population.participation)
        return Server(server.theta + c * step, s0, s, server.others)

    def figures(self, server: Server) -> dict[str, Any]:
        figures = variance_figures(server)
        if not self.uses_variances:
            del figures["sigma0_sq"]
        return figures


def variance_figures(server: Server) -> dict[str, Any]:
    return {"sigma0_sq": float(server.s0), "clients_with_variance": int((server.s >= 0).sum())}


def gaussian_task(task: Task) -> GaussianTask:
    """The task as the one that knows its variances."""
    if not isinstance(task, GaussianTask):
        raise ConfigError(
            "known_variances=true needs a task that knows its variances, such as the two-level Gaussian one; "
            f"{type(task).__name__} does not: set known_variances=false to estimate them"
        )
    return task
