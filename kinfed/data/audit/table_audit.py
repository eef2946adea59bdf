"""Doubts about a table: its columns, labels, sites and parts. All rows may be of one site: a node looks at its own.

Numbers are looked at in at most MOST_ROWS rows, evenly spread; a table of 10^5 rows takes a fraction of a second. The
target of test rows is not looked at here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kinfed.data.audit.findings import Finding, some
from kinfed.data.audit.rows_audit import alike, difference, to_a_reader
from kinfed.data.audit.target_leaks import leak_findings
from kinfed.data.audit.unit_differences import unit_findings
from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.cells import Cells

MOST_ROWS = 100_000
LEAST_ROWS = 50  # below which nothing is said of values
MOST_COLUMNS = 500  # that are looked at one by one
LEAST_PERSONS, LEAST_SHARED = 20, 0.1
ALL_BUT_FEW = 0.9  # share of different values of a running number that has duplicates
DATES = 20  # different ones, from which on rows are of different times
RARE_SPELLING, SHORT_WORD = 0.05, 5  # a misspelt label is rare or some clients' own, and long enough to be one
MANY_CLASSES = 20  # with more, nothing is said of classes that sites lack
EXPECTED = 5  # rows of a class that a client lacks; of fewer it may have none by chance
MOST_NAMES = 10_000
MANY_CLIENTS, FEW_ROWS = 20, 5  # this many clients with fewer rows each are worth a note
_PERSON = re.compile(r"patient|person|subject|proband|participant|user|customer|member|client|student|kunde|mrn", re.I)
_BIRTH = re.compile(r"birth|born|dob|geburt", re.I)
# Surer than the names by which the rule leaves out what always differs: age_at_index is a number.
_IDENTIFIER = re.compile(
    r"(^|[_\W])(id|ids|nr|nbr|nummer|key|uuid|guid|mrn|record|case|fall|patient|subject|encounter)$|(?-i:[a-z]I[dD]$)",
    re.I,
)
_CODED = re.compile(r"(^|[_\W])(zip|zipcode|zip_code|plz|postcode|postal_?code|postleitzahl|phone|telefon)$", re.I)
_MISREAD = re.compile("\N{REPLACEMENT CHARACTER}|Ã[\x80-\xbf¤¶¼Ÿ©¨±]|â€")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TableParts:
    """A table as it is about to be learnt from. Rows are numbers of its rows."""

    cells: Mapping[str, Cells]  # all columns without another role
    kinds: Mapping[str, str]  # of these, columns that models are fed, as number, category, date or text
    labels: Array  # [N]
    problem: Problem
    train: Array  # rows
    owner: Array  # of each training row, the number of its client
    names: Sequence[str]  # of clients
    test: Array  # rows
    sizes: Array  # [K] rows of every client, of both parts
    label_column: str = "label"
    client_column: str | None = None  # None: clients are not those of the table
    names_test_rows: bool = False  # a column says which rows are for testing
    keeps_persons: bool = False  # rows of one person are in one part
    keeps_order: bool = False  # rows for testing are later than those that train


def audit_table(parts: TableParts) -> list[Finding]:
    sample = _spread_out(parts.train)
    used = {name: cells for name, cells in list(parts.cells.items())[:MOST_COLUMNS] if name in parts.kinds}
    rows, owner = parts.train[sample], parts.owner[sample]
    numbers = {name: cells for name, cells in used.items() if parts.kinds.get(name) == "number"}
    return [
        *leak_findings(used, parts.train, parts.labels[parts.train], parts.problem),
        *column_name_findings(parts.cells, parts.train), *_label_findings(parts), *_identifier_findings(numbers, rows),
        *([] if parts.keeps_persons else _person_findings(parts)),
        *([] if parts.keeps_order else _time_findings(parts, used)),
        *(unit_findings(numbers, rows, owner, parts.names) if parts.client_column else []), *_class_findings(parts),
        *_encoding_findings(parts), *_size_findings(parts),
    ]  # fmt: skip


def _spread_out(rows: Array) -> Array:
    return np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(np.int64)


def column_name_findings(cells: Mapping[str, Cells], rows: Array) -> list[Finding]:
    """Columns whose names are the same to a reader. Where no row has a value in both, they are one column that sites
    call by two names, and half of its values are missing."""
    first: dict[str, str] = {}
    findings = []
    for name in cells:
        other = first.setdefault(re.sub(r"[\W_]+", "", to_a_reader(name)) or name, name)
        if other == name:
            continue
        here, there = (cells[one].present()[rows] for one in (other, name))
        apart = bool(here.any() and there.any() and not (here & there).any())
        text = f"columns {other!r} and {name!r} have almost the same name"
        if apart:
            text += ", and no row has a value in both: they are one column under two names. Give it one name."
        else:
            text += " and count as two"
        findings.append(Finding("column_names", text, refused=apart))
    return findings[:3]


def _label_findings(parts: TableParts) -> list[Finding]:
    """Classes that differ in nothing but case, blanks or Unicode form; or, where one is rare or has clients of its own,
    in a letter."""
    if not 0 < parts.problem.num_classes <= MOST_NAMES:
        return []
    names = parts.problem.class_labels
    pairs = alike(names)
    if pairs:
        why = difference(*pairs[0])
        text = (
            f"column {parts.label_column}: {pairs[0][0]!r} and {pairs[0][1]!r} count as two classes, and differ in "
            f"nothing but {why}"
        )
        return [Finding("label_spelling", f"{text}. Give them one name.", refused=why != "letter case")]
    by_client = np.zeros((1 + int(parts.owner.max(initial=0)), len(names)), np.int64)  # dealt clients have no names
    np.add.at(by_client, (parts.owner, parts.labels[parts.train]), 1)
    counts = by_client.sum(0)
    words = [k for k, name in enumerate(names) if len(name) >= SHORT_WORD and not any(c.isdigit() for c in name)]
    for place, k in enumerate(words if len(words) <= MANY_CLASSES * 5 else ()):
        for other in words[place + 1 :]:
            few, many = sorted((counts[k], counts[other]))
            apart = few > 0 and not (by_client[:, k] * by_client[:, other]).any()  # clients spell in their own way
            if (few < RARE_SPELLING * many or apart) and _one_letter_apart(names[k], names[other]):
                shown = f"{names[k]!r} ({counts[k]}) and {names[other]!r} ({counts[other]})"
                text = (
                    f"column {parts.label_column}: {shown} differ by a letter; give them one name if they are the same"
                )
                return [Finding("label_spelling", text)]
    return []


def _one_letter_apart(a: str, b: str) -> bool:
    """Whether one letter was changed, left out, added, or swapped with the next."""
    a, b = a.casefold(), b.casefold()
    if abs(len(a) - len(b)) > 1:
        return False
    changes = [code for code in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if code[0] != "equal"]
    if len(a) == len(b) and sorted(a) == sorted(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) == 2
    return len(changes) == 1 and max(changes[0][2] - changes[0][1], changes[0][4] - changes[0][3]) == 1


def _identifier_findings(numbers: Mapping[str, Cells], rows: Array) -> list[Finding]:
    """Whole numbers that are called like identifiers or codes, or that run on but for a few duplicates."""
    suspects = []
    for name, cells in numbers.items():
        if cells.codes is not None or cells.form != "number":
            continue
        values = cells.numbers[rows]
        values = values[~np.isnan(values)]
        if len(values) < LEAST_ROWS or not (values == np.round(values)).all():
            continue
        different = len(np.unique(values))
        extent = float(np.ptp(values)) + 1
        runs_on = different >= ALL_BUT_FEW * len(values) and extent <= 2 * len(values)
        called = (_IDENTIFIER.search(name) or _CODED.search(name)) and different > 2
        if called or runs_on:
            suspects.append(name)
    if not suspects:
        return []
    text = (
        f"columns that look like identifiers, case numbers or codes are used as numbers: {some(suspects)}. Leave them "
        f"out, or take them as categories: --columns {suspects[0]}=skip or {suspects[0]}=category"
    )
    return [Finding("identifier", text)]


def _person_findings(parts: TableParts) -> list[Finding]:
    if not len(parts.test):
        return []
    for name, cells in parts.cells.items():
        if not (_PERSON.search(name) or _IDENTIFIER.search(name)) or name == parts.client_column:
            continue
        keys = cells.codes if cells.codes is not None else cells.numbers
        train, test = np.unique(keys[parts.train]), keys[parts.test]
        whole = cells.codes is not None or bool((train[~np.isnan(train)] % 1 == 0).all())
        if not whole or len(train) < LEAST_PERSONS or len(train) > 0.95 * len(parts.train):
            continue
        known = np.isin(test, train) & cells.present()[parts.test]
        if known.mean() >= LEAST_SHARED and len(train) * 50 >= len(parts.train):
            text = (
                f"{int(known.sum()):,} of {len(test):,} test rows are of a {name} with training rows: figures are of "
                f"persons who are known, and less is to be expected of new ones. --person-column {name} keeps the rows "
                "of a person in one part"
            )
            return [Finding("persons", text)]
    return []


def _time_findings(parts: TableParts, used: Mapping[str, Cells]) -> list[Finding]:
    if parts.names_test_rows or not len(parts.test):
        return []
    for name, cells in used.items():
        if parts.kinds.get(name) == "date" and not _BIRTH.search(name):
            days = cells.as_days()[parts.train]
            if len(np.unique(days[~np.isnan(days)])) >= DATES:
                text = (
                    f"rows have dates ({name}), and test rows are drawn at random among them: figures are of times "
                    f"that are known. For rows to come, test on the last ones (--order-column {name})"
                )
                return [Finding("time", text)]
    return []


def _class_findings(parts: TableParts) -> list[Finding]:
    """Classes that a client lacks though it would have EXPECTED rows of them if it were like the others."""
    classes = parts.problem.num_classes
    if parts.client_column is None or not 2 <= classes <= MANY_CLASSES or len(parts.names) < 2:
        return []
    counts = np.bincount(parts.owner * classes + parts.labels[parts.train], minlength=len(parts.names) * classes)
    counts = counts.reshape(-1, classes)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / len(parts.train)
    lacking = (counts == 0) & (expected >= EXPECTED)
    if not lacking.any():
        return []
    labels = parts.problem.class_labels
    shown = some(f"{labels[k]} at {int(n)}" for k, n in enumerate(lacking.sum(0)) if n)
    text = f"classes without a training row at some of the {len(parts.names):,} clients: {shown}"
    return [Finding("site_classes", f"{text}. What such a client learns alone never predicts them")]


def _encoding_findings(parts: TableParts) -> list[Finding]:
    texts = (value for cells in parts.cells.values() for value in cells.values[:1000])
    every = [*parts.cells, *parts.names[:MOST_NAMES], *(parts.problem.class_names or ()), *texts]
    matches = [match for text in every if (match := _MISREAD.search(text))]
    if not matches:
        return []
    shown = some((repr(_surroundings(match)) for match in matches), 3)
    return [Finding("encoding", f"texts look as if they were read in the wrong encoding: {shown} (--encoding)")]


def _surroundings(match: re.Match[str], reach: int = 15) -> str:
    """What matched, with a few letters on both sides: cells may be whole letters."""
    begin, end = max(match.start() - reach, 0), match.end() + reach
    before, after = "..." if begin else "", "..." if end < len(match.string) else ""
    return f"{before}{match.string[begin:end]}{after}"


def _size_findings(parts: TableParts) -> list[Finding]:
    """That most clients have hardly a row: the column may be the wrong one."""
    clients = len(parts.names)
    if parts.client_column is None or clients < MANY_CLIENTS:
        return []
    median = int(np.median(parts.sizes))
    if median >= FEW_ROWS:
        return []
    text = f"half of the {clients:,} clients have at most {median} row(s)"
    return [Finding("small_clients", f"{text}; is {parts.client_column} the column that names them?")]
