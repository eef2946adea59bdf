"""The floor plan: a room imports only from rooms before it, every file name stands for one thing, and optional packages
stay in their own files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kinfed

# From the foundations up: a room imports from itself and from rooms that stand before it.
ROOMS = (
    *("version", "errors", "core", "data", "engine", "theory", "algorithms", "privacy", "pools", "server", "runs"),
    *("report", "board", "reproduce", "deploy", "sites", "trackers", "sklearn", "interactive", "bench", "testing"),
    *("cli", "kinfed", "__main__"),
)

# Packages of the extras, and the files they may be imported in. Nothing else may need those files to be imported.
OPTIONAL: dict[str, set[str]] = {
    "opacus": set(),
    "dp_accounting": {"privacy.epsilon"},
    "ray": {"pools.ray_pool", "pools.ray_processes"},
    "flwr": {"deploy.flower"},
    "cryptography": {"deploy.certs", "deploy.client_keys", "deploy.masks"},
    "Crypto": {"deploy.masks"},
    "optuna": {"runs.tune"},
    "onnx": {"runs.onnx_columns"},
    "onnxscript": {"runs.onnx_export"},
    "onnxruntime": set(),
    "soundfile": {"data.sources.speech"},
    "numba": {
        "engine.vector_code",
        "engine.vector_functions",
        "engine.tiles",
        "engine.products",
        "engine.lstm_cells",
        "engine.fused_steps",
        "engine.fused_choice",
        "engine.fused_moves",
        "engine.fused_orders",
        "engine.fused_kernels",
        "engine.kernel_arguments",
    },
    "tokenizers": {"data.sources.wordpiece"},
    "IPython": set(),
    "tensorboard": {"trackers.tensorboard_tracker"},
    "mlflow": {"trackers.mlflow_tracker"},
    "wandb": {"trackers.wandb_tracker"},
    "datasets": set(),
}

# Files that others import only where they need an optional package, and that use its files themselves.
BESIDE_OPTIONAL = {f"deploy.secure_{part}" for part in ("messages", "session", "round", "pool")} | {
    "engine.fused_recurrent"
}


@dataclass
class Imports:
    at_once: set[str] = field(default_factory=set)  # when the module is imported
    later: set[str] = field(default_factory=set)  # inside functions

    @property
    def all(self) -> set[str]:
        return self.at_once | self.later


@cache
def files() -> dict[str, Path]:
    """Every module of the package by its name below kinfed (the package itself is "kinfed")."""
    assert kinfed.__file__ is not None
    root = Path(kinfed.__file__).parent
    return {_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}


@cache
def modules() -> dict[str, Imports]:
    """What every module imports."""
    return {name: _imports(ast.parse(path.read_text()), files().keys()) for name, path in files().items()}


def _name(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "kinfed"


def _imports(tree: ast.Module, known: object) -> Imports:
    found = Imports()
    for node, inside_function in _statements(tree.body, False):
        target = found.later if inside_function else found.at_once
        if isinstance(node, ast.Import):
            target |= {_below(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = _below(f"{node.module}.{alias.name}")
                target.add(full if full in known else _below(str(node.module)))  # type: ignore[operator]
    return found


def _below(name: str) -> str:
    return name.removeprefix("kinfed.") if name.startswith("kinfed.") else name


def _statements(body: list[ast.stmt], inside: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """All statements but those that only type checkers read, and whether they wait for a function to be called."""
    for node in body:
        yield node, inside
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _statements(node.orelse, inside)
            continue
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for block in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, block, []), deeper)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, deeper)


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_lies_in_a_room() -> None:
    strays = sorted({room(name) for name in modules()} - set(ROOMS))
    assert not strays, f"not in ROOMS: {', '.join(strays)}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_from_rooms_before_it(module: str) -> None:
    before = ROOMS[: ROOMS.index(room(module)) + 1]
    for name in modules()[module].all & modules().keys():
        assert room(name) in before, f"{module} imports {name}, whose room stands after its own"


def test_a_file_name_stands_for_one_thing() -> None:
    names = [name.rpartition(".")[2] for name, path in files().items() if path.name not in ("__init__.py", "base.py")]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"more than one file is called {', '.join(twice)}"


def test_tests_mirror_the_rooms() -> None:
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert folders <= set(ROOMS), f"tests of no room: {', '.join(sorted(folders - set(ROOMS)))}"


def test_nothing_imports_itself_in_a_circle() -> None:
    graph = {name: (found.at_once & modules().keys()) - {name} for name, found in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def users_of(package: str, *, at_once: bool = False) -> set[str]:
    """Modules that import a package; `at_once`: when they are imported themselves."""
    return {
        name
        for name, found in modules().items()
        if any(i.split(".")[0] == package for i in (found.at_once if at_once else found.all))
    }


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_stay_in_their_own_files(package: str) -> None:
    strays = users_of(package) - OPTIONAL[package]
    assert not strays, f"{package} is optional and may be missing; move its use out of {', '.join(sorted(strays))}"


def test_nothing_else_needs_a_file_of_an_optional_package() -> None:
    optional = {name for package in OPTIONAL for name in users_of(package, at_once=True)} | BESIDE_OPTIONAL
    for name in modules().keys() - optional:
        needed = modules()[name].at_once & optional
        assert not needed, f"{name} cannot be imported without {', '.join(sorted(needed))}; import it where it is used"


def test_the_reader_of_imports_tells_the_cases_apart() -> None:
    source = """
import torch
from kinfed.core import rng
from kinfed.data.federation import Cohort
if TYPE_CHECKING:
    from kinfed.cli.app import main
try:
    import ray.actor
except ImportError:
    import flwr
class A:
    import optuna
    def f(self):
        with open("x"):
            from kinfed.report.page import render
"""
    found = _imports(ast.parse(source), {"core.rng", "data.federation", "report.page", "cli"})
    assert found.at_once == {"torch", "core.rng", "data.federation", "ray.actor", "flwr", "optuna"}
    assert found.later == {"report.page"}


def test_a_class_name_stands_for_one_thing() -> None:
    """But for Server, Client, Down and Up: what every algorithm calls its states and messages."""
    by_design = {"Server", "Client", "Down", "Up"}
    names = [
        node.name
        for path in files().values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in by_design
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"more than one class is called {', '.join(twice)}"
