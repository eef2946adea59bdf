"""Intervals of predictions by the variance that models of the linear mixed model carry: coverage, files, new sites."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import kinfed
from kinfed.cli.app import app
from kinfed.errors import ConfigError
from kinfed.serving import ModelPipeline


def rows(sites, per_site, seed, first=0):
    draw = np.random.default_rng(seed)
    names = np.repeat([f"s{first + k:03d}" for k in range(sites)], per_site)
    level = np.repeat(1.5 * draw.normal(size=sites), per_site)
    x = draw.normal(size=len(names))
    return pd.DataFrame({"site": names, "x": x, "y": 10 + 2 * x + level + draw.normal(size=len(names))})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = kinfed.Federation.from_table(rows(60, 20, 1), client_column="site", label_column="y", test_fraction=0.4)
    out = tmp_path_factory.mktemp("intervals") / "run"
    result = kinfed.run(federation=data, model="mlr", algorithms="lmm", rounds=1, seeds=(0,), progress=False, out=out)
    return result, data


def test_intervals_hold_the_truth_as_often_as_they_say(run):
    """On test rows of the sites, 480 of them."""
    result, data = run
    inside = []
    for k, name in enumerate(data.names):
        own = data.test[k]
        x = data.features.raw[own].numpy()
        ends = result.personal_model(name, "lmm").predictions({"x": x[:, 0]}, level=0.9).sets
        y = data.labels[own]
        inside.append((ends[:, 0] <= y) & (y <= ends[:, 1]))
    assert 0.86 < float(np.concatenate(inside).mean()) < 0.94


def test_intervals_of_new_sites_include_the_variance_between_sites(run):
    """400 rows of 200 new sites: their own model knows nothing of them, and says so."""
    result, _ = run
    new = rows(200, 2, 5, first=500)
    server = result.server_model("lmm").predictions(new, level=0.9)
    known = result.personal_model("s000", "lmm").predictions(new, level=0.9)
    y = new.y.to_numpy()
    ends = server.sets.numpy()
    assert 0.85 < ((ends[:, 0] <= y) & (y <= ends[:, 1])).mean() < 0.95
    assert float(server.threshold.mean()) > 1.4 * float(known.threshold.mean())


def test_files_and_the_command_have_intervals(run, tmp_path):
    result, _ = run
    model, table = tmp_path / "s000.safetensors", tmp_path / "new.csv"
    result.personal_model("s000", "lmm").save(model)
    rows(1, 5, 3).drop(columns="y").to_csv(table, index=False)
    again = ModelPipeline.read(model).predictions(pd.read_csv(table), level=0.95)
    printed = CliRunner().invoke(app, ["predict", str(table), "--model", str(model), "--interval", "0.95"])
    assert printed.exit_code == 0
    assert printed.output.splitlines()[0] == "row,prediction,low,high"
    low, high = map(float, printed.output.splitlines()[1].split(",")[2:])
    assert [low, high] == pytest.approx(again.sets[0].tolist(), rel=1e-4)


def test_what_has_no_interval_says_so(run):
    result, _ = run
    model = result.personal_model("s000", "lmm")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        model.predictions({"x": [0.0]}, level=1.5)
