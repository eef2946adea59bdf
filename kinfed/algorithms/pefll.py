"""PeFLL: learning to learn. One network describes a client by its examples, another makes the client's model of that.

Scott, Zakerinia, Lampert: PeFLL: Personalized Federated Learning by Learning to Learn, ICLR 2024, Algorithm 1.

    min_{η_h, η_v}  (1/N) Σ_i f_i(h(v(S_i; η_v); η_h)),      v_i = v(S_i; η_v) = mean over examples of φ_v(x, y)
    client i:  θ_i = h(v_i; η_h),   Δθ_i = θ̃_i − θ_i after local training from θ_i
    server:    Δη_h = −(1/n) Σ J_hᵀ Δθ_i,   Δv_i = −J_vᵀ Δθ_i,   Δη_v = (1/n) Σ J_{η_v}ᵀ Δv_i,   then a step of Adam

h is a network of `hidden_layers` hidden layers of `hidden` units and a linear head to all T trainable parameters, as
pFedHN's. φ_v is the body of the model and a network of one hidden layer on its features and the label. Descriptors are
means over one batch in training and over all training examples for the personal model, h(v_i), which needs no
training: so do clients that join later, whose examples no one has seen.

What travels. In the paper h stays at the server, and a round is three exchanges: η_v for v_i, θ_i for Δθ_i, and Δv_i
for the client's share of Δη_v. Here it is one: h goes down with η_v, (hidden + 1) T numbers, and the client does the
rest; up come Δθ_i and v_i, of which the server makes Δη_h, and the share of Δη_v. What is computed is the same.

Decisions. The paper's networks for images take the label as further channels of the input; a body of the client's kind
suits all inputs. The head's bias starts at the common start (see pfedhn). Descriptors are not standardized (FL-bench
does that). The server's rate is for runs of dozens of rounds; that of released code, 2e-4, is for thousands. Running
statistics are those that clients send back, averaged; in φ_v they stay as they start. `max_gb` limits the head.

A descriptor is made of examples without noise: refused under differential privacy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch.optim.adam import adam

from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import mean_update
from kinfed.algorithms.common.hypernetwork import Sizes, head_start, trunk_outputs, trunk_sizes, trunk_start
from kinfed.algorithms.common.partial import SharesPart
from kinfed.author import (
    Batch,
    Cohort,
    ColumnSplit,
    ConfigError,
    Deltas,
    Nothing,
    Population,
    Range,
    Task,
    Tree,
    on_rows,
    option,
    rng,
    sgd,
)

BETAS = (0.9, 0.999)  # of Adam


@dataclass
class Networks(Tree):
    """Parameters of both, their moments, or their rows [n, ...] in a message."""

    body: Tensor  # [G] of φ_v
    top: Tensor  # [W] of φ_v, on features and label
    trunk: Tensor  # [R] of h
    head: Tensor  # [T, H]
    bias: Tensor  # [T]


@dataclass
class Server(Tree):
    eta: Networks
    mean: Networks  # Adam's moments
    square: Networks
    steps: Tensor  # []
    statistics: Tensor  # [P − T] running statistics, the mean of clients'; often none


@dataclass
class Down(Tree):
    eta: Networks  # [n, ...]
    statistics: Tensor  # [n, P − T]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] Δθ_i
    descriptor: Tensor  # [n, l] v_i
    body: Tensor  # [n, G] the client's share of Δη_v
    top: Tensor  # [n, W]


@dataclass(frozen=True)
class PeFLL(SharesPart[Server, Nothing, Down, Up]):
    server_lr: float = option(2e-3, "rate of the server's Adam", gt=0, tune=Range(2e-4, 2e-2))
    server_eps: float = option(1e-5, "ε of that Adam: gradients below it count less, so that their rounding does", gt=0)
    descriptor: int | None = option(None, "numbers per client's descriptor; 1 + N/4 by default", ge=1)
    hidden: int = option(100, "units of a hidden layer", ge=1)
    hidden_layers: int = option(3, "hidden layers of h after the first", ge=0)
    max_gb: float = option(
        4.0, "refuse a hypernetwork that takes more than this many gigabytes of the server's memory", gt=0
    )

    acts_at = "head"
    leaks = "a descriptor of its examples"
    single_updates = "goes through its networks by every client's own update and descriptor"

    def check(self, task: Task, population: Population) -> None:
        super().check(task, population)
        needed = 4 * 6 * (self.hidden + 1) * task.trainable.stop / 1e9
        if needed > self.max_gb:
            raise ConfigError(
                f"PeFLL's head for a model of {task.trainable.stop} parameters takes {needed:.1f} GB (weights and two "
                f"moments of {self.hidden} + 1 numbers per parameter, before and after a step), more than "
                f"max_gb={self.max_gb:g}; choose a smaller model, lower hidden, or raise max_gb"
            )

    def _trunk(self, descriptor: int) -> Sizes:
        return trunk_sizes(descriptor, self.hidden, self.hidden_layers)

    def _descriptor_of(self, trunk: Tensor) -> int:
        """l of a trunk [..., R]."""
        return trunk.shape[-1] // self.hidden - self.hidden_layers * (self.hidden + 1) - 1

    def _top(self, task: Task, descriptor: int) -> Sizes:
        return [(task.head.inputs + _label_width(task), self.hidden), (self.hidden, descriptor)]

    def init_server(self, task: Task, population: Population) -> Server:
        width, key = self.descriptor or 1 + population.num_clients // 4, population.key("pefll")
        model = task.init(population.seed)
        start, statistics = model[task.trainable].clone(), model[task.trainable.stop :].clone()
        eta = Networks(
            self.split(task).take_shared(task.init(population.seed, 1)).clone(),
            trunk_start(rng.fold(key, 0), self._top(task, width)).to(start),
            trunk_start(rng.fold(key, 1), self._trunk(width)).to(start),
            head_start(rng.fold(key, 2), start, self.hidden), start,
        )  # fmt: skip
        return Server(eta, eta.map(torch.zeros_like), eta.map(torch.zeros_like), torch.tensor(0.0), statistics)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.eta, server.statistics).map(lambda tensor: tensor.expand(len(ids), *tensor.shape))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        describer = self._describer(task, down)
        first = data.train.batches(self.training.with_steps(1), stream="descriptor")
        v = describer.means(first, len(data))
        theta = self._generated(down, v)
        delta = sgd(task, theta, data.train.batches(self.training)) - theta
        return client, Up(delta, v, *describer.slopes(first, self._through_trunk(task, down, v, delta)))

    def _describer(self, task: Task, down: Down) -> _Describer:
        eta, split = down.eta, self.split(task)
        head = split.take_own(torch.zeros(1, task.num_params, device=task.device))
        model = split.join(head.expand(len(eta.body), -1), eta.body)
        return _Describer(task, split, model, eta.top, self._top(task, self._descriptor_of(eta.trunk)))

    def _generated(self, down: Down, v: Tensor) -> Tensor:
        """θ [n, P] of descriptors [n, l]. One client at a time: a product of several rows rounds in another way."""
        sizes, eta = self._trunk(v.shape[1]), down.eta
        rows = [
            torch.addmv(eta.bias[i], eta.head[i], trunk_outputs(v[i : i + 1], eta.trunk[i], sizes)[0])
            for i in range(len(v))
        ]
        return torch.cat([torch.stack(rows), down.statistics], 1)

    def _through_trunk(self, task: Task, down: Down, v: Tensor, delta: Tensor) -> Tensor:
        """Δv [n, l]."""
        slopes: list[Tensor] = []
        sizes = self._trunk(v.shape[1])
        for i, row in enumerate(delta[:, task.trainable]):
            with torch.enable_grad():
                leaf = v[i : i + 1].detach().requires_grad_()
                f = trunk_outputs(leaf, down.eta.trunk[i], sizes)
            slopes += torch.autograd.grad(f, leaf, grad_outputs=-(row @ down.eta.head[i])[None])
        return torch.cat(slopes)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        statistics, changes = server.statistics, up.delta[:, len(server.eta.bias) :]
        if len(statistics):
            statistics = statistics + mean_update(changes, None)
        eta, mean, square = (part.map(torch.clone) for part in (server.eta, server.mean, server.square))
        steps = server.steps.clone()
        parameters, gradients, means, squares = (
            list(part.named().values()) for part in (eta, self.gradient(server.eta, up), mean, square)
        )
        adam(
            parameters, gradients, means, squares, [], [steps.clone() for _ in parameters], foreach=False,
            amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=self.server_lr, weight_decay=0.0, eps=self.server_eps,
            maximize=False,
        )  # fmt: skip
        return Server(eta, mean, square, steps + 1, statistics)

    def gradient(self, eta: Networks, up: Up) -> Networks:
        """The mean of clients' gradients, by what they sent."""
        moved, n = up.delta[:, : len(eta.bias)], len(up.delta)
        with torch.enable_grad():
            trunk = eta.trunk.clone().requires_grad_()
            f = trunk_outputs(up.descriptor, trunk, self._trunk(up.descriptor.shape[1]))
        (d_trunk,) = torch.autograd.grad(f, trunk, grad_outputs=-(moved @ eta.head) / n)
        return Networks(up.body.mean(0), up.top.mean(0), d_trunk, moved.T @ (f.detach() / -n), -moved.mean(0))

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return self._generated(down, self._describer(task, down).means(data.train.in_order(), len(data)))


