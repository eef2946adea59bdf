"""Losses at features and logits: on every gradient path the gradient is that of plain autograd through the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import MakeBatch, MakeSplit
from kinfed.data.examples.batches import Batch, Batches, LocalTraining, Split
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.engine.contract.descent import TRANSPOSE_FROM_STEPS, LayerwiseDescent, Terms
from kinfed.engine.contract.feature_loss import Deltas, FeatureLoss, by_autograd, cross_entropy, logit_delta, on_rows
from kinfed.engine.contract.head import find_head
from kinfed.engine.personal.personal_models import MixtureTask
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ModelError
from kinfed.theory.gaussian import GaussianTask

CLASSES = 3


class Residual(nn.Module):
    """Not a chain of layers: autograd only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.fc = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x.flatten(1)))
        return h + torch.relu(self.block(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(input=self.features(x))


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, CLASSES, bias=False)
    )


def wide() -> nn.Module:
    """The first layer is transposed in memory during long descents."""
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, CLASSES))


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(2, 4, 2, batch_first=True), LastOutput(), nn.Linear(4, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (2, 3)),
    "wide": (wide, (6,)),
    "one layer": (one_layer, (2, 3)),
    "recurrent": (recurrent, (5, 2)),
    "convolutional": (convolutional, (1, 5, 5)),
    "residual": (Residual, (2, 3)),
}
PATHS = [
    *(("dense", path) for path in ("stacked", "rows", "vmap")),
    ("wide", "stacked"),
    *(("one layer", path) for path in ("stacked", "rows", "vmap")),
    *(("recurrent", path) for path in ("stacked", "rows")),
    *(("convolutional", path) for path in ("rows", "vmap")),
    *(("residual", path) for path in ("rows", "vmap")),
]
every_path = pytest.mark.parametrize(("model", "path"), PATHS)


def make(model: str, path: str) -> tuple[ModuleTask, tuple[int, ...]]:
    build, shape = MODELS[model]
    return make_task(build, backend=path), shape


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def starts(task: ModuleTask, n: int) -> Tensor:
    return torch.stack([task.init(0, k) for k in range(n)])


def random_split(make_split: MakeSplit, sizes: Sequence[int], shape: tuple[int, ...], classes: int = CLASSES) -> Split:
    split = make_split(sizes, shape=shape, classes=classes)
    split.features.raw.normal_(generator=torch.Generator().manual_seed(1))
    return split


# ---- the oracle: autograd through the whole module, one client after the other


def split_forward(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, Residual):
        phi = module.features(x)
        return phi, module.fc(phi)
    assert isinstance(module, nn.Sequential)
    phi = module[:-1](x)
    return phi, module[-1](phi)


@dataclass
class Pulled:
    """Cross-entropy, a pull of the features to a center of each client's own, and a penalty on logits."""

    centers: Tensor  # [n, d_f]
    strength: Tensor  # [n]

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        far = (phi - self.centers[rows][:, None]).square().sum(-1) * self.strength[rows][:, None] / 2
        return cross_entropy(z, batch) + (batch.weight * (far + 0.1 * z.square().sum(-1))).sum(1)

    def deltas(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        """The same by hand."""
        weight = batch.weight[..., None]
        dphi = weight * self.strength[rows][:, None, None] * (phi - self.centers[rows][:, None])
        return logit_delta(z, batch) + 0.2 * weight * z, dphi


def pulled(task: ModuleTask, n: int) -> Pulled:
    g = torch.Generator().manual_seed(7)
    return Pulled(torch.randn(n, task.head.inputs, generator=g), torch.linspace(0.5, 2.0, n))


def oracle_gradient(task: ModuleTask, row: Tensor, batch: Batch, loss: Pulled, client: int) -> Tensor:
    """[P] for a batch of one row."""
    module = task.module_of(row)
    phi, z = split_forward(module, batch.x[0])
    total = loss(phi[None], z[None], batch, torch.tensor([client])).sum()
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, list(module.parameters()))])


