"""pFedMe: personal models as Moreau envelopes around one global model.

T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.

    min_w  (1/M) Σ_m F_m(w),     F_m(w) = min_θ f_m(θ) + (λ/2) ‖θ − w‖²,     ∇F_m(w) = λ (w − θ̂_m(w))

The steps of local training are the R local rounds; each draws one batch, takes K steps towards the proximal point θ̂
and then one step of w_m. λ → ∞ is FedAvg's model for everyone; λ = 0 never moves w and is refused.

Where this differs from the authors' repository, it follows the paper: only active clients train (the repository
trains all and averages some, which refreshes everyone's personal model for free), the average is equal
(`weights="examples"` for the repository's), and the inner steps have no weight decay of their own (`inner_decay`).

All forward passes are at θ, so w_m takes over θ's running statistics (of BatchNorm, say) after every batch; the server
averages them, and a β above 1 does not extrapolate them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, RoundInfo, gradient_steps
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, ModelState, Weights, example_counts, extrapolated
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Cohort, ConfigError, GradientStep, Mix, Task, Tree, option, run_program


@dataclass
class Client(Tree):
    theta: Tensor | None  # [n, P] last approximate proximal point; none if it is computed anew


@dataclass(frozen=True)
class PFedMe(AveragesOneModel[Client]):
    lam: float = option(15.0, "λ: how firmly personal models are held near the local copy of w", gt=0)
    inner_steps: int = option(5, "K: steps towards the proximal point per batch", ge=1)
    personal_lr: float | None = option(None, "η_p of the inner steps; the common lr by default", gt=0)
    beta: float = option(1.0, "β of w ← (1 − β) w + β mean(w_m); may exceed 1", gt=0)
    weights: Weights = option("equal", "weights of the average: equal (paper), or by N_m (repository)")
    inner_decay: float = option(
        0.0, "weight decay of the inner steps beside that of local training (the repository uses 0.001)", ge=0
    )
    recompute: bool = option(
        False, "evaluate a proximal point freshly computed at the current w (K steps on training data) for every client"
    )

    traits = frozenset({"no momentum"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.training.lr * self.lam <= 1:
            raise ConfigError(
                f"pFedMe needs lr * lam <= 1 (above, the global model overshoots); got {self.training.lr} * {self.lam}"
            )
        if not self._inner_lr(self.training.lr) * self.lam < 2:
            raise ConfigError(
                f"pFedMe's inner steps need personal_lr * lam < 2 (they are unstable above); "
                f"got {self._inner_lr(self.training.lr)} * {self.lam}"
            )

    def _inner_lr(self, lr: float) -> float:
        """η_p, decaying in step with the common rate."""
        return lr if self.personal_lr is None else self.personal_lr * lr / self.training.lr

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(None if self.recompute else task.init(data.seed).expand(len(data), -1))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        batches = data.train.batches(self.training)
        eta, eta_p = batches.lr, self._inner_lr(batches.lr)
        w, theta = down.w.clone(), down.w.clone()
        outer = Mix("w", "w", "theta", eta * self.lam)  # w_m ← w_m − η λ (w_m − θ̂)
        run_program(task, [batches], [self._inner(eta_p), outer], {"w": w, "theta": theta})
        up = DeltaUp(w.sub_(down.w), example_counts(self.weights, data))
        return Client(None if self.recompute else theta), up

    def _inner(self, lr: float) -> GradientStep:
        """K steps θ ← θ − η_p (∇f(θ) + λ (θ − w_m)) on one batch."""
        decay = self.inner_decay + self.training.weight_decay
        return GradientStep("theta", lr, decay=decay, proximal=(self.lam, "w"), times=self.inner_steps)

    def step(self, server: ModelState, mean: DeltaUp, round: RoundInfo) -> ModelState:
        return ModelState(extrapolated(server.w, mean.delta, self.beta, round.trainable))

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        if client.theta is not None:
            return client.theta
        theta = down.w.clone()
        batches = data.train.batches(self.training.with_steps(1), stream="adapt")
        run_program(task, [batches], [self._inner(self._inner_lr(batches.lr))], {"w": down.w, "theta": theta})
        return theta

    def privacy(self, count: Tensor) -> PrivacyProfile:
        anew = {self.inner_steps: torch.ones_like(count)} if self.recompute else {}
        steps = {self.inner_steps: self.training.num_steps(count)}
        return gradient_steps(steps, per_personalization=anew, weights=self.weights)
