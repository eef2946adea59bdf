"""Moves of several models: compiled against torch, against themselves in other company, and methods made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused import both, network, random_split
from test_fused_lstm import network as lstm
from test_fused_lstm import random_split as random_sequences
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.core import threads
from kinfed.core.threads import OneCoreThreads, idle_threads
from kinfed.data.examples.batches import LocalTraining, Split
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.task import Task
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Learn, Mix, Norm
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import run_program
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop

pytestmark = pytest.mark.timeout(400)  # the first of these tests on a machine compiles

SHARES = (0.0, 0.3, 0.7, 1.0)


def apfl_moves(decay: float, learn: str) -> list[Instruction]:
    learns = None if learn == "never" else Learn("alpha", "w", "v", 0.8, first_only=learn == "first batch")
    return [
        Mix("mixed", "w", "v", "alpha"),
        GradientStep("v", 0.1, at="mixed", number="alpha", decay=decay, learn=learns),
        GradientStep("w", 0.1, decay=decay),
    ]


PROGRAMS: dict[str, Callable[[float], list[Instruction]]] = {
    "apfl": lambda decay: apfl_moves(decay, "first batch"),
    "apfl at every step": lambda decay: apfl_moves(decay, "every batch"),
    "apfl that learns no share": lambda decay: apfl_moves(decay, "never"),
    "pfedme": lambda decay: [
        GradientStep("v", 0.1, decay=decay, proximal=(2.0, "w"), times=3),
        Mix("w", "w", "v", 0.6),
    ],
    "perfedavg": lambda decay: [
        Mix("tilde", "w", "w", 0.0),
        GradientStep("tilde", 0.2, decay=decay),
        GradientStep("w", 0.1, at="tilde", decay=decay, stream=1),
    ],
    "hessian-free": lambda decay: [
        Gradient("g", at="v", decay=decay),
        Norm("delta", "g", 0.05, power=-1.0, least=0.4),
        Norm("alpha", "g", power=1.0, least=0.4),
        Add("plus", "w", "g", 1.0, "delta"),
        GradientStep("g", 0.1, at="plus", number="alpha", decay=decay, stream=1, measures=False),
        Add("w", "w", "g", -0.1),
        Add("v", "v", "g", -0.05),
    ],
    "means over windows": lambda decay: [
        GradientStep("w", 0.1, decay=decay),
        Collect("windows", "w", "begin", "width"),
    ],
}
WINDOWS = 4


def trained(
    task: Task, split: Split, training: LocalTraining, program: list[Instruction], who: Tensor
) -> dict[str, Tensor]:
    """w, v, sums of windows and α of some clients."""
    models = {name: torch.stack([task.init(seed, int(m)) for m in who]) for seed, name in enumerate("wv")}
    models["windows"] = torch.zeros(len(who), WINDOWS * task.trainable.stop)
    alpha = torch.tensor(SHARES, dtype=torch.float64)[who]
    part = split.take(who)
    streams = [part.batches(training, stream=name) for name in ("batches", "meta")]
    steps = streams[0].steps.double()
    numbers = {"alpha": alpha, "begin": (steps / 3).floor(), "width": (steps / WINDOWS).ceil().clamp_min(1)}
    run_program(task, streams, program, models, numbers)
    return models | {"alpha": alpha}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Callable[[], nn.Module], Split, LocalTraining, list[Instruction]]:
    sizes = [draw(st.integers(1, 37)), *draw(st.lists(st.integers(1, 19), max_size=2)), draw(st.sampled_from([2, 10]))]
    counts = draw(st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any))
    split = random_split(counts, sizes[0], sizes[-1], as_bytes=draw(st.booleans()))
    if draw(st.booleans()):
        split.weights = torch.linspace(0.2, 3, len(split.rows))
    lengths = draw(st.sampled_from([{"steps": 3}, {"steps": None, "epochs": 2}]))
    training = LocalTraining(batch=draw(st.integers(1, 9)), **lengths)
    program = PROGRAMS[draw(st.sampled_from(sorted(PROGRAMS)))](draw(st.sampled_from([0.0, 0.3])))
    build = network(sizes, draw(st.sampled_from([nn.Tanh, nn.ReLU])), draw(st.booleans()))
    return build, split, training, program


@settings(max_examples=40)
@given(cases())
def test_compiled_moves_are_those_of_the_torch_path(
    case: tuple[Callable[[], nn.Module], Split, LocalTraining, list[Instruction]],
) -> None:
    build, split, training, program = case
    everyone = torch.arange(len(split.count))
    ours, theirs = (trained(task, split, training, program, everyone) for task in both(build))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_models_of_a_client_move_the_same_in_any_company(name: str) -> None:
    """Bit for bit: alone, and among others."""
    task = make_task(network([29, 13, 5], nn.ReLU), backend="fused")
    split, training = random_split([12, 3, 30, 7], 29, 5, as_bytes=True), LocalTraining(batch=5, steps=6)
    together = trained(task, split, training, PROGRAMS[name](0.1), torch.arange(4))
    for client in range(4):
        alone = trained(task, split, training, PROGRAMS[name](0.1), torch.tensor([client]))
        for part, value in alone.items():
            assert torch.equal(value[0], together[part][client])


@pytest.mark.parametrize("name", PROGRAMS)
def test_idle_threads_share_the_clients_without_changing_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(network([29, 13, 5], nn.ReLU), backend="fused")
    split, training = random_split([12, 3, 30, 7], 29, 5, as_bytes=True), LocalTraining(batch=5, steps=6)
    alone = trained(task, split, training, PROGRAMS[name](0.1), torch.arange(4))
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    with closing(OneCoreThreads(3)) as pool, idle_threads(pool):
        shared = trained(task, split, training, PROGRAMS[name](0.1), torch.arange(4))
    for part, value in alone.items():
        assert torch.equal(value, shared[part])


def test_a_long_slope_is_as_exact_as_that_of_torch() -> None:
    """Of more numbers than are summed together, and of some that fill no vector; the share stays inside its bounds."""
    fused, stacked = both(network([701, 13, 3]))
    split, training = random_split([9, 9, 9, 9], 701, 3, as_bytes=False), LocalTraining(batch=4, steps=2)
    program = apfl_moves(0.0, "every batch")
    ours, theirs = (trained(task, split, training, program, torch.arange(4))["alpha"] for task in (fused, stacked))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert bool(((ours > 0) & (ours < 1)).any())


def test_moves_of_an_lstm_are_those_of_the_torch_path() -> None:
    fused, stacked = (make_task(lambda: lstm(5, 6, 1), backend=name) for name in ("fused", "stacked"))
    split, training = random_sequences([7, 3, 5], 4, 5), LocalTraining(batch=3, steps=3)
    ours, theirs = (
        trained(task, split, training, apfl_moves(0.1, "every batch"), torch.arange(3)) for task in (fused, stacked)
    )
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


METHODS = {
    "apfl": {"alpha": 0.4, "alpha_every_step": True},
    "pfedme": {"lam": 5.0, "inner_decay": 0.01},
    "perfedavg": {},
    "perfedavg_hf": {"delta": 0.05},
    "fedpa": {"samples": 3, "fedavg_rounds": 0},
}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_several_models_compute_the_same_compiled_in_chunks_and_by_threads(
    federation: Federation, method: str
) -> None:
    """The compiled round is that of the torch path, and neither chunks nor threads change a bit of it."""
    inputs = int(federation.features.raw[0].numel())
    build = network([inputs, 8, federation.num_classes], nn.ReLU)
    results = []
    for backend, workers, chunk in (("fused", 1, None), ("fused", 2, 1), ("fused", 2, 4), ("stacked", 1, None)):
        task = make_task(build, backend=backend)
        algorithm = make_algorithm(method, LocalTraining(lr=0.1, batch=4, steps=5, weight_decay=0.01), METHODS[method])
        pool = LocalPool(algorithm, task, federation, 0, workers=workers, chunk=chunk)
        loop = Loop(algorithm, task, pool, federation.population(0))
        for _ in range(2):
            loop.round()
        states = pool.clients.take(torch.arange(len(federation))).named()
        results.append({**loop.server.named(), **states})
        pool.close()
    ours, by_one, by_four, torch_path = results
    for name, value in ours.items():
        assert torch.equal(value, by_one[name])
        assert torch.equal(value, by_four[name])
        torch.testing.assert_close(value, torch_path[name], rtol=1e-4, atol=1e-5)


def test_means_of_windows_are_those_of_the_iterates() -> None:
    """Of single steps, one after the other; steps before the first window are in none."""
    task = make_task(network([6, 4, 3], nn.ReLU), backend="fused")
    split = random_split([12], 6, 3, as_bytes=False)
    iterates = []
    for steps in range(1, 8):
        alone = trained(task, split, LocalTraining(batch=4, steps=steps), [GradientStep("w", 0.1)], torch.tensor([0]))
        iterates.append(alone["w"][0])
    program: list[Instruction] = [GradientStep("w", 0.1), Collect("windows", "w", "begin", "width")]
    out = trained(task, split, LocalTraining(batch=4, steps=7), program, torch.tensor([0]))["windows"]
    sums = out.view(WINDOWS, -1)  # begin = 2, width = 2: steps 2 and 3, 4 and 5, and half of what a fourth would add
    torch.testing.assert_close(sums[0], (iterates[2] + iterates[3]) / 2)
    torch.testing.assert_close(sums[1], (iterates[4] + iterates[5]) / 2)
    torch.testing.assert_close(sums[2], iterates[6] / 2)
    assert not sums[3].any()


def test_a_gradient_its_norm_and_a_sum_by_hand() -> None:
    task = make_task(network([5, 3], nn.ReLU), backend="fused")
    split, training = random_split([9], 5, 3, as_bytes=False), LocalTraining(batch=9, steps=1)
    before = trained(task, split, training, [], torch.tensor([0]))
    program: list[Instruction] = [
        Gradient("g", at="v", decay=0.2),
        Norm("alpha", "g", 3.0, power=-1.0),
        Add("w", "w", "g", 2.0),
    ]
    after = trained(task, split, training, program, torch.tensor([0]))
    _, batch = next(iter(split.batches(training)))
    g = task.grad(before["v"], batch) + 0.2 * before["v"]
    torch.testing.assert_close(after["w"], before["w"] + 2 * g)
    torch.testing.assert_close(after["alpha"], 3 / g.double().norm(dim=1))
    assert torch.equal(after["v"], before["v"])


def test_examples_that_loops_cannot_read_are_moved_batch_by_batch() -> None:
    fused, stacked = both(network([6, 4, 3]))
    split = random_split([9, 4], 6, 3, as_bytes=False)
    training = LocalTraining(batch=3, steps=4, poisson=True)
    streams = [split.batches(training, stream=name) for name in ("batches", "meta")]
    assert fused.whole_program(streams, {}) is None
    ours, theirs = (
        trained(task, split, training, apfl_moves(0.1, "every batch"), torch.arange(2)) for task in (fused, stacked)
    )
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)


def test_moves_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="has no proximal term, and does so once"):
        GradientStep("v", 0.1, at="w", proximal=(1.0, "w"))
    with pytest.raises(ValueError, match="name it with `at`"):
        GradientStep("v", 0.1, number="alpha")
    with pytest.raises(ValueError, match="moves its running statistics"):
        GradientStep("v", 0.1, measures=False)
