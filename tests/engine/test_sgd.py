"""The local loop against textbooks: closed forms on quadratics, torch.optim on modules, each client by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import MakeSplit
from kinfed.data.examples.batches import Batch, Batches, LocalTraining, Split
from kinfed.data.examples.features import Features
from kinfed.data.federations.federation import Federation
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.task_factory import ModuleTask, Task, make_task
from kinfed.engine.training.sgd import each_step, sgd


class Quadratic(Task):
    """f(theta) = 1/2 sum_b weight_b |theta - x_b|^2: the gradient is theta minus the batch mean."""

    def __init__(self, size: int) -> None:
        self.num_params = size
        self.slots = (ParameterSlot("theta", (size,), 0, size),)

    def init(self, seed: int, number: int = 0) -> Tensor:
        return torch.zeros(self.num_params)

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        return theta - (batch.weight[..., None] * batch.x).sum(1)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class Bowl(Quadratic):
    """f(theta) = 1/2 |theta|^2, whose gradient is the very tensor it was asked at."""

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        return theta


def random_rows(n: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def part_with_means(make_split: MakeSplit, sizes: Sequence[int]) -> tuple[Split, Tensor]:
    """Vectors of two equal numbers, scaled to around one; and every client's mean."""
    part = make_split(sizes, shape=(2,))
    part.features.raw /= 10
    means = [
        part.features.raw[part.rows[int(a) : int(a + c)]].mean(0) for a, c in zip(part.start, part.count, strict=True)
    ]
    return part, torch.stack(means)


# --- closed forms


def test_full_batches_follow_the_geometric_series(make_split: MakeSplit) -> None:
    """theta_k - c = (1 - lr)^k (theta_0 - c) for the mean c of a client's examples."""
    part, means = part_with_means(make_split, [3, 1, 7])
    theta = random_rows(3, 2)
    trained = sgd(Quadratic(2), theta, part.batches(LocalTraining(lr=0.2, batch=99, steps=6)))
    torch.testing.assert_close(trained, means + 0.8**6 * (theta - means))


@pytest.mark.parametrize("lam", [0.5, torch.tensor([0.0, 0.5, 3.0])])
def test_a_pull_moves_the_fixed_point(make_split: MakeSplit, lam: float | Tensor) -> None:
    """The minimum of f + lam/2 |theta - center|^2 is (c + lam center) / (1 + lam), reached at rate 1 - lr (1 + lam)."""
    part, means = part_with_means(make_split, [3, 1, 7])
    theta, center = random_rows(3, 2), random_rows(3, 2, 1)
    trained = sgd(Quadratic(2), theta, part.batches(LocalTraining(lr=0.2, batch=99, steps=6)), proximal=(lam, center))
    strength = torch.as_tensor(lam).expand(3)[:, None]
    fixed = (means + strength * center) / (1 + strength)
    torch.testing.assert_close(trained, fixed + (1 - 0.2 * (1 + strength)) ** 6 * (theta - fixed))


def test_a_step_by_hand(make_split: MakeSplit) -> None:
    """One client with the examples 0 and 0.1; momentum 0.5, weight decay 0.1, lr 1, from theta = 1:
    g1 = (1 - 0.05) + 0.1 = 1.05, v1 = 1.05, theta1 = -0.05
    g2 = (-0.05 - 0.05) - 0.005 = -0.105, v2 = 0.525 - 0.105 = 0.42, theta2 = -0.47"""
    part, _ = part_with_means(make_split, [2])
    training = LocalTraining(lr=1.0, batch=2, steps=2, momentum=0.5, weight_decay=0.1)
    mask = torch.tensor([True, False])
    trained = sgd(Quadratic(2), torch.ones(1, 2), part.batches(training), mask=mask)
    assert trained[0].tolist() == pytest.approx([-0.47, 1.0], abs=1e-6)


@pytest.mark.parametrize("lam", [None, 1.0])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.5}, {"momentum": 0.5}])
def test_a_gradient_that_is_the_parameters_themselves(
    make_split: MakeSplit, options: dict[str, float], lam: float | None
) -> None:
    part = make_split([4], shape=(2,))
    theta, center = torch.full((1, 2), 2.0), torch.ones(1, 2)
    proximal = None if lam is None else (lam, center)
    trained = sgd(
        Bowl(2), theta, part.batches(LocalTraining(lr=0.1, steps=1, **options)), proximal=proximal, mask=torch.ones(2)
    )
    wanted = 2 - 0.1 * (2 + (lam or 0.0) * (2 - 1) + options.get("weight_decay", 0.0) * 2)
    torch.testing.assert_close(trained, torch.full((1, 2), wanted))


