"""How a node loads its own examples. The operator of the node says it in --node-config, and nobody else can:

    client="hospital-a"                  the name under which the server knows the client (required), or several:
    client="ward-1,ward-2"               {client} in the other values stands for the name of each
    data="/srv/hospital-a.csv"           a table (.csv, .tsv, .csv.gz, .parquet), arrays (.npz), or
    data="/srv/load.py:load"             a Python function of this machine, called with the node's configuration
    label="diagnosis"                    the column with the class, where it is called otherwise than at the server
    split="fold"                         a column with train, val or test; without it some rows are drawn for the test
    ignore="name,street"                 columns that are not features
    row_weight="trust"                   a column of positive numbers: how much each row counts in training here
    image="picture"                      a column of images instead of feature columns
    text="letter"                        a column of texts instead of feature columns, cut into tokens by
    tokenizer="/srv/minilm"              the tokenizer in this folder,
    length="64"                          so many tokens of each
    weights="/srv/minilm"                where this machine has the weights that the setting model.weights names
    group="north"                        the client's group, for methods that use groups
    vault="/var/lib/kinfed"              where the personal model is kept (kinfed.deploy.vault)
    key="/etc/kinfed/hospital-a"         the node's private key, which the client belongs to (default: one in the vault)
    threads="4"                          cores to train with (default 1)
    peers="/etc/kinfed/peers"            folder with <client>.pub of all clients, whose keys secure sums then insist on
    min_noise, epsilon, delta, methods, evaluate, sums, strict, require_secure_aggregation, least_clients
                                         what the node answers at all (kinfed.deploy.rules)

Weights of rows are the node's own business: they are scaled to mean one over the client's training rows, here, and
nothing of them leaves. (A simulation scales by the mean over all clients; the two agree where every client's weights
have the same mean.)

An .npz file holds x [n, ...] (or tokens [n, length], whole numbers that stand for pieces of text) and y [n], where the
split is known test [n] and val [n], true or false, and where rows count differently weight [n]. A function returns
(x, y), or `Examples`. Whole numbers and text are both fine as classes; all must be among the deployment's.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.arrays import as_features, name_keys
from kinfed.data.example_weights import NONE as NO_WEIGHTS
from kinfed.data.example_weights import read_weights, scaled_weights
from kinfed.data.features import Features
from kinfed.data.federation import Cohort, Federation
from kinfed.data.preprocessing import TablePreprocessing, TableStatistics
from kinfed.data.problem import Problem
from kinfed.data.ragged import Ragged, hold_out
from kinfed.data.sources.table import LabelledRows, TableOptions, load_like
from kinfed.data.sources.table_files import SUFFIXES, is_table
from kinfed.data.sources.wordpiece import LENGTH, TextInput
from kinfed.data.target import read_known_target
from kinfed.deploy.rules import NodeRules
from kinfed.deploy.settings import Deployment, distinct
from kinfed.errors import ConfigError, DataError, unknown_name

DEFAULT_VAULT = "~/.kinfed/vault"
NAME = "{client}"  # in the settings of a node with several clients


@dataclass(frozen=True)
class NodeSettings:
    """--node-config of a supernode, for one of its clients."""

    client: str
    data: str
    label: str = ""
    split: str = ""
    ignore: str = ""
    row_weight: str = ""
    image: str = ""
    text: str = ""
    tokenizer: str = ""
    length: str = str(LENGTH)
    weights: str = ""
    group: str = ""
    vault: str = DEFAULT_VAULT
    key: str = ""
    threads: str = "1"
    min_noise: str = ""
    epsilon: str = ""
    delta: str = ""
    methods: str = ""
    evaluate: str = ""
    sums: str = ""
    strict: str = ""
    require_secure_aggregation: str = ""
    least_clients: str = ""
    peers: str = ""
    extra: Mapping[str, Any] | None = None  # everything in the table, for a function of the node's own

    @classmethod
    def parse_all(cls, table: Mapping[str, Any]) -> list[NodeSettings]:
        """One for each client."""
        client, data = (str(table.get(key, "")) for key in ("client", "data"))
        names = distinct("clients in --node-config", client) if client.strip() else [""]
        if len(names) > 1 and NAME not in data and not _calls_function(data):
            raise ConfigError(
                f"the clients {', '.join(names)} of this node would all have the data {data!r}; write {NAME} in it "
                f"where a client's name belongs, such as /srv/{NAME}.csv"
            )
        return [cls.parse({key: str(value).replace(NAME, name) for key, value in table.items()} | {"client": name})
                for name in names]  # fmt: skip

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> NodeSettings:
        fields = [name for name in cls.__dataclass_fields__ if name != "extra"]
        for name in ("client", "data"):
            if not str(table.get(name, "")):
                raise ConfigError(
                    f"this node does not say its {name}; start the supernode with "
                    """--node-config 'client="hospital-a" data="/srv/hospital-a.csv"'"""
                )
        unknown = [key for key in table if key not in fields and not _calls_function(str(table["data"]))]
        if unknown:
            raise unknown_name("key in --node-config", unknown[0], fields)
        settings = cls(**{name: str(table[name]) for name in fields if name in table}, extra=dict(table))
        for name, least in (("threads", 1), ("length", 3)):
            value: str = getattr(settings, name)
            if not value.isdigit() or int(value) < least:
                raise ConfigError(f"{name} in --node-config is a whole number of at least {least}; got {value!r}")
        if settings.text and not settings.tokenizer:
            raise ConfigError(
                f"text={settings.text!r} in --node-config needs a tokenizer: a folder of this machine with "
                "tokenizer.json or vocab.txt"
            )
        NodeRules.parse(settings.__dict__)
        return settings

    @property
    def table_options(self) -> TableOptions:
        """How a table is read, without its class."""
        return TableOptions(
            split_column=self.split or None,
            weight_column=self.row_weight or None,
            image_column=self.image or None,
            ignore=self.ignore,
            text_column=self.text or None,
            tokenizer=self.tokenizer or None,
            length=int(self.length),
        )

    @property
    def rules(self) -> NodeRules:
        return NodeRules.parse(self.__dict__)


@dataclass(frozen=True)
class Examples:
    """What a node's own function returns."""

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
    names_test: bool = False  # the node says itself which rows are for the test, and the run's seed does not matter
    names_val: bool = False  # likewise for validation
    text: TextInput | None = None  # where a table's texts became the examples

    @property
    def inputs(self) -> list[str]:
        """What all clients must have in common: columns of a table, or how texts are cut."""
        return self.columns if self.text is None else [f"texts, cut by tokenizer {self.text.fingerprint()}"]

    def names_rows(self, deployment: Deployment) -> bool:
        """No choice of the server's decides which rows are trained on."""
        return self.names_test and (self.names_val or not deployment.validation_share)

    def sums(self, mean: Tensor | None) -> Tensor:
        """What scaling needs of this client: sums of features over its training rows, or of squared distances from the
        common mean. float64."""
        raw = self.federation.features.raw[self.federation.train.rows].to(torch.float64)
        total: Tensor = raw.sum(0) if mean is None else (raw - mean).square().sum(0)
        return total

    def statistics(self) -> TableStatistics:
        """What encoding a table needs of this client: counts, moments and categories of its training rows' columns."""
        assert self.table is not None
        assert self.table.read is not None
        return self.table.read.collect(self.federation.train.rows.numpy())[0]

    def prepared(self, enrolment: Enrolment, deployment: Deployment) -> Federation:
        """The client as one of the deployment's: encoded and scaled as all are, with its validation examples."""
        federation = self.encoded(enrolment)
        share, rule = deployment.validation_share, deployment.run.class_weights
        if share and not int(federation.val.count.sum()):
            federation = federation.with_validation(share, deployment.seed, torch.tensor([enrolment.number]))
        return federation if rule == NO_WEIGHTS else federation.with_class_weights(rule)

    def encoded(self, enrolment: Enrolment) -> Federation:
        """With features as models are fed them."""
        learnt, mean, std = enrolment.preprocessing, enrolment.mean, enrolment.std
        raw = self.federation.features.raw
        if self.table is not None:
            learnt = learnt or TablePreprocessing.plain(self.columns)
            raw = self.table.encode(learnt, self.federation.description["dataset"]).raw
            mean, std = (learnt.mean, learnt.std) if learnt.standardize else (mean, std)
        return replace(self.federation, features=Features(raw, mean, std), preprocessing=learnt)


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
    table: LabelledRows | None
    if is_table(node.data):
        label = node.label or deployment.run.label_column
        options = replace(node.table_options, label_column=label, columns=deployment.run.columns or "")
        text = options.text
        table = load_like(Path(node.data), options, deployment.feature_columns, problem)
        labels, is_test, is_val, weights = table.labels, table.is_test, table.is_val, table.weights
        if table.features is not None:
            raw, columns, table = table.features.raw, [], None
        else:
            assert table.read is not None
            columns = list(deployment.feature_columns or table.read.cells)
            raw = torch.zeros(len(labels), len(columns))
    else:
        examples = _from_function(node) if _calls_function(node.data) else _from_npz(Path(node.data))
        raw = as_features(examples.x, examples.tokens)
        labels = _labels(examples.y, problem, node.data)
        weights = None if examples.weight is None else read_weights(examples.weight, f"weight in {node.data}")
        is_test, is_val = (
            None if flag is None else _flags(flag, len(labels), node.data) for flag in (examples.test, examples.val)
        )
        columns, table = [], None
    for what, values in (("labels", labels), ("weights", weights)):
        if values is not None and len(raw) != len(values):
            raise DataError(f"{node.data} holds {len(raw)} examples but {len(values)} {what}")
    if weights is not None:
        _check_weights(node, deployment)
    rows = Ragged.grouped(torch.arange(len(raw)), torch.zeros(len(raw), dtype=torch.int64), 1)
    val = Ragged.empty(1) if is_val is None else rows.filter(is_val)
    rest = rows if is_val is None else rows.filter(~is_val)
    if is_test is None:
        key = name_keys(rng.root(deployment.seed, "test-split"), [node.client])
        train, test = hold_out(rest, deployment.test_fraction, key)
    else:
        train, test = rest.filter(~is_test[rest.rows]), rest.filter(is_test[rest.rows])
    federation = Federation(
        Features(raw), labels, problem, train, val, test, [node.client],
        description={"dataset": node.data, "partition": "given"}, weights=scaled_weights(weights, train.rows),
    )  # fmt: skip
    is_split = is_test is not None, is_val is not None and bool(is_val.any())
    return ClientData(federation, columns, table, *is_split, text)


