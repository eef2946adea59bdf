"""A section of a dossier, and the first and last of them: what was done, with what, and the digests of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kinfed.dossier.facts import APART, DEPLOYMENT, FIT, RUN, SEARCH
from kinfed.report import TableColumn, TextTable
from kinfed.report.drawing import plural

Facts = dict[str, Any]
KINDS = {
    RUN: "a comparison of methods, computed in one place from one table (kinfed run)",
    FIT: "a choice of models for every site, computed in one place from one table (kinfed fit)",
    DEPLOYMENT: "a method that sites have run together, each with rows that stayed there (kinfed deploy)",
    SEARCH: "a choice of models that sites have made together, each with rows that stayed there (kinfed deploy fit)",
}


@dataclass(frozen=True)
class DossierSection:
    name: str
    title: str
    texts: list[str]
    tables: list[tuple[str, TextTable]] = field(default_factory=list)  # each with a sentence above it


def columns(name: str, *others: str, texts: Collection[str] = ()) -> list[TableColumn]:
    """Columns of a table: what its rows are about, and others, of figures or of texts."""
    return [TableColumn(name, "name"), *(TableColumn(one, "text" if one in texts else "figure") for one in others)]


def summary(facts: Facts) -> list[str]:
    """The first sentences: what happened to the rows, and how much left a site."""
    sites, apart = len(facts["sites"]), facts["kind"] in APART
    rows = sum(one["train"] + one["validation"] + one["test"] for one in facts["sites"])
    where = (
        "No row was sent from the site that holds it; what can be worked out from what was sent is said under the "
        "guarantees."
    ) if apart else (
        "All rows were in one place: nothing was protected from the person who ran it. The part on messages says what "
        "sites would have sent."
    )  # fmt: skip
    return [f"{plural(sites, 'site')} with {plural(rows, 'row')} in all. {where}"]


def purpose(facts: Facts) -> DossierSection:
    texts = [f"This document is about {KINDS[facts['kind']]}."]
    texts.append(
        "All sentences and tables are made from facts that kinfed has read from the sealed records of one folder; the "
        "facts are inside this document. kinfed dossier verify collects them again and compares every one, and every "
        "sentence."
    )
    if facts["columns"]:
        texts.append(
            f"{plural(len(facts['columns']), 'column')} of the table were known by name to the person who ran it: "
            f"{', '.join(facts['columns'])}."
        )
    several = any(method["seeds"] > 1 for method in facts["methods"])
    title = "Rows of every site" + (f" (with seed {facts['seed_of_sites']})" if several else "")
    rows = [[one["name"], *(f"{one[part]:,}" for part in ("train", "validation", "test"))] for one in facts["sites"]]
    settings = [[name, _brief(value)] for name, value in facts["settings"].items()]
    return DossierSection("purpose", "What this is about", texts, [
        (f"{title}: models learn from training rows and are judged on test rows.",
         TextTable.of("Sites", columns("Site", "Training", "Validation", "Test"), rows)),
        ("The settings that a reader asks for first.",
         TextTable.of("Settings", columns("Setting", "Value", texts=["Value"]), settings)),
    ])  # fmt: skip


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        options = [f"{name} {_brief(one)}" for name, one in value.items() if name != "name"]
        return str(value.get("name", "")) + (f" ({', '.join(options)})" if options else "")
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def identity(facts: Facts) -> DossierSection:
    """Versions and digests."""
    origin, own = facts["made_with"], facts["identity"]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    texts = [f"Computed with kinfed {origin['kinfed']} ({versions})."]
    for later in origin["continued"]:
        others = ", ".join(f"{name} {version}" for name, version in later["versions"].items())
        texts.append(f"Taken up again with kinfed {later['kinfed']} ({others}).")
    texts.append(
        f"The seal of the folder is {own['seal']}; it covers the configuration ({own['fingerprint']}) and the digests "
        f"below of {plural(len(own['files']), 'file')}. A seal finds edits unless someone sealed again; it is no "
        "signature and says nothing of who computed."
    )
    digests = [["data and code: " + name, digest] for name, digest in own["contents"].items()]
    digests += [[name, digest] for name, digest in own["files"].items()]
    table = TextTable.of("Digests", columns("What", "Digest", texts=["Digest"]), digests)
    return DossierSection(
        "identity", "Versions and digests", texts, [("SHA-256 of files; of data and code, 32 digits.", table)]
    )