def oracle_sgd(
    task: ModuleTask, theta: Tensor, batches: Batches, loss: Pulled, *, lam: Tensor, center: Tensor, drift: Tensor,
    mask: Tensor,
) -> Tensor:  # fmt: skip
    out, training = theta.clone(), batches.training
    for i in range(len(theta)):
        row, velocity = theta[i], torch.zeros_like(theta[i])
        for _, batch in batches.take(torch.tensor([i])):
            g = oracle_gradient(task, row, batch, loss, i)
            g = g + lam[i] * (row - center[i]) + drift[i] + training.weight_decay * row
            velocity = training.momentum * velocity + g
            row = torch.where(mask, row - batches.lr * velocity, row)
        out[i] = row
    return out


# ---- reading features


@every_path
def test_features_and_logits_are_those_of_the_module(model: str, path: str, make_batch: MakeBatch) -> None:
    task, shape = make(model, path)
    theta, x = starts(task, 3), make_batch(3, 4, shape, CLASSES).x
    wanted = [split_forward(task.module_of(theta[i]), x[i]) for i in range(3)]
    phi, z = task.features_and_logits(theta, x)
    near(phi, torch.stack([phi for phi, _ in wanted]).detach())
    near(z, torch.stack([z for _, z in wanted]).detach())
    assert torch.equal(task.features(theta, x), phi)
    near(task.logits(theta, x), z)
    near(task.logits_of(theta, phi), z)
    assert not phi.requires_grad
    assert not task.logits_of(theta.clone().requires_grad_(), phi).requires_grad
    assert phi.shape == (3, 4, task.head.inputs)
    assert task.head.outputs == CLASSES


@every_path
def test_a_cut_may_ask_what_other_models_say(model: str, path: str, make_batch: MakeBatch) -> None:
    """A teacher's forward pass between a step's forward and backward pass changes neither."""
    task, shape = make(model, path)
    theta, teacher, batch = starts(task, 3), starts(task, 6)[3:], make_batch(3, 4, shape, CLASSES)
    known = task.features_and_logits(teacher, batch.x)

    def deltas(phi: Tensor, z: Tensor, batch: Batch, phi_t: Tensor, z_t: Tensor) -> Deltas:
        return batch.weight[..., None] * (z - z_t), batch.weight[..., None] * (phi - phi_t)

    asked = task.grad(
        theta, batch, lambda phi, z, b, rows: deltas(phi, z, b, *task.features_and_logits(teacher[rows], b.x))
    )
    wanted = task.grad(theta, batch, lambda phi, z, b, rows: deltas(phi, z, b, known[0][rows], known[1][rows]))
    near(asked, wanted)


def test_a_head_is_split_from_its_row_and_joined_to_another() -> None:
    task, _ = make("wide", "stacked")
    theta, head = starts(task, 2), task.head
    weight, bias = head.split(theta)
    assert bias is not None
    named = task.unflatten(theta)
    assert torch.equal(weight, named["2.weight"])
    assert torch.equal(bias, named["2.bias"])
    assert head.mask.tolist() == task.layer_mask(("2",)).tolist()
    joined = head.join(theta, weight[1], torch.tensor([1.0, 2.0, 3.0]))  # one for all
    assert torch.equal(joined[:, ~head.mask], theta[:, ~head.mask])
    assert torch.equal(joined[0, head.mask], torch.cat([weight[1].flatten(), torch.tensor([1.0, 2.0, 3.0])]))
    assert torch.equal(theta, starts(task, 2))
    with pytest.raises(ModelError, match="has a bias; got none"):
        head.join(theta, weight, None)
    bias.zero_()  # a view
    assert not theta[:, head.mask][:, -CLASSES:].any()


def test_a_head_without_bias() -> None:
    task, _ = make("dense", "stacked")
    assert task.head.split(starts(task, 2))[1] is None
    with pytest.raises(ModelError, match="has no bias; got one"):
        task.head.join(starts(task, 2), torch.zeros(CLASSES, 4), torch.zeros(CLASSES))


# ---- gradients


