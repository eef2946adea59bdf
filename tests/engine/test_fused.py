"""Compiled loops against the torch path, which is their oracle, and against themselves in other company."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kinfed.algorithms.common.averaging import mean_losses
from kinfed.algorithms.fedavg import FedAvg
from kinfed.core import threads
from kinfed.core.threads import OneCoreThreads, idle_threads
from kinfed.data.examples.batches import LocalTraining, Split
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.compiled import fused_task
from kinfed.engine.compiled.fused_task import FusedTask
from kinfed.engine.contract.objective import ABSOLUTE, CROSS_ENTROPY, SQUARED, Huber, Objective, Squared
from kinfed.engine.scoring.score import Score
from kinfed.engine.task_factory import ModuleTask, make_task, worth_compiling
from kinfed.engine.training.sgd import sgd
from kinfed.errors import KinfedError, ModelError
from kinfed.pools.local_pool import LocalPool
from kinfed.runs.experiment import run
from kinfed.runs.observer import NullObserver
from kinfed.server.loop import Loop

pytestmark = pytest.mark.timeout(400)  # the first of these tests on a machine compiles

RULES = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "clip": {"clip": 0.3},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "eps": 1e-2},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "eps": 1e-2, "clip": 0.5},
}


class Cubic(Squared):
    name = "cubic"


class TwiceTheFeatures(Features):
    def rows(self, index: Tensor) -> Tensor:
        return 2 * super().rows(index)


def network(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh, bias: bool = True) -> Callable[[], nn.Module]:
    """sizes: of the input, of every hidden layer, and of the output."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
        return nn.Sequential(*layers[:-1])

    return build


def random_split(counts: Sequence[int], inputs: int, classes: int, *, as_bytes: bool) -> Split:
    """Clients with so many examples each, in an order of rows that is not that of the data."""
    generator = torch.Generator().manual_seed(sum(counts) + inputs)
    total = sum(counts)
    if as_bytes:
        raw = torch.randint(0, 256, (total, inputs), generator=generator).to(torch.uint8)
        features = Features(raw, torch.linspace(100, 130, inputs), torch.linspace(60, 80, inputs))
    else:
        features = Features(torch.randn(total, inputs, generator=generator))
    count = torch.tensor(counts)
    return Split(
        features=features,
        labels=torch.randint(0, classes, (total,), generator=generator),
        ids=torch.arange(len(counts)),
        start=count.cumsum(0) - count,
        count=count,
        rows=torch.randperm(total, generator=generator),
        seed=3,
        round=2,
    )


def random_rows(n: int, size: int, seed: int) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def both(build: Callable[[], nn.Module]) -> tuple[ModuleTask, ModuleTask]:
    """The compiled path and its oracle."""
    return make_task(build, backend="fused"), make_task(build, backend="stacked")


@st.composite
def local_trainings(draw: st.DrawFn) -> tuple[Callable[[], nn.Module], Split, LocalTraining, dict[str, object]]:
    """A network, data, local training, and which terms join its gradient."""
    sizes = [
        draw(st.integers(1, 37)),
        *draw(st.lists(st.integers(1, 19), max_size=3)),
        draw(st.sampled_from([2, 3, 10, 17])),
    ]
    counts = draw(st.lists(st.integers(0, 23), min_size=1, max_size=4).filter(any))
    activation = draw(st.sampled_from([nn.Tanh, nn.ReLU]))
    build = network(sizes, activation, draw(st.booleans()))
    split = random_split(counts, sizes[0], sizes[-1], as_bytes=draw(st.booleans()))
    if draw(st.booleans()):
        split.weights = torch.linspace(0.2, 3, len(split.rows))
    lengths = draw(st.sampled_from([{"steps": 3}, {"steps": None, "epochs": 2}]))
    rule = RULES[draw(st.sampled_from(sorted(RULES)))]
    training = LocalTraining(lr=0.05, batch=draw(st.integers(1, 9)), **lengths, **rule)  # type: ignore[arg-type]
    terms = {
        "pull": draw(st.sampled_from(["", "number", "by client", "one center"])),
        "drift": draw(st.booleans()),
        "mask": draw(st.sampled_from(["", "last layer", "first layer", "biases", "every other"])),
        "own steps": draw(st.booleans()),
    }
    return build, split, training, terms


