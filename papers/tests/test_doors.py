"""Papers use kinfed as strangers may: through the doors of its rooms, or from the files of a method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_rooms import doors, files, imported_modules

import kinfed_papers

FILES = sorted(Path(kinfed_papers.__file__ or "").parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kinfed_is_entered_by_its_doors(path: Path) -> None:
    around = [
        f"{name} from kinfed.{source}"
        for source, name in imported_modules(path)
        if name not in doors().get(source, ()) and source not in ("version", "errors")
        if not source.startswith("algorithms.")
    ]
    assert not around, f"around a door: {', '.join(around)}"


def test_kinfed_does_not_need_its_papers() -> None:
    pattern = re.compile(r"^\s*(from|import) kinfed_papers", re.MULTILINE)
    users = [name for name, path in files().items() if pattern.search(path.read_text())]
    assert not users, f"the package kinfed works without kinfed_papers, which is imported by {', '.join(users)}"