def keeps_everything(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
    return None, None


def spells_out(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
    return logit_delta(z, batch), torch.zeros_like(phi)


@every_path
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_cut_that_changes_nothing_is_none(model: str, path: str, momentum: float, make_split: MakeSplit) -> None:
    """Bit for bit; a delta that is spelled out takes another way through autograd, and rounds differently there."""
    task, shape = make(model, path)
    batches = random_split(make_split, [3, 9, 5], shape).batches(
        LocalTraining(lr=0.2, batch=4, momentum=momentum), torch.tensor([1, 3, 2])
    )
    plain = sgd(task, starts(task, 3), batches)
    assert torch.equal(sgd(task, starts(task, 3), batches, feature_loss=keeps_everything), plain)
    by_hand = (model, path) == ("convolutional", "rows") or path == "stacked"
    out = sgd(task, starts(task, 3), batches, feature_loss=spells_out)
    assert torch.equal(out, plain) if by_hand else torch.allclose(out, plain, atol=1e-6)


@every_path
def test_the_gradient_is_that_of_autograd(model: str, path: str, make_batch: MakeBatch) -> None:
    task, shape = make(model, path)
    theta, batch = starts(task, 4), make_batch(4, 5, shape, CLASSES, ragged=True)
    loss = pulled(task, 4)
    wanted = torch.stack([oracle_gradient(task, theta[i], batch.rows(slice(i, i + 1)), loss, i) for i in range(4)])
    near(task.grad(theta, batch, by_autograd(loss)), wanted)
    near(task.grad(theta, batch, loss.deltas), wanted)
    order = torch.tensor([2, 0, 3])
    near(task.grad(theta[order], batch.rows(order), on_rows(loss.deltas, order)), wanted[order])


@every_path
def test_features_alone(model: str, path: str, make_batch: MakeBatch) -> None:
    """Without a dz the cross-entropy stays; a network of one layer has nothing below its features."""
    task, shape = make(model, path)
    theta, batch = starts(task, 2), make_batch(2, 5, shape, CLASSES)

    def feature_loss(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return None, batch.weight[..., None] * phi.double()

    def loss(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        return cross_entropy(z, batch) + (batch.weight * phi.square().sum(-1)).sum(1) / 2

    near(task.grad(theta, batch, feature_loss), task.grad(theta, batch, by_autograd(loss)))
    if model == "one layer":
        assert torch.equal(task.grad(theta, batch, feature_loss), task.grad(theta, batch))
    else:
        assert not torch.allclose(task.grad(theta, batch, feature_loss), task.grad(theta, batch), atol=1e-3)


@every_path
def test_rates_of_the_clients_own(model: str, path: str, make_batch: MakeBatch) -> None:
    task, shape = make(model, path)
    theta, batch, loss = starts(task, 3), make_batch(3, 4, shape, CLASSES), pulled(task, 3)
    lr, lam, center = torch.tensor([0.1, 0.0, 0.7]), torch.tensor([0.5, 1.0, 0.0]), task.init(9).expand(3, -1)
    wanted = theta - lr[:, None] * (task.grad(theta, batch, loss.deltas) + lam[:, None] * (theta - center))
    moved = theta.clone()
    task.descend_(moved, batch, lr, (lam, center), loss.deltas)
    near(moved, wanted)
    descent = task.descent(theta, 1, Terms((lam, center), feature_loss=loss.deltas))
    assert descent is not None
    descent.step(slice(None), batch, lr)
    near(descent.result(), wanted)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pull and drift": {"proximal": True, "drift": True},
    "momentum": {"momentum": 0.5, "proximal": True},
    "mask": {"mask": True, "drift": True, "weight_decay": 0.1},
}


@every_path
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_each_client_by_itself(model: str, path: str, case: str, make_split: MakeSplit) -> None:
    """Unequal steps in an order that `sgd` changes, clients that finish early, padding, and every other term."""
    task, shape = make(model, path)
    options = CASES[case]
    training = LocalTraining(lr=0.1, batch=4, **{k: v for k, v in options.items() if k in ("momentum", "weight_decay")})
    batches = random_split(make_split, [3, 9, 5, 6], shape).batches(training, torch.tensor([1, 3, 0, 2]))
    theta, loss = starts(task, 4), pulled(task, 4)
    lam, center, drift = torch.linspace(0, 1, 4), task.init(9).expand(4, -1), 0.1 * starts(task, 6)[2:]
    mask = ~task.head.mask if "mask" in options else torch.ones(task.num_params, dtype=torch.bool)
    wanted = oracle_sgd(
        task, theta, batches, loss, center=center, mask=mask, lam=lam if "proximal" in options else torch.zeros(4),
        drift=drift if "drift" in options else torch.zeros_like(drift),
    )  # fmt: skip
    terms: dict[str, Any] = {"proximal": (lam, center), "drift": drift, "mask": mask}
    for feature_loss in (loss.deltas, by_autograd(loss)):
        out = sgd(
            task,
            theta,
            batches,
            feature_loss=feature_loss,
            **{name: terms[name] for name in terms.keys() & options.keys()},
        )
        near(out, wanted)
    assert torch.equal(theta, starts(task, 4))


def test_a_long_descent_on_a_transposed_layer(make_split: MakeSplit) -> None:
    task, shape = make("wide", "stacked")
    steps = torch.tensor([2, TRANSPOSE_FROM_STEPS + 1, 5])
    batches = random_split(make_split, [3, 9, 5], shape).batches(LocalTraining(lr=0.05, batch=4), steps)
    theta, loss = starts(task, 3), pulled(task, 3)
    assert isinstance(task.descent(theta, len(batches), Terms(feature_loss=loss.deltas)), LayerwiseDescent)
    zero = torch.zeros_like(theta)
    wanted = oracle_sgd(
        task, theta, batches, loss, lam=torch.zeros(3), center=zero, drift=zero, mask=torch.ones_like(task.head.mask)
    )
    near(sgd(task, theta, batches, feature_loss=loss.deltas), wanted)


def test_descents_on_rows_in_the_middle(make_batch: MakeBatch) -> None:
    for model, path in (("wide", "stacked"), ("recurrent", "stacked"), ("residual", "vmap")):
        task, shape = make(model, path)
        theta, batch, loss = starts(task, 4), make_batch(4, 3, shape, CLASSES), pulled(task, 4)
        descent = task.descent(theta, 1, Terms(feature_loss=loss.deltas))
        assert descent is not None
        descent.step(slice(1, 3), batch.rows(slice(1, 3)), 0.1)
        wanted = theta.clone()
        wanted[1:3] -= 0.1 * task.grad(theta, batch, loss.deltas)[1:3]
        near(descent.result(), wanted)


@dataclass
class RunningMean:
    """A feature loss with a state of its own: the features' running mean, towards which they are pulled."""

    mean: Tensor  # [n, d_f]
    calls: Tensor  # [n]

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        assert not torch.is_grad_enabled()
        weight = batch.weight[..., None]
        self.mean[rows] = 0.9 * self.mean[rows] + 0.1 * (weight * phi).sum(1)
        self.calls[rows] += 1
        return None, weight * (phi - self.mean[rows][:, None])


@pytest.mark.parametrize(("model", "path"), [*PATHS[:3], *PATHS[-6:]])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_chunks_of_clients_do_not_matter_to_a_state(
    model: str, path: str, momentum: float, make_split: MakeSplit
) -> None:
    """All together, in another order, and one by one: the same models and states. One call per client and step."""
    task, shape = make(model, path)
    steps = torch.tensor([1, 3, 0, 2])
    batches = random_split(make_split, [3, 9, 5, 6], shape).batches(
        LocalTraining(lr=0.1, batch=4, momentum=momentum), steps
    )

    def train(index: Tensor) -> tuple[Tensor, RunningMean]:
        feature_loss = RunningMean(
            torch.zeros(len(index), task.head.inputs), torch.zeros(len(index), dtype=torch.int64)
        )
        return sgd(task, starts(task, 4)[index], batches.take(index), feature_loss=feature_loss), feature_loss

    whole, state = train(torch.arange(4))
    assert state.calls.tolist() == steps.tolist()
    for index in (torch.tensor([2, 3, 1, 0]), *torch.arange(4).split(1)):
        theta, own = train(index)
        near(theta, whole[index])
        near(own.mean, state.mean[index])


# ---- statistics, draws and constants


def normalized() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, CLASSES))


def test_a_cut_sees_the_examples_that_statistics_see(make_batch: MakeBatch) -> None:
    """Padding is taken out before a training forward of BatchNorm, for the model and for the feature loss."""
    task = make_task(normalized)
    theta, batch, loss = starts(task, 2), make_batch(2, 5, (6,), CLASSES), pulled(task, 2)
    batch.weight[0] = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    sizes = []

    def feature_loss(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        sizes.append(phi.shape[1])
        return loss.deltas(phi, z, batch, rows)

    moved = theta.clone()
    out = task.training_grad(moved, batch, feature_loss)
    assert sizes == [4, 5]
    near(task.grad(theta, batch, feature_loss), out)
    for i in range(2):
        module, real = task.module_of(theta[i]).train(), batch.weight[i] > 0
        one = Batch(*(t[i, real][None] for t in (batch.x, batch.y, batch.weight)), batch.ids[i : i + 1])
        phi, z = split_forward(module, one.x[0])
        total = loss(phi[None], z[None], one, torch.tensor([i])).sum()
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(module.parameters()))])
        near(out[i, task.trainable], wanted)
        near(moved[i], task.flatten(module.state_dict()))
    assert not torch.equal(moved, theta)


