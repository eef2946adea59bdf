"""Models as ONNX files, against the models themselves, by onnxruntime: raw rows in."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import kinfed
from kinfed.errors import ModelError
from kinfed.serving.onnx_export import write_onnx
from kinfed.serving.pipeline import ModelPipeline

DAY = date(1970, 1, 1)
TARGETS = ("outcome", "score")


@pytest.fixture(scope="module")
def table() -> dict[str, list[Any]]:
    """All kinds of columns: gaps in some, rare categories, a constant with gaps, dates, and long texts."""
    draw = np.random.default_rng(0)
    return {
        "site": ["a", "b"] * 80,
        "age": [None if place % 9 == 0 else 40.0 + place for place in range(160)],
        "features": [place % 3 == 0 for place in range(160)],
        "dose": draw.normal(size=160).tolist(),
        "group": draw.choice(["x", "y", "z"], 160).tolist(),
        "ward": [None if place % 7 == 0 else f"rare {place}" if place < 6 else f"w{place % 3}" for place in range(160)],
        "unit": [None if place % 5 == 0 else 1.0 for place in range(160)],
        "seen": [DAY + timedelta(days=17000 + 31 * place) for place in range(160)],
        "left": [None if place % 6 == 0 else DAY + timedelta(days=18000 + place) for place in range(160)],
        "note": [f"note {place} about {draw.integers(1000)} things" for place in range(160)],
        "outcome": draw.choice(["ill", "well"], 160).tolist(),
        "score": draw.normal(100, 5, 160).tolist(),
    }


def fitted(table: dict[str, list[Any]], label: str, model: str) -> ModelPipeline:
    ignore = tuple(name for name in TARGETS if name != label and name in table)
    columns = "note=text" if "note" in table else ""
    data = kinfed.Federation.from_table(table, client_column="site", label_column=label, ignore=ignore, columns=columns)
    run = kinfed.run(federation=data, model=model, algorithms="local", rounds=2, seeds=(0,), participation=1.0)
    return run.personal_model("a", "local")


def cells(pipeline: ModelPipeline, rows: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Raw rows as a program in another language would hand them over."""
    learnt = pipeline.inputs.preprocessing
    assert learnt is not None
    out: dict[str, np.ndarray] = {}
    for column in learnt.used:
        values = rows[column.name]
        if column.kind == "text":
            out[f"{column.name} score"] = learnt.encode(rows).raw.numpy()[:, -len(column.features) :]
        elif column.kind == "category":
            out[column.name] = np.array([[value or ""] for value in values], object)
        else:
            numbers = [(value - DAY).days if isinstance(value, date) else value for value in values]
            out[column.name] = np.array([[np.nan if n is None else float(n)] for n in numbers])
    return out


@pytest.mark.parametrize(("label", "model"), [("outcome", "mlp"), ("score", "mlr")])
def test_a_runtime_without_torch_says_the_same_of_raw_rows(
    table: dict[str, list[Any]], label: str, model: str, tmp_path: Path
) -> None:
    pipeline = fitted(table, label, model)
    learnt = pipeline.inputs.preprocessing
    assert learnt is not None
    assert {one.kind for one in learnt.used} == {"number", "category", "date", "text"}
    assert {"ward other", "ward missing", "unit missing", "left missing", "note score"} <= set(learnt.features)
    write_onnx(pipeline, tmp_path / "a.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "a.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    rows = {name: [*values[:8], values[9]] for name, values in table.items()}
    rows["group"] = ["z", "x", "unseen", "y", None, "z", "x", "y", "z"]  # no training row lacked it
    rows["age"][1], rows["ward"][2], rows["dose"][3], rows["seen"][4] = None, "unseen", None, None
    (answer,) = session.run(None, cells(pipeline, rows))
    expected = pipeline.predict(rows) if label == "score" else pipeline.predict_proba(rows)
    np.testing.assert_allclose(answer, expected, rtol=1e-5)
    about = session.get_modelmeta().custom_metadata_map
    assert about["client"] == "a"
    assert json.loads(about["classes"]) == pipeline.classes
    assert json.loads(about["features"]) == learnt.features


def test_a_column_called_as_the_answer_is_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = {"site": ["a", "b"] * 20, "probabilities": draw.normal(size=40).tolist(), "ill": ["no", "yes"] * 20}
    with pytest.raises(ModelError, match="the column 'probabilities' repeats one"):
        write_onnx(fitted(table, "ill", "mlr"), tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_other_examples_are_fed_as_they_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    data = kinfed.Federation.from_arrays(draw.normal(3, 2, size=(40, 4)), [0, 1] * 20, ["a", "b"] * 20)
    run = kinfed.run(federation=data, model="mlr", algorithms="local", rounds=1, seeds=(0,), participation=1.0)
    pipeline, rows = run.personal_model("a"), draw.normal(3, 2, size=(3, 4)).astype(np.float32)
    write_onnx(pipeline, tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"features": rows})[0], pipeline.predict_proba(rows), rtol=1e-5)


