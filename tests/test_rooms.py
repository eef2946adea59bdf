"""The floor plan: a room imports only from rooms before it and only through their doors, every file name stands for one
thing, and optional packages stay in their own files."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kinfed
from kinfed.core.door import read_stub

PACKAGE = Path(kinfed.__file__ or "").parent

# From the foundations up: a room imports from itself and from rooms that stand before it.
ROOMS = (
    *("version", "errors", "core", "data", "engine", "theory", "algorithms", "privacy", "updates", "pools", "server"),
    *("config", "records", "serving", "runs", "newcomers", "tuning", "analysis", "report", "board", "trackers"),
    *("tabular", "sklearn", "api", "arena", "deploy", "dossier", "testing", "cli", "kinfed", "__main__"),
)
SAME_ROOM = {"author": "algorithms"}  # a second door: what the file of a method needs

# How many names a door may have.
WIDTHS = {"engine": 60, "core": 50, "data": 50}
WIDTH = 30

# Packages of the extras, and the files they may be imported in. Nothing else may need those files to be imported.
OPTIONAL: dict[str, set[str]] = {
    "opacus": set(),
    "dp_accounting": {"privacy.accountant"},
    "ray": {"pools.ray_pool", "pools.ray_processes"},
    "flwr": {"deploy.programs.flower"},
    "cryptography": {"deploy.operator.certs", "deploy.transport.client_keys", "deploy.secure.masks"},
    "Crypto": {"deploy.secure.masks"},
    "optuna": {"tuning.tuner"},
    "onnx": {"serving.onnx_export"},
    "onnxscript": {"serving.onnx_export"},
    "onnxruntime": set(),
    "soundfile": set(),
    "numba": {f"engine.compiled.{path.stem}" for path in (PACKAGE / "engine" / "compiled").glob("*.py")},
    "tokenizers": {"data.sources.wordpiece"},
    "IPython": set(),
    "tensorboard": {"trackers.tensorboard_tracker"},
    "mlflow": {"trackers.mlflow_tracker"},
    "wandb": {"trackers.wandb_tracker"},
    "datasets": set(),
}

# Files that others import only where they need an optional package, and that use its files themselves.
BESIDE_OPTIONAL = {f"deploy.secure.secure_{part}" for part in ("messages", "session", "round")} | {
    "engine.compiled.fused_recurrent",
    "engine.compiled.tree_kernels",
    "deploy.operator.members",
    "engine.compiled.vector_functions",
}


@dataclass
class Imports:
    at_once: set[str] = field(default_factory=set)  # when the module is imported
    later: set[str] = field(default_factory=set)  # inside functions

    @property
    def all(self) -> set[str]:
        return self.at_once | self.later


@cache
def doors() -> dict[str, dict[str, str]]:
    """The home of every name at the door of every room, and of folders of a room that have a door of their own."""
    stubs = sorted(PACKAGE.glob("*/**/__init__.pyi"))
    return {".".join(path.parent.relative_to(PACKAGE).parts): read_stub(path) for path in stubs}


@cache
def files() -> dict[str, Path]:
    """Every module of the package by its name below kinfed (the package itself is "kinfed")."""
    return {_name(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


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
                full, module = _below(f"{node.module}.{alias.name}"), _below(str(node.module))
                home = _below(doors().get(module, {}).get(alias.name, module))
                target.add(full if full in known else home)  # type: ignore[operator]
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
    first = module.split(".")[0]
    return SAME_ROOM.get(first, first)


def test_every_module_lies_in_a_room() -> None:
    strays = sorted({room(name) for name in modules()} - set(ROOMS))
    assert not strays, f"not in ROOMS: {', '.join(strays)}"


def test_a_room_imports_from_rooms_before_it() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        for name in modules()[module].all & modules().keys()
        if ROOMS.index(room(name)) > ROOMS.index(room(module))
    ]
    assert not wrong, "from a room after its own: " + "; ".join(wrong)


def imported_modules(path: Path) -> Iterator[tuple[str, str]]:
    """(module below kinfed, name) of every import from kinfed, those for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kinfed."):
            yield from ((_below(str(node.module)), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((_below(alias.name), "") for alias in node.names if alias.name.startswith("kinfed."))


def test_rooms_are_entered_by_their_doors() -> None:
    around = [
        f"{module} imports {name} from {source}"
        for module, path in files().items()
        if module not in ("kinfed", *SAME_ROOM)  # doors themselves
        for source, name in imported_modules(path)
        if room(source) != room(module) and source not in (*SAME_ROOM, "core.door")
        if name not in doors().get(source, ()) and source not in ("version", "errors", "sklearn")
    ]
    assert not around, "around a door: " + "; ".join(around)


def test_doors_are_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    widths = {name: len(names) for name, names in doors().items()}
    with capsys.disabled():
        print("\ndoors: " + ", ".join(f"{name} {width}" for name, width in widths.items()))
    wide = {name: width for name, width in widths.items() if width > WIDTHS.get(name, WIDTH)}
    assert not wide, f"names at a door: {wide}"


def test_every_name_at_a_door_is_there() -> None:
    for name, homes in doors().items():
        module = importlib.import_module(f"kinfed.{name}")
        inside = {below[len(name) + 1 :].split(".")[0] for below in files() if below.startswith(f"{name}.")}
        for public, home in homes.items():
            assert f"{home}.".startswith(f"kinfed.{name}."), f"{name} offers {public} of another room"
            assert home == f"kinfed.{name}" or public not in inside, f"{name}.{public} is hidden by a file of that name"
            assert getattr(module, public) is not None


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
from kinfed.data.federations.federation import Cohort
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
    found = _imports(ast.parse(source), {"core.rng", "data.federations.federation", "report.page", "cli"})
    assert found.at_once == {"torch", "core.rng", "data.federations.federation", "ray.actor", "flwr", "optuna"}
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


def test_transport_is_below_the_node() -> None:
    below = {name: found.all for name, found in modules().items() if name.startswith("deploy.transport")}
    wrong = [
        f"{name} imports {one}" for name, all_of in below.items() for one in all_of if one.startswith("deploy.node")
    ]
    assert not wrong, "; ".join(wrong)
