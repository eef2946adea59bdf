"""Three ways to a gradient, one answer: that of plain autograd."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import MakeBatch, MakeSplit, example_gradients
from kinfed.data.examples.batches import Batch
from kinfed.engine.task_factory import ModuleTask, Task, make_task
from kinfed.engine.zoo.classics import cnn, cnn_fomo, cnn_small, cnn_tutorial, mlp, mlr
from kinfed.errors import ModelError
from kinfed.testing import Bench

Build = Callable[[], nn.Module]


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))


def partly_biased() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3, bias=False))


def nested() -> nn.Module:
    body = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.ReLU(), nn.Identity(), nn.Linear(5, 4)), nn.Tanh())
    return nn.Sequential(nn.Sequential(nn.Flatten()), body, nn.Linear(4, 3))


def single_layer() -> nn.Module:
    return nn.Linear(6, 3)


def many_classes() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 20))


VECTOR, TABLE = (6,), (2, 3)
DENSE: dict[str, tuple[Build, tuple[int, ...]]] = {
    "mlr": (lambda: mlr(TABLE, 3), TABLE),
    "mlp": (lambda: mlp(TABLE, 3), TABLE),
    "tanh": (tanh_net, VECTOR),
    "without bias": (without_bias, TABLE),
    "partly biased": (partly_biased, VECTOR),
    "nested": (nested, TABLE),
    "single layer": (single_layer, VECTOR),
    "many classes": (many_classes, VECTOR),
}
CONVOLUTIONAL: dict[str, tuple[Build, tuple[int, ...]]] = {
    "cnn_small": (lambda: cnn_small((2, 8, 9), 3), (2, 8, 9)),
    "cnn_tutorial": (lambda: cnn_tutorial((3, 16, 18), 3), (3, 16, 18)),
    "cnn_fomo": (lambda: cnn_fomo((1, 18, 18), 3), (1, 18, 18)),
    "cnn": (lambda: cnn((1, 16, 16), 3), (1, 16, 16)),
}
CASES = [(name, path) for name in DENSE for path in ("fused", "stacked", "rows", "vmap")]
CASES += [(name, path) for name in CONVOLUTIONAL for path in ("rows", "vmap")]
every_case = pytest.mark.parametrize(("name", "path"), CASES)
# What does not depend on the kind of model is checked on one dense net per path and one with convolutions.
FEW = [("tanh", "stacked"), ("nested", "stacked"), ("tanh", "rows"), ("tanh", "vmap"), ("cnn_small", "rows")]
few_cases = pytest.mark.parametrize(("name", "path"), FEW)


def make(name: str, path: str) -> tuple[ModuleTask, tuple[int, ...]]:
    build, shape = (DENSE | CONVOLUTIONAL)[name]
    return make_task(build, backend=path), shape


def starts(task: Task, n: int) -> Tensor:
    """Different models in different rows."""
    return torch.stack([task.init(0, number) for number in range(n)])


def plain_module(task: ModuleTask, row: Tensor) -> nn.Module:
    """The module with the numbers of a row, filled in by hand in the order of its parameters."""
    module = task.build()
    position = 0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(row[position : position + parameter.numel()].reshape(parameter.shape))
            position += parameter.numel()
    assert position == len(row)
    return module


def plain_loss(module: nn.Module, batch: Batch, row: int) -> Tensor:
    losses = nn.functional.cross_entropy(module(batch.x[row]), batch.y[row], reduction="none")
    return (losses * batch.weight[row]).sum()


def plain_grad(task: ModuleTask, theta: Tensor, batch: Batch) -> Tensor:
    rows = []
    for i, row in enumerate(theta):
        module = plain_module(task, row)
        plain_loss(module, batch, i).backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
    return torch.stack(rows)


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- gradients


@every_case
def test_gradient_is_that_of_plain_autograd(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    assert task.backend == path
    theta = starts(task, 3)
    batch = make_batch(3, 5, shape, 3, ragged=True)
    before = theta.clone()
    near(task.grad(theta, batch), plain_grad(task, theta, batch))
    assert torch.equal(theta, before)
    assert not task.grad(theta, batch).requires_grad


@every_case
def test_logits_are_those_of_the_module(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta = starts(task, 2)
    x = make_batch(2, 4, shape, 3).x
    z = task.logits(theta, x)
    near(z, torch.stack([plain_module(task, theta[i])(x[i]).detach() for i in range(2)]))
    near(z[1], task.module_of(theta[1])(x[1]).detach())


layers = st.tuples(st.integers(1, 6), st.booleans(), st.sampled_from([None, nn.ReLU, nn.Tanh]))


@given(
    inputs=st.integers(1, 5),
    chain=st.lists(layers, min_size=1, max_size=4),
    n=st.integers(1, 4),
    size=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_stacked_nets_of_any_shape(
    make_batch: MakeBatch, inputs: int, chain: list[tuple[int, bool, type | None]], n: int, size: int, seed: int
) -> None:
    def build() -> nn.Module:
        modules: list[nn.Module] = []
        width = inputs
        for number, (outputs, bias, activation) in enumerate(chain):
            modules.append(nn.Linear(width, outputs, bias=bias))
            width = outputs
            if activation is not None and number < len(chain) - 1:
                modules.append(activation())
        return nn.Sequential(*modules)

    task = make_task(build)
    assert task.backend == "stacked"
    theta = starts(task, n)
    batch = make_batch(n, size, (inputs,), chain[-1][0], seed=seed, ragged=True)
    wanted = plain_grad(task, theta, batch)
    near(task.grad(theta, batch), wanted)
    moved = theta.clone()
    task.descend_(moved, batch, 0.3)
    near(moved, theta - 0.3 * wanted)
    near(task.example_norms(theta, batch), example_gradients(task, theta, batch).norm(dim=2))


# --- steps


RATES = {
    "numbers": (0.3, 0.7),
    "rate per client": (torch.tensor([0.1, 0.5, 0.0]), 0.7),
    "pull per client": (0.3, torch.tensor([0.0, 2.0, 5.0])),
    "both per client": (torch.tensor([0.1, 0.5, 0.2]), torch.tensor([0.0, 2.0, 7.0])),
    "both in float64": (torch.tensor([0.1, 0.5, 0.2]).double(), torch.tensor([0.0, 2.0, 7.0]).double()),
}


@few_cases
@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("pulled", [False, True])
def test_a_step_follows_its_formula(make_batch: MakeBatch, name: str, path: str, rates: str, pulled: bool) -> None:
    task, shape = make(name, path)
    theta, center = starts(task, 3), starts(task, 6)[3:]
    batch = make_batch(3, 5, shape, 3, ragged=True)
    lr, lam = RATES[rates]
    eta = torch.as_tensor(lr, dtype=torch.float32).expand(3)[:, None]
    strength = torch.as_tensor(lam, dtype=torch.float32).expand(3)[:, None] * (1.0 if pulled else 0.0)
    wanted = theta - eta * (plain_grad(task, theta, batch) + strength * (theta - center))
    home = center.clone()
    task.descend_(theta, batch, lr, (lam, center) if pulled else None)
    near(theta, wanted)
    assert torch.equal(center, home)


@few_cases
def test_a_step_writes_through_a_view_and_nowhere_else(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta = starts(task, 4)
    before = theta.clone()
    batch = make_batch(2, 3, shape, 3)
    center = task.init(0, 9).expand(2, -1)
    task.descend_(theta[1:3], batch, 0.2, (0.5, center))
    g = plain_grad(task, before[1:3], batch) + 0.5 * (before[1:3] - center)
    near(theta[1:3], before[1:3] - 0.2 * g)
    assert torch.equal(theta[[0, 3]], before[[0, 3]])


@every_case
def test_five_steps_are_those_of_torch_optim(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta = starts(task, 2)
    modules = [plain_module(task, row) for row in theta]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    for step in range(5):
        batch = make_batch(2, 4, shape, 3, seed=step, ragged=True)
        task.descend_(theta, batch, 0.1)
        for i, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            optimizer.zero_grad()
            plain_loss(module, batch, i).backward()
            optimizer.step()
    trained = [task.flatten(dict(module.named_parameters())) for module in modules]
    torch.testing.assert_close(theta, torch.stack(trained), rtol=1e-4, atol=2e-5)


@few_cases
def test_a_shared_start_is_one_row_seen_many_times(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    batch = make_batch(3, 4, shape, 3)
    row = task.init(0)
    near(task.grad(row.expand(3, -1), batch), task.grad(row.repeat(3, 1), batch))
    near(task.logits(row.expand(3, -1), batch.x), task.logits(row.repeat(3, 1), batch.x))
    near(task.example_norms(row.expand(3, -1), batch), task.example_norms(row.repeat(3, 1), batch))


@few_cases
def test_rows_do_not_see_each_other(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta, batch = starts(task, 4), make_batch(4, 3, shape, 3)
    whole = task.grad(theta, batch)
    for i in range(4):
        near(task.grad(theta[i : i + 1], batch.rows(slice(i, i + 1)))[0], whole[i])
    order = torch.tensor([2, 0, 3, 1])
    near(task.grad(theta[order], batch.rows(order)), whole[order])


@every_case
@pytest.mark.parametrize("garbage", [7.0, -1e18])
def test_padding_is_invisible(make_batch: MakeBatch, name: str, path: str, garbage: float) -> None:
    task, shape = make(name, path)
    theta = starts(task, 3)
    batch = make_batch(3, 5, shape, 3, ragged=True)
    padded = batch.weight == 0
    assert bool(padded.any())
    dirty = Batch(batch.x.clone(), batch.y.clone(), batch.weight, batch.ids)
    dirty.x[padded] = garbage
    dirty.y[padded] = 2
    near(task.grad(theta, dirty), task.grad(theta, batch))
    clean_step, dirty_step = theta.clone(), theta.clone()
    task.descend_(clean_step, batch, 0.5)
    task.descend_(dirty_step, dirty, 0.5)
    near(dirty_step, clean_step)


def test_a_batch_without_any_example_moves_nothing(make_batch: MakeBatch) -> None:
    """An empty Poisson batch is all padding."""
    for name, path in FEW:
        task, shape = make(name, path)
        theta, batch = starts(task, 2), make_batch(2, 1, shape, 3)
        batch.weight.zero_()
        assert float(task.grad(theta, batch).abs().max()) == 0


# --- examples one by one


@every_case
def test_norms_of_examples_are_those_of_a_loop(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta, batch = starts(task, 2), make_batch(2, 3, shape, 3, ragged=True)
    norms = task.example_norms(theta, batch)
    assert norms.shape == (2, 3)
    for b in range(3):
        one = Batch(batch.x[:, b : b + 1], batch.y[:, b : b + 1], torch.ones(2, 1), batch.ids)
        near(norms[:, b], plain_grad(task, theta, one).norm(dim=1))


@few_cases
def test_losses_are_cross_entropies(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta, batch = starts(task, 2), make_batch(2, 4, shape, 3)
    wanted = [nn.functional.cross_entropy(task.logits(theta, batch.x)[i], batch.y[i], reduction="none") for i in (0, 1)]
    near(task.losses(theta, batch), torch.stack(wanted))


# --- scores


@pytest.mark.parametrize("path", ["stacked", "rows", "vmap"])
def test_a_broken_model_is_never_right(make_split: MakeSplit, path: str) -> None:
    part = make_split([7, 5])
    task = make_task(lambda: nn.Linear(1, 3), backend=path)
    theta = starts(task, 2)
    alone = task.score(theta[1:], part.take(torch.tensor([1])))
    theta[0] = torch.nan
    score = task.score(theta, part)
    assert score.correct[0] == 0
    assert score.correct[1] == alone.correct[0]


@pytest.mark.parametrize("path", ["stacked", "rows", "vmap"])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 300, 0, 17, 256], [0, 0], [257]])
@pytest.mark.parametrize("favourite", [0, 1, 2])
def test_scores_are_plain_counts(make_split: MakeSplit, path: str, sizes: list[int], favourite: int) -> None:
    """Models that lean towards each class in turn, so that examples which pad a row are right in one case."""
    part = make_split(sizes)
    part.features.raw /= 100
    task = make_task(lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 3)), backend=path)
    theta = 3 * starts(task, len(sizes))
    task.unflatten(theta)["2.bias"][:, favourite] += 2
    score = task.score(theta, part)
    assert (score.correct.dtype, score.loss.dtype) == (torch.float64, torch.float64)
    assert score.count.tolist() == sizes
    for k, n in enumerate(sizes):
        begin = int(part.start[k])
        rows = part.rows[begin : begin + n]
        z = plain_module(task, theta[k])(part.features.raw[rows]).detach()
        y = part.labels[rows]
        assert float(score.correct[k]) == int((z.argmax(1) == y).sum())
        assert float(score.loss[k]) == pytest.approx(
            float(nn.functional.cross_entropy(z, y, reduction="sum")), rel=1e-5
        )
    mean = task.mean_loss(theta, part)
    assert torch.equal(mean.isnan(), part.count == 0)
    has = part.count > 0
    near(mean[has], score.loss[has] / part.count[has])


# --- parameters


@pytest.mark.parametrize("name", [*DENSE, *CONVOLUTIONAL])
def test_rows_and_modules_hold_the_same_numbers(name: str) -> None:
    task, _ = make(name, "vmap")
    row = task.init(3)
    assert row.shape == (task.num_params,)
    assert torch.equal(task.flatten(task.unflatten(row)), row)
    module = task.build()
    module.load_state_dict(task.state_dict(row))
    assert torch.equal(task.flatten(dict(module.named_parameters())), row)
    ready = task.module_of(row)
    assert not ready.training
    assert torch.equal(task.flatten(dict(ready.named_parameters())), row)
    row[0] += 1  # neither shares memory with the row
    assert not torch.equal(task.flatten(dict(ready.named_parameters())), row)
    assert [layer.start for layer in task.slots[1:]] == [layer.stop for layer in task.slots[:-1]]


def test_unflatten_gives_views_of_rows() -> None:
    task, _ = make("tanh", "vmap")
    theta = starts(task, 2)
    views = task.unflatten(theta)
    assert views["2.weight"].shape == (2, 4, 5)
    views["2.weight"][1, 0, 0] = 77
    assert float(task.unflatten(theta[1])["2.weight"][0, 0]) == 77


def test_layers_are_masked_by_name() -> None:
    task, _ = make("nested", "stacked")
    assert task.layer_names() == ("1.0", "1.1.2", "2")
    assert int(task.layer_mask(("2",)).sum()) == 4 * 3 + 3
    assert int(task.layer_mask(("1",)).sum()) == 6 * 5 + 5 + 5 * 4 + 4
    assert int(task.layer_mask(("1.1.2.bias", "2.weight")).sum()) == 4 + 12
    assert bool(task.layer_mask(("1", "2")).all())
    assert not bool(task.layer_mask(()).any())
    mask = task.layer_mask(("1.1.2",))
    changed = dict(zip(("1.0", "1.1.2", "2"), (False, True, False), strict=True))
    for layer in task.slots:
        assert bool(mask[layer.start : layer.stop].all()) == changed[layer.name.rpartition(".")[0]]
    with pytest.raises(ModelError, match=r"no layer '1\.1\.'; its layers are 1\.0, 1\.1\.2, 2"):
        task.layer_mask(("1.1.",))
    assert make("single layer", "stacked")[0].layer_names() == ("weight", "bias")


# --- starts


def test_starts_depend_on_seed_and_number_alone() -> None:
    task, _ = make("mlp", "stacked")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = task.init(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(task.init(0), first)
    assert torch.equal(make("mlp", "rows")[0].init(0), first)  # the same on every path
    rows = torch.stack([first, task.init(1), task.init(0, 1), task.init(1, 1), task.init(0, 2)])
    correlation = torch.corrcoef(rows) - torch.eye(5)
    assert float(correlation.abs().max()) < 5 / task.num_params**0.5
    torch.manual_seed(7)
    state = torch.get_rng_state()
    make_task(lambda: mlp((4,), 3))
    assert torch.equal(torch.get_rng_state(), state)


def test_starts_follow_the_initialization_of_the_layers() -> None:
    task = make_task(lambda: mlr((400,), 50))
    weight = task.unflatten(task.init(0))["1.weight"]
    assert float(weight.abs().max()) <= 1 / 20
    assert float(weight.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)


def test_training_a_start_in_place_does_not_move_it_for_others() -> None:
    task, _ = make("mlr", "stacked")
    first = task.init(0)
    kept = first.clone()
    first += 1
    for _ in range(2):
        again = task.init(0)
        assert torch.equal(again, kept)
        again += 1
    ones = torch.ones(task.num_params)
    warm = task.starting_at(ones)
    warm.init(0).zero_()
    assert torch.equal(warm.init(0), ones)
    assert torch.equal(warm.init(5), ones)
    assert torch.equal(warm.init(0, 1), task.init(0, 1))  # further starts stay random


@few_cases
def test_tasks_of_different_starts_do_not_disturb_each_other(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    batch, given = make_batch(1, 3, shape, 3), torch.ones(task.num_params)
    first, second = task.starting_at(given), task.starting_at(torch.zeros(task.num_params))
    given += 1
    assert torch.equal(first.init(0), torch.ones(task.num_params))
    assert not second.init(0).any()
    assert torch.equal(first.starting_at(None).init(3), task.init(3))
    assert torch.equal(task.init(0), make(name, path)[0].init(0))
    theta = task.init(0)[None]
    assert torch.equal(first.grad(theta, batch), task.grad(theta, batch))


def test_loops_of_different_starts_do_not_disturb_each_other() -> None:
    """Clients' states are made when they are first needed, which may be after another loop began."""
    bench = Bench("local")
    task = make_task(bench.model)
    low, high = torch.zeros(task.num_params), torch.ones(task.num_params)
    with bench.loop(task=task.starting_at(low)) as first, bench.loop(task=task.starting_at(high)) as second:
        second.round()
        models = first.evaluate(keep_models=True).models
        assert models is not None
        assert not models.any()
        first.round()
    with bench.loop(task=task.starting_at(low)) as alone:
        alone.round()
        wanted = alone.evaluate(keep_models=True).models
    assert wanted is not None
    assert torch.equal(first.evaluate(keep_models=True).models, wanted)


