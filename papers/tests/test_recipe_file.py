"""Recipes from TOML files, on one written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinfed.errors import ConfigError
from kinfed_papers import Claim, Question, Recipe, Results, RunPart, Untestable
from kinfed_papers.recipe_file import read_recipe

TEXT = """
paper = "Ditto"
reproduces = "Table 9"
title = "Two methods"
about = "Twenty clients."
row = "ditto"
notes = ["@one_rate", "of its own"]
method_figures = [["a", "ditto"]]

[aliases]
fedavg_model = ["fedavg", "server"]

[methods]
fedavg = "FedAvg"
fedavg_model = "FedAvg, one model"
ditto = "Ditto"

[headings]
a = "Letters"
b = "Digits"

[lists]
rivals = ["fedavg", "fedavg_model"]

[options]
ditto = { lam = 0.5 }

[settings]
rounds = 3
clients = 20

[scales.smoke]
clients = 4
[scales.smoke.options]
ditto = { lr = 0.1 }

[[parts]]
each = { part = ["a", "b"] }
name = "{part}"
paper = { rounds = 300 }
[[parts]]
name = "a-alone"
scales = ["paper"]
merge_into = "a"
algorithms = ["ditto"]
options = { ditto = { lam = 2.0 } }

[[tables]]
title = "Accuracy"
digits = 2
columns = ["a", { each = { part = ["b"] }, heading = "{part_name}, worst", metric = "personal.worst10" }]
published = \"\"\"
method | Letters
ditto  | 71.33 ± 0.1
\"\"\"

[[claims]]
each = { part = ["a", "b"] }
[[claims.claims]]
text = "Above all, {part_name}"
above = "rivals"
limit = -0.02
[[claims.claims]]
question = "Computed, {part_name}"
margins = "recipes.fedfomo_validation:gain"
arguments = { fraction = 0.4, other = 0.9 }
[[claims]]
each = { part = ["b"], rival = ["fedavg"] }
question = "Above {rival_name}"
[[claims]]
text = "The curves"
untestable = "no numbers"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "mine.toml").write_text(TEXT)
    return read_recipe(tmp_path / "mine.toml")


def test_parts_have_the_settings_of_recipe_scale_and_part(recipe: Recipe) -> None:
    usual = {"rounds": 3, "clients": 20, "algorithms": {"fedavg": {}, "ditto": {"lam": 0.5}}}
    assert recipe.parts("small") == [RunPart("a", usual), RunPart("b", usual)]
    smoke = recipe.parts("smoke")[0].settings
    assert smoke == {"rounds": 3, "clients": 4, "algorithms": {"fedavg": {}, "ditto": {"lam": 0.5, "lr": 0.1}}}
    alone = recipe.parts("paper")[2]
    assert alone.merge_into == "a"
    assert alone.settings == {"rounds": 3, "clients": 20, "algorithms": {"ditto": {"lam": 2.0}}}
    assert recipe.parts("paper")[0].settings["rounds"] == 300


def test_tables_have_columns_by_part_and_published_numbers(recipe: Recipe) -> None:
    (table,) = recipe.tables
    assert [(c.heading, c.part, c.metric, c.digits) for c in table.columns] == [
        ("Letters", "a", "personal.accuracy", 2),
        ("Digits, worst", "b", "personal.worst10", 2),
    ]
    assert list(table.rows) == ["fedavg", "fedavg_model", "ditto"]
    assert table.published["ditto", "Letters"].spread == 0.1


def test_claims_are_repeated_in_groups(recipe: Recipe) -> None:
    texts = ["Above all, Letters", "Computed, Letters", "Above all, Digits", "Computed, Digits", "Above FedAvg"]
    *claims, last = recipe.claims
    assert [claim.text for claim in claims] == texts
    assert [type(claim) for claim in claims] == [Claim, Question, Claim, Question, Question]
    assert last == Untestable("The curves", "no numbers")
    values = {"ditto": 0.9, "fedavg": 0.5, "fedavg_model": 0.4}
    measured = {row: {"personal.accuracy": {7: value}} for row, value in values.items()}
    results = Results({"b": measured})
    assert isinstance(claims[2], Claim)
    assert claims[2].margins(results) == {"fedavg": {7: pytest.approx(0.4)}, "fedavg_model": {7: pytest.approx(0.5)}}
    assert claims[2].limit == -0.02


def test_notes_and_names(recipe: Recipe) -> None:
    assert recipe.name == "mine"
    assert recipe.notes[0].startswith("All methods have the same learning rate")
    assert recipe.notes[1] == "of its own"
    assert recipe.aliases == {"fedavg_model": ("fedavg", "server")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("above = ", "abowe = "),
        ('paper = "Ditto"', 'paper = "Dito"'),
        ("[settings]", "[setings]"),
        ("merge_into", "merge_in"),
    ],
)
def test_mistakes_name_the_file_and_the_word(old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=r"mine\.toml.*(above|abowe|Dito|setings|merge_in)"):
        read_recipe(tmp_path / "mine.toml")
