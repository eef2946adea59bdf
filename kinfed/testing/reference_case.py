"""What a reference is given, and how one is registered: an independent implementation of a method, in plain torch.

A reference is written from the paper, one client after the other, on full batches, with gradients by autograd through a
network written out. It shares no code with the method: what both are given are the examples, the start, and who is
called in each round. After every round it yields what the method must have by then, under the names of the method's
state: "server w", or "client theta" as {client: tensor}; and "numbers", which a called client was sent and sent back.

    @reference("mine", rate=0.5)                     # options of the method
    def mine(case, rate):
        w = case.start
        for active in case.rounds:
            w = w + rate * (case.mean({m: case.train(m, w) for m in active}) - w)
            yield {"server w": w, "numbers": (case.P, case.P + 1)}
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LR, STEPS = 0.1, 2

Stage = dict[str, Any]  # after a round: tensors of the server, {client: tensor} of clients, and "numbers"
Loss = Callable[[Tensor], Tensor]  # of a flat model [P]


def network() -> nn.Module:
    """4 inputs, 4 and 3 units, 3 classes: 20 + 15 + 12 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


@dataclass(frozen=True)
class ReferenceCase:
    """All that a reference is given."""

    x: list[Tensor]  # of every client, [N_m, 4]
    y: list[Tensor]  # [N_m]
    start: Tensor  # [P]
    rounds: list[list[int]]  # the clients called in each
    public: tuple[Tensor, Tensor]  # x and y of examples that all know
    server: dict[str, Tensor]  # the state of the server before the first round, for what methods draw there
    client: dict[str, Tensor]  # the state of a client before its first

    P, body, lr, steps = 47, slice(0, 35), LR, STEPS
    head = slice(35, 47)  # weights [3, 3] before biases

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ theta[:16].view(4, 4).T + theta[16:20])
        return torch.tanh(hidden @ theta[20:32].view(3, 4).T + theta[32:35])

    def outputs(self, theta: Tensor, phi: Tensor) -> Tensor:
        """Logits of features φ by the model's head."""
        return phi @ theta[35:44].view(3, 3).T + theta[44:47]

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.outputs(theta, self.features(theta, x))

    def loss(self, m: int) -> Loss:
        """f_m: the mean cross-entropy on a client's examples."""
        return lambda theta: cross_entropy(self.logits(theta, self.x[m]), self.y[m])

    def train(
        self, m: int, theta: Tensor, plus: Loss | None = None, *, instead: Loss | None = None, only: slice | None = None
    ) -> Tensor:
        """`steps` steps on f_m, plus a term or with another loss in its place, perhaps of some columns only."""
        own = instead or self.loss(m)
        for _ in range(self.steps):
            theta = descend(own if plus is None else total(own, plus), theta, self.lr, only)
        return theta

    def mean(self, rows: Mapping[int, Tensor], equal: bool = False) -> Tensor:
        """The mean of what clients sent, by their numbers of examples."""
        share = {m: 1 if equal else len(self.y[m]) for m in rows}
        return torch.stack([share[m] * row for m, row in rows.items()]).sum(0) / sum(share.values())

    def class_means(self, m: int, rows: Tensor) -> dict[int, Tensor]:
        """{class: mean of the client's rows of it}."""
        return {c: rows[self.y[m] == c].mean(0) for c in sorted(set(self.y[m].tolist()))}


def near(center: Tensor, strength: float) -> Loss:
    """A proximal term, strength/2 |θ − center|²."""
    return lambda theta: strength / 2 * (theta - center).square().sum()


def total(*losses: Loss) -> Loss:
    return lambda theta: torch.stack([loss(theta) for loss in losses]).sum()


def slopes(loss: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    return torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)


def descend(loss: Loss, theta: Tensor, lr: float, only: slice | None = None) -> Tensor:
    """θ − lr ∇loss, perhaps of some columns only."""
    (g,) = slopes(loss, theta)
    if only is None:
        return theta - lr * g
    moved = theta.clone()
    moved[only] -= lr * g[only]
    return moved


Reference = Callable[..., Iterator[Stage]]
REFERENCES: dict[str, tuple[Reference, dict[str, Any]]] = {}


def reference(name: str, **options: Any) -> Callable[[Reference], Reference]:
    """Register a reference for a method with these options, which it is given, too."""

    def register(function: Reference) -> Reference:
        REFERENCES[name] = function, options
        return function

    return register
