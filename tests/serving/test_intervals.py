"""Intervals of predictions by the variance that models of the linear mixed model carry: coverage, files, new sites."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import kinfed
from kinfed.cli.app import app
from kinfed.data import Problem
from kinfed.errors import ConfigError
from kinfed.serving import ModelPipeline
from kinfed.serving.intervals import ends


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
    assert np.diff(ends).mean() > 1.4 * np.diff(known.sets.numpy()).mean()


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


def single(problem, output, spread, noise=0.0, freedom=0.0, level=0.9):
    known = [tuple(torch.tensor([value]) for value in (spread, noise, freedom))]
    return ends(problem, level, torch.tensor([output]), known)[0].tolist()


def test_few_sites_widen_the_intervals_of_new_ones():
    """With K = 5 sites: t of 4 degrees of freedom where only sites vary, of Satterthwaite's where rows do too."""
    problem = Problem("regression", mean=10.0, scale=2.0)
    assert single(problem, [0.5], 0.25) == pytest.approx([11 - 1.644854, 11 + 1.644854], abs=1e-4)
    assert single(problem, [0.5], 0.25, freedom=4.0) == pytest.approx([11 - 2.131847, 11 + 2.131847], abs=1e-4)
    t = stats.t.ppf(0.95, 4 * (1.0 / 0.25) ** 2)
    assert single(problem, [0.5], 0.25, 0.75, 4.0) == pytest.approx([11 - 2 * t, 11 + 2 * t], abs=1e-4)


def test_intervals_of_chances_and_counts_by_hand():
    chance = [1 / (1 + np.exp(-(0.7 + sign * 1.644854 * 0.5))) for sign in (-1, 1)]
    assert single(Problem.of_classes(2), [-0.35, 0.35], 0.25) == pytest.approx(chance, abs=1e-5)
    counts = Problem("counts", mean=4.0)
    assert single(counts, [0.5], 0.0) == [stats.poisson.ppf(q, 4 * np.exp(0.5)) for q in (0.05, 0.95)]
    assert single(counts, [-30.0], 0.0) == [0, 0]
    draws = stats.poisson.rvs(
        np.exp(np.log(4) + 0.5 + 0.6 * np.random.default_rng(0).normal(size=200_000)), random_state=1
    )
    assert single(counts, [0.5], 0.36) == np.quantile(draws, [0.05, 0.95], method="inverted_cdf").tolist()


@pytest.fixture(scope="module")
def counted():
    """60 sites with 20 rows each, and 200 that are not there; their chances of the binary target."""
    draw = np.random.default_rng(3)
    names = np.repeat([f"s{k:03d}" for k in range(260)], 20)
    x = draw.normal(size=len(names))
    eta = 0.6 * x + np.repeat(0.7 * draw.normal(size=260), 20)
    chance = 1 / (1 + np.exp(-eta))
    table = pd.DataFrame({"site": names, "x": x, "n": draw.poisson(2 * np.exp(eta)), "chance": chance})
    return table.assign(y=np.where(draw.uniform(size=len(names)) < chance, "yes", "no")), names < "s060"


@pytest.mark.parametrize(("label", "task"), [("n", "counts"), ("y", "classification")])
def test_intervals_of_glmm_hold_counts_and_chances(counted, label, task):
    """Of rows of 200 new sites: counts hold at least as often as they say, for they are whole numbers."""
    table, there = counted
    known = table[there][["site", "x", label]]
    data = kinfed.Federation.from_table(known, client_column="site", label_column=label, task=task)
    result = kinfed.run(federation=data, model="mlr", algorithms="glmm", rounds=15, seeds=(0,), progress=False)
    new = table[~there]
    predictions = result.server_model("glmm").predictions(new[["x"]], level=0.9)
    truth = new["n"] if label == "n" else new["chance"]
    low, high = predictions.sets.numpy().T
    assert (
        (0.89 if label == "n" else 0.86) < ((low <= truth) & (truth <= high)).mean() < (0.98 if label == "n" else 0.94)
    )
    own = result.personal_model("s003", "glmm").predictions(new[["x"]], level=0.9)
    assert float((own.sets[:, 1] - own.sets[:, 0]).mean()) < 0.9 * float((high - low).mean())
    assert predictions.header[2 if label == "n" else 3 :][:2] == (
        ["low", "high"] if label == "n" else ["p_yes from", "p_yes to"]
    )
