"""The reference page is what the registries say."""

from __future__ import annotations

from pathlib import Path

from reference import reference

from kinfed.algorithms import ALGORITHMS

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == reference(), "run: make reference"


def test_every_method_and_its_options_are_there() -> None:
    text = reference()
    for name, entry in ALGORITHMS.items():
        assert f"| `{name}` |" in text
        for doc in entry.describe_options():
            assert f"| `{doc.name}` |" in text
