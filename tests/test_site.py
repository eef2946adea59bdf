"""The documentation as a site: built without the network, links that lead somewhere, a place for every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kinfed

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs/api.md").read_text("utf-8")
    wanted = [f"::: kinfed.{name}" for name in kinfed.__all__ if name != "KinfedError"]
    wanted = [line for line in wanted if f"{line}\n" not in text]
    assert not wanted, f"docs/api.md lacks {', '.join(wanted)}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    nowhere = "http://127.0.0.1:9"  # whoever wants to fetch something fails at once
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": nowhere, "http_proxy": nowhere},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text("utf-8")
        assert not re.findall(r"<(?:script|img|iframe|link)[^>]+(?:src|href)=[\"']?https?://", text), page.name


def test_search_works_from_a_folder_and_claims_and_wide_tables_are_in_the_site(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text("utf-8").startswith("var __index = ")
    assert 'src="../pictures/iframe-worker.js"' in (site / "methods" / "kin.html").read_text("utf-8")
    claims = (site / "benchmark" / "claims.html").read_text("utf-8")
    assert "md-tabs" in claims
    assert ".claims.claims {" in claims
    assert '<td data-label="up"><code>delta</code>' in (site / "methods" / "one-model.html").read_text("utf-8")
    assert "<code>check_algorithm</code>" in (site / "api.html").read_text("utf-8")


def test_sections_and_docstrings_are_there(site: Path) -> None:
    home = (site / "index.html").read_text("utf-8")
    for section in ("Start", "Guides", "Gallery", "Methods", "Benchmark", "Reference"):
        assert re.search(rf"md-tabs__link[^>]*>\s*{section}\s", home), section
    assert "in place of a data set and its partition" in (site / "api.html").read_text("utf-8")
    assert "0.2.0" in (site / "changelog.html").read_text("utf-8")
    assert "FedExP" in (site / "source/examples/my_method.py.html").read_text("utf-8")
