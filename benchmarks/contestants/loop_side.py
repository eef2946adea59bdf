"""The yardstick: every method as a careful user of PyTorch writes it, one client after the other.

Clients begin at copies of flat lists of tensors, gradients come from torch.autograd, and steps are torch._foreach
operations over all layers: what torch.optim does inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_training import batches, network
from work import APFL_ALPHA, DITTO_LAM, FEDPROX_MU, PFEDME_LAM, PFEDME_STEPS, Images, Side, Work, versions_of

Model = list[Tensor]  # values of all parameters
Gradients = Sequence[Tensor]


class LoopSide(Side):
    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        torch.set_num_threads(cores)
        torch.manual_seed(0)
        self._work = work
        self._x, self._test = (torch.from_numpy(x) for x in images.standardized())
        self._y, self._test_y = torch.from_numpy(images.y), torch.from_numpy(images.test_y)
        self._offsets = images.offsets.tolist()
        self._net, self._criterion = network(work), nn.CrossEntropyLoss()
        self._own = list(self._net.parameters())  # in which all clients compute
        self._statistics = [b for b in self._net.buffers() if b.is_floating_point()]  # BatchNorm's: averaged, too
        self._w = [value.detach().clone() for value in (*self._own, *self._statistics)]
        self._states: dict[int, Any] = {}  # of clients that have any
        self._control = [torch.zeros_like(p) for p in self._w]  # SCAFFOLD's, and what it is in the next round
        self._next_control = [torch.zeros_like(p) for p in self._w]
        self._equal = method in ("scaffold", "pfedme", "perfedavg", "apfl", "fedrep")  # weights of the average
        self._train: Callable[[int], Model] = getattr(self, f"_{method}")
        self._draw = torch.Generator().manual_seed(0)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self._round()

    def _round(self) -> None:
        active = torch.randperm(self._work.clients, generator=self._draw)[: self._work.active].tolist()
        weights = [1.0 if self._equal else float(self._offsets[k + 1] - self._offsets[k]) for k in active]
        mean = [torch.zeros_like(p) for p in self._w]
        for client, weight in zip(active, weights, strict=True):
            torch._foreach_add_(mean, self._train(client), alpha=weight / sum(weights))
        self._w = mean
        torch._foreach_copy_(self._control, self._next_control)

    # ---- what methods are made of ----

    def _batches(self, client: int) -> Any:
        begin, end = self._offsets[client], self._offsets[client + 1]
        x, y = self._x[begin:end], self._y[begin:end]
        for index in batches(end - begin, self._work):
            yield x[index], y[index]

    def _gradients(self, model: Model, batch: tuple[Tensor, Tensor], of: slice = slice(None)) -> Gradients:
        """At `model`, of some of its parameters; its running statistics move."""
        self._load(model)
        loss = self._criterion(self._net(batch[0]), batch[1])
        if self._statistics:
            torch._foreach_copy_(model[len(self._own) :], self._statistics)
        return torch.autograd.grad(loss, self._own[of])

    def _load(self, model: Model) -> None:
        torch._foreach_copy_([value.detach() for value in (*self._own, *self._statistics)], model)

    def _sgd(self, client: int, model: Model, more: Callable[[Model, Gradients], None] | None = None) -> Model:
        """Local steps from `model`, which stays as it is; `more` adds to gradients in place."""
        model = [p.clone() for p in model]
        for batch in self._batches(client):
            gradients = self._gradients(model, batch)
            if more is not None:
                more(model, gradients)
            torch._foreach_add_(model[: len(self._own)], gradients, alpha=-self._work.lr)
        return model

    def _pull(self, lam: float, center: Model) -> Callable[[Model, Gradients], None]:
        def add(model: Model, gradients: Gradients) -> None:
            torch._foreach_add_(gradients, torch._foreach_sub(model, center), alpha=lam)

        return add

    # ---- methods: what a client sends ----

    def _fedavg(self, client: int) -> Model:
        return self._sgd(client, self._w)

    def _fedprox(self, client: int) -> Model:
        return self._sgd(client, self._w, self._pull(FEDPROX_MU, self._w))

    def _ditto(self, client: int) -> Model:
        own = self._states.get(client, self._w)
        self._states[client] = self._sgd(client, own, self._pull(DITTO_LAM, self._w))
        return self._sgd(client, self._w)

    def _scaffold(self, client: int) -> Model:
        control = self._states.get(client) or [torch.zeros_like(p) for p in self._w]
        drift, steps = torch._foreach_sub(self._control, control), 0

        def correct(model: Model, gradients: Gradients) -> None:
            nonlocal steps
            steps += 1
            torch._foreach_add_(gradients, drift)

        y = self._sgd(client, self._w, correct)
        change = torch._foreach_div(torch._foreach_sub(self._w, y), steps * self._work.lr)
        torch._foreach_sub_(change, self._control)
        self._states[client] = torch._foreach_add(control, change)
        torch._foreach_add_(self._next_control, change, alpha=1 / self._work.clients)
        return y

    def _apfl(self, client: int) -> Model:
        """α moves on the first batch of a round."""
        own, alpha = self._states.get(client, (self._w, APFL_ALPHA))
        own, w, eta = [p.clone() for p in own], [p.clone() for p in self._w], self._work.lr
        for step, batch in enumerate(self._batches(client)):
            gradients = self._gradients(torch._foreach_lerp(w, own, alpha), batch)
            rate = eta * alpha
            if step == 0:
                apart = torch._foreach_mul(gradients, torch._foreach_sub(own, w))
                alpha = min(max(alpha - eta * float(sum(p.sum() for p in apart)), 0.0), 1.0)
            torch._foreach_add_(own, gradients, alpha=-rate)
            torch._foreach_add_(w, self._gradients(w, batch), alpha=-eta)
        self._states[client] = own, alpha
        return w

    def _pfedme(self, client: int) -> Model:
        w, theta = [p.clone() for p in self._w], [p.clone() for p in self._w]
        for batch in self._batches(client):
            pull = self._pull(PFEDME_LAM, w)
            for _ in range(PFEDME_STEPS):
                gradients = self._gradients(theta, batch)
                pull(theta, gradients)
                torch._foreach_add_(theta, gradients, alpha=-self._work.lr)
            torch._foreach_lerp_(w, theta, self._work.lr * PFEDME_LAM)
        self._states[client] = theta
        return w

    def _perfedavg(self, client: int) -> Model:
        """First order."""
        w = [p.clone() for p in self._w]
        for batch, other in zip(self._batches(client), self._batches(client), strict=True):
            ahead = torch._foreach_add(w, self._gradients(w, batch), alpha=-self._work.lr)
            torch._foreach_add_(w, self._gradients(ahead, other), alpha=-self._work.lr)
        return w

    def _fedrep(self, client: int) -> Model:
        """The head is the last layer, its weights and biases; as many steps as on all the rest."""
        body, head = slice(None, -2), slice(-2, None)
        model = [p.clone() for p in self._w]
        if client in self._states:
            model[head] = self._states[client]
        for part in (head, body):
            for batch in self._batches(client):
                gradients = self._gradients(model, batch, part)
                torch._foreach_add_(model[part], gradients, alpha=-self._work.lr)
        self._states[client] = model[head]
        return model

    def accuracy(self) -> float:
        self._load(self._w)
        self._net.eval()
        with torch.no_grad():
            right = [
                self._net(x).argmax(1) == y
                for x, y in zip(self._test.split(1000), self._test_y.split(1000), strict=True)
            ]
        self._net.train()
        return float(torch.cat(right).float().mean())

    def versions(self) -> dict[str, Any]:
        return versions_of("torch")
