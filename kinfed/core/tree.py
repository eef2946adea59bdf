"""Dataclasses of tensors: what servers and clients keep, and what travels between them.

A subclass is an ordinary dataclass whose fields are tensors, `None`, or other trees. In client states and
messages every tensor has one row per client, so a cohort's state is the same class with more rows:

    @dataclass
    class Client(Tree):
        v: Tensor  # [n, P]  personal model

    Client.stack([a, b])      one row block after the other
    state.take(index)         the rows of some clients
    state.put(index, rows)    write rows back (in place)
    state.named()             {"v": tensor}, nested names joined by dots: what a checkpoint stores
    state.nbytes              size of all tensors; an expand() counts as the rows it stands for, a field that is
                              `masked_by` another as the numbers it holds
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from kinfed.core.bitpack import count_bits

# In the metadata of a field.
MASKED_BY = "masked_by"
EXACT = "exact"
RENEWED = "renewed"
EXAMPLES = "examples"


def masked_by(name: str) -> dict[str, str]:
    """Metadata of a field [n, P] of a message of which only some numbers travel, and are counted: those whose bit is
    set in the field `name`, [n, ⌈P/8⌉] uint8 (kinfed.core.kernels). All others are zero.

    w: Tensor = field(metadata=masked_by("bits"))"""
    return {MASKED_BY: name}


def exact() -> dict[str, bool]:
    """Metadata of a field of a message that must arrive as it is: compression leaves it alone.

    count: Tensor = field(metadata=exact())"""
    return {EXACT: True}


def renewed() -> dict[str, bool]:
    """Metadata of a field of an update that says how things are now, as a gradient does, and is not added up: where it
    travels as a code, the receiver keeps what it knows and learns the difference.

    delta: Tensor = field(metadata=renewed())"""
    return {RENEWED: True}


def counts_examples() -> dict[str, bool]:
    """Metadata of a field [n] or [n, C] of an update that counts training examples of a client, all or some of them:
    exact, and a deployment holds its sum against what the client declared.

    weight: Tensor = field(metadata=counts_examples())"""
    return {EXACT: True, EXAMPLES: True}


@dataclasses.dataclass
class Tree:
    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _field_names(type(self))]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same tree with the function applied to every tensor."""
        return type(self)(*[
            value.map(function) if isinstance(value, Tree) else None if value is None else function(value)
            for _, value in self._fields()
        ])  # fmt: skip

    def named(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, value in self._fields():
            if isinstance(value, Tree):
                tensors |= {f"{name}.{inner}": tensor for inner, tensor in value.named().items()}
            elif value is not None:
                tensors[name] = value
        return tensors

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        """A tree of this structure with the tensors of `named()`; the inverse of it."""
        if tensors.keys() != self.named().keys():
            fields = sorted(self.named())
            raise ValueError(f"a {type(self).__name__} with fields {fields} cannot hold {sorted(tensors)}")
        changed: dict[str, Any] = {}
        for name, value in self._fields():
            if isinstance(value, Tree):
                inner = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
                changed[name] = value.like(inner)
            else:
                changed[name] = None if value is None else tensors[name]
        return type(self)(**changed)

    def take(self, index: Tensor | slice) -> Self:
        if _names_rows(index):
            return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))
        return self.map(lambda tensor: tensor[index])

    def sorted_by(self, places: Tensor) -> Self:
        """The rows in the order of their places [n]; the tree itself where they stand in it already."""
        return self if isinstance(as_slice(places), slice) else self.take(torch.argsort(places))

    def put(self, index: Tensor | slice, rows: Self) -> None:
        """self.take(index) is `rows` afterwards. All or nothing: rows that do not fit are refused before any write."""
        ours, theirs = self.named(), rows.named()
        if ours.keys() != theirs.keys():
            raise ValueError(f"cannot put rows with fields {sorted(theirs)} into {sorted(ours)}")
        for name, tensor in ours.items():
            shape, wanted = theirs[name].shape, (_num_rows(index, len(tensor)), *tensor.shape[1:])
            if shape != wanted:
                raise ValueError(f"cannot put {name} of shape {list(shape)} where {list(wanted)} is wanted")
            if not torch.can_cast(theirs[name].dtype, tensor.dtype):
                raise ValueError(f"cannot put {name} of type {theirs[name].dtype} into {tensor.dtype}")
            if _shares_memory(tensor):
                raise ValueError(f"{name} is an expand(): its rows share one memory; clone() the tree before put()")
        for name, tensor in ours.items():
            value = theirs[name].to(tensor.device, tensor.dtype)  # states may be elsewhere than what computes them
            if _names_rows(index):
                _put_rows(tensor, index, value)
            else:
                tensor[index] = value

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Rows of all parts, one block after the other. A single part is returned as it is, not copied."""
        if not parts:
            raise ValueError(f"there is no {cls.__name__} to stack")
        if len(parts) == 1:
            return parts[0]
        names = [part.named() for part in parts]
        for other in names[1:]:
            if other.keys() != names[0].keys():
                raise ValueError(f"cannot stack rows with fields {sorted(other)} on {sorted(names[0])}")
        return parts[0].like({name: torch.cat([n[name] for n in names]) for name in names[0]})

    def to(self, device: torch.device | str) -> Self:
        device = torch.device(device)
        if all(tensor.device == device for tensor in self.named().values()):
            return self
        return self.map(lambda tensor: tensor.to(device))

    def apart_from(self, *others: Tree) -> Self:
        """The same tree, in which what lies in the memory of the others is copied: it stays when they change."""
        theirs = {tensor.untyped_storage().data_ptr() for other in others for tensor in other.named().values()}
        if all(tensor.untyped_storage().data_ptr() not in theirs for tensor in self.named().values()):
            return self
        return self.map(lambda tensor: tensor.clone() if tensor.untyped_storage().data_ptr() in theirs else tensor)

    def clone(self) -> Self:
        return self.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    @property
    def nbytes(self) -> int:
        total = 0
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tree):
                total += value.nbytes
            elif value is not None:
                mask = field.metadata.get(MASKED_BY)
                total += (value.numel() if mask is None else count_bits(getattr(self, mask))) * value.element_size()
        return total

    def finite_rows(self, rows: int) -> Tensor:
        """bool [rows]: which clients' rows hold no NaN and no infinity."""
        good = torch.ones(rows, dtype=torch.bool)
        for tensor in self.named().values():
            if tensor.is_floating_point() and tensor.numel():
                # A sum is finite unless a member is not, or it overflows, which is as useless to average. Half
                # precision overflows at 65504 already, so it is summed in float32.
                wide = tensor.dtype if tensor.element_size() > 2 else torch.float32
                if not math.isfinite(tensor.sum(dtype=wide)):
                    good &= torch.isfinite(tensor.reshape(rows, -1).sum(1, dtype=wide)).cpu()
        return good


