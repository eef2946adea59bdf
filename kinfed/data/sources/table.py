"""The user's own data: one CSV or Parquet file or a frame, a row per example.

    client_column   who owns the row (any labels); without it, share the rows out with a partition
    label_column    the class (any labels; they become 0..C-1 in natural order and keep their names), or a number to
                    predict: kinfed.data.examples.target decides, unless `task` does; several with commas between
    time_column     with event_column, in place of a label: when an event happened (1), or follow-up ended without (0)
    group_column    device type, region, ...: the same for all rows of a client
    split_column    train, val or test
    weight_column   how much the row counts in training (kinfed.data.federations.example_weights)
    person_column   whom the row is of: all rows of a person are in one part
    order_column    when the row is of, a date or a number: rows for testing and validation come after those that train
                    (a name of its own, since time_column is what survival predicts; `group_column` has clients in
                    groups, so that rows of one person have another name)
    image_column    encoded images (bytes, hub structs, or paths relative to the file) instead of numbers
    text_column     texts, which become tokens (kinfed.data.sources.wordpiece), instead of numbers

All other columns are features: numbers, categories, dates and texts, with gaps. What each becomes is learnt from the
training rows of all clients (kinfed.data.preprocessing), once a partition has named them; `columns` declares what a
column is, `ignore` names those to leave out. In a real federation the statistics that this takes are a small message of
each client. They are shared knowledge that no privacy of training covers. Test rows never enter.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from kinfed.data.examples.arrays import encode
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.target import Target, read_known_target, read_target, survival_target
from kinfed.data.federations.example_weights import read_weights
from kinfed.data.preprocessing.cells import format_hint, read_cells
from kinfed.data.preprocessing.column_statistics import ReadTable
from kinfed.data.preprocessing.frames import as_table
from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing
from kinfed.data.preprocessing.text_scores import TextScores, TextTarget
from kinfed.data.sources.image_sets import decode, encoded_values
from kinfed.data.sources.source import Source
from kinfed.data.sources.table_files import read_table
from kinfed.data.sources.table_options import TableOptions
from kinfed.data.sources.wordpiece import TextInput
from kinfed.errors import ConfigError, DataError

MANY_CLASSES = 100  # more than these must have two rows each on average
_SPLIT_WORDS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def source_from_table(table: pa.Table, options: TableOptions, name: str, folder: Path | None = None) -> Source:
    """`name` is what errors call the table; paths of images are relative to `folder`."""
    used = roles(table, options, name)
    columns = target_columns(table, options)
    table, without_label = _labelled_rows(table, columns, name, together=options.time_column is not None)
    target = read_table_target(table, options, name)
    _check_classes(target, columns[0], name)
    is_test, is_val = splits(table, options, name)
    read = read_features(table, options, [column for column in table.column_names if column not in used], name)
    if read is None:
        features = images_or_tokens(table, options, name, folder)
    else:
        learn_from = np.arange(table.num_rows) if is_test is None else np.flatnonzero(~is_test.numpy())
        # Only partitions that look at examples see these: clients are not known yet, and what is learnt of each is not.
        texts = TextScores(
            read.cells, learn_from, np.zeros_like(learn_from), 1, TextTarget.of(target.labels.numpy(), target.problem)
        )
        early = TablePreprocessing.from_read(read, texts, options.standardize)
        features = Features(early.encode_cells(read.cells, read.rows, name).raw)
    source = Source(name, features, target.labels, target.problem, is_test, is_val, table=read)
    source.weights = row_weights(table, options, name)
    source.notes += [target.note, *without_label]
    if read is not None:
        undeclared = [format_hint(column, cells) for column, cells in read.cells.items() if column not in read.columns]
        source.notes += [hint for hint in undeclared if hint]
    source.standardize = options.standardize and options.has_columns
    source.options = options.record()
    source.persons = persons_of_rows(table, options, name)
    if options.order_column is not None:
        source.order = _moments(table, options.order_column, name)
    if options.client_column is not None:
        values = values_of(table, options.client_column, name)
        source.owners, source.owner_names = encode(values, f"column {options.client_column}")
        if options.group_column is not None:
            _set_groups(source, values_of(table, options.group_column, name), options.group_column)
    return source


def _check_classes(target: Target, column: str, path: str) -> None:
    names, rows = target.problem.class_labels, len(target.labels)
    if not target.problem.has_classes:
        return
    if len(names) < 2:
        raise DataError(
            f"column {column} of {path} holds one class only ({names[0]}), and a classifier needs at least two; "
            "give rows of another class, or choose another label_column"
        )
    if len(names) > MANY_CLASSES and rows < 2 * len(names):
        raise DataError(
            f"column {column} of {path} has {len(names):,} different values in {rows:,} rows: fewer than two examples "
            "of a class cannot be learned and tested. Is it a number or an identifier rather than a class? Choose "
            "another label_column, join classes, or predict a number with --task regression"
        )


def opened(rows: Any, encoding: str = "utf-8") -> tuple[pa.Table, str, Path | None]:
    """A table, what errors call it, and the folder that it is in."""
    if isinstance(rows, str | Path):
        return read_table(Path(rows), encoding), str(rows), Path(rows).parent
    return as_table(rows), "the table", None


def row_weights(table: pa.Table, options: TableOptions, where: str) -> Tensor | None:
    column = options.weight_column
    return None if column is None else read_weights(values_of(table, column, where), f"column {column} of {where}")


def persons_of_rows(table: pa.Table, options: TableOptions, where: str) -> Tensor | None:
    """[N] int64: whom each row is of, where a column says so."""
    column = options.person_column
    return None if column is None else encode(values_of(table, column, where), f"column {column}")[0]


def load_inputs(
    path: Path, image_column: str | None = None, text: TextInput | None = None
) -> tuple[Features, pa.Table]:
    """Images or texts without classes, and the table they stand in."""
    table = read_table(path)
    options = TableOptions(image_column=image_column)
    if text is not None:
        options = replace(options, text_column=text.column, tokenizer=text.tokenizer, length=text.length)
    for setting, name in (("image_column", image_column), ("text_column", options.text_column)):
        if name is not None:
            _require(table, name, setting, str(path))
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows")
    return images_or_tokens(table, options, str(path), path.parent), table


def roles(table: pa.Table, options: TableOptions, path: str) -> set[str]:
    """Columns that are something else than features, after a check of all that the options name."""
    if not options.target_columns:
        columns = ", ".join(name for name in table.column_names if name != options.client_column)
        raise ConfigError(f"which column of {path} is to be predicted? Give it with --label-column; columns: {columns}")
    if (options.time_column is None) != (options.event_column is None):
        raise ConfigError(
            "survival has a time and an event: give both --time-column and --event-column (the date that rows follow "
            "each other by is --order-column)"
        )
    if options.time_column is not None and options.task not in ("auto", "survival"):
        raise ConfigError(f"--time-column is for survival, and --task is {options.task}; leave one of them out")
    settings = [
        f"{role}_column" for role in ("label", "client", "group", "split", "image", "text", "weight", "person", "order")
    ]
    settings += ["time_column", "event_column"]
    if options.time_column is not None:
        settings.remove("label_column")  # deployments have a default for it
    named = {setting: column for setting in settings if (column := getattr(options, setting)) is not None}
    if "label_column" in named:
        labels = target_columns(table, options)
        named = {setting: column for setting, column in named.items() if setting != "label_column"}
        named |= {f"label_column{number or ''}": column for number, column in enumerate(labels)}
    for setting, column in named.items():
        _require(table, column, setting.rstrip("0123456789"), path)
    for column in options.ignored:
        _require(table, column, "ignore", path)
    if hidden := [column for column in target_columns(table, options) if column in options.ignored]:
        # In a deployment the owner of a node ignores a column, and a run would learn it.
        raise ConfigError(
            f"column {hidden[0]} of {path} is to be left out (ignore), and would be predicted; choose one"
        )
    used = list(named.values())
    if len(set(used)) < len(used):
        raise ConfigError(f"each column of {path} can have one role only; got {', '.join(used)}")
    if options.group_column is not None and options.client_column is None:
        raise ConfigError("group_column gives groups of clients, so it needs client_column too")
    for setting in ("person_column", "order_column"):
        if getattr(options, setting) is not None and options.split_column is not None:
            raise ConfigError(f"{setting} decides which rows test, and split_column names them already; leave out one")
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows")
    return set(used)


def read_features(table: pa.Table, options: TableOptions, columns: list[str], where: str) -> ReadTable | None:
    """The feature columns, in this order; None if features are images or texts."""
    if not options.has_columns:
        return None
    names = [name for name in columns if name not in options.ignored]
    for name in options.kinds:
        _require(table, name, "columns", where)
        if name not in names:
            raise ConfigError(f"columns: {name} is declared a feature, and has another role or is ignored")
    if not names:
        raise DataError(f"{where} has no feature columns left; it has {', '.join(table.column_names)}")
    return ReadTable.read(table, names, options.kinds, where)


def _require(table: pa.Table, column: str, setting: str, path: str) -> None:
    if column not in table.column_names:
        near = difflib.get_close_matches(column, table.column_names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"{setting}: {path} has no column {column!r}; {hint}It has {', '.join(table.column_names)}")


def _trimmed(table: pa.Table, column: str) -> pa.ChunkedArray:
    """A column; texts without blanks around them, and missing where nothing is left."""
    values = table[column]
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        trimmed = pc.utf8_trim_whitespace(values)
        values = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, trimmed.type), trimmed)
    return values


def target_columns(table: pa.Table, options: TableOptions) -> tuple[str, ...]:
    """Columns of what is predicted. A label with commas names several, unless a column is called so."""
    columns = options.target_columns
    if len(columns) == 1 and columns[0] not in table.column_names and "," in columns[0]:
        return tuple(name.strip() for name in columns[0].split(",") if name.strip())
    return columns


def read_table_target(table: pa.Table, options: TableOptions, where: str, problem: Problem | None = None) -> Target:
    """Target of every row; that of a `problem` that is known already, if any."""
    columns, task = target_columns(table, options), options.task
    what = f"column {columns[0]}" if len(columns) == 1 else f"columns {', '.join(columns)}"
    values = [values_of(table, column, where) if len(columns) < 2 or options.time_column else
              _numbers_with_gaps(table, column, where) for column in columns]  # fmt: skip
    if problem is not None:
        what = f"{what} of {where}"
        several = survival_target(values[0], values[1], what).labels if options.time_column else np.stack(values, 1)
        labels = read_known_target(values[0] if len(values) == 1 else several, problem, what)
        return Target(labels, problem, "")
    if options.time_column is not None:
        return survival_target(values[0], values[1], what)
    if len(values) == 1:
        return read_target(values[0], what, task)
    return read_target(np.stack(values, 1), what, task, names=columns)


def _numbers_with_gaps(table: pa.Table, column: str, path: str) -> np.ndarray[Any, Any]:
    values = _trimmed(table, column)
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        raise DataError(f"column {column} of {path} is one of several targets, which are numbers; it is {values.type}")
    return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def _labelled_rows(
    table: pa.Table, columns: tuple[str, ...], path: str, *, together: bool
) -> tuple[pa.Table, list[str]]:
    """The rows that have a label, and a note where others do not: nothing can be learnt from these, nor tested. Of
    several labels one is enough, unless they belong `together`."""
    gaps = [pc.is_null(_trimmed(table, column), nan_is_null=True) for column in columns]
    missing, column = gaps[0], columns[0]
    for gap in gaps[1:]:
        missing = (pc.or_ if together else pc.and_)(missing, gap)
    count = pc.sum(missing).as_py()
    if not count:
        return table, []
    if count == table.num_rows:
        raise DataError(f"column {column} of {path} is empty in all {count:,} rows; choose another label_column")
    note = f"{count:,} of {table.num_rows:,} rows have no value in column {column} and are left out"
    return table.filter(pc.invert(missing)), [note]


def values_of(table: pa.Table, column: str, path: str) -> np.ndarray[Any, Any]:
    """A column of labels or names, complete; texts without blanks around them."""
    values = _trimmed(table, column)
    if values.null_count:
        row = pc.index(pc.is_null(values), True).as_py()
        raise DataError(
            f"column {column} of {path} has {values.null_count} empty cell(s), the first in row {row + 1}; every row "
            "needs a value there: fill them, or leave these rows out"
        )
    if pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        return np.asarray(values.to_numpy())
    if pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
        raise DataError(f"column {column} of {path} should hold text or numbers; it holds {values.type}")
    return np.array([str(value) for value in values.to_pylist()])


def _moments(table: pa.Table, column: str, where: str) -> Tensor:
    """[n] float64: days of dates, or numbers."""
    cells = read_cells(_trimmed(table, column), f"column {column} of {where}")
    values = cells.numbers if cells.codes is None else cells.as_days()
    if np.isnan(values).all() and cells.codes is not None:
        values = cells.as_numbers()
    gaps = np.flatnonzero(np.isnan(values))
    if len(gaps):
        raise DataError(
            f"column {column} of {where} puts rows in order, so every row needs a date (2024-02-29) or a number; "
            f"{len(gaps):,} have none, the first is row {gaps[0] + 1}"
        )
    return torch.from_numpy(values)


def images_or_tokens(table: pa.Table, options: TableOptions, where: str, folder: Path | None) -> Features:
    if options.image_column is not None:
        column = f"column {options.image_column} of {where}"
        encoded = encoded_values(table[options.image_column], folder or Path(), column)
        return Features(decode(encoded, column), None, torch.tensor(255.0))
    assert options.text is not None
    texts = table[options.text.column]
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise DataError(f"column {options.text.column} of {where} should hold texts; it holds {texts.type}")
    return Features(options.text.encode(texts.to_pylist()))


def splits(table: pa.Table, options: TableOptions, path: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Rows for testing and for validation, [n] bool each; None if no column marks them."""
    if (column := options.split_column) is None:
        return None, None
    words = [str(word).strip().lower() for word in values_of(table, column, path).tolist()]
    if unknown := sorted(set(words) - _SPLIT_WORDS.keys()):
        others = ", ".join(unknown[:5])
        raise DataError(f"column {column} of {path} should say train, val or test; it also says {others}")
    split = np.array([_SPLIT_WORDS[word] for word in words])
    return torch.from_numpy(split == "test"), torch.from_numpy(split == "val")


def _set_groups(source: Source, values: np.ndarray[Any, Any], column: str) -> None:
    assert source.owners is not None
    assert source.owner_names is not None
    group, names = encode(values, f"column {column}")
    of_owner = torch.zeros(len(source.owner_names), dtype=torch.int64)
    of_owner[source.owners] = group
    mixed = (of_owner[source.owners] != group).nonzero().squeeze(1)
    if len(mixed):
        client = int(source.owners[mixed[0]])
        seen = ", ".join(sorted({names[g] for g in group[source.owners == client].tolist()}))
        name = source.owner_names[client]
        raise DataError(
            f"column {column} should have one value per client; client {name} has {seen}. A column of patients "
            "or cases is --person-column"
        )
    source.owner_groups, source.group_names = of_owner, names
