"""Predictions of one personal model: the same numbers as in training, from a file alone."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import kinfed
from kinfed.cli.app import app
from kinfed.data.sources.table_files import read_table
from kinfed.errors import ConfigError, DataError, KinfedError, ModelError
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import model_of_run, predict

CLASSES = ["low", "mid", "high"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a table whose columns are far from scale, and the table."""
    place = tmp_path_factory.mktemp("predict")
    numbers = np.random.default_rng(2)
    y = numbers.integers(0, 3, 120)
    x = (numbers.normal(size=(120, 4)) + 2 * np.eye(3, 4)[y]) * [1, 100, 0.01, 1] + [0, 2000, 0, -5]
    with (place / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["owner", "age", "year", "dose", "depth", "risk"])
        for row in range(120):
            writer.writerow([f"clinic {row % 3}", *x[row], CLASSES[y[row]]])
    kinfed.run(
        dataset=str(place / "data.csv"), client_column="owner", label_column="risk", model="mlr", rounds=6, seeds=(0,),
        algorithms="ditto,fedem", participation=1.0, out=place / "run", eval_every=0,
    )  # fmt: skip
    return place


def new_table(folder: Path, columns: list[str] | None = None) -> Path:
    """The training table as new data: columns in another order, with one more, without the label."""
    rows = list(csv.DictReader(io.StringIO((folder / "data.csv").read_text())))
    names = columns or ["depth", "owner", "dose", "extra", "age", "year"]
    path = folder / "new.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            writer.writerow([row.get(name, "x") for name in names])
    return path


@pytest.mark.parametrize("method", ["ditto", "fedem"])
def test_probabilities_are_those_of_the_trained_model(folder: Path, method: str) -> None:
    """The oracle: standardized by hand over the run's training rows, through the exported module."""
    found = predict(model_of_run(folder / "run", "clinic 1", method), new_table(folder))
    config = kinfed.make_config(None, {"dataset": str(folder / "data.csv"), "client_column": "owner",
                                       "label_column": "risk"})  # fmt: skip
    from kinfed.runs.run_inputs import build_federation

    data = build_federation(config, 0)
    table = read_table(folder / "data.csv").select(["age", "year", "dose", "depth"])
    raw = torch.from_numpy(np.stack([column.to_numpy() for column in table.columns], 1))
    train = raw[data.train.rows]
    x = ((raw - train.mean(0)) / train.std(0, unbiased=False)).to(torch.float32)
    module = ModelPipeline.read(
        export_model(folder / "run", "clinic 1", method, out=folder / f"{method}.safetensors").path
    )
    with torch.inference_mode():
        wanted = torch.softmax(module.module(x), 1)
    torch.testing.assert_close(found.probabilities, wanted, rtol=1e-4, atol=1e-5)
    assert sorted(found.classes) == sorted(CLASSES)
    assert found.labels == [found.classes[k] for k in wanted.argmax(1).tolist()]


