"""What sites are handed: shares, files, prediction sets, and figures that no row has helped to make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import kinfed
from kinfed.errors import ConfigError
from kinfed.serving.pipeline import ModelPipeline
from kinfed.tabular.decision import within_reach
from kinfed.tabular.fit_result import FitResult
from kinfed.tabular.handover import LEVELS, OutputsOfAll, residual_variance, safe_handover
from kinfed.tabular.portfolio import ALONE, ONE_MODEL
from kinfed.tabular.site_sentences import Wording
from tests.command_line import kinfed as command
from tests.tabular.conftest import COLUMNS, SMALL

Table = dict[str, list[Any]]
TWO_KINDS = SMALL | {"models": "mlr,mlp"}


@pytest.fixture(scope="module")
def folder(table: Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handover") / "fitted"
    kinfed.fit(table, **COLUMNS, **TWO_KINDS, out=folder)
    return folder


def test_a_file_holds_the_mixture_of_the_models_that_were_fitted(folder: Path, table: Table) -> None:
    result = FitResult.read(folder)
    runs = {one.name: folder / "runs" / one.run for one in result.contenders if one.run}
    for site in result.sites:
        model = result.model(site.site)
        assert sum(site.shares.values()) == pytest.approx(1)
        assert len(site.shares) > 1
        mixed = 0.0
        for name, share in site.shares.items():
            client = None if name == ONE_MODEL else site.site
            part = kinfed.serving.model_of_run(runs[name], client, name)
            mixed = mixed + share * part.predict_proba(table)
        np.testing.assert_allclose(model.predict_proba(table), mixed, atol=1e-6)


def test_without_safety_a_site_takes_what_was_chosen_and_certified_only_what_is_shown(table: Table) -> None:
    chosen, certified = (kinfed.fit(table, **COLUMNS, **SMALL | {"deploy": way}) for way in ("chosen", "certified"))
    for site, other in zip(chosen.sites, certified.sites, strict=True):
        assert site.shares == {site.chosen: 1.0}
        assert site.gain == site.gain_chosen
        assert other.shares == {other.chosen if other.gain_chosen.is_shown else ALONE: 1.0}
        assert site.most_it_costs is None
    assert not Wording(chosen).insurance()


def test_test_rows_set_shares_and_nothing_else(table: Table) -> None:
    marks = ["test" if place % 4 == 0 else "train" for place in range(len(table["site"]))]
    turned = {"ill": "well", "well": "ill"}
    labels = [turned[y] if m == "test" else y for y, m in zip(table["outcome"], marks, strict=True)]
    first, other = (
        kinfed.fit({**table, "part": marks, "outcome": outcome}, **COLUMNS, split_column="part", **SMALL)
        for outcome in (table["outcome"], labels)
    )
    assert first.contenders == other.contenders
    assert [(site.chosen, site.expected) for site in first.sites] == [(s.chosen, s.expected) for s in other.sites]
    assert [site.shares for site in first.sites] != [site.shares for site in other.sites]


def planted(alone: float, other: float, rows: int, sites: int = 40) -> tuple[OutputsOfAll, OutputsOfAll, Any]:
    """Two contenders that give the truth, class 1, these probabilities up to noise; validation says nothing."""
    draw = np.random.default_rng(0)
    p = np.clip(np.array([alone, other])[:, None] + 0.1 * draw.normal(size=(2, sites * rows)), 0.02, 0.98)
    owner = np.repeat(np.arange(sites), rows)
    outputs = np.stack([1 - p, p], 2)
    data = kinfed.Federation.from_arrays(
        np.zeros((sites, 1)), [0, 1] * (sites // 2), [f"s{k:02}" for k in range(sites)]
    )
    nothing = OutputsOfAll(outputs[:, :0], np.zeros(0, np.int64), owner[:0])
    return nothing, OutputsOfAll(outputs, np.ones(sites * rows, np.int64), owner), data


@pytest.mark.parametrize(("alone", "other"), [(0.8, 0.4), (0.4, 0.8), (0.6, 0.6)])
def test_a_safe_mixture_follows_the_better_model_and_keeps_its_promise(alone: float, other: float) -> None:
    validated, test, data = planted(alone, other, 30)
    names, chosen = [ALONE, "ditto"], ["ditto"] * 40
    handed = safe_handover(names, chosen, validated, test, data, 0, 0.5)
    own = handed.shares[:, 0].mean()
    assert (own > 0.8) if alone > other else (own < 0.25) if alone < other else (0.3 < own < 0.9)
    # Log loss of each row before it counted, against that of learning alone: at most log 2 per site, on its 15 rows.
    p = np.exp(handed.outputs.numpy())
    excess = np.bincount(test.owner, weights=np.log(test.outputs[0, :, 1]) - np.log(p[:, 1] / p.sum(1)))
    assert excess.mean() <= np.log(2) * 2
    assert handed.most_it_costs == pytest.approx([np.log(2) / 16] * 40)


def numbers(errors: Any, unit: float = 1.0, rows: int = 24) -> tuple[OutputsOfAll, OutputsOfAll, Any]:
    """Three contenders of two sites whose predictions are off by normal errors of these deviations [2, 3]."""
    draw, owner = np.random.default_rng(0), np.repeat([0, 1], rows)
    truth = draw.normal(size=2 * rows)
    off = np.asarray(errors)[owner].T * draw.normal(size=(3, 2 * rows))
    data = kinfed.Federation.from_arrays(np.zeros((2 * rows, 1)), unit * truth, owner, task="regression")
    reach = (-20 * unit, 20 * unit)
    half = np.arange(2 * rows) % 2 == 1
    variance = residual_variance(
        torch.from_numpy(unit * (truth + off[0]))[:, None], data, torch.arange(2 * rows), torch.from_numpy(owner)
    )
    validated, test = (
        OutputsOfAll(unit * (truth + off)[:, part, None], unit * truth[part], owner[part], None, variance, reach)
        for part in (half, ~half)
    )
    return validated, test, data


def test_a_model_that_diverged_has_no_part_in_a_mixture_and_tells_nothing_of_other_sites() -> None:
    """Alone ran away at the second site, the third contender at both: a share of a thousandth of it would cost all."""
    names, chosen = [ALONE, ONE_MODEL, "ditto"], [ONE_MODEL, ONE_MODEL]
    handed = safe_handover(names, chosen, *numbers([[1, 0.1, 1e30], [1e18, 0.1, np.inf]]), 0, 0.5)
    calm = safe_handover(names, chosen, *numbers([[1, 0.1, 1e30], [1, 0.1, 1e30]]), 0, 0.5)
    assert handed.shares[:, 2].tolist() == [0, 0]
    assert handed.shares[1].tolist() == pytest.approx([0, 1, 0])
    assert handed.shares[0] == pytest.approx(calm.shares[0], abs=0.03)
    assert [cost is None for cost in handed.most_it_costs] == [False, True]
    assert bool(handed.outputs.abs().max() < 5)


def test_shares_know_no_unit() -> None:
    names, chosen, errors = [ALONE, ONE_MODEL, "ditto"], [ONE_MODEL] * 2, [[0.5, 0.3, 0.4], [0.2, 0.6, 0.9]]
    shares = [safe_handover(names, chosen, *numbers(errors, unit), 0, 0.5).shares for unit in (1e-6, 1.0, 1e6)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-9)
    assert shares[2] == pytest.approx(shares[1], abs=1e-9)


def test_a_model_that_diverged_at_one_site_is_no_farther_off_there_than_a_prediction_can_be() -> None:
    outputs = torch.tensor([[1e30], [-1e30], [torch.nan], [0.5]], dtype=torch.float64)
    problem = replace(kinfed.data.Problem.of_numbers(), mean=2.0, scale=0.5)
    assert within_reach(outputs, problem).flatten().tolist() == [12.0, -8.0, 12.0, 0.5]
    assert bool(within_reach(outputs, kinfed.data.Problem.of_classes(2)).isnan().any())


def test_sets_hold_about_as_many_rows_as_they_say_and_the_likeliest_class_always(folder: Path, table: Table) -> None:
    validated, test, data = planted(0.7, 0.7, 40)
    handed = safe_handover([ALONE, "ditto"], ["ditto"] * 40, validated, test, data, 0, 0.5)
    assert np.mean([one.covered[0.9] for one in handed.sets]) == pytest.approx(0.9, abs=0.04)
    model = ModelPipeline.read(folder / "models" / "sites" / "north.safetensors")
    sizes = [len(one) for one in model.predictions(table, level=0.9).sets]
    smaller = [len(one) for one in model.predictions(table, level=0.5).sets]
    assert min(sizes) >= 1
    assert sum(smaller) <= sum(sizes)
    assert set(json.loads(model.about["sets"])) == {f"{level:g}" for level in LEVELS}
    with pytest.raises(ConfigError, match=r"it has 0\.5, 0\.6"):
        model.predictions(table, level=0.123)


def test_sets_are_predicted_on_the_command_line_for_classes_and_numbers(
    folder: Path, table: Table, tmp_path: Path
) -> None:
    pq.write_table(pa.table(table), tmp_path / "new.parquet")
    done = command("predict", "new.parquet", "--run", folder, "--client-column", "site", "--set", "0.9", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "row,prediction,probability,set,p_ill,p_well", done.stderr
    assert {line.split(",")[3] for line in done.stdout.splitlines()[1:]} <= {"ill", "well", "ill | well"}
    numbers = {**table, "outcome": [100 * dose for dose in table["dose"]]}
    kinfed.fit(numbers, **COLUMNS, **SMALL | {"metric": "rmse"}, out=tmp_path / "numbers")
    asked = ("predict", "new.parquet", "--run", tmp_path / "numbers", "--client", "north", "--set", "0.8")
    lines = command(*asked, cwd=tmp_path).stdout.splitlines()
    assert lines[0] == "row,prediction,low,high"
    _, value, low, high = map(float, lines[1].split(","))
    assert low < value < high
    assert high - value == pytest.approx(value - low, rel=1e-3)
    refused = command("predict", "new.parquet", "--run", folder, "--client", "north", "--set", "0.42", cwd=tmp_path)
    assert "prediction sets of level 0.42 are not in this model's file" in refused.stderr


def test_a_mixture_of_two_kinds_of_model_is_exported(folder: Path, table: Table, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    done = command("export", folder, "--client", "lake", "--onnx", "--out", tmp_path / "lake.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(tmp_path / "lake.onnx")
    rows = {
        "age": np.array([[np.nan if v is None else v] for v in table["age"]], np.float64),
        "dose": np.array([[v] for v in table["dose"]], np.float64),
        "group": np.array([[v] for v in table["group"]], object),
    }
    (p,) = session.run(["probabilities"], rows)
    threshold = json.loads(session.get_modelmeta().custom_metadata_map["sets"])["0.9"]
    inside = (1 - p <= threshold) | (p == p.max(1, keepdims=True))
    sets = FitResult.read(folder).model("lake").predictions(table, level=0.9).sets
    assert [[name for name, one in zip(("ill", "well"), row, strict=True) if one] for row in inside] == sets
    np.testing.assert_allclose(p, FitResult.read(folder).model("lake").predict_proba(table), atol=1e-5)


def test_calibration_of_a_site_is_that_of_the_rows_it_is_judged_on(folder: Path) -> None:
    result = FitResult.read(folder)
    north = result.site("north").calibration
    assert north is not None
    rows = np.array([one[3] for one in north.bins])
    assert rows.sum() == result.site("north").test_rows
    predicted, true = (np.average([one[place] for one in north.bins], weights=rows) for place in (0, 1))
    assert (predicted, true - predicted) == pytest.approx((north.predicted, north.gap.value))
    assert "It gives class well" in Wording(result).calibration(result.site("north"))
    assert result.site("lake").calibration is None or len(result.site("lake").calibration.bins) == 1  # 4 test rows
    assert '<svg viewBox="0 0 150 150"' in (folder / "fit.html").read_text()
