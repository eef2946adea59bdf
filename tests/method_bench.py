"""What tests need that follow a method step by step: small federations, gradients by plain autograd, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.algorithms.base import RoundInfo
from kinfed.core import rng
from kinfed.data import Federation, Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED, outcome
from kinfed.theory.gaussian import Case, GaussianTask, GaussianWorld, draw

SIZES = (2, 6, 4)
LR = 0.1
ALL = LocalTraining(lr=LR, batch=100, steps=1)  # every batch is all of a client's examples: gradients by hand
TWO_STEPS = LocalTraining(lr=LR, batch=100, steps=2)
WORKS = {
    "steps": LocalTraining(batch=5, steps=4),
    "epochs": LocalTraining(batch=3, steps=None, epochs=2),
    "momentum and decay": LocalTraining(batch=5, steps=4, momentum=0.9, weight_decay=0.01, lr_decay=0.9),
}


def linear() -> nn.Module:
    """15 parameters in one layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def deep() -> nn.Module:
    """Layers "1" (20 parameters), "3" (15) and "5" (12)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


@contextmanager
def by_hand(
    method: Any, *, sizes: tuple[int, ...] = SIZES, model: Callable[[], nn.Module] = linear, **schedule: float
) -> Iterator[Loop]:
    """A method at a few clients, before its first round."""
    with Bench(method, federation=tiny_federation(sizes), model=model).loop(Schedule(**schedule)) as loop:
        yield loop


@contextmanager
def quadratic(
    method: Any, *, s0: float = 1.0, start: float = 0.0, clients: int = 4, **schedule: float
) -> Iterator[Any]:
    """(loop, world): clients whose loss is (θ − z)²/(2 s), with exact gradients for full batches, in float64."""
    world: GaussianWorld = draw(Case(s0=s0, low=2, high=9, clients=clients, v=4.0), SEED)
    task = world.task(start, torch.float64)
    pool = LocalPool(method, task, world.federation, SEED, workers=1)
    try:
        yield Loop(method, task, pool, world.federation.population(SEED), Schedule(**schedule)), world
    finally:
        pool.close()


@contextmanager
def two_bowls(method: Any, *, start: float = 1.0, **schedule: float) -> Iterator[Loop]:
    """Clients with the losses θ²/2 and 3 (θ − 4)²/2 in float64, whose gradients are exact for batches of three or more;
    the mean of the two is least at 3."""
    owner = torch.tensor([0, 1, 1, 1, 0, 1])
    rows, tests = torch.arange(6), torch.arange(6) >= 4
    federation = Federation(
        Features(4.0 * owner[:, None].to(torch.float32)), torch.zeros(6, dtype=torch.int64), Problem.of_classes(1),
        train=Ragged.grouped(rows[~tests], owner[~tests], 2), val=Ragged.empty(2),
        test=Ragged.grouped(rows[tests], owner[tests], 2), names=["flat", "steep"],
    )  # fmt: skip
    task = GaussianTask(torch.tensor([1.0, 1 / 3], dtype=torch.float64), 1.0, start=start, dtype=torch.float64)
    pool = LocalPool(method, task, federation, SEED, workers=1)
    try:
        yield Loop(method, task, pool, federation.population(SEED), Schedule(**schedule))
    finally:
        pool.close()


def one_body(*, names: bool = False, inputs: bool = False, seed: int = 3) -> Federation:
    """30 clients with twelve training examples each, too few to learn alone which four of ten inputs matter. With
    `names`, clients call the four classes by names of their own; with `inputs`, they have the inputs in other
    places."""
    clients, count, width = 30, 30 * 22, 10
    x = rng.normal(rng.root(seed, "planted"), count * width).reshape(count, width).to(torch.float32)
    rows = torch.arange(count)
    owner, test = rows % clients, rows >= 12 * clients
    y = 2 * (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] - x[:, 3] > 0).long()
    if inputs:
        x = x.gather(1, (torch.arange(width) - owner[:, None]) % width)
    return Federation(
        Features(x), (y + owner) % 4 if names else y, Problem.of_classes(4),
        train=Ragged.grouped(rows[~test], owner[~test], clients), val=Ragged.empty(clients),
        test=Ragged.grouped(rows[test], owner[test], clients), names=[str(m) for m in range(clients)],
    )  # fmt: skip


def accuracy_on(federation: Federation, method: Any, rounds: int = 20) -> tuple[float, float | None]:
    """Of personal models and of the server's, on all test examples of `one_body`."""

    def body_and_head() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 4))

    with Bench(method, federation=federation, model=body_and_head).loop(chunk=None) as loop:
        for _ in range(rounds):
            loop.round()
        found = loop.evaluate()
    assert found.personal is not None
    personal, common = (
        None if score is None else float(score.correct.sum() / score.count.sum())
        for score in (found.personal, found.server_model)
    )
    assert personal is not None
    return personal, common


def gradient(loop: Loop, client: int, theta: Tensor) -> Tensor:
    """∇f_m(θ) of the mean cross-entropy on the client's training examples, by plain autograd."""
    task: Any = loop.task
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.gather(rows), loop.pool.federation.labels[rows]
    theta = theta.clone().requires_grad_()
    z = torch.func.functional_call(task.module, task.unflatten(theta), (x,))
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), theta)
    return g


def cut_gradient(
    loop: Loop, client: int, theta: Tensor, loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """[P] the gradient of loss(x, φ, z, y) on all training examples of a client, by autograd through a chain of layers
    that ends in its head."""
    task: Any = loop.task
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.gather(rows), loop.pool.federation.labels[rows]
    module = task.module_of(theta)
    phi = module[:-1](x)
    grads = torch.autograd.grad(loss(x, phi, module[-1](phi), y), list(module.parameters()))
    return torch.cat([g.reshape(-1) for g in grads])


def features(loop: Loop, theta: Tensor, x: Tensor) -> Tensor:
    """φ [B, d_f] of one model, a chain of layers."""
    task: Any = loop.task
    phi: Tensor = task.module_of(theta)[:-1](x).detach()
    return phi


def server(loop: Loop, name: str = "w") -> Tensor:
    return loop.server.named()[name].clone()


def state(loop: Loop, client: int, name: str) -> Tensor:
    return loop.pool.clients.take(torch.tensor([client])).named()[name][0].clone()


def models(loop: Loop) -> Tensor:
    """[K, P] personal models."""
    found = loop.evaluate(keep_models=True).models
    assert found is not None
    return found


def weighted(rows: list[Tensor], weight: tuple[int, ...] = SIZES) -> Tensor:
    """Σ p_m rows[m] with p_m = weight_m / Σ weight."""
    return torch.stack([w / sum(weight) * row for w, row in zip(weight, rows, strict=True)]).sum(0)


def mean(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).mean(0)


def close(found: Tensor, wanted: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=10 * within, atol=within, check_dtype=False)


def run(method: Any, rounds: int = 5, **schedule: float) -> dict[str, Tensor]:
    """All that some rounds on the tiny federation lead to, two of three clients at a time."""
    with Bench(method).loop(Schedule(**{"participation": 0.67, **schedule})) as loop:
        for _ in range(rounds):
            loop.round()
        return outcome(loop)


def info(number: int = 1, clients: int = 4, seed: int = 0) -> RoundInfo:
    """What the server's side is told about a round, for hooks that are called by hand."""
    return RoundInfo(number, Population(clients, seed))
