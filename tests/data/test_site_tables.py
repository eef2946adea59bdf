"""Real tables by name: the target, what would give it away, and the honest split; on tiny files with their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from realdata import real_data

from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import make_federation
from kinfed.data.sources import SITE_TABLES, load_source
from kinfed.errors import DataError


def write(folder: Path, name: str, columns: dict[str, Any]) -> Path:
    (folder / name).mkdir()
    pq.write_table(pa.table(columns), folder / name / "train-00000-of-00001.parquet")
    return folder


def federation(name: str, folder: Path, seed: int = 0, **options: Any) -> Federation:
    return make_federation(load_source(name, folder, seed, options), "column", None, seed=seed)


def test_what_gives_the_target_away_is_left_out(tmp_path: Path) -> None:
    columns = {
        "client": ["va", "va", "cleveland", "cleveland"] * 3, "age": range(12), "sex": ["0", "1", "1", "0"] * 3,
        "chol": [None, 200, 210, 190] * 3, "num": [0, 3, 1, 0] * 3, "target": [0, 1, 1, 0] * 3,
    }  # fmt: skip
    data = federation("heart_disease", write(tmp_path, "heart_disease", columns))
    assert data.names == ["cleveland", "va"]
    assert data.preprocessing is not None
    assert data.preprocessing.columns == ["age", "sex", "chol"]
    assert data.class_names == ["0", "1"]
    assert load_source("heart_disease", tmp_path, 0, {"columns": "sex=skip", "examples": 8}).features.raw.shape[0] == 8


def test_patients_are_on_one_side_only(tmp_path: Path) -> None:
    patient = np.repeat(np.arange(40), 3)
    columns = {
        "client": np.where(np.arange(120) % 2, "Surgery", "unknown"), "encounter_id": range(120),
        "patient_nbr": patient,
        "diag_1": ["250.83"] * 60 + ["V57"] * 60, "readmitted": ["NO"] * 120, "readmitted_30d": np.arange(120) % 2,
        "age": ["[0-10)", "[10-20)", "[20-30)"] * 40,
    }  # fmt: skip
    data = federation("diabetes_130", write(tmp_path, "diabetes_130", columns))
    assert not set(patient[data.train.rows]) & set(patient[data.test.rows])
    assert len(data.test.rows) > 0
    other = federation("diabetes_130", tmp_path, seed=1)
    assert set(other.test.rows.tolist()) != set(data.test.rows.tolist())
    assert data.preprocessing is not None
    assert data.preprocessing.columns == ["diag_1", "age"]
    assert any("do not say which hospital" in note for note in data.notes)


def test_the_official_split_is_followed(tmp_path: Path) -> None:
    columns = {
        "client": ["Bachelors", "Doctorate"] * 6, "age": range(12), "education": ["Bachelors", "Doctorate"] * 6,
        "education-num": [13, 16] * 6, "fnlwgt": range(12), "official_split": ["train"] * 8 + ["test"] * 4,
        "label": [0, 1, 1, 0] * 3,
    }  # fmt: skip
    data = federation("adult", write(tmp_path, "adult", columns))
    assert sorted(data.test.rows.tolist()) == [8, 9, 10, 11]
    assert data.preprocessing is not None
    assert data.preprocessing.columns == ["age"]


def test_any_rows_may_be_drawn_in_place_of_the_own_split(tmp_path: Path) -> None:
    patients, time = np.repeat(["1", "2", "3"], 40), np.tile(np.arange(40.0), 3)
    columns = {"client": patients, "test_time": time, "jitter": time % 7, "motor_UPDRS": time, "total_UPDRS": time}
    folder, name = write(tmp_path, "parkinsons_telemonitoring", columns), "parkinsons_telemonitoring"
    own, drawn = (load_source(name, folder, 0, {"split": split}) for split in ("own", "rows"))
    assert own.is_test is not None
    assert own.is_test.tolist() == (time >= 30).tolist()
    assert drawn.is_test is None
    assert any("not by time" in note for note in drawn.notes)
    tests = [make_federation(drawn, "column", None, seed=seed).test.rows.tolist() for seed in (0, 1)]
    assert tests[0] != tests[1]
    few = [federation(name, folder, seed, sites=2).names for seed in (0, 1)]
    assert few[0] == few[1]
    assert len(few[0]) == 2


def test_the_split_of_a_benchmark_is_followed_where_it_is_asked_for(tmp_path: Path) -> None:
    fold = ["train", "train", "test", "train"] * 5
    columns = {
        "client": ["North", "South"] * 10, "age_at_index": [50, 61, 70, 48] * 5, "time_days": range(1, 21),
        "event": [0, 1] * 10,
        "flamby_fold": fold,
    }  # fmt: skip
    folder = write(tmp_path, "tcga_brca", columns)
    data = federation("tcga_brca", folder, split="published")
    assert sorted(data.test.rows.tolist()) == [place for place, part in enumerate(fold) if part == "test"]
    assert data.preprocessing is not None
    assert data.preprocessing.columns == ["age_at_index"]
    assert sorted(federation("tcga_brca", folder).test.rows.tolist()) != sorted(data.test.rows.tolist())
    write(tmp_path, "contraception", {"client": ["a"] * 4, "x": [1, 2, 1, 2], "label": [0, 1, 0, 1]})
    with pytest.raises(DataError, match="split=published is for adult, tcga_brca"):
        load_source("contraception", tmp_path, 0, {"split": "published"})


def test_files_that_are_another_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is it the table adult"):
        load_source("adult", write(tmp_path, "adult", {"client": ["a"], "label": [1]}))
    with pytest.raises(DataError, match=r"put train-\*\.parquet into .*contraception"):
        load_source("contraception", tmp_path)


def test_the_made_up_sites_say_so() -> None:
    data = federation("breast_cancer", Path())
    assert data.num_clients == 5
    assert int(data.train.count.sum() + data.test.count.sum()) == 569
    assert any("made up" in note for note in data.notes)
    assert data.class_names == ["benign", "malignant"]


def test_digits_are_dealt_to_post_offices() -> None:
    data = federation("post_offices", Path())
    assert data.num_clients == 8
    assert len(data.labels) == 1797
    assert data.class_names[3] == "digit 3"
    assert federation("post_offices", Path(), sites=3).num_clients == 3


@pytest.mark.parametrize("name", ["heart_disease", "wisdm_ar_v1", "contraception", "adult"])
def test_the_real_files_load(name: str) -> None:
    folder = real_data(name)
    data = federation(name, folder)
    clients = {"heart_disease": 4, "wisdm_ar_v1": 36, "contraception": 60, "adult": 16}
    assert data.num_clients == clients[name]
    assert data.preprocessing is not None
    assert not set(SITE_TABLES[name].leave_out) & set(data.preprocessing.columns)
