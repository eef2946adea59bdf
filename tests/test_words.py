"""Docstrings name the thing or say what is done: the words that the glossary replaces do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
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
REPLACED = re.compile(r"\b(those who|who was not there|let out)\b", re.I)
DIALECT = {
    r"\bwhere there (is|are|was|were)\b": "if there is; without",
    r"(\b(None|\w+Error)|\"\"|\(\)|\{\}|\[\]) where ": "if",
    r"\bwhere (none (is|was|are) (given|named)|given|absent)\b": "by default; if given",
    r"\bwhat there (is|was)\b": "the noun",
    r"\bso many\b": "this many; the number of",
    r"\bnobody\b": "no one; no client; not",
    r"\bone would take\b": "the usual alternative",
    r"\(it were\b|many \w+ it were\b": "there were",
    r"\bwhoever\b": "a client that; anyone who",
    r"\b(any|some)body\b": "anyone; someone; a client",
    r"([.;] |^\W*|\b(and|by|to) )who (asks|has (not|none|no)|is missing|sends|wants|writes)\b": "a client that",
}


@cache
def definitions() -> list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every module, class and function of the code, and its place."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    places = []
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            nodes = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, kinds)]
            name = file.relative_to(HOME)
            places += [(f"{name}:{getattr(node, 'lineno', 1)}", node) for node in nodes]
    return places


def docstrings() -> Iterator[tuple[str, str]]:
    """The place and the text of every docstring."""
    for place, node in definitions():
        yield place, ast.get_docstring(node) or ""


@pytest.mark.parametrize("words", [DODGES.match, REPLACED.search], ids=["first word", "replaced words"])
def test_docstrings_are_in_plain_words(words) -> None:
    found = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if words(text)]
    assert not found, "\n".join(found)


@cache
def lines() -> list[tuple[str, str]]:
    """Every line of the code and of the pages for users; what was measured and judged stays as it was written."""
    pages = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted((HOME / "docs").rglob("*.md"))]
    code = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]
    files = [file for file in (*code, *pages) if not {"recipes", "benchmark"} & set(file.parts)]
    return [
        (f"{file.relative_to(HOME)}:{number}", line)
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
    ]


@pytest.mark.parametrize("phrase", DIALECT)
def test_no_line_falls_back_into_dialect(phrase) -> None:
    """Docstrings, comments, sentences that users read, and pages."""
    dialect = re.compile(phrase, re.I)
    found = [f"{place}: {line.strip()}" for place, line in lines() if dialect.search(line)]
    assert not found, f"say {DIALECT[phrase]!r}:\n" + "\n".join(found)


def test_variables_are_called_by_the_noun_of_the_thing() -> None:
    """In functions; fields have names that stand in files and messages."""
    functions = [(place, node) for place, node in definitions() if not isinstance(node, ast.Module | ast.ClassDef)]
    strays = {
        f"{place}: {inner.id}"
        for place, node in functions
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and inner.id in PARTICIPLES
    }
    assert not strays, "\n".join(sorted(strays))