_FIELD_NAMES: dict[type, tuple[str, ...]] = {}  # by class: asked for several times per round of every message


def _field_names(tree: type) -> tuple[str, ...]:
    if tree not in _FIELD_NAMES:
        _FIELD_NAMES[tree] = tuple(field.name for field in dataclasses.fields(tree))
    return _FIELD_NAMES[tree]


def _names_rows(index: Tensor | slice) -> TypeGuard[Tensor]:
    """Whether the index is a list of row numbers: whole rows can then be copied, which is many times faster than
    general indexing, element by element."""
    return isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1


def _shares_memory(tensor: Tensor) -> bool:
    """Whether several elements are one number in memory, along any axis."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def is_broadcast(rows: Tensor) -> bool:
    """Whether all rows are one row in memory, as after `expand()`: the same for every client, so it is sent once."""
    return rows.stride(0) == 0


def as_slice(rows: Tensor) -> slice | Tensor:
    """The same row numbers as a slice where each follows the one before, so that taking them copies nothing."""
    count = rows.shape[0]
    if not count:
        return rows
    first, last = int(rows[0]), int(rows[-1])
    if last - first != count - 1 or not bool((rows[1:] - rows[:-1] == 1).all()):
        return rows
    return slice(first, last + 1)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: a view where each follows the one before, else whole rows at a time."""
    index = as_slice(rows)
    return x[index] if isinstance(index, slice) else x.index_select(0, index.to(x.device))


def runs(mask: Tensor) -> list[slice]:
    """Slices of bool [P] where it is true, from left to right: whole layers, copied or changed at the speed of memory,
    where a mask goes number by number."""
    outside = mask.new_zeros(1)
    edges = torch.diff(torch.cat([outside, mask, outside])).nonzero().view(-1, 2)
    return [slice(begin, end) for begin, end in edges.tolist()]


def _put_rows(tensor: Tensor, index: Tensor, rows: Tensor) -> None:
    """tensor.index_copy_(0, index, rows); rows of models by numpy, which copies them in half of torch's time."""
    models = tensor.dim() == 2 and tensor.dtype == torch.float32
    # A negative number is an error to torch; numpy would count from the end.
    if models and tensor.device.type == rows.device.type == "cpu" and index.numel() and int(index.min()) >= 0:
        tensor.numpy()[index.numpy()] = rows.detach().numpy()
    else:
        tensor.index_copy_(0, index.to(tensor.device), rows)


def _num_rows(index: Tensor | slice, length: int) -> int:
    """Number of `length` rows that the index names."""
    if isinstance(index, slice):
        return len(range(*index.indices(length)))
    return int(index.sum()) if index.dtype == torch.bool else index.numel()


@dataclasses.dataclass
class Nothing(Tree):
    """State or message of methods that need none."""
