"""Sites that leave a run: the fit without them is that of a run that never had them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import kinfed
from kinfed.cli.app import app
from kinfed.data import Problem
from kinfed.errors import ConfigError
from kinfed.newcomers import RunInMemory, forget
from kinfed.serving import ModelPipeline
from kinfed.serving.coefficients import coefficients_of

SETTINGS = {"model": "mlr", "algorithms": {"lmm": {"effects": "slopes"}, "local": {}}, "rounds": 1, "seeds": (0,)}


def federation(without=()):
    draw = np.random.default_rng(0)
    site = np.repeat([f"s{k}" for k in range(8)], 25)
    x = draw.normal(size=(200, 3)).astype(np.float32)
    y = x @ [1.0, -0.5, 0.2] + np.repeat(draw.normal(size=8), 25) * (1 + x[:, 0]) + draw.normal(size=200)
    keep = ~np.isin(site, without)
    data = kinfed.Federation.from_arrays(x[keep], y[keep], site[keep], task="regression", test_fraction=0.2)
    return replace(data, problem=Problem("regression"))  # numbers are standardized alike


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    out = tmp_path_factory.mktemp("forgetting") / "run"
    result = kinfed.run(federation=federation(), out=out, progress=False, **SETTINGS)
    return result, kinfed.run(federation=federation(("s2", "s5")), progress=False, **SETTINGS)


def test_the_fit_is_that_of_a_run_that_never_had_the_site(both):
    result, never = both
    forgotten = forget(result.folder, ["s5", "s2"], "lmm")
    fit, wanted = forgotten.coefficients(), coefficients_of(never.run)
    assert fit.count == wanted.count
    for one, other in zip(fit.rows, wanted.rows, strict=True):
        assert (one.estimate, one.se) == pytest.approx((other.estimate, other.se), abs=1e-10)
    assert fit.sigma == pytest.approx(wanted.sigma, abs=1e-10)
    assert dict(fit.between) == pytest.approx(dict(wanted.between), abs=1e-10)
    assert [site.name for site in fit.sites] == [site.name for site in wanted.sites]
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    for name in ("s0", "s7"):
        ends = forgotten.models[name].predictions(x, level=0.9).sets
        assert ends.numpy() == pytest.approx(never.personal_model(name, "lmm").predictions(x, level=0.9).sets.numpy())
    assert forgotten.server_model.predict(x) == pytest.approx(never.server_model("lmm").predict(x))


def test_what_is_left_is_made_of_the_others_sums(both, tmp_path):
    result, _ = both
    whole, out = forget(result.folder, ["s0"], "lmm"), tmp_path / "without"
    printed = CliRunner().invoke(
        app, ["forget", str(result.folder), "--algorithm", "lmm", "--client", "s5", "--out", str(out)]
    )
    assert printed.exit_code == 0, printed.output
    record = json.loads((out / "forgotten.json").read_text("utf-8"))
    assert record["forgotten"] == ["s5"]
    assert record["sites"] == 7
    assert "s5" not in record["sums"]
    assert record["sums"]["s1"] == whole.sums["s1"]  # the same sums, whoever left
    assert sorted(path.stem for path in (out / "models").iterdir()) == sorted(record["sums"])
    model = ModelPipeline.read(out / "models" / "s1.safetensors")
    assert np.isfinite(model.predictions(np.zeros((1, 3), np.float32), level=0.9).sets.numpy()).all()
    again = CliRunner().invoke(
        app, ["forget", str(result.folder), "--algorithm", "lmm", "--client", "s5", "--out", str(out)]
    )
    assert again.exit_code != 0


def test_runs_in_memory_forget_too(both):
    _, never = both
    forgotten = forget(RunInMemory.of_result(never, "lmm"), ["s0"], "lmm")
    assert forgotten.coefficients().count[1] == 5


def test_it_is_refused_in_words(both):
    result, _ = both
    with pytest.raises(ConfigError, match="run it anew without s1"):
        forget(result.folder, ["s1"], "local")
    with pytest.raises(ConfigError, match="no client is called"):
        forget(result.folder, ["s9"], "lmm")
    with pytest.raises(ConfigError, match="fewer than two sites"):
        forget(result.folder, [f"s{k}" for k in range(7)], "lmm")
