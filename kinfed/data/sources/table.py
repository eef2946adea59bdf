"""The user's own data: one CSV or Parquet file, a row per example.

    client_column   who owns the row (any labels); without it, share the rows out with a partition
    label_column    the class (any labels; they become 0..C-1 in natural order and keep their names), or a number to
                    predict: kinfed.data.target decides, unless `task` does
    group_column    device type, region, ...: the same for all rows of a client
    split_column    train, val or test
    image_column    encoded images (bytes, hub structs, or paths relative to the file) instead of numbers
    text_column     texts, which become tokens (kinfed.data.sources.wordpiece), instead of numbers

All other columns are features and must be numbers; `ignore` names those to leave out. By default every feature
column is scaled to mean 0 and variance 1 over the training rows of all clients together. In a real federation
these are two sums per column that each client adds to (a secure sum suffices); they are shared knowledge, so
switch `standardize` off where even that must not leave a client. Test rows never enter.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import torch
from torch import Tensor

from kinfed.core.options import option
from kinfed.data.arrays import encode
from kinfed.data.features import Features
from kinfed.data.problem import Problem
from kinfed.data.source import Source
from kinfed.data.sources import hub, images
from kinfed.data.sources.wordpiece import LENGTH, TextInput
from kinfed.data.target import Target, TaskName, read_known_target, read_target
from kinfed.errors import ConfigError, DataError

MANY_CLASSES = 100  # more than these must have two rows each on average
SUFFIXES = (".csv", ".tsv", ".csv.gz", ".parquet")
_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


@dataclass(frozen=True)
class TableOptions:
    label_column: str | None = option(None, "the column with the class of each row, or a number to predict (required)")
    client_column: str | None = option(None, "the column that names the owner of each row")
    group_column: str | None = option(None, "a column with one value per client: device type, region, ...")
    split_column: str | None = option(None, "a column with train, val or test")
    image_column: str | None = option(None, "a column of images; all other columns are then left out")
    ignore: tuple[str, ...] | str = option((), "columns that are not features; text is split at commas")
    standardize: bool = option(True, "scale features by mean and deviation of all training rows")
    text_column: str | None = option(None, "a column of texts; all other columns are then left out")
    tokenizer: str | None = option(None, "folder with tokenizer.json or vocab.txt, for text_column")
    length: int = option(LENGTH, "tokens of a text that are read, for text_column", ge=3)
    task: TaskName = option("auto", "what label_column holds: classes or numbers; auto decides, and says so")

    @property
    def ignored(self) -> tuple[str, ...]:
        if isinstance(self.ignore, str):
            return tuple(name.strip() for name in self.ignore.split(",") if name.strip())
        return self.ignore

    @property
    def text(self) -> TextInput | None:
        return TextInput.of_options(asdict(self))

    @property
    def has_columns(self) -> bool:
        """Whether features are columns of numbers."""
        return self.image_column is None and self.text_column is None


def is_table(name: str) -> bool:
    """Whether a data set name is meant as the path of a table."""
    return name.lower().endswith(SUFFIXES)


def load_table(path: Path, options: TableOptions) -> Source:
    table = _read(path)
    used = _roles(table, options, path)
    assert options.label_column is not None
    target = read_target(_values(table, options.label_column, path), f"column {options.label_column}", options.task)
    _check_classes(target, options.label_column, path)
    columns = _feature_columns(table, options, used)
    source = Source(str(path), _features(table, path, options, columns), target.labels, target.problem)
    source.notes.append(target.note)
    source.standardize = options.standardize and options.has_columns
    source.options = asdict(options) | {"columns": columns}
    if options.split_column is not None:
        source.is_test, source.is_val = _splits(table, options.split_column, path)
    if options.client_column is not None:
        owners = encode(_values(table, options.client_column, path), f"column {options.client_column}")
        source.owners, source.owner_names = owners
        if options.group_column is not None:
            _set_groups(source, _values(table, options.group_column, path), options.group_column)
    return source


def _check_classes(target: Target, column: str, path: Path) -> None:
    names, rows = target.problem.class_labels, len(target.labels)
    if target.problem.is_regression:
        return
    if len(names) < 2:
        raise DataError(f"column {column} of {path} holds one class only ({names[0]})")
    if len(names) > MANY_CLASSES and rows < 2 * len(names):
        raise DataError(
            f"column {column} of {path} has {len(names):,} different values in {rows:,} rows: fewer than two examples "
            "of a class cannot be learned and tested. Is it a number or an identifier rather than a class? Choose "
            "another label_column, join classes, or predict a number with --task regression"
        )


def load_like(path: Path, options: TableOptions, columns: list[str] | None, problem: Problem) -> Source:
    """A table of data like others seen before: their feature `columns` (None: all without another role), in their
    order, and labels of their `problem`. Features are not standardized; other columns are left out."""
    table = _read(path)
    used = _roles(table, options, path)
    assert options.label_column is not None
    labels = read_known_target(
        _values(table, options.label_column, path), problem, f"column {options.label_column} of {path}"
    )
    if columns is None or not options.has_columns:
        columns = _feature_columns(table, options, used)
    _check_present(table, columns, path)
    source = Source(str(path), _features(table, path, options, columns), labels, problem)
    source.options = asdict(options) | {"columns": columns}
    if options.split_column is not None:
        source.is_test, source.is_val = _splits(table, options.split_column, path)
    return source


def load_inputs(
    path: Path,
    columns: list[str] | None,
    image_column: str | None = None,
    ignore: tuple[str, ...] | str = (),
    text: TextInput | None = None,
) -> tuple[Features, pa.Table]:
    """Examples without classes, and the table they stand in: the feature `columns` in their order (None: all but those
    to `ignore`), or images, or texts. Features are not standardized."""
    table = _read(path)
    options = TableOptions(image_column=image_column, ignore=ignore)
    if text is not None:
        options = replace(options, text_column=text.column, tokenizer=text.tokenizer, length=text.length)
    for setting, name in (
        ("image_column", image_column), ("text_column", options.text_column), *(("ignore", i) for i in options.ignored)
    ):  # fmt: skip
        if name is not None:
            _require(table, name, setting, path)
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows")
    if columns is None or not options.has_columns:
        columns = _feature_columns(table, options, set())
    _check_present(table, columns, path)
    return _features(table, path, options, columns), table


def _check_present(table: pa.Table, columns: list[str], path: Path) -> None:
    lacking = [name for name in columns if name not in table.column_names]
    if lacking:
        raise DataError(f"{path} lacks {len(lacking)} of the models' {len(columns)} features: {', '.join(lacking[:5])}")


def _roles(table: pa.Table, options: TableOptions, path: Path) -> set[str]:
    """Columns that are something else than features, after a check of all that the options name."""
    if options.label_column is None:
        raise ConfigError(f"which column of {path} is the class? Set label_column to one of {_listed(table)}")
    named = {
        "label_column": options.label_column,
        "client_column": options.client_column,
        "group_column": options.group_column,
        "split_column": options.split_column,
        "image_column": options.image_column,
        "text_column": options.text_column,
    }
    for setting, column in named.items():
        if column is not None:
            _require(table, column, setting, path)
    for column in options.ignored:
        _require(table, column, "ignore", path)
    used = [column for column in named.values() if column is not None]
    if len(set(used)) < len(used):
        raise ConfigError(f"each column of {path} can have one role only; got {', '.join(used)}")
    if options.group_column is not None and options.client_column is None:
        raise ConfigError("group_column gives groups of clients, so it needs client_column too")
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows")
    return set(used)


def _feature_columns(table: pa.Table, options: TableOptions, used: set[str]) -> list[str]:
    if not options.has_columns:
        return []
    return [name for name in table.column_names if name not in used and name not in options.ignored]


def _read(path: Path) -> pa.Table:
    if not path.exists():
        raise DataError(f"{path} does not exist; give the path of a {', '.join(SUFFIXES)} file")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        table = hub.read_parquet(path)
    else:
        separator = pa.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
        # Only an empty cell is missing: "NA" can be a country or a client.
        missing = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)
        try:
            table = pa.csv.read_csv(path, parse_options=separator, convert_options=missing)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read {path} as CSV: {error}") from error
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise DataError(f"the names of the columns of {path} are not UTF-8: {error}; save the file as UTF-8") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has several columns named {', '.join(twice)}; rename them")
    return table


def _listed(table: pa.Table) -> str:
    return ", ".join(table.column_names)


def _require(table: pa.Table, column: str, setting: str, path: Path) -> None:
    if column not in table.column_names:
        near = difflib.get_close_matches(column, table.column_names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{setting}: {path} has no column {column!r}; {hint}It has {_listed(table)}")


def _values(table: pa.Table, column: str, path: Path) -> np.ndarray[Any, Any]:
    """A column of labels or names, complete."""
    values = table[column]
    if values.null_count:
        row = _first(pc.is_null(values))
        raise DataError(f"column {column} of {path} has {values.null_count} empty cell(s), the first in row {row + 1}")
    if pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        array: np.ndarray[Any, Any] = values.to_numpy()
        return array
    if pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        raise DataError(f"column {column} of {path} should hold text or numbers; it holds {values.type}")
    return np.array([str(value) for value in values.to_pylist()])


def _features(table: pa.Table, path: Path, options: TableOptions, columns: list[str]) -> Features:
    if options.image_column is not None:
        where = f"column {options.image_column} of {path}"
        encoded = images.encoded_values(table[options.image_column], path.parent, where)
        return Features(images.decode(encoded, where), None, torch.tensor(255.0))
    if options.text is not None:
        texts = table[options.text.column]
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise DataError(f"column {options.text.column} of {path} should hold texts; it holds {texts.type}")
        return Features(options.text.encode(texts.to_pylist()))
    if not columns:
        raise DataError(f"{path} has no feature columns left; it has {_listed(table)}")
    bad = [name for name in columns if not _is_number(table[name].type)]
    if bad:
        kinds = "; ".join(f"{name} ({_why_not_number(table[name])})" for name in bad)
        raise DataError(
            f"these columns of {path} are not numbers: {kinds}. Encode them as numbers, "
            f"or leave them out with ignore = {','.join(bad)}"
            + (
                " (a column of images is chosen with image_column)"
                if any(_is_image(table[b].type) for b in bad)
                else " (a column of texts is chosen with text_column)"
            )
        )
    matrix = np.empty((table.num_rows, len(columns)), np.float32)
    for place, name in enumerate(columns):
        # Empty cells become NaN. Unsafe: integers beyond 2^53 lose their last digits; float32 keeps fewer anyway.
        values = table[name].cast(pa.float64(), safe=False).to_numpy()
        with np.errstate(over="ignore"):
            matrix[:, place] = values
        wrong = ~np.isfinite(matrix[:, place])
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise DataError(
                f"column {name} of {path} has {int(wrong.sum())} value(s) that are empty, infinite or too large, "
                f"the first in row {row + 1} ({values[row]}); fill or drop them, or ignore the column"
            )
    return Features(torch.from_numpy(matrix))


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def _is_image(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_binary(kind))


def _why_not_number(column: pa.ChunkedArray) -> str:
    """The type, and for text the first cell that is no number: often one stray word in a column of numbers."""
    if pa.types.is_null(column.type):
        return "all cells are empty"
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return str(column.type)
    for row, value in enumerate(column.to_pylist()):
        try:
            float(value or "nan")
        except ValueError:
            return f"text, first {value!r} in row {row + 1}"
    return "text"


def _splits(table: pa.Table, column: str, path: Path) -> tuple[Tensor, Tensor]:
    words = [str(word).strip().lower() for word in _values(table, column, path).tolist()]
    unknown = sorted(set(words) - _SPLIT_WORDS.keys())
    if unknown:
        raise DataError(
            f"column {column} of {path} should say train, val or test; it also says {', '.join(unknown[:5])}"
        )
    split = [_SPLIT_WORDS[word] for word in words]
    return torch.tensor([s == "test" for s in split]), torch.tensor([s == "val" for s in split])


def _set_groups(source: Source, values: np.ndarray[Any, Any], column: str) -> None:
    assert source.owners is not None
    assert source.owner_names is not None
    group, names = encode(values, f"column {column}")
    of_owner = torch.zeros(len(source.owner_names), dtype=torch.int64)
    of_owner[source.owners] = group
    mixed = (of_owner[source.owners] != group).nonzero().squeeze(1)
    if len(mixed):
        client = int(source.owners[mixed[0]])
        seen = sorted({names[g] for g in group[source.owners == client].tolist()})
        raise DataError(
            f"column {column} should have one value per client; "
            f"client {source.owner_names[client]} has {', '.join(seen)}"
        )
    source.owner_groups, source.group_names = of_owner, names


def _first(mask: pa.ChunkedArray) -> int:
    return int(np.flatnonzero(mask.to_numpy())[0])
