"""Docstrings name the thing or say what is done: the words that the glossary replaces do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
PACKAGES = (HOME / "kinfed", HOME / "papers" / "kinfed_papers")
DODGES = re.compile(r"(Of|By|Where|As|Who)\b")
PARTICIPLES = {
    "found",
    "made",
    "said",
    "told",
    "kept",
    "given",
    "got",
    "strange",
    "mine",
}  # which say nothing of a thing
REPLACED = re.compile(r"\b(so many|those who|who was not there|let out)\b", re.I)


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the code, and its place."""
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                yield f"{file.relative_to(HOME)}:{getattr(node, 'lineno', 1)}", node


def docstrings() -> Iterator[tuple[str, str]]:
    """The place and the text of every docstring."""
    for place, node in nodes():
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield place, ast.get_docstring(node) or ""


@pytest.mark.parametrize("words", [DODGES.match, REPLACED.search], ids=["first word", "replaced words"])
def test_docstrings_are_in_plain_words(words) -> None:
    found = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if words(text)]
    assert not found, "\n".join(found)


def test_variables_are_called_by_the_noun_of_the_thing() -> None:
    """In functions; fields have names that stand in files and messages."""
    functions = [(place, node) for place, node in nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    strays = {
        f"{place}: {inner.id}"
        for place, node in functions
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and inner.id in PARTICIPLES
    }
    assert not strays, "\n".join(sorted(strays))
