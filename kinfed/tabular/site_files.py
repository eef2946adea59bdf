"""Rows of a fit: from a table with a column of sites, one file per site, or a data set by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kinfed.core import make_options
from kinfed.data import as_table
from kinfed.data.sources import SOURCES, Source, TableOptions, load_source, read_table, source_from_table
from kinfed.errors import ConfigError, DataError

SITE = "site"  # the column that names the file of a row


def load_sites(table: Any, options: Mapping[str, Any], data: Path | None, seed: int) -> Source:
    """`options` are those of a table, or of the data set. Several files are one site each, called as the file is."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(table, str) and table in SOURCES:
        source = load_source(table, data, seed, given)
        if source.owners is None:
            raise ConfigError(f"{table} names no sites; fit takes a table with a column of sites (--client-column)")
        return source
    named = (table,) if isinstance(table, str | Path) else table
    is_files = isinstance(named, Sequence) and len(named) > 0 and all(isinstance(one, str | Path) for one in named)
    files = [Path(one) for one in named] if is_files else None
    if files is not None and len(files) > 1:
        if "client_column" in given:
            raise ConfigError("several files are one site each, called as the files are; leave --client-column out")
        options_of_files = make_options(TableOptions, {**given, "client_column": SITE}, "fit")
        name = ", ".join(str(file) for file in files)
        return source_from_table(join_files(files), options_of_files, name, files[0].parent)
    chosen = make_options(TableOptions, given, "fit")
    rows, name = (as_table(table), "the table") if files is None else (read_table(files[0]), str(files[0]))
    if chosen.client_column is None:
        raise ConfigError(
            f"which column of {name} names the site of each row? Give it with --client-column, or give one file per "
            f"site; columns: {', '.join(rows.column_names)}"
        )
    return source_from_table(rows, chosen, name, None if files is None else files[0].parent)


def join_files(files: Sequence[Path]) -> pa.Table:
    """The rows of all files, with the column `site`. A column that a file lacks is missing in its rows; where files do
    not agree whether a column holds numbers, it holds text."""
    names = [file.name.partition(".")[0] for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"two files are called {twice[0]}; every site needs a name of its own: rename one")
    parts = []
    for name, file in zip(names, files, strict=True):
        part = read_table(file)
        if SITE in part.column_names:
            raise DataError(f"{file} has a column {SITE!r} already; join the files, and give --client-column {SITE}")
        parts.append(part.append_column(SITE, pa.array([name] * part.num_rows)))
    try:
        return pa.concat_tables(parts, promote_options="permissive")
    except pa.ArrowTypeError:
        return pa.concat_tables([_as_text(part, _disputed(parts)) for part in parts], promote_options="permissive")


def _disputed(parts: Sequence[pa.Table]) -> set[str]:
    """Columns of which the parts have types that no common one holds."""
    disputed = set()
    for name in {name for part in parts for name in part.column_names}:
        schemas = [pa.schema([part.schema.field(name)]) for part in parts if name in part.column_names]
        try:
            pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowTypeError:
            disputed.add(name)
    return disputed


def _as_text(part: pa.Table, names: set[str]) -> pa.Table:
    for name in names & set(part.column_names):
        place = part.column_names.index(name)
        part = part.set_column(place, name, part[name].cast(pa.string()))
    return part
