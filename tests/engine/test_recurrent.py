"""LSTM and GRU layers by hand against those of torch and plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import example_gradients
from kinfed.data.examples.batches import Batch
from kinfed.engine.backends.recurrent import LastOutput, RecurrentNet
from kinfed.engine.contract.descent import Terms
from kinfed.engine.task_factory import StackedTask, make_task
from kinfed.engine.zoo.models import build_model
from kinfed.errors import ConfigError, ModelError

CLASSES = 3


CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}


def network(inputs: int, hidden: int, layers: int, bias: bool = True, cell: str = "lstm") -> nn.Sequential:
    recurrent = CELLS[cell](inputs, hidden, layers, batch_first=True)
    return nn.Sequential(recurrent, LastOutput(), nn.Linear(hidden, CLASSES, bias=bias))


def case(
    n: int, batch: int, length: int, inputs: int, hidden: int, layers: int, bias: bool = True, seed: int = 0,
    cell: str = "lstm",
):  # fmt: skip
    task = make_task(lambda: network(inputs, hidden, layers, bias, cell), backend="stacked")
    assert isinstance(task, StackedTask)
    assert isinstance(task.net, RecurrentNet)
    g = torch.Generator().manual_seed(seed)
    theta = 0.7 * torch.randn(n, task.num_params, generator=g)
    x = torch.randn(n, batch, length, inputs, generator=g)
    y = torch.randint(0, CLASSES, (n, batch), generator=g)
    return task, theta, Batch(x, y, torch.rand(n, batch, generator=g), torch.arange(n))


def plain(task: StackedTask, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and gradient of one client by torch alone, in float64."""
    module = task.module_of(row).double()
    z = module(x.double() if x.is_floating_point() else x)
    loss = (nn.functional.cross_entropy(z, y, reduction="none") * weight.double()).sum()
    grads = torch.autograd.grad(loss, list(module.parameters()))
    return z.detach(), torch.cat([g.reshape(-1) for g in grads])


SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip


