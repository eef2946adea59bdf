"""FedDBE: FedAvg that takes each client's own mean out of its features and keeps it in a private vector.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation Space,
NeurIPS 2023 (DBE on top of FedAvg).

    client m:  min over θ and z̄_m   CE(W (φ + z̄_m) + b, y) + κ R,   R = ‖r − z^g‖² / (2 d_f)
    r ← (1 − μ) r + μ (mean of φ over the batch), from 0 at the start of a round; z^g the mean feature of all clients

W (φ + z̄) + b = W φ + (b + W z̄): the personal model is the current w with that bias, a row like any other, so the
model's last layer needs one. κ = 0 with `personal_lr` 0 is FedAvg, bit for bit.

Decisions. A client's first round is FedAvg's, bit for bit, after which it reports the mean feature of its examples,
once; z^g is the mean, by examples, of those heard so far. (The paper asks all clients before the first round and throws
that training away.) z̄ starts at 0 and takes plain steps. R is a mean over features, so that κ means something else for
another width. With μ < 1 and few steps r is still near its start; μ = 1, the default, is the batch mean, as the authors
use it with their convolutional network (a widely used library has κ = 0, which leaves R out).

Not private: the mean feature leaves a client.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import Weights, example_counts, mean_update, personal_rate
from kinfed.algorithms.common.heads import required_body
from kinfed.algorithms.common.one_model import OneModel
from kinfed.author import ConfigError, Deltas, Head, Range, Task, Tree, counts_examples, each_step, option, sgd
from kinfed.data import Batch, Cohort, Population, Split


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    consensus: Tensor  # [d_f] z^g; zeros until a client has reported
    heard: Tensor  # [] float64: the examples that z^g is the mean of


@dataclass
class Client(Tree):
    z_bar: Tensor  # [n, d_f] never leaves the client
    seen: Tensor  # [n] bool: has reported its mean feature


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]
    consensus: Tensor  # [n, d_f]
    known: Tensor  # [n] bool: there is one


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]
    count: Tensor | None  # [n] examples; absent with equal weights
    feature: Tensor  # [n, d_f] the mean feature, in a client's first round; else zeros
    reported: Tensor = field(metadata=counts_examples())  # [n] the examples it is the mean of; else 0


@dataclass(frozen=True)
class Consensus:
    """κ R at the features; moves r."""

    r: Tensor  # [n, d_f] changed by every call
    consensus: Tensor  # [n, d_f] z^g
    kappa: float
    mu: float

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        weight = batch.weight[..., None]
        r = (1 - self.mu) * self.r[rows] + self.mu * (weight * phi).sum(1)
        self.r[rows] = r
        slope = self.kappa * self.mu * (r - self.consensus[rows]) / phi.shape[-1]  # κ ∂R/∂(mean φ)
        return None, weight * slope.unsqueeze(1)


def with_bias(head: Head, theta: Tensor, z_bar: Tensor) -> Tensor:
    """[n, P]: theta with the bias b + W z̄."""
    weight, bias = head.split(theta)
    assert bias is not None  # `check` refuses others
    return head.join(theta, weight, bias + torch.einsum("ncd,nd->nc", weight, z_bar))


@dataclass(frozen=True)
class FedDBE(OneModel[Server, Client, Down, Up]):
    kappa: float = option(
        50.0, "κ: how firmly mean features are held at the consensus; 0 leaves that out", ge=0, tune=Range(0.1, 100.0)
    )
    mu: float = option(1.0, "μ: share of the batch in the running mean of features", gt=0, le=1)
    personal_lr: float | None = option(None, "rate of z̄; the common lr by default", ge=0)
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"no momentum"})
    leaks = "the mean feature of its examples"
    single_updates = "also sends mean features, each once, which the server adds up over rounds"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Or a rate below lr_floor would be refused in the first round only.
        personal_rate(self.training, self.personal_lr, 1)

    def check(self, task: Task, population: Population) -> None:
        head = required_body("FedDBE", task)
        if head.dense.bias is None:
            raise ConfigError(
                f"FedDBE keeps a client's vector in the bias of the last layer, and {head.name!r} has none; build it "
                "with bias=True"
            )

    def init_server(self, task: Task, population: Population) -> Server:
        consensus = torch.zeros(task.head.inputs, device=task.device)
        return Server(task.init(population.seed), consensus, torch.zeros((), dtype=torch.float64))

    def init_client(self, task: Task, data: Cohort) -> Client:
        z_bar = torch.zeros(len(data), task.head.inputs, device=task.device)
        return Client(z_bar, torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        n = len(ids)
        known = (server.heard > 0).to(server.w.device).expand(n)
        return Down(server.w.expand(n, -1), server.consensus.expand(n, -1), known)

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        u, z_bar = down.w.clone(memory_format=torch.contiguous_format), client.z_bar.clone()
        feature, reported = torch.zeros_like(z_bar), torch.zeros(len(data), device=u.device)
        debiased = client.seen.to(u.device) & down.known  # a report may have been lost on its way
        first, later = (~debiased).nonzero().squeeze(1), debiased.nonzero().squeeze(1)
        if len(first):
            split = data.train.take(first)
            u[first] = sgd(task, down.w[first], split.batches(self.training))
            sums = task.class_sums(u[first], split)
            feature[first] = (sums.total.sum(1) / sums.count.sum(1, keepdim=True)).to(u.dtype)
            reported[first] = sums.count.sum(1).to(u.dtype)
        if len(later):
            split = data.train.take(later)
            u[later], z_bar[later] = self._train(task, down.w[later], z_bar[later], down.consensus[later], split)
        new = Client(z_bar, torch.ones_like(client.seen))
        return new, Up(u - down.w, example_counts(self.weights, data), feature, reported)

    def _train(self, task: Task, w: Tensor, z_bar: Tensor, consensus: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """(θ, z̄) after local training from w with both parts of DBE."""
        batches = split.batches(self.training)
        if not self.kappa and self.personal_lr == 0:
            return sgd(task, w, batches), z_bar
        own_rate = personal_rate(self.training, self.personal_lr, split.round)
        head, trainable = task.head, task.trainable
        theta, z_bar, r = w.clone(memory_format=torch.contiguous_format), z_bar.clone(), torch.zeros_like(z_bar)
        for batch, (x, z, mean, center) in each_step(batches, theta, z_bar, r, consensus):
            row = with_bias(head, x, z)
            feature_loss = Consensus(mean, center, self.kappa, self.mu) if self.kappa else None
            g = task.training_grad(row, batch, feature_loss).clone()
            x[:, trainable.stop :] = row[:, trainable.stop :]  # running statistics moved with the forward pass
            (weight, _), (g_weight, g_bias) = head.split(x), head.split(g)
            assert g_bias is not None  # `check` refuses others
            g_z = torch.einsum("nc,ncd->nd", g_bias, weight)  # ∂CE/∂z̄ = W' Σ_b δ_b
            g_weight += g_bias[..., None] * z[:, None]  # ∂CE/∂W = Σ_b δ_b (φ_b + z̄)'
            x[:, trainable] -= batches.lr * (g[:, trainable] + self.training.weight_decay * x[:, trainable])
            z -= own_rate * g_z
        return theta, z_bar

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        reported = up.reported.to(server.heard)
        heard = server.heard + reported.sum()
        sums = server.heard * server.consensus.to(server.heard) + reported @ up.feature.to(server.heard)
        consensus = (sums / heard).to(server.consensus) if float(heard) else server.consensus  # z^g
        return Server(server.w + mean_update(up.delta, up.count), consensus, heard)

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return with_bias(task.head, down.w, client.z_bar)