def _check_weights(node: NodeSettings, deployment: Deployment) -> None:
    """Refuse weights of rows where they could not be what they say."""
    if "no example weights" in deployment.algorithm.traits:
        raise ConfigError(
            f"{node.client} has weights of rows, and the local steps of {deployment.method} know none; leave them out"
        )
    if deployment.run.privacy is not None:
        raise ConfigError(
            f"{node.client} has weights of rows, of mean one over its rows: the weight of a row would depend on the "
            "others, which clipping single gradients does not bound; leave them out under differential privacy"
        )


def _calls_function(data: str) -> bool:
    path, colon, _ = data.rpartition(":")
    return bool(colon) and path.endswith(".py")


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
    result = function(dict(node.extra or {}))
    if isinstance(result, Examples):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        return Examples(*result)
    raise DataError(
        f"{node.data} should return (x, y) or kinfed.deploy.node_data.Examples; got {type(result).__name__}"
    )


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


def _labels(y: Any, problem: Problem, where: str) -> Tensor:
    column = np.asarray(y)
    whole = column.astype(np.int64) if column.dtype.kind == "b" else column  # false and true are the classes 0 and 1
    return read_known_target(whole, problem, f"y of {where}")


def _flags(value: Any, count: int, where: str) -> Tensor:
    flags = torch.as_tensor(np.asarray(value))
    if flags.dtype != torch.bool or flags.shape != (count,):
        raise DataError(f"test and val of {where} are {count} booleans; got {flags.dtype} of shape {list(flags.shape)}")
    return flags
