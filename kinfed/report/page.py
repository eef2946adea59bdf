"""The report put together: one HTML page that needs nothing from outside itself, and its file.

Each section about a comparison has a template of its name in templates/sections; here is what the template is given, or
None if there is nothing to show.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinfed.analysis import Comparison, cautions, compare, gains, pool_seeds
from kinfed.core import storage
from kinfed.data import FEWEST_AT_RISK
from kinfed.records import RunRecord, load_runs
from kinfed.report import method_tables, sentences
from kinfed.report.charts import class_map, figures, survival
from kinfed.report.downloads import downloads
from kinfed.report.drawing.chart import Figure
from kinfed.report.html import Download, render
from kinfed.report.panels import method_panels
from kinfed.report.panels.privacy_panel import accuracy_against_epsilon
from kinfed.report.tables import TableColumn, TextTable

MAX_OPEN_PANEL_FIGURES = 16  # more are drawn only when asked for

Values = dict[str, Any]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    values: Values


def build(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report and return its path. Seeds of runs with equal settings are averaged together.

    Without `out` the report of a single run goes into its folder as report.html, and one of several runs to
    comparison.html in the current directory: the page of one of them is left alone."""
    runs = load_runs([Path(folder) for folder in run_dirs])
    pooled = pool_seeds(runs)
    target = out or (runs[0].path / "report.html" if len(runs) == 1 else Path("comparison.html"))
    return write_page(target, report_page(pooled, compare(pooled)))


def write_page(target: Path, page: str) -> Path:
    """Write a page whole or not at all, in a folder that is made where it is missing."""
    storage.make_folder(target.parent)
    storage.write_atomically(target, page.encode(errors="replace"))  # a name may hold bytes that are no text
    return target


def report_page(runs: list[RunRecord], comparisons: list[Comparison]) -> str:
    title = sentences.headline(runs)
    warnings = [f"{run.label}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    parts = [_part(comparison, number, len(comparisons) > 1) for number, comparison in enumerate(comparisons, start=1)]
    if len(parts) > 1:
        warnings.insert(0, sentences.other_data(comparisons))
        links = [(part["id"], part["title"]) for part in parts]
    else:
        links = [(section.name, section.title) for section in parts[0]["sections"]]
    return render(
        "report.html", title=f"{title} – kinfed report", heading=title, links=links, figures=True, warnings=warnings,
        kicker="kinfed report · " + ", ".join(run.label for run in runs), parts=parts,
        footer=[_provenance(run) for run in runs],
    )  # fmt: skip


def _part(comparison: Comparison, number: int, one_of_several: bool) -> Values:
    """Runs on the same data. Runs on different data stand apart, in parts of their own."""
    title = f"{sentences.headline(comparison.runs)} ({', '.join(run.label for run in comparison.runs)})"
    prefix = f"part{number}-" if one_of_several else ""  # of the ids of its sections
    texts = {"findings": sentences.findings(comparison), "cautions": cautions(comparison)}
    return {"title": title, "id": f"part{number}", "prefix": prefix, **texts, "sections": sections(comparison)}


def _provenance(run: RunRecord) -> str:
    configuration = f"configuration {run.fingerprint}" if run.fingerprint else ""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return " · ".join(filter(None, (f"{run.label}: kinfed {run.version}", configuration, versions)))


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
        ("survival", "Survival of every client"): _survival,
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
    by_run = {run.label: sentences.facts(run) for run in comparison.runs}
    keys = dict.fromkeys(key for entries in by_run.values() for key in entries)
    columns = [TableColumn("Setting", "name"), *(TableColumn(label, "text") for label in by_run)]
    rows = [[key, *(entries.get(key, "–") for entries in by_run.values())] for key in keys]
    return {
        "facts": sentences.facts(comparison.runs[0]),
        "table": TextTable.of("What was run", columns, rows) if len(by_run) > 1 else None,
        "configurations": {run.label: json.dumps(run.config, indent=2, ensure_ascii=False) for run in comparison.runs},
    }


def _results(comparison: Comparison) -> Values | None:
    if not comparison.methods:
        return None
    kind, seeds = sentences.headline_kind(comparison), comparison.seeds
    lead = sentences.leads(comparison, kind) if kind and seeds > 1 else None
    has_server = "server" in comparison.kinds
    title = f"How clear is the lead of {lead[0].label} in {kind} {comparison.style.noun}?" if lead else ""
    return {
        "final_rounds": sorted({method.final_round for method in comparison.methods}),
        **{"same_seeds": comparison.same_seeds, "seeds": seeds, "table": method_tables.results_table(comparison)},
        "leads": method_tables.leads_table(title, lead[1], comparison.style) if lead else None,
        "server_table": method_tables.results_table(comparison, method_tables.SERVER_COLUMNS) if has_server else None,
        "every_metric": method_tables.every_metric_table(comparison),
        "in_percent": f"{comparison.style.noun} in %" if comparison.style.in_percent else "",
        "one_class": sentences.one_class_sentence(comparison), "outsiders": sentences.outsiders_sentence(comparison),
        "all_took_part": any(method.participation for method in comparison.methods),
        "participation": method_tables.participation_table(comparison),
        "definitions": {one.column.heading: one.column.definition for one in method_tables.main_columns(comparison)},
    }  # fmt: skip


def _rounds(comparison: Comparison) -> Values | None:
    figure = figures.learning_curves(comparison)
    if figure is None:
        return None
    lower = comparison.style.lower_is_better
    return {"figure": figure, "metric": comparison.metric, "lower": lower, "seeds": comparison.seeds}


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
    best = sentences.best_federated(comparison)
    first, own = next((pair for pair in by_method if pair[0] is best), by_method[0])
    style = comparison.style
    return values | {
        "balance": method_tables.balance_table(by_method, style), "metric": style.noun,
        "sites": method_tables.sites_table(first, own, style, comparison.baselines),
        "most_named": method_tables.MOST_NAMED_CLIENTS, "bars": figures.sorted_gains(by_method, first, style),
        "sizes": figures.gain_against_size(by_method, first, style),
        "seeds": max(len(method.complete_trials) for method, _ in by_method),
    }  # fmt: skip


def _curves(comparison: Comparison) -> Values | None:
    curves = figures.site_curves(comparison)
    if curves is None:
        return None
    binary = all(federation.num_classes == 2 for federation in comparison.federations.values())
    return {"curves": curves, "binary": binary, "in_a_bin": figures.FEWEST_IN_A_BIN}


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
    clients, texts = len(federation.names), [sentences.data_sentence(federation), *sentences.data_notes(federations)]
    parts = {"figure": figure, "texts": texts, "clients": clients}
    return parts | {"pooled": clients > class_map.MAX_COLUMNS, "grouped": bool(federation.groups)}


def _survival(comparison: Comparison) -> Values | None:
    figure = survival.survival_figure(comparison.federations)
    if figure is None:
        return None
    federation = next(one for _, one in sorted(comparison.federations.items()) if one.survival is not None)
    drawn = len(survival.largest(federation))
    return {
        "figure": figure, "table": survival.at_risk_table(federation), "fewest": FEWEST_AT_RISK, "drawn": drawn,
        "clients": len(federation.names),
    }  # fmt: skip


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
