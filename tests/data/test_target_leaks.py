"""Columns that give the target away are named, and honest ones are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kinfed

ROWS = 400


def notes_of(columns: dict[str, Any], target: Any) -> list[str]:
    table = {"site": ["a", "b"] * (len(target) // 2), "outcome": target, **columns}
    data = kinfed.Federation.from_table(table, client_column="site", label_column="outcome")
    return [note for note in data.notes if "tells almost all of the target" in note]


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_column_that_follows_from_the_outcome_is_named(draw: np.random.Generator) -> None:
    ill = draw.random(ROWS) < 0.3
    severity = np.where(ill, draw.integers(1, 5, ROWS), 0)  # of the ill alone
    blood = ill + draw.normal(size=ROWS)
    code = np.where(ill, draw.choice(["I20", "I21"], ROWS), draw.choice(["Z00", "Z01"], ROWS))
    columns = {"severity": severity, "blood": blood, "code": code, "late": ill * 100.0 + draw.normal(size=ROWS)}
    (note,) = notes_of(columns, np.where(ill, "ill", "well"))
    assert "by itself: severity, code, late. " in note
    assert "--columns severity=skip,code=skip,late=skip" in note


def test_good_columns_rare_classes_and_few_rows_are_no_leaks(draw: np.random.Generator) -> None:
    rare = draw.random(ROWS) < 0.01
    assert notes_of({"noise": draw.normal(size=ROWS)}, np.where(rare, "yes", "no")) == []  # 99 % are "no" anyway
    ill = draw.random(ROWS) < 0.5
    assert notes_of({"good": 4 * ill + draw.normal(size=ROWS)}, np.where(ill, "ill", "well")) == []
    few = np.array([False, True] * 20)
    assert notes_of({"copy": few * 1.0 + 0.1}, np.where(few, "ill", "well")) == []


def test_numbers_that_follow_from_the_target(draw: np.random.Generator) -> None:
    score = draw.normal(50, 10, ROWS)
    columns = {"other_scale": 3 * score + draw.normal(size=ROWS), "half": score + draw.normal(0, 10, ROWS)}
    (note,) = notes_of(columns, score)
    assert "by itself: other_scale. " in note
