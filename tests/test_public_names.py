"""The names that kinfed promises, and the door to its registries."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import kinfed
import kinfed.author
import kinfed.testing
from kinfed.core.door import MOVED
from kinfed.core.registry import REGISTRIES, Registry, registry_of
from kinfed.errors import ConfigError


def test_public_names() -> None:
    assert kinfed.__all__ == [
        "Algorithm", "Federation", "FitResult", "KinfedError", "LocalTraining", "RunConfig", "RunResult",
        "StudyResult", "contributions", "fit", "load",
        "lora", "make_algorithm", "make_config", "register", "run", "simulate", "study",
    ]  # fmt: skip
    for name in kinfed.__all__:
        assert getattr(kinfed, name) is not None
        assert name in dir(kinfed)
    with pytest.raises(AttributeError, match="nothing"):
        kinfed.nothing  # noqa: B018


PUBLIC = {name: getattr(kinfed, name) for name in kinfed.__all__} | {"check_algorithm": kinfed.testing.check_algorithm}
WITH_EXAMPLE = [
    name for name in PUBLIC if name not in ("FitResult", "KinfedError", "RunResult", "StudyResult")
]  # which others return


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_the_example_of_a_public_name_does_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    author = {each: getattr(kinfed.author, each) for each in kinfed.author.__all__}
    known = {"kinfed": kinfed, "np": np, "pa": pa, "torch": torch, "nn": torch.nn, "math": math}
    known |= {"dataclass": dataclasses.dataclass, **author}
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=known)
    assert test.examples, f"kinfed.{name} shows no example"
    try:
        results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    finally:
        registry_of("model").unregister("linear")
    assert not results.failed


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
        "loss",
        "metric",
        "stage",
        "robust rule",
        "codec",
        "mode",
        "clock",
        "preset",
        "panel",
    }