def mask_of(task: ModuleTask, which: str) -> Tensor | None:
    names = task.layer_names()
    if which == "every other":
        return torch.arange(task.num_params) % 2 == 0
    if which == "biases":
        return torch.tensor([slot.name.endswith("bias") for slot in task.slots]).repeat_interleave(
            torch.tensor([slot.stop - slot.start for slot in task.slots])
        )
    layers = {"": (), "last layer": names[-1:], "first layer": names[:1]}[which]
    return task.layer_mask(tuple(layers)) if layers else None


@settings(max_examples=40)
@given(local_trainings())
def test_a_whole_loop_is_that_of_the_torch_path(
    case: tuple[Callable[[], nn.Module], Split, LocalTraining, dict[str, object]],
) -> None:
    build, split, training, terms = case
    fused, stacked = both(build)
    n, size = len(split.count), fused.num_params
    theta = torch.stack([fused.init(0, number) for number in range(n)])
    center = random_rows(1, size, 1).expand(n, -1) if terms["pull"] == "one center" else random_rows(n, size, 1)
    lam: float | Tensor = torch.linspace(0, 2, n) if terms["pull"] == "by client" else 0.5
    steps = torch.arange(1, n + 1) if terms["own steps"] else None
    results = [
        sgd(
            task, theta, split.batches(training, steps),
            proximal=(lam, center) if terms["pull"] else None,
            drift=random_rows(n, size, 2) if terms["drift"] else None,
            mask=mask_of(task, str(terms["mask"])),
        )
        for task in (fused, stacked)
    ]  # fmt: skip
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, theirs = (task.score(results[0], split) for task in (fused, stacked))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.correct, theirs.correct)


@pytest.mark.parametrize("rule", RULES)
def test_a_client_is_trained_the_same_in_any_company(rule: str) -> None:
    """Bit for bit: alone, and among others; and its score."""
    task = make_task(network([29, 13, 5], nn.ReLU), backend="fused")
    split = random_split([12, 3, 30, 7], 29, 5, as_bytes=True)
    theta = torch.stack([task.init(0, number) for number in range(4)])
    proximal, drift = random_rows(4, task.num_params, 1), random_rows(4, task.num_params, 2)
    training = LocalTraining(lr=0.05, batch=5, steps=6, **RULES[rule])  # type: ignore[arg-type]

    def trained(who: Tensor) -> Tensor:
        batches = split.take(who).batches(training)
        return sgd(task, theta[who], batches, proximal=(0.3, proximal[who]), drift=drift[who])

    together = trained(torch.arange(4))
    for client in range(4):
        alone = torch.tensor([client])
        assert torch.equal(trained(alone), together[alone])
        assert torch.equal(task.score(together[alone], split.take(alone)).loss, task.score(together, split).loss[alone])


def test_steps_on_a_batch_are_those_of_the_torch_path() -> None:
    """Gradients and steps where a method leads through the batches itself; with rates and centers of clients' own,
    and examples of any weight."""
    fused, stacked = both(network([29, 13, 5], nn.ReLU))
    split = random_split([12, 3, 30, 7], 29, 5, as_bytes=False)
    theta, center = (torch.stack([fused.init(seed, number) for number in range(4)]) for seed in (0, 1))
    lam, lr = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64), torch.tensor([0.1, 0.2, 0.0, 0.05])
    _, batch = next(iter(split.batches(LocalTraining(batch=8))))
    batch = replace(batch, weight=batch.weight * torch.rand(batch.weight.shape))
    torch.testing.assert_close(fused.grad(theta, batch), stacked.grad(theta, batch), rtol=1e-4, atol=1e-6)
    ours, theirs = theta.clone(), theta.clone()
    for _ in range(3):
        fused.descend_(ours, batch, lr, (lam, center))
    for _ in range(3):
        stacked.descend_(theirs, batch, lr, (lam, center))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", [SQUARED, ABSOLUTE, Huber(0.4)], ids=lambda one: one.name)
