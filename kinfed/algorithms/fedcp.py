"""FedCP: a learned gate shares out every feature between a personal head and the common one.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy, KDD 2023.

    z = W_p (φ r) + b_p + W_g (φ s) + b_g,   (r, s) = Gumbel-softmax over the pair of the gate ψ(φ v)
        (`FeatureGate`), v = Σ_c W_p[c] of length 1, from the head as the round begins
    client m:  min over body, head_p and ψ   CE(z, y) + λ MMD²(φ, φ of the received body),   head_g fixed
    sends:     body, ψ, and (head_p + head_g)/2 as its share in the new head_g;   the server averages all by examples

MMD² is Σ_a mean over pairs of k(x, x') + k(y, y') − 2 k(x, y), k = exp(−|·|²/(2a)), a = 10, 15, 20, 50 (released
code). In the first step of a round it and its gradient are 0, up to rounding. λ = 0 leaves it out. With the gate held
at r = 1 (a bias of its network that is large enough) head_p learns as FedPer's.

Decisions. The noise of the gate is a draw of (seed, round, client, step, example, feature): of the pair only its
difference matters, a logistic draw. Evaluation is without noise (released code draws there, too, so that its accuracies
are random). The features of the received body are those of evaluation. A client that has not trained yet has the
received head_g as its head_p. Biases of both heads count, as in the released code, so z at equal heads is Wφ + 2b.

The personal model is the current body, ψ and head_g with the client's head_p: an extended row. The server's model is
(body, head_g). The upload carries half of the personal head. Not private: MMD compares the examples of a batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kinfed.algorithms.base import AveragingAlgorithm
from kinfed.algorithms.common.averaging import Weights, example_counts
from kinfed.algorithms.common.heads import affine_norm, linear_start
from kinfed.author import Batch, Cohort, ColumnSplit, Population, Range, ServerModels, Tree, cross_entropy, option, rng
from kinfed.engine import ExtendedTask, Head, Task, extended_rows, sgd

KERNELS = (10.0, 15.0, 20.0, 50.0)  # a
LEAST = 1e-9  # of a uniform draw and its complement, whose logit is taken


class FeatureGate:
    """Extension of a row, whose head is the personal one: the common head, then the gate's network ψ, with
    a = ReLU(LayerNorm(Linear(d_f → 2 d_f))) for the pair."""

    mark = -1

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        common, policy = split_gate(extra, weight, bias)
        share = torch.sigmoid(gate_logits(phi * context(weight).unsqueeze(1), policy))  # without noise
        return gated_logits(phi, share, weight, bias, common)


def policy_size(width: int) -> int:
    """R: the numbers of a gate on `width` features."""
    return 2 * width * (width + 1) + 4 * width


def split_gate(extra: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The common head [n, H], W before b, and the gate's network [n, R]."""
    common = weight[0].numel() + (0 if bias is None else bias.shape[1])
    return extra[:, :common], extra[:, common:]


def context(weight: Tensor) -> Tensor:
    """v [n, d_f] of heads W [n, C, d_f]."""
    return normalize(weight.sum(1), dim=-1)


def gate_logits(phi: Tensor, policy: Tensor) -> Tensor:
    """[n, B, d_f]: a of the personal part minus a of the common one; r is their sigmoid."""
    width = phi.shape[-1]
    square = 2 * width * width
    bias, weight = policy[:, None, square : square + 2 * width], policy[:, :square].view(-1, width, 2 * width)
    hidden = torch.baddbmm(bias, phi, weight)
    own, common = torch.relu(affine_norm(hidden, policy[:, square + 2 * width :])).chunk(2, -1)
    return own - common


def gated_logits(phi: Tensor, share: Tensor, weight: Tensor, bias: Tensor | None, common: Tensor) -> Tensor:
    """z [n, B, C] for the personal share r [n, B, d_f] of each feature."""
    common_weight = common[:, : weight[0].numel()].view_as(weight)
    z = torch.bmm(phi * share, weight.mT) + torch.bmm(phi * (1 - share), common_weight.mT)
    return z if bias is None else z + (bias + common[:, weight[0].numel() :]).unsqueeze(1)


@dataclass
class Server(Tree):
    w: Tensor  # [P] body and head_g
    policy: Tensor  # [R] ψ


@dataclass
class Client(Tree):
    head: Tensor  # [n, H] head_p
    seen: Tensor  # [n] bool: has trained


