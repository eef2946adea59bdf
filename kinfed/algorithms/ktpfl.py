"""KT-pFL: own models; each learns from a mixture of its own of what all say of public examples.

Zhang, Guo, Ma, Wang, Xu, Wu: Parameterized Knowledge Transfer for Personalized Federated Learning, NeurIPS 2021.

    client m:  `digest_steps` steps of min KL(t_m ‖ softmax(z/T)) over public examples, then the usual steps on its own
               sends s_m = softmax(z/T) of all public examples
    server:    t_i = Σ_j c_ij s_j;   c_i ← c_i − η_c ∇ [ mean (s_i − t_i)² + ρ mean_j (c_ij − 1/N)² ]
               c_i ← softmax(κ c_i)

`digest_steps = 0` is local training, bit for bit, and so is everybody's first round. η_c = 0, or a large ρ, leaves c =
1/N: distillation of the mean of all probabilities.

Decisions. The loss of c, its penalty and the softmax with κ = 5 that brings c back to shares are those of the authors'
code (the text names a penalty on c − 1/N and gradient steps). Their code scales the step of c to the size of its
gradient; here η_c is a number. KL is summed over classes and averaged over examples (their code also divides by the
classes). With partial participation the last predictions of everyone heard so far take part, and c is of these; a
client not heard yet gets equal shares of them. Public examples are set aside for all methods alike (kinfed run
--public).

The personal model is the client's own; there is no server model. Not private: what a model says of public examples is
computed from it without noise. The server keeps N U C predictions and N² coefficients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.distillation import OwnModels, digest, public_examples, public_scores
from kinfed.algorithms.common.one_model import KeepsOwnModel, OwnModel
from kinfed.author import Cohort, Population, Range, RoundInfo, Task, Tree, option, sgd


@dataclass
class Server(Tree):
    predictions: Tensor  # [N, U, C] s as last sent
    known: Tensor  # [N] bool: has sent some
    coefficients: Tensor  # [N, N] float64 c; rows sum to 1 over the known clients


@dataclass
class Down(Tree):
    target: Tensor  # [n, U, C] t
    known: Tensor  # [n] bool: there is one


@dataclass
class Up(Tree):
    predictions: Tensor  # [n, U, C] s


@dataclass(frozen=True)
class KTpFL(OwnModels[Server, OwnModel, Down, Up], KeepsOwnModel[Server, Down, Up]):
    digest_steps: int = option(
        20, "steps towards the own mixture per round; 0: none", ge=0, tune=Range(5, 50, whole=True)
    )
    temperature: float = option(1.0, "T of the predictions that are exchanged", gt=0)
    coefficient_lr: float = option(1.0, "η_c: rate of the mixtures; 0: equal shares for ever", ge=0)
    rho: float = option(0.1, "ρ: how firmly mixtures are held at equal shares", ge=0)
    sharpness: float = option(5.0, "κ of the softmax that brings mixtures back to shares", gt=0)

    single_updates = "keeps every single prediction"

    def init_server(self, task: Task, population: Population) -> Server:
        assert population.pool is not None  # refused without
        N, U = population.num_clients, int(population.pool.count[0])
        predictions = torch.zeros(N, U, task.head.outputs, device=task.device)
        return Server(predictions, torch.zeros(N, dtype=torch.bool), torch.full((N, N), 1 / N, dtype=torch.float64))

    def download(self, server: Server, ids: Tensor) -> Down:
        members = server.known.nonzero().squeeze(1)
        share = server.coefficients[ids][:, members]
        share = share / share.sum(1, keepdim=True)
        # One row at a time, so that a target does not depend on who is asked for with it.
        s = server.predictions[members]
        targets = [torch.tensordot(row.to(s), s, 1) for row in share]
        known = server.known.any().expand(len(ids))
        return Down(torch.stack(targets) if targets else s[:0], known)

    def client_update(self, task: Task, client: OwnModel, down: Down, data: Cohort) -> tuple[OwnModel, Up]:
        public, theta = public_examples(data), client.theta
        if self.digest_steps and bool(down.known.any()):
            theta = digest(task, theta, public, down.target, self._slope, self.training, self.digest_steps)
        theta = sgd(task, theta, data.train.batches(self.training))
        scores = public_scores(task, theta, public)
        return OwnModel(theta), Up(torch.softmax(scores / self.temperature, -1))

    def _slope(self, z: Tensor, target: Tensor) -> Tensor:
        return (torch.softmax(z / self.temperature, -1) - target) / self.temperature  # ∂KL/∂z

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        predictions, known = server.predictions.clone(), server.known.clone()
        predictions[ids], known[ids] = up.predictions, True
        members = known.nonzero().squeeze(1)
        coefficients = server.coefficients.clone()
        c = coefficients[members[:, None], members]
        s = predictions[members].flatten(1).to("cpu", torch.float64)
        coefficients[members[:, None], members] = self.next_coefficients(c / c.sum(1, keepdim=True), s)
        return Server(predictions, known, coefficients)

    def next_coefficients(self, c: Tensor, s: Tensor) -> Tensor:
        """[n, n] c after one step, of predictions s [n, U C] in float64."""
        n = len(c)
        slope = 2 / s.shape[1] * (c @ s - s) @ s.T + 2 * self.rho / n * (c - 1 / n)
        return torch.softmax(self.sharpness * (c - self.coefficient_lr * slope), 1)

    def figures(self, server: Server) -> dict[str, Any]:
        c = server.coefficients[server.known][:, server.known]
        return {"own_share": float(c.diagonal().mean()) if len(c) else 0.0}
