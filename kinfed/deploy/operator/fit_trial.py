"""Questions to sites on one machine, with a node for every site of a table: what `kinfed deploy fit TABLE` does.

Every site gets a file with its own rows, and a node that reads no other. The splits, folds and choices are those of
`kinfed fit` on the whole table with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from kinfed.core import storage
from kinfed.data import Problem
from kinfed.data.sources import read_table
from kinfed.deploy.operator.site_kit import can_name_a_key
from kinfed.deploy.operator.sites import LEARNT, evaluation_settings, problem_settings, search_settings
from kinfed.deploy.operator.trial import Site, TrialPlan
from kinfed.deploy.settings import DESCRIBE, EVALUATE, FIT
from kinfed.errors import ConfigError
from kinfed.tabular import FitSettings, load_sites


def fit_plan(tables: Sequence[str], columns: Mapping[str, Any], search: FitSettings, **private: Any) -> TrialPlan:
    """Plan a trial of a search. `columns`: options of the table; `private`: settings of protection, and what is
    predicted as everybody knows it (target); under differential privacy all owners give sums of their columns."""
    source = load_sites(list(tables) if len(tables) > 1 else tables[0], columns, None, search.seed)
    target = {} if "target" in private else search_target(source.problem)
    settings = {"method": FIT, **target, **search_settings(search), **private}
    plan = _plan(tables, columns, list(source.owner_names or ()), settings)
    return replace(plan, node={"sums": "yes"}) if any(name.startswith("dp_") for name in private) else plan


def question_plan(
    tables: Sequence[str], columns: Mapping[str, Any], models: Sequence[str] = (), **settings: Any
) -> TrialPlan:
    """Plan a trial in which sites are asked and nothing is trained: what their tables are like, or how `models` do."""
    asked = {"method": EVALUATE, **evaluation_settings(models)} if models else {"method": DESCRIBE}
    if len(tables) > 1:
        names = [Path(table).name.partition(".")[0] for table in tables]
    elif columns.get("client_column"):
        rows = read_table(Path(tables[0]), columns.get("encoding") or "utf-8")
        names = sorted({str(value).strip() for value in rows[columns["client_column"]].to_pylist()})
    else:
        raise ConfigError("which column names the site of each row? Give it with --client-column, or one file per site")
    return _plan(tables, columns, names, asked | settings)


def _plan(
    tables: Sequence[str], columns: Mapping[str, Any], names: list[str], settings: Mapping[str, Any]
) -> TrialPlan:  # fmt: skip
    if bad := [name for name in names if not can_name_a_key(name) or "," in name or name.isdigit()]:
        raise ConfigError(f"a site is called as its key: letters, digits, - and _, not a number; got {bad[0]!r}")
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

    names_of_columns = ("label_column", "columns", "time_column", "event_column")
    described = {name: columns[name] for name in names_of_columns if columns.get(name)}
    return TrialPlan(names, {"clients": ",".join(names), **described, **settings}, write)


def search_target(problem: Problem) -> dict[str, Any]:
    """Settings that say what a search predicts."""
    if problem.has_classes and problem.classifies:
        return problem_settings(problem)
    if problem.kind in LEARNT and not problem.shape:
        return {"target": LEARNT[problem.kind]}
    if problem.kind == "survival":
        raise ConfigError(
            "a search over sites learns no periods of survival: give them with the hazards as everybody knows them, "
            "target = the problem's record (docs/targets.md)"
        )
    raise ConfigError(
        f"a search over sites predicts classes, one number, counts or survival; this is {problem.in_words()}"
    )


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
