"""Encodings of columns: one class per kind, from cells to columns of float32 that models are fed.

Every encoding has been learnt from training rows (column_rule.py), writes itself as JSON, and says what it does with
cells that training has not seen. `values` gives unscaled features; `mean` and `std` of each say how they are scaled.
"""

from dataclasses import dataclass
from math import pi
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from kinfed.data.preprocessing.cells import Cells, Codes, Numbers
from kinfed.data.preprocessing.hashed_words import BUCKETS, unpacked, weighted, word_counts
from kinfed.errors import DataError

Matrix = np.ndarray[Any, np.dtype[np.float32]]
STRAY_TEXTS = 0.01  # share of texts that a column of numbers may hold; they count as missing
FAR = 10.0  # standard deviations from the mean of training rows, beyond which a number is worth a note
DECLARED = "as declared"  # the reason of a kind that the user gave


@dataclass(frozen=True)
class ColumnEncoding:
    """Name of a column, and the reason of its kind."""

    name: str
    reason: str

    @property
    def features(self) -> tuple[str, ...]:
        """[F] names of what the column becomes."""
        return ()

    @property
    def scale(self) -> list[tuple[float, float]]:
        """[F] mean and deviation by which features are scaled."""
        return [(0.0, 1.0)] * len(self.features)

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        """[n, F] unscaled features, and a note where a reader of predictions should know something."""
        raise NotImplementedError

    def _texts(self, cells: Cells, where: str, what: str) -> tuple[Codes, list[str]]:
        """The number [n] of every cell's text, and the texts."""
        if cells.form == "unreadable":
            raise DataError(f"column {self.name} of {where} should hold {what}; it holds {cells.type}")
        texts = cells.as_texts()
        assert texts.codes is not None
        return texts.codes, texts.values


@dataclass(frozen=True)
class NumberEncoding(ColumnEncoding):
    """A number: itself, scaled to mean 0 and deviation 1; a missing one becomes the mean. Where training rows lack
    some, a second feature says which. A constant that some rows lack is that second feature alone. Without a mean
    nothing was learnt: a missing number is refused."""

    mean: float | None
    std: float
    gaps: bool  # training rows have missing ones
    constant: bool = False
    strays: bool = False  # training rows hold texts that are no numbers, which count as missing
    empty_sites: int = 0  # without a value in any training row
    kind: Literal["number"] = "number"

    @property
    def features(self) -> tuple[str, ...]:
        return (*[self.name] * (not self.constant), *[f"{self.name} missing"] * self.gaps)

    @property
    def scale(self) -> list[tuple[float, float]]:
        return ([] if self.constant else [(self.mean or 0.0, self.std)]) + [(0.0, 1.0)] * self.gaps

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        numbers = np.full(len(cells), np.nan) if cells.form == "date" else cells.as_numbers()
        present = cells.present()
        strays = np.isnan(numbers) & (present | (cells.form == "unreadable"))
        note, count = "", int(strays.sum())
        if count:
            row = int(np.flatnonzero(strays)[0])
            text = cells.values[int(cells.codes[row])] if cells.codes is not None else cells.type
            if cells.form != "text" or (not self.strays and count > STRAY_TEXTS * present.sum()):
                raise DataError(
                    f"column {self.name} of {where} should hold numbers; {count} of {int((present | strays).sum())} "
                    f"cells hold none, the first in row {row + 1} ({text!r}). Write numbers, or leave cells empty"
                )
            note = f"column {self.name}: {count} cells hold no number (first: {text!r}) and count as missing"
        missing = np.isnan(numbers)
        note = note or self._note(numbers)
        if self.mean is None and missing.any():
            raise DataError(
                f"column {self.name} of {where} has {int(missing.sum())} empty cell(s), the first in row "
                f"{int(np.flatnonzero(missing)[0]) + 1}, and nothing was learnt that could stand for them; fill them, "
                "or have columns learnt (standardize, or scaling in a deployment)"
            )
        parts = [] if self.constant else [np.where(missing, self.mean or 0.0, numbers)]
        return _stack([*parts, *[missing] * self.gaps], len(cells)), note

    def _note(self, numbers: Numbers) -> str:
        """That some numbers are far from all that training has seen: another unit, or a typing error."""
        if self.mean is None or self.constant:
            return ""
        if not len(far := np.flatnonzero(np.abs(numbers - self.mean) > FAR * self.std)):
            return ""
        return (
            f"column {self.name}: {len(far)} value(s) lie more than {FAR:g} standard deviations from the mean of the "
            f"training rows ({self.mean:.4g}), the first in row {far[0] + 1} ({numbers[far[0]]:g}); is the unit right?"
        )


