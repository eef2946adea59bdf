"""Imports go downward only, never in circles, and optional packages stay in their own files.

A new module takes its place in LAYERS: as low as what it imports allows. A package stands for all it contains."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kinfed

LAYERS: list[tuple[str, set[str]]] = [  # from the bottom
    ("foundations", {"errors", "rng", "tree", "storage", "differences"}),
    (
        "mathematics",
        {
            "theory",
            "norms",
            "uncertainty",
            "clustering",
            "hierarchy",
            "affinity",
            "metrics",
            "gain",
            "robust",
            "generalization",
        },
    ),
    ("data", {"data", "embedding"}),
    (
        "models",
        {
            "models",
            "stacked",
            "recurrent",
            "convolutional",
            "descent",
            "task",
            "mixture",
            "weighing",
            "local",
            "gaussian",
        },
    ),
    ("methods", {"algorithm", "algorithms", "privacy", "search_spaces"}),
    ("pools", {"pool"}),
    ("server loop", {"loop"}),
    (
        "records",
        {"config", "catalog", "checkpoint", "journal", "export", "display", "gain_of_run", "interruption", "arguments"},
    ),
    (
        "runs",
        {
            *("results", "experiment", "simulation", "synthetic", "synthetic_study", "adopt", "detection", "bench"),
            *("testing", "tune"),
        },
    ),
    ("deployment", {"predict", "deploy"}),
    ("reports", {"report"}),
    ("recipes", {"reproduce", "recipes"}),
    ("surface", {"kinfed", "cli", "__main__"}),
]

# Packages of the extras, and the files they may be imported in. Nothing else may need those files to be imported.
OPTIONAL: dict[str, set[str]] = {
    "matplotlib": set(),
    "opacus": set(),
    "dp_accounting": {"privacy.accounting"},
    "ray": {"pool.ray"},
    "flwr": {"deploy.flower"},
    "cryptography": {"deploy.certs"},
    "optuna": {"tune"},
    "soundfile": {"data.sound"},
}


@dataclass
class Imports:
    at_once: set[str] = field(default_factory=set)  # when the module is imported
    later: set[str] = field(default_factory=set)  # inside functions

    @property
    def all(self) -> set[str]:
        return self.at_once | self.later


@cache
def modules() -> dict[str, Imports]:
    """What every module of the package imports, by its name below kinfed (the package itself is "kinfed")."""
    assert kinfed.__file__ is not None
    root = Path(kinfed.__file__).parent
    files = {_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    return {name: _imports(ast.parse(path.read_text()), files.keys()) for name, path in files.items()}


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


def layer(module: str) -> int | None:
    family = module.split(".")[0]
    return next((number for number, (_, members) in enumerate(LAYERS) if family in members), None)


def test_every_module_has_a_place() -> None:
    strays = sorted({name.split(".")[0] for name in modules() if layer(name) is None})
    assert not strays, f"say in LAYERS where these modules stand: {', '.join(strays)}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_downward(module: str) -> None:
    own = layer(module)
    if own is None:
        pytest.skip("has no place yet")
    for name in modules()[module].all & modules().keys():
        other = layer(name)
        if other is not None and name != module:
            assert other <= own, (
                f"{module} ({LAYERS[own][0]}) imports {name} ({LAYERS[other][0]}), which stands above it"
            )


def test_nothing_imports_itself_in_a_circle() -> None:
    graph = {name: (found.at_once & modules().keys()) - {name} for name, found in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def users_of(package: str) -> set[str]:
    return {name for name, found in modules().items() if any(i.split(".")[0] == package for i in found.all)}


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_stay_in_their_own_files(package: str) -> None:
    strays = users_of(package) - OPTIONAL[package]
    assert not strays, f"{package} is optional and may be missing; move its use out of {', '.join(sorted(strays))}"


def test_nothing_else_needs_a_file_of_an_optional_package() -> None:
    optional = {name for package in OPTIONAL for name in users_of(package)}
    for name in modules().keys() - optional:
        needed = modules()[name].at_once & optional
        assert not needed, f"{name} cannot be imported without {', '.join(sorted(needed))}; import it where it is used"


def test_the_reader_of_imports_tells_the_cases_apart() -> None:
    source = """
import torch
from kinfed import rng
from kinfed.data.federation import Cohort
if TYPE_CHECKING:
    from kinfed.cli import main
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
    found = _imports(ast.parse(source), {"rng", "data.federation", "report.page", "cli"})
    assert found.at_once == {"torch", "rng", "data.federation", "ray.actor", "flwr", "optuna"}
    assert found.later == {"report.page"}