def test_numbers_are_learned_as_on_the_torch_path(objective: Objective) -> None:
    """Of examples that count unequally, in whole loops, and scores; every residual is on either side of δ somewhere."""
    fused, stacked = (make_task(network([7, 5, 1]), backend=name, objective=objective) for name in ("fused", "stacked"))
    split = random_split([12, 3, 30], 7, 2, as_bytes=False)
    split.labels, split.weights = split.features.raw[:, 0].clone(), torch.linspace(0.2, 3, len(split.rows))
    theta = torch.stack([fused.init(0, number) for number in range(3)])
    training = LocalTraining(lr=0.05, batch=5, steps=4, momentum=0.5)
    assert fused.whole_loop(split.batches(training)) is not None
    ours, theirs = (sgd(task, theta, split.batches(training)) for task in (fused, stacked))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    scores = [task.score(ours, split) for task in (fused, stacked)]
    torch.testing.assert_close(scores[0].loss, scores[1].loss, rtol=1e-6, atol=1e-6)
    assert not scores[0].correct.any()
    _, batch = next(iter(split.batches(training)))
    torch.testing.assert_close(fused.grad(theta, batch), stacked.grad(theta, batch), rtol=1e-4, atol=1e-6)
    gone = fused.score(torch.full_like(theta, torch.nan), split)
    assert bool(gone.loss.isnan().all())


def test_a_mean_and_a_scale_of_all_features_are_read_by_the_same_code() -> None:
    """They are one number each; code for arguments of another type is never compiled, so this would fail."""
    fused, stacked = both(network([6, 4, 3]))
    split = random_split([9, 4], 6, 3, as_bytes=True)
    split.features = Features(split.features.raw, torch.full((1,), 127.5), torch.full((1,), 73.9))
    theta, training = torch.stack([fused.init(0), fused.init(1)]), LocalTraining(batch=3, steps=4)
    assert fused.whole_loop(split.batches(training)) is not None
    ours, theirs = (sgd(task, theta, split.batches(training)) for task in (fused, stacked))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_that_left_the_numbers_is_never_right() -> None:
    task = make_task(network([4, 3, 2], nn.ReLU), backend="fused")
    split = random_split([5], 4, 2, as_bytes=False)
    score = task.score(torch.full((1, task.num_params), torch.nan), split)
    assert float(score.correct) == 0
    assert bool(score.loss.isnan())


def test_workers_do_not_matter(federation: Federation) -> None:
    """Bit for bit, at any number of threads and clients per chunk."""
    inputs = int(federation.features.raw[0].numel())
    task = make_task(network([inputs, 8, federation.num_classes], nn.ReLU), backend="fused")
    results = []
    for workers, chunk in ((1, None), (2, 1), (2, 4)):
        algorithm = FedAvg(LocalTraining(lr=0.1, batch=4, steps=5, momentum=0.9))
        pool = LocalPool(algorithm, task, federation, 0, workers=workers, chunk=chunk)
        loop = Loop(algorithm, task, pool, federation.population(0))
        for _ in range(2):
            loop.round()
        results.append((loop.server.named()["w"], loop.evaluate("train").personal.loss))
        pool.close()
    for w, loss in results[1:]:
        assert torch.equal(w, results[0][0])
        assert torch.equal(loss, results[0][1])


