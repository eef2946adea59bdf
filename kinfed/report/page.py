"""Puts the report together: one HTML page that needs nothing from outside itself."""

from __future__ import annotations

from dataclasses import dataclass

from kinfed.analysis import Comparison, cautions
from kinfed.records import RunRecord
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