def test_the_rate_is_that_of_the_round_unless_given(make_split: MakeSplit) -> None:
    part = make_split([4], shape=(2,), round=3)
    training = LocalTraining(lr=0.4, lr_decay=0.5, steps=1, batch=4)
    step = Quadratic(2).grad(torch.zeros(1, 2), next(iter(part.batches(training)))[1])
    torch.testing.assert_close(sgd(Quadratic(2), torch.zeros(1, 2), part.batches(training)), -0.1 * step)
    torch.testing.assert_close(sgd(Quadratic(2), torch.zeros(1, 2), part.batches(training), lr=0.3), -0.3 * step)


# --- torch.optim


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "both": {"momentum": 0.5, "weight_decay": 0.1},
}
# (options, a switch, masked): all without a mask, which chooses between two loops; masks, which always take the plain
# one, with no option and with all.
CASES = [
    *((options, switch, False) for options in OPTIONS for switch in (False, True)),
    ("plain", False, True),
    ("both", True, True),
]


def textbook(
    task: ModuleTask,
    row: Tensor,
    batches: Batches,
    train: Sequence[str] = ("0.weight", "0.bias", "2.weight", "2.bias"),
    proximal: tuple[float, Tensor] | None = None,
    drift: Tensor | None = None,
) -> Tensor:
    """One client, one module, one optimizer."""
    module = task.module_of(row)
    training = batches.training
    named = dict(module.named_parameters())
    optimizer = torch.optim.SGD(
        [named[name] for name in train], lr=batches.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    for _, batch in batches:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(module(batch.x[0]), batch.y[0], reduction="none")
        objective = (losses * batch.weight[0]).sum()
        now = torch.cat([p.reshape(-1) for p in module.parameters()])
        if proximal is not None:
            objective = objective + proximal[0] / 2 * (now - proximal[1]).square().sum()
        if drift is not None:
            objective = objective + now @ drift
        objective.backward()
        optimizer.step()
    return task.flatten(named)


@pytest.mark.parametrize("path", ["stacked", "rows", "vmap"])
@pytest.mark.parametrize(("options", "by_epochs", "masked"), CASES)
def test_training_is_that_of_torch_optim_client_by_client(
    federation: Federation, path: str, options: str, by_epochs: bool, masked: bool
) -> None:
    """Epochs give these clients unequal numbers of steps, neither rising nor falling."""
    task = make_task(net, backend=path)
    training = LocalTraining(
        lr=0.1, batch=4, **({"steps": None, "epochs": 2} if by_epochs else {"steps": 6}), **OPTIONS[options]
    )
    data = federation.cohort(torch.arange(len(federation)), 0, 1).train
    theta = torch.stack([task.init(0, number) for number in range(len(federation))])
    trained = sgd(task, theta, data.batches(training), mask=task.layer_mask(("2",)) if masked else None)
    names = ("2.weight", "2.bias") if masked else ("0.weight", "0.bias", "2.weight", "2.bias")
    for k in range(len(federation)):
        alone = textbook(task, theta[k], data.take(slice(k, k + 1)).batches(training), names)
        torch.testing.assert_close(trained[k], alone, rtol=1e-4, atol=1e-5)
    if masked:
        assert torch.equal(trained[:, : 5 * 4 + 4], theta[:, : 5 * 4 + 4])


@pytest.mark.parametrize("path", ["stacked", "rows", "vmap"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pull_is_the_gradient_of_its_penalty(federation: Federation, path: str, options: str) -> None:
    task = make_task(net, backend=path)
    training = LocalTraining(lr=0.1, batch=4, steps=None, epochs=1, **OPTIONS[options])
    data = federation.cohort(torch.arange(len(federation)), 0, 1).train
    theta = task.init(0).expand(len(federation), -1)
    center = torch.stack([task.init(1, number) for number in range(len(federation))])
    lam = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
    trained = sgd(task, theta, data.batches(training), proximal=(lam, center))
    for k in range(len(federation)):
        alone = data.take(slice(k, k + 1)).batches(training)
        wanted = textbook(task, theta[k], alone, proximal=(float(lam[k]), center[k]))
        torch.testing.assert_close(trained[k], wanted, rtol=1e-4, atol=1e-5)


# --- drift


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, (1, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(1, 4, batch_first=True), LastOutput(), nn.Linear(4, 3))


def wide() -> nn.Module:
    """Its first layer is transposed in memory while it trains."""
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))


BACKENDS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "dense": (net, "stacked", (5,)),
    "transposed": (wide, "stacked", (5,)),
    "compiled": (net, "fused", (5,)),
    "recurrent": (recurrent, "stacked", (5, 1)),
    "rows by autograd": (net, "rows", (5,)),
    "rows by hand": (convolution, "rows", (1, 1, 5)),
    "vmap": (net, "vmap", (5,)),
}