def test_examples_that_loops_cannot_read_are_gathered(federation: Federation) -> None:
    """Poisson samples come batch by batch, and so do half-precision examples and such as a subclass looks up."""
    fused, stacked = both(network([6, 4, 3]))
    split = random_split([9, 4], 6, 3, as_bytes=False)
    theta = torch.stack([fused.init(0), fused.init(1)])
    training = LocalTraining(batch=3, steps=4, poisson=True)
    assert fused.whole_loop(split.batches(training)) is None
    torch.testing.assert_close(*(sgd(task, theta, split.batches(training)) for task in (fused, stacked)))
    strangers = replace(split, features=TwiceTheFeatures(split.features.raw))
    whole = LocalTraining(batch=3, steps=4)
    assert fused.whole_loop(strangers.batches(whole)) is None
    torch.testing.assert_close(*(sgd(task, theta, strangers.batches(whole)) for task in (fused, stacked)))
    halves = replace(split, features=Features(split.features.raw.to(torch.float16)))
    training = LocalTraining(batch=3, steps=4)
    assert fused.whole_loop(halves.batches(training)) is None
    torch.testing.assert_close(*(sgd(task, theta, halves.batches(training)) for task in (fused, stacked)))


def test_a_task_travels_to_other_processes() -> None:
    task = FusedTask(network([4, 3]), module=network([4, 3])())
    state = task.__getstate__() | {"build": None}
    copy = object.__new__(FusedTask)
    copy.__setstate__(pickle.loads(pickle.dumps(state)))
    split = random_split([5], 4, 3, as_bytes=False)
    theta = task.init(0)[None]
    assert torch.equal(copy.score(theta, split).loss, task.score(theta, split).loss)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="chains of Flatten, Linear, ReLU and Tanh"):
        make_task(lambda: nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)), backend="fused")
    with pytest.raises(ModelError, match="does not know the loss cubic"):
        make_task(network([4, 1]), backend="fused", objective=Cubic())
    with pytest.raises(ModelError, match="use backend = stacked on meta"):
        make_task(network([4, 3]), backend="fused", device="meta")
    monkeypatch.setattr(fused_task, "is_installed", lambda: False)
    with pytest.raises(ModelError, match=r"pip install 'kinfed\[fast\]'"):
        make_task(network([4, 3]), backend="fused")


def test_long_runs_are_compiled_and_short_ones_are_not() -> None:
    build = network([50, 10])
    assert make_task(build).backend == make_task(build, examples=1e5).backend == "stacked"
    assert make_task(build, examples=1e9).backend == "fused"
    assert worth_compiling(1_000, 3.4e5)
    assert not worth_compiling(1_000, 3.3e5)
    assert (
        make_task(lambda: nn.Sequential(nn.Linear(50, 9), nn.GELU(), nn.Linear(9, 2)), examples=1e9).backend == "vmap"
    )


