"""A small table of three sites as people have them: a gap, a category, and one site where the rule is turned round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

SITES = {"north": 40, "south": 28, "lake": 16}
SMALL: dict[str, Any] = {
    "algorithms": "ditto", "models": "mlr", "trials": 2, "folds": 2, "rounds": 3, "steps": 5, "metric": "accuracy",
    "references": False,
}  # fmt: skip
COLUMNS = {"client_column": "site", "label_column": "outcome"}


def make_table(seed: int = 0) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)
    table: dict[str, list[Any]] = {name: [] for name in ("site", "age", "dose", "group", "outcome")}
    for site, rows in SITES.items():
        age, dose = draw.normal(50, 10, rows), draw.normal(size=rows)
        ill = (dose + 0.3 * draw.normal(size=rows)) * (-1 if site == "lake" else 1) > 0
        table["site"] += [site] * rows
        table["age"] += [None if value > 65 else round(float(value), 1) for value in age]
        table["dose"] += dose.round(3).tolist()
        table["group"] += draw.choice(["a", "b"], rows).tolist()
        table["outcome"] += np.where(ill, "ill", "well").tolist()
    return table


@pytest.fixture(scope="session")
def table() -> dict[str, list[Any]]:
    return make_table()
