"""PerFCL: FENDA whose two bodies are kept apart by contrast: one near the common body, the other near its own past.

Zhang, Xu, Yao, Shang, Li, Liu, Wei: Personalized Federated Contrastive Learning, IEEE BigData 2022.

    client m:  min  f_m + μ l_g + γ l_l
    l_g = −log( exp(cos(φ_g, φ_w)/τ) / (exp(cos(φ_g, φ_w)/τ) + exp(cos(φ_g, φ_g')/τ)) )
    l_l = −log( exp(cos(φ_l, φ_l')/τ) / (exp(cos(φ_l, φ_l')/τ) + exp(cos(φ_l, φ_w)/τ)) )
    φ_w of the received common body, φ_g' and φ_l' of both bodies as the client's last training left them

μ = γ = 0 is FENDA, bit for bit, and so is a client's first round, in which it has no past.

Decisions. φ are the inputs of the head; φ_w, φ_g' and φ_l' come from evaluation mode. A vector of zeros has no
direction (see moon). μ and γ of 1 and one τ for both are ours; the paper's text could not be checked, and FL4Health,
from whose code the terms are known, tunes both weights.

Messages and privacy are FENDA's; the last common body as trained here stays with the client, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms import fenda
from kinfed.algorithms.fenda import Down, TwoBodies
from kinfed.algorithms.moon import ModelContrast
from kinfed.author import Cohort, DeltaUp, FeatureLoss, Range, Task, option, separable


@dataclass
class Client(fenda.Client):
    last: Tensor  # [n, G] the common body, as the last training left it
    seen: Tensor  # [n] bool: has trained


@dataclass(frozen=True)
class PerFCL(TwoBodies[Client]):
    mu: float = option(
        1.0, "μ: how firmly features of the common body are held at those received", ge=0, tune=Range(0.1, 10.0)
    )
    gamma: float = option(
        1.0, "γ: how firmly features of the own body are held at their past, away from those received", ge=0,
        tune=Range(0.1, 10.0),
    )  # fmt: skip
    tau: float = option(0.5, "τ: temperature of the contrasts", gt=0)

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = self.start(task, data)
        last = self.split(task).take_shared(task.init(data.seed)).expand(len(data), -1)
        return Client(start.own, start.head, last, torch.zeros(len(data), dtype=torch.bool))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, DeltaUp]:
        own, head, shared = self.train(task, client, down, data, self.contrasts(task, client, down))
        return Client(own, head, shared, torch.ones_like(client.seen)), self.update(shared, down, data)

    def contrasts(self, task: Task, client: Client, down: Down) -> tuple[FeatureLoss | None, FeatureLoss | None]:
        """∂(γ l_l)/∂φ_l and ∂(μ l_g)/∂φ_g."""
        if not bool(client.seen.any()):
            return None, None
        join = self.split(task).join
        w, last = join(client.head, down.shared), join(client.head, client.last)
        seen = client.seen.to(w)
        of_own = separable(ModelContrast(task, client.own, w, self.gamma * seen, self.tau))
        of_common = separable(ModelContrast(task, w, last, self.mu * seen, self.tau))
        return of_own if self.gamma else None, of_common if self.mu else None
