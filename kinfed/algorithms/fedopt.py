"""FedOpt: FedAvg whose server treats the average update as a gradient and takes an optimizer's step with it.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
Algorithm 2 (FedAdagrad, FedYogi, FedAdam).

    Δ = Σ p_m (θ_m − w)                        of the clients that replied
    m ← β₁ m + (1 − β₁) Δ
    v ← v + Δ²                                 "adagrad"
        v − (1 − β₂) Δ² sign(v − Δ²)           "yogi"
        β₂ v + (1 − β₂) Δ²                     "adam"
    w ← w + η m / (√v + τ)

The paper's v starts at τ² or above; here at τ². There is no bias correction, as in the paper. The clients' side is
FedAvg's, or FedProx's with μ > 0 (whose stragglers are dropped all the same): any rule of local training goes with
any rule of the server. The paper writes an equal mean and weighs by examples in its experiments, as is the default
here. It leaves β₁ = 0 for Adagrad; the registered `fedadagrad` does too.

Coordinates whose update is large against τ move by about η per round whatever the clients' learning rate, so η is
tuned beside it, on a scale of its own: a good value is usually between 0.01 and 1.

"momentum" is FedAvgM: Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. Their γ is β₁ here:

    m ← β₁ m + Δ,   w ← w + η m                (Nesterov: w ← w + η (β₁ m + Δ))

β₁ = 0 with η = 1, the η of the registered `fedavgm`, is FedAvg. The momentum sees the average of a round once: updating
it client by client, as some released code does, keeps only the last client's update and applies it as often as there
are clients.

Optimizers move trainable parameters; running statistics (of BatchNorm, say) take the mean Δ as it is.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import AveragingAlgorithm, RoundInfo
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.algorithms.fedprox import FedProx
from kinfed.author import Cohort, ConfigError, DeltaUp, ModelDown, Population, Range, Task, Tree, Weights, option


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    m: Tensor  # [T] momentum of the average update of trainable parameters
    v: Tensor | None  # [T] size of its squares; absent with server_optimizer = "momentum"


@dataclass(frozen=True)
class FedOpt(DeploysLastModel[Server, ModelDown, DeltaUp], AveragingAlgorithm[Server, Client, ModelDown, DeltaUp]):
    server_optimizer: Literal["adam", "yogi", "adagrad", "momentum"] = option("adam", "the server's rule")
    server_lr: float = option(0.1, "η, the server's learning rate", gt=0, tune=Range(1e-3, 1.0))
    beta1: float = option(0.9, "β₁ (FedAvgM's γ), momentum of the average update; 0 for none", ge=0, lt=1)
    beta2: float = option(
        0.99, "β₂, memory of the squares of average updates (without meaning for adagrad and momentum)", ge=0, lt=1
    )
    tau: float = option(
        1e-3, "τ, how adaptive: updates small against τ are scaled alike, larger ones to equal size (not for momentum)",
        gt=0, tune=Range(1e-4, 0.1),
    )  # fmt: skip
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")
    mu: float = option(0.0, "μ of FedProx's proximal term in local training; 0 is FedAvg's", ge=0)
    server_nesterov: bool = option(False, "Nesterov's form of momentum, for server_optimizer = momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_nesterov and self.server_optimizer != "momentum":
            raise ConfigError(
                "server_nesterov is a form of server_optimizer = momentum; got server_optimizer = "
                f"{self.server_optimizer}"
            )
        _ = self._local  # refuses a mu that is unstable

    @property
    def _local(self) -> FedProx:
        """The clients' side, which is FedProx's; with μ = 0, FedAvg's."""
        return FedProx(training=self.training, weights=self.weights, mu=self.mu)

    def init_server(self, task: Task, population: Population) -> Server:
        w = task.init(population.seed)
        m = torch.zeros_like(w[task.trainable])
        return Server(w, m, None if self.server_optimizer == "momentum" else torch.full_like(m, self.tau**2))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        return self._local.client_update(task, client, down, data)

    def step(self, server: Server, mean: DeltaUp, round: RoundInfo) -> Server:
        w, delta = server.w + mean.delta, mean.delta[round.trainable]  # Δ
        step, m, v = self._step(server, delta)
        w[round.trainable] = server.w[round.trainable] + step
        return Server(w, m, v)

    def _step(self, server: Server, delta: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The optimizer's step [T] for the average update [T], and its new m and v."""
        if server.v is None:
            m = self.beta1 * server.m + delta
            return self.server_lr * (self.beta1 * m + delta if self.server_nesterov else m), m, None
        m = self.beta1 * server.m + (1 - self.beta1) * delta
        square = delta.square()
        if self.server_optimizer == "adagrad":
            v = server.v + square
        elif self.server_optimizer == "yogi":
            v = server.v - (1 - self.beta2) * square * torch.sign(server.v - square)
        else:
            v = self.beta2 * server.v + (1 - self.beta2) * square
        return self.server_lr * m / (v.sqrt() + self.tau), m, v
