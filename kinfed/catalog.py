"""What kinfed knows by name, for `kinfed list` and the documentation."""

from __future__ import annotations

from kinfed.algorithms import ALGORITHMS
from kinfed.data.partition import PARTITIONS
from kinfed.data.sources import SOURCES
from kinfed.models import MODELS


def catalog() -> dict[str, dict[str, str]]:
    """Kind -> name -> one line."""
    return {
        "algorithms": {name: entry.summary for name, entry in ALGORITHMS.items()},
        "datasets": {name: entry.summary for name, entry in SOURCES.items()},
        "partitions": {name: entry.summary for name, entry in PARTITIONS.items()},
        "models": {name: entry.summary for name, entry in MODELS.items()},
    }
