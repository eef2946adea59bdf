"""Models as ONNX files, against the models themselves, by onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import kinfed
from kinfed.runs.onnx_export import write_onnx
from kinfed.runs.pipeline import ModelPipeline


@pytest.fixture(scope="module")
def table() -> dict[str, list[Any]]:
    draw = np.random.default_rng(0)
    return {
        "site": ["a", "b"] * 30,
        "age": [None if place % 9 == 0 else 40.0 + place for place in range(60)],
        "group": draw.choice(["x", "y", "z"], 60).tolist(),
        "outcome": draw.choice(["ill", "well"], 60).tolist(),
        "days": draw.normal(100, 5, 60).tolist(),
    }


def fitted(table: dict[str, list[Any]], label: str, model: str) -> ModelPipeline:
    ignore = ("outcome", "days")
    data = kinfed.Federation.from_table(
        table, client_column="site", label_column=label, ignore=tuple(name for name in ignore if name != label)
    )
    run = kinfed.run(federation=data, model=model, algorithms="local", rounds=2, seeds=(0,), participation=1.0)
    return run.personal_model("a", "local")


@pytest.mark.parametrize(("label", "model"), [("outcome", "mlp"), ("days", "mlr")])
def test_a_runtime_without_torch_says_the_same(
    table: dict[str, list[Any]], label: str, model: str, tmp_path: Path
) -> None:
    pipeline = fitted(table, label, model)
    write_onnx(pipeline, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    rows = {"age": [50.0, None, 61.0], "group": ["z", "x", "unseen"]}
    encoded, _ = pipeline.encode(rows)
    (answer,) = session.run(None, {"features": encoded.raw.numpy()})
    expected = pipeline.predict(rows) if label == "days" else pipeline.predict_proba(rows)
    np.testing.assert_allclose(answer, expected, rtol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert about["client"] == "a"
    assert json.loads(about["classes"]) == pipeline.classes
    assert len(json.loads(about["features"])) == encoded.raw.shape[1]
