"""FedEx: settings of local training are tuned while a method trains, by what clients' validation examples say of them.

Khodak, Tu, Li, Li, Balcan, Smith, Talwalkar: Federated Hyperparameter Tuning: Challenges, Baselines, and Connections to
Weight-Sharing, NeurIPS 2021, Algorithm 2.

    round t:  client i trains with settings c_i ~ θ, one of k configurations, and reports its validation loss L_i
              λ = past rounds' mean losses, the latest counting most (weights γ^age)
              g_j = Σ_i p_i (L_i − λ) 1[c_i = j] / θ_j,      p_i ∝ |V_i|
              θ_j ∝ θ_j exp(−η g_j),      η = √(2 log k) / √(Σ_{s ≤ t} max_j |g_j|²)          (exponentiated gradient)

All else is the method's own: one model is trained by all, whatever their settings. One configuration is the method
itself, bit for bit.

Decisions. A client's model is what it would deploy, so that personal methods are tuned by personal models. λ of the
first round is that round's own mean. Clients without validation examples train and have no say. What the server does
(its averages, its optimizer) follows the first configuration: only what changes a client's work can be tuned so.
Personal models are judged with the configuration that is likeliest by then. A validation loss leaves every client: not
for differential privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, AnyAlgorithm, RoundInfo, ServerModels, Trait
from kinfed.author import Cohort, ConfigError, Population, Task, Tree, mean_losses, option, rng
from kinfed.engine import task_for


@dataclass
class Server(Tree):
    inner: Tree  # the method's
    theta: Tensor  # [k] float64 chances of the configurations
    losses: Tensor  # [] float64 past mean losses, discounted
    weight: Tensor  # [] float64 of these, together
    slopes: Tensor  # [] float64 Σ max_j |g_j|²
    key: Tensor  # [] int64 of the round's draws


@dataclass
class Down(Tree):
    inner: Tree
    configuration: Tensor  # [n] int64 c_i
    likeliest: Tensor  # [n] int64


@dataclass
class Up(Tree):
    inner: Tree
    loss: Tensor  # [n] float32 L_i
    examples: Tensor  # [n] float32 |V_i|


@dataclass(frozen=True)
class FedEx(Algorithm[Server, Tree, Down, Up]):
    """Not registered: `kinfed tune --while-training` makes it from a method and its ranges."""

    variants: tuple[AnyAlgorithm, ...] = field(default=(), kw_only=True)  # the method in every configuration
    discount: float = option(0.9, "γ: weight of a mean loss in λ for every round that has passed", gt=0, lt=1)

    single_updates = "learns from every single validation loss"

    @classmethod
    def of(cls, variants: tuple[AnyAlgorithm, ...]) -> FedEx:
        """With the first variant's local training, which evaluation and reports go by."""
        first = variants[0]
        if first.training.optimizer_state == "kept":
            raise ConfigError(
                "clients change settings from round to round, and the moments of a local optimizer are valid for one "
                "setting only; use optimizer_state = reset to tune while training"
            )
        return cls(first.training, variants=variants, finetune=first.finetune, finetune_lr=first.finetune_lr)

    @property
    def traits(self) -> frozenset[Trait]:  # type: ignore[override]  # of the method, known with the object
        validation: frozenset[Trait] = frozenset({"needs validation"})
        return (self.variants[0].traits | validation) - {"state to deploy", "keeps stragglers"}

    def check(self, task: Task, population: Population) -> None:
        for variant in self.variants:
            variant.check(task, population)

    def init_server(self, task: Task, population: Population) -> Server:
        k, zero = len(self.variants), torch.zeros((), dtype=torch.float64)
        inner = self.variants[0].init_server(task, population)
        theta = torch.full((k,), 1 / k, dtype=torch.float64)
        return Server(inner, theta, zero, zero.clone(), zero.clone(), torch.zeros((), dtype=torch.int64))

    def init_client(self, task: Task, data: Cohort) -> Tree:
        state: Tree = self.variants[0].init_client(task, data)
        return state

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        inner, ids = self.variants[0].plan(server.inner, active, round)
        return replace(server, inner=inner, key=round.key("configurations")), ids

    def download(self, server: Server, ids: Tensor) -> Down:
        likeliest = server.theta.argmax().expand(len(ids))
        return Down(self.variants[0].download(server.inner, ids), self.draw(server, ids), likeliest)

    def draw(self, server: Server, ids: Tensor) -> Tensor:
        """[n] int64: c_i ~ θ."""
        u = rng.uniform(rng.fold(server.key, ids), 1).squeeze(1)
        return torch.searchsorted(server.theta.cumsum(0), u, right=True).clamp_max(len(self.variants) - 1)

    def client_update(self, task: Task, client: Tree, down: Down, data: Cohort) -> tuple[Tree, Up]:
        groups = [(down.configuration.cpu() == j).nonzero().squeeze(1) for j in range(len(self.variants))]
        states, ups, losses = [], [], []
        for variant, rows in zip(self.variants, groups, strict=True):
            if not len(rows):
                continue
            cohort, message = some_clients(data, rows), down.inner.take(rows)
            state, up = variant.client_update(task, client.take(rows), message, cohort)
            models = variant.personalize(task, state, message, cohort)
            theta = next(iter(models.values())) if isinstance(models, dict) else models
            states.append(state)
            ups.append(up)
            losses.append(mean_losses(task_for(task, theta), [theta], cohort.val)[:, 0])
        back = torch.argsort(torch.cat(groups))
        examples = data.val.count.to(torch.float32)
        loss = torch.where(examples > 0, torch.cat(losses)[back], 0.0).to(torch.float32)
        return type(states[0]).stack(states).take(back), Up(type(ups[0]).stack(ups).take(back), loss, examples)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        inner = self.variants[0].aggregate(server.inner, ids, up.inner, round)
        if not bool(up.examples.any()):
            return replace(server, inner=inner)
        p = up.examples.double().cpu() / up.examples.double().sum().cpu()
        loss = up.loss.double().cpu()
        mean = (p * loss).sum()
        baseline = server.losses / server.weight if bool(server.weight) else mean  # λ
        chosen = torch.nn.functional.one_hot(self.draw(server, ids), len(self.variants)).double()
        g = ((p * (loss - baseline)) @ chosen) / server.theta.clamp_min(1e-12)
        slopes = server.slopes + g.abs().max().square()
        eta = math.sqrt(2 * math.log(max(len(g), 2))) / slopes.sqrt().clamp_min(1e-12)
        theta = torch.softmax(server.theta.clamp_min(1e-12).log() - eta * g, 0)
        losses, weight = self.discount * (server.losses + mean), self.discount * (server.weight + 1)
        return Server(inner, theta, losses, weight, slopes, server.key)

    def personalize(self, task: Task, client: Tree, down: Down, data: Cohort) -> Tensor | dict[str, Tensor]:
        variant = self.variants[int(down.likeliest[0])] if len(down.likeliest) else self.variants[0]
        models: Tensor | dict[str, Tensor] = variant.personalize(task, client, down.inner, data)
        return models

    def server_models(self, server: Server) -> ServerModels | None:
        return self.variants[0].server_models(server.inner)

    def sent_columns(self, task: Task) -> Tensor:
        return self.variants[0].sent_columns(task)

    def figures(self, server: Server) -> dict[str, Any]:
        return {"largest_chance": float(server.theta.max())}


def some_clients(data: Cohort, rows: Tensor) -> Cohort:
    """The data of the clients at these rows."""
    splits = {name: getattr(data, name).take(rows) for name in ("train", "val", "test")}
    groups = None if data.groups is None else data.groups[rows]
    public = None if data.public is None else data.public.take(rows)
    return replace(data, ids=data.ids[rows], groups=groups, public=public, **splits)
