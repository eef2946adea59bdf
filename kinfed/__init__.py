"""kinfed: personalized federated learning, one good model per client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kinfed.version import __version__ as __version__

if TYPE_CHECKING:
    from kinfed.algorithms import make_algorithm
    from kinfed.algorithms.base import Algorithm
    from kinfed.core.registries import register
    from kinfed.data.batches import LocalTraining
    from kinfed.data.federation import Federation
    from kinfed.engine.lora import lora
    from kinfed.errors import KinfedError
    from kinfed.interactive.run import load, run
    from kinfed.interactive.run_result import RunResult
    from kinfed.runs.config import RunConfig
    from kinfed.runs.config_reading import make_config
    from kinfed.runs.simulation import simulate
    from kinfed.sites.fit import fit
    from kinfed.sites.fit_result import FitResult

_HOME = {
    "Algorithm": "kinfed.algorithms.base",
    "Federation": "kinfed.data.federation",
    "KinfedError": "kinfed.errors",
    "RunConfig": "kinfed.runs.config",
    "FitResult": "kinfed.sites.fit_result",
    "RunResult": "kinfed.interactive.run_result",
    "fit": "kinfed.sites.fit",
    "LocalTraining": "kinfed.data.batches",
    "load": "kinfed.interactive.run",
    "lora": "kinfed.engine.lora",
    "make_algorithm": "kinfed.algorithms",
    "make_config": "kinfed.runs.config_reading",
    "register": "kinfed.core.registries",
    "run": "kinfed.interactive.run",
    "simulate": "kinfed.runs.simulation",
}
__all__ = [
    "Algorithm",
    "Federation",
    "FitResult",
    "KinfedError",
    "LocalTraining",
    "RunConfig",
    "RunResult",
    "fit",
    "load",
    "lora",
    "make_algorithm",
    "make_config",
    "register",
    "run",
    "simulate",
]


def __getattr__(name: str) -> Any:
    # Names are fetched on first use, so that `kinfed --help` does not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'kinfed' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
