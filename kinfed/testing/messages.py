"""Checks of states and messages: trees of tensors with a row per client, counted to the byte."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import RoundInfo
from kinfed.author import option_values
from kinfed.core import MASKED_BY, Tree, unpacked
from kinfed.engine import task_for
from kinfed.server import Schedule
from kinfed.testing.workbench import Bench, ContractError, State, check, expect, expect_equal, hooked


@check
def settings_are_plain(bench: Bench) -> None:
    """Hyper-parameters are fields of a frozen dataclass, and can be written to a file."""
    method = bench.algorithm
    frozen = dataclasses.is_dataclass(method) and type(method).__dataclass_params__.frozen  # type: ignore[attr-defined]
    expect(frozen, "a method is a frozen dataclass whose fields are its hyper-parameters")
    expect(replace(method) == method, "two methods with equal hyper-parameters are equal")
    try:
        json.dumps(option_values(method))
    except TypeError as error:
        raise ContractError(f"options are numbers, text, booleans, None or lists of them; {error}") from None


@check
def trees_keep_their_shape(bench: Bench) -> None:
    """States and messages are trees of tensors with a row per client, of fields and types that never change."""
    watch = _Watched(bench.make_task().num_params, State())
    hooks = (watch.plan, watch.download, watch.client_update, watch.aggregate, watch.personalize)
    watched = hooked(bench.algorithm, **{hook.__name__: hook for hook in hooks})
    expect_equal(bench.run(algorithm=watched), bench.usual, "a watched run is like any other")


@dataclasses.dataclass
class _Watched:
    """The five functions of a method, each looked at as it is called."""

    P: int
    first_up: State  # fields and types of the first update

    def plan(self, inner: Any, server: Tree, active: Tensor, round: RoundInfo) -> tuple[Tree, Tensor]:
        with _left_alone("plan", server=server):
            planned, ids = inner(server, active, round)
        _same_kind("the server state that plan returns", planned, server)
        expect(bool((ids.diff() > 0).all()), f"plan returns ascending ids; got {ids.tolist()}")
        return planned, ids

    def download(self, inner: Any, server: Tree, ids: Tensor) -> Tree:
        with _left_alone("download", server=server):
            down: Tree = inner(server, ids)
        _has_rows("a Down message", down, len(ids))
        for r in range(len(ids)):
            one, row = inner(server, ids[r : r + 1]), down.take(slice(r, r + 1))
            promise = "download acts row by row: for one client it gives that client's row"
            expect_equal(one.named(), row.named(), promise)
        return down

    def client_update(self, inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> tuple[Tree, Tree]:
        _has_rows("a client state", client, len(data))
        with _left_alone("client_update", client=client, down=down):
            new, up = inner(task, client, down, data)
        _has_rows("a client state", new, len(data))
        _same_kind("the client state that client_update returns", new, client, rows=True)
        _has_rows("an Up message", up, len(data))
        kind = {name: tensor[:0] for name, tensor in up.named().items()}
        self.first_up.update(self.first_up or kind)
        expect_equal(kind, self.first_up, "all Up messages of a run have the same fields and types")
        return new, up

    def aggregate(self, inner: Any, server: Tree, ids: Tensor, up: Tree, round: RoundInfo) -> Tree:
        expect(bool((ids[1:] > ids[:-1]).all()), "the pool gives aggregate ascending ids")
        with _left_alone("aggregate", server=server, up=up):
            new: Tree = inner(server, ids, up, round)
        _same_kind("the server state that aggregate returns", new, server)
        return new

    def personalize(self, inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> Tensor | dict[str, Tensor]:
        with _left_alone("personalize", client=client, down=down):
            result: Tensor | dict[str, Tensor] = inner(task, client, down, data)
        by_name = result if isinstance(result, dict) else {"personalize": result}
        expect(bool(by_name), "personalize returns at least one model")
        for name, theta in by_name.items():
            expect(
                self._rows_of_models(theta, len(data)),
                f"{name} is {self._models}; got {theta.dtype} {list(theta.shape)}",
            )
        expect(bool(torch.isfinite(next(iter(by_name.values()))).all()), "personalize returns finite models")
        return result

    @property
    def _models(self) -> str:
        P = self.P
        return f"float32 models [n, {P}], mixtures of them [n, K ({P} + 1)], or longer rows that end in a negative mark"

    def _rows_of_models(self, theta: Tensor, count: int) -> bool:
        width = theta.shape[-1]
        known = width == self.P or width % (self.P + 1) == 0 or bool((theta[:, -1] < 0).all())
        return theta.shape == (count, width) and theta.dtype == torch.float32 and known


@contextmanager
def _left_alone(stage: str, **trees: Tree) -> Iterator[None]:
    before = {name: tree.clone().named() for name, tree in trees.items()}
    yield
    for name, tree in trees.items():
        expect_equal(tree.named(), before[name], f"{stage} returns new tensors and leaves its argument {name} alone")


def _has_rows(what: str, tree: Tree, count: int) -> None:
    for name, tensor in tree.named().items():
        fits = isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == count
        shape = getattr(tensor, "shape", tensor)
        expect(fits, f"every tensor of {what} has one row per client ({count}); {name} is {shape}")


def _same_kind(what: str, new: Tree, old: Tree, rows: bool = False) -> None:
    def kinds(tree: Tree) -> dict[str, Any]:
        return {name: (t.dtype, t.shape[1:] if rows else None) for name, t in tree.named().items()}

    expect(isinstance(new, Tree), f"{what} is a Tree; got {type(new).__name__}")
    expect(kinds(new) == kinds(old), f"{what} keeps fields and types {kinds(old)}; got {kinds(new)}")


@check
def bytes_are_counted(bench: Bench) -> None:
    """The report's bytes are those of the tensors in all messages, of lost clients' downloads too; and, in the first
    round, of what was exchanged before."""
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
        before = dict(zip(sent, loop.population.exchanged, strict=True))
        for _ in range(3):
            sent.update(before)
            before = {"down": 0, "up": 0}
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
            if (mask := field.metadata.get(MASKED_BY)) is not None:
                held = unpacked(getattr(tree, mask), value.shape[-1])
                expect(not bool(value[~held].any()), f"{field.name} holds nothing but zeros outside of {mask}")
                value = value[held]
            total += value.numel() * value.element_size()
        else:
            expect(value is None, f"messages hold tensors; {field.name} is {type(value).__name__}")
    return total


@check
def figures_can_be_written(bench: Bench) -> None:
    """A method's own figures are numbers and tensors: at all rounds the same names, one value per client."""

    def client_figures(inner: Any, client: Tree) -> dict[str, Tensor]:
        diagnostics: dict[str, Tensor] = inner(client)
        rows = {len(tensor) for tensor in client.named().values()}
        for name, value in diagnostics.items():
            fits = value.dim() == 1 and {len(value)} == rows
            expect(fits, f"client figure {name} is one number per client; got {list(value.shape)} for {rows} clients")
        return diagnostics

    with bench.loop(algorithm=hooked(bench.algorithm, client_figures=client_figures)) as loop:
        loop.round()
        loop.evaluate()
        method, count = loop.algorithm, len(bench.federation)
        figures = method.figures(loop.server)
        for name, value in figures.items():
            plain = isinstance(value, int | float | Tensor)
            expect(plain, f"server figure {name} is a number or tensor; got {value!r}")
        models = method.server_models(loop.server)
        if models is not None:
            shape, assignment = list(models.models.shape), models.assignment
            width = task_for(loop.task, models.models).num_params
            expect(len(shape) == 2 and shape[1] == width, f"server models are [C, P], or wider rows; got {shape}")
            if assignment is not None:
                fits = len(assignment) == count and bool(((assignment >= 0) & (assignment < shape[0])).all())
                expect(fits, f"every client is assigned one of the {shape[0]} server models; got {assignment}")
        loop.round()
        expect(method.figures(loop.server).keys() == figures.keys(), "figures have the same names at all rounds")
