"""Pickles of other libraries that hold nothing but numbers: arrays, lists and dictionaries. Everything else that a
pickle could name, such as a function to call, is refused before it is loaded."""

import io
import pickle
from pathlib import Path
from typing import Any

from kinfed.errors import DataError

# What numpy's pickles of arrays and numbers name, in versions 1 and 2.
_NAMES = {("numpy", "ndarray"), ("numpy", "dtype")} | {
    (f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array of numbers")
        return super().find_class(module, name)


def read_plain_pickle(content: bytes, path: Path) -> Any:
    """The object of a pickle; `path` names it in errors."""
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise DataError(f"{path} cannot be read as arrays of numbers: {error}; nothing of it was run") from error
