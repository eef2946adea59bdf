"""The document: sentences and tables made of facts, one HTML page that needs nothing from outside itself, and the facts
inside it.

The page is a function of the facts alone, letter for letter. So verification collects the facts anew from the folder,
makes the page anew from these, and compares both with what the document says.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.dossier.facts import FORMAT, collect_facts
from kinfed.dossier.gain_sections import certainty, differences
from kinfed.dossier.leaving_sections import guarantees, leaving
from kinfed.dossier.sections import identity, purpose, summary
from kinfed.errors import StorageError
from kinfed.report import Download, render
from kinfed.version import __version__

PAGE = "dossier.html"
FACTS = "facts.json"
Facts = dict[str, Any]
_EMBEDDED = re.compile(r'<script type="application/json" id="facts">(.*?)</script>', re.DOTALL)
MOST_SAID, BEFORE = 90, 30  # letters of a sentence that are quoted, and of these before what differs
_SCRIPT = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"</(?:p|h1|h2|th|td|li|dt|dd|title|a)>|<(?:p|td|th)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")


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


# ---- verification ----


@dataclass(frozen=True)
class Verification:
    """The outcome for one document."""

    facts: int  # values that were compared
    sentences: int  # pieces of text
    differences: tuple[str, ...]  # each as a sentence; none: the document says what the records say

    @property
    def holds(self) -> bool:
        return not self.differences


def verify_dossier(document: Path | str, folder: Path | str, vaults: Sequence[Path | str] = ()) -> Verification:
    """Compare a document with the folder that it is of. A folder that was changed after its end is refused."""
    claimed, text = read_dossier(document)
    if claimed.get("kinfed") != __version__:
        raise StorageError(
            f"{document} was written by kinfed {claimed.get('kinfed')}, and this is {__version__}, which may word "
            "sentences differently; verify it with the version that wrote it"
        )
    facts = collect_facts(folder, claimed.get("by"), vaults)
    ours, theirs = dict(leaves(facts)), dict(leaves(claimed))
    differences = [
        f"fact {place}: the document says {_quoted(theirs[place]) if place in theirs else 'nothing'}, the records "
        f"{_quoted(ours[place]) if place in ours else 'nothing'}"
        for place in dict.fromkeys([*ours, *theirs])
        if ours.get(place, "") != theirs.get(place, "") or (place in ours) != (place in theirs)
    ]
    wanted = page(facts)
    if wanted != text:
        differences += _other_sentences(sentences_of(wanted), sentences_of(text))
        if not differences:
            differences = ["the document differs from what the records give, in its layout, links or hidden parts"]
    return Verification(len(ours), len(sentences_of(wanted)), tuple(differences))


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """All single values of nested records, each with its place: methods[1].fields[0].bytes."""
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from leaves(one, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from leaves(one, f"{place}[{number}]")
    else:
        yield place, value


def sentences_of(text: str) -> list[str]:
    """Pieces of text that a reader sees of a page."""
    visible = _BLOCK.sub("\n", _SCRIPT.sub("", text))
    lines = (" ".join(html.unescape(_TAG.sub("", line)).split()) for line in visible.split("\n"))
    return [line for line in lines if line]


def _other_sentences(wanted: list[str], claimed: list[str]) -> list[str]:
    changes = []
    for kind, a, b, c, d in SequenceMatcher(None, wanted, claimed, autojunk=False).get_opcodes():
        if kind != "equal":
            ours, theirs = " / ".join(wanted[a:b]), " / ".join(claimed[c:d])
            start = max(0, _same_start(ours, theirs) - BEFORE)
            changes.append(f"the document says {_quoted(theirs, start)}, the records give {_quoted(ours, start)}")
    return changes


def _same_start(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)


def _quoted(value: Any, start: int = 0) -> str:
    """A text from `start` on, not too long."""
    if value in ("", None):
        return "nothing"
    text = ("…" if start else "") + str(value)[start:]
    return f'"{text if len(text) <= MOST_SAID else text[: MOST_SAID - 1] + "…"}"'
