"""What a target column is: the rule, what it says, and how it is overridden."""

import json

import numpy as np
import pytest
import torch

from kinfed.data.examples.problem import Problem
from kinfed.data.examples.target import FEW_VALUES, read_target
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["yes", "no", "yes"], "binary"),
        ([True, False], "binary"),
        (["a", "b", "c"], "multiclass"),
        ([1.5, 2.5], "binary"),
        (list(range(FEW_VALUES)), "multiclass"),
        ([float(v) for v in range(FEW_VALUES)], "multiclass"),
        (list(range(FEW_VALUES + 1)), "regression"),
        ([0.5, 1.0, 2.0], "regression"),
    ],
)
def test_the_rule(values, kind):
    target = read_target(values, "column y")
    assert target.problem.kind == kind
    assert target.labels.is_floating_point() == (kind == "regression")
    assert target.note.startswith("column y holds ")


def test_the_rule_is_overridden_and_says_how():
    grades = [1, 2, 3, 4, 5]
    assert "--task regression" in read_target(grades, "y").note
    assert read_target(grades, "y", "regression").labels.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    ages = list(range(30))
    assert "--task classification" in read_target(ages, "y").note
    assert read_target(ages, "y", "classification").problem.num_classes == 30
    with pytest.raises(DataError, match="should hold numbers"):
        read_target(["a", "b"], "y", "regression")
    with pytest.raises(DataError, match="missing or infinite"):
        read_target([1.5, 2.5, 3.5, np.nan], "y")
    with pytest.raises(ConfigError, match="task is one of"):
        read_target(grades, "y", "ranking")


def test_numbers_are_standardized_by_training_rows_and_restored():
    y = np.array([10.0, 20.0, 30.5, 1000.0])
    f = Federation.from_arrays(np.zeros((4, 1)), y, ["a"] * 4, test_rows=[False, False, False, True])
    assert f.problem.mean == pytest.approx(y[:3].mean())
    assert f.problem.scale == pytest.approx(y[:3].std())
    assert f.targets.dtype == torch.float32
    assert f.problem.restored(f.targets.double()).numpy() == pytest.approx(y, rel=1e-6)
    assert f.labels.tolist() == y.tolist()
    batch = next(iter(f.cohort(torch.tensor([0]), 0, 1).test.in_order()))[1]
    assert batch.y.tolist() == f.targets[3:].tolist() or batch.y[0].tolist() == f.targets[3:].tolist()
    assert Problem.of_numbers([7.0, 7.0]).scale == 1.0, "a constant target keeps its unit"


def test_a_regression_survives_the_disk_and_is_part_of_its_identity(tmp_path):
    f = Federation.from_arrays(np.zeros((4, 1)), [1.5, 2.5, 3.0, 9.0], list("aabb"))
    f.save(tmp_path / "f")
    again = Federation.load(tmp_path / "f")
    assert again.problem == f.problem
    assert again.digest() == f.digest()
    assert Problem.from_json(json.loads(json.dumps(f.problem.to_json()))) == f.problem
    from dataclasses import replace

    assert replace(f, problem=replace(f.problem, mean=f.problem.mean + 1)).digest() != f.digest()


def test_tables_with_numbers_are_regressions_and_partitions_by_class_refuse_them(tmp_path):
    table = tmp_path / "t.csv"
    lines = [f"{k % 3},{k % 7},{10 + k * 0.5}" for k in range(60)]
    table.write_text("\n".join(["site,x,progress", *lines]))
    source = load_source(str(table), options={"client_column": "site", "label_column": "progress"})
    federation = make_federation(source, "column", None)
    assert federation.problem.kind == "regression"
    assert any("column progress" in note and "--task classification" in note for note in federation.notes)
    with pytest.raises(ConfigError, match="by class"):
        make_federation(source, "dirichlet", 4)
    with pytest.raises(DataError, match="should hold classes"):
        load_source(str(table), options={"label_column": "progress", "task": "classification"})


def test_problems_that_contradict_themselves_are_refused():
    broken = ({"kind": "binary", "num_classes": 3}, {"kind": "regression", "num_classes": 2})
    for record in (*broken, {"kind": "regression", "scale": 0}):
        with pytest.raises(DataError):
            Problem.from_json(record)
    with pytest.raises(DataError, match="no kind"):
        Problem.from_json({})
