"""The way of rows to what models are fed: learnt from training rows, kept with every model.

    learnt = TablePreprocessing.learn(frame, train_rows=mask)          in one place
    learnt = TablePreprocessing.from_statistics(merged, declared)      from what sites sent (column_statistics.py)
    x = learnt.transform(new_rows)                                     [n, D] float32, scaled
    TablePreprocessing.from_json(learnt.to_json()) == learnt

scikit-learn's transformers and skrub's TableVectorizer learn from rows in one place and offer no way to merge what two
sites have learnt, so what must be federated is written here, in a few formulas each; scikit-learn is the oracle of the
tests. The local part, reading and converting tables, is Arrow's and narwhals'.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.cells import KINDS, Cells, Kind, read_cells
from kinfed.data.preprocessing.column_rule import CODES, choose_encoding
from kinfed.data.preprocessing.column_statistics import ReadTable, TableStatistics
from kinfed.data.preprocessing.encodings import (
    DECLARED,
    AnyEncoding,
    Encoding,
    NumberEncoding,
    OwnColumn,
    SkippedColumn,
    TextEncoding,
)
from kinfed.data.preprocessing.frames import as_table
from kinfed.data.preprocessing.own_columns import RowsAtSite, as_own, learn_at_site, outputs_of, read_own
from kinfed.data.preprocessing.text_scores import TextScores, TextTarget
from kinfed.errors import ConfigError, DataError, unknown_name

_FORMAT = 1
MOST_NAMES = 8  # of columns in a sentence


@dataclass(frozen=True)
class EncodedRows:
    """Rows as `Features` takes them, before scaling."""

    raw: Tensor  # [n, D] float32
    notes: list[str]  # what a reader of predictions should know: unseen values, columns that are absent


@dataclass(frozen=True)
class TablePreprocessing:
    encodings: tuple[AnyEncoding, ...]  # in the order of the table's columns
    standardize: bool = True
    rows: int = 0  # training rows that it was learnt from
    sites: int = 1
    message_bytes: int = 0  # of the sites' statistics together
    format: int = _FORMAT

    @classmethod
    def learn(
        cls, rows: Any, *, columns: Mapping[str, Kind] | str | None = None, train_rows: Any = None, sites: Any = None,
        standardize: bool = True, target: TextTarget | None = None,
    ) -> TablePreprocessing:  # fmt: skip
        """Learn from a frame, or whatever `as_table` takes. `columns` declares kinds of columns, `train_rows` [n] marks
        rows to learn from (default: all), `sites` [n] names the site of every row: identifiers differ within a site.
        Scores of long texts are learnt of the `target`."""
        table, declared = as_table(rows), parse_kinds(columns)
        for name in declared:
            if name not in table.column_names:
                raise unknown_name("declared column", name, table.column_names)
        index = np.arange(table.num_rows) if train_rows is None else np.flatnonzero(np.asarray(train_rows))
        if sites is None:
            numbers, count = np.zeros(len(index), np.int64), 1
        else:
            names, numbers = np.unique(np.asarray(sites).astype(str)[index], return_inverse=True)
            count = len(names)
        read = ReadTable.read(table, table.column_names, declared, "the table")
        return cls.from_read(read, TextScores(read.cells, index, numbers, count, target), standardize)

    @classmethod
    def from_read(
        cls, read: ReadTable, texts: TextScores, standardize: bool, outputs: tuple[str, ...] = ()
    ) -> TablePreprocessing:
        """Learn from the training rows that `texts` has, and their sites."""
        statistics, size = read.collect(texts.rows, texts.site, texts.sites)
        learnt = cls.from_statistics(statistics, read.columns, standardize, size, texts, outputs)
        return dataclasses.replace(learnt, message_bytes=size + texts.nbytes)

    @classmethod
    def from_statistics(
        cls, statistics: TableStatistics, declared: Mapping[str, Kind], standardize: bool = True,
        message_bytes: int | None = None, texts: TextScores | None = None, outputs: tuple[str, ...] = (),
    ) -> TablePreprocessing:  # fmt: skip
        """Choose encodings by the merged messages of all sites; `texts` learns scores of long texts, which are left out
        without. Columns that not every site has get effects on these `outputs` (own_columns.py); without any, they are
        columns with gaps."""
        if statistics.rows < 1:
            raise DataError("columns are learnt from training rows, and there is none")
        chosen = [
            choose_encoding(name, column, declared.get(name), standardize, statistics.sites, texts)
            for name, column in statistics.columns.items()
        ]
        encodings = [as_own(one, statistics, outputs) for one in chosen]
        skipped = [SkippedColumn(name, DECLARED) for name in declared if name not in statistics.columns]
        learnt = cls(
            (*encodings, *skipped), standardize, statistics.rows, statistics.sites,
            statistics.nbytes if message_bytes is None else message_bytes,
        )  # fmt: skip
        if not learnt.features:
            reasons = "; ".join(f"{column.name} {column.reason}" for column in learnt.skipped)
            raise DataError(f"no feature columns left: {reasons or 'the table has no columns'}")
        return learnt

    @classmethod
    def plain(cls, columns: Iterable[str]) -> TablePreprocessing:
        """Numbers as they are: nothing is learnt, so that nothing leaves a site, and gaps and texts are refused."""
        return cls(tuple(NumberEncoding(name, "numbers", None, 1.0, False) for name in columns), False)

    @property
    def used(self) -> list[Encoding]:
        return [encoding for encoding in self.encodings if not isinstance(encoding, SkippedColumn)]

    @property
    def skipped(self) -> list[SkippedColumn]:
        return [encoding for encoding in self.encodings if isinstance(encoding, SkippedColumn)]

    @property
    def own(self) -> list[OwnColumn]:
        """Columns that not every site has."""
        return [encoding for encoding in self.encodings if isinstance(encoding, OwnColumn)]

    def at_site(self, own: object) -> TablePreprocessing:
        """The same with own columns as a site has learnt them, or their record."""
        learnt = {one.name: one for one in read_own(own)}
        return dataclasses.replace(self, encodings=tuple(learnt.get(one.name, one) for one in self.encodings))

    @property
    def columns(self) -> list[str]:
        """Columns of the table that models are fed."""
        return [encoding.name for encoding in self.used]

    @property
    def features(self) -> list[str]:
        """[D] names of what they become."""
        return [name for encoding in self.used for name in encoding.features]

    @property
    def mean(self) -> Tensor | None:
        """[D] float32, which is subtracted; None without scaling."""
        return self._scale(0)

    @property
    def std(self) -> Tensor | None:
        """[D] float32, by which is divided; None without scaling."""
        return self._scale(1)

    def _scale(self, part: int) -> Tensor | None:
        if not self.standardize:
            return None
        return torch.tensor([pair[part] for one in self.used for pair in one.scale], dtype=torch.float32)

    @property
    def learns_nothing(self) -> bool:
        """Whether it is the same whatever the rows: numbers without gaps, as they are, and nothing left out."""
        plain = all(isinstance(one, NumberEncoding) and one.mean is None for one in self.used)
        return plain and all(one.reason == DECLARED for one in self.skipped)

    def encode(self, rows: Any, where: str = "the table") -> EncodedRows:
        """Rows, in columns of any order, before scaling. Columns that training rows had gaps in may be absent."""
        table = as_table(rows, self.columns)
        present = [name for name in self.columns if name in table.column_names]
        cells = {name: read_cells(table[name], f"column {name} of {where}") for name in present}
        return self.encode_cells(cells, table.num_rows, where)

    def encode_cells(self, cells: Mapping[str, Cells], rows: int, where: str) -> EncodedRows:
        absent = [one for one in self.used if one.name not in cells]
        needed = [one.name for one in absent if not getattr(one, "gaps", one.kind == "text")]
        if needed:
            raise DataError(
                f"{where} lacks {len(needed)} of the models' {len(self.columns)} columns: {', '.join(needed[:5])}. No "
                "training row lacked them, so the models cannot handle rows without them; add them (single cells may "
                "be empty)"
            )
        nothing = Cells("absent", np.full(rows, np.nan))
        encoded = [one.encode(cells.get(one.name, nothing), where) for one in self.used]
        notes = [
            f"{where} has no column {one.name}: it counts as missing in every row"
            for one in absent if not isinstance(one, OwnColumn) or one.here is not None
        ]  # fmt: skip
        notes += [note for _, note in encoded if note]
        return EncodedRows(torch.from_numpy(np.concatenate([values for values, _ in encoded], 1)), notes)

    @staticmethod
    def outputs_with_effects(problem: Problem) -> tuple[str, ...]:
        """Names of the outputs that own columns have effects on."""
        return outputs_of(problem)

    def learn_own(
        self, read: ReadTable, raw: Tensor, rows: Tensor, train: Tensor, labels: Tensor, problem: Problem, where: str,
        persons: Tensor | None = None,
    ) -> tuple[OwnColumn, ...]:  # fmt: skip
        """Own columns as the site with these `rows` learns them from some, `train`. Their effects are written into raw
        [N, D], the encoded table. `labels` and `persons` [N] are of all its rows."""
        targets = problem.standardized(labels[train]) if problem.is_regression else labels[train]
        whose = None if persons is None else persons[train].numpy()
        site = RowsAtSite(train.numpy(), targets.numpy(), problem, whose)
        places = {one.name: [self.features.index(name) for name in one.features] for one in self.own}
        effects = {place for columns in places.values() for place in columns}
        common = [place for place in range(raw.shape[1]) if place not in effects]
        x = Features(raw, self.mean, self.std).gather(train)[:, common].double().numpy()
        learnt, fitted = learn_at_site(self.own, read, x, site, where)
        for one in learnt:
            if one.here is not None:
                columns = torch.tensor(places[one.name])
                values, _ = one.encode(read.cells[one.name].take(rows.numpy()), where)
                raw[rows[:, None], columns] = torch.from_numpy(values)
                raw[train[:, None], columns] = torch.from_numpy(fitted[one.name])
        return tuple(learnt)

    def features_of(self, rows: Any, where: str = "the table") -> Features:
        return Features(self.encode(rows, where).raw, self.mean, self.std)

    def transform(self, rows: Any, where: str = "the table") -> Tensor:
        """[n, D] float32: what a model is fed."""
        features = self.features_of(rows, where)
        return features.gather(torch.arange(len(features)))

    def sentences(self) -> list[str]:
        """Sentences on what became of the columns, for the notes of a run."""
        kinds = [encoding.kind for encoding in self.used]
        counted = [f"{kind} {kinds.count(kind)}" for kind in KINDS if kind in kinds]
        own = [one.name for one in self.own]
        gaps = [
            encoding.name for encoding in self.used if getattr(encoding, "gaps", False) and encoding.name not in own
        ]
        counted += [f"of some sites {len(own)}"] if own else []
        head = f"columns by kind: {', '.join(counted)}; together they became {len(self.features)} features"
        sentences = [head + (f"; with missing values: {_some(gaps)}" if gaps else "")]
        if own:
            sentences.append(
                f"not every site has {_some(own)}: each site that has such a column learns its effect by itself, "
                "pulled to zero; models are fed the effect, which is zero elsewhere"
            )
        partial = [f"{one.name} (at {one.empty_sites})" for one in self.used if one.empty_sites and one.name not in own]
        if partial:
            sentences.append(f"columns without any value at some of the {self.sites} clients: {_some(partial)}")
        codes = [one.name for one in self.used if one.reason == CODES]
        if codes:
            declared = ",".join(f"{name}=category" for name in codes[:MOST_NAMES])
            sentences.append(
                f"whole numbers with few different values are taken as numbers: {_some(codes)}; where they are codes "
                f"of categories, --columns {declared}"
            )
        reasons = dict.fromkeys(column.reason for column in self.skipped if column.reason != DECLARED)
        by_reason = {why: [column.name for column in self.skipped if column.reason == why] for why in reasons}
        left_out = [_some(names) + (": " if len(names) > 1 else " ") + why for why, names in by_reason.items()]
        return sentences + ([f"columns left out: {_some(left_out, '; ')}"] if left_out else [])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: object) -> TablePreprocessing:
        """Read what `to_json` gave, or a file of it; DataError for all else."""
        try:
            learnt = _reader().validate_python(record)
        except (ValidationError, RecursionError):
            raise DataError("what became of the columns cannot be read; export or save it again") from None
        if learnt.format != _FORMAT:
            raise DataError(f"columns in format {learnt.format}; this version of kinfed reads format {_FORMAT}")
        for one in learnt.used:
            if isinstance(one, TextEncoding):
                one.words()
        return learnt


@functools.cache
def _reader() -> TypeAdapter[TablePreprocessing]:
    """Reader of records, made once: making it takes longer than reading with it."""
    return TypeAdapter(TablePreprocessing)


def _some(names: list[str], between: str = ", ") -> str:
    more = [f"and {len(names) - MOST_NAMES} more (kinfed describe)"] if len(names) > MOST_NAMES else []
    return between.join([*names[:MOST_NAMES], *more])


def parse_kinds(columns: Mapping[str, Kind] | str | None) -> dict[str, Kind]:
    """{"age": "number"} from "age=number,zip=category", or from a mapping."""
    if not columns:
        return {}
    if isinstance(columns, str):
        pairs = [part.partition("=") for part in columns.split(",") if part.strip()]
        if wrong := next((name for name, equals, _ in pairs if not equals), None):
            raise ConfigError(f"columns are declared as age=number,zip=category; got {wrong.strip()!r}")
        columns = {name.strip(): kind.strip() for name, _, kind in pairs}  # type: ignore[misc]
    for name, kind in columns.items():
        if kind not in KINDS:
            raise unknown_name(f"kind of column {name}", kind, KINDS)
    return dict(columns)
