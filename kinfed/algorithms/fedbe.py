"""FedBE: the server teaches its model what an ensemble drawn around the clients' models says of unlabelled examples.

Chen, Chao: FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021, Algorithm 1.

    clients:  as in FedAvg
    server:   μ = Σ_m p_m θ_m;  M models from  N(μ, diag Σ_m p_m (θ_m − μ)²)                   (`sampling = gaussian`)
              or from  Σ_m γ_m N_m θ_m / Σ_m γ_m N_m,  γ ~ Dir(α)                              (`dirichlet`)
              p̂(x) = mean of softmax over these M, μ and the clients' θ_m
              w ← SWA of `distill_steps` steps from μ on the cross-entropy to p̂ over public examples

SWA (Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, UAI 2018): in every `cycle` the rate falls from `distill_lr` to a
part of it, and w is the mean of the models at the ends of the cycles.

`distill_steps = 0` is FedAvg, bit for bit. With clients that agree (or a single one) the ensemble is one model, its
targets are what that model says, and distillation leaves it where it is.

Decisions. Where the authors' code differs, the formulas above stand: it draws normal variates of each layer's updates
divided by their norms, and Dirichlet weights without N_m; it takes a model into SWA every 25 steps, as here, at a fixed
rate of 10⁻³ with momentum 0.9. Our rate falls within a cycle, as SWA's authors propose; numbers of steps and rates are
ours, to be tuned. Labels of public examples are never looked at. Models with running statistics are refused: a drawn
model has none of its own. With `smoothing` c < 1, μ is the smoothed mean. The personal model is the client's own after
its last training, as FedAvg's is here; a client without any uses the server's. Not for robust averages and secure sums:
the server looks at every single model.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy import stats
from torch import Tensor

from kinfed.algorithms.common.distillation import digest, public_scores
from kinfed.algorithms.common.heads import required_head
from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.author import ConfigError, DeltaUp, Population, Range, RoundInfo, Task, option, rng

CYCLE_END = 0.4  # of the rate that a cycle begins with


@dataclass(frozen=True)
class FedBE(FedAvg):
    sampling: Literal["gaussian", "dirichlet"] = option("gaussian", "what models of the ensemble are drawn from")
    samples: int = option(10, "M: models that are drawn", ge=0)
    concentration: float = option(1.0, "α of the Dirichlet distribution", gt=0)
    distill_steps: int = option(100, "steps on public examples per round; 0: FedAvg", ge=0)
    distill_lr: float = option(0.02, "their rate at the beginning of a cycle", gt=0, tune=Range(1e-3, 0.2))
    cycle: int = option(25, "steps between two models of the average", ge=1)

    traits = frozenset({"needs classes", "needs public data", "state to deploy"})
    single_updates = "fits a distribution to the single models"

    def check(self, task: Task, population: Population) -> None:
        required_head("FedBE", task)
        if task.trainable.stop < task.num_params:
            raise ConfigError(
                "FedBE's server predicts with models drawn around those of the clients, for which there are no running "
                "statistics; use GroupNorm or LayerNorm in place of BatchNorm"
            )

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        mean = super().aggregate(server, ids, up, round)
        if not self.distill_steps:
            return mean
        count = torch.ones(len(ids)) if up.count is None else up.count
        models = server.w + up.delta
        samples = self.draw(models, count.to(models.device), mean.w, round)
        return Server(self.distilled(mean.w, torch.cat([samples, mean.w[None], models]), round), mean.c)

    def draw(self, models: Tensor, count: Tensor, mean: Tensor, round: RoundInfo) -> Tensor:
        """[M, P] from the distribution of the clients' models [n, P], with `count` [n] examples; `mean` [P] is μ."""
        keys = rng.fold(round.key("ensemble"), torch.arange(self.samples))
        p = count.double() / count.sum()
        if self.sampling == "dirichlet":
            u = rng.uniform(keys, len(models)).numpy()
            gamma = torch.from_numpy(stats.gamma.ppf(u, self.concentration)).clamp_min(1e-300)
            share = gamma * p.cpu()
            share = share / share.sum(1, keepdim=True)
            return (share.to(models.device) @ models.double()).to(models.dtype)
        spread = (p[:, None] * (models - mean).double().square()).sum(0).sqrt()
        return mean + (spread * rng.normal(keys, len(mean)).to(models.device)).to(models.dtype)

    def distilled(self, w: Tensor, ensemble: Tensor, round: RoundInfo) -> Tensor:
        """[P]: w after SWA towards the mean prediction of the ensemble [M, P]."""
        task, pool = round.server_task, round.population.pool
        assert task is not None  # the loop gives it
        assert pool is not None  # refused without
        public = replace(pool.on(task.device), round=round.number)
        scores = [public_scores(task, model[None], public) for model in ensemble]
        target = torch.cat([torch.softmax(z, -1) for z in scores]).mean(0, keepdim=True)  # p̂
        theta, ends = w[None], []
        for begin in range(0, self.distill_steps, self.cycle):
            steps = min(self.cycle, self.distill_steps - begin)
            theta = digest(task, theta, public, target, _slope, self.training, steps, begin, self._rate)
            ends.append(theta[0])
        return torch.stack(ends).double().mean(0).to(w.dtype)

    def _rate(self, step: int) -> float:
        """Rate of a step of distillation: falls linearly within a cycle."""
        position = (step % self.cycle) / max(self.cycle - 1, 1)
        return self.distill_lr * (1 - (1 - CYCLE_END) * position)


def _slope(z: Tensor, target: Tensor) -> Tensor:
    return torch.softmax(z, -1) - target  # of −Σ_c p̂_c log softmax(z)_c
