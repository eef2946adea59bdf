"""Verification of a dossier: its facts are collected anew from the folder, its page is made anew from these, and both
are compared with what the document says."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from kinfed.dossier.document import page, read_dossier
from kinfed.dossier.facts import collect_facts
from kinfed.errors import StorageError
from kinfed.version import __version__

MOST_SAID, BEFORE = 90, 30  # letters of a sentence that are quoted, and of these before what differs
_SCRIPT = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"</(?:p|h1|h2|th|td|li|dt|dd|title|a)>|<(?:p|td|th)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")


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