def test_a_start_of_another_size_is_refused() -> None:
    task, _ = make("mlr", "stacked")
    with pytest.raises(ModelError, match=rf"a start has {task.num_params} parameters; got shape \[2\]"):
        task.starting_at(torch.ones(2))


# --- threads and processes


MEETING = threading.Barrier(2)


class Meeting(nn.Module):
    """Two threads enter its forward pass, only then use its parameters, and leave together."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        MEETING.wait(timeout=20)
        z = self.fc(x)
        MEETING.wait(timeout=20)
        return z


@pytest.mark.parametrize("path", ["rows", "vmap"])
def test_threads_do_not_share_a_module(make_batch: MakeBatch, path: str) -> None:
    plain = make_task(single_layer)
    task = make_task(Meeting, backend=path)
    theta, batch = starts(plain, 2), make_batch(2, 4, VECTOR, 3)
    with ThreadPoolExecutor(2) as threads:
        for method in ("grad", "logits"):

            def training(i: int, method: str = method) -> Tensor:
                one = batch.rows(slice(i, i + 1))
                return getattr(task, method)(theta[i : i + 1], one if method == "grad" else one.x)

            wanted = plain.grad(theta, batch) if method == "grad" else plain.logits(theta, batch.x)
            near(torch.cat(list(threads.map(training, range(2)))), wanted)


@few_cases
def test_any_number_of_threads_gives_the_same_bits(make_batch: MakeBatch, name: str, path: str) -> None:
    task, shape = make(name, path)
    theta, batch = starts(task, 8), make_batch(8, 6, shape, 3)

    def training(i: int) -> Tensor:
        return task.grad(theta[i : i + 1], batch.rows(slice(i, i + 1)))

    alone = [training(i) for i in range(8)]
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        assert all(torch.equal(a, b) for a, b in zip(threads.map(training, range(8)), alone, strict=True))


def slowly_built() -> nn.Module:
    first = nn.Linear(6, 4)
    time.sleep(0.01)  # time for another thread to draw between the layers
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 3))


def test_starts_drawn_in_threads_are_the_same() -> None:
    alone = [make_task(slowly_built).init(0, number) for number in range(4)]
    task = make_task(slowly_built)
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda number: task.init(0, number), range(4)))
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("path", ["stacked", "rows", "vmap"])
def test_tasks_travel_to_other_processes(make_batch: MakeBatch, path: str) -> None:
    task = make_task(tanh_net, backend=path)
    theta, batch = starts(task, 2), make_batch(2, 3, VECTOR, 3)
    wanted = task.grad(theta, batch)
    copy = pickle.loads(pickle.dumps(task))
    assert torch.equal(copy.grad(theta, batch), wanted)
    assert torch.equal(copy.init(4), task.init(4))


# --- the choice of a path


def test_dense_chains_are_stacked_and_convolutions_go_row_by_row() -> None:
    assert {make_task(build).backend for build, _ in DENSE.values()} == {"stacked"}
    assert {make_task(build).backend for build, _ in CONVOLUTIONAL.values()} == {"rows"}
    assert make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))).backend == "vmap"
    assert make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU())).backend == "vmap"
    assert make_task(lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 4))).backend == "vmap"
    assert make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 3))).backend == "vmap"
    assert make_task(lambda: nn.Sequential(nn.Flatten(2), nn.Linear(6, 4))).backend == "vmap"


def test_paths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ModelError, match="auto, fused, stacked, rows, batched, vmap; got 'fast'"):
        make_task(tanh_net, backend="fast")
    with pytest.raises(ModelError, match="the stacked path takes chains"):
        make_task(CONVOLUTIONAL["cnn_small"][0], backend="stacked")


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4))
def test_examples_of_another_size_are_named(make_batch: MakeBatch, height: int, width: int) -> None:
    task = make_task(lambda: mlr((5, 5), 3))
    batch = make_batch(1, 2, (height, width), 3)
    with pytest.raises(ModelError, match=f"takes 25 numbers per example; got {height * width} numbers"):
        task.grad(task.init(0)[None], batch)


def test_images_need_a_flatten_and_tokens_an_embedding(make_batch: MakeBatch) -> None:
    task = make_task(tanh_net)
    batch = make_batch(1, 2, TABLE, 3)
    with pytest.raises(ModelError, match=r"examples must be vectors; got shape \[2, 3\]; put nn.Flatten\(\) first"):
        task.logits(task.init(0)[None], batch.x)
    with pytest.raises(ModelError, match="got 6 tokens"):
        task.logits(task.init(0)[None], torch.ones(1, 2, 6, dtype=torch.int64))
