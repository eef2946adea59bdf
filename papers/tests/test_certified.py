"""Studies of what fits print: tables in halves, shuffled targets, losses by hand, and simulations that tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import kinfed
from kinfed_papers.studies.certified import (
    bounds,
    covered,
    expectations,
    halves,
    losses,
    on_table,
    permuted,
    rows_of,
    watches,
)
from tests.realdata import real_data

TABLE = pa.table({
    "client": ["a"] * 40 + ["b"] * 20 + ["c"] * 5, "x": [float(i * 7 % 13) for i in range(65)],
    "y": [str(i * 7 % 13 > 6) for i in range(65)],
})  # fmt: skip


def test_halves_share_no_row_and_leave_small_sites_out() -> None:
    numbered = TABLE.append_column("row", pa.array(range(65)))
    first, fresh = halves(numbered, 3)
    assert not set(first["row"].to_pylist()) & set(fresh["row"].to_pylist())
    assert [first["client"].to_pylist().count(site) for site in "abc"] == [20, 10, 0]
    assert fresh.num_rows == 30


def test_shuffled_targets_keep_their_counts_and_nothing_else_moves() -> None:
    null = permuted(TABLE, "y", 1)
    assert sorted(null["y"].to_pylist()) == sorted(TABLE["y"].to_pylist())
    assert null["y"].to_pylist() != TABLE["y"].to_pylist()
    assert null["x"].equals(TABLE["x"])


def test_losses_are_those_of_the_probabilities_and_a_class_nobody_knew_is_impossible() -> None:
    federation = kinfed.Federation.from_table(TABLE, client_column="client", label_column="y")
    run = kinfed.run(federation=federation, algorithms="local", model="mlr", rounds=2, seeds=(0,), participation=1.0)
    model = run.personal_model("a", "local").with_sets({0.9: 1.0})
    p = model.predict_proba(TABLE)
    truth = [model.classes.index(one) for one in TABLE["y"].to_pylist()]
    np.testing.assert_allclose(losses(model, TABLE, "y"), -np.log(p[np.arange(65), truth]), rtol=1e-5)
    assert covered(model, TABLE, "y") == 1.0
    unknown = TABLE.set_column(2, "y", pa.array(["perhaps"] * 65))
    assert losses(model, unknown, "y") == pytest.approx(-np.log(1e-6))


def test_simulations_tell_formulas_apart() -> None:
    misses = bounds((40,), 60)
    before, now = (misses[row]["miss"][40] for row in ("accuracy, half a row at least (before)",
                                                       "accuracy, two pseudo-rows"))  # fmt: skip
    assert now < 0.1 < before
    for row in ("AUROC, bootstrap, t of the rarer class", "mean gain over sites, Student's t"):
        assert max(misses[row]["miss"][40], misses[row]["one_sided"][40]) < 0.15
    drift = expectations((40,), 6)
    rows = (f"drift of 2 points: {way}" for way in ("together", "with test rows"))
    raw, corrected = (drift[row]["excess"][40] for row in rows)
    assert raw > 0.01 > abs(corrected) / 2
    alarms = watches((40,), 20)
    assert alarms["e-process"]["false_alarms"][40] <= alarms["a t test at every look"]["false_alarms"][40]


def test_a_real_table_is_judged_by_fresh_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINFED_DATA", str(real_data("heart_disease")))
    quick = {"algorithms": "fedavg", "models": "mlr", "trials": 1, "rounds": 2, "folds": 2}
    monkeypatch.setattr("kinfed_papers.studies.certified.FIT", quick)
    measured = on_table("heart_disease", 300)((40,), {})
    assert set(measured) == {"chosen", "safe", "certified"}
    assert 0.5 < measured["safe"]["coverage"][40] <= 1
    assert measured["certified"]["worst"][40] >= measured["chosen"]["worst"][40] - 1e-12


def test_the_target_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table whose targets leak into each other leaves all of them out but the one that is predicted."""
    monkeypatch.setenv("KINFED_DATA", str(real_data("parkinsons_telemonitoring")))
    names = rows_of("parkinsons_telemonitoring", 50, 0).column_names
    assert "total_UPDRS" in names
    assert "motor_UPDRS" not in names


def test_a_table_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINFED_DATA", str(tmp_path))
    with pytest.raises(kinfed.errors.DataError, match="heart_disease is not in the data folder"):
        on_table("heart_disease", 100)((40,), {})
