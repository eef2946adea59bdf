"""Templates escape what they are given and refuse what they are not given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from kinfed.report.html import MAX_DOWNLOAD, Download, environment, render

SKELETON = {"title": "t", "kicker": "k", "heading": "<h>", "links": [("a&b", "<x>")], "footer": ["<f>"]}


def test_the_skeleton_escapes_every_text() -> None:
    page = render("page.html", **SKELETON, figures=False)
    assert "<h1>&lt;h&gt;</h1>" in page
    assert '<a href="#a&amp;b">&lt;x&gt;</a>' in page
    assert "<p>&lt;f&gt;</p>" in page


def test_a_page_without_figures_carries_no_script() -> None:
    page = render("page.html", **SKELETON, figures=False)
    assert "<script" not in page
    assert "script-src 'none'" in page


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="figures"):
        render("page.html", **SKELETON)


def test_another_package_extends_the_skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "visiting" / "templates"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "mine.html").write_text('{% extends "page.html" %}{% block main %}<p>{{ text }}</p>{% endblock %}')
    monkeypatch.syspath_prepend(tmp_path)
    try:
        page = render("mine.html", "visiting", **SKELETON, figures=False, text="<mine>")
    finally:
        sys.modules.pop("visiting", None)
    assert "<main>\n<p>&lt;mine&gt;</p></main>" in page


def test_json_cannot_end_the_script_it_stands_in() -> None:
    value = {"</script>": ["<!--", "\u2028"]}
    text = environment().from_string("{{ value | tojson }}").render(value=value)
    assert "<" not in text
    assert json.loads(text) == value


def test_a_file_too_long_for_a_link_is_named_all_the_same() -> None:
    template = environment().from_string('{% import "elements.html" as ui %}{{ ui.download(file) }}')
    short = template.render(file=Download("a.csv", "<all>", "x,y\n"))
    assert '<a download="a.csv" href="data:text/csv;charset=utf-8;base64,eCx5Cg==">a.csv</a>: &lt;all&gt;' in short
    long = template.render(file=Download("a.csv", "all", "x" * (MAX_DOWNLOAD + 1)))
    assert "<code>a.csv</code>: all; too long" in long
