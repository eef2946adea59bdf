"""The names that kinfed promises, and the door to its registries."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kinfed
from kinfed.core.registry import REGISTRIES, Registry, registry_of
from kinfed.errors import ConfigError
from kinfed.moved import MOVED


def test_public_names() -> None:
    assert kinfed.__all__ == [
        "Algorithm", "Federation", "FitResult", "KinfedError", "LocalTraining", "RunConfig", "RunResult", "fit", "load",
        "lora", "make_algorithm", "make_config", "register", "run", "simulate",
    ]  # fmt: skip
    for name in kinfed.__all__:
        assert getattr(kinfed, name) is not None
        assert name in dir(kinfed)
    with pytest.raises(AttributeError, match="nothing"):
        kinfed.nothing  # noqa: B018


def test_importing_kinfed_is_cheap() -> None:
    script = "import sys, kinfed, kinfed.config.config, kinfed.core.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("kinfed.algorithms.facade", "sgd"), ("kinfed.data.features", "Features"), ("kinfed.data.problem", "Problem"),
        ("kinfed.data.ragged", "Ragged"), ("kinfed.engine.adapter_files", "save_adapter"),
        ("kinfed.engine.extended", "ExtendedTask"), ("kinfed.engine.models", "build_model"),
        ("kinfed.engine.task", "make_task"), ("kinfed.runs.adopt", "adopt"), ("kinfed.runs.tune", "tune"),
    ],
)  # fmt: skip
def test_paths_that_pages_have_shown_still_work_and_name_the_new_one(path: str, name: str) -> None:
    assert path in MOVED
    sys.modules.pop(path, None)
    with pytest.warns(DeprecationWarning, match=MOVED[path]):
        old = importlib.import_module(path)
    assert getattr(old, name) is getattr(importlib.import_module(MOVED[path]), name)


@pytest.mark.parametrize(
    "kind", ["algorithm", "method", "dataset", "data set", "partition", "model", "robust rule", "panel"]
)
def test_everything_is_registered_by_one_function(kind: str) -> None:
    registry = registry_of(kind)
    assert isinstance(registry, Registry)
    thing = object()
    try:
        assert kinfed.register(kind, "some-thing", thing, summary="of a test") is thing
        assert registry["some-thing"].target is thing
        assert registry["some-thing"].summary == "of a test"
        with pytest.raises(ConfigError, match="registered already"):
            kinfed.register(kind, "some-thing")(object())
    finally:
        registry.unregister("some-thing")


def test_unknown_kinds_are_refused_with_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean algorithm"):
        kinfed.register("algoritm", "mine", object())
    assert set(REGISTRIES) == {
        "algorithm",
        "dataset",
        "partition",
        "model",
        "extension",
        "metric",
        "stage",
        "robust rule",
        "codec",
        "mode",
        "clock",
        "preset",
        "panel",
    }
