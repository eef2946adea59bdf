"""Local optimizers against torch.optim, clipping against torch.nn.utils, running statistics by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kinfed.data import Cohort, Federation, with_memory
from kinfed.data.examples.batches import Batch, Batches, LocalTraining
from kinfed.data.examples.optimizer_state import LoopMemory, Moments
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.descent import GradientPieces
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.task_factory import ModuleTask, Task, make_task
from kinfed.engine.training.optimizers import clipped, make_optimizer
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.03, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6},
}


def theirs(training: LocalTraining, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """What torch has for these settings."""
    common: dict[str, Any] = {"lr": lr, "weight_decay": training.weight_decay}
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, nesterov=training.nesterov, **common)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, betas=training.betas, eps=training.eps, **common)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def textbook(
    task: ModuleTask,
    row: Tensor,
    rounds: Sequence[Batches],
    train: Sequence[str],
    proximal: tuple[float, Tensor] | None = None,
    drift: Tensor | None = None,
) -> Tensor:
    """One client, one module, one optimizer for all rounds."""
    module, training = task.module_of(row), rounds[0].training
    named = dict(module.named_parameters())
    trained = [named[name] for name in train]
    optimizer = theirs(training, trained, rounds[0].lr)
    for batches in rounds:
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
            if training.clip is not None:
                nn.utils.clip_grad_norm_(trained, training.clip)
            optimizer.step()
    return task.flatten(named)


# --- torch.optim


@pytest.mark.parametrize("backend", ["fused", "stacked", "rows"])
@pytest.mark.parametrize("kind", ["alone", "with proximal term, drift and clip", "all that on one layer"])
@pytest.mark.parametrize("rule", RULES)
def test_training_is_that_of_torch_optim_client_by_client(
    federation: Federation, backend: str, kind: str, rule: str
) -> None:
    """Epochs give these clients unequal numbers of steps, neither rising nor falling."""
    task = make_task(net, backend=backend)
    plain, masked = kind == "alone", kind == "all that on one layer"
    training = LocalTraining(batch=2, steps=None, epochs=2, clip=None if plain else 0.05, **RULES[rule])
    data = federation.cohort(torch.arange(4), 0, 1).train
    theta = torch.stack([task.init(0, number) for number in range(4)])
    center, drift = theta.roll(1, 0), 0.01 * theta.roll(2, 0)
    batches = data.batches(training)
    assert batches.steps.sort().values.tolist() != batches.steps.tolist() != batches.steps.sort(0, True).values.tolist()
    assert int(batches.steps.max()) >= 20
    trained = sgd(
        task, theta, batches, mask=task.layer_mask(("2",)) if masked else None,
        proximal=None if plain else (0.3, center), drift=None if plain else drift,
    )  # fmt: skip
    names = ("2.weight", "2.bias") if masked else ("0.weight", "0.bias", "2.weight", "2.bias")
    for k in range(4):
        own = [data.take(slice(k, k + 1)).batches(training)]
        terms_of_k = {} if plain else {"proximal": (0.3, center[k]), "drift": drift[k]}
        alone = textbook(task, theta[k], own, names, **terms_of_k)
        # Compiled steps take roots in another order than torch, which Adam magnifies where gradients are small.
        torch.testing.assert_close(trained[k], alone, rtol=0, atol=5e-6 if backend == "fused" else 1e-6)


def test_a_gradient_is_let_go_before_the_next_is_computed(federation: Federation) -> None:
    """Its memory then serves the next one: of large models the system would have to clear new pages for it."""
    task, alive = make_task(net, backend="rows"), []
    past: list[weakref.ref[Tensor]] = []
    whole = task.gradient_pieces

    def gradient_pieces(mask: Tensor | None) -> GradientPieces:
        pieces = whole(mask)

        def gradient(theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None) -> list[Tensor]:
            alive.append(sum(one() is not None for one in past))
            now = pieces.gradient(theta, batch, feature_loss)
            past.extend(weakref.ref(piece) for piece in now)
            return now

        return GradientPieces(pieces.columns, gradient)

    task.gradient_pieces = gradient_pieces  # type: ignore[method-assign]
    training = LocalTraining(lr=0.1, momentum=0.9, batch=4, steps=3)
    sgd(task, task.init(0)[None], federation.cohort(torch.tensor([0]), 0, 1).train.batches(training))
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_steps_on_random_gradients(rule: str) -> None:
    """Two blocks of columns with a gap, and rows that leave after 30 and 60 steps."""
    numbers = torch.Generator().manual_seed(1)
    training, blocks = LocalTraining(**RULES[rule]), [slice(0, 40), slice(50, 117)]
    x = torch.randn(3, 120, generator=numbers)
    start, parameters = x.clone(), [nn.Parameter(row.clone()) for row in x]
    others = [theirs(training, [parameter], 0.01) for parameter in parameters]
    ours = make_optimizer(training, blocks, x)
    for step in range(100):
        active = sum(step < end for end in (100, 60, 30))
        g = torch.randn(active, 120, generator=numbers)
        before = g.clone()
        ours.step(slice(0, active), x[:active], [g[:, block] for block in blocks], 0.01)
        assert torch.equal(g, before)
        for k in range(active):
            parameters[k].grad = g[k]
            others[k].step()
    expected = start.clone()
    for block in blocks:
        expected[:, block] = torch.stack([parameter.detach()[block] for parameter in parameters])
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=5), st.floats(0.1, 5.0))
def test_clipping_is_that_of_torch_and_leaves_smaller_gradients_alone(scales: list[float], largest: float) -> None:
    numbers = torch.Generator().manual_seed(len(scales))
    g = torch.randn(len(scales), 12, generator=numbers) * torch.tensor(scales)[:, None]
    pieces = clipped([g[:, :5], g[:, 5:]], largest)
    ours = torch.cat(pieces, 1)
    for k, row in enumerate(g):
        parameter = nn.Parameter(torch.zeros(12))
        parameter.grad = row.clone()
        nn.utils.clip_grad_norm_([parameter], largest)
        torch.testing.assert_close(ours[k], parameter.grad, rtol=1e-6, atol=1e-7)
        if row.norm() < 0.99 * largest:
            assert torch.equal(ours[k], row)


def test_an_infinite_clip_is_none(federation: Federation) -> None:
    task, data = make_task(net), federation.cohort(torch.arange(3), 0, 1).train
    theta = task.init(0).expand(3, -1)
    trained = [sgd(task, theta, data.batches(LocalTraining(lr=0.1, clip=clip))) for clip in (None, float("inf"))]
    assert torch.equal(*trained)


# --- running statistics


class Standing(Task):
    """f(theta) = 1/2 |theta - mean of the batch|^2 on two trainable columns; two further columns are running means of
    batches, moved by the training forward and of no gradient."""

    num_params = 4
    slots = (
        ParameterSlot("a.weight", (1,), 0, 1),
        ParameterSlot("b.weight", (1,), 1, 2),
        ParameterSlot("a.mean", (1,), 2, 3, trainable=False),
        ParameterSlot("b.mean", (1,), 3, 4, trainable=False),
    )

    def init(self, seed: int, number: int = 0) -> Tensor:
        return torch.zeros(4)

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        mean = (batch.weight[..., None] * batch.x).sum(1) / 100
        theta[:, 2:].lerp_(mean[:, :1].expand(-1, 2), 0.1)
        return torch.cat([theta[:, :2] - mean[:, :2], torch.zeros_like(theta[:, 2:])], 1)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class Moving(Standing):
    """The same without running means."""

    num_params = 2
    slots = Standing.slots[:2]

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        return theta - (batch.weight[..., None] * batch.x).sum(1)[:, :2] / 100


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("rule", [*RULES, "decay"])
def test_running_statistics_move_with_forward_passes_and_with_nothing_else(
    make_split: Callable[..., Any], rule: str, terms: bool, clip: float | None
) -> None:
    options = {"lr": 0.1, "weight_decay": 0.5} if rule == "decay" else RULES[rule]
    training = LocalTraining(batch=3, steps=None, epochs=4, clip=clip, **options)
    split = make_split([4, 9, 6], shape=(2,))
    theta = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    proximal, drift = (0.5, torch.full((3, 4), 7.0)), torch.full((3, 4), 0.3)
    some: Any = {"proximal": proximal, "drift": drift} if terms else {}
    trained = sgd(Standing(), theta, split.batches(training), **some)
    some = {"proximal": (0.5, proximal[1][:, :2]), "drift": drift[:, :2]} if terms else {}
    bare = sgd(Moving(), theta[:, :2].clone(), split.batches(training), **some)
    torch.testing.assert_close(trained[:, :2], bare, rtol=0, atol=1e-6)
    for k in range(3):
        mean = theta[k, 2:].clone()
        for _, batch in split.take(slice(k, k + 1)).batches(training):
            mean.lerp_((batch.weight[0, :, None] * batch.x[0]).sum(0)[:1] / 100, 0.1)
        torch.testing.assert_close(trained[k, 2:], mean)


@pytest.mark.parametrize("rule", RULES)
def test_statistics_of_frozen_layers_stay(make_split: Callable[..., Any], rule: str) -> None:
    training = LocalTraining(batch=3, steps=8, **RULES[rule])
    split, theta = make_split([4, 9], shape=(2,)), torch.ones(2, 4)
    mask = torch.tensor([False, True, False, True])  # layer "b"
    trained = sgd(Standing(), theta, split.batches(training), mask=mask)
    whole = sgd(Standing(), theta, split.batches(training))
    assert torch.equal(trained[:, [0, 2]], theta[:, [0, 2]])
    torch.testing.assert_close(trained[:, [1, 3]], whole[:, [1, 3]])
    assert bool((trained[:, [1, 3]] != theta[:, [1, 3]]).all())


# --- moments from round to round


@pytest.mark.parametrize("rule", ["momentum", "nesterov", "adam", "adamw"])
def test_moments_go_on_from_round_to_round(federation: Federation, rule: str) -> None:
    """Clients sit out rounds, so that their step numbers differ: each is as one optimizer over its own rounds."""
    task, clients = make_task(net), 4
    training = LocalTraining(batch=3, steps=None, epochs=2, optimizer_state="kept", **RULES[rule])
    theta = torch.stack([task.init(0, number) for number in range(clients)])
    start, kept = theta.clone(), Moments()
    took_part: list[list[Batches]] = [[] for _ in range(clients)]

    def cohort(ids: Tensor, round: int) -> Cohort:
        return federation.cohort(ids, 0, round)

    everyone = torch.arange(clients)
    for round, ids in enumerate((everyone, everyone[1:], everyone[::2], everyone), 1):
        memory = LoopMemory(len(ids), kept if round == 1 else kept.take(ids))
        data = with_memory(cohort(ids, round), memory)
        theta[ids] = sgd(task, theta[ids], data.train.batches(training))
        if round == 1:
            kept = memory.moments
        else:
            kept.put(ids, memory.moments)
        for k in ids.tolist():
            took_part[k].append(cohort(torch.tensor([k]), round).train.batches(training))
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    for k in range(clients):
        torch.testing.assert_close(theta[k], textbook(task, start[k], took_part[k], names), rtol=0, atol=2e-6)


def test_without_memory_or_with_reset_every_loop_starts_anew(federation: Federation) -> None:
    task, ids = make_task(net), torch.arange(3)
    reset = LocalTraining(batch=3, steps=4, momentum=0.9)
    kept = LocalTraining(batch=3, steps=4, momentum=0.9, optimizer_state="kept")
    theta, data = task.init(0).expand(3, -1), federation.cohort(ids, 0, 1)
    memory = LoopMemory(3, Moments({"0.velocity": torch.full((3, task.num_params), 5.0)}))
    anew = sgd(task, theta, data.train.batches(reset))
    assert torch.equal(sgd(task, theta, data.train.batches(kept)), anew)
    assert torch.equal(sgd(task, theta, with_memory(data, memory).train.batches(reset)), anew)
    assert bool((memory.moments.tensors["0.velocity"] == 5).all())
    assert not torch.equal(sgd(task, theta, with_memory(data, memory).train.batches(kept)), anew)
    assert bool((memory.moments.tensors["0.velocity"] != 5).any())


def test_a_loop_of_some_clients_leaves_the_moments_of_the_others(federation: Federation) -> None:
    task, ids = make_task(net), torch.arange(4)
    training = LocalTraining(batch=3, steps=4, momentum=0.9, optimizer_state="kept")
    theta, memory = task.init(0).expand(4, -1), LoopMemory(4, Moments())
    some = torch.tensor([3, 1])
    part = with_memory(federation.cohort(ids, 0, 1), memory).train.take(some)
    sgd(task, theta[some], part.batches(training))
    velocity = memory.moments.tensors["0.velocity"]
    assert velocity.abs().sum(1).gt(0).tolist() == [False, True, False, True]


def test_a_loop_that_was_not_there_before_is_refused(federation: Federation) -> None:
    task, training = make_task(net), LocalTraining(batch=3, steps=1, momentum=0.9, optimizer_state="kept")
    data = federation.cohort(torch.arange(2), 0, 1)
    narrow = LoopMemory(2, Moments({"0.velocity": torch.zeros(2, task.num_params - 1)}))
    with pytest.raises(ConfigError, match=r"local loop 0 of this method .* use optimizer_state = reset"):
        sgd(task, task.init(0).expand(2, -1), with_memory(data, narrow).train.batches(training))
    memory = LoopMemory(2, Moments({"0.velocity": torch.zeros(2, task.num_params)}))
    batches = with_memory(data, memory).train.batches(training)
    sgd(task, task.init(0).expand(2, -1), batches)
    with pytest.raises(ConfigError, match=r"share the moments of loop 0; number the others"):
        sgd(task, task.init(0).expand(2, -1), batches)
    with pytest.raises(ConfigError, match="local loop 1 of this method was not there in an earlier round"):
        sgd(task, task.init(0).expand(2, -1), with_memory(data, memory).train.batches(training, loop=1))
    with pytest.raises(ConfigError, match="ran no local loop"):
        _ = LoopMemory(2, Moments()).moments


# --- bad settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, r"optimizer must be sgd \| adam \| adamw; got 'lion'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "adamw has betas; got momentum=0.9"),
        ({"nesterov": True}, "nesterov is a form of momentum"),
        ({"optimizer": "adam", "nesterov": True}, "nesterov is a form of momentum"),
        ({"betas": (0.9, 1.0)}, r"betas are two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas are two numbers in \[0, 1\)"),
        ({"betas": (float("nan"), 0.9)}, r"betas are two numbers in \[0, 1\)"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"clip": float("nan")}, "clip must be positive"),
        ({"optimizer_state": "kept"}, "plain SGD has nothing to keep"),
        ({"optimizer_state": "forgotten"}, r"optimizer_state must be reset \| kept"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**options)