@pytest.mark.parametrize("cell", CELLS)
@given(SIZES)
def test_gradients_are_those_of_torch(cell: str, sizes: tuple[int, int, int, int, int, int, bool, int]) -> None:
    task, theta, batch = case(*sizes, cell=cell)
    logits, found = task.logits(theta, batch.x), task.grad(theta, batch)
    for k in range(len(theta)):
        z, expected = plain(task, theta[k], batch.x[k], batch.y[k], batch.weight[k])
        torch.testing.assert_close(logits[k].double(), z, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[k].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_the_papers_sequences_stay_exact(cell: str) -> None:
    """25 steps: what a wrong step back adds up to would show."""
    task, theta, batch = case(2, 10, 25, 50, 40, 2, cell=cell)
    theta *= 0.3
    found = task.grad(theta, batch)
    for k in range(2):
        expected = plain(task, theta[k], batch.x[k], batch.y[k], batch.weight[k])[1]
        torch.testing.assert_close(found[k].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
@given(SIZES, st.booleans(), st.booleans())
def test_a_step_is_the_gradient_and_the_pull(cell: str, sizes, own_rates: bool, own_pulls: bool) -> None:
    task, theta, batch = case(*sizes, cell=cell)
    n = len(theta)
    lr = torch.linspace(0.1, 0.5, n, dtype=torch.float64) if own_rates else 0.3
    lam = torch.linspace(0.2, 0.9, n, dtype=torch.float64) if own_pulls else 0.4
    center = torch.randn(theta.shape, generator=torch.Generator().manual_seed(7))
    columns = [v.to(torch.float32)[:, None] if isinstance(v, Tensor) else v for v in (lr, lam)]
    expected = theta - columns[0] * (task.grad(theta, batch) + columns[1] * (theta - center))
    moved = theta.clone()
    task.descend_(moved, batch, lr.to(torch.float32) if isinstance(lr, Tensor) else lr, (lam, center))
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=1e-5)
    without = theta.clone()
    task.descend_(without, batch, 0.3)
    torch.testing.assert_close(without, theta - 0.3 * task.grad(theta, batch), atol=1e-5, rtol=1e-5)


def test_norms_are_those_of_single_examples() -> None:
    task, theta, batch = case(2, 4, 5, 3, 4, 2)
    single = example_gradients(task, theta, batch)
    torch.testing.assert_close((single * batch.weight[..., None]).sum(1), task.grad(theta, batch), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(task.example_norms(theta, batch), single.norm(dim=-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_and_models_stay_as_they_were(cell: str) -> None:
    task, theta, batch = case(2, 3, 4, 3, 4, 2, cell=cell)
    before = theta.clone(), batch.x.clone()
    task.grad(theta, batch)
    task.logits(theta.expand(2, -1), batch.x)
    assert torch.equal(theta, before[0])
    assert torch.equal(batch.x, before[1])


def test_one_model_shared_by_all_rows_is_read_without_a_copy() -> None:
    task, theta, batch = case(3, 2, 4, 3, 4, 2)
    shared = theta[:1].expand(3, -1)
    torch.testing.assert_close(task.logits(shared, batch.x), task.logits(shared.contiguous(), batch.x))
    torch.testing.assert_close(task.grad(shared, batch), task.grad(shared.contiguous(), batch))


OTHERS = {
    "both ways": lambda: nn.Sequential(nn.LSTM(3, 2, 1, True, True, 0.0, True), LastOutput(), nn.Linear(4, 2)),
    "time first": lambda: nn.Sequential(nn.LSTM(3, 4), LastOutput(), nn.Linear(4, 2)),
    "projected": lambda: nn.Sequential(nn.LSTM(3, 5, batch_first=True, proj_size=4), LastOutput(), nn.Linear(4, 2)),
    "no bias": lambda: nn.Sequential(nn.LSTM(3, 4, bias=False, batch_first=True), LastOutput(), nn.Linear(4, 2)),
    "two heads": lambda: nn.Sequential(nn.LSTM(3, 4, batch_first=True), LastOutput(), nn.Linear(4, 4), nn.Linear(4, 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_recurrent_networks_go_row_by_row(kind: str) -> None:
    assert RecurrentNet.from_module(OTHERS[kind]()) is None
    assert make_task(OTHERS[kind]).backend == "rows"


def test_tied_layers_are_not_stacked() -> None:
    module = network(4, 4, 2)
    module[0].weight_ih_l1 = module[0].weight_ih_l0
    assert RecurrentNet.from_module(module) is None


def test_small_networks_are_stacked_and_large_ones_left_to_torch() -> None:
    small = make_task(lambda: build_model("lstm", (25, 50), 2, {"hidden": 32}))
    large = make_task(lambda: build_model("lstm", (25, 300), 2))
    assert (small.backend, large.backend) == ("stacked", "rows")
    assert make_task(lambda: build_model("gru", (32, 8), 2), examples=1e9).backend == "stacked"
    with pytest.raises(ModelError, match="no loops for GRU layers"):
        make_task(lambda: build_model("gru", (32, 8), 2), backend="fused")
    # 4 gates x 256 units, inputs 300 and 256, two biases a layer; then 256 x 2 + 2
    assert large.num_params == 1024 * (300 + 256 + 2) + 1024 * (256 + 256 + 2) + 514


@pytest.mark.parametrize("cell", CELLS)
def test_paths_agree(cell: str) -> None:
    def build() -> nn.Module:
        return build_model(cell, (7, 5), 2, {"hidden": 6, "layers": 3})

    both = [make_task(build, backend=path) for path in ("stacked", "rows")]
    _, _, batch = case(2, 3, 7, 5, 4, 1)
    batch = Batch(batch.x, batch.y % 2, batch.weight, batch.ids)
    theta = torch.stack([both[0].init(0), both[0].init(1)])
    torch.testing.assert_close(both[0].grad(theta, batch), both[1].grad(theta, batch), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(both[0].logits(theta, batch.x), both[1].logits(theta, batch.x), atol=1e-6, rtol=1e-5)


def test_wrong_inputs_are_named() -> None:
    task, theta, batch = case(1, 2, 4, 3, 4, 1)
    with pytest.raises(ModelError, match=r"sequences of 3 numbers, \[length, 3\]; got examples of shape \[4, 2\]"):
        task.logits(theta, batch.x[..., :2])
    with pytest.raises(ModelError, match=r"lstm reads sequences of vectors.* got examples of shape \[1, 28, 28\]"):
        build_model("lstm", (1, 28, 28), 2)
    with pytest.raises(ConfigError, match="model lstm: hidden must be at least 1; got 0"):
        build_model("lstm", (4, 3), 2, {"hidden": 0})
    with pytest.raises(ConfigError, match="unknown option of model lstm 'hiden'; did you mean hidden"):
        build_model("lstm", (4, 3), 2, {"hiden": 3})
    with pytest.raises(ConfigError, match="model mlp has no options; got 'hidden'"):
        build_model("mlp", (4,), 2, {"hidden": 3})


class Own(nn.Module):
    """A module of a user's: how it reads the answer of its layer is what tests vary."""

    def __init__(self, cell: str = "gru", read: str = "last", padding: int | None = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, padding_idx=padding)
        self.cell, self.out = CELLS[cell](4, 5, 2, batch_first=True), nn.Linear(5, CLASSES)
        self.read = read
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.cell(self.words(x))
        self.kept = out
        top = state[0] if isinstance(self.cell, nn.LSTM) else state
        if self.read == "data" and x.sum() > 0:
            return self.out(out[:, -2])
        reads = {
            "last": lambda: out[:, -1], "all of last": lambda: out[:, -1, :], "state": lambda: top[-1],
            "first": lambda: out[:, 0], "mean": lambda: out.mean(1), "data": lambda: out[:, -1],
            "lower state": lambda: top[0], "bent": lambda: out[:, -1].relu(),
            "mode": lambda: out[:, -1] if self.training else out[:, 0],
        }  # fmt: skip
        z: Tensor = self.out(reads[self.read]())
        return z


TOKENS = torch.randint(0, 11, (2, 4, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("read", ["last", "all of last", "state"])
@pytest.mark.parametrize("cell", CELLS)
def test_own_modules_with_an_embedding_train_in_lockstep(cell: str, read: str, padding: int | None) -> None:
    """The same gradients, steps with pulls and outputs as torch alone gives."""

    def build() -> nn.Module:
        return Own(cell, read, padding=padding)

    task = make_task(build)
    assert isinstance(task, StackedTask)
    rows = make_task(build, backend="rows")
    theta = torch.stack([task.init(0), task.init(1)])
    batch = Batch(TOKENS, torch.arange(8).view(2, 4) % CLASSES, torch.rand(2, 4), torch.arange(2))
    for k in range(2):
        z, expected = plain(task, theta[k], TOKENS[k], batch.y[k], batch.weight[k])
        torch.testing.assert_close(task.logits(theta, TOKENS)[k].double(), z, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(task.grad(theta, batch)[k].double(), expected, atol=1e-6, rtol=1e-6)
    for rate in (0.3, torch.tensor([0.1, 0.5])):
        ours, theirs = theta.clone(), theta.clone()
        terms = Terms(proximal=(0.2, theta + 0.1))
        task.take_step_(ours, batch, rate, terms)
        rows.take_step_(theirs, batch, rate, terms)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    with pytest.raises(ModelError, match=r"embeds tokens 0..10; got 0..11"):
        task.logits(theta, TOKENS + (TOKENS == 10))


@pytest.mark.parametrize("read", ["first", "mean", "data", "lower state", "bent", "mode"])
@pytest.mark.parametrize("cell", CELLS)
def test_what_reads_anything_else_goes_row_by_row(cell: str, read: str) -> None:
    assert make_task(lambda: Own(cell, read)).backend == "rows"


def held(module: nn.Module, x: Tensor) -> Any:
    torch.set_grad_enabled(False)
    answer = module(x)
    torch.set_grad_enabled(True)
    return answer


MODES = {
    "with no_grad": lambda module, x: torch.no_grad()(module)(x),
    "set_grad_enabled": held,
    "autocast": lambda module, x: torch.autocast("cpu", torch.bfloat16)(module)(x),
}


@pytest.mark.parametrize("part", ["words", "cell"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_called_under_a_mode_of_torch_goes_row_by_row(mode: str, part: str) -> None:
    """A graph keeps the layers and forgets the mode: what a module freezes would be trained."""

    class Moded(Own):
        def forward(self, x: Tensor) -> Tensor:
            called = MODES[mode]
            words = called(self.words, x) if part == "words" else self.words(x)
            out, _ = called(self.cell, words) if part == "cell" else self.cell(words)
            z: Tensor = self.out(out[:, -1])
            return z

    assert RecurrentNet.from_module(Moded()) is None


def test_a_trace_leaves_the_module_as_it_is() -> None:
    module = Own("gru")
    assert RecurrentNet.from_module(module) is not None
    assert module.kept is None
    assert module.training
    module.cell.register_forward_hook(lambda *_: None)
    assert RecurrentNet.from_module(module) is None
