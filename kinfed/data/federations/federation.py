"""A federation: one data set, held once, and who owns which of its rows.

Splits are ragged and stored in CSR form (offsets [K+1], rows): no padding, whatever the client sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import make_options, rng, storage
from kinfed.data.examples.arrays import encode, groups_of, name_keys, read_features, split_labels
from kinfed.data.examples.batches import Split
from kinfed.data.examples.features import Features
from kinfed.data.examples.optimizer_state import LoopMemory, MemoryView
from kinfed.data.examples.problem import HasProblem, Problem, TaskName
from kinfed.data.examples.ragged import SPLITS, Ragged, hold_out, split_stratified
from kinfed.data.examples.row_ties import RowTies
from kinfed.data.examples.target import read_target
from kinfed.data.federations import example_weights, federation_files
from kinfed.data.federations.example_weights import BALANCED, BY_CLIENT
from kinfed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kinfed.data.audit.findings import Finding
    from kinfed.data.examples.arrays import Datasets
    from kinfed.data.federations.description import Description
    from kinfed.data.preprocessing.encodings import OwnColumn
    from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing

PUBLIC_EXAMPLES = "public_examples"  # in a description: how many of the clients' own examples were made public


@dataclass(repr=False)
class Federation(HasProblem):
    """The clients of a data set with their examples, labels and splits: N examples, held once, and K clients.

    It is made from arrays (`from_arrays`), tables (`from_table`) or torch data sets (`from_datasets`), read from a
    folder (`load`), or by a run from the names of a data set and a partition.

    Example:

        >>> x, y, hospital = np.random.rand(60, 4), np.arange(60) % 2, np.repeat(["a", "b", "c"], 20)
        >>> federation = kinfed.Federation.from_arrays(x, y, hospital)
        >>> federation.names, federation.num_classes, federation.train.count.tolist()
        (['a', 'b', 'c'], 2, [15, 15, 15])
    """

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
    own_columns: tuple[
        tuple[OwnColumn, ...], ...
    ] = ()  # [K] columns that not every client has, as each has learnt them
    public: Tensor | None = None  # [U] int64 rows that server and clients all know; no client trains on them as its own
    weights: Tensor | None = None  # [N] float32 weight of every example in training (example_weights.py)
    persons: Tensor | None = None  # [N] int64 and
    order: Tensor | None = None  # [N] float64: ties between rows, which all parts respect (row_ties.py)
    class_weights: Tensor | None = None  # [K, C] float32 the same for classes, at every client
    findings: list[Finding] = field(default_factory=list)  # of the audit (kinfed.data.audit)
    is_audited: bool = False  # whether examples, classes and clients were looked at, beside the table they came from

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_clients(self) -> int:
        return len(self.train)

    def __len__(self) -> int:
        return self.num_clients

    def __repr__(self) -> str:
        counts = " + ".join(f"{len(self.split(name).rows):,} {name}" for name in SPLITS)
        clients, shape = f"{self.num_clients:,} clients", self.features.shape_in_words
        name = self.description.get("dataset", "data")
        return f"<Federation {name}: {clients}, {self.problem.in_words()}, {counts} examples of {shape}>"

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()

    def describe(self) -> Description:
        """Describe who holds what: sizes, classes, how far clients are from the whole. A notebook draws it."""
        from kinfed.data.federations.description import describe

        return describe(self)

    @cached_property
    def targets(self) -> Tensor:
        """[N, ...] what models learn: classes int64, or numbers float32, standardized in a regression; beside the raw
        features."""
        return self.problem.targets(self.labels).to(self.features.raw.device)

    def split(self, name: str) -> Ragged:
        if name not in SPLITS:
            raise ConfigError(f"a split is one of {', '.join(SPLITS)}; got {name!r}")
        rows: Ragged = getattr(self, name)
        return rows

    def cohort(self, ids: Tensor, seed: int, round: int, effort: Tensor | None = None) -> Cohort:
        splits, after = {}, ids + 1
        for name in SPLITS:
            ragged = self.split(name)
            start = ragged.offsets.index_select(0, ids)  # half of the time of general indexing, in every round
            count = ragged.offsets.index_select(0, after) - start
            splits[name] = Split(
                self.features, self.targets, ids, start, count, ragged.rows, seed, round,
                effort if name == "train" else None, ragged.longest, weights=self._example_weights.get(name),
            )  # fmt: skip
        groups = None if self.groups is None else self.groups[ids]
        public = self.public_split(ids, seed, round)
        return Cohort(ids, splits["train"], splits["val"], splits["test"], seed, round, groups, public)

    @cached_property
    def _example_weights(self) -> dict[str, Tensor]:
        """Weights of every entry of a split's rows, float32; {} if all count alike. Test examples always do."""
        if self.weights is None and self.class_weights is None:
            return {}
        entries = {}
        for name, ragged in (("train", self.train), ("val", self.val)):
            total = torch.ones(len(ragged.rows))
            if self.weights is not None:
                total *= self.weights[ragged.rows]
            if self.class_weights is not None:
                total *= self.class_weights[ragged.owner, self.labels[ragged.rows]]
            entries[name] = total
        return entries

    def public_split(self, ids: Tensor, seed: int, round: int) -> Split | None:
        """The public examples as each of these clients has them; None if there are none."""
        if self.public is None:
            return None
        size = len(self.public)
        start, count = torch.zeros_like(ids), torch.full_like(ids, size)
        return Split(self.features, self.targets, ids, start, count, self.public, seed, round, None, size)

    @property
    def ties(self) -> RowTies | None:
        return RowTies.of(self.persons, self.order)

    def population(self, seed: int, participation: float = 1.0) -> Population:
        num_groups = 0 if self.groups is None else int(self.groups.max()) + 1
        pool = self.public_split(torch.tensor([0]), seed, 0)
        weighs = self.weights is not None or self.class_weights is not None
        groups, exchanged = self.groups, self.statistics_bytes
        return Population(self.num_clients, seed, participation, groups, num_groups, pool, exchanged, weighs)

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
        """[K, C] examples of every class at every client; [K, 1] all examples where the problem has no classes."""
        ragged = self.split(split)
        if not self.problem.has_classes:
            return ragged.count[:, None]
        flat = ragged.owner * self.num_classes + self.labels[ragged.rows]
        return torch.bincount(flat, minlength=len(ragged) * self.num_classes).reshape(-1, self.num_classes)

    def with_class_weights(self, rule: str) -> Federation:
        """Classes count by a rule (kinfed.data.federations.example_weights) from the training rows as they are now."""
        table = example_weights.class_weight_table(rule, self.class_counts(), self.problem)
        values = None if table is None or rule == BY_CLIENT else table[0].tolist()  # the same for all clients
        about = {"class_weights": rule, "class_weight_values": values}
        return replace(self, class_weights=table, description={**self.description, **about})

    def with_validation(
        self, fraction: float, seed: int, ids: Tensor | None = None, *, stratify: bool = False
    ) -> Federation:
        """Move a random part of every client's training rows to validation; the last ones, or random persons, where
        rows have an order or persons.

        At least one example where a client has two or more (exactly one below five); a client with a single
        example keeps it for training and validates on it too, which is noted. Clients that already have
        validation rows keep theirs. `ids` [K] are the clients' numbers in the whole federation, by which draws are
        keyed, where this is a part of it."""
        if not 0 <= fraction < 1:
            raise ConfigError(f"the validation share must lie in [0, 1); got {fraction}")
        if fraction == 0:
            return self
        n, needs = self.train.count, self.val.count == 0
        single = needs & (n == 1)
        share = (n.to(torch.float64) * fraction + 1e-9).to(torch.int64)
        size = torch.where(n < 5, 1, share.clamp_min(1)).minimum(n - 1) * needs
        keys = rng.fold(rng.root(seed, "validation"), torch.arange(self.num_clients) if ids is None else ids)
        what = "example"
        if self.ties is not None:
            what = "example, person or moment"
            train, val = self.ties.hold_out(self.train, fraction, keys)
            train = self.train.filter(~(needs[self.train.owner] & torch.isin(self.train.rows, val.rows)))
            alone = needs & (val.count == 0)
            val = val.filter(needs[val.owner]).joined(self.train.filter(alone[self.train.owner]))
            single = alone
        elif stratify:
            val, train = split_stratified(self.train, size, self.labels, self.problem, keys)
            val = val.joined(self.train.filter(single[self.train.owner]))
        else:
            shuffled = self.train.shuffled(keys)
            val, _ = shuffled.split_at(size + single.to(torch.int64))
            _, train = shuffled.split_at(size)
        few = [f"{int(single.sum())} client(s) with one {what} validate on that {what}"] if single.any() else []
        return replace(self, train=train.ascending(), val=val.joined(self.val).ascending(), notes=[*self.notes, *few])

    def with_groups(self, group: Callable[[str], Any] | Mapping[str, Any]) -> Federation:
        """Put every client in a group, by its name: groups are device types, sites of one kind, or the clients of one
        architecture (`models`)."""
        by_name = {name: group(name) if callable(group) else group.get(name) for name in self.names}
        if lacking := [name for name, own in by_name.items() if own is None]:
            raise ConfigError(f"every client needs a group; client {lacking[0]} has none")
        groups, names = groups_of(self.names, by_name)
        return replace(self, groups=groups, group_names=names)

    def with_public(self, fraction: float, seed: int) -> Federation:
        """Make a random part of every client's training rows public: known to all, and no longer anyone's own. A client
        with few gives none and keeps at least one; rows that are validated or tested on anywhere stay as they are."""
        if not 0 < fraction < 1:
            raise ConfigError(f"the public share must lie in (0, 1); got {fraction}")
        keys = rng.fold(rng.root(seed, "public"), torch.arange(self.num_clients))
        size = (self.train.count.to(torch.float64) * fraction + 1e-9).to(torch.int64).minimum(self.train.count - 1)
        public = torch.unique(self.train.shuffled(keys).split_at(size)[0].rows)
        public = public[~torch.isin(public, torch.cat([self.val.rows, self.test.rows]))]
        if not len(public):
            raise ConfigError(f"no client has enough examples to make a share of {fraction:g} of them public; raise it")
        train = self.train.filter(~torch.isin(self.train.rows, public))
        return replace(self, train=train, public=public, description={**self.description, PUBLIC_EXAMPLES: len(public)})

    def with_foreign_targets(self, seed: int) -> Federation:
        """Shuffle the (val, test) pairs among clients: each is judged on another one's distribution.

        `description["target_of"]` says whose pair each client has now; a few may keep their own."""
        order = rng.permutation(rng.root(seed, "foreign-targets"), self.num_clients)
        before = self.description.get("target_of", range(self.num_clients))
        about = {"foreign_targets": seed, "target_of": [before[k] for k in order.tolist()]}
        val, test = self.val.take(order), self.test.take(order)
        return replace(self, val=val, test=test, description={**self.description, **about})

    def take(self, ids: Tensor) -> Federation:
        """These clients alone, with their numbers among them."""
        splits: dict[str, Any] = {name: self.split(name).take(ids) for name in SPLITS}
        table, groups = self.class_weights, self.groups
        return replace(
            self, **splits, names=[self.names[k] for k in ids.tolist()], groups=None if groups is None else groups[ids],
            class_weights=None if table is None else table[ids],
            own_columns=tuple(self.own_columns[k] for k in ids.tolist()) if self.own_columns else (),
        )  # fmt: skip

    def pooled(self) -> Federation:
        """The data of all clients in one place: a federation of one client."""
        splits: dict[str, Any] = {name: Ragged.of([torch.unique(self.split(name).rows)]) for name in SPLITS}
        one = replace(self, **splits, names=["all clients"], groups=None, group_names=None, class_weights=None,
                      own_columns=())  # fmt: skip
        table = self.class_weights
        if table is None:
            return one
        same = bool((table == table[0]).all())
        return replace(one, class_weights=table[:1]) if same else one.with_class_weights(BALANCED)

    def on(self, device: torch.device, *, resident: bool = False) -> Federation:
        """The same clients, whose batches are made on a device; with `resident` their examples lie there, too."""
        return replace(self, features=self.features.on(device, resident=resident))

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any = None, clients: Any = None, *, test_fraction: float = 0.25, test_rows: Any = None,
        num_classes: int | None = None, task: TaskName = "auto", groups: Mapping[Any, Any] | None = None,
        tokens: bool = False, standardize: bool = False, weights: Any = None, stratify: bool = False, seed: int = 0,
        name: str = "arrays",
    ) -> Federation:  # fmt: skip
        """Make a federation from arrays of your own.

        - `x` [N, ...]: numbers; uint8 stays as it is until a batch is made, whole numbers are token ids with `tokens`.
          Several inputs are a dict of such arrays or a tuple, as the model's `forward` takes them; `labels` in a dict
          are y. Each keeps its kind: floats, whole numbers, booleans.
        - `y` [N]: classes (whole numbers 0..C-1 as they are, text by alphabet) or numbers to predict; [N, ...]: several
          labels or numbers, classes of positions, time and event; `task` says which, or the rule of
          kinfed.data.examples.target.
        - `clients` [N]: the owner of every example, any labels; `groups` maps such a label to its group.
        - `test_rows` [N] bool marks test examples; otherwise `test_fraction` of each client's rows is drawn, keyed by
          the client's name, with `stratify` in proportion to its labels.
        - `standardize` scales every feature by mean and deviation of all training rows.
        - `weights` [N]: positive numbers by which examples count in training."""
        if y is None:
            x, y = split_labels(x)
        if y is None or clients is None:
            raise DataError(
                "from_arrays takes three things: from_arrays(x, y, clients), the examples, their labels and the client "
                f"of each; {'y and ' if y is None else ''}clients are missing. Of one pair of arrays for each client "
                "make datasets: from_datasets({'north': TensorDataset(x, y), ...})"
            )
        features = read_features(x, tokens)
        has_classes = num_classes is not None and task == "auto"
        target = read_target(y, "y", "classification" if has_classes else task, codes=True)
        labels = target.labels
        index, names = encode(clients, "clients")
        if not len(features) == len(labels) == len(index):
            sizes = f"{len(features)}, {len(labels)}, {len(index)}"
            raise DataError(f"x, y and clients must have one entry per example; got {sizes}")
        if len(labels) == 0:
            raise DataError("x, y and clients are empty; a federation needs at least one example")
        owned = Ragged.grouped(torch.arange(len(index)), index, len(names))
        if test_rows is None:
            keys = name_keys(rng.root(seed, "test-split"), names)
            train, test = hold_out(owned, test_fraction, keys)
            if stratify:
                train, test = split_stratified(owned, train.count, labels, target.problem, keys)
        else:
            marked = _marked(test_rows, len(labels))
            train, test = owned.filter(~marked[owned.rows]), owned.filter(marked[owned.rows])
        group_index, group_names = groups_of(names, groups)
        problem = target.problem.fitted(labels[train.rows])
        if num_classes is not None:
            if not problem.num_classes:
                what = "a regression" if problem.is_regression else problem.kind
                raise ConfigError(f"num_classes = {num_classes}: {what} has no classes; leave it out")
            if problem.classifies:
                problem = Problem.of_classes(num_classes, problem.class_names)
            else:
                problem = replace(problem, num_classes=num_classes)
        if standardize:
            features = features.standardized(train.rows)
        counted = None if weights is None else example_weights.read_weights(weights, "weights")
        notes = [] if problem.classifies else [target.note]
        return cls(
            features, labels, problem, train, Ragged.empty(len(names)), test, names, group_index, group_names,
            {"dataset": name, "partition": "given"}, notes,
            weights=example_weights.scaled_weights(counted, train.rows),
        )  # fmt: skip

    @classmethod
    def partition(
        cls, x: Any, y: Any, rule: str = "dirichlet", *, clients: int | None = None, task: TaskName = "auto",
        tokens: bool = False, test_rows: Any = None, seed: int = 0, name: str = "arrays",
        save_partition: Path | str | None = None, **options: Any,
    ) -> Federation:  # fmt: skip
        """Share arrays of your own out among clients by a partition's name (`kinfed list partitions`).

            Federation.partition(x, y, "pfllib_dirichlet", clients=100, alpha=0.1)

        `x` [N, ...], `y` [N], `task`, `tokens` and `test_rows` are as in `from_arrays`, `options` those of the
        partition; `save_partition` names a file for who holds which rows, which `rule="file", path=...` reads."""
        from kinfed.data.partitions.partition import make_federation
        from kinfed.data.sources.source import Source

        features, target = read_features(x, tokens), read_target(y, "y", task, codes=True)
        if len(features) != len(target.labels):
            raise DataError(f"x and y must have one entry per example; got {len(features)} and {len(target.labels)}")
        is_test = None if test_rows is None else _marked(test_rows, len(features))
        source = Source(name, features, target.labels, target.problem, is_test)
        file = None if save_partition is None else Path(save_partition)
        return make_federation(source, rule, clients, options, seed, save_partition=file)

    @classmethod
    def from_table(
        cls, table: Any, *, seed: int = 0, test_fraction: float = 0.25, stratify: bool = False, **options: Any
    ) -> Federation:
        """A federation from a table with a column of clients: a pandas, polars or pyarrow table, a dictionary of
        columns, the path of a CSV or Parquet file, or a data set of Hugging Face's `datasets` (or several by split).

        `options` are those of a table (`kinfed.data.sources.TableOptions`): label_column and client_column, and where
        wanted split_column, group_column, ignore, columns, ... Where no column says which rows are for testing, a share
        `test_fraction` of each client's is, drawn in proportion to its labels with `stratify`."""
        from kinfed.data.partitions.partition import Resplit, make_federation
        from kinfed.data.preprocessing.frames import hub_table, is_hub_dataset  # with pyarrow, for tables alone
        from kinfed.data.sources.table import opened, source_from_table
        from kinfed.data.sources.table_options import TableOptions

        if is_hub_dataset(table):
            table, options = hub_table(table, options)
        settings = make_options(TableOptions, options, "the table")
        if settings.client_column is None:
            raise ConfigError("client_column: say which column names the client of each row")
        rows, name, folder = opened(table, settings.encoding)
        source, resplit = source_from_table(rows, settings, name, folder), Resplit() if stratify else None
        return make_federation(source, "column", None, {"test_fraction": test_fraction}, seed, resplit=resplit)

    @classmethod
    def from_datasets(cls, train: Datasets, test: Datasets | None = None, **options: Any) -> Federation:
        """A federation from torch data sets of pairs (x, y), {client: dataset}; x may be a dict or a tuple of tensors,
        and an example a dict of inputs with `labels`, as data sets of Hugging Face's `datasets` have them.

        Without data sets for testing, a share `test_fraction` of each client's examples is. `options` are
        those of `from_arrays`. Examples are read once, in order: random transforms are fixed then."""
        from kinfed.data.examples.arrays import read_datasets

        return cls.from_arrays(**{"name": "datasets", **options, **read_datasets(train, test)})

    def digest(self) -> str:
        """Tells this federation from any other: all examples, who has which, names and groups. Where it came from
        (description, notes) does not matter."""
        return federation_files.digest(self)

    def save(self, folder: Path | str) -> None:
        """Write the federation to a folder, replacing one that is there."""
        federation_files.save(self, folder)

    @classmethod
    def load(cls, folder: Path | str) -> Federation:
        """Read what `save` wrote."""
        return cls(**federation_files.load(folder))

    def check(self) -> None:
        """Refuse what would fail later or, worse, train on nonsense."""
        clients, examples = self.num_clients, len(self.features)
        if clients < 1:
            raise DataError("a federation needs at least one client; got none")
        for name in SPLITS:
            ragged = self.split(name)
            if len(ragged) != clients:
                raise DataError(f"split {name} lists {len(ragged)} clients, train lists {clients}")
            if _outside(ragged.rows, examples):
                raise DataError(f"split {name} points outside the {examples} examples")
        if self.public is not None:
            private = torch.cat([self.split(name).rows for name in SPLITS])
            is_private = bool(torch.isin(self.public, private).any())
            if is_private or not len(self.public) or _outside(self.public, examples):
                raise DataError("public examples are some of the data set, and in no client's train, val or test split")
        if len(self.labels) != examples:
            raise DataError(f"{examples} examples but {len(self.labels)} labels")
        for what, column in (("tags", self.tags), ("weights of examples", self.weights), ("persons", self.persons),
                             ("moments", self.order)):  # fmt: skip
            if column is not None and len(column) != examples:
                raise DataError(f"{examples} labels but {len(column)} {what}")
        if len(self.names) != clients or len(set(self.names)) != clients:
            raise DataError(f"every one of the {clients} clients needs a name of its own")
        if self.groups is not None and len(self.groups) != clients:
            raise DataError(f"{clients} clients but {len(self.groups)} group labels")
        self.problem.check(self.labels)
        self.features.check_finite()
        self._check_training_rows()

    def _check_training_rows(self) -> None:
        """Refuse clients that have none, and those that are test rows of anyone."""
        empty = (self.train.count == 0).nonzero().squeeze(1)
        if len(empty):
            who = ", ".join(self.names[int(k)] for k in empty[:5])
            none = f"{len(empty)} client(s) have no training example ({who})"
            raise DataError(f"{none}; give each at least one or leave them out")
        trained = torch.zeros(len(self.features), dtype=torch.bool)
        trained[self.train.rows] = True
        leaked = trained[self.test.rows]
        if bool(leaked.any()):
            both = f"{int(leaked.sum())} test example(s) are training examples too"
            first = int(self.test.rows[leaked][0])
            raise DataError(f"{both} (first: row {first}); accuracy on them would say nothing")


def _marked(test_rows: Any, examples: int) -> Tensor:
    """[N] bool: test examples, as a caller marked them."""
    marked = torch.as_tensor(np.asarray(test_rows))
    if marked.dtype != torch.bool or tuple(marked.shape) != (examples,):
        kind = f"{marked.dtype} of shape {tuple(marked.shape)}"
        raise DataError(f"test_rows must be {examples} booleans, one per example; got {kind}")
    return marked


def _outside(rows: Tensor, examples: int) -> bool:
    """Whether some are no rows of the examples."""
    return bool(len(rows)) and bool(rows.min() < 0 or rows.max() >= examples)


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
    """Facts that a server may know before training: how many clients there are, and how many take part in a round."""

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
