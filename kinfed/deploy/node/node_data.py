"""A node's own examples: loaded as its settings say (kinfed.deploy.node.node_settings), prepared as all clients' are.

Weights of rows are the node's own business: they are scaled to mean one over the client's training rows, here, and
nothing of them leaves. (A simulation scales by the mean over all clients; the two agree where every client's weights
have the same mean.)

Which rows are for training, validation and test is named in the data or, where the owner of the node asks for privacy
or sets a share, drawn here: a row's role is a keyed hash of all that it holds, so that it stays the same whatever a run
chooses, in whatever order rows come, and also when others are added. Only elsewhere a run draws test rows.

An .npz file holds x [n, ...] (or tokens [n, length], whole numbers that stand for pieces of text) and y [n], where the
split is known test [n] and val [n], true or false, and where rows count differently weight [n]. A function returns
(x, y), or `Examples`. Whole numbers and text are both fine as classes; all must be among the deployment's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.data import (
    Cohort,
    Features,
    Federation,
    TablePreprocessing,
    TableStatistics,
    audited,
    example_weights,
    findings,
    make_federation,
)
from kinfed.data.sources import SUFFIXES, LabelledRows, TextInput, is_table, load_like, read_table, source_from_table
from kinfed.deploy.node.node_settings import NodeSettings, Refused, calls_function
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.settings import RUN_DEFAULTS, Deployment
from kinfed.errors import ConfigError, DataError, KinfedError, StorageError


@dataclass(frozen=True)
class Examples:
    """Result of a node's own function."""

    x: Any  # [n, ...] numbers
    y: Any  # [n] classes
    test: Any = None  # [n] bool
    val: Any = None  # [n] bool
    weight: Any = None  # [n] positive numbers: how much each counts in training
    tokens: bool = False  # x holds token numbers


@dataclass(frozen=True)
class ClientData:
    """One client's examples, before anything about the others is known."""

    federation: Federation  # of one; features not scaled yet, those of a table not even encoded: one zero per column
    columns: list[str]  # of a table; else empty
    table: LabelledRows | None = None  # where its columns are features
    names_test: bool = False  # the data say which rows are for the test
    names_val: bool = False  # likewise for validation
    roles: str | None = None  # how the node has drawn those that its data do not name; None: it has not
    text: TextInput | None = None  # where a table's texts became the examples

    @property
    def inputs(self) -> list[str]:
        """Description that all clients must have in common: columns of a table, or how texts are cut."""
        return self.columns if self.text is None else [f"texts, cut by tokenizer {self.text.fingerprint()}"]

    def names_rows(self, deployment: Deployment) -> bool:
        """True if no choice of the server's decides which rows are trained on."""
        return self.names_test and (self.names_val or not deployment.validation_share)

    def divided(self, federation: Federation, deployment: Deployment, number: int | None = None) -> Federation:
        """With validation examples, where the run wants them. `number`: the client's, once it is known."""
        share = deployment.validation_share
        if not share or int(federation.val.count.sum()):
            return federation
        if self.roles is not None:
            raise Refused(
                f"the run needs validation examples, and {federation.names[0]} has none: its rows have the roles that "
                "its owner gave them. Name some in the data, or set validation in node.toml before the first run"
            )
        return federation.with_validation(share, deployment.seed, None if number is None else torch.tensor([number]))

    def sums(self, mean: Tensor | None) -> Tensor:
        """float64 [*shape]: sums of features over training rows, or of squared distances from the common mean."""
        raw = self.federation.features.raw[self.federation.train.rows].to(torch.float64)
        total: Tensor = raw.sum(0) if mean is None else (raw - mean).square().sum(0)
        return total

    def statistics(self) -> TableStatistics:
        """Counts, moments and categories of the training rows' columns, for the encoding of tables."""
        assert self.table is not None
        assert self.table.read is not None
        return self.table.read.collect(self.federation.train.rows.numpy())[0]

    def prepared(self, enrolment: Enrolment, deployment: Deployment) -> Federation:
        """The client as one of the deployment's: encoded and scaled as all are, with its validation examples."""
        if deployment.run.privacy is not None and enrolment.preprocessing is not None and enrolment.preprocessing.own:
            raise Refused(
                "effects of own columns are learnt from labels, which no epsilon covers; nothing was computed"
            )
        federation = self.divided(self.encoded(enrolment), deployment, enrolment.number)
        rule = deployment.run.class_weights
        return federation if rule == example_weights.NONE else federation.with_class_weights(rule)

    def encoded(self, enrolment: Enrolment) -> Federation:
        """The client with features as models are fed them."""
        learnt, mean, std = enrolment.preprocessing, enrolment.mean, enrolment.std
        raw = self.federation.features.raw
        if self.table is not None:
            learnt = learnt or TablePreprocessing.plain(self.columns)
            where = self.federation.description["dataset"]
            raw = self.table.encode(learnt, where).raw
            mean, std = (learnt.mean, learnt.std) if learnt.standardize else (mean, std)
            if learnt.own:
                learnt = self._with_own_columns(learnt, raw, where)
        return replace(self.federation, features=Features(raw, mean, std), preprocessing=learnt)

    def _with_own_columns(self, learnt: TablePreprocessing, raw: Tensor, where: str) -> TablePreprocessing:
        """What columns become, with the effects of those that not every site has as this one has learnt them; these are
        written into raw [n, D]."""
        assert self.table is not None
        assert self.table.read is not None
        data = self.federation
        every = torch.arange(len(raw))
        own = learnt.learn_own(
            self.table.read, raw, every, data.train.rows, data.labels, data.problem, where, data.persons
        )
        return learnt.at_site(list(own))


