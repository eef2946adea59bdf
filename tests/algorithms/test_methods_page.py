"""docs/methods.md and the pages of its families against the registry: what their tables say is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import method_pictures
import pytest
from method_pages import BEGIN, methods_of, with_table

from kinfed.algorithms import ALGORITHMS
from kinfed.algorithms.base import Algorithm
from kinfed.core.options import declared
from kinfed.data.examples.batches import LocalTraining

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "methods").glob("*.md"))}


def sections() -> dict[str, str]:
    """{heading: text} of the methods on the pages of families."""
    sections = {}
    for page in PAGES.values():
        parts = re.split(r"^(## .*)$", page, flags=re.MULTILINE)
        sections |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return {heading: text for heading, text in sections.items() if "(`" in heading}


def options_of(name: str) -> dict[str, Any]:
    """The method's own options and their defaults; those of all methods stand at the head of the page."""
    common = declared(Algorithm)
    return {doc.name: doc.default for doc in ALGORITHMS[name].describe_options() if doc.name not in common}


def written(default: Any) -> str:
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


@pytest.mark.parametrize("heading", sections())
def test_defaults_are_those_of_the_code(heading: str) -> None:
    """A section's table gives the defaults of the first method named in its heading."""
    first = re.findall(r"`(\w+)`", heading)[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", sections()[heading], flags=re.MULTILINE)
    for option, default in rows:
        assert default == written(options_of(first)[option]), f"{first}.{option}"


def test_a_page_of_methods_begins_with_its_picture_and_a_sentence() -> None:
    for name, page in PAGES.items():
        if BEGIN in page:
            _, picture, text, *_ = page.split("\n\n")
            assert picture.endswith(f"](../pictures/methods/{name}.svg){{ .picture }}"), name
            assert text[0].isalpha(), name
            assert page.index(BEGIN) > page.rindex("## Side by side"), name
            assert name in method_pictures.FAMILIES
    for file, text in method_pictures.files().items():
        assert file.read_text("utf-8") == text, "make reference"


def test_every_method_is_of_the_family_whose_page_describes_it() -> None:
    titles = {name: page.partition("\n")[0].removeprefix("# ") for page in PAGES.values() for name in methods_of(page)}
    assert {name: ALGORITHMS[name].facts["family"] for name in ALGORITHMS} == titles


def test_options_of_all_methods_are_named() -> None:
    head = PAGE.partition("## Which method when")[0]
    for option in ("finetune", "finetune_lr", "lr", "batch", "steps", "epochs", "momentum", "weight_decay", "lr_decay"):
        assert f"`{option}`" in head
    assert {"lr", "batch", "steps", "epochs", "momentum"} <= {f.name for f in dataclasses.fields(LocalTraining)}


def test_names_in_headings_are_registered() -> None:
    for heading in sections():
        for name in re.findall(r"`(\w+)`", heading):
            assert name in ALGORITHMS


@pytest.mark.parametrize("name", PAGES)
def test_tables_of_families_are_up_to_date(name: str) -> None:
    assert with_table(PAGES[name]) == PAGES[name], "run: make reference"


def test_every_method_has_a_section_in_one_family_and_every_family_a_link() -> None:
    families = {name: methods_of(page) for name, page in PAGES.items() if BEGIN in page}
    listed = [method for methods in families.values() for method in methods]
    assert sorted(listed) == sorted(ALGORITHMS)
    assert all(f"(methods/{name}.md)" in PAGE for name in PAGES)


def test_the_guide_names_registered_methods() -> None:
    guide = PAGE.partition("## Which method when")[2].partition("## Families")[0]
    cells = [line.split("|")[2] for line in guide.splitlines() if line.startswith("| ") and "`" in line]
    options = {"finetune", "weights=equal", "shared_layers=1", "by=group"}
    for name in re.findall(r"`([\w=]+)`", " ".join(cells)):
        assert name in ALGORITHMS or name in options, name
