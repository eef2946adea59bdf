"""What kinfed knows by name, for `kinfed list` and the documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

from kinfed.algorithms import ALGORITHMS
from kinfed.algorithms.finetune import Finetuned
from kinfed.core.options import OptionDoc, documented
from kinfed.data.partitions.partition import PARTITIONS
from kinfed.data.sources.catalogue import SOURCES
from kinfed.engine.models import MODELS


def catalog() -> dict[str, dict[str, str]]:
    """Kind -> name -> one line."""
    return {
        "algorithms": {name: entry.summary for name, entry in ALGORITHMS.items()},
        "datasets": {name: entry.summary for name, entry in SOURCES.items()},
        "partitions": {name: entry.summary for name, entry in PARTITIONS.items()},
        "models": {name: entry.summary for name, entry in MODELS.items()},
    }


def options_of(name: str) -> list[OptionDoc]:
    """The options of a method, data set, partition or model, as --set takes them."""
    if name in ALGORITHMS:
        entry = ALGORITHMS[name]
        return [
            dataclasses.replace(doc, default=entry.preset.get(doc.name, doc.default))
            for doc in (*_algorithm_options(entry.target), *_algorithm_options(Finetuned))
        ]
    if name in PARTITIONS:
        return documented(PARTITIONS[name])
    return documented(SOURCES[name].options if name in SOURCES else MODELS[name].options)


def _algorithm_options(method: type[Any]) -> list[OptionDoc]:
    """Fields of the dataclass with the string that stands under each in the source."""
    told: dict[str, str] = {}
    for cls in reversed(method.__mro__):
        if dataclasses.is_dataclass(cls):
            told |= _strings_under_fields(cls)
    return [
        OptionDoc(field.name, str(field.type), field.default, told.get(field.name, ""))
        for field in dataclasses.fields(method)
        if field.name != "training"
    ]


def _strings_under_fields(cls: type[Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for statement, after in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[statement.target.id] = " ".join(after.value.value.split())
    return found
