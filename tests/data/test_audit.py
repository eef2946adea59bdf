"""The audit: planted troubles are found and named, what cannot be meant is refused, and honest data are left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from realdata import real_data

import kinfed
from kinfed.config import make_config
from kinfed.core import storage
from kinfed.data import Finding, as_table, audited
from kinfed.data.audit.findings import CHECKS, accepted, refuse
from kinfed.data.partitions import make_federation
from kinfed.data.sources import SITE_TABLES, TableOptions, source_from_table
from kinfed.errors import ConfigError, DataError
from kinfed.runs import build_federation
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit
from kinfed.tabular.search import assign_folds

ROWS = 600
Table = dict[str, Any]
OPTIONS = {"client_column": "site", "label_column": "outcome"}


def honest() -> Table:
    """Five clinics with measurements, a category, gaps, and an outcome that they tell something about."""
    draw = np.random.default_rng(0)
    ill = draw.random(ROWS) < 0.4
    return {
        "site": [f"clinic {name}" for name in np.array(list("abcde"))[np.arange(ROWS) % 5]],
        "age": np.round(draw.normal(60, 9, ROWS) + 4 * ill, 1),
        "temperature": np.round(draw.normal(36.9, 0.6, ROWS) + 0.3 * ill, 2),
        "creatinine": np.where(draw.random(ROWS) < 0.1, np.nan, draw.lognormal(-0.1 + 0.2 * ill, 0.3, ROWS)),
        "ward": np.array(["north", "south", "west"])[draw.integers(0, 3, ROWS)],
        "outcome": np.where(ill, "ill", "well"),
    }


def findings_of(table: Table, **options: Any) -> list[Finding]:
    return audited(kinfed.Federation.from_table(table, **OPTIONS | options)).findings


def test_an_honest_table_has_no_findings() -> None:
    assert findings_of(honest()) == []


def test_a_table_whose_clients_are_dealt_is_looked_at_as_well() -> None:
    """Such clients have no names of their own; the table of one node is of this kind."""
    table = {name: column for name, column in honest().items() if name != "site"}
    source = source_from_table(as_table(table), TableOptions(label_column="outcome"), "table")
    assert audited(make_federation(source, "iid", 3)).findings == []
    misspelt_label(table)
    source = source_from_table(as_table(table), TableOptions(label_column="outcome"), "table")
    assert "label_spelling" in {finding.name for finding in audited(make_federation(source, "iid", 3)).findings}


# Each changes an honest table, and may give it options.


def no_test_rows(table: Table) -> dict[str, Any]:
    table["part"] = ["train"] * ROWS
    return {"split_column": "part"}


def copied_test_rows(table: Table) -> dict[str, Any]:
    """Three quarters of the test rows are training rows."""
    part = np.where(np.arange(ROWS) < ROWS * 4 // 5, "train", "test")
    for name in table:
        column = np.array(table[name])
        column[ROWS * 4 // 5 : ROWS * 19 // 20] = column[: ROWS * 3 // 20]
        table[name] = column
    table["part"] = part
    return {"split_column": "part"}


def class_only_in_test(table: Table) -> dict[str, Any]:
    table["part"] = np.where(np.arange(ROWS) < ROWS * 4 // 5, "train", "test")
    table["outcome"] = np.where(np.arange(ROWS) >= ROWS - 20, "dead", table["outcome"])
    return {"split_column": "part"}


def names_in_two_forms_of_unicode(table: Table) -> dict[str, Any]:
    forms = ["Besan\u00e7on", "Besanc\u0327on"]
    table["site"] = [forms[row % 2] if name == "clinic a" else name for row, name in enumerate(table["site"])]
    return {}


def names_in_two_cases(table: Table) -> dict[str, Any]:
    table["site"] = ["Clinic A" if name == "clinic a" and row % 2 else name for row, name in enumerate(table["site"])]
    return {}


def copied_label(table: Table) -> dict[str, Any]:
    table["code"] = np.where(table["outcome"] == "ill", 7, 3)
    return {}


def filled_after_the_outcome(table: Table) -> dict[str, Any]:
    days = np.arange(ROWS).astype("datetime64[D]")
    table["discharged"] = np.where(table["outcome"] == "ill", days, np.datetime64("NaT"))
    return {}


def almost_filled_after_the_outcome(table: Table) -> dict[str, Any]:
    """Two of the ill have no date."""
    filled_after_the_outcome(table)
    ill = np.flatnonzero(table["outcome"] == "ill")
    table["discharged"][ill[[5, 50]]] = np.datetime64("NaT")
    return {}


def severity_of_the_ill(table: Table) -> dict[str, Any]:
    table["severity"] = np.where(table["outcome"] == "ill", np.arange(ROWS) % 4 + 1, 0)
    return {}


def case_number_with_duplicates(table: Table) -> dict[str, Any]:
    numbers = np.r_[np.arange(1000, 1570), np.arange(1000, 1030)]
    table["fall"] = np.random.default_rng(1).permutation(numbers)
    return {}


def repeated_patients(table: Table) -> dict[str, Any]:
    table["patient"] = [f"p{row // 4}" for row in np.random.default_rng(1).permutation(ROWS)]
    return {}


def rows_twice(table: Table) -> dict[str, Any]:
    for name in table:
        table[name] = np.concatenate([np.array(table[name]), np.array(table[name])[:60]])
    return {}


def rounded_rows_twice(table: Table) -> dict[str, Any]:
    """No column has mostly values of its own."""
    rows_twice(table)
    for name in ("temperature", "creatinine"):
        table[name] = np.round(np.array(table[name], float), 1)
    return {}


def visits_in_time(table: Table) -> dict[str, Any]:
    table["visit"] = np.datetime64("2020-01-01") + np.arange(ROWS)
    return {}


def in_fahrenheit(table: Table) -> dict[str, Any]:
    mine = np.array([name == "clinic c" for name in table["site"]])
    table["temperature"] = np.where(mine, 32 + 1.8 * table["temperature"], table["temperature"])
    return {}


def in_micromoles(table: Table) -> dict[str, Any]:
    mine = np.array([name == "clinic c" for name in table["site"]])
    table["creatinine"] = np.where(mine, 88.4 * table["creatinine"], table["creatinine"])
    return {}


def column_under_two_names(table: Table) -> dict[str, Any]:
    mine = np.array([name == "clinic c" for name in table["site"]])
    table["Age"] = np.where(mine, table["age"], np.nan)
    table["age"] = np.where(mine, np.nan, table["age"])
    return {}


def misspelt_label(table: Table) -> dict[str, Any]:
    table["outcome"] = np.where(table["outcome"] == "ill", "malignant", "benign").astype(object)
    table["outcome"][np.flatnonzero(table["outcome"] == "malignant")[:4]] = "malignent"
    return {}


def label_of_a_site(table: Table) -> dict[str, Any]:
    mine = np.array([name == "clinic c" for name in table["site"]])
    table["outcome"] = np.where(table["outcome"] == "ill", np.where(mine, "malignent", "malignant"), "benign")
    return {}


def site_of_one_class(table: Table) -> dict[str, Any]:
    mine = np.array([name == "clinic c" for name in table["site"]])
    table["outcome"] = np.where(mine, "well", table["outcome"])
    return {}


def wrongly_decoded(table: Table) -> dict[str, Any]:
    table["ward"] = np.where(table["ward"] == "north", "K\u00c3\u00b6ln", table["ward"])
    return {}


PLANTED: dict[Callable[[Table], dict[str, Any]], tuple[str, bool, str]] = {
    no_test_rows: ("split", True, "part of the table marks no row for testing"),
    copied_test_rows: ("test_copies", True, "90 of 120 test rows are equal to a training row"),
    class_only_in_test: ("test_classes", True, r"in no training row: dead \(20\) row"),
    names_in_two_forms_of_unicode: ("client_names", True, "their form in Unicode"),
    names_in_two_cases: ("client_names", True, "letter case: 'Clinic A' and 'clinic a'"),
    copied_label: ("label_copy", True, "column code says the label itself.*--columns code=skip"),
    filled_after_the_outcome: ("label_copy", True, "column discharged says the label itself"),
    almost_filled_after_the_outcome: ("leak", False, "tells almost all of the target by itself: discharged"),
    severity_of_the_ill: ("leak", False, "by itself: severity"),
    case_number_with_duplicates: ("identifier", False, "used as numbers: fall. .*--columns fall=skip"),
    repeated_patients: ("persons", False, "test rows are of a patient with training rows.*--person-column patient"),
    rows_twice: ("duplicates", False, "60 of 660 rows occur a second time"),
    rounded_rows_twice: ("duplicates", False, "6[0-9] of 660 rows occur a second time"),
    visits_in_time: ("time", False, r"rows have dates \(visit\).*\(--order-column visit\)"),
    in_fahrenheit: ("units", False, r"temperature at clinic c: .*\(median 98.*, elsewhere 3"),
    in_micromoles: ("units", False, r"creatinine at clinic c: about [89]\d times"),
    column_under_two_names: ("column_names", True, "columns 'age' and 'Age'.*one column under two names"),
    label_of_a_site: ("label_spelling", False, "'malignant' .* and 'malignent' .* differ by a letter"),
    misspelt_label: ("label_spelling", False, "'malignant' .* and 'malignent' .* differ by a letter"),
    site_of_one_class: ("site_classes", False, "ill at 1"),
    wrongly_decoded: ("encoding", False, "'KÃ¶ln'"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_trouble_is_found_and_nothing_else(plant: Callable[[Table], dict[str, Any]]) -> None:
    name, refused, text = PLANTED[plant]
    table = honest()
    findings = findings_of(table, **plant(table))
    also = {"time"} if "discharged" in table else {"site_classes"} if plant is label_of_a_site else set()
    expected = {name} | also  # a date is one of time, too
    assert {finding.name for finding in findings} == expected
    finding = next(finding for finding in findings if finding.name == name)
    assert finding.refused == refused
    assert re.search(text, finding.text), finding.text
    if refused:
        with pytest.raises(DataError, match=rf"--accept .*{name}"):
            refuse(findings)
    refuse(findings, name)


def test_all_that_is_looked_for_is_planted_somewhere() -> None:
    elsewhere = {"small_clients"}  # tests/data/test_table.py
    assert {name for name, _, _ in PLANTED.values()} | elsewhere == CHECKS.keys()


def test_names_of_findings_that_nobody_knows_are_refused() -> None:
    assert accepted(" units, leak ") == {"units", "leak"}
    with pytest.raises(ConfigError, match="did you mean units"):
        accepted("unit")
    refuse([Finding("split", "no.", refused=True)], "all")


@pytest.mark.parametrize("name", [*SITE_TABLES, "breast_cancer", "digits", "cifar100_subset"])
def test_nothing_that_is_real_is_refused_and_the_few_notes_are_known(name: str) -> None:
    """A patient of parkinsons_telemonitoring has ten times as much noise in the voice (NHR) as any other: worth the
    question. Some sites do lack classes. Three patients, some
    reviews and 61 stretches of movement occur twice, and some reviews have damaged letters."""
    ships = name in ("breast_cancer", "digits")
    place = None if ships else real_data(name)
    data = build_federation(make_config(None, {"dataset": name, "data": place}), 0)
    assert not [finding.text for finding in audited(data).findings if finding.refused]
    notes = {"parkinsons_telemonitoring": ["units"], "mdsd_amazon4": ["encoding", "duplicates"]}
    notes |= {table: ["site_classes"] for table in ("contraception", "adult")}
    notes |= {"wisdm_ar_v1": ["site_classes", "duplicates"], "heart_disease": ["duplicates"]}
    assert [finding.name for finding in audited(data).findings] == notes.get(name, [])
    assert all(len(finding.text) < 500 for finding in audited(data).findings)  # no whole reviews


def test_chance_makes_equal_rows_and_copies_are_more_than_that() -> None:
    """Two columns with three values each: nearly every test row has an equal one in training, as training rows have."""
    draw = np.random.default_rng(3)
    x, y = draw.integers(0, 3, (400, 2)), draw.integers(0, 2, 400)
    data = kinfed.Federation.from_arrays(x, y, np.arange(400) % 4)
    assert audited(data).findings == []


def test_rounded_numbers_that_coincide_are_no_duplicates() -> None:
    """One column of 400 rows with one decimal: 47 rows have an equal one."""
    draw = np.random.default_rng(0)
    x, y = np.round(draw.normal(60, 9, (400, 1)), 1), draw.integers(0, 2, 400)
    assert audited(kinfed.Federation.from_arrays(x, y, np.arange(400) % 3)).findings == []


def test_wide_examples_that_differ_in_one_number_are_no_copies() -> None:
    draw = np.random.default_rng(3)
    x = np.repeat(draw.normal(size=(100, 1000)), 2, 0).astype(np.float32)
    x[1::2, 501] += 1  # no number that is looked at first
    data = kinfed.Federation.from_arrays(x, np.arange(200) // 2 % 2, np.zeros(200), test_rows=np.arange(200) % 2 == 1)
    assert audited(data).findings == []
    x[1::2, 501] -= 1
    data = kinfed.Federation.from_arrays(x, np.arange(200) // 2 % 2, np.zeros(200), test_rows=np.arange(200) % 2 == 1)
    assert [finding.name for finding in audited(data).findings] == ["test_copies"]


def test_test_labels_change_no_other_finding() -> None:
    """Whatever test rows say of the outcome: leaks, units and the rest are read from training rows."""
    table = honest() | {"part": np.where(np.arange(ROWS) % 4 == 0, "test", "train")}
    table["hint"] = np.where(table["outcome"] == "ill", 1, 0)
    table["hint"][np.arange(ROWS) % 297 == 1] ^= 1
    before = findings_of(table, split_column="part")
    outcome = np.array(table["outcome"])
    outcome[::4] = np.where(outcome[::4] == "ill", "well", "ill")
    assert [finding.name for finding in before] == ["leak"]
    assert findings_of(table | {"outcome": outcome}, split_column="part") == before


# Runs, fits and tables.


def test_a_run_refuses_before_it_leaves_a_folder_and_goes_on_where_the_finding_is_accepted(tmp_path: Path) -> None:
    table = honest()
    copied_label(table)
    settings: dict[str, Any] = {
        "algorithms": "local", "rounds": 1, "seeds": (0,), "model": "mlr", "progress": False,
        "federation": kinfed.Federation.from_table(table, **OPTIONS),
    }  # fmt: skip
    with pytest.raises(DataError, match=r"column code says the label itself.*--accept label_copy"):
        kinfed.run(**settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    kinfed.run(**settings, out=tmp_path / "run", accept="label_copy")
    record = storage.read_json(tmp_path / "run" / "audit.json")
    assert [finding["name"] for finding in record["findings"]["0"]] == ["label_copy"]
    assert record["accepted"] == ["label_copy"]
    assert record["checks"] == CHECKS
    assert "audit, label_copy: column code" in kinfed.load(tmp_path / "run").report().read_text()
    kinfed.run(**settings, out=tmp_path / "run", accept="label_copy", resume=True)
    kinfed.run(**settings, out=tmp_path / "run", accept="all", resume=True)  # it is no part of a run's identity


def test_settings_that_a_federation_replaces_are_refused() -> None:
    data = kinfed.Federation.from_table(honest(), **OPTIONS)
    for setting in ({"partition": "iid"}, {"clients": 3}, {"dataset": "mnist"}, {"label_column": "age"}):
        with pytest.raises(ConfigError, match=f"{next(iter(setting))}: the federation that is given has its data"):
            kinfed.run(federation=data, algorithms="local", rounds=1, progress=False, **setting)


def test_persons_stay_in_one_part_also_in_the_folds_of_a_fit() -> None:
    table = honest()
    repeated_patients(table)
    assert findings_of(table, person_column="patient") == []
    source = source_from_table(as_table(table), TableOptions(**OPTIONS, person_column="patient"), "t")
    fit = SiteFit(source, FitSettings())
    assert source.persons is not None
    for client in range(5):
        train, test = (set(source.persons[split[client]].tolist()) for split in (fit.data.train, fit.data.test))
        assert not train & test
        assert 0.2 < len(test) / len(train | test) < 0.3
    fold = assign_folds(fit.data, 3, 0)
    rows = torch.stack([fit.data.train.owner, source.persons[fit.data.train.rows], fold])
    assert torch.unique(rows, dim=1).shape[1] == torch.unique(rows[:2], dim=1).shape[1]
    assert {int(f) for f in fold} == {0, 1, 2}
    with pytest.raises(ConfigError, match="person_column decides which rows test"):
        findings_of(table | {"part": ["train"] * ROWS}, person_column="patient", split_column="part")


def test_tables_in_other_encodings_are_read_where_these_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe,ort,y\n1,Köln,ja\n2,Köln,nein\n3,Fürth,ja\n4,Fürth,nein\n".encode("latin-1"))
    with pytest.raises(DataError, match="--encoding"):
        kinfed.Federation.from_table(path, client_column="ort", label_column="y")
    data = kinfed.Federation.from_table(path, client_column="ort", label_column="y", encoding="latin-1")
    assert sorted(data.names) == ["Fürth", "Köln"]
    assert data.preprocessing is not None
    assert data.preprocessing.columns == ["größe"]
    with pytest.raises(ConfigError, match="knows no encoding 'lat'"):
        kinfed.Federation.from_table(path, client_column="ort", label_column="y", encoding="lat")


def test_a_saved_federation_keeps_its_findings(tmp_path: Path) -> None:
    table = honest()
    copied_label(table)
    data = kinfed.Federation.from_table(table, **OPTIONS)
    data.save(tmp_path / "saved")
    assert kinfed.Federation.load(tmp_path / "saved").findings == data.findings


# Leaks, closer.


def names_of_leaks(columns: Table, target: Any) -> dict[str, str]:
    table = {"site": ["a", "b"] * (len(target) // 2), "outcome": target, **columns}
    return {finding.name: finding.text for finding in findings_of(table) if finding.name in ("leak", "label_copy")}


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_column_that_follows_from_the_outcome_is_named(draw: np.random.Generator) -> None:
    ill = draw.random(ROWS) < 0.3
    severity = np.where(ill, draw.integers(1, 5, ROWS), 0)  # of the ill alone
    blood = ill + draw.normal(size=ROWS)
    code = np.where(ill, draw.choice(["I20", "I21"], ROWS), draw.choice(["Z00", "Z01"], ROWS))
    columns = {"severity": severity, "blood": blood, "code": code, "late": ill * 100.0 + draw.normal(size=ROWS)}
    text = names_of_leaks(columns, np.where(ill, "ill", "well"))["leak"]
    assert "by itself: severity, code, late. " in text
    assert "--columns severity=skip,code=skip,late=skip" in text


def test_good_columns_rare_classes_and_few_rows_are_no_leaks(draw: np.random.Generator) -> None:
    rare = draw.random(ROWS) < 0.01
    assert names_of_leaks({"noise": draw.normal(size=ROWS)}, np.where(rare, "yes", "no")) == {}  # 99 % are "no" anyway
    ill = draw.random(ROWS) < 0.5
    assert names_of_leaks({"good": 4 * ill + draw.normal(size=ROWS)}, np.where(ill, "ill", "well")) == {}
    few = np.array([False, True] * 20)
    assert names_of_leaks({"copy": few * 1.0 + 0.1}, np.where(few, "ill", "well")) == {}


def test_numbers_that_follow_from_the_target(draw: np.random.Generator) -> None:
    score = draw.normal(50, 10, ROWS)
    columns = {"other_scale": 3 * score + draw.normal(size=ROWS), "half": score + draw.normal(0, 10, ROWS)}
    assert "by itself: other_scale. " in names_of_leaks(columns, score)["leak"]
    assert "column dollars says the label itself" in names_of_leaks({"dollars": 1.1 * score - 3}, score)["label_copy"]
