"""What every method promises, one function for each promise. Registered in the order of this file."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from kinfed import rng
from kinfed.data.federation import Federation
from kinfed.errors import ConfigError
from kinfed.loop import Schedule
from kinfed.task import make_task
from kinfed.testing.bench import (
    ROUNDS,
    SEED,
    Bench,
    ContractError,
    State,
    expect,
    expect_equal,
    hooked,
    outcome,
    state_of,
    tiny_federation,
)
from kinfed.tree import Tree

CHECKS: dict[str, Callable[[Bench], None]] = {}


def check(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Register a check; its failures begin with the method's and the check's name."""

    @functools.wraps(function)
    def named(bench: Bench) -> None:
        try:
            function(bench)
        except ContractError as error:
            raise ContractError(f"{type(bench.algorithm).__name__}, {function.__name__}: {error}") from None

    CHECKS[function.__name__] = named
    return named


@check
def settings_are_plain(bench: Bench) -> None:
    """Hyper-parameters are fields of a frozen dataclass, and can be written to a file."""
    method = bench.algorithm
    frozen = dataclasses.is_dataclass(method) and type(method).__dataclass_params__.frozen  # type: ignore[attr-defined]
    expect(frozen, "a method is a frozen dataclass whose fields are its hyper-parameters")
    expect(replace(method) == method, "two methods with equal hyper-parameters are equal")
    try:
        json.dumps(method.options())
    except TypeError as error:
        raise ContractError(f"options() are numbers, text, booleans, None or lists of them; {error}") from None


@check
def chunks_do_not_matter(bench: Bench) -> None:
    """Clients one by one, two by two, or all at once."""
    for chunk in (1, len(bench.federation)):
        expect_equal(bench.run(chunk=chunk), bench.usual, f"chunks of {chunk} give what chunks of 2 give", 1e-5)


@check
def workers_do_not_matter(bench: Bench) -> None:
    expect_equal(bench.run(workers=2), bench.usual, "two workers give what one gives, bit for bit")


@check
def gradient_paths_agree(bench: Bench) -> None:
    """Gradients of stacked models, row by row, or by vmap: nothing a method does depends on how a task works."""
    reference = bench.run(rounds=3)
    for path in ("rows", "vmap"):
        found = bench.run(rounds=3, task=make_task(bench.model, path=path))
        expect_equal(found, reference, f"gradients by {path} give what the task chosen for the model gives", 1e-4)


@check
def resume_is_exact(bench: Bench) -> None:
    """A run that is stopped, stored as bytes and taken up by new objects equals one that was not."""
    with bench.loop() as first:
        for _ in range(ROUNDS // 2):
            first.round()
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
            for split in ("train", "val", "test", "test"):
                loop.evaluate(split)
            expect_equal(state_of(loop), before, "evaluation leaves every state as it was")
            loop.round()
        expect_equal(outcome(loop), outcome(loop), "two evaluations in a row agree")
        expect_equal(outcome(loop), bench.usual, "a run that was evaluated in between ends as one that was not")


@check
def global_generators_are_untouched(bench: Bench) -> None:
    """All draws are keyed by (seed, purpose, ...): torch's, numpy's and Python's generators stay where they are."""
    before = _generators()
    bench.run()
    for name, state in _generators().items():
        expect(state == before[name], f"nothing is drawn from the global generator of {name}")


def _generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": (numpy[1].tolist(), numpy[2:]),
        "random": random.getstate(),
    }


@check
def held_out_data_do_not_matter(bench: Bench) -> None:
    """Training, aggregation and personalization never look at test examples or their labels."""
    data = bench.federation
    raw, labels, rows = data.features.raw.clone(), data.labels.clone(), data.test.rows
    labels[rows] = (labels[rows] + 1) % data.num_classes
    raw[rows] = raw[rows].flip(0)
    other = replace(data, features=replace(data.features, raw=raw), labels=labels)
    changed, usual = bench.run(federation=other), dict(bench.usual)
    for name in [name for name in usual if name.endswith((" correct", " loss"))]:
        changed.pop(name)
        usual.pop(name)
    expect_equal(changed, usual, "other test data give the same states and models, bit for bit")


