"""The page about data: its Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kinfed.core.plugins import load as load_plugin
from kinfed.data.partitions import PARTITIONS, make_federation
from kinfed.data.sources import SOURCES, load_source

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)


def test_the_table_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks()[0], "data.md", "exec"), {"__name__": "page"})
    assert "['ill', 'well']" in capsys.readouterr().out
    assert (tmp_path / "north.safetensors").exists()


def test_the_plugin_of_the_page_runs(tmp_path: Path) -> None:
    _, block = blocks()
    (tmp_path / "mine.py").write_text(block)
    try:
        load_plugin(tmp_path / "mine.py")
        source = load_source("clouds", seed=3, options={"examples": "60"})
        federation = make_federation(source, "stripes", 4, {"test_fraction": 0.2})
        assert (federation.train.count + federation.test.count).tolist() == [15] * 4
        first = federation.features.raw[:, 0]
        assert first[federation.train[0]].max() <= first[federation.train[1]].min()
        assert [option.name for option in SOURCES["clouds"].describe_options()] == ["examples", "distance"]
    finally:
        SOURCES.unregister("clouds")
        PARTITIONS.unregister("stripes")
