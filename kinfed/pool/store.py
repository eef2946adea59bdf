"""Client states, kept only for clients that have been seen; in memory or in memory-mapped files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kinfed.errors import CheckpointError, StorageError
from kinfed.tree import Tree

Client = TypeVar("Client", bound=Tree)


class ClientStore(Generic[Client]):
    """Rows of client state by client id.

    `fresh(ids)` makes the state of clients that have none; it is asked again on every look-up until a state is
    put, so an evaluation of an unseen client leaves no trace."""

    def __init__(self, num_clients: int, fresh: Callable[[Tensor], Client], folder: Path | None = None) -> None:
        self.slot = torch.full((num_clients,), -1, dtype=torch.int64)
        self._fresh = fresh
        self._folder = folder
        self._rows: Client | None = None
        self._files = 0

    @property
    def seen(self) -> Tensor:
        """Ids of clients with a state, in the order they came."""
        ids = (self.slot >= 0).nonzero().squeeze(1)
        return ids[torch.argsort(self.slot[ids])]

    def take(self, ids: Tensor) -> Client:
        known = self.slot[ids] >= 0
        if self._rows is not None and bool(known.all()):
            return self._rows.take(self.slot[ids])
        rows = self._fresh(ids)
        if self._rows is None or not bool(known.any()):
            return rows
        rows = rows.clone()
        rows.put(known.nonzero().squeeze(1), self._rows.take(self.slot[ids[known]]))
        return rows

    def put(self, ids: Tensor, rows: Client) -> None:
        new = ids[self.slot[ids] < 0]
        if len(new):
            used = int((self.slot >= 0).sum())
            self._reserve(used + len(new), rows)
            self.slot[new] = torch.arange(used, used + len(new))
        if self._rows is not None:
            self._rows.put(self.slot[ids], rows)

    def _reserve(self, capacity: int, like: Client) -> None:
        held = 0 if self._rows is None else _length(self._rows)
        if not like.named() or capacity <= held:
            self._rows = like if self._rows is None else self._rows
            return
        capacity = min(max(capacity, 2 * held), len(self.slot))
        grown = {name: self._allocate((capacity, *t.shape[1:]), t) for name, t in like.named().items()}
        rows = like.like(grown)
        if self._rows is not None:
            rows.put(slice(0, held), self._rows)
        self._rows = rows

    def _allocate(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._folder is None:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        count = 1
        for side in shape:
            count *= side
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files += 1
            path = self._folder / f"rows-{self._files}"
            mapped = torch.from_file(str(path), shared=True, size=count, dtype=like.dtype).reshape(shape)
            path.unlink()  # the mapping lives on; the file never outlasts the process
        except (OSError, RuntimeError) as error:
            raise StorageError(f"cannot keep client states in {self._folder}: {error}") from error
        return mapped

    def named(self) -> dict[str, Tensor]:
        """For a checkpoint: the ids in slot order and their rows."""
        ids = self.seen
        if self._rows is None:
            return {"ids": ids}
        return {"ids": ids} | {f"rows.{k}": v[: len(ids)] for k, v in self._rows.named().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        ids = tensors["ids"]
        self.slot.fill_(-1)
        self._rows = None
        if not len(ids):
            return
        like = self._fresh(ids[:1])
        rows = {name[len("rows.") :]: t for name, t in tensors.items() if name.startswith("rows.")}
        if rows.keys() != like.named().keys():
            raise CheckpointError(f"client state has fields {sorted(rows)}; the method keeps {sorted(like.named())}")
        self.put(ids, like.like(rows))


def _length(rows: Tree) -> int:
    named = rows.named()
    return len(next(iter(named.values()))) if named else 0
