"""Content of a message: a header, and trees of tensors as named arrays.

The header is JSON; the arrays are numbers in a fixed layout. Nothing in a message names a class, a function or a file,
so reading one can build nothing but numbers. What type of tree the arrays belong to, both sides know from the method.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms import Algorithm
from kinfed.core import MASKED_BY, Tree, count_bits, storage, unpacked
from kinfed.deploy.operations.log_lines import ESCAPES
from kinfed.errors import KinfedError

FORMAT = 5  # of messages; both sides refuse any other

# Kinds of requests to a node.
HELLO, SUMS, TRAIN, EVALUATE = "hello", "sums", "train", "evaluate"
JUDGE, WEIGH, SETTLE = "judge", "weigh", "settle"  # of a search
DESCRIBE, SCORE = "describe", "score"  # of tables before any model, and of models that a server brings
TOGETHER = "together"  # several of these at once, of several runs
SECURE_KINDS = SHARE, MASK, CONFIRM, UNMASK = "share", "mask", "confirm", "unmask"  # of secure sums, after training
EXACT = "exact"  # terms on which figures of an evaluation leave; other terms are a sentence

_DTYPES = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}

Arrays = dict[str, Tensor]

_MARKUP = str.maketrans("[]<>", "()()")
LONGEST_TEXT = 300
LARGEST_NUMBER = (1 << 64) - 1  # a whole number in a header


def plain_text(text: str, most: int = LONGEST_TEXT) -> str:
    """A node's text for a log or a terminal: one line without escape codes and markup, not too long."""
    text = ESCAPES.sub("", text[: 10 * most])
    text = "".join(c if c.isprintable() else " " for c in text).translate(_MARKUP)
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


class MessageError(KinfedError):
    """A message that is not what it should be; it is dropped, and its sender named. The text may quote the message."""

    def __init__(self, text: str) -> None:
        super().__init__(plain_text(text))


@dataclass(frozen=True)
class Packet:
    header: dict[str, Any] = field(default_factory=dict)  # JSON values
    groups: dict[str, Arrays] = field(default_factory=dict)  # "down", "up", ...: tensors by name

    def header_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.header})

    @classmethod
    def read(cls, header_json: object, groups: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]) -> Packet:
        try:
            header = json.loads(str(header_json), parse_int=_whole_number)
            format = header.pop("format")
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            raise MessageError("a message without a readable header") from None
        if format != FORMAT:
            raise MessageError(
                f"a message of format {format}; this version of kinfed speaks format {FORMAT}: install the same one "
                "everywhere"
            )
        return cls(header, {name: {key: _tensor(key, a) for key, a in some.items()} for name, some in groups.items()})

    def group(self, name: str) -> Arrays:
        return self.groups.get(name, {})

    def require(self, key: str, kind: type) -> Any:
        value = self.header.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MessageError(f"a message should say {key} ({kind.__name__}); it says {repr(value)[:60]}")
        return value

    def digest(self) -> str:
        """Digest of everything in it, whatever the order of its keys and tensors, and however it has travelled: groups
        without any are none."""
        groups = {name: storage.checksum(tensors) for name, tensors in self.groups.items() if tensors}
        return storage.record_digest([self.header, groups])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for some in self.groups.values() for t in some.values())


MOST_PARTS = 100_000  # packets in one
LARGEST_SIDE = 1 << 40  # of a tensor; what is beyond the numbers there are is refused anyway


def bundled(parts: Sequence[Packet], **header: Any) -> Packet:
    """Several packets as one. Numbers of one type are one array, however many tensors there are, and what several
    headers say (the encoding of a table, in every request) is there once."""
    values: dict[str, int] = {}
    flat: dict[str, list[Tensor]] = {}
    records = []
    for part in parts:
        record = {}
        for key, value in part.header.items():
            text = json.dumps(value, sort_keys=True)
            record[key] = values.setdefault(text, len(values))
        layout = []
        for group, some in part.groups.items():
            for name, tensor in some.items():
                kind = str(tensor.dtype).removeprefix("torch.")
                flat.setdefault(kind, []).append(tensor.detach().cpu().reshape(-1))
                layout.append([group, name, kind, list(tensor.shape)])
        records.append([record, layout])
    about = {**header, "values": [json.loads(text) for text in values], "parts": records}
    return Packet(about, {"tensors": {kind: torch.cat(some) for kind, some in flat.items()}} if flat else {})


def unbundled(packet: Packet) -> list[Packet]:
    """The packets in one, in their order; MessageError if layout and numbers do not fit together."""
    values, records, flat = packet.require("values", list), packet.require("parts", list), packet.group("tensors")
    if len(records) > MOST_PARTS:
        raise MessageError(f"a message with {len(records)} parts; at most {MOST_PARTS} travel together")
    used = dict.fromkeys(flat, 0)
    parts = []
    try:
        for record, layout in records:
            header = {str(key): values[_index(place, len(values))] for key, place in record.items()}
            groups: dict[str, Arrays] = {}
            for group, name, kind, shape in layout:
                size = math.prod(_index(length, LARGEST_SIDE) for length in shape)
                rows = flat[kind].narrow(0, used[kind], size)
                used[kind] += size
                groups.setdefault(str(group), {})[str(name)] = rows.reshape(shape)
            parts.append(Packet(header, groups))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError):
        raise MessageError("a message whose parts do not fit its numbers") from None
    if any(used[kind] != len(rows) for kind, rows in flat.items()):
        raise MessageError("a message with more numbers than its parts have")
    return parts