def test_the_command_writes_a_table(folder: Path) -> None:
    out = folder / "out.csv"
    export_model(folder / "run", "clinic 0", "ditto", out=folder / "one.safetensors")
    table = new_table(folder)
    options = ["--model", str(folder / "one.safetensors"), "--name-column", "owner"]
    done = CliRunner().invoke(app, ["predict", str(table), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert len(rows) == 120
    assert rows[1]["row"] == "clinic 1"
    for row in rows:
        p = {name: float(row[f"p_{name}"]) for name in CLASSES}
        assert sum(p.values()) == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == max(p, key=lambda name: p[name])
        assert float(row["probability"]) == max(p.values())


def test_tables_and_arrays_are_the_same_to_it(folder: Path) -> None:
    model = model_of_run(folder / "run", "clinic 2", "ditto")
    table = read_table(folder / "data.csv")
    pq.write_table(table, folder / "new.parquet")
    columns = [table[name].to_numpy() for name in model.inputs.columns or ()]
    np.savez(folder / "new.npz", x=np.stack(columns, 1).astype(np.float32))
    one, two, three = (predict(model, folder / name).probabilities for name in ("data.csv", "new.parquet", "new.npz"))
    assert torch.equal(one, two)
    assert torch.equal(one, three)


def test_more_rows_than_a_batch(folder: Path) -> None:
    model = model_of_run(folder / "run", "clinic 2", "ditto")
    x = np.random.default_rng(0).normal(size=(2500, 4)).astype(np.float32)
    np.savez(folder / "many.npz", x=x)
    np.savez(folder / "few.npz", x=x[2400:])
    many, few = predict(model, folder / "many.npz"), predict(model, folder / "few.npz")
    torch.testing.assert_close(many.probabilities[2400:], few.probabilities)


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    model = model_of_run(folder / "run", "clinic 0", "ditto")
    with pytest.raises(DataError, match="lacks 1 of the models' 4 columns: dose"):
        predict(model, new_table(folder, ["age", "year", "depth"]))
    np.savez(folder / "wide.npz", x=np.zeros((2, 5), np.float32))
    with pytest.raises(DataError, match="one column for each of age, year, dose, depth"):
        predict(model, folder / "wide.npz")
    np.savez(folder / "nan.npz", x=np.full((2, 4), np.nan, np.float32))
    assert torch.isfinite(predict(model, folder / "nan.npz").probabilities).all(), "missing numbers become the mean"
    np.savez(folder / "object.npz", x=np.array([[None]], dtype=object))
    with pytest.raises(DataError, match="cannot read x"):
        predict(model, folder / "object.npz")
    with pytest.raises(KinfedError, match="no column 'who'"):
        predict(model, folder / "data.csv", name_column="who")


def test_a_model_without_a_description_is_refused(tmp_path: Path) -> None:
    from kinfed.core import storage

    storage.write_tensors(tmp_path / "m.safetensors", {"w": torch.ones(2)}, {"model": "mlr"})
    with pytest.raises(ModelError, match="does not say what its model must be fed"):
        ModelPipeline.read(tmp_path / "m.safetensors")


def test_one_must_say_which_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "x.csv"), "--out", str(tmp_path / "y.csv")])
    assert isinstance(done.exception, KinfedError)
    assert "name a model: --model FILE, --run DIR" in str(done.exception)


# ---- tables as they are ----


@pytest.fixture(scope="module")
def hospitals() -> tuple[dict[str, list[Any]], kinfed.RunResult]:
    """Three hospitals with gaps and categories, and a run on them in memory."""
    numbers, rows = np.random.default_rng(4), 90
    age = numbers.normal(1000, 9, rows).round(1)
    frame: dict[str, list[Any]] = {
        "age": age.tolist(),
        "ward": numbers.choice(["x", "y"], rows).tolist(),
        "lab": [None if n % 5 == 0 else float(n % 7) for n in range(rows)],
        "hospital": [f"h{n % 3}" for n in range(rows)],
        "sick": np.where(age > 1000, "yes", "no").tolist(),
    }
    data = kinfed.Federation.from_table(frame, label_column="sick", client_column="hospital")
    result = kinfed.run(
        federation=data, model="mlr", algorithms="fedavg", rounds=10, seeds=(0,), participation=1.0, lr=0.5,
        eval_every=0,
    )  # fmt: skip
    return frame, result


def test_a_personal_model_takes_raw_rows(
    hospitals: tuple[dict[str, list[Any]], kinfed.RunResult], tmp_path: Path
) -> None:
    frame, result = hospitals
    pipeline = result.personal_model("h1")
    assert pipeline.classes == ["no", "yes"]
    right = np.mean(np.array(pipeline.predict(frame)) == np.array(frame["sick"]))
    assert right > 0.9, "ages around 1000 are scaled as in training"
    probabilities = pipeline.predict_proba(frame)
    pipeline.save(tmp_path / "h1.safetensors")
    again = ModelPipeline.read(tmp_path / "h1.safetensors")
    assert again.about["client"] == "h1"
    np.testing.assert_array_equal(again.predict_proba(frame), probabilities)
    encoded, _ = pipeline.encode(frame)
    logits = pipeline.with_scaling()(encoded.raw)
    np.testing.assert_allclose(torch.softmax(logits, 1).detach().numpy(), probabilities, atol=1e-6)
    server = result.server_model()
    assert server is not None
    assert server.predict_proba(frame).shape == (90, 2)


