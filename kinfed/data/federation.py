"""A federation: one data set, held once, and who owns which of its rows.

Splits are ragged and stored in CSR form (offsets [K+1], rows): no padding, whatever the client sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed import rng
from kinfed.data.batches import Part
from kinfed.data.features import Features
from kinfed.errors import ConfigError, DataError

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Ragged:
    """Index lists of K clients: client k owns rows[offsets[k]:offsets[k+1]]."""

    offsets: Tensor  # [K+1] int64
    rows: Tensor  # [total] int64

    @classmethod
    def of(cls, lists: Sequence[Any]) -> Ragged:
        arrays = [np.asarray(item, dtype=np.int64).reshape(-1) for item in lists]
        sizes = np.array([len(array) for array in arrays], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        rows = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        return cls(torch.from_numpy(offsets), torch.from_numpy(rows.astype(np.int64)))

    @property
    def count(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def lists(self) -> list[Tensor]:
        return [self[k] for k in range(len(self))]


@dataclass
class Cohort:
    """Some clients' data in some round: what a client's part of an algorithm sees."""

    ids: Tensor  # [n]
    train: Part
    val: Part
    test: Part
    seed: int
    round: int
    groups: Tensor | None = None  # [n] device type, latent distribution, ...: known to the client

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: Tensor | slice) -> Cohort:
        return Cohort(
            self.ids[index],
            self.train.take(index),
            self.val.take(index),
            self.test.take(index),
            self.seed,
            self.round,
            None if self.groups is None else self.groups[index],
        )


@dataclass(frozen=True)
class Population:
    """What a server may know before training: how many clients there are, and how it will call on them."""

    num_clients: int
    seed: int
    participation: float = 1.0
    groups: Tensor | None = None  # [K] public group labels, such as device types
    num_groups: int = 0
    train_count: Tensor | None = None  # [K] for methods that declare they need sizes in advance

    def key(self, purpose: str) -> Tensor:
        return rng.root(self.seed, purpose)


@dataclass
class Federation:
    features: Features
    labels: Tensor  # [N] int64
    num_classes: int
    train: Ragged
    val: Ragged
    test: Ragged
    names: list[str]
    groups: Tensor | None = None  # [K] int64
    group_names: list[str] | None = None
    class_names: list[str] | None = None
    description: dict[str, Any] = field(default_factory=dict)  # data set, partition and their options
    notes: list[str] = field(default_factory=list)  # what a reader of results must know (flags, substitutes)

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_clients(self) -> int:
        return len(self.train)

    def __len__(self) -> int:
        return self.num_clients

    def split(self, name: str) -> Ragged:
        if name not in SPLITS:
            raise ConfigError(f"a split is one of {', '.join(SPLITS)}; got {name!r}")
        found: Ragged = getattr(self, name)
        return found

    def cohort(self, ids: Tensor, seed: int, round: int, effort: Tensor | None = None) -> Cohort:
        parts = {}
        for name in SPLITS:
            ragged = self.split(name)
            start = ragged.offsets[ids]
            count = ragged.offsets[ids + 1] - start
            parts[name] = Part(
                self.features, self.labels, ids, start, count, ragged.rows, seed, round,
                effort if name == "train" else None,
            )  # fmt: skip
        groups = None if self.groups is None else self.groups[ids]
        return Cohort(ids, parts["train"], parts["val"], parts["test"], seed, round, groups)

    def population(self, seed: int, participation: float = 1.0) -> Population:
        num_groups = 0 if self.groups is None else int(self.groups.max()) + 1
        return Population(
            self.num_clients, seed, participation, self.groups, num_groups, self.train.count.clone()
        )

    def class_counts(self, split: str = "train") -> Tensor:
        """[K, C] examples of every class at every client."""
        ragged = self.split(split)
        owner = torch.repeat_interleave(torch.arange(len(ragged)), ragged.count)
        flat = owner * self.num_classes + self.labels[ragged.rows]
        return torch.bincount(flat, minlength=len(ragged) * self.num_classes).reshape(
            -1, self.num_classes
        )

    def with_validation(self, fraction: float, seed: int) -> Federation:
        """Move a random part of every client's training rows to validation.

        At least one example where a client has two or more (exactly one below five); a client with a single
        example keeps it for training and validates on it too, which is noted."""
        if not 0 <= fraction < 1:
            raise ConfigError(f"the validation share must lie in [0, 1); got {fraction}")
        if fraction == 0:
            return self
        key = rng.root(seed, "validation")
        train, val, alone = [], [], 0
        for client, rows in enumerate(self.train.lists()):
            n = len(rows)
            if n == 1:
                train.append(rows)
                val.append(rows)
                alone += 1
                continue
            held = 1 if n < 5 else min(max(int(n * fraction + 1e-9), 1), n - 1)
            order = rng.permutation(rng.fold(key, client), n)
            val.append(rows[order[:held].sort().values])
            train.append(rows[order[held:].sort().values])
        notes = list(self.notes)
        if alone:
            notes.append(f"{alone} client(s) with one example validate on that example")
        return replace(self, train=Ragged.of(train), val=Ragged.of(val), notes=notes)

    def with_foreign_targets(self, seed: int) -> Federation:
        """Shuffle the (val, test) pairs among clients: each is judged on another one's distribution."""
        order = rng.permutation(rng.root(seed, "foreign-targets"), self.num_clients).tolist()
        val, test = self.val.lists(), self.test.lists()
        return replace(
            self,
            val=Ragged.of([val[k] for k in order]),
            test=Ragged.of([test[k] for k in order]),
            description={**self.description, "foreign_targets": seed, "target_of": order},
        )

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
        test_clients_rows: Any = None,
        num_classes: int | None = None,
        groups: Any = None,
        seed: int = 0,
        name: str = "arrays",
    ) -> Federation:
        """A federation from the caller's own arrays.

        x [N, ...] numbers, y [N] labels 0..C-1, clients [N] the owner of every example (any labels).
        `test_clients_rows` [N] bool marks test examples; otherwise `test_fraction` of each client's rows is
        drawn. `groups` maps a client's label to its group name."""
        features = torch.as_tensor(np.asarray(x))
        if features.dtype not in (torch.uint8, torch.int64):
            features = features.to(torch.float32)
        labels = torch.as_tensor(np.asarray(y)).to(torch.int64)
        owners, index = np.unique(np.asarray(clients).astype(str), return_inverse=True)
        if not len(features) == len(labels) == len(index):
            raise DataError(
                f"x, y and clients must have one entry per example; got {len(features)}, {len(labels)}, {len(index)}"
            )
        if not 0 <= test_fraction < 1:
            raise ConfigError(f"test_fraction must lie in [0, 1); got {test_fraction}")
        marked = None if test_clients_rows is None else np.asarray(test_clients_rows, dtype=bool)
        key = rng.root(seed, "test-split")
        train, test = [], []
        for client in range(len(owners)):
            rows = np.flatnonzero(index == client)
            if marked is not None:
                train.append(rows[~marked[rows]])
                test.append(rows[marked[rows]])
                continue
            held = min(int(len(rows) * test_fraction + 1e-9), len(rows) - 1)
            order = rng.permutation(rng.fold(key, client), len(rows)).numpy()
            test.append(np.sort(rows[order[:held]]))
            train.append(np.sort(rows[order[held:]]))
        group_ids, group_names = None, None
        if groups is not None:
            of_client = [str(groups[owner]) for owner in owners]
            group_names = sorted(set(of_client))
            group_ids = torch.tensor([group_names.index(g) for g in of_client])
        classes = int(labels.max()) + 1 if num_classes is None else num_classes
        empty = Ragged.of([[] for _ in owners])
        return cls(
            Features(features), labels, classes, Ragged.of(train), empty, Ragged.of(test),
            [str(owner) for owner in owners], group_ids, group_names, None, {"dataset": name, "partition": "given"},
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
        if len(self.labels) != len(self.features):
            raise DataError(f"{len(self.features)} examples but {len(self.labels)} labels")
        if len(self.names) != clients or len(set(self.names)) != clients:
            raise DataError(f"every one of the {clients} clients needs a name of its own")
        if len(self.labels) and (self.labels.min() < 0 or self.labels.max() >= self.num_classes):
            raise DataError(
                f"labels must lie in 0..{self.num_classes - 1}; "
                f"found {int(self.labels.min())}..{int(self.labels.max())}"
            )
        raw = self.features.raw
        if raw.is_floating_point():
            bad = ~torch.isfinite(raw.reshape(len(raw), -1)).all(1)
            if bool(bad.any()):
                first = int(bad.nonzero()[0])
                raise DataError(
                    f"{int(bad.sum())} example(s) hold NaN or infinite features (first: row {first}); clean or drop them"
                )
        empty = (self.train.count == 0).nonzero().squeeze(1)
        if len(empty):
            who = ", ".join(self.names[int(k)] for k in empty[:5])
            raise DataError(
                f"{len(empty)} client(s) have no training example ({who}); give each at least one or leave them out"
            )
