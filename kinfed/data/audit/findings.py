"""Findings of the audit: one home for all doubts about data, whether they came as a table, as arrays or by name.

    findings = audit(...)                                   table_audit.py, rows_audit.py
    refuse(findings, accepted("label_copy,units"))          raises a DataError with the first that was not accepted

A finding has a name, by which it can be accepted (`--accept NAME,...`). Some are refused, as they cannot be meant and
every figure would be wrong; the others are notes, which ask. Labels of test rows are looked at for these doubts and for
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kinfed.errors import ConfigError, DataError, unknown_name

EVERYTHING = "all"  # accepts every finding, without looking

# What the audit looks for, by name.
CHECKS = {
    "split": "a split column that names no test rows",
    "test_copies": "test rows that are equal to training rows",
    "test_classes": "classes that occur in test rows alone",
    "client_names": "names of clients that differ in nothing but letter case, blanks or Unicode form",
    "label_copy": "columns that say the label, in other words or by being empty",
    "leak": "columns that tell almost all of the target",
    "identifier": "numbers that are identifiers or codes",
    "duplicates": "rows that occur several times",
    "persons": "persons with rows in training and in test",
    "time": "test rows drawn at random from rows that have dates",
    "units": "columns whose values differ by site as units do",
    "column_names": "names of columns that differ in nothing but letter case, blanks or signs",
    "label_spelling": "labels that differ in spelling alone",
    "site_classes": "classes without training rows at some sites",
    "encoding": "texts that were read in the wrong encoding",
    "small_clients": "clients with hardly a row",
}


@dataclass(frozen=True)
class Finding:
    name: str  # of CHECKS
    text: str  # a sentence: what was seen, and what to do
    refused: bool = False  # unless it is accepted

    def __post_init__(self) -> None:
        assert self.name in CHECKS, self.name

    @property
    def sentence(self) -> str:
        """The finding as a note."""
        return f"audit, {self.name}: {self.text}"


def accepted(names: str | Sequence[str]) -> frozenset[str]:
    """Names of findings that the user accepts, from "label_copy,units" or a sequence."""
    parts = names.split(",") if isinstance(names, str) else list(names)
    chosen = frozenset(part.strip() for part in parts if part.strip())
    for name in chosen:
        if name != EVERYTHING and name not in CHECKS:
            raise unknown_name("finding to accept", name, [*CHECKS, EVERYTHING])
    return chosen


def refuse(findings: Iterable[Finding], accept: str | Sequence[str] = "") -> None:
    """Raise a DataError if a finding is refused and not accepted."""
    names = accepted(accept)
    refusals = [one for one in findings if one.refused and one.name not in names]
    if not refusals or EVERYTHING in names:
        return
    all_names = ",".join(dict.fromkeys(one.name for one in refusals))
    others = [one.text for one in refusals[1:]]
    more = f" Also refused: {' '.join(others)}" if others else ""
    raise DataError(f"{refusals[0].text}{more} If the data are meant so: --accept {all_names}")


def to_record(findings: Sequence[Finding], accept: str | Sequence[str] = "") -> dict[str, Any]:
    """The content of audit.json: findings, what was accepted, and all that was looked for."""
    return {"findings": [asdict(one) for one in findings], "accepted": sorted(accepted(accept)), "checks": CHECKS}


def from_record(records: object) -> list[Finding]:
    """Findings that were written with a federation; ConfigError for anything else."""
    try:
        return [Finding(**one) for one in records]  # type: ignore[attr-defined]
    except (TypeError, AssertionError):
        raise ConfigError("findings of an audit cannot be read; save the federation again") from None


def some(names: Iterable[object], most: int = 5) -> str:
    """The first few of many names."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