@dataclass(frozen=True)
class CategoryEncoding(ColumnEncoding):
    """A category: one feature for each, 0 or 1. Rare ones share the feature "other", and so do those that training has
    not seen; where nothing was rare, an unseen one is all zeros. A missing cell is all zeros and a feature of its own
    where training rows have missing ones, else the most frequent category."""

    categories: tuple[str, ...]
    other: bool  # rare ones were pooled
    gaps: bool
    most_frequent: str
    empty_sites: int = 0  # without a value in any training row
    kind: Literal["category"] = "category"

    @property
    def features(self) -> tuple[str, ...]:
        names = [f"{self.name}={category}" for category in self.categories]
        return (*names, *[f"{self.name} other"] * self.other, *[f"{self.name} missing"] * self.gaps)

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        codes, values = self._texts(cells, where, "categories")
        known, missing, rest = self.places()
        places = np.array([known.get(value, rest) for value in values] or [rest], np.int64)
        place = np.where(codes >= 0, places[codes], missing)
        matrix = np.zeros((len(cells), len(self.features)), np.float32)
        rows = np.flatnonzero(place >= 0)
        matrix[rows, place[rows]] = 1
        occurring = {values[code] for code in np.unique(codes[codes >= 0]).tolist()}
        return matrix, self._note(sorted(occurring - known.keys()))

    def places(self) -> tuple[dict[str, int], int, int]:
        """Places of the feature that is 1: of every category, of a missing cell, and of all other texts; -1: none."""
        known = {value: place for place, value in enumerate(self.categories)}
        other = len(known) if self.other else -1
        missing = len(known) + self.other if self.gaps else known.get(self.most_frequent, other)
        return known, missing, other

    def _note(self, unseen: list[str]) -> str:
        """Note on unseen values, which cannot be told from rare ones that were pooled."""
        if not unseen:
            return ""
        fate = "are taken as other" if self.other else "have no feature: all zeros"
        examples = ", ".join(repr(value) for value in unseen[:3]) + (", ..." if len(unseen) > 3 else "")
        what = "rare in training or not seen there" if self.other else "not seen in training"
        return f"column {self.name}: values {what} ({examples}) {fate}"


@dataclass(frozen=True)
class DateEncoding(ColumnEncoding):
    """A date: days since 1970-01-01, scaled like a number, and the season and the day of the week as points of a
    circle (sine, cosine); with times of day also the hour. A missing one becomes the mean day, with zeros for the
    circles, and a feature of its own where training rows have missing ones."""

    mean: float
    std: float
    gaps: bool
    has_time: bool
    empty_sites: int = 0  # without a value in any training row
    kind: Literal["date"] = "date"

    @property
    def periods(self) -> list[tuple[str, float]]:
        """Names of what goes in circles, and days of one turn."""
        return [("season", 365.2425), ("weekday", 7.0), *([("hour", 1.0)] if self.has_time else [])]

    @property
    def features(self) -> tuple[str, ...]:
        circles = [f"{self.name} {period} {part}" for period, _ in self.periods for part in ("sin", "cos")]
        return (f"{self.name} day", *circles, *[f"{self.name} missing"] * self.gaps)

    @property
    def scale(self) -> list[tuple[float, float]]:
        return [(self.mean, self.std)] + [(0.0, 1.0)] * (len(self.features) - 1)

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        days = cells.as_days()
        strays = cells.present() & np.isnan(days)
        if cells.form in ("number", "boolean", "unreadable") or strays.any():
            row = int(np.flatnonzero(strays)[0]) if strays.any() else 0
            raise DataError(
                f"column {self.name} of {where} should hold dates such as 2024-02-29; it holds {cells.type}, the first "
                f"wrong one in row {row + 1}"
            )
        missing = np.isnan(days)
        known = np.where(missing, self.mean, days)
        parts = [known]
        for _, period in self.periods:
            angle = 2 * pi * (known % period) / period
            parts += [np.where(missing, 0, np.sin(angle)), np.where(missing, 0, np.cos(angle))]
        return _stack([*parts, *[missing] * self.gaps], len(cells)), ""