def test_new_rows_that_differ_are_handled_or_refused(
    hospitals: tuple[dict[str, list[Any]], kinfed.RunResult], tmp_path: Path
) -> None:
    pipeline = hospitals[1].personal_model("h0")
    plain = pipeline.predict_proba({"age": [990.0], "ward": ["x"], "lab": [None]})
    turned = pipeline.predictions({"lab": [None], "street": ["?"], "ward": ["x"], "age": [990]})
    np.testing.assert_array_equal(turned.probabilities.numpy(), plain)
    assert not turned.notes
    without = pipeline.predictions({"ward": ["x"], "age": [990]})
    np.testing.assert_array_equal(without.probabilities.numpy(), plain)
    assert without.notes == ["the table has no column lab: it counts as missing in every row"]
    unseen = pipeline.predictions({"ward": ["z"], "age": [990], "lab": [1]})
    assert "values not seen in training ('z') have no feature" in unseen.notes[0]
    with pytest.raises(DataError, match="lacks 1 of the models' 3 columns: age"):
        pipeline.predict({"ward": ["x"], "lab": [1]})
    with pytest.raises(DataError, match=r"column age of .* should hold numbers; 1 of 1 cells hold none"):
        pipeline.predict({"ward": ["x"], "lab": [1], "age": ["old"]})
    pipeline.save(tmp_path / "h0.safetensors")
    (tmp_path / "new.csv").write_text("ward,age\nx,990\nz,1010\n")
    arguments = ["predict", str(tmp_path / "new.csv"), "--model", str(tmp_path / "h0.safetensors")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stdout.splitlines() if line]
    assert lines[0] == "row,prediction,probability,p_no,p_yes"
    assert [line.split(",")[:2] for line in lines[1:]] == [["1", "no"], ["2", "yes"]]
    assert "note     column ward: values not seen in training ('z')" in shown.stderr


def test_a_model_of_another_version_is_refused(tmp_path: Path) -> None:
    from kinfed.core import storage

    inputs = '{"shape": [4], "classes": ["a", "b"], "mean": null, "std": null, "columns": ["x"]}'
    storage.write_tensors(tmp_path / "m.safetensors", {"w": torch.ones(2)}, {"model": "mlr", "inputs": inputs})
    with pytest.raises(ModelError, match="export it with this version"):
        ModelPipeline.read(tmp_path / "m.safetensors")


def test_statistics_of_columns_are_refused_under_privacy(
    hospitals: tuple[dict[str, list[Any]], kinfed.RunResult],
) -> None:
    pytest.importorskip("dp_accounting")
    frame, _ = hospitals
    roles = {"label_column": "sick", "client_column": "hospital"}
    settings: dict[str, Any] = {"model": "mlr", "algorithms": "fedavg", "rounds": 1, "seeds": (0,), "dp_noise": 1.0}
    with pytest.raises(ConfigError, match="epsilon does not cover the statistics of columns"):
        kinfed.run(federation=kinfed.Federation.from_table(frame, **roles), **settings)
    noted = frame | {"note": [f"seen by nobody, {place}" for place in range(len(frame["sick"]))]}
    public = kinfed.Federation.from_table(noted, **roles, columns="note=text", public_statistics=True)
    with pytest.raises(ConfigError, match=r"scores of long texts \(note\).*--columns note=skip"):
        kinfed.run(federation=public, **settings)
    for options in ({"public_statistics": True}, {"standardize": False, "ignore": "ward,lab"}):
        kinfed.run(federation=kinfed.Federation.from_table(frame, **roles, **options), **settings)
