"""What kinfed knows by name, for `kinfed list` and the documentation."""

from __future__ import annotations

from kinfed.algorithms import ALGORITHMS
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
        return ALGORITHMS[name].describe_options()
    if name in PARTITIONS:
        return documented(PARTITIONS[name])
    return documented(SOURCES[name].options if name in SOURCES else MODELS[name].options)
