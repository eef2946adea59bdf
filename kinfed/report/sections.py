"""The sections of the report about one comparison. Each has a template of its name in templates/sections; here is what
the template is given, or None where there is nothing to show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kinfed.analysis import Comparison, gains
from kinfed.report import method_tables
from kinfed.report.charts import class_map, figures
from kinfed.report.charts.gain_figures import gain_against_size, sorted_gains
from kinfed.report.charts.site_curves import FEWEST_IN_A_BIN, site_curves
from kinfed.report.csv_downloads import downloads
from kinfed.report.drawing.chart import Figure
from kinfed.report.html import Download
from kinfed.report.method_tables import SERVER_COLUMNS
from kinfed.report.panels import method_panels
from kinfed.report.panels.privacy_panel import accuracy_against_epsilon
from kinfed.report.sentences import (
    best_federated,
    data_notes,
    data_sentence,
    facts,
    headline_kind,
    leads,
    one_class_sentence,
    outsiders_sentence,
    seeds_of,
)
from kinfed.report.tables import TableColumn, TextTable

MAX_OPEN_PANEL_FIGURES = 16  # more are drawn only when asked for

Values = dict[str, Any]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    values: Values


def sections(comparison: Comparison) -> list[Section]:
    every: dict[tuple[str, str], Callable[[Comparison], Values | None]] = {
        ("results", "Results"): _results,
        ("rounds", "Over the rounds"): _rounds,
        ("clients", "From client to client"): _clients,
        ("gain", "Who is helped, who is hurt"): _gains,
        ("curves", "Client by client: ranking and calibration"): _curves,
        ("cost", "What it costs"): _against(figures.bytes_against_accuracy),
        ("time", "Over simulated time"): _against(figures.metric_over_time),
        ("privacy", "What privacy costs"): _against(accuracy_against_epsilon),
        ("run", "What was run"): _what_was_run,
        ("data", "Who holds which data"): _data,
        ("inside", "Inside the methods"): _method_panels,
        ("tables", "Tables to take away"): _tables,
    }
    return [
        Section(name, title, values)
        for (name, title), make in every.items()
        if (values := make(comparison)) is not None
    ]


def _what_was_run(comparison: Comparison) -> Values:
    by_run = {run.label: facts(run) for run in comparison.runs}
    keys = dict.fromkeys(key for entries in by_run.values() for key in entries)
    columns = [TableColumn("Setting", "name"), *(TableColumn(label, "text") for label in by_run)]
    rows = [[key, *(entries.get(key, "–") for entries in by_run.values())] for key in keys]
    return {
        "facts": facts(comparison.runs[0]),
        "table": TextTable.of("What was run", columns, rows) if len(by_run) > 1 else None,
        "configurations": {run.label: json.dumps(run.config, indent=2, ensure_ascii=False) for run in comparison.runs},
    }


def _results(comparison: Comparison) -> Values | None:
    if not comparison.methods:
        return None
    kind, seeds = headline_kind(comparison), seeds_of(comparison)
    lead = leads(comparison, kind) if kind and seeds > 1 else None
    has_server = "server" in comparison.kinds
    title = f"How clear is the lead of {lead[0].label} in {kind} {comparison.style.noun}?" if lead else ""
    return {
        "final_rounds": sorted({method.final_round for method in comparison.methods}),
        "same_seeds": comparison.same_seeds,
        "seeds": seeds,
        "table": method_tables.results_table(comparison),
        "leads": method_tables.leads_table(title, lead[1], comparison.style) if lead else None,
        "server_table": method_tables.results_table(comparison, SERVER_COLUMNS) if has_server else None,
        "every_metric": method_tables.every_metric_table(comparison),
        "one_class": one_class_sentence(comparison),
        "in_percent": f"{comparison.style.noun} in %" if comparison.style.in_percent else "",
        "outsiders": outsiders_sentence(comparison),
        "all_took_part": any(method.participation for method in comparison.methods),
        "participation": method_tables.participation_table(comparison),
        "definitions": {one.column.heading: one.column.definition for one in method_tables.main_columns(comparison)},
    }


def _rounds(comparison: Comparison) -> Values | None:
    figure = figures.learning_curves(comparison)
    if figure is None:
        return None
    lower = comparison.style.lower_is_better
    return {"figure": figure, "metric": comparison.metric, "lower": lower, "seeds": seeds_of(comparison)}


def _clients(comparison: Comparison) -> Values | None:
    if not comparison.methods or comparison.metric != "accuracy":
        return None
    return {"rows": figures.distribution(comparison), "shares": figures.cumulative_shares(comparison)}


def _gains(comparison: Comparison) -> Values | None:
    others = [method for method in comparison.methods if method.family != "local"]
    if not others or comparison.metric == "loss":
        return None
    by_method = [(method, entries) for method in others if (entries := gains(comparison, method))]
    values: Values = {"has_local": len(others) < len(comparison.methods), "balance": None}
    if not by_method:
        return values
    best = best_federated(comparison)
    first, own = next((pair for pair in by_method if pair[0] is best), by_method[0])
    return values | {
        "balance": method_tables.balance_table(by_method, comparison.style),
        "sites": method_tables.sites_table(first, own, comparison.style, comparison.baselines),
        "most_named": method_tables.MOST_NAMED_CLIENTS,
        "metric": comparison.style.noun,
        "bars": sorted_gains(by_method, first, comparison.style),
        "sizes": gain_against_size(by_method, first, comparison.style),
        "seeds": max(len(method.complete_trials) for method, _ in by_method),
    }


def _curves(comparison: Comparison) -> Values | None:
    curves = site_curves(comparison)
    if curves is None:
        return None
    binary = all(federation.num_classes == 2 for federation in comparison.federations.values())
    return {"curves": curves, "binary": binary, "in_a_bin": FEWEST_IN_A_BIN}


def _against(draw: Callable[[Comparison], Figure | None]) -> Callable[[Comparison], Values | None]:
    """A section of one figure of the metric."""

    def make(comparison: Comparison) -> Values | None:
        figure = draw(comparison)
        return None if figure is None else {"figure": figure, "metric": comparison.style.noun}

    return make


def _data(comparison: Comparison) -> Values | None:
    federations = comparison.federations
    figure = class_map.class_map(federations)
    if figure is None:
        return None
    federation = next(one for _, one in sorted(federations.items()) if one.names)
    return {
        "figure": figure,
        "texts": [data_sentence(federation), *data_notes(federations)],
        "clients": len(federation.names),
        "pooled": len(federation.names) > class_map.MAX_COLUMNS,
        "grouped": bool(federation.groups),
    }


def _method_panels(comparison: Comparison) -> Values | None:
    by_method = {method.label: entries for method in comparison.methods if (entries := method_panels(method))}
    counts = {label: sum(len(panel.figures) for panel in entries) for label, entries in by_method.items()}
    folded = sum(counts.values()) > MAX_OPEN_PANEL_FIGURES
    return {"by_method": by_method, "counts": counts, "folded": folded} if by_method else None


def _tables(comparison: Comparison) -> Values | None:
    if not comparison.methods:
        return None
    results = method_tables.results_table(comparison)
    latex = Download("results.tex", "the table of results for LaTeX with booktabs", results.latex())
    return {"files": [*downloads(comparison), latex], "markdown": results.markdown()}
