"""Files of models that a stranger has made: refused in words, whatever they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import kinfed
from kinfed.core import storage
from kinfed.errors import ModelError
from kinfed.serving.pipeline import ModelPipeline


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a table, as a fit hands it over: a mixture."""
    rows = {"site": ["a", "b"] * 12, "age": [float(k) for k in range(24)], "sick": ["no", "no", "yes", "yes"] * 6}
    result = kinfed.fit(
        pa.table(rows), client_column="site", label_column="sick", models="mlr", algorithms="fedavg", trials=1,
        folds=2, rounds=1, steps=2, references=False, accept="all",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "a.safetensors"
    result.model("a").save(path)
    assert ModelPipeline.read(path).predict({"age": [3.0]})
    return path


DEEP = "[" * 100_000
ABOUT: list[dict[str, Any]] = [
    {"model": None}, {"model": "os.system"}, {"inputs": None}, {"inputs": DEEP}, {"inputs": "null"},
    {"model": "mixture", "parts": "[1]"}, {"model": "mixture", "parts": DEEP}, {"model": "mixture", "parts": "[]"},
    {"model": "mixture", "parts": '[{"model": "mixture", "options": {}}]'}, {"model": "mixture", "parts": None},
]  # fmt: skip
INPUTS: list[dict[str, Any]] = [
    {"shape": [10**9]}, {"shape": [10**6, 10**6]}, {"shape": [-5]}, {"shape": ["a"]}, {"shape": None},
    {"mean": [[1], [1, 2]], "std": 1}, {"problem": {"kind": "x"}}, {"preprocessing": {"a": 1}},
]  # fmt: skip


def refused(plain: Path, folder: Path, about: dict[str, Any], match: str | None = None) -> None:
    known = storage.read_metadata(plain) | about
    kept = {name: text for name, text in known.items() if text is not None and name != storage.CHECKSUM}
    storage.write_tensors(folder / "x.safetensors", storage.read_tensors(plain), kept)
    with pytest.raises(ModelError, match=match):
        ModelPipeline.read(folder / "x.safetensors")


@pytest.mark.parametrize("about", ABOUT, ids=lambda about: str(about)[:50])
def test_what_a_file_says_of_its_model_is_read_with_suspicion(plain: Path, tmp_path: Path, about: Any) -> None:
    refused(plain, tmp_path, about)


@pytest.mark.parametrize("change", INPUTS, ids=str)
def test_so_is_what_it_says_of_inputs(plain: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    inputs = json.loads(storage.read_metadata(plain)["inputs"])
    refused(plain, tmp_path, {"inputs": json.dumps(inputs | change)}, "must be fed")


def test_columns_that_make_no_numbers_are_refused(plain: Path, tmp_path: Path) -> None:
    inputs = json.loads(storage.read_metadata(plain)["inputs"])
    inputs["preprocessing"]["encodings"] = []
    refused(plain, tmp_path, {"inputs": json.dumps(inputs)}, "make 0 numbers")
