"""Compiled LSTM networks against torch's own LSTM in float64, against the torch path, and against themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kinfed.data.examples.batches import Batch, LocalTraining, Split
from kinfed.data.examples.features import Features
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.engine.contract.objective import SQUARED
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.training.sgd import sgd
from kinfed.engine.zoo.models import build_model
from kinfed.errors import ModelError

pytestmark = pytest.mark.timeout(400)  # the first of these tests on a machine compiles


def network(inputs: int, units: int, layers: int, outputs: int = 3, bias: bool = True) -> nn.Module:
    lstm = nn.LSTM(inputs, units, layers, batch_first=True)
    return nn.Sequential(lstm, LastOutput(), nn.Linear(units, outputs, bias=bias))


def random_split(counts: list[int], length: int, inputs: int, *, numbered: bool = False) -> Split:
    """Sequences of vectors as they are, or as numbers of a table of vectors."""
    generator = torch.Generator().manual_seed(length)
    total = sum(counts)
    features = Features(torch.randn(total, length, inputs, generator=generator))
    if numbered:
        raw = torch.randint(0, 11, (total, length), generator=generator).to(torch.int32)
        features = Features(raw, vectors=torch.randn(11, inputs, generator=generator))
    count = torch.tensor(counts)
    return Split(
        features=features,
        labels=torch.randint(0, 3, (total,), generator=generator),
        ids=torch.arange(len(counts)),
        start=count.cumsum(0) - count,
        count=count,
        rows=torch.randperm(total, generator=generator),
        seed=3,
        round=2,
    )


def by_torch(task: ModuleTask, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The gradient of one client by torch alone, in float64."""
    module = task.module_of(row).double()
    loss = (nn.functional.cross_entropy(module(x.double()), y, reduction="none") * weight.double()).sum()
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])


SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 7), st.integers(1, 6), st.integers(1, 19), st.integers(1, 21), st.integers(1, 3),
    st.booleans(), st.sampled_from([0.3, 1.0, 30.0]),
)  # fmt: skip


@settings(max_examples=25)
@given(SIZES)
def test_gradients_are_those_of_torch(sizes: tuple[int, int, int, int, int, int, bool, float]) -> None:
    """Sizes that fill no vector, gates that are wide open or shut, and examples that do not count."""
    n, batch, length, inputs, units, layers, bias, spread = sizes
    task = make_task(lambda: network(inputs, units, layers, bias=bias), backend="fused")
    g = torch.Generator().manual_seed(batch)
    theta = torch.randn(n, task.num_params, generator=g)
    weight = torch.rand(n, batch, generator=g) * (torch.rand(n, batch, generator=g) < 0.8)
    y = torch.randint(0, 3, (n, batch), generator=g)
    one = Batch(spread * torch.randn(n, batch, length, inputs, generator=g), y, weight, torch.arange(n))
    ours = task.grad(theta, one)
    for k in range(n):
        expected = by_torch(task, theta[k], one.x[k], y[k], weight[k])
        largest = float(expected.abs().max())
        torch.testing.assert_close(ours[k].double(), expected, rtol=1e-5, atol=1e-5 * max(largest, 1.0))


