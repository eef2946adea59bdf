"""FedNova: FedAvg in which clients who do more local work do not pull the model to themselves.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020, Algorithm 1.

    min_w  Σ_m p_m f_m(w),      p_m ∝ N_m ("examples") or 1 ("equal")

    w ← w + τ_eff Σ_m p_m Δ_m / ‖a_m‖₁,      τ_eff = Σ_m p_m ‖a_m‖₁,      Δ_m = θ_m − w

Δ_m is −η times a sum of gradients with the coefficients a_m, so Δ_m / ‖a_m‖₁ is −η times their mean. FedAvg with
unequal numbers of steps converges to the minimum of Σ p_m ‖a_m‖ f_m instead. With K local steps

    ‖a‖₁ = K                                              SGD
           (K − ρ (1 − ρᴷ)/(1 − ρ)) / (1 − ρ)             momentum ρ
           (1 − (1 − η μ)ᴷ) / (η μ)                       FedProx's term μ

Where ‖a_m‖ is the same for all, this is FedAvg (with μ FedProx), bit for bit. Partial work of stragglers is used: that
is what the method is for. τ_eff is the paper's; the authors' code takes Σ p_m K_m where μ > 0.

What travels: w down; Δ_m, ‖a_m‖₁ and N_m up. Momentum together with μ is refused: the authors' code then updates the
norm by two rules in turn and it is neither's. So are Nesterov's momentum, momentum from earlier rounds, adaptive
optimizers and clipping, which have no such coefficients. The authors' server momentum is left out.

Directions have trainable columns only; running statistics (of BatchNorm, say) take the mean Σ p_m Δ_m as it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import ModelDown, ModelState, Weights, example_counts, mean_update
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.algorithms.fedprox import FedProx
from kinfed.author import Cohort, ConfigError, PrivacyProfile, Range, RoundInfo, Task, Tree, gradient_steps, option


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] θ_m − w
    norm: Tensor  # [n] float32 ‖a_m‖₁
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FedNova(DeploysLastModel[ModelState, ModelDown, Up]):
    weights: Weights = option("examples", "p_m: by N_m, or equal")
    mu: float = option(0.0, "μ of FedProx's proximal term in local training; 0 for none", ge=0, tune=Range(1e-3, 1.0))

    traits = frozenset({"keeps stragglers"})
    single_updates = "divides each update by the amount of work that its sender says it took"

    def __post_init__(self) -> None:
        super().__post_init__()
        training = self.training
        for setting, applies in {
            f"optimizer = {training.optimizer}": training.optimizer != "sgd",
            "nesterov": training.nesterov,
            "optimizer_state = kept": training.optimizer_state == "kept",
            "clip": training.largest_gradient is not None,
            "momentum together with mu": bool(training.momentum and self.mu),
        }.items():
            if applies:
                raise ConfigError(
                    "FedNova must know by how much each gradient of a round counts: with plain steps, momentum or mu; "
                    f"got {setting}, for which there is no such number; set it otherwise for this method"
                )
        _ = self._local  # refuses a mu that is unstable

    @property
    def _local(self) -> FedProx:
        """The clients' side, which is FedProx's; with μ = 0, FedAvg's."""
        return FedProx(training=self.training, weights=self.weights, mu=self.mu)

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, Up]:
        new, sent = self._local.client_update(task, client, down, data)
        batches = data.train.batches(self.training)
        norm = accumulation(batches.steps, self.training.momentum, batches.lr * self.mu)
        return new, Up(sent.delta, norm.to(torch.float32), example_counts(self.weights, data))

    def aggregate(self, server: ModelState, ids: Tensor, up: Up, round: RoundInfo) -> ModelState:
        w = server.w + mean_update(up.delta, up.count)
        if bool((up.norm == up.norm[0]).all()):
            return ModelState(w)
        norm = up.norm.to("cpu", torch.float64)
        p = torch.ones_like(norm) if up.count is None else up.count.to(norm)
        tau = (p * norm).sum() / p.sum()  # τ_eff
        scale = torch.where(norm > 0, tau / norm, 0.0)  # a client without a step has no direction
        delta = up.delta[:, round.trainable]
        w[round.trainable] = server.w[round.trainable] + mean_update(delta * scale.to(delta)[:, None], up.count)
        return ModelState(w)

    def privacy(self, count: Tensor) -> PrivacyProfile:
        by_epoch = {"how many batches each client has": "steps instead of epochs"} if self.training.epochs else {}
        return gradient_steps(self.training.num_steps(count), weights=self.weights, uncovered=by_epoch)


def accumulation(steps: Tensor, rho: float, eta_mu: float) -> Tensor:
    """[n] float64 ‖a‖₁ of K = steps [n] steps with momentum ρ, or with η μ: the sum of what the gradients count for."""
    k = steps.to(torch.float64)
    if rho:
        return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)
    return (1 - (1 - eta_mu) ** k) / eta_mu if eta_mu else k