def test_a_run_goes_on_with_the_backend_it_began_with(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(resume: bool = False) -> None:
        run(federation=federation, out=tmp_path / "run", algorithms="fedavg", rounds=2, batch=4, resume=resume)

    monkeypatch.setattr("kinfed.engine.task_factory.FUSED_FROM", 1.0)
    go()
    assert '"backend": "fused"' in (tmp_path / "run" / "model.json").read_text()
    go(resume=True)
    monkeypatch.setattr("kinfed.engine.task_factory.is_installed", lambda: False)
    with pytest.raises(KinfedError, match=r"other backend \(fused needs numba\)"):
        go(resume=True)


class Notes(NullObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_long_run_says_that_numba_is_missing(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfed.engine.task_factory.LONG_RUN", 1.0)
    monkeypatch.setattr("kinfed.engine.task_factory.is_installed", lambda: False)
    observer = Notes()
    result = run(federation=federation, algorithms="fedavg", rounds=1, batch=4, observer=observer)
    assert result.task.backend == "stacked"
    assert sum("numba is not installed" in note for note in observer.notes) == 1


def test_candidates_are_compared_where_examples_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the losses of the torch path, to its last digits but one; with weights, by the torch path itself."""
    fused, stacked = (make_task(network([6, 4, 3]), backend=name) for name in ("fused", "stacked"))
    split = random_split([9, 0, 60, 4], 6, 3, as_bytes=True)
    one_each = torch.stack([fused.init(seed) for seed in range(4)])
    models = [one_each, fused.init(7).expand(4, -1), one_each.flip(0)]
    models[2][3] = torch.nan
    wanted = mean_losses(stacked, models, split)
    assert wanted[1].isnan().all()  # no examples
    weighted = replace(split, weights=torch.linspace(0.5, 1.5, 73))
    by_torch = [mean_losses(task, models, weighted) for task in (fused, stacked)]
    assert torch.allclose(*by_torch, rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(Features, "gather", lambda *_: pytest.fail("examples were fetched"))
    assert torch.allclose(mean_losses(fused, models, split), wanted, rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("objective", [CROSS_ENTROPY, SQUARED], ids=lambda one: one.name)
def test_measures_are_those_of_the_torch_path(objective: Objective) -> None:
    """From one compiled pass; of clients without examples, and of a model that gives no numbers."""
    problem = Problem.of_classes(3) if objective.classifies else Problem("regression", mean=5.0, scale=3.0)
    tasks = [
        make_task(network([6, 4, 3 if objective.classifies else 1]), backend=name, objective=objective)
        for name in ("fused", "stacked")
    ]
    split = random_split([9, 0, 60, 4], 6, 3, as_bytes=False)
    if not objective.classifies:
        split.labels = split.features.raw[:, 0].clone()
    theta = torch.stack([tasks[0].init(0, number) for number in range(4)])
    theta[3] = torch.nan
    scores = []
    for task in tasks:
        task.problem = problem
        scores.append(task.evaluate(theta, split))
    ours, theirs = scores
    assert ours.sums.keys() == theirs.sums.keys()
    for name, sums in ours.sums.items():
        torch.testing.assert_close(sums, theirs.sums[name], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours.error, theirs.error, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(ours.correct, theirs.correct)


@pytest.mark.parametrize("rule", ["plain", "adamw"])
def test_idle_threads_share_the_rows_of_a_loop_and_of_scores_without_changing_a_bit(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(network([9, 6, 4]), backend="fused")
    task.problem = Problem.of_classes(4)
    assert task.shares_rows
    split = random_split([5, 0, 17, 3, 9, 1, 12], 9, 4, as_bytes=True)
    split.weights = torch.linspace(0.2, 3, len(split.rows))
    training = LocalTraining(lr=0.05, batch=4, steps=None, epochs=2, **RULES[rule])  # type: ignore[arg-type]
    theta, center = random_rows(7, task.num_params, 1), random_rows(7, task.num_params, 2)
    drift, lam = 0.1 * random_rows(7, task.num_params, 3), torch.linspace(0.1, 0.7, 7)

    def train_and_score() -> tuple[Tensor, Score]:
        trained = sgd(task, theta, split.batches(training), proximal=(lam, center), drift=drift)
        return trained, task.evaluate(trained, split)

    alone, score = train_and_score()
    calls: list[str] = []
    kernel_of = FusedTask._compiled

    def counted(task: FusedTask, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            calls.append(name)
            kernel_of(task, name)(*arguments)

        return call

    monkeypatch.setattr(FusedTask, "_compiled", counted)
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    with closing(OneCoreThreads(3)) as pool, idle_threads(pool):
        shared, shared_score = train_and_score()
    assert calls.count("train") > 1
    assert calls.count("score") > 1
    assert torch.equal(alone, shared)
    assert torch.equal(score.loss, shared_score.loss)
    assert torch.equal(score.correct, shared_score.correct)
    for name, sums in score.sums.items():  # of outputs, every client's in its place
        assert torch.equal(sums, shared_score.sums[name])
