"""Coefficients of a run in the units of its table, against R's lme4; what is said beside them."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from realdata import real_data
from typer.testing import CliRunner

import kinfed
from kinfed.cli.app import app
from kinfed.errors import ConfigError
from kinfed.report import coefficient_table
from kinfed.serving.coefficients import coefficients_of


@pytest.fixture(scope="module")
def exam(tmp_path_factory):
    """All rows of exam65 as training rows, and one copy per school as a test row."""
    table = pq.read_table(real_data("exam65_london") / "exam65_london" / "train-00000-of-00001.parquet").to_pandas()
    x = [table.standLRT, table.schavg, table.sex == "M", table.schgend == "girls", table.schgend == "mixed"]
    x = np.column_stack(x).astype(np.float32)
    first = ~table.client.duplicated().to_numpy()
    data = kinfed.Federation.from_arrays(
        np.concatenate([x, x[first]]), np.concatenate([table.normexam, table.normexam[first]]),
        np.concatenate([table.client, table.client[first]]),
        test_rows=np.arange(len(x) + first.sum()) >= len(x), task="regression", standardize=True,
    )  # fmt: skip
    methods = {"lmm": {"effects": "intercept"}, "local": {}}
    out = tmp_path_factory.mktemp("exam") / "run"
    settings = {"model": "mlr", "rounds": 2, "seeds": (0,), "progress": False, "accept": "test_copies"}
    return kinfed.run(federation=data, algorithms=methods, out=out, **settings)


def test_coefficients_are_those_of_lme4_in_their_own_units(exam):
    """lmer(normexam ~ standLRT + schavg + sex + schgend + (1 | client)): see tests/theory/test_mixed.py."""
    fit = coefficients_of(exam.run)
    wanted = [0.202152534, 0.555810894, 0.347221034, -0.165900582, -0.043600818, -0.194963780]
    errors = [0.0981011883, 0.0125232777, 0.1077467841, 0.0340722489, 0.1174598548, 0.1052432009]
    assert [row.estimate for row in fit.rows] == pytest.approx(wanted, abs=2e-6)
    assert [row.se for row in fit.rows] == pytest.approx(errors, rel=1e-5)
    assert fit.sigma == pytest.approx(0.750127361, rel=1e-5)
    assert fit.between["intercept"] == pytest.approx(0.0716546023**0.5, rel=1e-4)
    assert fit.intraclass_correlation == pytest.approx(0.0716546 / (0.0716546 + 0.750127361**2), rel=1e-4)
    schools = {site.name: site.effect for site in fit.sites}
    assert schools["school_01"] == pytest.approx(0.402887306, rel=1e-4)


def test_a_frame_has_a_row_per_coefficient(exam):
    frame = exam.coefficients("lmm")
    assert list(frame.columns) == ["name", "estimate", "se", "low", "high", "p"]
    assert len(frame) == 6


def test_profile_intervals_stand_beside_walds(exam):
    """confint(m, method = "profile"): see tests/theory/test_profiles.py."""
    frame = exam.coefficients("lmm", profile=True)
    by_name = frame.set_index("name")
    ends = by_name[["profile_low", "profile_high"]]
    assert ends.loc["between sites: intercept"].tolist() == pytest.approx([0.2104372420, 0.3186668789], rel=1e-5)
    assert ends.loc["within sites"].tolist() == pytest.approx([0.7338049537, 0.7667199013], rel=1e-5)
    assert ends.loc["intercept"].tolist() == pytest.approx([0.0131562468, 0.3910246266], abs=5e-6)
    assert ends.iloc[1].tolist() == pytest.approx([0.5312726768, 0.5803639723], rel=1e-5)
    printed = CliRunner().invoke(app, ["coefficients", str(exam.folder), "--profile"])
    assert printed.exit_code == 0
    assert "Sites differ by 0.268 [0.21, 0.319] beyond chance" in printed.output.replace("\n", " ")


def test_what_has_no_profile_says_so(exam, tmp_path):
    from kinfed.newcomers import profiled

    with pytest.raises(ConfigError, match="local keeps no sums of sites"):
        profiled(exam.folder, "local")
    draw = np.random.default_rng(0)
    data = kinfed.Federation.from_arrays(draw.normal(size=(80, 2)), draw.normal(size=80), np.repeat([0, 1, 2, 3], 20))
    totals = {"lmm": {"totals": True}}
    result = kinfed.run(federation=data, algorithms=totals, model="mlr", rounds=4, seeds=(0,), progress=False)
    with pytest.raises(ConfigError, match="totals = false"):
        result.coefficients(profile=True)


def test_sentences_say_how_sites_differ(exam):
    text = " ".join(coefficients_of(exam.run, "lmm").sentences())
    assert "4,059 rows of 65 sites" in text
    assert "Sites differ by 0.268 beyond chance" in text
    assert "11.3 % of the variance" in text


def test_the_page_has_the_table_and_the_sites(exam, tmp_path):
    page = exam.report(tmp_path / "page.html").read_text("utf-8")
    assert "Coefficients and sites" in page
    assert "effect of a site, with its 95 % interval" in page
    assert "standard error" in page


def test_the_command_prints_and_writes_the_table(exam, tmp_path):
    runner = CliRunner()
    printed = runner.invoke(app, ["coefficients", str(exam.folder)])
    assert printed.exit_code == 0
    assert "Sites differ by 0.268 beyond chance" in printed.output.replace("\n", " ")
    for suffix, mark in ((".csv", "coefficient,estimate"), (".tex", "toprule"), (".md", "| coefficient |")):
        path = tmp_path / f"table{suffix}"
        assert runner.invoke(app, ["coefficients", str(exam.folder), "--out", str(path)]).exit_code == 0
        assert mark in path.read_text("utf-8")


def test_runs_without_coefficients_say_so(exam):
    with pytest.raises(ConfigError, match="lmm"):
        coefficients_of(exam.run, "local")
    with pytest.raises(ConfigError, match="no coefficients with seed 7"):
        coefficients_of(exam.run, "lmm", 7)


@pytest.fixture(scope="module")
def studies():
    """rotterdam_gbsg by name."""
    settings = {"data": real_data("rotterdam_gbsg"), "model": "mlr", "rounds": 8, "seeds": (0,), "progress": False}
    return kinfed.run(dataset="rotterdam_gbsg", algorithms="cox", **settings)


def test_coefficients_of_survival_are_log_hazard_ratios(studies):
    fit = coefficients_of(studies.run)
    rows = {row.name: row for row in fit.rows}
    assert "intercept" not in rows
    assert rows["nodes"].estimate == pytest.approx(0.0662, abs=0.01)  # of R with all rows
    assert rows["nodes"].low < rows["nodes"].estimate < rows["nodes"].high
    text = " ".join(fit.sentences())
    assert "coefficients in log hazard" in text
    assert "baseline hazard of its own" in text
    assert "Sites" not in text
    frame = studies.coefficients()
    assert frame["hazard_ratio"].to_numpy() == pytest.approx(np.exp(frame["estimate"].to_numpy()), nan_ok=True)
    nodes = next(line for line in coefficient_table(fit).csv().splitlines() if line.startswith("nodes"))
    ratio = [np.exp(value) for value in (rows["nodes"].estimate, rows["nodes"].low, rows["nodes"].high)]
    assert [float(cell) for cell in nodes.split(",")[3:6]] == pytest.approx(ratio, rel=1e-3)


BAD_TABLES = {  # rounds, method, options, settings, words
    "separation": (60, "glmm", {}, {}, "are no estimates"),
    "rounds that end too early": (2, "glmm", {}, {}, "rounds ended before the fit did"),
    "totals that end too early": (2, "lmm", {"totals": True}, {}, "rounds ended before the fit did"),
    "noise": (3, "lmm", {"totals": True}, {"user_noise": 0.01, "user_clip": 0.5}, "no standard error knows of it"),
    "nothing but noise": (2, "lmm", {"totals": True}, {"user_noise": 1e3}, "nothing is estimated"),
    "a constant target": (1, "lmm", {}, {}, "the target does not vary"),
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_where_the_fit_is_no_proper_one_there_is_no_interval_and_a_sentence_says_why(what):
    rounds, method, options, settings, words = BAD_TABLES[what]
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 2)).astype(np.float32)
    number = np.full(120, 3.5) if what == "a constant target" else x[:, 0] + draw.normal(size=120)
    classes = np.where(x[:, 0] + (what != "separation") * draw.normal(size=120) > 0, "yes", "no")
    task = "regression" if method == "lmm" else "classification"
    data = kinfed.Federation.from_arrays(x, number if method == "lmm" else classes, np.arange(120) % 6, task=task)
    result = kinfed.run(
        federation=data, algorithms={method: options}, model="mlr", rounds=rounds, seeds=(0,), participation=1.0,
        progress=False, accept="all", **settings,
    )  # fmt: skip
    fit = coefficients_of(result.run)
    assert words in " ".join(fit.sentences())
    assert "other columns determine" not in " ".join(fit.sentences())
    assert result.coefficients()[["se", "low", "high", "p"]].isna().all(axis=None)
    assert "nan" not in coefficient_table(fit).csv()