@dataclass(frozen=True)
class Enrolment:
    """A client among all: what the server tells it about the whole."""

    number: int
    num_clients: int
    longest: tuple[int, int, int]  # most training, validation and test examples of any client
    group: int = -1
    mean: Tensor | None = None
    std: Tensor | None = None
    preprocessing: TablePreprocessing | None = None  # of tables whose columns were learnt together

    def cohort(self, federation: Federation, seed: int, round: int, effort: float = 1.0) -> Cohort:
        """The client's data in a round, under its number: every draw is as in a simulation of all clients."""
        data = federation.cohort(torch.tensor([0]), seed, round, None if effort >= 1 else torch.tensor([effort]))
        ids = torch.tensor([self.number])
        train, val, test = (
            replace(part, ids=ids, longest=most)
            for part, most in zip((data.train, data.val, data.test), self.longest, strict=True)
        )
        return Cohort(ids, train, val, test, seed, round, None if self.group < 0 else torch.tensor([self.group]))


def load_client_data(node: NodeSettings, deployment: Deployment) -> ClientData:
    """This node's examples as a federation of one."""
    problem, text = deployment.problem, None
    columns: list[str] = []
    if not calls_function(node.data) and not Path(node.data).exists():
        raise StorageError(f"{node.data} does not exist, which {node.client} names as its data in node.toml")
    if is_table(node.data):
        label = node.label or deployment.run.label_column
        options = replace(
            node.table_options, label_column=label, columns=deployment.run.columns or "",
            time_column=deployment.run.time_column, event_column=deployment.run.event_column,
        )  # fmt: skip
        text = options.text
        rows = replace(load_like(Path(node.data), options, deployment.feature_columns, problem), name=node.data)
        if rows.read is not None:
            columns = list(deployment.feature_columns or rows.read.cells)
    else:
        examples = _from_function(node) if calls_function(node.data) else _from_npz(Path(node.data))
        rows = LabelledRows.from_arrays(problem=problem, where=node.data, **vars(examples))
    if rows.weights is not None:
        _check_weights(node, deployment)
    raw = torch.zeros(len(rows.labels), len(columns)) if rows.features is None else rows.features.raw
    named = rows.is_test is not None, rows.is_val is not None and bool(rows.is_val.any())
    roles = None
    if node.drawn_roles is not None:
        rows, roles = _with_own_roles(node, rows, named)
    if deployment.search is not None:  # rows that are marked for validation are in its folds
        rows = replace(rows, is_val=None)
    federation = rows.federation(
        node.client, problem, Features(raw), deployment.test_fraction, deployment.seed,
        stratify=bool(deployment.question),  # the rows that a search sets aside
    )  # fmt: skip
    return ClientData(federation, columns, None if rows.read is None else rows, *named, roles, text)