def _label_width(task: Task) -> int:
    return task.head.outputs if task.classifies else task.objective.example_target.numel()


@dataclass
class _Describer:
    """φ_v of clients in a round, and its slopes."""

    task: Task
    split: ColumnSplit
    model: Tensor  # [n, P] the body of φ_v, with a head of zeros
    top: Tensor  # [n, W]
    sizes: Sizes

    def means(self, batches: Iterable[tuple[Tensor | slice, Batch]], n: int) -> Tensor:
        """v [n, l] over all examples of these batches; zeros without any."""
        total, count = self.model.new_zeros(n, self.sizes[-1][1]), self.model.new_zeros(n, 1)
        for rows, batch in batches:
            real = batch.weight > 0
            phi = self.task.features(self.model[rows], batch.x)
            total[rows] += self._sums(phi, batch.y, real, self.top[rows])
            count[rows] += real.sum(1, keepdim=True)
        return total / count.clamp_min(1)

    def _sums(self, phi: Tensor, y: Tensor, real: Tensor, top: Tensor) -> Tensor:
        """[m, l] of features [m, B, d_f], by client: padding would change how a product rounds."""
        label = one_hot(y, self.task.head.outputs) if self.task.classifies else y.reshape(*y.shape[:2], -1)
        inputs = torch.cat([phi, label.to(phi)], -1)
        return torch.stack([
            trunk_outputs(one[mask], row, self.sizes).sum(0) for one, mask, row in zip(inputs, real, top, strict=True)
        ])  # fmt: skip

    def slopes(self, batches: Iterable[tuple[Tensor | slice, Batch]], dv: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [n, G] and [n, W] of ⟨v, Δv⟩ in body and top, for Δv [n, l]."""
        body, top = torch.zeros_like(self.model), torch.zeros_like(self.top)

        def at_features(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
            real = batch.weight > 0
            share = dv[rows] / real.sum(1, keepdim=True)
            with torch.enable_grad():
                leaves = phi.detach().requires_grad_(), self.top[rows].detach().requires_grad_()
                total = (self._sums(leaves[0], batch.y, real, leaves[1]) * share).sum()
                dphi, top[rows] = torch.autograd.grad(total, leaves)
            return torch.zeros_like(z), dphi

        positions = torch.arange(len(dv))
        for rows, batch in batches:
            body[rows] = self.task.grad(self.model[rows], batch, on_rows(at_features, positions[rows]))
        return self.split.take_shared(body), top
