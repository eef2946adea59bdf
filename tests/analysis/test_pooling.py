"""Seeds and methods of equal settings, run apart, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kinfed.analysis.comparison import compare, pool_seeds
from kinfed.data.federations.federation import Federation
from kinfed.records.reader import load_runs
from kinfed.report import build
from kinfed.report.method_tables import results_table
from kinfed.runs.experiment import run

SETTINGS: dict[str, Any] = {"model": "mlr", "rounds": 2, "steps": 2, "workers": 1, "participation": 1.0}
PARTS: dict[str, dict[str, Any]] = {
    "a": {"algorithms": "local,ditto", "seeds": (0, 1)},
    "b": {"algorithms": "local,ditto", "seeds": (2,)},
    "c": {"algorithms": "fedavg", "seeds": (0, 1, 2)},
    "whole": {"algorithms": "local,ditto,fedavg", "seeds": (0, 1, 2)},
    "other": {"algorithms": "local,ditto", "seeds": (3,), "lr": 0.01},
    "weak": {"algorithms": {"local": {}, "ditto": {"lam": 0.1}}, "seeds": (3,)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [i % 4 for i in range(40)])
    place = tmp_path_factory.mktemp("runs")
    for name, settings in PARTS.items():
        run(federation=data, out=place / name, **{**SETTINGS, **settings})
    return {name: place / name for name in PARTS}


def test_parts_of_one_run_give_its_table(folders: dict[str, Path]) -> None:
    pooled = pool_seeds(load_runs([folders[name] for name in ("a", "b", "c")]))
    assert [one.label for one in pooled] == ["a + b + c"]
    (ours,), (theirs,) = compare(pooled), compare(load_runs([folders["whole"]]))
    columns = [
        [[str(cell) for cell in row[:-1]] for row in results_table(one).rows]  # but for the seconds
        for one in (ours, theirs)
    ]
    assert columns[0] == columns[1]
    assert [method.seeds for method in ours.methods] == [(0, 1, 2)] * 3
    assert ours.same_seeds


def test_what_is_not_of_one_run_stays_apart(folders: dict[str, Path]) -> None:
    for second in ("other", "weak", "whole"):  # other settings, other options, the same seeds again
        both = load_runs([folders["a"], folders[second]])
        assert pool_seeds(both) == both


def test_the_page_says_that_seeds_are_pooled(folders: dict[str, Path], tmp_path: Path) -> None:
    page = build([folders["a"], folders["b"]], tmp_path / "page.html").read_text("utf-8").partition("<script>")[0]
    assert "b has the same settings as a: seeds and methods of both are taken together." in page
    assert "Ditto · a" not in page