def audit_sentences(node: NodeSettings) -> list[str]:
    """What the audit says of a node's rows (kinfed.data.audit), for its owner alone, before any run asks for them.
    If no test rows are named yet, some are drawn to look at."""
    try:
        if is_table(node.data):
            options = replace(node.table_options, label_column=node.label or RUN_DEFAULTS["label_column"])
            whole = make_federation(source_from_table(read_table(Path(node.data)), options, node.data), "iid", 1)
        else:
            examples = _from_function(node) if calls_function(node.data) else _from_npz(Path(node.data))
            owner = [node.client] * len(examples.y)
            whole = Federation.from_arrays(
                examples.x, examples.y, owner, test_rows=examples.test, tokens=examples.tokens
            )
        seen = audited(whole).findings
    except KinfedError as error:
        return [f"not audited: {error}"]
    again = " A run on one machine would refuse these data."
    sentences = [finding.sentence + (again if finding.refused else "") for finding in seen]
    return sentences or [f"{len(whole.labels):,} rows; the audit looked for {len(findings.CHECKS)} troubles: none"]


def _with_own_roles(node: NodeSettings, rows: LabelledRows, named: tuple[bool, bool]) -> tuple[LabelledRows, str]:
    """The rows with roles that the node has drawn, and a text that is the same as long as it draws them so."""
    assert node.drawn_roles is not None
    test, validation = (0.0 if done else share for done, share in zip(named, node.drawn_roles, strict=True))
    if named == (True, True) or (named[0] and not validation):
        return rows, ""
    log = Vault(node.vault, node.counter)
    log.privacy_log(node.owner)  # before the secret
    draws = log.secret(node.owner).places(_row_digests(node))  # [n] in [0, 1), the same for rows of one person
    is_test = draws < test if rows.is_test is None else rows.is_test
    is_val = rows.is_val if named[1] else ~is_test & (draws >= 1 - (1 - test) * validation)
    if named[1]:
        assert rows.is_val is not None
        is_test = is_test & ~rows.is_val
    text = f"drawn by the node: test {test:g}, validation {validation:g}"
    if node.person:
        text += f", by {node.person}"
    return replace(rows, is_test=is_test, is_val=is_val), text


def _row_digests(node: NodeSettings) -> list[bytes]:
    """Digests of all that rows hold, also of columns that a run does not read: a run's choices change no role. Of
    persons, where they are known."""
    if is_table(node.data):
        table = read_table(Path(node.data))
        columns = [table[name] for name in ([node.person] if node.person else sorted(table.column_names))]
        cells = [[_plain(cell) for cell in column.to_pylist()] for column in columns]
        return [hashlib.sha256("\x1f".join(row).encode()).digest() for row in zip(*cells, strict=True)]
    examples = _from_function(node) if calls_function(node.data) else _from_npz(Path(node.data))
    x, y = np.asarray(examples.x), np.asarray(examples.y)
    return [hashlib.sha256(x[row].tobytes() + repr(y[row]).encode()).digest() for row in range(len(x))]


def _plain(cell: Any) -> str:
    """Text of a cell, the same when other rows make the column another kind, such as numbers with a point."""
    try:
        return repr(float(cell))
    except (TypeError, ValueError):
        return str(cell).casefold()


def _check_weights(node: NodeSettings, deployment: Deployment) -> None:
    """Refuse weights of rows where they could not be what they say."""
    fact = f"{node.client} has weights of rows"
    if "no example weights" in deployment.algorithm.traits:
        raise ConfigError(f"{fact}, which {deployment.method}'s local steps do not use; leave them out")
    if deployment.run.privacy is not None:
        raise ConfigError(
            f"{fact}, of mean one over its rows: the weight of a row would depend on the "
            "others, which clipping single gradients does not bound; leave them out under differential privacy"
        )


def _from_function(node: NodeSettings) -> Examples:
    path, _, name = node.data.rpartition(":")
    spec = importlib.util.spec_from_file_location("kinfed_node_data", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise DataError(f"{path} does not exist; data names a Python file of this machine and a function in it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"{path} has no function {name!r}")
    result = function(dict(node.extra))
    if isinstance(result, Examples):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        return Examples(*result)
    raise DataError(f"{node.data} should return (x, y) or {__name__}.Examples; got {type(result).__name__}")


def _from_npz(path: Path) -> Examples:
    if path.suffix.lower() != ".npz":
        raise DataError(f"data is a {', '.join(SUFFIXES)} or .npz file, or a function load.py:name; got {path}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    inputs = sorted({"x", "tokens"} & set(arrays))
    if len(inputs) != 1 or "y" not in arrays or set(arrays) - {*inputs, "y", "test", "val", "weight"}:
        raise DataError(
            f"{path} should hold x (or tokens), y, and perhaps test, val and weight; it holds "
            f"{', '.join(sorted(arrays))}"
        )
    x = arrays.pop(inputs[0])
    return Examples(x, **arrays, tokens=inputs == ["tokens"])
