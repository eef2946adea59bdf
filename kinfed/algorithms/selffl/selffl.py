"""Self-FL: every client decides by its own uncertainty where to start, how long to train, and how much it counts.

Chen, Ding, Tramel, Wu, Sahu, Avestimehr, Zhang: Self-Aware Personalized Federated Learning, 2022,
https://arxiv.org/abs/2204.08069 (NeurIPS 2022), Algorithm 1. Formulas and options: `algorithms.selffl.uncertainty`.

    θ_m ~ N(θ_0, s_0),  θ_m^L ~ N(θ_m, s_m):   θ_m^FL = (1 − ρ_m) θ_m^L + ρ_m (mean of the others)

A client starts at the mean of the others (18) and stops after the l_m steps that leave the share ρ_m of the way
to its own optimum (19); the server weighs clients by w_m = 1/(s_0 + s_m) (20) and smooths with the participation
rate. s_m is the variance of the client's models over its own rounds (16), s_0 that of the clients of a round (17).

With use_init, use_steps, use_agg and smoothing all off this is FedAvg, bit for bit; with smoothing alone it is
`fedavg_smooth`, the control without which no result of Self-FL says anything: on images the gain over FedAvg is the
smoothing (docs/selffl.md). s_0 → ∞ is local training with equal weights, s_0 = 0 one model for all.

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
  * The gradient of a batch is its mean, as everywhere here; Algorithm 1 writes a sum with the same learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kinfed.algorithms.base import EXAMPLE_COUNT, Algorithm, mean_of
from kinfed.algorithms.selffl.uncertainty import UNKNOWN, Plan, Rules, Running, start_of
from kinfed.core.tree import Tree
from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@runtime_checkable
class KnowsVariances(Protocol):
    """A task that can tell the true variances (the two-level Gaussian one)."""

    def known_variances(self, ids: Tensor) -> Tensor: ...
    def known_s0(self) -> float: ...


@dataclass
class Server(Tree):
    theta: Tensor  # [P]
    c: Tensor  # [] weight of the new average
    s0: Tensor  # [] float64  σ_0²; 0 until two clients have replied
    s: Tensor  # [K] float64  σ_m² as last uploaded; −1 unknown
    others: Tensor  # [K] float64  S_{-m} of the planned round


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P]  θ_m
    mean: Tensor  # [n, P]  of its models so far
    m2: Tensor  # [n] float64  Σ ‖θ_m − mean‖² over them
    rounds: Tensor  # [n] int64  how many: the client's own clock
    last: Tensor  # [n, 3] float64  ρ, l_m before rounding and cap, steps taken in its last round: for the report


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


S = TypeVar("S", bound=Tree)
C = TypeVar("C", bound=Tree)
D = TypeVar("D", bound=Tree)
U = TypeVar("U", bound=Tree)


@dataclass(frozen=True)
class SelfFLClient(Rules, Algorithm[S, C, D, U]):
    """What a client decides before it trains; the same in all variants."""

    def check(self, task: Task, clients: Population) -> None:
        super().check(task, clients)
        _ = self.local_work  # refuses epochs that do not go with the way batches are drawn
        if self.known:
            truth(task)

    @property
    def local_work(self) -> LocalTraining:
        return (
            self.training if self.fixed_epochs is None else replace(self.training, steps=None, epochs=self.fixed_epochs)
        )

    def variance(self, task: Task, models: Running, data: Cohort) -> Tensor:
        """[n] float64 s_m: of the models so far (16), or the true one where it is to be used."""
        return truth(task).known_variances(data.ids) if self.known else self.own_variance(models)

    def decide(self, task: Task, past: Running, s0: Tensor, others: Tensor, data: Cohort) -> Plan:
        """(18) and (19), in float64."""
        training, count = self.local_work, data.train.count
        usual = training.num_steps(count)
        if self.l_init is not None and self.use_steps and self.fixed_epochs is None:
            usual = torch.full_like(usual, self.l_init)
        plan = self.plan(
            self.variance(task, past, data),
            s0.cpu().to(torch.float64),
            others.cpu().to(torch.float64),
            self.step_size(training.rate(data.round), count.clamp_max(training.batch), count),
            usual,
        )
        return plan._replace(ratio=plan.ratio * (past.n > 0))  # θ does not contain a client that has never trained

    def leaked(self) -> dict[str, str]:
        return super().leaked() | ({} if self.use_agg else {EXAMPLE_COUNT: "use_agg = true"})

    def gradients(self, count: Tensor) -> dict[int, Tensor] | None:
        usual = self.local_work.num_steps(count)
        if not self.use_steps or self.fixed_epochs is not None:
            return {1: usual}
        if self.l_init is not None:
            usual = torch.full_like(usual, self.l_init)
        return None if self.l_max is None else {1: usual.clamp_min(self.l_max)}

    def start(self, theta: Tensor, own: Tensor, plan: Plan) -> Tensor:
        return start_of(theta, own, plan.ratio) if self.use_init else theta  # (18)


@dataclass(frozen=True)
class SelfFL(SelfFLClient[Server, Client, Down, Up]):
    def init_server(self, task: Task, clients: Population) -> Server:
        s = torch.full((clients.num_clients,), UNKNOWN, dtype=torch.float64)
        s0 = 0.0
        if self.known:
            s, s0 = truth(task).known_variances(torch.arange(clients.num_clients)), truth(task).known_s0()
        c = self.smoothing_weight(clients.participation)
        return Server(task.init(clients.seed), scalar(c), scalar(s0), s, torch.zeros_like(s))

    def init_client(self, task: Task, data: Cohort) -> Client:
        n, start = len(data), task.init(data.seed)
        return Client(
            start.expand(n, -1),
            torch.zeros_like(start).expand(n, -1),
            torch.zeros(n, dtype=torch.float64),
            torch.zeros(n, dtype=torch.int64),
            torch.tensor([UNKNOWN, UNKNOWN, 0.0], dtype=torch.float64).expand(n, -1),
        )

    def prepare(self, server: Server, ids: Tensor) -> Server:
        active = torch.zeros(len(server.s), dtype=torch.bool, device=server.s.device)
        active[ids] = True
        return replace(server, others=self.others(server.s, server.s0, active))

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        s0, others = server.s0.to(torch.float32), server.others[ids].to(torch.float32)
        return Down(server.theta.expand(n, -1), s0.expand(n), others)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        past = Running(client.rounds.cpu(), client.mean, client.m2.cpu())
        plan = self.decide(task, past, down.s0, down.others, data)
        start = self.start(down.theta, client.theta, plan)
        theta = sgd(task, start, data.train.batches(self.local_work, plan.steps))
        models = past.add(theta)
        s = self.variance(task, models, data).to(torch.float32)
        count = None if self.use_agg else data.train.count.to(torch.float32)
        return (
            Client(theta, models.mean, models.m2, models.n, plan.summary()),
            Up(theta - down.theta, s, count),
        )

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        s = server.s.cpu().clone()
        s[ids] = up.s.cpu().to(torch.float64)
        s0 = server.s0.cpu()
        if not self.known:
            s0 = self.between(up.delta, s0)  # (17)
        weight = self.weights(s[ids], s0) if up.count is None else up.count
        step = mean_of(up.delta, weight)  # (20), relative to θ
        return Server(server.theta + float(server.c) * step, server.c, s0, s, server.others)

    def averaged(self) -> str:
        if not (self.use_init or self.use_steps or self.use_agg):
            return "delta"  # the control: σ₀² is estimated from the updates all the same, and nothing uses it
        raise ConfigError(
            "Self-FL estimates the variance between clients from their updates and weighs clients by variances they "
            "report, so a robust average of the updates could not keep its promise; leave out robust or the method"
        )

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.where((client.rounds > 0)[:, None].to(down.theta.device), client.theta, down.theta)

    def global_model(self, server: Server) -> Tensor:
        return server.theta

    def server_figures(self, server: Server) -> dict[str, Any]:
        return {"sigma0_sq": float(server.s0), "clients_with_variance": int((server.s >= 0).sum())}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        variance = self.own_variance(Running(client.rounds, client.mean, client.m2))
        return {"sigma_m_sq": variance, "rounds_active": client.rounds} | plan_figures(client.last)


def plan_figures(last: Tensor) -> dict[str, Tensor]:
    rho, raw, steps = last.unbind(1)
    return {"weight_of_others": rho, "raw_steps": raw, "steps": steps.to(torch.int64)}


def truth(task: Task) -> KnowsVariances:
    if not isinstance(task, KnowsVariances):
        raise ConfigError(
            "known=true needs a task that knows its variances, such as the two-level Gaussian one; "
            f"{type(task).__name__} does not: set known=false to estimate them"
        )
    return task


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
