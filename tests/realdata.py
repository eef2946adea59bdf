"""Where tests find real data, and how they skip without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = Path(os.environ.get("KINFED_DATA", BESIDE))  # read now: tests may set the variable for themselves


def real_data(folder: str) -> Path:
    """The data folder, if it holds this data set; the calling test is skipped otherwise."""
    if not list((DATA / folder).glob("*.parquet")):
        pytest.skip(f"needs {folder}/*.parquet in $KINFED_DATA")
    return DATA
