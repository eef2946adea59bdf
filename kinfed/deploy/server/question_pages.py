"""Pages of what sites have said beside training: their tables side by side, and every model at every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kinfed.data import multiple_of_others
from kinfed.engine import METRICS
from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.version import __version__

FAR = 3.0  # deviations of the others by which a mean is far from theirs
# Ratios of units that are mixed up often.
CONVERSIONS = {
    10.0: "tenths, or cm and mm", 100.0: "per cent, or m and cm", 1000.0: "thousands, or g and mg",
    12.0: "years and months",
    365.25: "years and days", 24.0: "days and hours", 60.0: "hours and minutes", 7.0: "weeks and days",
    2.205: "kg and pounds", 2.54: "inches and cm", 4.184: "kcal and kJ", 7.501: "kPa and mmHg",
    38.67: "cholesterol in mmol/l and mg/dl", 18.02: "glucose in mmol/l and mg/dl",
    88.42: "creatinine in mg/dl and µmol/l", 88.57: "triglycerides in mmol/l and mg/dl",
}  # fmt: skip
SAME = 0.06  # share by which a ratio may differ from a conversion
EXACT = "exact"
SMALL = "<"  # a count that did not leave
Sites = Mapping[str, Mapping[str, Any]]


def description_page(sites: Sites, missing: Mapping[str, str]) -> str:
    tables = [("rows", "Rows and gaps", GAPS, gap_table(sites)), ("means", "Numbers", MEANS, mean_table(sites))]
    if (categories := category_table(sites)) is not None:
        tables.append(("categories", "Categories", CATEGORIES, categories))
    rows = sum(site["rows"] for site in sites.values())
    lead = f"{len(sites)} sites have described {rows:,} rows. No row has left them, and nothing was trained."
    return _page(
        "What the sites have", "kinfed deploy describe", lead, [*doubts(sites), *_absent(sites, missing)], tables
    )


GAPS = (
    f"Share of rows without a value. {SMALL}: of fewer rows than the site counts, or told by such a count. –: the site "
    "has no such column."
)
MEANS = "Mean ± deviation of what is there, to four digits."
CATEGORIES = "Rows of every category; categories with few rows are added up."


def doubts(sites: Sites) -> list[str]:
    """Sentences on columns that some sites lack, that are of other kinds, or that look like other units."""
    sentences = []
    for name in column_names(sites):
        own = {site: record["columns"][name] for site, record in sites.items() if name in record["columns"]}
        if lacking := [site for site in sites if site not in own]:
            sentences.append(f"{name}: not at {', '.join(lacking)}.")
        if empty := [site for site, one in own.items() if one["kind"] == "empty"]:
            sentences.append(f"{name}: without a value at {', '.join(empty)}.")
        kinds = {one["kind"] for one in own.values()} - {"empty", ""}
        if len(kinds) > 1:
            each = ", ".join(f"{site} {one['kind']}" for site, one in own.items() if one["kind"] in kinds)
            sentences.append(f"{name} is of different kinds: {each}.")
        sentences += other_units(name, own)
    return sentences


def other_units(name: str, own: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on sites whose numbers look like another unit's."""
    with_mean = [site for site, one in own.items() if one["kind"] == "number" and one.get("deviation")]
    if len(with_mean) < 2:
        return []
    mean = np.array([own[site]["mean"] for site in with_mean])
    deviation = np.array([own[site]["deviation"] for site in with_mean])
    sentences = []
    for place, site in enumerate(with_mean):
        others = np.delete(np.arange(len(with_mean)), place)
        if len(others) == 1 and place > 0:
            break  # of two, one question is enough
        usual = float(np.median(mean[others]))
        values = f"mean {mean[place]:.4g}, elsewhere {usual:.4g}"
        if ratio := multiple_of_others(place, others, mean, deviation):
            known = [text for factor, text in CONVERSIONS.items()
                     if min(abs(ratio / factor - 1), abs(ratio * factor - 1)) < SAME]  # fmt: skip
            hint = f"; {known[0]}?" if known else "."
            sentences.append(f"{name} at {site}: about {ratio:.2g} times the values of other sites ({values}){hint}")
        elif abs(mean[place] - usual) > FAR * float(deviation[others].max()):
            sentences.append(
                f"{name} at {site}: far from the values of all other sites ({values}). Is the unit another one?"
            )
    return sentences


def column_names(sites: Sites) -> list[str]:
    return list(dict.fromkeys(name for site in sites.values() for name in site["columns"]))


