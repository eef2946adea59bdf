"""The names that kinfed promises, and the door to its registries."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kinfed
from kinfed.core.registries import REGISTRIES, registry_of
from kinfed.core.registry import Registry
from kinfed.errors import ConfigError


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
    script = "import sys, kinfed, kinfed.config.config, kinfed.core.registries; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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
        "robust rule",
        "codec",
        "mode",
        "clock",
        "preset",
        "panel",
    }
