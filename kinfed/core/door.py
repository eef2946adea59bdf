"""The door of a room: the names that other rooms may use, each imported from its file on first use.

The stub `__init__.pyi` beside a room's `__init__.py` is the one list of them. Type checkers and editors read it as it
stands, and `open_door` reads it when the room is imported. So `from kinfed.report import tables` waits for neither
torch nor plotly, and a file behind a door may be renamed without touching another room. A test forbids imports around
the door.

Paths that pages and examples have shown, and that lie behind a door now, work for one more minor version:

    from kinfed.algorithms.facade import sgd        # DeprecationWarning: import from kinfed.author
"""

import ast
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

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


def open_door(room: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the `__getattr__`, `__dir__` and `__all__` of the room whose `__init__.py` is `file`."""
    homes = read_stub(Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no public name {name!r}")
        home = importlib.import_module(homes[name])
        is_file = homes[name] == room or not hasattr(home, name)
        return importlib.import_module(f"{homes[name]}.{name}") if is_file else getattr(home, name)

    return get, lambda: sorted(homes), sorted(homes)


def read_stub(path: Path) -> dict[str, str]:
    """The module, or for a whole file the folder, that every name of a stub is imported from."""
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    names = ((alias.name, str(source.module)) for source in imports for alias in source.names)
    return {name: home for name, home in names if not name.startswith("__")}


class MovedFinder:
    """Finds modules by their old paths, and warns. It is asked only for modules that no file of the package provides.
    (Not derived from `importlib.abc`, whose import takes 12 ms.)"""

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


def find_moved() -> None:
    """Have imports of old paths found."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