def _index(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError(value)
    return value


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.ascontiguousarray(t.detach().cpu().numpy()) for name, t in tensors.items()}


def _whole_number(digits: str) -> int:
    """A whole number of a header: one of 64 bits, for arithmetic with larger ones ends in other errors than checks."""
    if len(digits) > len(str(LARGEST_NUMBER)) + 1 or not -LARGEST_NUMBER <= (number := int(digits)) <= LARGEST_NUMBER:
        raise ValueError(digits[:60])
    return number


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if str(array.dtype) not in _DTYPES:
        raise MessageError(f"array {name} is of type {array.dtype}; messages hold {', '.join(sorted(_DTYPES))}")
    return torch.from_numpy(array.copy())  # of its own: the array may be a read-only view of the message


def message_types(algorithm: Algorithm[Any, Any, Any, Any]) -> tuple[type[Tree], type[Tree]]:
    """(Down, Up) of a method, as its `client_update` declares them."""
    hints = typing.get_type_hints(type(algorithm).client_update)
    down, up = hints["down"], typing.get_args(hints["return"])[1]
    name = type(algorithm).__name__
    for what, kind in (("down", down), ("the update", up)):
        if not (isinstance(kind, type) and issubclass(kind, Tree)):
            raise TypeError(f"client_update of {name} must say of which class {what} is; got {kind}")
    return down, up


def sent_fields(algorithm: Algorithm[Any, Any, Any, Any]) -> dict[str, bool]:
    """Fields of the method's Up, which leave a node in a round, and whether each always does or may be None."""
    up = message_types(algorithm)[1]
    hints = typing.get_type_hints(up)
    return {field.name: type(None) not in typing.get_args(hints[field.name]) for field in dataclasses.fields(up)}


def sent_tensors(tree: Tree) -> Arrays:
    """One client's message [1, ...] as it travels: of a masked field only the numbers whose bits are set, [count]."""
    tensors = dict(tree.named())
    for name, mask in _masked(type(tree), tensors):
        tensors[name] = tensors[name][unpacked(tensors[mask], tensors[name].shape[1])]
    return tensors


def masked_widths(tree: Tree) -> dict[str, int]:
    """Columns of every masked field: bits alone do not say where the last byte ends."""
    tensors = tree.named()
    return {name: tensors[name].shape[1] for name, _ in _masked(type(tree), tensors)}


def received_tensors(kind: type[Tree], tensors: Mapping[str, Tensor], widths: Mapping[str, Any]) -> Arrays:
    """The inverse of `sent_tensors`; MessageError if numbers and bits do not fit together."""
    whole = dict(tensors)
    for name, mask in _masked(kind, tensors):
        bits, values, width = tensors[mask], tensors[name], widths.get(name)
        fits = type(width) is int and bits.dim() == 2 and 0 <= 8 * bits.shape[1] - width < 8
        if not (fits and bits.dtype == torch.uint8 and len(bits) == 1 and values.shape == (count_bits(bits),)):
            raise MessageError(f"a message whose {name} does not fit its {mask}")
        assert isinstance(width, int)
        columns = unpacked(bits, width)
        if int(columns.sum()) != len(values):
            raise MessageError(f"a message whose {mask} names columns that {name} does not have")
        whole[name] = values.new_zeros(1, width).masked_scatter_(columns, values)
    return whole


def _masked(kind: type[Tree], tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Fields that are there and masked, each with its mask's."""
    pairs = [(field.name, field.metadata.get(MASKED_BY)) for field in dataclasses.fields(kind)]
    return [(name, mask) for name, mask in pairs if mask is not None and name in tensors and mask in tensors]


def tree_of(kind: type[Tree], tensors: Mapping[str, Tensor]) -> Tree:
    """The tree of this class with the tensors of `named()`; fields without any are None."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    left = dict(tensors)
    for spec in dataclasses.fields(kind):
        below = {key[len(spec.name) + 1 :]: left.pop(key) for key in list(left) if key.startswith(spec.name + ".")}
        choices = typing.get_args(hints[spec.name]) or (hints[spec.name],)
        inner = next((one for one in choices if isinstance(one, type) and issubclass(one, Tree)), None)
        if inner is not None and (below or type(None) not in choices):
            values[spec.name] = tree_of(inner, below)
        elif spec.name in left:
            values[spec.name] = left.pop(spec.name)
        elif type(None) in choices:
            values[spec.name] = None
        else:
            raise MessageError(f"a {kind.__name__} lacks {spec.name}; got {sorted(tensors)}")
    if left:
        raise MessageError(f"a {kind.__name__} has no {sorted(left)[0]}")
    return kind(**values)