@dataclass(frozen=True)
class TextEncoding(ColumnEncoding):
    """A text with too many different values for categories: scores of its words, each what ridge regression says of the
    target (text_scores.py). A text without known words, or a missing one, has the mean of the target.

    Words are held by the buckets that they are hashed into, in three texts that `packed` makes."""

    scores: tuple[str, ...]  # [S] names
    moments: tuple[tuple[float, float], ...]  # [S] mean and deviation
    level: tuple[float, ...]  # [S] score of a text without words
    texts: int  # of training
    buckets: str  # uint32 [M], ascending
    documents: str  # uint32 [M] training texts with a word of the bucket
    weights: str  # float32 [M, S]
    empty_sites: int = 0  # without a value in any training row
    kind: Literal["text"] = "text"

    @property
    def features(self) -> tuple[str, ...]:
        return self.scores

    @property
    def scale(self) -> list[tuple[float, float]]:
        return list(self.moments)

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        codes, values = self._texts(cells, where, "texts")
        documents, weights = self.words()
        x = weighted(word_counts(values), documents, self.texts)
        scores = x @ weights + np.array(self.level)
        return np.asarray(scores[codes], np.float32), ""  # -1, a missing text, is the last

    def words(self) -> tuple[Matrix, Matrix]:
        """Texts with a word of every bucket [BUCKETS], and weights [BUCKETS, S]. DataError if they are none."""
        buckets, held = unpacked(self.buckets, "<u4").astype(np.int64), unpacked(self.documents, "<u4")
        weights, count = unpacked(self.weights, "<f4"), len(self.scores)
        sizes = len(held) == len(buckets) and len(weights) == len(buckets) * count
        if not (sizes and count == len(self.level) == len(self.moments) > 0 and self.texts >= 0):
            raise DataError(f"column {self.name}: {len(buckets)} words need a weight each, for every score")
        if (np.diff(buckets) <= 0).any() or (buckets >= BUCKETS).any() or not np.isfinite(weights).all():
            raise DataError(f"column {self.name}: words lie in {BUCKETS:,} buckets, in ascending order")
        documents, every = np.zeros(BUCKETS, np.float32), np.zeros((BUCKETS, count), np.float32)
        documents[buckets], every[buckets] = held, weights.reshape(-1, count)
        return documents, every


@dataclass(frozen=True)
class SkippedColumn(ColumnEncoding):
    """A column that models are not fed."""

    kind: Literal["skip"] = "skip"


PlainEncoding = NumberEncoding | CategoryEncoding | DateEncoding


@dataclass(frozen=True)
class OwnColumn(ColumnEncoding):
    """A column that not every site has (own_columns.py): its effect on the outputs, as a site that has it has learnt
    by itself, one score for each output. Everywhere else, and until a site has learnt it, the effect is zero."""

    scores: tuple[str, ...]  # [S] names of outputs; "" is the only one
    of: Literal["number", "category", "date"]  # what it is where it is
    empty_sites: int = 0  # without a value in any training row
    held: bool = False  # the site has it
    here: Annotated[PlainEncoding, Field(discriminator="kind")] | None = (
        None  # at the site; None: it has learnt no effect
    )
    centre: tuple[float, ...] = ()  # [F] means of what the column becomes here, whose effect is zero
    weights: tuple[tuple[float, ...], ...] = ()  # [F][S]
    gain: float | None = None  # what it buys here in the loss of a row that its effect was not learnt from
    gain_error: float | None = None
    kind: Literal["own"] = "own"

    gaps = True  # a table may lack it

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(f"effect of {self.name}{score}" for score in self.scores)

    def encode(self, cells: Cells, where: str) -> tuple[Matrix, str]:
        if self.here is None or cells.form == "absent":
            return np.zeros((len(cells), len(self.scores)), np.float32), ""
        raw, note = self.here.encode(cells, where)
        return np.asarray((raw - np.array(self.centre)) @ np.array(self.weights), np.float32), note


Encoding = PlainEncoding | TextEncoding | OwnColumn
AnyEncoding = Annotated[Encoding | SkippedColumn, Field(discriminator="kind")]


def _stack(parts: list[Numbers | Any], rows: int) -> Matrix:
    if not parts:
        return np.zeros((rows, 0), np.float32)
    return np.stack([np.asarray(part, np.float32) for part in parts], 1)
