"""Where the registry of each kind of thing is, and the one door to all of them.

    kinfed.register("model", "mine", build, summary="a model of my own")

    @kinfed.register("algorithm", "mine")
    class Mine(Algorithm[...]): ...

Registries are imported when they are first needed: their rooms lie above this one, and some of them need torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from kinfed.core.registry import Registry
from kinfed.errors import unknown_name

REGISTRIES = {
    "algorithm": "kinfed.algorithms:ALGORITHMS",
    "dataset": "kinfed.data.sources:SOURCES",
    "partition": "kinfed.data.sources:PARTITIONS",
    "model": "kinfed.engine:MODELS",
    "extension": "kinfed.algorithms.algorithm_names:EXTENSIONS",
    "metric": "kinfed.engine:METRICS",
    "robust rule": "kinfed.updates:RULES",
    "stage": "kinfed.updates:STAGES",
    "codec": "kinfed.updates:CODECS",
    "mode": "kinfed.updates:MODES",
    "clock": "kinfed.server:CLOCKS",
    "preset": "kinfed.config:PRESETS",
    "panel": "kinfed.report:PANELS",
}
_OTHER_WORDS = {"method": "algorithm", "data set": "dataset", "rule": "robust rule"}


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind of thing, such as "algorithm" or "model": a key of REGISTRIES."""
    kind = _OTHER_WORDS.get(kind, kind)
    if kind not in REGISTRIES:
        raise unknown_name("kind of thing", kind, REGISTRIES)
    module, _, name = REGISTRIES[kind].partition(":")
    registry: Registry[Any] = getattr(importlib.import_module(module), name)
    return registry


def register(kind: str, name: str, target: Any = None, **about: Any) -> Any:
    """Add a thing of your own under a name, or make a decorator that does; see `Registry.register` for `about`."""
    return registry_of(kind).register(name, target, **about)