def test_one_step_by_hand() -> None:
    """One unit, one number, two times: the formulas of the layer, written out, and a finite difference of the loss."""
    task = make_task(lambda: network(1, 1, 1, outputs=2), backend="fused")
    row = torch.tensor([0.5, -0.4, 0.8, 0.3, 0.2, 0.1, -0.7, 0.6, 0.1, 0.2, -0.1, 0.3, 0.05, -0.2, 0.1, 0.4, 1.5, -1.0,
                        0.2, 0.1])  # fmt: skip
    x = torch.tensor([1.0, -0.5])

    def loss(w: Tensor) -> Tensor:
        h = c = w.new_zeros(())
        for t in range(2):
            z = w[:4] * x[t] + w[4:8] * h + w[8:12] + w[12:16]
            i, f, o = torch.sigmoid(z[[0, 1, 3]])
            c = f * c + i * torch.tanh(z[2])
            h = o * torch.tanh(c)
        logits = w[16:18] * h + w[18:20]
        return torch.logsumexp(logits, 0) - logits[1]

    exact = row.double()
    tilts = 1e-5 * torch.eye(20, dtype=torch.float64)
    slope = torch.stack([(loss(exact + tilt) - loss(exact - tilt)) / 2e-5 for tilt in tilts])
    batch = Batch(x.view(1, 1, 2, 1), torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.arange(1))
    torch.testing.assert_close(task.grad(row[None], batch)[0].double(), slope, rtol=1e-5, atol=1e-6)
    moved = row[None].clone()
    task.descend_(moved, batch, 0.1, (0.5, torch.ones(1, 20)))
    torch.testing.assert_close(moved[0].double(), exact - 0.1 * (slope + 0.5 * (exact - 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numbered", [False, True], ids=["vectors", "numbers of vectors"])
@pytest.mark.parametrize(
    ("rule", "frozen"),
    [({}, ()), ({"weight_decay": 0.1}, ("2",)), ({"momentum": 0.9}, ("0.weight_hh_l0", "0.bias_ih_l1"))],
    ids=["plain", "head alone", "momentum"],
)
def test_a_whole_loop_is_that_of_the_torch_path(numbered: bool, rule: dict[str, float], frozen: tuple[str]) -> None:
    fused, stacked = (make_task(lambda: network(6, 9, 2), backend=name) for name in ("fused", "stacked"))
    split = random_split([7, 2, 11], 5, 6, numbered=numbered)
    theta = torch.stack([fused.init(0, number) for number in range(3)])
    mask = fused.layer_mask(frozen) if frozen else None
    training = LocalTraining(lr=0.1, batch=4, steps=None, epochs=2, **rule)  # type: ignore[arg-type]
    drift = None if mask is not None else 0.1 * torch.randn(3, fused.num_params)
    assert fused.whole_loop(split.batches(training)) is not None
    ours, theirs = (
        sgd(task, theta, split.batches(training), mask=mask, drift=drift, proximal=(0.2, theta.flip(0)))
        for task in (fused, stacked)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    scores = [task.score(ours, split) for task in (fused, stacked)]
    torch.testing.assert_close(scores[0].loss, scores[1].loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores[0].correct, scores[1].correct)


def test_a_client_is_trained_the_same_in_any_company() -> None:
    """Bit for bit, where batches of others are larger and clients take other numbers of steps."""
    task = make_task(lambda: network(6, 9, 2), backend="fused")
    split = random_split([7, 2, 11], 5, 6)
    theta = torch.stack([task.init(0, number) for number in range(3)])
    training = LocalTraining(lr=0.1, batch=4, steps=None, epochs=1)
    together = sgd(task, theta, split.batches(training))
    for client in range(3):
        alone = split.take(torch.tensor([client]))
        mine = sgd(task, theta[client : client + 1], alone.batches(training))
        assert torch.equal(mine[0], together[client])
        assert torch.equal(task.score(mine, alone).loss[0], task.score(together, split).loss[client])


def test_sequences_of_numbers_are_forecast() -> None:
    """An LSTM with one output and the squared error."""
    fused, stacked = (
        make_task(lambda: network(4, 6, 1, outputs=1), backend=name, objective=SQUARED) for name in ("fused", "stacked")
    )
    split = random_split([5, 3], 4, 4)
    split.labels = split.features.raw[:, -1, 0].clone()
    theta = torch.stack([fused.init(0, number) for number in range(2)])
    training = LocalTraining(lr=0.1, batch=3, steps=3)
    torch.testing.assert_close(*(sgd(task, theta, split.batches(training)) for task in (fused, stacked)))


def test_examples_of_another_shape_are_refused_as_on_the_torch_path() -> None:
    task = make_task(lambda: network(4, 6, 1), backend="fused")
    split = random_split([5], 4, 3)
    assert task.whole_loop(split.batches(LocalTraining(batch=2))) is None
    with pytest.raises(ModelError, match="sequences of 4 numbers"):
        sgd(task, task.init(0)[None], split.batches(LocalTraining(batch=2)))
    wide = replace(split, features=Features(torch.randn(5, 4)))
    with pytest.raises(ModelError, match="sequences of 4 numbers"):
        task.score(task.init(0)[None], wide)


def test_long_runs_of_the_shipped_model_are_compiled() -> None:
    def build() -> nn.Module:
        return build_model("lstm", (25, 300), 2)

    assert make_task(build, examples=1e9).backend == "fused"
    assert make_task(build).backend == "rows"
    assert make_task(lambda: build_model("lstm", (25, 300), 2, {"hidden": 512}), examples=1e9).backend == "rows"
