"""config.json of a folder as a stranger writes it, who can compute seals too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kinfed.records.run_files import sealed


def change_manifest(folder: Path, **changes: Any) -> None:
    """Change parts of config.json and seal it again."""
    path = folder / "config.json"
    path.write_text(json.dumps(sealed(json.loads(path.read_text()) | changes)))


def change_settings(folder: Path, **settings: Any) -> None:
    """Change settings in config.json and seal it again."""
    change_manifest(folder, config=json.loads((folder / "config.json").read_text())["config"] | settings)


def as_of_an_earlier_version(folder: Path) -> None:
    """Remove what earlier versions did not write: seals and digests of files."""
    path = folder / "config.json"
    envelope = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in envelope.items() if name not in ("seal", "files")}))