def test_a_cut_does_not_shift_draws(make_split: MakeSplit) -> None:
    """Also one that reads features of another model on the same batch."""
    task = make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, CLASSES)))
    batches = random_split(make_split, [3, 9], (6,)).batches(LocalTraining(lr=0.2, batch=4), torch.tensor([2, 3]))

    def reads(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        assert (phi == 0).any()
        assert (task.features(task.init(1).expand(len(rows), -1), batch.x) != 0).all()
        return None, None

    assert torch.equal(sgd(task, starts(task, 2), batches, feature_loss=reads), sgd(task, starts(task, 2), batches))


@pytest.mark.parametrize("path", ["rows", "vmap"])
def test_nothing_is_trained_below_a_frozen_body(path: str, make_batch: MakeBatch) -> None:
    task = make_task(Residual, backend=path, frozen=("stem", "block"))
    theta, batch = starts(task, 2), make_batch(2, 4, (6,), CLASSES)
    assert task.head.mask.all()
    feature_loss = by_autograd(lambda phi, z, batch, rows: cross_entropy(z, batch) + phi.square().sum((1, 2)))
    near(task.grad(theta, batch, feature_loss), task.grad(theta, batch))
    with pytest.raises(ModelError, match="not made of trainable parameters of its own"):
        make_task(Residual, backend=path, frozen=("fc",)).head  # noqa: B018


# ---- sums by class


@pytest.mark.parametrize(("model", "path"), [("dense", "stacked"), ("convolutional", "rows"), ("residual", "vmap")])
def test_class_sums_are_those_of_a_loop(model: str, path: str, make_split: MakeSplit) -> None:
    task, shape = make(model, path)
    split = random_split(make_split, [3, 70, 0, 1], shape, classes=CLASSES)
    split.labels[split.rows[3:73]] %= 2  # the second client lacks the last class
    theta = starts(task, 4)
    sums = task.class_sums(theta, split, scatter=True)
    assert sums.scatter is not None
    assert (sums.count.dtype, sums.total.dtype, sums.square.dtype) == (torch.int64, torch.float64, torch.float64)
    for i in range(4):
        own = split.rows[int(split.start[i]) : int(split.start[i] + split.count[i])]
        module, y = task.module_of(theta[i]), split.labels[own]
        phi = torch.zeros(0, task.head.inputs).double()
        if len(own):
            phi = split_forward(module, split.features.raw[own])[0].detach().double()
        for c in range(CLASSES):
            assert int(sums.count[i, c]) == int((y == c).sum())
            near(sums.total[i, c], phi[y == c].sum(0))
            near(sums.square[i, c], phi[y == c].square().sum())
        near(sums.scatter[i], phi.T @ phi)
    assert int(sums.count[1, 2]) == 0
    assert not sums.total[1, 2].any()
    assert task.class_sums(theta, split).scatter is None


def test_padding_and_other_classes_are_safe_from_what_is_not_finite(make_split: MakeSplit) -> None:
    """Padding repeats a client's first example."""
    task, shape = make("one layer", "stacked")
    split = random_split(make_split, [2, 5], shape)
    first = split.rows[0]
    split.features.raw[first] = torch.nan
    sums = task.class_sums(starts(task, 2), split, scatter=True)
    assert torch.isnan(sums.total).any(-1).sum() == 1
    assert torch.isnan(sums.total[0, split.labels[first]]).all()
    assert sums.scatter is not None
    assert torch.isfinite(sums.scatter[1]).all()
    assert sums.count.sum(1).tolist() == [2, 5]


def test_labels_beyond_the_outputs_are_an_error(make_split: MakeSplit) -> None:
    task, shape = make("one layer", "stacked")
    with pytest.raises(ModelError, match="3 outputs; got the label 4"):
        task.class_sums(starts(task, 1), random_split(make_split, [8], shape, classes=5))


# ---- which layer is the head


class Reversed(nn.Module):
    """Declares its head first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, CLASSES), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.body(x)))


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.a(x)))


class Tied(nn.Module):
    """The head's weight is that of another layer, under whose name it lies in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class LogProbabilities(Reversed):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(x), -1)


class OverTime(nn.Module):
    """A linear layer on every position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(-1, 3, 2))


def one_by_one_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("build", "name"),
    [(Residual, "fc"), (dense, "5"), (Twice, "a"), (Tied, "decode"), (lambda: nn.Linear(6, 3), "")],
)
def test_the_head_is_the_last_linear_layer(build: Callable[[], nn.Module], name: str) -> None:
    task = make_task(build)
    assert task.head.name == name
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    theta = starts(task, 2)
    near(task.logits_of(theta, task.features(theta, x)), task.logits(theta, x))


@pytest.mark.parametrize("path", ["rows", "vmap"])
@pytest.mark.parametrize("build", [Twice, Tied])
def test_weights_in_two_places_get_both_gradients(
    path: str, build: Callable[[], nn.Module], make_batch: MakeBatch
) -> None:
    task = make_task(build, backend=path)
    theta, batch = starts(task, 2), make_batch(2, 4, (6,), 6)

    def loss(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        return cross_entropy(z, batch) + (batch.weight * phi.square().sum(-1)).sum(1)

    out = task.grad(theta, batch, by_autograd(loss))
    for i in range(2):
        module = task.module_of(theta[i])
        below, above = (module.a, module.a) if isinstance(module, Twice) else (module.encode, module.decode)
        phi = (torch.relu if isinstance(module, Twice) else torch.tanh)(below(batch.x[i]))
        total = loss(phi[None], above(phi)[None], batch.rows(slice(i, i + 1)), torch.tensor([i])).sum()
        near(out[i], torch.cat([g.flatten() for g in torch.autograd.grad(total, list(module.parameters()))]))


@pytest.mark.parametrize("path", ["rows", "vmap"])
def test_a_head_that_is_not_declared_last_is_named(path: str, make_batch: MakeBatch) -> None:
    task, batch = make_task(Reversed, backend=path), make_batch(2, 4, (6,), CLASSES)
    theta = starts(task, 2)
    assert task.head.name == "body"
    with pytest.raises(ModelError, match=r"is that of layer 'fc', not of 'body': make_task\(..., head='fc'\)"):
        task.features(theta, batch.x)
    with pytest.raises(ModelError, match="'fc'"):
        task.grad(theta, batch, keeps_everything)
    named = make_task(Reversed, backend=path, head="fc")
    assert named.head.name == "fc"
    near(named.logits_of(theta, named.features(theta, batch.x)), named.logits(theta, batch.x))
    with pytest.raises(ModelError, match=r"'head' is no nn\.Linear of the model; those are fc, body"):
        make_task(Reversed, head="head")


def test_a_chain_has_one_possible_head() -> None:
    assert make_task(dense, head="5").head.name == "5"
    with pytest.raises(ModelError, match="output is that of layer '5', not of '1'"):
        make_task(dense, backend="stacked", head="1")


@pytest.mark.parametrize("path", ["rows", "vmap"])
def test_models_that_do_not_end_in_a_linear_layer_are_told_what_to_do(path: str, make_batch: MakeBatch) -> None:
    task = make_task(lambda: LogProbabilities(), backend=path, head="fc")
    with pytest.raises(ModelError, match="cross-entropy needs no softmax"):
        task.features(starts(task, 1), torch.zeros(1, 2, 6))
    with pytest.raises(ModelError, match=r"has no nn\.Linear to take features from"):
        make_task(one_by_one_head, backend=path).head  # noqa: B018
    task = make_task(OverTime, backend=path)
    with pytest.raises(ModelError, match="flatten or pool"):
        task.features(starts(task, 1), torch.zeros(1, 2, 6))


def test_a_computed_head_is_refused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(4, CLASSES)))

    with pytest.raises(ModelError, match=r"'2' is no nn\.Linear of the model; those are 0"):
        make_task(build, head="2")
    with pytest.raises(ModelError, match="not made of trainable parameters of its own"):
        find_head(nn.Linear(4, CLASSES), ())  # a model that trains something else


# ---- bad input


@every_path
def test_deltas_of_a_wrong_shape_are_an_error(model: str, path: str, make_batch: MakeBatch) -> None:
    """They would be broadcast otherwise."""
    task, shape = make(model, path)
    theta, batch = starts(task, 2), make_batch(2, 5, shape, CLASSES)
    wrong: list[tuple[FeatureLoss, str]] = [
        (lambda phi, z, batch, rows: (z[..., :1], None), "dz of a feature loss"),
        (lambda phi, z, batch, rows: (None, phi[:, :1]), "dphi of a feature loss"),
        (by_autograd(lambda phi, z, batch, rows: z.sum()), "one number per client"),
        (lambda phi, z, batch, rows: (z @ z, None), "the feature loss fails"),
    ]
    for feature_loss, message in wrong:
        with pytest.raises(ModelError, match=message):
            task.grad(theta, batch, feature_loss)


def test_tasks_without_a_head_refuse(make_batch: MakeBatch) -> None:
    task = make_task(dense)
    mixture, batch = MixtureTask(task, 2), make_batch(1, 2, (2, 3), CLASSES)
    theta = mixture.init(0)[None]
    for act in (
        lambda: mixture.grad(theta, batch, keeps_everything),
        lambda: mixture.descend_(theta, batch, 0.1, None, keeps_everything),
        lambda: mixture.head,
        lambda: mixture.features(theta, batch.x),
    ):
        with pytest.raises(ModelError, match=r"linear layer|one nn\.Linear"):
            act()
    gaussian = GaussianTask(torch.ones(1), 1.0)
    with pytest.raises(ModelError, match="Gaussian"):
        gaussian.grad(gaussian.init(0)[None], batch, keeps_everything)


@dataclass
class Kept:
    """Deltas that were worked out before, handed out as views."""

    dz: Tensor
    dphi: Tensor

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        which = slice(int(rows[0]), int(rows[-1]) + 1)
        return self.dz[which], self.dphi[which]


def test_the_engine_leaves_the_methods_tensors_alone(make_batch: MakeBatch) -> None:
    """Deltas that the method keeps are not written to, with one rate or many."""
    for model, path in PATHS:
        task, shape = make(model, path)
        theta, batch = starts(task, 2), make_batch(2, 3, shape, CLASSES)
        phi, z = task.features_and_logits(theta, batch.x)
        dz, dphi = torch.randn_like(z), torch.randn_like(phi)
        copies = dz.clone(), dphi.clone()
        kept = Kept(dz, dphi)
        for lr in (0.1, torch.tensor([0.1, 0.2])):
            task.descend_(theta.clone(), batch, lr, None, kept)
        task.grad(theta, batch, kept)
        assert torch.equal(dz, copies[0])
        assert torch.equal(dphi, copies[1])
