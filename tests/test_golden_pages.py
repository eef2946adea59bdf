"""One page per format stays as it was read and accepted: `python tests/golden_pages.py` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden_pages


@pytest.mark.parametrize("name", golden_pages.PAGES)
def test_a_page_reads_as_accepted(name: str, tmp_path: Path) -> None:
    accepted = (golden_pages.HERE / f"{name}.txt").read_text("utf-8")
    assert golden_pages.PAGES[name](tmp_path) == accepted, "if it reads better now: python tests/golden_pages.py"


def test_every_accepted_page_is_of_a_format() -> None:
    assert {path.stem for path in golden_pages.HERE.iterdir()} == golden_pages.PAGES.keys()