def task_and_data(kind: str, federation: Federation) -> tuple[ModuleTask, Split]:
    """The five features of an example as a vector, a sequence or an image."""
    build, backend, shape = BACKENDS[kind]
    raw = federation.features.gather(torch.arange(len(federation.features))).reshape(-1, *shape)
    shaped = replace(federation, features=Features(raw))
    return make_task(build, backend=backend), shaped.cohort(torch.arange(len(federation)), 0, 1).train


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("options", "pulled", "masked"), CASES)
def test_a_drift_is_the_gradient_of_a_linear_term(
    federation: Federation, kind: str, options: str, pulled: bool, masked: bool
) -> None:
    """Clients of unequal numbers of steps, each beside a loop of autograd whose loss has the term <theta, drift>."""
    task, data = task_and_data(kind, federation)
    training = LocalTraining(lr=0.1, batch=4, steps=None, epochs=2, **OPTIONS[options])
    theta = torch.stack([task.init(0, number) for number in range(len(federation))])
    drift, center = random_rows(len(federation), task.num_params, 3), theta.roll(1, 0)
    lam = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
    head = task.layer_names()[-1]
    trained = sgd(
        task,
        theta,
        data.batches(training),
        proximal=(lam, center) if pulled else None,
        drift=drift,
        mask=task.layer_mask((head,)) if masked else None,
    )
    names = [slot.name for slot in task.slots if not masked or slot.layer == head]
    for k in range(len(federation)):
        proximal = (float(lam[k]), center[k]) if pulled else None
        alone = textbook(task, theta[k], data.take(slice(k, k + 1)).batches(training), names, proximal, drift[k])
        torch.testing.assert_close(trained[k], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_no_drift_is_a_drift_of_zero(federation: Federation, kind: str, options: str) -> None:
    """A drift for each client, or one for all."""
    task, data = task_and_data(kind, federation)
    training = LocalTraining(lr=0.1, batch=4, steps=6, **OPTIONS[options])
    batches = data.batches(training)
    theta = task.init(0).expand(len(federation), -1)
    without = sgd(task, theta, batches)
    for shape in (theta.shape, theta.shape[1:]):
        assert torch.equal(sgd(task, theta, batches, drift=torch.zeros(shape)), without)


@pytest.mark.parametrize("steps", [[2, 2, 2], [1, 3, 2]])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_drift_may_serve_all_clients(make_split: MakeSplit, steps: list[int], momentum: float) -> None:
    part, _ = part_with_means(make_split, [3, 1, 7])
    theta, drift = random_rows(3, 2), torch.tensor([0.5, -1.0], dtype=torch.float64)
    training = LocalTraining(lr=0.1, batch=4, momentum=momentum)
    for one in (drift, drift[None]):
        trained = sgd(Quadratic(2), theta, part.batches(training, torch.tensor(steps)), drift=one)
        each = sgd(Quadratic(2), theta, part.batches(training, torch.tensor(steps)), drift=drift.repeat(3, 1).float())
        assert trained.dtype == torch.float32
        assert torch.equal(trained, each)
    assert drift.tolist() == [0.5, -1.0]


def test_a_drift_moves_the_fixed_point(make_split: MakeSplit) -> None:
    """theta - c + d = 0 at c - d, reached at rate 1 - lr."""
    part, means = part_with_means(make_split, [3, 1, 7])
    theta, drift = random_rows(3, 2), random_rows(3, 2, 1)
    trained = sgd(Quadratic(2), theta, part.batches(LocalTraining(lr=0.2, batch=99, steps=6)), drift=drift)
    torch.testing.assert_close(trained, means - drift + 0.8**6 * (theta - means + drift))


# --- unequal steps


@pytest.mark.parametrize("poisson", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@given(steps=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_each_client_takes_its_own_steps(
    make_split: MakeSplit, poisson: bool, momentum: float, steps: list[int], seed: int
) -> None:
    n = len(steps)
    part, _ = part_with_means(make_split, [(7 * k + seed) % 9 + 1 for k in range(n)])
    theta, center, lam = random_rows(n, 2, seed), random_rows(n, 2, seed + 1), random_rows(n, 1, seed + 2)[:, 0].abs()
    training = LocalTraining(lr=0.1, batch=3, momentum=momentum, poisson=poisson)
    before = theta.clone()
    trained = sgd(Quadratic(2), theta, part.batches(training, torch.tensor(steps)), proximal=(lam, center))
    assert torch.equal(theta, before)
    for k in range(n):
        row, velocity = theta[k].clone(), torch.zeros(2)
        for _, batch in part.take(slice(k, k + 1)).batches(training, torch.tensor([steps[k]])):
            g = row - (batch.weight[0, :, None] * batch.x[0]).sum(0) + lam[k] * (row - center[k])
            velocity = momentum * velocity + g
            row = row - 0.1 * velocity
        torch.testing.assert_close(trained[k], row, rtol=1e-5, atol=1e-5)


def test_clients_without_steps_stay_where_they_are(make_split: MakeSplit) -> None:
    part = make_split([3, 0, 4], shape=(2,))
    theta = random_rows(3, 2)
    trained = sgd(Quadratic(2), theta, part.batches(LocalTraining(steps=2)))
    assert torch.equal(trained[1], theta[1])
    assert not torch.equal(trained[[0, 2]], theta[[0, 2]])
    assert torch.equal(sgd(Quadratic(2), theta, part.batches(LocalTraining(), torch.zeros(3))), theta)


@pytest.mark.parametrize("steps", [[2, 2], [1, 3], [0, 0]])
def test_a_shared_start_is_left_as_it_was(make_split: MakeSplit, steps: list[int]) -> None:
    part = make_split([3, 4], shape=(2,))
    start = torch.ones(2)
    trained = sgd(Quadratic(2), start.expand(2, -1), part.batches(LocalTraining(), torch.tensor(steps)))
    assert start.tolist() == [1.0, 1.0]
    trained += 1  # what comes back is the caller's own
    assert start.tolist() == [1.0, 1.0]


@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_order_of_clients_does_not_matter(make_split: MakeSplit, sizes: list[int], order: Random) -> None:
    part, _ = part_with_means(make_split, sizes)
    training = LocalTraining(lr=0.1, batch=4, steps=None, epochs=2)
    theta = random_rows(len(sizes), 2)
    whole = sgd(Quadratic(2), theta, part.batches(training))
    mixed = list(range(len(sizes)))
    order.shuffle(mixed)
    again = sgd(Quadratic(2), theta[mixed], part.take(torch.tensor(mixed)).batches(training))
    torch.testing.assert_close(again, whole[mixed])


# --- loops of methods' own


@pytest.mark.parametrize("steps", [[4, 3, 3], [1, 4, 0], [2, 2, 2]])
def test_each_step_writes_back_whoever_finishes_first(make_split: MakeSplit, steps: list[int]) -> None:
    part = make_split([3, 5, 4], shape=(2,))
    taken, weight = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1)
    for batch, (rows, sums) in each_step(part.batches(LocalTraining(batch=2), torch.tensor(steps)), taken, weight):
        assert len(rows) == len(sums) == len(batch)
        rows += 1
        sums += batch.weight.sum(1, keepdim=True)
    assert taken.tolist() == steps
    assert weight[:, 0].tolist() == pytest.approx([float(s) for s in steps])


def test_each_step_agrees_with_sgd(federation: Federation) -> None:
    task = make_task(net)
    batches = federation.cohort(torch.arange(6), 0, 1).train.batches(LocalTraining(batch=4, steps=None, epochs=1))
    theta = torch.stack([task.init(0, number) for number in range(6)])
    mine = theta.clone()
    for batch, (rows,) in each_step(batches, mine):
        rows -= batches.lr * task.grad(rows, batch)
    torch.testing.assert_close(mine, sgd(task, theta, batches))
