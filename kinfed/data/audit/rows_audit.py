"""Doubts about examples, classes and clients of a federation, whatever it was made of.

`test_copies`: rows of a table with few columns are often equal by chance. Test rows that are drawn like training rows
have an equal one among these as often as training rows have one among the others; copies are what is more than that.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinfed.data.audit.findings import EVERYTHING, Finding, accepted, some

if TYPE_CHECKING:
    from kinfed.data.federations.federation import Federation

MOST_ROWS = 100_000  # of each part, evenly spread
MOST_NUMBERS = 128  # of an example, evenly spread, that tell it from most others
MOST_CLIENTS = 10_000  # whose names are compared
LEAST_COPIES = 10
COPIED_SHARE = 0.25  # of the test rows, from which on copies are refused
NOTED_SHARE = 0.02
LEAST_REPEATED, REPEATED_SHARE = 3, 0.001  # rows that occur a second time, from which on they are noted
SAMPLE, MOSTLY_DIFFERENT = 2_000, 0.8  # rows that differ, of which this many have a value of their own in some feature
VARIED, MORE = 0.5, 2.0  # the same share within clients, from which on a feature is left out; how many more are equal
BLOCK = 4096  # rows that are hashed at once
BY_CHANCE = 5  # test rows up to which a class may have come there by chance alone
SIMULATED_CLIENTS = 100_000  # with more, single rows are not looked at

Array = np.ndarray[Any, Any]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]
# By which the bits of an example's numbers, of its client and of its label are weighted.
COEFFICIENTS: Hashes = np.random.default_rng(0).integers(0, 2**63, 8195, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def audited(data: Federation, accept: str | Sequence[str] = "") -> Federation:
    """The federation with the findings of this file among those of its table, and a note on each; as it is where
    everything is accepted, or where it was looked at before."""
    if data.is_audited or EVERYTHING in accepted(accept):
        return data
    new = [*client_name_findings(data.names), *class_findings(data), *copy_findings(data)]
    notes = [*data.notes, *(finding.sentence for finding in new)]
    return replace(data, findings=[*data.findings, *new], notes=notes, is_audited=True)


def client_name_findings(names: Sequence[str]) -> list[Finding]:
    pairs = alike(names) if len(names) <= MOST_CLIENTS else []
    if not pairs:
        return []
    shown = "; ".join(f"{first!r} and {second!r}" for first, second in pairs[:3])
    more = f" and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    text = (
        f"names of clients differ in nothing but {difference(*pairs[0])}: {shown}{more}. Each would be a client of its "
        "own, with a part of the rows; give them one name."
    )
    return [Finding("client_names", text, refused=True)]


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of names that are the same to a reader: but for letter case, blanks and the form of Unicode."""
    first: dict[str, str] = {}
    pairs = []
    for name in names:
        other = first.setdefault(to_a_reader(name), name)
        if other != name:
            pairs.append((other, name))
    return pairs


def to_a_reader(name: str) -> str:
    """The name in one form of Unicode, without marks that are not seen, in one case and with single blanks."""
    seen = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) not in ("Cf", "Cc"))
    return " ".join(seen.casefold().split())


def difference(first: str, second: str) -> str:
    """What two names that are alike differ in."""
    if " ".join(first.split()) == " ".join(second.split()):
        return "blanks"
    folded = (" ".join(name.casefold().split()) for name in (first, second))
    return "letter case" if len(set(folded)) == 1 else "their form in Unicode (the same letters in other codes)"


def class_findings(data: Federation) -> list[Finding]:
    if not data.problem.has_classes or data.problem.kind == "dense" or data.num_clients > SIMULATED_CLIENTS:
        return []
    learnt = np.unique(data.labels[torch.cat([data.train.rows, data.val.rows])].numpy())
    tested, counts = np.unique(data.labels[data.test.rows].numpy(), return_counts=True)
    new = ~np.isin(tested, learnt)
    if not new.any():
        return []
    labels = data.problem.class_labels
    shown = some(f"{labels[label]} ({count})" for label, count in zip(tested[new], counts[new], strict=True))
    text = f"classes that occur in test rows and in no training row: {shown} row(s). They cannot be learnt"
    if counts[new].max() > BY_CHANCE:
        return [Finding("test_classes", f"{text}; move some of their rows to training, or leave them out.", True)]
    return [Finding("test_classes", f"{text}; --stratify draws test rows by class")]