Down = Server  # [n, P] and [n, R]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] of the body, and (head_p − head_g)/2
    policy: Tensor  # [n, R] the change of ψ
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class GatedLoss:
    """CE + λ MMD² of clients in a round."""

    task: Task
    received: Tensor  # [n, P] body and head_g
    context: Tensor  # [n, d_f] v
    lam: float
    tau: float

    def __call__(
        self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor, batch: Batch, rows: Tensor
    ) -> Tensor:
        common, policy = split_gate(extra, weight, bias)
        noise = gate_noise(batch, phi.shape[-1]).to(phi)
        gate = gate_logits(phi * self.context[rows].unsqueeze(1), policy)
        z = gated_logits(phi, torch.sigmoid((gate + noise) / self.tau), weight, bias, common)
        loss = cross_entropy(z, batch)
        if not self.lam:
            return loss
        before = self.task.features(self.received[rows], batch.x)
        return loss + self.lam * mean_discrepancy(phi, before, batch.weight)


def gate_noise(batch: Batch, width: int) -> Tensor:
    """[n, B, d_f] the difference of two Gumbel draws for every example and feature."""
    key = rng.fold(rng.root(batch.seed, "gate"), batch.round, batch.step, batch.ids)
    u = rng.uniform(key, batch.y.shape[1] * width).reshape(len(batch), -1, width)
    return torch.logit(u, LEAST)


def mean_discrepancy(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """[n] MMD² of x and y [n, B, d] with weights [n, B] that sum to 1."""
    pairs = weight.unsqueeze(1) * weight.unsqueeze(2)

    def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
        square = a.square().sum(-1).unsqueeze(2) + b.square().sum(-1).unsqueeze(1) - 2 * torch.bmm(a, b.mT)
        kernels = torch.stack([torch.exp(-square / (2 * scale)) for scale in KERNELS]).sum(0)
        return (pairs * kernels).sum((1, 2))

    return mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)


@dataclass(frozen=True)
class FedCP(AveragingAlgorithm[Server, Client, Down, Up]):
    lam: float = option(
        5.0, "λ: how firmly features are held at those of the received body; 0: not", ge=0, tune=Range(0.1, 10.0)
    )
    tau: float = option(1.0, "τ: temperature of the gate in training", gt=0)
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes", "draws by client"})
    fields = ("delta", "policy")
    acts_at = "body"
    leaks = "how the examples of a batch lie to each other, in its loss,"

    def init_server(self, task: Task, population: Population) -> Server:
        width = task.head.inputs
        network = linear_start(population.key("gate-start"), width, 2 * width)
        norm = torch.cat([torch.ones(2 * width), torch.zeros(2 * width)])
        return Server(task.init(population.seed), torch.cat([network, norm]).to(task.device))

    def init_client(self, task: Task, data: Cohort) -> Client:
        head = _split(task.head).take_own(task.init(data.seed))
        return Client(head.expand(len(data), -1), torch.zeros(len(data), dtype=torch.bool))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        split, rows = _split(task.head), self._rows(task, client, down)
        P, H = task.num_params, int(task.head.mask.sum())
        v = context(task.head.split(rows[:, :P])[0])
        own = ExtendedTask(task, FeatureGate(), rows.shape[1] - P - 1, GatedLoss(task, down.w, v, self.lam, self.tau))
        mask = own.trained_columns()
        mask[P : P + H] = False  # head_g
        theta = sgd(own, rows, data.train.batches(self.training), mask=mask)
        head = split.take_own(theta[:, :P])
        delta = theta[:, :P] - down.w
        delta[:, task.head.mask.to(delta.device)] *= 0.5  # (head_p + head_g)/2 − head_g
        up = Up(delta, theta[:, P + H : -1] - down.policy, example_counts(self.weights, data))
        return Client(head, torch.ones_like(client.seen)), up

    def _rows(self, task: Task, client: Client, down: Down) -> Tensor:
        """[n, P + H + R + 1] body, head_p, head_g and ψ."""
        split = _split(task.head)
        common = split.take_own(down.w)
        head = torch.where(client.seen[:, None].to(common.device), client.head, common)
        # The extension has W before b, wherever they lie in a row.
        weight, bias = task.head.split(down.w)
        parts = [weight.flatten(1)] if bias is None else [weight.flatten(1), bias]
        model = split.join(head, split.take_shared(down.w))
        return extended_rows(model, torch.cat([*parts, down.policy], 1), FeatureGate())

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._rows(task, client, down)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(server.w[None])


def _split(head: Head) -> ColumnSplit:
    return ColumnSplit.from_mask(head.mask)
