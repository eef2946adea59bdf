"""The door of a room: the names that other rooms may use, each imported from its file on first use.

The stub `__init__.pyi` beside a room's `__init__.py` is the one list of them. Type checkers and editors read it as it
stands, and `open_door` reads it when the room is imported. So `from kinfed.report import tables` waits for neither
torch nor plotly, and a file behind a door may be renamed without touching another room. A test forbids imports around
the door.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
