"""Private gradients of losses at features and logits: clipped example by example, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_privacy import CLASSES, MODELS, private, sample, starts
from torch import Tensor, nn

from conftest import MakeSplit
from kinfed.data.examples.batches import Batch
from kinfed.engine.contract.feature_loss import Deltas, by_autograd, cross_entropy, logit_delta, on_rows, separable
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.errors import ConfigError
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise


def pulled(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    """A loss with a strength of each client's own."""
    far = (0.5 + rows[:, None]) * phi.square().sum(-1)
    return cross_entropy(z, batch) + (batch.weight * (far + z.square().sum(-1))).sum(1)


def by_hand(task: ModuleTask, theta: Tensor, batch: Batch, clip: float) -> Tensor:
    """One example after the other by autograd."""
    assert batch.sample is not None
    out = torch.zeros_like(theta)
    for i, b in (batch.weight > 0).nonzero().tolist():
        module = task.module_of(theta[i])
        assert isinstance(module, nn.Sequential)
        phi = module[:-1](batch.x[i, b][None])
        one = Batch(
            batch.x[i : i + 1, b : b + 1], batch.y[i : i + 1, b : b + 1], torch.ones(1, 1), batch.ids[i : i + 1]
        )
        loss = pulled(phi[None], module[-1](phi)[None], one, torch.tensor([i])).sum()
        g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(loss, list(module.parameters()))])
        out[i] += g * min(1.0, clip / float(g.norm())) / batch.sample.expected[i]
    return out


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_the_sum_is_that_of_clipped_gradients(kind: str, clip: float) -> None:
    build, path, shape = MODELS[kind]
    task, batch = make_task(build, backend=path), sample(3, 5, shape)
    theta, feature_loss = starts(task, 3), separable(by_autograd(pulled))
    wanted = by_hand(task, theta, batch, clip)
    with private(task, clip) as made:
        assert torch.allclose(made.grad(theta, batch, feature_loss), wanted, atol=1e-5)
        moved = theta.clone()
        made.descend_(moved, batch, 0.5, (0.1, torch.zeros_like(theta)), feature_loss)
        assert torch.allclose(moved, theta - 0.5 * (wanted + 0.1 * theta), atol=1e-5)
        order = torch.tensor([2, 0])
        some = made.grad(theta[order], batch.rows(order), on_rows(feature_loss, order))
        assert torch.allclose(some, wanted[order], atol=1e-5)


def test_other_losses_are_refused() -> None:
    task, batch = make_task(MODELS["stacked"][0]), sample(2, 4, (5,))
    with private(task) as made, pytest.raises(ConfigError, match=r"declare it: separable\(feature_loss\)"):
        made.grad(starts(task, 2), batch, by_autograd(pulled))


@pytest.mark.parametrize("kind", ["stacked", "rows"])
def test_a_cut_that_forgets_the_weights_is_clipped_all_the_same(kind: str) -> None:
    """Clipping changes the weights of examples: deltas without them would escape it."""
    build, path, shape = MODELS[kind]
    task, batch, clip = make_task(build, backend=path), sample(2, 5, shape), 0.01
    theta = starts(task, 2)

    def forgetful(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return logit_delta(z, batch), 100 * phi

    with private(task, clip) as made:
        g = made.grad(theta, batch, separable(forgetful))
    assert batch.sample is not None
    examples = (batch.weight > 0).sum(1)
    assert (g.norm(dim=1) * batch.sample.expected <= examples * clip * (1 + 1e-4)).all()


def test_an_example_that_is_not_finite_counts_as_nothing() -> None:
    task, batch = make_task(MODELS["stacked"][0]), sample(2, 5, (5,))
    theta, feature_loss = starts(task, 2), separable(by_autograd(pulled))
    bad = replace(batch, x=batch.x.clone(), weight=batch.weight.clone())
    bad.x[1, 2] = torch.inf
    without = replace(batch, weight=batch.weight.clone())
    without.weight[1, 2] = 0.0
    with private(task) as made:
        assert torch.allclose(made.grad(theta, bad, feature_loss), made.grad(theta, without, feature_loss), atol=1e-6)


def test_features_inside_a_loss_are_part_of_the_gradient(make_split: MakeSplit) -> None:
    """What is asked elsewhere is an evaluation, for which a privacy profile must answer."""
    task, batch = make_task(MODELS["stacked"][0]), sample(2, 4, (5,))
    theta = starts(task, 2)
    made = PrivateTask(task, 0.5, 0.0, seeded_noise(0))
    assert made.head == task.head

    def contrast(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return None, batch.weight[..., None] * (phi - made.features(theta[rows], batch.x))

    with made.recording() as record:
        made.grad(theta, batch, separable(contrast))
        assert not record.evaluated_models
        made.features(theta, batch.x)
        assert record.evaluated_models
    with made.recording() as record:
        made.class_sums(theta, make_split([2, 3], shape=(5,), classes=CLASSES))
        assert record.evaluated_models
