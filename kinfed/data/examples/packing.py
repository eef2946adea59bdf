"""Several inputs of a model, as one row of numbers per example.

    packing, raw = Packing.of({"input_ids": ids, "attention_mask": mask}, "x")     # raw [N, 16]
    packing.unpack(raw[:2])                           # two examples as such a dict, each input in its shape and type

Data sets, batches, backends and pools see one tensor [N, numbers]; the module takes it apart again in front of its
`forward` (kinfed.engine.rows.model_calls). Whole numbers alone are kept as int64. Beside floats all are float32, which
holds whole numbers up to 2^24 exactly; larger ones are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from kinfed.errors import DataError

EXACT = 2**24  # whole numbers that float32 holds
MOST_INPUTS = 1000
Kind = Literal["float", "whole", "bool"]
_TYPES: dict[Kind, torch.dtype] = {"float": torch.float32, "whole": torch.int64, "bool": torch.bool}
Inputs = dict[str, Any] | tuple[Any, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PackedInput:
    name: str | None  # None: one of a tuple
    shape: tuple[int, ...]  # of one example
    kind: Kind

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Packing:
    inputs: tuple[PackedInput, ...]

    @classmethod
    def of(cls, x: Mapping[str, Any] | tuple[Any, ...], what: str) -> tuple[Packing, Tensor]:
        """The packing of arrays [N, ...] by name or in order, and all of them packed [N, numbers]."""
        columns = _columns(x, what)
        names = list(x) if isinstance(x, Mapping) else [None] * len(x)
        inputs = (
            PackedInput(*facts)
            for facts in zip(names, (c.shape[1:] for c in columns), map(_kind, columns), strict=True)
        )
        packing = cls(tuple(inputs))
        return packing, packing._joined(columns)

    def pack(self, x: Any, where: str) -> Tensor:
        """[N, numbers] other examples of the same inputs, named or in the same order."""
        if self.names:
            if not isinstance(x, Mapping) or set(self.names) - set(x):
                has = list(x) if isinstance(x, Mapping) else f"a {type(x).__name__}"
                raise DataError(f"the model takes inputs by name, {', '.join(self.names)}; {where} has {has}")
            x = {name: x[name] for name in self.names}
        elif not isinstance(x, tuple) or len(x) != len(self.inputs):
            has = f"{len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"
            raise DataError(f"the model takes a tuple of {len(self.inputs)} inputs; {where} has {has}")
        columns = _columns(x, where)
        for one, column in zip(self.inputs, columns, strict=True):
            if column.shape[1:] != one.shape or _kind(column) not in (one.kind, "whole" if one.kind == "float" else ""):
                raise DataError(
                    f"the model takes {self.in_words()}; in {where} one input has {_kind(column)} numbers of shape "
                    f"{list(column.shape[1:])} in the place of {one.kind} ones of {list(one.shape)}"
                )
        return self._joined(columns)

    def _joined(self, columns: list[Array]) -> Tensor:
        if self.dtype == torch.float32:
            for one, column in zip(self.inputs, columns, strict=True):
                if one.kind == "whole" and column.size and int(np.abs(column).max()) > EXACT:
                    name = "an input" if one.name is None else one.name
                    raise DataError(
                        f"{name} has whole numbers beyond {EXACT:,}, which cannot stand exactly beside inputs that are "
                        "floats; number what they mean from 0 on, or give every input as whole numbers"
                    )
        return self.joined([torch.from_numpy(column) for column in columns])

    def joined(self, inputs: Sequence[Tensor]) -> Tensor:
        """[B, numbers] examples packed from inputs [B, ...], which fit."""
        return torch.cat(
            [x.reshape(x.shape[0], one.numbers).to(self.dtype) for x, one in zip(inputs, self.inputs, strict=True)], 1
        )

    def unpack(self, x: Tensor) -> Inputs:
        """Inputs [B, ...] of packed examples [B, numbers]: a dict by name, or a tuple."""
        parts = torch.split(x, [one.numbers for one in self.inputs], 1)
        values = [
            part.reshape(x.shape[0], *one.shape).to(_TYPES[one.kind])
            for one, part in zip(self.inputs, parts, strict=True)
        ]
        return dict(zip(self.names, values, strict=True)) if self.names else tuple(values)

    @property
    def names(self) -> list[str]:
        """Names of inputs that have some."""
        return [one.name for one in self.inputs if one.name is not None]

    @property
    def numbers(self) -> int:
        return sum(one.numbers for one in self.inputs)

    @property
    def dtype(self) -> torch.dtype:
        """The type of packed examples."""
        return torch.float32 if any(one.kind == "float" for one in self.inputs) else torch.int64

    @property
    def shapes(self) -> Inputs:
        """Shapes of one example's inputs, as a module's inputs are given."""
        shapes = [one.shape for one in self.inputs]
        return dict(zip(self.names, shapes, strict=True)) if self.names else tuple(shapes)

    @property
    def places(self) -> Iterator[tuple[PackedInput, slice]]:
        """Inputs, each with its numbers in a packed example."""
        stop = 0
        for one in self.inputs:
            stop += one.numbers
            yield one, slice(stop - one.numbers, stop)

    def in_words(self) -> str:
        """Names and shapes: "input_ids [8], attention_mask [8]"."""
        named = [f"{one.name or number} {list(one.shape)}" for number, one in enumerate(self.inputs)]
        return ", ".join(named)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.inputs]

    @classmethod
    def from_json(cls, record: Any) -> Self | None:
        """Read what `to_json` wrote; None of nothing."""
        if record is None:
            return None
        if not isinstance(record, list) or not 0 < len(record) <= MOST_INPUTS:
            raise DataError("several inputs are listed with name, shape and kind")
        try:
            inputs = tuple(PackedInput(one["name"], tuple(one["shape"]), one["kind"]) for one in record)
            known = all(isinstance(one.name, str | None) and one.kind in _TYPES for one in inputs)
        except (KeyError, TypeError):
            known = False
        if not known:
            raise DataError("several inputs are listed with name, shape and kind")
        for one in inputs:
            if one.kind not in _TYPES or not all(type(length) is int and length > 0 for length in one.shape):
                raise DataError(f"an input has a shape and is one of {', '.join(_TYPES)}; got {one}")
        if len({one.name is None for one in inputs}) > 1 or len(cls(inputs).names) != len(set(cls(inputs).names)):
            raise DataError("several inputs have a name of their own each, or all none")
        return cls(inputs)


def _kind(column: Array) -> Kind:
    kinds: dict[str, Kind] = {"b": "bool", "i": "whole", "f": "float"}
    return kinds[column.dtype.kind]


def _columns(x: Mapping[str, Any] | tuple[Any, ...], what: str) -> list[Array]:
    """The inputs of all examples, each bool, int64 or float32; bytes (of images) are numbers of any size, so floats."""
    named = dict(x) if isinstance(x, Mapping) else dict(enumerate(x))
    if not named or (isinstance(x, Mapping) and not all(isinstance(name, str) for name in named)):
        raise DataError(f"{what} should hold arrays by name, or several in a tuple; got the names {list(named)}")
    columns = [_column(array, f"{what}[{name!r}]") for name, array in named.items()]
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{name}: {len(column)}" for name, column in zip(named, columns, strict=True))
        raise DataError(f"every input of {what} has one entry per example; got {sizes}")
    return columns


def _column(array: Any, what: str) -> Array:
    try:
        column = np.asarray(array)
    except ValueError:
        raise DataError(f"{what} has examples of unequal shapes; pad them to one") from None
    if column.dtype.kind not in "biuf":
        raise DataError(f"{what} should hold numbers; got {column.dtype}")
    if column.ndim == 0 or not prod(column.shape[1:]):
        raise DataError(f"{what} should hold numbers of every example; got shape {list(column.shape)}")
    if column.dtype.kind == "b":
        return column.copy()
    return column.astype(np.float32 if column.dtype.kind == "f" or column.dtype == np.uint8 else np.int64)
