"""Client states, kept only for clients that have been seen; in memory or in memory-mapped files."""

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kinfed.core import Tree, as_slice
from kinfed.data import Moments
from kinfed.errors import CheckpointError, StorageError

Client = TypeVar("Client", bound=Tree)


class ClientStore(Generic[Client]):
    """Rows of client state by client id.

    `fresh(ids)` makes the state of clients that have none; it is asked again on every look-up until a state is
    put, so an evaluation of an unseen client leaves no trace. Rows are in files of `folder`, if given, once
    they take more than `bound` bytes."""

    def __init__(
        self, num_clients: int, fresh: Callable[[Tensor], Client], folder: Path | None = None, bound: int = 0
    ) -> None:
        self.slot = torch.full((num_clients,), -1, dtype=torch.int64)
        self.fresh, self._folder, self._bound = fresh, folder, bound
        self._rows: Client | None = None
        self._used = 0  # slots taken

    @property
    def seen(self) -> Tensor:
        """Ids of clients with a state, in the order they came."""
        ids = (self.slot >= 0).nonzero().squeeze(1)
        return ids[torch.argsort(self.slot[ids])]

    def has(self, ids: Tensor) -> Tensor:
        """bool [n]: which of these clients have a state."""
        return self.slot[ids] >= 0

    def take(self, ids: Tensor, *, borrow: bool = False) -> Client:
        """States of these clients: a copy, or with `borrow` perhaps the store's own rows, to be read until the next
        put. Clients who are always called together lie side by side, so that nothing is copied for them."""
        slot = self.slot.index_select(0, ids)
        new = (slot < 0).nonzero().squeeze(1)
        if self._rows is None or 0 < new.numel() == ids.numel():
            return self.fresh(ids)
        if not new.numel():
            return self._rows.take(as_slice(slot) if borrow else slot)
        rows = self._rows.take(slot.clamp_min(0))
        rows.put(new, self.fresh(ids[new]))
        return rows

    def put(self, ids: Tensor, rows: Client) -> None:
        slot = self.slot.index_select(0, ids)
        new = (slot < 0).nonzero().squeeze(1)
        if new.numel():
            used = self._used
            self._reserve(used + new.numel(), rows)
            slot[new] = torch.arange(used, used + new.numel())
            self.slot[ids] = slot
            self._used += new.numel()
        if self._rows is not None:
            self._rows.put(slot, rows.apart_from(self._rows))  # a method may hand back what it borrowed

    def _reserve(self, capacity: int, like: Client) -> None:
        capacity_before = 0 if self._rows is None else next(map(len, self._rows.named().values()), 0)
        if not like.named() or capacity <= capacity_before:
            self._rows = like if self._rows is None else self._rows
            return
        capacity = min(max(capacity, 2 * capacity_before), len(self.slot))
        row_bytes = sum(t[:1].numel() * t.element_size() for t in like.named().values())
        # Not zeros: rows are written before they are read, and those of clients never seen take no memory until then.
        allocate = torch.Tensor.new_empty if capacity * row_bytes <= self._bound else self._allocate
        tensors = {name: allocate(t, (capacity, *t.shape[1:])) for name, t in like.named().items()}
        rows = like.like(tensors)
        if self._rows is not None:
            rows.put(slice(0, capacity_before), self._rows)
        self._rows = rows

    def _allocate(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._folder is None:
            return like.new_empty(shape)
        count = math.prod(shape)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A name of its own: several stores may share the folder. Once mapped, the name goes (on leaving the
            # block) and the mapping lives on, so no file outlasts the process.
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="rows-") as file:
                if count and hasattr(os, "posix_fallocate"):
                    # Without room on the disk, fail here: a write to a mapping without room kills the process.
                    os.posix_fallocate(file.fileno(), 0, count * like.element_size())
                return torch.from_file(file.name, shared=True, size=count, dtype=like.dtype).reshape(shape)
        except (OSError, RuntimeError) as error:
            raise StorageError(f"cannot keep client states in {self._folder}: {error}") from error

    def named(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint: the ids in slot order and their rows. Views: the next round writes into them."""
        ids = self.seen
        if self._rows is None:
            return {"ids": ids}
        return {"ids": ids} | {f"rows.{k}": v[: len(ids)] for k, v in self._rows.named().items()}

    def _example(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Client:
        """A state like those that belong here; what is loaded must have its fields, shapes and types."""
        return self.fresh(ids)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `named` gave; states that do not fit are refused, and the present ones kept."""
        ids = checked_ids(tensors, len(self.slot))
        if len(set(ids.tolist())) != len(ids):
            raise CheckpointError("client states with the same id twice")
        rows = {name[len("rows.") :]: t for name, t in tensors.items() if name.startswith("rows.")}
        like = self._example(ids[:1], rows) if len(ids) else None
        if like is not None:
            _check_rows(rows, like, len(ids))
        self.slot.fill_(-1)
        self._rows, self._used = None, 0
        if like is not None:
            self.put(ids, like.like(rows))


class MomentStore(ClientStore[Moments]):
    """Memory of local optimizers between rounds, by client id. Which moments there are is known once some were put, and
    clients without any have zeros: an optimizer that has not taken a step."""

    def __init__(self, num_clients: int, folder: Path | None = None, bound: int = 0) -> None:
        super().__init__(num_clients, self._zeros, folder, bound)

    def _zeros(self, ids: Tensor) -> Moments:
        if self._rows is None:
            return Moments()
        return self._rows.map(lambda tensor: tensor.new_zeros(len(ids), *tensor.shape[1:]))

    def _example(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Moments:
        return Moments({name: tensor[:1] for name, tensor in rows.items()})


def checked_ids(tensors: Mapping[str, Tensor], num_clients: int) -> Tensor:
    """Ids [n] of the clients whose states these are; refused if missing, or of clients that this run does not have."""
    ids = tensors.get("ids")
    if ids is None:
        raise CheckpointError("client states without the ids of their clients")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_clients:
        raise CheckpointError(f"client states of ids up to {int(ids.max())}; there are {num_clients} clients")
    return ids


def _check_rows(rows: Mapping[str, Tensor], like: Tree, count: int) -> None:
    wanted = like.named()
    if rows.keys() != wanted.keys():
        raise CheckpointError(f"client state has fields {sorted(rows)}; the method keeps {sorted(wanted)}")
    for name, tensor in rows.items():
        shape, dtype = [count, *wanted[name].shape[1:]], wanted[name].dtype
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise CheckpointError(
                f"client state {name} is {tensor.dtype} of shape {list(tensor.shape)}; "
                f"this method and model keep {dtype} of shape {shape}"
            )