@pytest.mark.parametrize(
    ("label", "task", "method", "curves"),
    [("y", "regression", "lmm", False), ("n", "counts", "glmm", False), ("y", "regression", "lmm", True)],
)
def test_models_by_sums_give_their_deviation_too(
    label: str, task: str, method: str, curves: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(1)
    level = np.repeat(draw.normal(size=12), 15)
    x = draw.normal(size=180)
    table = {
        "site": np.repeat(np.arange(12), 15).astype(str),
        "x": x,
        "y": 5 + 3 * (x**2 + level + draw.normal(size=180)),
    }
    table = {**table, "n": draw.poisson(np.exp(0.5 * level + 0.3 * x))}
    rows = {name: table[name] for name in ("site", "x", label)}
    data = kinfed.Federation.from_table(rows, client_column="site", label_column=label, task=task)
    chosen = {method: {"curves": curves}}
    run = kinfed.run(federation=data, model="mlr", algorithms=chosen, rounds=12, seeds=(0,), progress=False)
    for model in (run.personal_model("3", method), run.server_model(method)):
        write_onnx(model, tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        assert [one.name for one in session.get_outputs()] == ["prediction", "deviation"]
        mean, deviation = session.run(None, {"x": np.array([[-1.0], [0.0], [2.0]])})
        wanted = {"x": [-1.0, 0.0, 2.0]}
        assert mean == pytest.approx(model.predict(wanted), rel=1e-4)
        features = model.transform(wanted)
        spread, noise, _ = model.module.uncertainty(features)
        scale = float(model.inputs.problem.scale) if label == "y" else 1.0
        assert deviation == pytest.approx(scale * (spread + noise).sqrt().detach().numpy(), rel=1e-4)


@pytest.mark.parametrize(("task", "method"), [("survival", "cox"), ("ordinal", "fedavg")])
def test_chances_of_periods_and_of_ordered_classes(task: str, method: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    x, site = draw.normal(size=180), np.repeat(np.arange(6), 30).astype(str)
    time = draw.exponential(np.exp(-x))
    table = {"site": site, "x": x, "grade": np.clip(np.round(2 + x), 1, 3).astype(int)}
    names = {"label_column": "grade"}
    if task == "survival":
        table = {"site": site, "x": x, "days": np.minimum(time, 2.0), "died": time < 2.0}
        names = {"time_column": "days", "event_column": "died"}
    data = kinfed.Federation.from_table(table, client_column="site", task=task, **names)
    run = kinfed.run(federation=data, model="mlr", algorithms=method, rounds=8, seeds=(0,), progress=False)
    model, rows = run.personal_model("3", method), {"x": [-1.0, 0.0, 2.0]}
    write_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert [one.name for one in session.get_outputs()] == ["probabilities"]
    (chances,) = session.run(None, {"x": np.array([rows["x"]]).T})
    np.testing.assert_allclose(chances, model.predictions(rows).outputs.numpy(), rtol=1e-4, atol=1e-6)
    assert bool((np.diff(chances, axis=1) <= 1e-6).all()) == (task == "survival")


@pytest.mark.parametrize("kind", ["labels", "numbers", "positions"])
def test_several_answers_of_a_row(kind: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    x, site = draw.normal(size=(90, 3)).astype(np.float32), np.repeat(["a", "b", "c"], 30)
    y: Any = x @ draw.normal(size=(3, 2)) * 4 + 10
    settings: dict[str, Any] = {"task": "regression"}
    module: Any = "mlr"
    if kind == "labels":
        y, settings = (y > 10).astype(int), {"task": "multilabel"}
    if kind == "positions":
        y, settings = (y > 10).astype(int), {"task": "dense", "num_classes": 2}
        module = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Unflatten(1, (2, 2)))  # noqa: E731
    data = kinfed.Federation.from_arrays(x, y, site, **settings)
    run = kinfed.run(federation=data, model=module, algorithms="fedavg", rounds=2, seeds=(0,), progress=False)
    model = run.personal_model("b", "fedavg")
    write_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (entry,) = session.get_inputs()
    (answers,) = session.run(None, {entry.name: x[:7]})
    np.testing.assert_allclose(answers, model.predictions(x[:7]).outputs.numpy(), rtol=1e-4, atol=1e-6)
