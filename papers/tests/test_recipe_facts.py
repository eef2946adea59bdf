"""What every recipe says is what it said: settings, tables, published numbers, claims and texts, hashed per scale.

After a change that is meant: python papers/tests/test_recipe_facts.py"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recipe_facts import digest, facts

from kinfed_papers.part_records import settings_hash
from kinfed_papers.recipe import SCALES, Results
from kinfed_papers.recipes import RECIPES, load_recipe

FILE = Path(__file__).with_name("recipe_hashes.json")


def hashes(name: str) -> dict[str, str]:
    recipe = load_recipe(name)
    return {scale: digest(facts(recipe, scale, settings_hash, Results)) for scale in SCALES}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINFED_MINILM", raising=False)  # a folder of the reader's own, in settings
    assert hashes(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    os.environ.pop("KINFED_MINILM", None)
    FILE.write_text(json.dumps({name: hashes(name) for name in RECIPES}, indent=1) + "\n")
