"""The report put together: one HTML page that needs nothing from outside itself, and its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kinfed.analysis import Comparison, cautions, compare, pool_seeds
from kinfed.core import storage
from kinfed.records import RunRecord, load_runs
from kinfed.report.html import render
from kinfed.report.sections import Section, sections
from kinfed.report.sentences import findings, headline, other_data


@dataclass(frozen=True)
class Part:
    """Runs on the same data. Runs on different data stand apart, in parts of their own."""

    title: str
    id: str
    prefix: str  # of the ids of its sections
    findings: list[str]
    cautions: list[str]
    sections: list[Section]


def build(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report and return its path. Seeds of runs with equal settings are averaged together.

    Without `out` the report of a single run goes into its folder as report.html, and one of several runs to
    comparison.html in the current directory: the page of one of them is left alone. The file appears whole or not at
    all.
    """
    runs = load_runs([Path(folder) for folder in run_dirs])
    pooled = pool_seeds(runs)
    target = out or (runs[0].path / "report.html" if len(runs) == 1 else Path("comparison.html"))
    return write_page(target, report_page(pooled, compare(pooled)))


def write_page(target: Path, page: str) -> Path:
    """Write a page whole or not at all, in a folder that is made where it is missing."""
    storage.make_folder(target.parent)
    storage.write_atomically(target, page.encode())
    return target


def report_page(runs: list[RunRecord], comparisons: list[Comparison]) -> str:
    title = headline(runs)
    warnings = [f"{run.label}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    parts = [_part(comparison, number, len(comparisons) > 1) for number, comparison in enumerate(comparisons, start=1)]
    if len(parts) > 1:
        warnings.insert(0, other_data(comparisons))
        links = [(part.id, part.title) for part in parts]
    else:
        links = [(section.name, section.title) for section in parts[0].sections]
    return render(
        "report.html",
        title=f"{title} – kinfed report",
        kicker="kinfed report · " + ", ".join(run.label for run in runs),
        heading=title,
        links=links,
        footer=[_provenance(run) for run in runs],
        figures=True,
        warnings=warnings,
        parts=parts,
    )


def _part(comparison: Comparison, number: int, one_of_several: bool) -> Part:
    return Part(
        title=f"{headline(comparison.runs)} ({', '.join(run.label for run in comparison.runs)})",
        id=f"part{number}",
        prefix=f"part{number}-" if one_of_several else "",
        findings=findings(comparison),
        cautions=cautions(comparison),
        sections=sections(comparison),
    )


def _provenance(run: RunRecord) -> str:
    stamp = [f"{run.label}: kinfed {run.version}"]
    if run.fingerprint:
        stamp.append(f"configuration {run.fingerprint}")
    if run.versions:
        stamp.append(", ".join(f"{name} {version}" for name, version in run.versions.items()))
    return " · ".join(stamp)
