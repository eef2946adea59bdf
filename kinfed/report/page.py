"""Puts the report together: one HTML page that needs nothing from outside itself.

The page forbids itself any request and any script but its own two (by their hashes, in its content security policy),
so even a string that slipped through unescaped could neither run nor call home.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from kinfed.report.comparison import Comparison
from kinfed.report.html import esc, inline_json, notes
from kinfed.report.palette import DARK
from kinfed.report.sections import Sections
from kinfed.report.sentences import headline, other_data
from kinfed.runs.reader import Run


def render(runs: list[Run], comparisons: list[Comparison]) -> str:
    title = headline(runs)
    warnings = [f"{run.label}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    if len(comparisons) == 1:
        sections = Sections(comparisons[0])
        lead, links, main = sections.summary(), sections.links, sections.html
    else:
        warnings.insert(0, other_data(comparisons))
        lead, links, main = "", *_parts(comparisons)
    return document(
        title=f"{title} – kinfed report",
        kicker="kinfed report · " + ", ".join(run.label for run in runs),
        heading=title,
        lead=notes(warnings) + lead,
        links=links,
        main=main,
        footer=[_provenance(run) for run in runs],
    )


def document(
    *, title: str, kicker: str, heading: str, lead: str, links: Sequence[tuple[str, str]], main: str,
    footer: Sequence[str], figures: bool = True,
) -> str:  # fmt: skip
    """A whole page. `lead` and `main` are HTML, all other texts are plain; `links` go to the ids of sections."""
    script, plotly = (_resource("page.js"), get_plotlyjs()) if figures else ("", "")
    return Template(_resource("page.html")).substitute(
        title=esc(title),
        policy=_policy(plotly, script),
        style=_resource("page.css"),
        kicker=esc(kicker),
        heading=esc(heading),
        lead=lead,
        links="".join(f'<li><a href="#{esc(target)}">{esc(text)}</a></li>' for target, text in links),
        main=main,
        footer="".join(f"<p>{esc(line)}</p>" for line in footer),
        dark=inline_json(DARK),
        plotly=plotly,
        script=script,
    )


def _parts(comparisons: list[Comparison]) -> tuple[list[tuple[str, str]], str]:
    """One part per comparison, with links to them: runs on different data stand apart."""
    links = []
    parts = []
    for number, comparison in enumerate(comparisons, start=1):
        name = f"part{number}"
        names = ", ".join(run.label for run in comparison.runs)
        title = f"{headline(comparison.runs)} ({names})"
        sections = Sections(comparison, prefix=f"{name}-", level=3)
        links.append((name, title))
        parts.append(f'<div class="part" id="{name}"><h2>{esc(title)}</h2>{sections.summary()}{sections.html}</div>')
    return links, "\n".join(parts)


def _provenance(run: Run) -> str:
    stamp = [f"{run.label}: kinfed {run.version}"]
    if run.fingerprint:
        stamp.append(f"configuration {run.fingerprint}")
    if run.versions:
        stamp.append(", ".join(f"{name} {version}" for name, version in run.versions.items()))
    return " · ".join(stamp)


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return files("kinfed.report").joinpath(name).read_text(encoding="utf-8")
