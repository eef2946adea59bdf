"""The report: one self-contained HTML page about one or several runs.

It reads the files of run folders and nothing else, so it works on a finished run, on one still going, and on one
copied from another machine. What a page needs is imported when one is built: who only prints a table
(`kinfed.report.tables`) does not wait for torch and plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["build", "write_page"]


def build(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report and return its path. Seeds of runs with equal settings are averaged together.

    Without `out` the report of a single run goes into its folder as report.html, and one of several runs to
    comparison.html in the current directory: the page of one of them is left alone. The file appears whole or not at
    all.
    """
    from kinfed.analysis import compare, pool_seeds
    from kinfed.records import load_runs
    from kinfed.report.page import report_page

    runs = load_runs([Path(folder) for folder in run_dirs])
    pooled = pool_seeds(runs)
    page = report_page(pooled, compare(pooled))
    target = out or (runs[0].path / "report.html" if len(runs) == 1 else Path("comparison.html"))
    return write_page(target, page)


def write_page(target: Path, page: str) -> Path:
    """Whole or not at all, in a folder that is made where it is missing."""
    from kinfed.core import storage

    storage.make_folder(target.parent)
    storage.write_atomically(target, page.encode())
    return target
