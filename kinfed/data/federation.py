"""A federation: one data set, held once, and who owns which of its rows.

Splits are ragged and stored in CSR form (offsets [K+1], rows): no padding, whatever the client sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng, storage
from kinfed.core.loop_memory import LoopMemory, MemoryView
from kinfed.data.arrays import as_features, encode, groups_of, name_keys
from kinfed.data.batches import Split
from kinfed.data.example_weights import BALANCED, BY_CLIENT, class_weight_table, read_weights, scaled_weights
from kinfed.data.features import Features
from kinfed.data.preprocessing import TablePreprocessing
from kinfed.data.problem import Problem
from kinfed.data.ragged import Ragged, hold_out
from kinfed.data.stratified import split_stratified
from kinfed.data.target import TaskName, read_target
from kinfed.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from kinfed.data.description import Description
    from kinfed.data.torch_datasets import Datasets

SPLITS = ("train", "val", "test")
PUBLIC_EXAMPLES = "public_examples"  # in a description: how many of the clients' own examples were made public


@dataclass
class Cohort:
    """The data of some clients in one round: what the client side of an algorithm sees."""

    ids: Tensor  # [n]
    train: Split
    val: Split
    test: Split
    seed: int
    round: int
    groups: Tensor | None = None  # [n] device type, latent distribution, ...: known to the client
    public: Split | None = None  # examples that everyone knows, the same for all clients

    def __len__(self) -> int:
        return len(self.ids)


def with_memory(cohort: Cohort, memory: LoopMemory | None) -> Cohort:
    """The cohort in a round of training, whose optimizers go on from `memory` and leave there what they end with."""
    return cohort if memory is None else replace(cohort, train=replace(cohort.train, memory=MemoryView(memory)))


@dataclass(frozen=True)
class Population:
    """What a server may know before training: how many clients there are, and how many take part in a round."""

    num_clients: int
    seed: int
    participation: float = 1.0
    groups: Tensor | None = None  # [K] public group labels, such as device types
    num_groups: int = 0
    pool: Split | None = None  # examples that the server holds: public ones, or what a method had clients share
    exchanged: tuple[int, int] = (0, 0)  # bytes down and up before the first round
    weighs_examples: bool = False  # whether some examples count more than others in training

    def key(self, purpose: str) -> Tensor:
        return rng.root(self.seed, purpose)


@dataclass(repr=False)
class Federation:
    """Made from arrays (`from_arrays`), tables (`from_table`) or torch data sets (`from_datasets`), read from a folder
    (`load`), or by a run from the names of a data set and a partition."""

    features: Features
    labels: Tensor  # [N] int64 classes, or float64 numbers in their own unit where the problem is a regression
    problem: Problem
    train: Ragged
    val: Ragged
    test: Ragged
    names: list[str]
    groups: Tensor | None = None  # [K] int64
    group_names: list[str] | None = None
    description: dict[str, Any] = field(default_factory=dict)  # data set, partition and their options
    notes: list[str] = field(default_factory=list)  # what a reader of results must know (flags, substitutes)
    tags: Tensor | None = None  # [N] int64 a circumstance of every example (a device's state): for evaluation only
    tag_names: list[str] | None = None
    preprocessing: TablePreprocessing | None = None  # how the rows of a table became features
    public: Tensor | None = None  # [U] int64 rows that server and clients all know; nobody trains on them as its own
    weights: Tensor | None = None  # [N] float32 how much every example counts in training (kinfed.data.example_weights)
    class_weights: Tensor | None = None  # [K, C] float32 the same for classes, at every client

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_clients(self) -> int:
        return len(self.train)

    def __len__(self) -> int:
        return self.num_clients

    def __repr__(self) -> str:
        counts = " + ".join(f"{len(self.split(name).rows):,} {name}" for name in SPLITS)
        clients, shape = f"{self.num_clients:,} clients", list(self.features.shape)
        name = self.description.get("dataset", "data")
        return f"<Federation {name}: {clients}, {self.problem.in_words()}, {counts} examples of shape {shape}>"

    def _repr_html_(self) -> str:
        html: str = self.describe()._repr_html_()
        return html

    def describe(self) -> Description:
        """Who holds what: sizes, classes, how far clients are from the whole. A notebook draws it."""
        from kinfed.data.describe import describe

        return describe(self)

    @property
    def num_classes(self) -> int:
        """0 for a regression."""
        return self.problem.num_classes

    @property
    def class_names(self) -> list[str] | None:
        return None if self.problem.class_names is None else list(self.problem.class_names)

    @cached_property
    def targets(self) -> Tensor:
        """[N] what models learn: classes int64, or standardized numbers float32."""
        return self.problem.standardized(self.labels).to(torch.float32) if self.problem.is_regression else self.labels

    def split(self, name: str) -> Ragged:
        if name not in SPLITS:
            raise ConfigError(f"a split is one of {', '.join(SPLITS)}; got {name!r}")
        rows: Ragged = getattr(self, name)
        return rows

    def cohort(self, ids: Tensor, seed: int, round: int, effort: Tensor | None = None) -> Cohort:
        splits = {}
        for name in SPLITS:
            ragged = self.split(name)
            start = ragged.offsets[ids]
            splits[name] = Split(
                self.features, self.targets, ids, start, ragged.offsets[ids + 1] - start, ragged.rows, seed, round,
                effort if name == "train" else None, ragged.longest, weights=self._example_weights.get(name),
            )  # fmt: skip
        groups = None if self.groups is None else self.groups[ids]
        public = self.public_split(ids, seed, round)
        return Cohort(ids, splits["train"], splits["val"], splits["test"], seed, round, groups, public)

    @cached_property
    def _example_weights(self) -> dict[str, Tensor]:
        """Of every entry of a split's rows, float32; {} where all count alike. Test examples always do."""
        if self.weights is None and self.class_weights is None:
            return {}
        entries = {}
        for name in ("train", "val"):
            ragged = self.split(name)
            total = torch.ones(len(ragged.rows))
            if self.weights is not None:
                total *= self.weights[ragged.rows]
            if self.class_weights is not None:
                total *= self.class_weights[ragged.owner, self.labels[ragged.rows]]
            entries[name] = total
        return entries

    def public_split(self, ids: Tensor, seed: int, round: int) -> Split | None:
        """The public examples as each of these clients has them; None where there are none."""
        if self.public is None:
            return None
        size = len(self.public)
        start, count = torch.zeros_like(ids), torch.full_like(ids, size)
        return Split(self.features, self.targets, ids, start, count, self.public, seed, round, None, size)

    def population(self, seed: int, participation: float = 1.0) -> Population:
        num_groups = 0 if self.groups is None else int(self.groups.max()) + 1
        pool = self.public_split(torch.tensor([0]), seed, 0)
        weighs = self.weights is not None or self.class_weights is not None
        return Population(
            self.num_clients, seed, participation, self.groups, num_groups, pool, self.statistics_bytes, weighs
        )

    @property
    def statistics_bytes(self) -> tuple[int, int]:
        """Down and up, before the first round: what became of columns, and the statistics that it was learnt from; sum
        and number of weights of rows, and their mean; numbers of examples by class, and class weights."""
        learnt, down, up = self.preprocessing, 0, 0
        if learnt is not None and not learnt.learns_nothing:
            down, up = self.num_clients * len(storage.to_json(learnt.to_json()).encode()), learnt.message_bytes
        if self.weights is not None:
            down, up = down + 8 * self.num_clients, up + 16 * self.num_clients
        if self.description.get("class_weights") == BALANCED:
            down, up = (total + 8 * self.num_clients * self.num_classes for total in (down, up))
        return down, up

    def class_counts(self, split: str = "train") -> Tensor:
        """[K, C] examples of every class at every client; [K, 1] all examples where the problem is a regression."""
        ragged = self.split(split)
        if self.problem.is_regression:
            return ragged.count[:, None]
        flat = ragged.owner * self.num_classes + self.labels[ragged.rows]
        return torch.bincount(flat, minlength=len(ragged) * self.num_classes).reshape(-1, self.num_classes)

    def with_class_weights(self, rule: str) -> Federation:
        """Classes count by a rule (kinfed.data.example_weights) from the training rows as they are now."""
        table = class_weight_table(rule, self.class_counts(), self.problem)
        values = None if table is None or rule == BY_CLIENT else table[0].tolist()  # the same for all clients
        about = {"class_weights": rule, "class_weight_values": values}
        return replace(self, class_weights=table, description={**self.description, **about})

    def with_validation(
        self, fraction: float, seed: int, ids: Tensor | None = None, *, stratify: bool = False
    ) -> Federation:
        """Move a random part of every client's training rows to validation.

        At least one example where a client has two or more (exactly one below five); a client with a single
        example keeps it for training and validates on it too, which is noted. Clients that already have
        validation rows keep theirs. `ids` [K] are the clients' numbers in the whole federation, by which draws are
        keyed, where this is a part of it."""
        if not 0 <= fraction < 1:
            raise ConfigError(f"the validation share must lie in [0, 1); got {fraction}")
        if fraction == 0:
            return self
        n = self.train.count
        needs = self.val.count == 0
        single = needs & (n == 1)
        share = (n.to(torch.float64) * fraction + 1e-9).to(torch.int64)
        size = torch.where(n < 5, 1, share.clamp_min(1)).minimum(n - 1) * needs
        keys = rng.fold(rng.root(seed, "validation"), torch.arange(self.num_clients) if ids is None else ids)
        if stratify:
            val, train = split_stratified(self.train, size, self.labels, self.problem, keys)
            val = val.joined(self.train.filter(single[self.train.owner]))
        else:
            shuffled = self.train.shuffled(keys)
            val, _ = shuffled.split_at(size + single.to(torch.int64))
            _, train = shuffled.split_at(size)
        notes = list(self.notes)
        if bool(single.any()):
            notes.append(f"{int(single.sum())} client(s) with one example validate on that example")
        return replace(self, train=train.ascending(), val=val.joined(self.val).ascending(), notes=notes)

    def with_public(self, fraction: float, seed: int) -> Federation:
        """Make a random part of every client's training rows public: known to all, and no longer anyone's own. Whoever
        has few gives none and keeps at least one; rows that are validated or tested on anywhere stay as they are."""
        if not 0 < fraction < 1:
            raise ConfigError(f"the public share must lie in (0, 1); got {fraction}")
        keys = rng.fold(rng.root(seed, "public"), torch.arange(self.num_clients))
        size = (self.train.count.to(torch.float64) * fraction + 1e-9).to(torch.int64).minimum(self.train.count - 1)
        given, _ = self.train.shuffled(keys).split_at(size)
        judged = torch.cat([self.val.rows, self.test.rows])
        public = torch.unique(given.rows)
        public = public[~torch.isin(public, judged)]
        if not len(public):
            raise ConfigError(f"no client has enough examples to make a share of {fraction:g} of them public; raise it")
        train = self.train.filter(~torch.isin(self.train.rows, public))
        return replace(self, train=train, public=public, description={**self.description, PUBLIC_EXAMPLES: len(public)})

    def with_foreign_targets(self, seed: int) -> Federation:
        """Shuffle the (val, test) pairs among clients: each is judged on another one's distribution.

        `description["target_of"]` says whose pair each client has now; a few may keep their own."""
        order = rng.permutation(rng.root(seed, "foreign-targets"), self.num_clients)
        before = self.description.get("target_of", range(self.num_clients))
        return replace(
            self,
            val=self.val.take(order),
            test=self.test.take(order),
            description={**self.description, "foreign_targets": seed, "target_of": [before[k] for k in order.tolist()]},
        )

    def pooled(self) -> Federation:
        """The data of all clients in one place: a federation of one client."""
        train, val, test = (Ragged.of([torch.unique(self.split(name).rows)]) for name in SPLITS)
        names, table = ["all clients"], self.class_weights
        one = replace(
            self, train=train, val=val, test=test, names=names, groups=None, group_names=None, class_weights=None
        )
        if table is None:
            return one
        same = bool((table == table[0]).all())
        return replace(one, class_weights=table[:1]) if same else one.with_class_weights(BALANCED)

    def on(self, device: torch.device) -> Federation:
        return replace(self, features=self.features.on(device))

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        clients: Any,
        *,
        test_fraction: float = 0.25,
        test_rows: Any = None,
        num_classes: int | None = None,
        task: TaskName = "auto",
        groups: Mapping[Any, Any] | None = None,
        tokens: bool = False,
        standardize: bool = False,
        weights: Any = None,
        stratify: bool = False,
        seed: int = 0,
        name: str = "arrays",
    ) -> Federation:
        """A federation from the caller's own arrays.

        x [N, ...] numbers (uint8 stays as it is until a batch is made; whole numbers are token ids only with
        `tokens`), y [N] classes (whole numbers 0..C-1 as they are, text by alphabet) or numbers to predict, which
        `task` says, or the rule of kinfed.data.target, clients [N] the owner of every example (any labels).
        `test_rows` [N] bool marks test examples; otherwise `test_fraction` of each client's rows is drawn, keyed by the
        client's name. `groups` maps a client's label to its group.
        `standardize` scales every feature by mean and deviation of all training rows; `weights` [N] are positive
        numbers by which examples count in training; `stratify` draws test rows in proportion to a client's labels."""
        features = Features(as_features(x, tokens))
        has_classes = num_classes is not None and task == "auto"
        target = read_target(y, "y", "classification" if has_classes else task, codes=True)
        labels = target.labels
        index, names = encode(clients, "clients")
        if not len(features) == len(labels) == len(index):
            raise DataError(
                f"x, y and clients must have one entry per example; got {len(features)}, {len(labels)}, {len(index)}"
            )
        if len(labels) == 0:
            raise DataError("x, y and clients are empty; a federation needs at least one example")
        owned = Ragged.grouped(torch.arange(len(index)), index, len(names))
        if test_rows is None:
            keys = name_keys(rng.root(seed, "test-split"), names)
            train, test = hold_out(owned, test_fraction, keys)
            if stratify:
                train, test = split_stratified(owned, train.count, labels, target.problem, keys)
        else:
            marked = torch.as_tensor(np.asarray(test_rows))
            if marked.dtype != torch.bool or marked.shape != labels.shape:
                raise DataError(
                    f"test_rows must be {len(labels)} booleans, one per example; "
                    f"got {marked.dtype} of shape {tuple(marked.shape)}"
                )
            train, test = owned.filter(~marked[owned.rows]), owned.filter(marked[owned.rows])
        group_index, group_names = groups_of(names, groups)
        problem = fitted_problem(target.problem, labels, train)
        if num_classes is not None:
            if problem.is_regression:
                raise ConfigError(f"num_classes = {num_classes}: a regression has no classes; leave it out")
            problem = Problem.of_classes(num_classes, problem.class_names)
        if standardize:
            features = features.standardized(train.rows)
        counted = None if weights is None else read_weights(weights, "weights")
        return cls(
            features, labels, problem, train, Ragged.empty(len(names)), test, names, group_index, group_names,
            {"dataset": name, "partition": "given"}, [target.note] if problem.is_regression else [],
            weights=scaled_weights(counted, train.rows),
        )  # fmt: skip

    @classmethod
    def from_table(
        cls, table: Any, *, seed: int = 0, test_fraction: float = 0.25, stratify: bool = False, **options: Any
    ) -> Federation:
        """A federation from a table with a column of clients: a pandas, polars or pyarrow table, a dictionary of
        columns, the path of a CSV or Parquet file, or a data set of Hugging Face's `datasets` (or several by split).

        `options` are those of a table (`kinfed.data.sources.TableOptions`): label_column and client_column, and where
        wanted split_column, group_column, ignore, columns, ... Where no column says which rows are for testing, a share
        `test_fraction` of each client's is, drawn in proportion to its labels with `stratify`."""
        from kinfed.data.sources.table import federation_from_table

        return federation_from_table(table, options, test_fraction, seed, stratify)

    @classmethod
    def from_datasets(cls, train: Datasets, test: Datasets | None = None, **options: Any) -> Federation:
        """A federation from torch data sets of pairs (x, y), {client: dataset}.

        Where there are no data sets for testing, a share `test_fraction` of each client's examples is. `options` are
        those of `from_arrays`. Examples are read once, in order: random transforms are fixed then."""
        from kinfed.data.torch_datasets import read_datasets

        examples = read_datasets(train, test)
        about = {"name": "datasets", **options} | ({} if examples.is_test is None else {"test_rows": examples.is_test})
        return cls.from_arrays(examples.x, examples.y, examples.clients, **about)

    def digest(self) -> str:
        """Tells this federation from any other: all examples, who has which, names and groups. Where it came from
        (description, notes) does not matter."""
        plain = {name: getattr(self, name) for name in ("names", "group_names", "tag_names")}
        plain["problem"] = self.problem.to_json()
        return hashlib.sha256(f"{storage.checksum(self._arrays())} {storage.to_json(plain)}".encode()).hexdigest()[:32]

    def _arrays(self) -> dict[str, Tensor]:
        """All tensors by name."""
        arrays = {f"{name}.{array}": getattr(self.split(name), array) for name in SPLITS for array in _RAGGED}
        arrays |= {"raw": self.features.raw, "labels": self.labels}
        optional = {
            "mean": self.features.mean,
            "std": self.features.std,
            "vectors": self.features.vectors,
            "groups": self.groups,
            "tags": self.tags,
            "public": self.public,
            "weights": self.weights,
            "class_weights": None if self.class_weights is None else self.class_weights.contiguous(),
        }
        return arrays | {name: tensor for name, tensor in optional.items() if tensor is not None}

    def save(self, folder: Path | str) -> None:
        """Write the federation to a folder, replacing one that is there."""
        folder, arrays = Path(folder), self._arrays()
        storage.make_folder(folder)
        with storage.storage_errors("write", folder), storage.draft(folder) as new:
            checksum = storage.draft_tensors(new, arrays)
            file = f"arrays-{checksum[:16]}.safetensors"
            new.commit(folder / file)
        record = {"format": _FORMAT, "version": _VERSION, "arrays": file, "checksum": checksum}
        # The record is renamed into place last: until then a reader finds the old record and its old arrays.
        plain = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        learnt = None if self.preprocessing is None else self.preprocessing.to_json()
        known = {"problem": self.problem.to_json(), "preprocessing": learnt}
        storage.write_json(folder / _RECORD, record | plain | known)
        for old in folder.glob("arrays-*.safetensors"):
            if old.name != file:
                old.unlink()

    @classmethod
    def load(cls, folder: Path | str) -> Federation:
        """Read what `save` wrote."""
        folder = Path(folder)
        record = storage.read_json(folder / _RECORD, "the record of a saved federation")
        if record.get("format") != _FORMAT or record.get("version") != _VERSION:
            raise StorageError(
                f"{folder / _RECORD} is not a federation saved by this version of kinfed "
                f"(format {record.get('format')!r}, version {record.get('version')!r}); save it again"
            )
        lacking = [name for name in ("arrays", "checksum", "problem", *_PLAIN_FIELDS) if name not in record]
        if lacking:
            raise StorageError(f"{folder / _RECORD} is damaged: {', '.join(lacking)} missing")
        arrays = storage.read_tensors(folder / record["arrays"])
        if storage.read_metadata(folder / record["arrays"])[storage.CHECKSUM] != record["checksum"]:
            raise StorageError(f"{folder}: arrays and record come from different federations; save it again")
        features = Features(arrays["raw"], arrays.get("mean"), arrays.get("std"), vectors=arrays.get("vectors"))
        splits: dict[str, Any] = {name: Ragged(*(arrays[f"{name}.{array}"] for array in _RAGGED)) for name in SPLITS}
        plain = {name: record[name] for name in _PLAIN_FIELDS}
        learnt = record.get("preprocessing")
        plain["preprocessing"] = None if learnt is None else TablePreprocessing.from_json(learnt)
        return cls(
            features, arrays["labels"], Problem.from_json(record["problem"]), **splits,
            groups=arrays.get("groups"), tags=arrays.get("tags"), public=arrays.get("public"),
            weights=arrays.get("weights"), class_weights=arrays.get("class_weights"), **plain,
        )  # fmt: skip

    def check(self) -> None:
        """Refuse what would fail later or, worse, train on nonsense."""
        clients = len(self.train)
        if clients < 1:
            raise DataError("a federation needs at least one client; got none")
        for name in SPLITS:
            ragged = self.split(name)
            if len(ragged) != clients:
                raise DataError(f"split {name} lists {len(ragged)} clients, train lists {clients}")
            if len(ragged.rows) and (ragged.rows.min() < 0 or ragged.rows.max() >= len(self.features)):
                raise DataError(f"split {name} points outside the {len(self.features)} examples")
        if self.public is not None:
            outside = len(self.public) and (self.public.min() < 0 or self.public.max() >= len(self.features))
            private = torch.cat([self.split(name).rows for name in SPLITS])
            if outside or not len(self.public) or bool(torch.isin(self.public, private).any()):
                raise DataError("public examples are some of the data set, and in no client's train, val or test split")
        if len(self.labels) != len(self.features):
            raise DataError(f"{len(self.features)} examples but {len(self.labels)} labels")
        if self.tags is not None and len(self.tags) != len(self.labels):
            raise DataError(f"{len(self.labels)} labels but {len(self.tags)} tags")
        if self.weights is not None and len(self.weights) != len(self.labels):
            raise DataError(f"{len(self.labels)} labels but {len(self.weights)} weights of examples")
        if len(self.names) != clients or len(set(self.names)) != clients:
            raise DataError(f"every one of the {clients} clients needs a name of its own")
        if self.groups is not None and len(self.groups) != clients:
            raise DataError(f"{clients} clients but {len(self.groups)} group labels")
        check_labels(self.labels, self.problem)
        self.features.check_finite()
        empty = (self.train.count == 0).nonzero().squeeze(1)
        if len(empty):
            who = ", ".join(self.names[int(k)] for k in empty[:5])
            raise DataError(
                f"{len(empty)} client(s) have no training example ({who}); give each at least one or leave them out"
            )
        trained = torch.zeros(len(self.features), dtype=torch.bool)
        trained[self.train.rows] = True
        leaked = trained[self.test.rows]
        if bool(leaked.any()):
            first = int(self.test.rows[leaked][0])
            raise DataError(
                f"{int(leaked.sum())} test example(s) are training examples too (first: row {first}); "
                "accuracy on them would say nothing"
            )


def fitted_problem(problem: Problem, labels: Tensor, train: Ragged) -> Problem:
    """The problem with what training rows say of a regression's target; their sums are all that clients would send."""
    return Problem.of_numbers(labels[train.rows].numpy()) if problem.is_regression else problem


def check_labels(labels: Tensor, problem: Problem, what: str = "labels") -> None:
    """Refuse labels that do not fit their problem."""
    if problem.is_regression:
        if not labels.is_floating_point() or not bool(torch.isfinite(labels).all()):
            raise DataError(f"{what} of a regression are finite numbers of a float type; got {labels.dtype}")
        return
    if labels.is_floating_point():
        raise DataError(f"{what} of a {problem.kind} problem are whole numbers of classes; got {labels.dtype}")
    if len(labels) and (labels.min() < 0 or labels.max() >= problem.num_classes):
        raise DataError(
            f"{what} must lie in 0..{problem.num_classes - 1}; found {int(labels.min())}..{int(labels.max())}"
        )


_FORMAT, _VERSION = "kinfed-federation", 3
_RECORD = "federation.json"
_RAGGED = ("offsets", "rows")
_PLAIN_FIELDS = ("names", "group_names", "description", "notes", "tag_names")
