"""Loading a data set by its name, or a table of your own by its path.

load_source("mnist", options={"examples": 1000})
load_source("patients.csv", options={"label_column": "outcome", "client_column": "hospital"})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfed.core import make_options
from kinfed.data.sources import table, table_files
from kinfed.data.sources.registered import SOURCES
from kinfed.data.sources.source import Source
from kinfed.data.sources.table_options import TableOptions
from kinfed.errors import ConfigError, unknown_name


def load_source(
    name: str, data_dir: Path | None = None, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Source:
    """A registered data set, or a table if `name` is the path of one. `seed` is for generated data only."""
    if name in SOURCES:
        entry = SOURCES[name]
        settings = make_options(entry.options, options or {}, f"data set {name}")
        source = entry.target(settings, data_dir, seed)
        source.options = dataclasses.asdict(settings)
        return source
    if table_files.is_table(name):
        return table.load_table(Path(name), make_options(TableOptions, options or {}, f"table {name}"))
    error = unknown_name("data set", name, SOURCES)
    raise ConfigError(f"{error}; or give the path of a {', '.join(table_files.SUFFIXES)} file")
