"""The tables on the pages of method families (docs/methods/*.md), made from the registry.

    python docs/generate/method_pages.py docs/methods

A page names its methods in headings, "## Ditto (`ditto`)"; between the marks at its end stands the table of these,
which this replaces. A test compares the pages with what this makes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from reference import method_table

from kinfed.algorithms import ALGORITHMS
from kinfed.core import storage

BEGIN, END = "<!-- methods: made by `make reference` -->", "<!-- end -->"
_HEADING = re.compile(r"^## .*\((`.*`)\)$", re.MULTILINE)


def methods_of(page: str) -> list[str]:
    """The methods that the headings of a page name, in their order."""
    return [name for names in _HEADING.findall(page) for name in re.findall(r"`(\w+)`", names)]


def with_table(page: str) -> str:
    """The page with the table of its methods; as it is, where it has no place for one."""
    if BEGIN not in page:
        return page
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = method_table([name for name in methods_of(page) if name in ALGORITHMS])
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.md")):
        page = path.read_text("utf-8")
        if (new := with_table(page)) != page:
            storage.write_atomically(path, new.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/methods"))
