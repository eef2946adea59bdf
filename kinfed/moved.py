"""Import paths that pages and examples have shown and that lie elsewhere now; each works for one more minor version.

    from kinfed.algorithms.facade import sgd        # DeprecationWarning: use kinfed.author

The finder below is asked only for modules that no file of the package provides.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# By the old path, where its public names are now.
MOVED = {
    "kinfed.algorithms.facade": "kinfed.author",
    "kinfed.data.features": "kinfed.data",
    "kinfed.data.problem": "kinfed.data",
    "kinfed.data.ragged": "kinfed.data",
    "kinfed.engine.adapter_files": "kinfed.engine.zoo",
    "kinfed.engine.extended": "kinfed.engine",
    "kinfed.engine.models": "kinfed.engine",
    "kinfed.engine.task": "kinfed.engine",
    "kinfed.runs.adopt": "kinfed.newcomers",
    "kinfed.runs.tune": "kinfed.tuning",
}


class MovedFinder:
    """Finds modules by their old paths, and warns. (Not derived from `importlib.abc`, whose import takes 12 ms.)"""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None  # type: ignore[arg-type]  # a loader all the same

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        home = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} has moved and its old path will go in the next version; import from {home}",
            DeprecationWarning,
            stacklevel=2,
        )
        module.__getattr__ = lambda name: getattr(importlib.import_module(home), name)  # type: ignore[method-assign]


def install() -> None:
    """Have imports of old paths found."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
