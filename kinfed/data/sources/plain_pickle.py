"""Pickles of other libraries that hold nothing but numbers: arrays, lists and dictionaries.

Everything else that a pickle could name, such as a function to call, is refused before it is loaded. Not even numpy is
asked to make its arrays: from a forged description of their type it takes bytes of the file for addresses of objects.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.errors import DataError

_NUMBERS = re.compile(r"[biufc]\d{1,2}")


class _Type:
    """The type of an array's elements, by its text: a number's, or "O8", an object of the pickle itself."""

    def __init__(self, text: Any, *_: Any) -> None:
        self.holds_objects = text in ("O8", "O")
        if not self.holds_objects and not _NUMBERS.fullmatch(str(text)):
            raise pickle.UnpicklingError(f"it has an array of {text!r}, which are no numbers")
        self.dtype = np.dtype(str(text))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])

    def values(self, content: Any) -> np.ndarray[Any, Any]:
        """[n] a copy of the elements."""
        if not self.holds_objects:
            return np.frombuffer(content, self.dtype).copy()
        values = np.empty(len(content), object)
        for place, value in enumerate(content):
            values[place] = _plain(value)
        return values


class _Array:
    values: np.ndarray[Any, Any]

    def __init__(self, *_: Any) -> None:
        """What it holds follows with its state."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, columns_first, content = state
        self.values = kind.values(content).reshape(shape, order="F" if columns_first else "C")


def _scalar(kind: Any, content: Any) -> Any:
    return kind.values(content)[0]


def _plain(value: Any) -> Any:
    """The value with numpy's arrays in their places."""
    if isinstance(value, _Array):
        return value.values
    if callable(value) or isinstance(value, _Type):
        raise pickle.UnpicklingError("it holds a function or a type in the place of numbers")
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


# What numpy's pickles of arrays and numbers name, in versions 1 and 2. A class that arrays are of is not called.
_NAMES: dict[tuple[str, str], Any] = {("numpy", "ndarray"): "numpy.ndarray", ("numpy", "dtype"): _Type} | {
    (f"numpy.{core}.multiarray", name): kind
    for core in ("core", "_core")
    for name, kind in {"_reconstruct": _Array, "scalar": _scalar}.items()
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array of numbers")
        return _NAMES[module, name]


def read_plain_pickle(content: bytes, path: Path) -> Any:
    """The object of a pickle; `path` names it in errors."""
    try:
        return _plain(_PlainUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # a forged file can make the reader raise anything
        raise DataError(f"{path} cannot be read as arrays of numbers: {error}; nothing of it was run") from error