def gap_table(sites: Sites) -> TextTable:
    rows: list[list[TableCell | str]] = [["rows", "", *(f"{site['rows']:,}" for site in sites.values())]]
    for name in column_names(sites):
        cells: list[TableCell | str] = []
        for site in sites.values():
            column = site["columns"].get(name)
            if column is None:
                cells.append(TableCell("–", tone="open"))
            elif column["missing"] is None:
                cells.append(TableCell(SMALL, tone="open"))
            else:
                share = column["missing"] / max(site["rows"], 1)
                cells.append(TableCell(f"{100 * share:.0f} %", tone="no" if share >= 0.5 else ""))
        rows.append([name, _kind(sites, name), *cells])
    columns = [TableColumn("column", "name"), TableColumn("kind", "text"), *map(TableColumn, sites)]
    return TextTable.of("Rows and gaps", columns, rows)


def mean_table(sites: Sites) -> TextTable:
    rows: list[list[TableCell | str]] = []
    for name in column_names(sites):
        own = [site["columns"].get(name, {}) for site in sites.values()]
        if any("mean" in one and one["kind"] == "number" for one in own):
            rows.append([name, *(TableCell(f"{one['mean']:.4g}", spread=f"{one['deviation']:.3g}") if "mean" in one
                                 else TableCell("–", tone="open") for one in own)])  # fmt: skip
    return TextTable.of("Numbers", [TableColumn("column", "name"), *map(TableColumn, sites)], rows)


def category_table(sites: Sites) -> TextTable | None:
    rows: list[list[TableCell | str]] = []
    for name in column_names(sites):
        own = [site["columns"].get(name, {}) for site in sites.values()]
        values = list(dict.fromkeys(value for one in own for value in one.get("categories", {})))
        for value in values:
            cells = [f"{one['categories'][value]:,}" if value in one.get("categories", {}) else "" for one in own]
            rows.append([name, value, *cells])
        if any(one.get("others", [0])[0] for one in own):
            hidden = [f"{one['others'][1]:,} in {one['others'][0]}" if one.get("others", [0])[0] else "" for one in own]
            rows.append([name, TableCell("others", tone="open"), *hidden])
    if not rows:
        return None
    return TextTable.of(
        "Categories", [TableColumn("column", "name"), TableColumn("value", "text"), *map(TableColumn, sites)], rows
    )


def matrix_page(record: Mapping[str, Any], missing: Mapping[str, str]) -> str:
    metric, sites = METRICS.named(record["metric"]), record["sites"]
    tables = [("matrix", "Whose model works where", MATRIX, matrix_table(record, record["metric"]))]
    names = dict.fromkeys(name for site in sites.values() for one in site["scores"].values() for name in one)
    more = [name for name in names if name != record["metric"]]
    tables += [(f"by-{name}", METRICS.named(name).title, "", matrix_table(record, name)) for name in more]
    rows = sum(site["rows"] for site in sites.values())
    lead = (
        f"{len(record['models'])} models were judged at {len(sites)} sites on {rows:,} test rows by {metric.title}. "
        "Rows have not left the sites; a model that was trained at a site has not seen its test rows if the run drew "
        "them alike."
    )
    return _page("Whose model works where", "kinfed deploy evaluate", lead, _absent(sites, missing), tables)


MATRIX = (
    "A line for each model, a column for each site. Bold: the best model at a site. A model has the name of its file."
)


def matrix_table(record: Mapping[str, Any], name: str) -> TextTable:
    metric, sites = METRICS.named(name), record["sites"]
    sign = 1 if metric.higher_is_better else -1
    rows: list[list[TableCell | str]] = []
    for model in record["models"]:
        cells: list[TableCell | str] = [model]
        for site in sites.values():
            value = site["scores"][model].get(name)
            of_all = [one.get(name) for one in site["scores"].values()]
            best = max((sign * one for one in of_all if one is not None), default=None)
            if value is None:
                cells.append(TableCell("–", tone="open"))
            else:
                cells.append(TableCell(f"{value:.4g}", best=sign * value == best))
        rows.append(cells)
    columns = [TableColumn(site, group=f"{metric.title}, by site") for site in sites]
    return TextTable.of(metric.title, [TableColumn("model", "name"), *columns], rows)


def _kind(sites: Sites, name: str) -> str:
    kinds = [site["columns"][name]["kind"] for site in sites.values() if name in site["columns"]]
    return ", ".join(dict.fromkeys(kind for kind in kinds if kind not in ("", "empty"))) or "–"


def _absent(sites: Sites, missing: Mapping[str, str]) -> list[str]:
    noised = [f"{name}: {site['terms']} on every figure." for name, site in sites.items() if site["terms"] != EXACT]
    return [*(f"Without {name}: {reason}" for name, reason in sorted(missing.items())), *noised]


def _page(
    heading: str, command: str, lead: str, notes: Sequence[str], tables: Sequence[tuple[str, str, str, TextTable]]
) -> str:
    return render(
        "tables.html", title=heading, kicker=command, heading=heading,
        links=[(name, title) for name, title, _, _ in tables], footer=[f"kinfed {__version__}"],
        figures=False, lead=lead, notes=list(notes), tables=tables,
    )  # fmt: skip
