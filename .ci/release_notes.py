"""The notes of a version, from CHANGELOG.md; an error where tag, version and changelog disagree.

python .ci/release_notes.py 0.2.0 > notes.md"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(version: str, root: Path = ROOT) -> str:
    """The section of a version, without its heading."""
    in_code = re.search(r'__version__ = "(.+)"', (root / "kinfed/version.py").read_text("utf-8"))
    if in_code is None or in_code[1] != version:
        raise SystemExit(f"kinfed/version.py does not say {version}; set it, or tag another commit")
    text = (root / "CHANGELOG.md").read_text("utf-8")
    section = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", text, re.S | re.M)
    if section is None:
        raise SystemExit(f"CHANGELOG.md has no heading [{version}]; give the changes of this version one")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python .ci/release_notes.py VERSION")
    print(notes(sys.argv[1]), end="")