@check
def trees_keep_their_shape(bench: Bench) -> None:
    """States and messages are trees of tensors with a row per client, of fields and types that never change."""
    P, first_up = make_task(bench.model).num_params, State()

    def prepare(inner: Any, server: Tree, ids: Tensor) -> Tree:
        with _left_alone("prepare", server=server):
            plan: Tree = inner(server, ids)
        _same_kind("the server state that prepare returns", plan, server)
        return plan

    def download(inner: Any, server: Tree, ids: Tensor) -> Tree:
        with _left_alone("download", server=server):
            down: Tree = inner(server, ids)
        _has_rows("a Down message", down, len(ids))
        for r in range(len(ids)):
            one, row = inner(server, ids[r : r + 1]), down.take(slice(r, r + 1))
            expect_equal(
                one.named(), row.named(), "download acts row by row: for one client it gives that client's row"
            )
        return down

    def client_update(inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> tuple[Tree, Tree]:
        _has_rows("a client state", client, len(data))
        with _left_alone("client_update", client=client, down=down):
            new, up = inner(task, client, down, data)
        _has_rows("a client state", new, len(data))
        _same_kind("the client state that client_update returns", new, client, rows=True)
        _has_rows("an Up message", up, len(data))
        kind = {name: tensor[:0] for name, tensor in up.named().items()}
        first_up.update(first_up or kind)
        expect_equal(kind, first_up, "all Up messages of a run have the same fields and types")
        return new, up

    def aggregate(inner: Any, server: Tree, ids: Tensor, up: Tree) -> Tree:
        expect(bool((ids[1:] > ids[:-1]).all()), "the pool gives aggregate ascending ids")
        with _left_alone("aggregate", server=server, up=up):
            new: Tree = inner(server, ids, up)
        _same_kind("the server state that aggregate returns", new, server)
        return new

    def personalize(inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> Tensor:
        with _left_alone("personalize", client=client, down=down):
            theta: Tensor = inner(task, client, down, data)
        good = theta.shape == (len(data), P) and theta.dtype == torch.float32 and bool(torch.isfinite(theta).all())
        expect(
            good, f"personalize returns finite float32 models [{len(data)}, {P}]; got {theta.dtype} {list(theta.shape)}"
        )
        return theta

    def alternatives(inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> dict[str, Tensor]:
        with _left_alone("alternatives", client=client, down=down):
            others: dict[str, Tensor] = inner(task, client, down, data)
        for name, theta in others.items():
            expect(theta.shape == (len(data), P), f"alternative {name} is models [{len(data)}, {P}]; got {theta.shape}")
        return others

    hooks = (prepare, download, client_update, aggregate, personalize, alternatives)
    watched = hooked(bench.algorithm, **{hook.__name__: hook for hook in hooks})
    expect_equal(bench.run(algorithm=watched), bench.usual, "a watched run is like any other")


@contextmanager
def _left_alone(stage: str, **trees: Tree) -> Iterator[None]:
    before = {name: tree.clone().named() for name, tree in trees.items()}
    yield
    for name, tree in trees.items():
        expect_equal(tree.named(), before[name], f"{stage} returns new tensors and leaves its argument {name} alone")


def _has_rows(what: str, tree: Tree, count: int) -> None:
    for name, tensor in tree.named().items():
        fits = isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == count
        expect(
            fits,
            f"every tensor of {what} has one row per client ({count}); {name} is {getattr(tensor, 'shape', tensor)}",
        )


def _same_kind(what: str, new: Tree, old: Tree, rows: bool = False) -> None:
    def kinds(tree: Tree) -> dict[str, Any]:
        return {name: (t.dtype, t.shape[1:] if rows else None) for name, t in tree.named().items()}

    expect(isinstance(new, Tree), f"{what} is a Tree; got {type(new).__name__}")
    expect(kinds(new) == kinds(old), f"{what} keeps fields and types {kinds(old)}; got {kinds(new)}")


@check
def bytes_are_counted(bench: Bench) -> None:
    """The report's bytes are those of the tensors in all messages, of lost clients' downloads too."""
    sent = {"down": 0, "up": 0}

    def download(inner: Any, server: Tree, ids: Tensor) -> Tree:
        down: Tree = inner(server, ids)
        sent["down"] += _bytes_by_hand(down)
        return down

    def client_update(inner: Any, *args: Any) -> tuple[Tree, Tree]:
        client, up = inner(*args)
        sent["up"] += _bytes_by_hand(up)
        return client, up

    watched = hooked(bench.algorithm, download=download, client_update=client_update)
    with bench.loop(Schedule(dropout=0.4), algorithm=watched) as loop:
        for _ in range(3):
            sent.update(down=0, up=0)
            report = loop.round()
            counted = {"down": report.bytes_down, "up": report.bytes_up}
            expect(counted == sent, f"a round reports the bytes of its messages, {sent}; it reported {counted}")


def _bytes_by_hand(tree: Tree) -> int:
    total = 0
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if isinstance(value, Tree):
            total += _bytes_by_hand(value)
        elif isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        else:
            expect(value is None, f"messages hold tensors; {field.name} is {type(value).__name__}")
    return total


@check
def outsiders_are_left_alone(bench: Bench) -> None:
    """Who is not called keeps its state, bit for bit; who was never called has none."""
    schedule = Schedule(participation=0.34)
    with bench.loop(schedule) as loop:
        called: set[int] = set()
        store, count = loop.pool.clients, len(bench.federation)
        for number in range(1, 5):
            active = set(schedule.active(SEED, number, count).tolist())
            others = torch.tensor(sorted(called - active), dtype=torch.int64)
            before = store.take(others).clone().named() if len(others) else {}
            loop.round()
            called |= active
            expect(set(store.seen.tolist()) == called, "only clients that were called have a state")
            after = store.take(others).named() if len(others) else {}
            expect_equal(after, before, "clients that are not called keep their state")


@dataclass(frozen=True)
class _Loses(Schedule):
    """Loses one client in the second round."""

    dropout: float = 0.5
    client: int = 0

    def lost(self, seed: int, round: int, ids: Tensor) -> Tensor:
        return (ids == self.client) & (round == 2)


def _poisonable(federation: Federation) -> tuple[Federation, Callable[[Tensor], None]]:
    """A copy, and a function that makes the training (and validation) features of some clients NaN."""
    features = replace(federation.features, raw=federation.features.raw.clone())
    copy = replace(federation, features=features)

    def poison(ids: Tensor) -> None:
        for k in ids.tolist():
            features.raw[torch.cat([copy.train[k], copy.val[k]])] = torch.nan

    return copy, poison


@check
def poisoned_clients_are_rejected(bench: Bench) -> None:
    """A client whose training ends in NaN is as good as lost: named, without effect on others, its state kept."""
    victim, everyone = 2, torch.arange(len(bench.federation))
    with bench.loop(_Loses(client=victim), chunk=1) as loop:
        loop.round()
        loop.round()
        without = state_of(loop)
    federation, poison = _poisonable(bench.federation)
    with bench.loop(Schedule(), federation=federation, chunk=1) as loop:
        loop.round()
        poison(torch.tensor([victim]))
        report = loop.round()
        alone = report.rejected == [victim] and report.dropped == 1
        expect(alone, f"the update of client {victim}, and no other, is rejected; rejected were {report.rejected}")
        expect_equal(state_of(loop), without, "a rejected update leaves what a lost one would")
        for name, tensor in state_of(loop).items():
            expect(bool(torch.isfinite(tensor).all()), f"NaN of one client gets nowhere; it is in {name}")
        before = state_of(loop)
        poison(everyone)
        report = loop.round()
        expect(report.rejected == everyone.tolist(), f"all updates are rejected; rejected were {report.rejected}")
        expect_equal(state_of(loop), before, "a round of rejected updates leaves every state as it was")


@check
def numbering_does_not_matter(bench: Bench) -> None:
    """The same clients under other numbers get the same models (full batches, everybody takes part)."""
    if not bench.algorithm.symmetric:
        return
    data = bench.federation
    order = rng.permutation(rng.root(SEED, "numbering"), len(data))
    groups = None if data.groups is None else data.groups[order]
    renumbered = replace(
        data, train=data.train.take(order), val=data.val.take(order), test=data.test.take(order), groups=groups
    )
    most = int(data.train.count.max())
    method = replace(bench.algorithm, work=replace(bench.algorithm.work, batch=most, steps=3, epochs=None))
    ours = bench.run(Schedule(), 2, algorithm=method)["personal models"]
    theirs = bench.run(Schedule(), 2, algorithm=replace(method), federation=renumbered)["personal models"]
    promise = "renumbered clients get the same models (or the method declares symmetric = False)"
    expect_equal({"personal models": theirs}, {"personal models": ours[order]}, promise, 1e-4)


@check
def odd_sizes_work(bench: Bench) -> None:
    """As few clients as the method allows, with one example each; epochs; a client without test examples."""
    fewest, work = bench.fewest, bench.algorithm.work
    by_epoch = replace(bench.algorithm, work=replace(work, batch=3, epochs=2, steps=None))
    for sizes, test, method in (
        ((1,) * fewest, 1, bench.algorithm),
        ((2,) * fewest, 0, bench.algorithm),
        ((1, 3, 5, *(4,) * fewest), 2, by_epoch),
    ):
        data = bench.fitting(tiny_federation(sizes, test))
        with bench.loop(Schedule(), algorithm=replace(method), federation=data, chunk=None) as loop:
            for _ in range(3):
                report = loop.round()
                who = [sizes[k] for k in report.rejected]
                expect(not who, f"clients with {sizes} examples train; updates of those with {who} are not finite")
            for name, tensor in outcome(loop).items():
                expect(bool(torch.isfinite(tensor).all()), f"clients with {sizes} examples leave {name} finite")


@check
def too_few_clients_are_refused(bench: Bench) -> None:
    fewest = bench.algorithm.min_clients
    if fewest < 2:
        return
    try:
        bench.run(Schedule(), 1, federation=bench.fitting(tiny_federation((3,) * (fewest - 1))))
    except ConfigError:
        return
    raise ContractError(f"min_clients is {fewest}, but {fewest - 1} are accepted")


@check
def losses_are_survived(bench: Bench) -> None:
    """Drop-outs and stragglers: every round ends, and what remains is finite."""
    schedule = Schedule(participation=0.5, dropout=0.5, stragglers=0.5)
    dropped = 0
    with bench.loop(schedule) as loop:
        for _ in range(6):
            report = loop.round()
            dropped += report.dropped
            expect(not report.rejected, f"nothing is rejected where no data are bad; rejected were {report.rejected}")
        expect(dropped > 0, "drop-outs are counted")
        for name, tensor in outcome(loop).items():
            expect(bool(torch.isfinite(tensor).all()), f"drop-outs and stragglers leave {name} finite")


@check
def figures_can_be_written(bench: Bench) -> None:
    """A method's own figures are numbers and tensors: at all rounds the same names, one value per client."""

    def client_figures(inner: Any, client: Tree) -> dict[str, Tensor]:
        found: dict[str, Tensor] = inner(client)
        rows = {len(tensor) for tensor in client.named().values()}
        for name, value in found.items():
            fits = value.dim() == 1 and {len(value)} == rows
            expect(fits, f"client figure {name} is one number per client; got {list(value.shape)} for {rows} clients")
        return found

    with bench.loop(algorithm=hooked(bench.algorithm, client_figures=client_figures)) as loop:
        loop.round()
        loop.evaluate()
        method, count = loop.algorithm, len(bench.federation)
        figures = method.server_figures(loop.server)
        for name, value in figures.items():
            expect(
                isinstance(value, int | float | Tensor), f"server figure {name} is a number or tensor; got {value!r}"
            )
        ids = torch.arange(count)
        shared = method.global_models(loop.server, ids)
        if shared is not None:
            one = method.global_models(loop.server, ids[1:2])
            assert one is not None
            expect_equal({"model": one}, {"model": shared[1:2]}, "global_models acts row by row")
        loop.round()
        expect(method.server_figures(loop.server).keys() == figures.keys(), "figures have the same names at all rounds")


@check
def it_learns(bench: Bench) -> None:
    """On three well separated classes personal models are well above chance after a few rounds."""
    with bench.loop(Schedule(), chunk=None) as loop:
        for _ in range(12):
            loop.round()
        score = loop.evaluate().personal
        assert score is not None
        accuracy = float(score.correct.sum() / score.count.sum())
    chance = 1 / bench.federation.num_classes
    wanted = chance + (1 - chance) / 3
    expect(accuracy >= wanted, f"personal accuracy reaches {wanted:.2f} (chance is {chance:.2f}); got {accuracy:.2f}")