def copy_findings(data: Federation) -> list[Finding]:
    """Test rows that are copies of training rows, or else rows that occur several times where none should."""
    if data.num_clients > SIMULATED_CLIENTS or not len(data.test.rows):
        return []
    train, test = (_spread_out(torch.unique(split.rows)) for split in (data.train, data.test))
    rows = torch.cat([train, test])
    hashes = _hashes(data, rows)
    is_copy = np.isin(hashes[len(train) :], hashes[: len(train)])
    copies = int(is_copy.sum())
    _, place, counts = np.unique(hashes[: len(train)], return_inverse=True, return_counts=True)
    by_chance = float((counts[place] > 1).mean())
    beyond = copies / len(test) - by_chance
    if copies < LEAST_COPIES or beyond < NOTED_SHARE:
        return _duplicate_findings(data, rows, hashes)
    text = (
        f"{copies:,} of {len(test):,} test rows are equal to a training row in all features and the label"
        + (f", where {100 * by_chance:.0f} % would be by chance" if by_chance >= 0.01 else "")
        + ": figures on them say what was learnt by heart"
    )
    if beyond >= COPIED_SHARE:
        return [Finding("test_copies", f"{text}. Leave such rows out of one of the two parts.", refused=True)]
    return [Finding("test_copies", text)]


def _duplicate_findings(data: Federation, rows: Tensor, hashes: Hashes) -> list[Finding]:
    """Rows that occur several times at a client, where chance does not make them: some feature is hardly ever the same
    twice, or leaving out any with many values makes hardly more rows equal."""
    owner = torch.zeros(len(data.features), dtype=torch.int64)
    for split in (data.train, data.test):
        owner[split.rows] = split.owner
    client = _bits(owner[rows].numpy()) * COEFFICIENTS[-2]
    own = hashes + client
    _, first = np.unique(own, return_index=True)
    repeated = len(hashes) - len(first)
    if repeated < max(LEAST_REPEATED, REPEATED_SHARE * len(hashes)):
        return []
    numbers, sample = _numbers(data, rows, MOST_NUMBERS), first[:SAMPLE]
    if max(len(np.unique(column)) for column in numbers[sample].T) < MOSTLY_DIFFERENT * len(sample):
        values = _bits(numbers)
        own_values = [len(np.unique(one)) for one in values[sample].T * COEFFICIENTS[0] + client[sample]]
        varied = np.flatnonzero(np.array(own_values) >= VARIED * len(sample))
        without = (len(own) - len(np.unique(own - values[:, j] * COEFFICIENTS[j])) for j in varied)
        if not len(varied) or any(more > MORE * repeated for more in without):
            return []
    text = (
        f"{repeated:,} of {len(hashes):,} rows occur a second time at the same client, with the same numbers throughout"
    )
    return [Finding("duplicates", f"{text}; were rows exported twice? Copies may be tested on what they have taught")]


def _spread_out(rows: Tensor) -> Tensor:
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).long()]


def _numbers(data: Federation, rows: Tensor, most: int | None = None) -> Array:
    """[m, D] examples as they are stored, of which up to `most` numbers each, evenly spread."""
    flat = data.features.raw.reshape(len(data.features), -1)[rows]
    if most is None or flat.shape[1] <= most:
        return flat.numpy()
    return flat.index_select(1, torch.linspace(0, flat.shape[1] - 1, most).long()).numpy()


def _hashes(data: Federation, rows: Tensor) -> Hashes:
    """[m] a number for every example with its label, the same for equal ones and hardly ever for others: the bits of
    its numbers, weighted by random odd ones modulo 2^64. Of wide examples some numbers are enough to tell most apart,
    and all of them are read where these are equal."""
    hashes = _weighted(data, rows, MOST_NUMBERS)
    if data.features.raw[:1].numel() > MOST_NUMBERS:
        _, place, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        suspects = np.flatnonzero(counts[place] > 1)
        hashes[suspects] += _weighted(data, rows[torch.from_numpy(suspects)], None)
    return hashes


def _weighted(data: Federation, rows: Tensor, most: int | None) -> Hashes:
    parts = [np.zeros(0, np.uint64)]
    for block in torch.split(rows, BLOCK):
        bits = _bits(_numbers(data, block, most))
        parts.append((bits * np.resize(COEFFICIENTS[:-2], bits.shape[1])).sum(1))
    labels = _bits(data.labels[rows].reshape(len(rows), -1).numpy()) if len(rows) else np.zeros((0, 1), np.uint64)
    weights = np.resize(COEFFICIENTS[::-1], labels.shape[1])  # the last is that of a single label
    return np.asarray(np.concatenate(parts) + (labels * weights).sum(1), np.uint64)


def _bits(values: Array) -> Hashes:
    """The bits of numbers, mixed so that small whole numbers differ in many; 0 and −0 are the same."""
    if values.dtype.kind == "f":
        values = (values + 0.0).view(np.uint32 if values.dtype == np.float32 else np.uint64)
    bits = values.astype(np.uint64)
    return np.asarray(bits ^ (bits >> np.uint64(17)) ^ (bits << np.uint64(13)), np.uint64)
