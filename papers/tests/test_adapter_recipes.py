"""adapters-text and fedbn-features: parts differ in what they compare and in nothing else; bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kinfed_papers import RunPart
from kinfed_papers.measure import reproduce
from kinfed_papers.recipe import SCALES, Scale
from kinfed_papers.recipes import load_recipe
from kinfed_papers.recipes.adapters_text import CLIENTS
from kinfed_papers.result_tables import filled_tables


def run_parts(name: str, scale: Scale) -> list[RunPart]:
    return [part for part in load_recipe(name).parts(scale) if isinstance(part, RunPart)]


def shared_settings(name: str, scale: Scale, compared: set[str]) -> list[dict[str, object]]:
    return [{k: v for k, v in part.settings.items() if k not in compared} for part in run_parts(name, scale)]


@pytest.mark.parametrize("scale", SCALES)
def test_parts_differ_in_what_they_compare_alone(scale: Scale) -> None:
    first, *others = shared_settings("adapters-text", scale, {"model", "frozen", "algorithms"})
    assert all(other == first for other in others)
    first, *others = shared_settings("fedbn-features", scale, {"partition"})
    assert all(other == first for other in others)
    cameras, control, classes = (part.settings["partition"] for part in run_parts("fedbn-features", scale))
    assert control == cameras | {"contrast": 0.0, "brightness": 0.0}
    assert classes == cameras | {"alpha": 0.1}


def test_the_folder_of_the_weights_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINFED_MINILM", "elsewhere")
    for part in run_parts("adapters-text", "small"):
        assert part.settings["model"]["weights"] == part.settings["dataset"]["tokenizer"] == "elsewhere"


def test_bytes_of_a_round_by_hand(tmp_path: Path) -> None:
    """Two layers of width 16 with query and value adapted by rank 2, ten classes; one count per client goes up."""
    recipe = load_recipe("adapters-text")
    shorter = {"rounds": 1, "steps": 1}
    parts = [replace(part, settings={**part.settings, **shorter}) for part in run_parts(recipe.name, "smoke")]
    recipe = replace(recipe, parts=lambda scale: parts)
    done = reproduce(recipe, "smoke", tmp_path, seeds=[0], settings={"workers": 1})
    a = b = 2 * 2 * (2 * 16)
    head = 16 * 10 + 10
    numbers = {"local": 0, "fedavg": a + b + head, "fedsa_lora": a + head, "ffa_lora": b + head}
    numbers |= {"feddpa": a + b + head, "ditto": a + b + head, "head_local": 0, "head_fedavg": head}
    for row, count in numbers.items():
        both_ways = CLIENTS * 4 * (2 * count + 1) if count else 0
        assert done.results.get("reviews", row, "bytes") == {0: both_ways}, row
    (table,) = filled_tables(done)
    assert [name for name, _ in table.rows] == list(recipe.tables[0].rows.values())
    share = next(column for column in table.columns if column.heading.startswith("Bytes"))
    full_fine_tuning = CLIENTS * 2 * 4 * 22.6e6  # all parameters of all-MiniLM-L6-v2, to clients and back
    assert full_fine_tuning * share.factor == pytest.approx(100)
