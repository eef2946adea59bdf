"""Gaps between groups of rows by a column of the table: does a model serve women as well as men, the old as well as the
young? Figures are of test rows, by the models that sites were handed or would deploy.

A group's figure at a site is the metric over its test rows there, and its gap is that figure less the one of all other
test rows of the site. Intervals are value ± t · s with s by the bootstrap over the rows of both sides, and Student's t
for as many rows as the smaller side has. The mean gap over sites counts every site alike. Of groups with fewer than
FEWEST test rows at a site nothing is shown: a figure of few rows says little, and much about those few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.analysis import student_quantile
from kinfed.config import Named
from kinfed.data import Resplit, make_federation
from kinfed.data.sources import Source
from kinfed.engine import METRICS, Architectures, Judged, Metric, bootstrap_draws, deviation_of_draws, judged_outputs
from kinfed.engine import task_for as fitting_task
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers import FinishedRun
from kinfed.records import JobFiles, load_run
from kinfed.runs import RunInputs, load_run_source
from kinfed.tabular import FitResult, FitSettings, load_sites
from kinfed.theory import certificates

FEWEST = 10  # test rows of a group at a site
MOST_GROUPS = 12
HALVES = 10  # different numbers beyond which a column of numbers is divided at its median
EMPTY = "no value"
Facts = dict[str, Any]


def of_fit(path: Path, column: str) -> Facts:
    """Gaps of the models that `kinfed fit` has handed over."""
    result, config, settings = FitResult.read(path), JobFiles(path).settings, FitSettings(**_fit_settings(path))
    options = {name: value for name, value in config["options"].items() if value is not None}
    table = config["table"].split(", ") if ", " in config["table"] else config["table"]
    source = load_sites(table, options, None, settings.seed)
    cells = source if _has(source, column) else load_sites(table, _read_also(options, column), None, settings.seed)
    share = {"test_fraction": settings.test_fraction}
    data = make_federation(replace(source, is_val=None), "column", None, share, settings.seed, resplit=Resplit())
    _check_data(data.digest(), JobFiles(path).contents.get("data"), path)
    outputs = []
    with torch.no_grad():
        for name, rows in zip(data.names, data.test.lists(), strict=True):
            outputs.append(result.model(name).module(data.features.gather(rows)).double())
    judged = Judged(
        torch.cat(outputs).numpy(), data.targets[data.test.rows].numpy(), data.test.owner.numpy(), data.num_clients,
        data.problem,
    )  # fmt: skip
    groups, names = groups_of_rows(cells, column, data.test.rows)
    gaps = gaps_of(result.known_metric, judged, groups, names, data.names)
    return {"column": column, "metric": result.metric, "groups": names,
            "models": [{"label": "what sites are handed", **gaps}]}  # fmt: skip


def _fit_settings(path: Path) -> Facts:
    config = JobFiles(path).settings
    return {name: config[name] for name in FitSettings.__dataclass_fields__ if name in config}


def of_run(path: Path, column: str) -> Facts:
    """Gaps of the personal models of every method of a run, with its first seed."""
    ended = FinishedRun.open(path)
    config, files = ended.config, ended.files
    if config.folds is not None:
        raise ConfigError(f"--by {column}: {path} is a cross-validation, which keeps no models; run without folds")
    source = load_run_source(config, ended.seed)
    if not _has(source, column):
        dataset = Named(name=config.dataset.name, options=_read_also(config.dataset.options, column))
        source = load_run_source(replace(config, dataset=dataset), ended.seed)
    data = RunInputs(config).federation(ended.seed)
    _check_data(data.digest(), files.contents.get(f"data of seed {ended.seed}"), path)
    task = ended.models()
    if isinstance(task, Architectures):
        raise ConfigError(f"--by {column}: clients of {path} have several architectures, which this does not judge yet")
    groups, names = groups_of_rows(source, column, data.test.rows)
    metric = METRICS.headline(data.problem, config.metric)
    run, models = load_run(path, path.name), []
    for label in run.algorithms:
        theta = files.models(label, ended.seed).personal
        part = data.cohort(torch.arange(data.num_clients), ended.seed, 0).test
        judged = judged_outputs(fitting_task(task, theta), theta, part, data.problem)
        models.append({"label": label, **gaps_of(metric, judged, groups, names, data.names)})
    return {"column": column, "metric": metric.name, "groups": names, "models": models}


def _has(source: Source, column: str) -> bool:
    return source.table is not None and column in source.table.cells


def _read_also(options: Mapping[str, Any], column: str) -> Facts:
    """Options of a table by which a column that is no feature is read, too."""
    ignored = options.get("ignore") or ()
    names = [one.strip() for one in ignored.split(",")] if isinstance(ignored, str) else list(ignored)
    kinds = str(options.get("columns") or "").split(",")
    others = [one for one in kinds if one.strip() and one.partition("=")[0].strip() != column]
    changed = {"ignore": ",".join(name for name in names if name != column), "columns": ",".join(others)}
    return {**options, **{name: value for name, value in changed.items() if name in options}}


def _check_data(digest: str, recorded: str | None, path: Path) -> None:
    if digest != recorded:
        raise DataError(
            f"the table is another one than {path} was made from, so that no figure by a column can be computed; "
            "restore it"
        )


def groups_of_rows(source: Source, column: str, rows: Tensor) -> tuple[np.ndarray, list[str]]:
    """[n] the group of each of these rows, and the names of all groups: values of the column, or, of more numbers, the
    halves at the median."""
    if source.table is None or column not in source.table.cells:
        known = ", ".join(source.table.cells) if source.table is not None else "it has no columns"
        raise ConfigError(f"--by {column}: the data have no such column that models could be fed ({known})")
    cells = source.table.cells[column].as_texts()
    numbers = source.table.cells[column].numbers[rows.numpy()]
    if source.table.cells[column].codes is None and len(np.unique(numbers[~np.isnan(numbers)])) > HALVES:
        middle = float(np.nanmedian(numbers))
        halves = np.where(np.isnan(numbers), 2, np.where(numbers <= middle, 0, 1))
        return _used(halves, [f"{column} up to {middle:g}", f"{column} above {middle:g}", f"{column}: {EMPTY}"])
    assert cells.codes is not None
    codes = cells.codes[rows.numpy()]
    names = [f"{column} = {value}" for value in cells.values]
    groups, names = _used(np.where(codes < 0, len(names), codes), [*names, f"{column}: {EMPTY}"])
    if len(names) > MOST_GROUPS:
        raise ConfigError(
            f"--by {column}: it has {len(names)} different values among the test rows, and at most {MOST_GROUPS} "
            "groups are compared"
        )
    return groups, names


def _used(groups: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """The groups numbered anew without those that no row is in."""
    present, numbers = np.unique(groups, return_inverse=True)
    return numbers, [names[place] for place in present]


def gaps_of(
    metric: Metric, judged: Judged, groups: np.ndarray, names: Sequence[str], sites: Sequence[str]
) -> Facts:  # fmt: skip
    """Figures of every group at every site with the gap to the site's other rows, and mean gaps over sites."""
    entries: list[Facts] = []
    over_sites: list[Facts] = []
    pairs = range(1) if len(names) == 2 else range(len(names))  # of two groups one gap says all
    for group in range(len(names)):
        cells = judged.owner * 2 + (groups != group)  # of each site the group, and all others
        order = np.argsort(cells, kind="stable")
        divided = Judged(
            judged.output[order], judged.target[order], cells[order], 2 * len(sites), judged.problem,
            weight=None if judged.weight is None else judged.weight[order],
        )  # fmt: skip
        value = metric.value(torch.from_numpy(np.stack(metric.sums(divided), 1)).double()).numpy()
        error = deviation_of_draws(bootstrap_draws(metric, divided, torch.arange(2 * len(sites)))).numpy()
        rows, support = divided.examples, metric.support(divided)
        differences = []
        for k, site in enumerate(sites):
            inside, outside = 2 * k, 2 * k + 1
            entry: Facts = {"site": site, "group": names[group], "rows": int(rows[inside]), "value": None, "gap": None}
            if rows[inside] >= FEWEST and math.isfinite(value[inside]):
                entry["value"] = float(value[inside])
                if rows[outside] >= FEWEST and math.isfinite(value[outside]):
                    gap = _gap(value, error, support, inside, outside)
                    entry["gap"] = gap if group in pairs else None
                    differences.append(gap["value"])
            entries.append(entry)
        if group in pairs:
            bound = certificates.mean_over_sites(differences)
            mean = None if bound is None else {"value": bound.value, "low": bound.low, "high": bound.high}
            over_sites.append({"group": names[group], "sites": len(differences), "gap": mean})
    by_site = [[entry for entry in entries if entry["site"] == site] for site in sites]
    for own in by_site:
        hide_few(own)
    return {"sites": [entry for own in by_site for entry in own], "mean": over_sites}


def hide_few(entries: Sequence[Facts]) -> None:
    """Hide how many rows small groups of a site have: of all groups where a single one would be what is left."""
    few = [entry for entry in entries if entry["rows"] < FEWEST]
    for entry in entries if len(few) == 1 else few:
        entry["rows"] = None


def _gap(value: np.ndarray, error: np.ndarray, support: np.ndarray, inside: int, outside: int) -> Facts:
    """The difference of two cells with its interval; without one where too few rows decide."""
    gap, least = float(value[inside] - value[outside]), int(min(support[inside], support[outside]))
    spread = math.hypot(float(error[inside]), float(error[outside]))
    if least < 2 or not math.isfinite(spread):
        return {"value": gap, "low": None, "high": None}
    reach = float(student_quantile(least - 1, 0.95)) * spread
    return {"value": gap, "low": gap - reach, "high": gap + reach}
