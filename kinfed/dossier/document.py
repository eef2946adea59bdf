"""The document: sentences and tables made of facts, one HTML page that needs nothing from outside itself, and the facts
inside it.

The page is a function of the facts alone, letter for letter. So `kinfed dossier verify` collects the facts anew, makes
the page anew, and compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.dossier.facts import FORMAT
from kinfed.dossier.gain_sections import certainty, differences
from kinfed.dossier.leaving_sections import guarantees, leaving
from kinfed.dossier.sections import identity, purpose, summary
from kinfed.errors import StorageError
from kinfed.report import Download, render

PAGE = "dossier.html"
FACTS = "facts.json"
Facts = dict[str, Any]
_EMBEDDED = re.compile(r'<script type="application/json" id="facts">(.*?)</script>', re.DOTALL)


def write_dossier(facts: Facts, out: Path | str) -> Path:
    """Write the page of these facts, whole or not at all."""
    out = Path(out)
    storage.make_folder(out.parent)
    storage.write_atomically(out, page(facts).encode())
    return out


def page(facts: Facts) -> str:
    sections = [section for section in (
        purpose(facts), leaving(facts), guarantees(facts), certainty(facts), differences(facts), identity(facts),
    ) if section is not None]  # fmt: skip
    return render(
        "dossier.html", package="kinfed.dossier", title=f"Dossier: {facts['title']}", kicker="kinfed dossier",
        heading=f"What left each site, and what it was worth: {facts['title']}", figures=False,
        links=[(section.name, section.title) for section in sections], lead=summary(facts), sections=sections,
        facts=facts, file=Download(FACTS, "all facts of this document as JSON", _text(facts)),
        footer=[f"Written by kinfed {facts['kinfed']}. Check it against its folder: kinfed dossier verify"],
    )  # fmt: skip


def _text(facts: Facts) -> str:
    return json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True)


def read_dossier(path: Path | str) -> tuple[Facts, str]:
    """The facts inside a document, and its whole text; StorageError for what is no dossier of this format."""
    path = Path(path)
    with storage.storage_errors("read", path):
        text = path.read_text("utf-8", errors="replace")
    match = _EMBEDDED.search(text)
    try:
        facts = json.loads(match[1]) if match else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise StorageError(f"{path} holds no facts of a dossier; was it written by this version of kinfed?")
    return facts, text
