"""A search on one machine, with a node for every site of a table: what `kinfed deploy fit TABLE` does.

Every site gets a file with its own rows, and a node that reads no other. The splits, folds and choices are those of
`kinfed fit` on the whole table with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from kinfed.core import storage
from kinfed.data import Problem
from kinfed.data.sources import read_table
from kinfed.deploy.operator.site_kit import can_name_a_key
from kinfed.deploy.operator.trial import Site, TrialPlan
from kinfed.deploy.settings import COUNTS, FIT, NUMBER
from kinfed.errors import ConfigError
from kinfed.tabular import load_sites

LEARNT = {"regression": NUMBER, "counts": COUNTS}


def fit_plan(tables: Sequence[str], columns: Mapping[str, Any], settings: Mapping[str, Any]) -> TrialPlan:
    """Plan a trial of a search. `columns`: options of the table, `settings`: of the deployment."""
    source = load_sites(list(tables) if len(tables) > 1 else tables[0], columns, None, int(settings.get("seed", 0)))
    names, problem = list(source.owner_names or ()), source.problem
    if bad := [name for name in names if not can_name_a_key(name) or "," in name or name.isdigit()]:
        raise ConfigError(f"a site is called as its key: letters, digits, - and _, not a number; got {bad[0]!r}")
    target = search_target(problem)
    node = {"ignore": columns.get("ignore"), "split": columns.get("split_column")}
    more = {name: text if isinstance(text, str) else ",".join(text) for name, text in node.items() if text}

    def write(folder: Path) -> list[Site]:
        sites = []
        for name, rows in site_tables(tables, columns, names):
            place = folder / name
            storage.make_folder(place)
            with storage.storage_errors("write", place / f"{name}.csv"):
                pa_csv.write_csv(rows, place / f"{name}.csv")
            sites.append(Site(name, place, "", f"{name}.csv", more))
        return sites

    described = {"label_column": columns["label_column"], "columns": columns.get("columns") or ""}
    return TrialPlan(names, {"method": FIT, "clients": ",".join(names), **described, **target, **settings}, write)


def search_target(problem: Problem) -> dict[str, Any]:
    """Settings that say what a search predicts."""
    if problem.has_classes and problem.classifies:
        if any("," in label for label in problem.class_labels):
            raise ConfigError("names of classes are listed with commas between; one of them holds a comma")
        return {"classes": ",".join(problem.class_labels)}
    if problem.kind in LEARNT and not problem.shape:
        return {"target": LEARNT[problem.kind]}
    raise ConfigError(f"a search over sites predicts classes, one number or counts; this is {problem.in_words()}")


def site_tables(
    tables: Sequence[str], columns: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[str, pa.Table]]:  # fmt: skip
    """The rows of every site, without the column that names it."""
    encoding = columns.get("encoding") or "utf-8"
    if len(tables) > 1:
        return [(Path(table).name.partition(".")[0], read_table(Path(table), encoding)) for table in tables]
    rows, column = read_table(Path(tables[0]), encoding), columns["client_column"]
    owner = [str(value).strip() for value in rows[column].to_pylist()]
    rest = rows.drop_columns([column])
    return [(name, rest.filter(pa.array([one == name for one in owner]))) for name in names]
