"""GPFL: features pass a valve, set once for all clients alike and once for each client; embeddings of classes guide the
common ones, a head of one's own reads the personal ones.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and Personalized Feature Information
for Personalized Federated Learning, ICCV 2023.

    CoV(φ, k) = ReLU(φ (1 + γ(k)) + β(k))      the valve ν (`FeatureValve`)
    k_g = mean_c E_c,   k_m = Σ_c (share of class c) E_c      of the received embeddings, fixed in a round
    client m:  min over body, head_m, E and ν
               CE(head_m(CoV(φ, k_m))) + CE(cos(CoV(φ, k_g), E_c)) + λ ‖CoV(φ, k_g) − E^received_y‖ + (μ/2) |E, ν|²
    server:    body, E and ν by examples;   heads never leave

The third term is the norm of the whole batch as one matrix, not squared, so it grows as √B (released code). With λ =
0, `guide` off, μ = 0 and a valve that is held at γ = β = 0, on features that are not negative, it is FedPer.

Decisions. Conditions come from the received E, from the first round on; the released code has k = 0 in the first round
and then those of the client's own previous E, because it reads before it writes. E starts at normal draws, ν as torch
starts such layers. The cosine has no temperature (released code).

The personal model is the current body, valve and embeddings' condition with the client's head: an extended row. There
is no server model. Not private: the norm of a batch is no sum over its examples, and class shares set the valve.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kinfed.algorithms.base import AveragingAlgorithm
from kinfed.algorithms.common.heads import affine_norm, class_counts, linear_start
from kinfed.algorithms.common.partial import SharesPart
from kinfed.author import Batch, Cohort, Population, Range, Tree, Weights, cross_entropy, example_counts, option, rng
from kinfed.engine import ExtendedTask, Task, extended_rows, sgd

TINY = 1e-12  # under a root, whose slope at 0 is infinite


class FeatureValve:
    """Extension of a row: the valve's two networks, each LayerNorm(ReLU(Linear(d_f → d_f))), and the client's k."""

    mark = -2

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        size = valve_size(phi.shape[-1])
        out = torch.bmm(through_valve(phi, extra[:, size:], extra[:, :size]), weight.mT)
        return out if bias is None else out + bias.unsqueeze(1)


def valve_size(width: int) -> int:
    """R: the numbers of a valve on `width` features."""
    return 2 * (width * width + width) + 4 * width


def through_valve(phi: Tensor, condition: Tensor, valve: Tensor) -> Tensor:
    """CoV [n, B, d_f] of φ [n, B, d_f] and k [n, d_f]."""
    width = phi.shape[-1]
    gamma, beta = (_setting(condition, part, width).unsqueeze(1) for part in valve.chunk(2, 1))
    return torch.relu(phi * (1 + gamma) + beta)


def _setting(condition: Tensor, network: Tensor, width: int) -> Tensor:
    """[n, d_f] what one of the two networks makes of k."""
    square = width * width
    weight = network[:, :square].view(-1, width, width)
    hidden = torch.bmm(condition.unsqueeze(1), weight).squeeze(1) + network[:, square : square + width]
    return affine_norm(torch.relu(hidden).unsqueeze(1), network[:, square + width :]).squeeze(1)


@dataclass
class Server(Tree):
    shared: Tensor  # [G] the body
    valve: Tensor  # [R] ν
    embeddings: Tensor  # [C, d_f] E


@dataclass
class Client(Tree):
    head: Tensor  # [n, H] never leaves the client


Down = Server  # [n, G], [n, R] and [n, C, d_f]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, G]
    valve: Tensor  # [n, R] change of ν
    embeddings: Tensor  # [n, C, d_f] change of E
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class ValveLoss:
    """The loss of clients in a round; their extension holds ν and E."""

    received: Tensor  # [n, C, d_f] E as received
    own: Tensor  # [n, d_f] k_m
    lam: float
    mu: float
    guide: bool

    def __call__(
        self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor, batch: Batch, rows: Tensor
    ) -> Tensor:
        size = valve_size(phi.shape[-1])
        valve, embeddings = extra[:, :size], extra[:, size:].view_as(self.received[rows])
        z = torch.bmm(through_valve(phi, self.own[rows], valve), weight.mT)
        loss = cross_entropy(z if bias is None else z + bias.unsqueeze(1), batch)
        if self.guide or self.lam:
            common = through_valve(phi, self.received[rows].mean(1), valve)  # CoV(φ, k_g)
        if self.guide:
            loss = loss + cross_entropy(torch.bmm(normalize(common, dim=-1), normalize(embeddings, dim=-1).mT), batch)
        if self.lam:
            target = self.received[rows.to(batch.y.device)[:, None], batch.y]
            square = (common - target).square().sum(-1) * (batch.weight > 0)
            loss = loss + self.lam * (square.sum(1) + TINY).sqrt()
        return loss + self.mu / 2 * extra.square().sum(1) if self.mu else loss


@dataclass(frozen=True)
class GPFL(SharesPart[Server, Client, Down, Up], AveragingAlgorithm[Server, Client, Down, Up]):
    lam: float = option(
        0.01, "λ: how firmly common features are held at the embedding of their class", ge=0, tune=Range(1e-4, 0.1)
    )
    mu: float = option(0.1, "μ: weight decay of valve and embeddings", ge=0, tune=Range(1e-3, 1.0))
    guide: bool = option(True, "cross-entropy of cosines between common features and embeddings; off: without it")
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes"})
    fields = ("delta", "valve", "embeddings")
    acts_at = "body"
    leaks = "its shares of classes, which set the valve,"

    def init_server(self, task: Task, population: Population) -> Server:
        head, key = task.head, population.key("valve-start")
        width, C = head.inputs, head.outputs
        norm = torch.cat([torch.ones(width), torch.zeros(width)])
        networks = [torch.cat([linear_start(rng.fold(key, part), width, width), norm]) for part in (0, 1)]
        embeddings = rng.normal(rng.fold(key, 2), C * width).reshape(C, width)
        body = self.split(task).take_shared(task.init(population.seed)).clone()
        return Server(body, torch.cat(networks).to(task.device), embeddings.to(body))

    def init_client(self, task: Task, data: Cohort) -> Client:
        head = self.split(task).take_own(task.init(data.seed))
        return Client(head.expand(len(data), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        split, P, R = self.split(task), task.num_params, down.valve.shape[1]
        extra = torch.cat([down.valve, down.embeddings.flatten(1)], 1)
        loss = ValveLoss(down.embeddings, self._condition(task, down, data), self.lam, self.mu, self.guide)
        own = ExtendedTask(task, FeatureValve(), extra.shape[1], loss)
        rows = extended_rows(split.join(client.head, down.shared), extra, FeatureValve())
        theta = sgd(own, rows, data.train.batches(self.training), mask=own.trained_columns())
        moved = theta[:, P:-1] - extra
        delta, embeddings = split.take_shared(theta[:, :P]) - down.shared, moved[:, R:].reshape(down.embeddings.shape)
        up = Up(delta, moved[:, :R], embeddings, example_counts(self.weights, data))
        return Client(split.take_own(theta[:, :P])), up

    def _condition(self, task: Task, down: Down, data: Cohort) -> Tensor:
        """k_m [n, d_f]."""
        count = class_counts(data.train, task.head.outputs).to(down.embeddings)
        share = count / count.sum(1, keepdim=True).clamp_min(1)
        return torch.einsum("nc,ncd->nd", share, down.embeddings)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        model = self.split(task).join(client.head, down.shared)
        return extended_rows(model, torch.cat([down.valve, self._condition(task, down, data)], 1), FeatureValve())
