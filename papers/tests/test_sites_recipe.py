"""The recipe `sites`: what it reads of every site is what the run's folder says."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from kinfed.data.sources.registered import SOURCES
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed_papers.measure import reproduce
from kinfed_papers.recipe import RunPart
from kinfed_papers.recipes.sites import ALIASES, METHODS, RECIPE, TABLES, figures


def test_every_table_is_one_with_sites_of_its_own() -> None:
    for part in RECIPE.parts("small"):
        assert isinstance(part, RunPart)
        dataset = part.settings["dataset"]
        assert SOURCES[dataset if isinstance(dataset, str) else dataset["name"]].facts["names_clients"]
        assert part.settings["metric"] == TABLES[part.name].metric
    assert all(table.metric in METRICS for table in TABLES.values())


def test_figures_by_site_are_those_of_the_run(tmp_path: Path) -> None:
    parts = [
        replace(part, settings={**part.settings, "algorithms": "local,fedavg", "rounds": 1, "seeds": [0]})
        for part in RECIPE.parts("smoke")
        if isinstance(part, RunPart)
    ]
    done = reproduce(replace(RECIPE, parts=lambda scale: parts), "smoke", tmp_path)
    with (tmp_path / "parts" / "breast_cancer" / "clients.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["algorithm"] == "fedavg"]
    for line in lines:
        figure = f"personal.site.{line['client']}"
        personal, server = (done.results.get("breast_cancer", row, figure)[0] for row in ("fedavg", "one_model"))
        assert personal == pytest.approx(float(line["personal_auroc"]))
        assert server == pytest.approx(float(line["server_auroc"]))
    (drawn,) = figures(done.results, {})
    assert [trace["name"] for trace in drawn.figure.data] == [METHODS[row] for row in ("local", "one_model", "fedavg")]
    assert set(ALIASES) == {"one_model"}
