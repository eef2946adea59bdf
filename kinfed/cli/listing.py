"""What kinfed knows by name, for `kinfed list` and the documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

from kinfed.core.options import OptionDoc, documented
from kinfed.core.registries import registry_of
from kinfed.core.registry import Entry
from kinfed.errors import unknown_name

# As `kinfed list` calls them, and as their registries do. Only the registries that are asked for are imported.
KINDS = {"algorithms": "algorithm", "datasets": "dataset", "partitions": "partition", "models": "model"}
RECIPES = "recipes"


def names(kind: str) -> dict[str, str]:
    """Name -> one line, for one kind of thing."""
    if kind == RECIPES:
        from kinfed.reproduce.recipes import summaries

        return summaries()
    return {name: entry.summary for name, entry in registry_of(KINDS[kind]).items()}


def kind_of(name: str) -> str:
    """The kind of thing that has this name."""
    known: list[str] = [*KINDS, RECIPES]
    for kind in (*KINDS, RECIPES):
        if name in (here := names(kind)):
            return kind
        known += here
    raise unknown_name("list", name, known)


def owner(kind: str, name: str) -> str:
    """Who has the options of a thing in --set: an algorithm has its own, of the others there is one in a run."""
    return name if kind == "algorithms" else KINDS.get(kind, kind)


def options_of(name: str) -> list[OptionDoc]:
    """The options of a method, data set, partition or model, as --set takes them."""
    kind = kind_of(name)
    if kind == RECIPES:
        return []
    entry = registry_of(KINDS[kind])[name]
    if kind == "algorithms":
        from kinfed.algorithms.finetune import Finetuned

        return [
            dataclasses.replace(doc, default=entry.preset.get(doc.name, doc.default))
            for doc in (*_algorithm_options(entry.target), *_algorithm_options(Finetuned))
        ]
    return entry.describe_options() if isinstance(entry, Entry) else documented(entry.options)


def _algorithm_options(method: type[Any]) -> list[OptionDoc]:
    """Fields of the dataclass with the string that stands under each in the source."""
    texts: dict[str, str] = {}
    for cls in reversed(method.__mro__):
        if dataclasses.is_dataclass(cls):
            texts |= _strings_under_fields(cls)
    return [
        OptionDoc(field.name, str(field.type), field.default, texts.get(field.name, ""))
        for field in dataclasses.fields(method)
        if field.name != "training"
    ]


def _strings_under_fields(cls: type[Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts = {}
    for statement, after in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            texts[statement.target.id] = " ".join(after.value.value.split())
    return texts
