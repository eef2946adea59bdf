"""The page about data: its plugin runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from kinfed.core.registry import load_plugin
from kinfed.data.partitions import PARTITIONS, make_federation
from kinfed.data.sources import SOURCES, load_source

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_plugin_of_the_page_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
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
