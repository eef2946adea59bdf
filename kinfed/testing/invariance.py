"""Checks of what must not matter: how clients are chunked, threaded, numbered; interruptions; evaluation; test data."""

from dataclasses import replace

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from kinfed.algorithms import deploys_state
from kinfed.core import rng
from kinfed.engine import StackedTask, compiles, is_installed
from kinfed.pools import LocalPool
from kinfed.server import Schedule
from kinfed.testing.workbench import ROUNDS, SEED, Bench, check, expect, expect_equal, outcome, state_of


@check
def chunks_do_not_matter(bench: Bench) -> None:
    """All clients at once, or two by two."""
    chunk = len(bench.federation)
    expect_equal(bench.run(chunk=chunk), bench.usual, f"chunks of {chunk} give what chunks of 2 give", 1e-5)


@check
def workers_do_not_matter(bench: Bench) -> None:
    expect_equal(bench.run(workers=2), bench.usual, "two workers give what one gives, bit for bit")


@check
def gradient_paths_agree(bench: Bench) -> None:
    """Gradients of stacked models, row by row or in compiled loops: nothing a method does depends on how a task works.
    (What leans on one way of working fails by rows as well as by vmap, which takes longest.)"""
    task = bench.make_task()
    compiled = isinstance(task, StackedTask) and compiles(task.net, "cpu", task.objective) and is_installed()
    works = {"rows": True, "fused": compiled}
    for path in [path for path in works if works[path] and path != task.backend]:
        result = bench.run(task=bench.make_task(backend=path))
        expect_equal(result, bench.usual, f"gradients by {path} give what the task chosen for the model gives", 1e-4)


@check
def numbering_does_not_matter(bench: Bench) -> None:
    """The same clients under other numbers get the same models (full batches, everybody takes part)."""
    if "draws by client" in bench.algorithm.traits:
        return
    data = bench.federation
    order = rng.permutation(rng.root(SEED, "numbering"), len(data))
    groups = None if data.groups is None else data.groups[order]
    renumbered = replace(
        data, train=data.train.take(order), val=data.val.take(order), test=data.test.take(order), groups=groups
    )
    most = int(data.train.count.max())
    method = replace(bench.algorithm, training=replace(bench.algorithm.training, batch=most, steps=3, epochs=None))
    ours = bench.run(Schedule(), 2, algorithm=method)["personal models"]
    theirs = bench.run(Schedule(), 2, algorithm=replace(method), federation=renumbered)["personal models"]
    promise = "renumbered clients get the same models (or the method has the trait 'draws by client')"
    expect_equal({"personal models": theirs}, {"personal models": ours[order]}, promise, 1e-4)


@check
def resume_is_exact(bench: Bench) -> None:
    """A run that is stopped, stored as bytes and taken up by new objects equals one that was not."""
    with bench.loop(rounds=ROUNDS // 2) as first:
        stored = to_bytes({name: tensor.contiguous() for name, tensor in state_of(first).items()})
    with bench.loop() as second:
        second.load(ROUNDS // 2, from_bytes(stored))
        for _ in range(ROUNDS - ROUNDS // 2):
            second.round()
        expect_equal(outcome(second), bench.usual, "a resumed run equals the uninterrupted one, bit for bit")


@check
def evaluation_is_pure(bench: Bench) -> None:
    """Evaluating, as often as one likes and on any split, changes nothing."""
    with bench.loop() as loop:
        for _ in range(ROUNDS):
            before = state_of(loop)
            for split in ("train", "val", "test"):
                loop.evaluate(split)
            expect_equal(state_of(loop), before, "evaluation leaves every state as it was")
            loop.round()
        end = outcome(loop)
        expect_equal(outcome(loop), end, "two evaluations in a row agree")
        expect_equal(end, bench.usual, "a run that was evaluated in between ends as one that was not")


@check
def who_is_evaluated_does_not_matter(bench: Bench) -> None:
    """A state that is only there to be deployed (trait "state to deploy") is not read in training: pools train such
    methods from fresh states, and keep those of evaluated clients alone. Where all states are kept and read, the server
    ends at the same, and so it does with a sample of clients to evaluate. Other methods keep all states."""
    if not deploys_state(bench.algorithm):
        return
    with bench.loop(rounds=ROUNDS, evaluated=torch.tensor([0])) as loop:
        ours = {name: tensor for name, tensor in state_of(loop).items() if name.startswith("server.")}
        evaluated = loop.evaluate().ids.tolist()
    expect(evaluated == [0], f"an evaluation of client 0 alone has results of it alone; they are of {evaluated}")
    theirs = {name: bench.usual[name] for name in ours}
    expect_equal(ours, theirs, "a sample of evaluated clients (trait 'state to deploy') changes no training")
    with bench.loop() as loop:
        assert isinstance(loop.pool, LocalPool)
        loop.pool.reads_states = True
        for _ in range(ROUNDS):
            loop.round()
        read = {name: tensor for name, tensor in state_of(loop).items() if name in ours}
    what = "a sample of evaluated clients (trait 'state to deploy') trains as if all states were kept and read"
    expect_equal(ours, read, what)


@check
def global_generators_are_untouched(bench: Bench) -> None:
    """All draws are keyed by (seed, purpose, ...): torch's, numpy's and Python's generators stay where they are."""
    touched = bench.usual_run[1]
    expect(not touched, f"nothing is drawn from the global generator of {', '.join(touched)}")


@check
def held_out_data_do_not_matter(bench: Bench) -> None:
    """Training, aggregation and personalization never look at test examples or their labels."""
    data = bench.federation
    raw, labels, rows = data.features.raw.clone(), data.labels.clone(), data.test.rows
    if data.problem.has_classes:
        labels[rows] = (labels[rows] + 1) % data.num_classes
    else:
        labels[rows] = labels[rows].roll(1, 0)
    raw[rows] = raw[rows].flip(0)
    other = replace(data, features=replace(data.features, raw=raw), labels=labels)
    changed, usual = bench.run(federation=other), dict(bench.usual)
    for name in [name for name in usual if name.endswith((" correct", " loss"))]:
        changed.pop(name)
        usual.pop(name)
    expect_equal(changed, usual, "other test data give the same states and models, bit for bit")
