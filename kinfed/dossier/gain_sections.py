"""Gains of every site with their certainty, and gaps between groups of rows."""

from __future__ import annotations

from typing import Any

from kinfed.analysis import MetricStyle, metric_style
from kinfed.dossier.facts import DEPLOYMENT
from kinfed.dossier.group_gaps import FEWEST
from kinfed.dossier.sections import DossierSection, columns
from kinfed.report import TableCell, TextTable
from kinfed.report.drawing import listed, plural, shown, signed
from kinfed.tabular import FitResult, Wording

Facts = dict[str, Any]
INTERVAL = "95 % interval"


def certainty(facts: Facts) -> DossierSection:
    texts, tables = _fit_gains(facts["fit"]) if "fit" in facts else _run_gains(facts)
    return DossierSection("gains", "Who gained, and with what certainty", texts, tables)


def _fit_gains(record: Facts) -> tuple[list[str], list[tuple[str, TextTable]]]:
    words = Wording(FitResult.from_json(record))
    texts = [words.overall()]
    for site in words.result.sites:
        texts.append(" ".join(filter(None, (words.sentence(site) + ".", words.certificate(site)))).replace("..", "."))
    return texts, []


def _run_gains(facts: Facts) -> tuple[list[str], list[tuple[str, TextTable]]]:
    if not facts["gains"]:
        why = (
            "each site keeps its rows and one method was run"
            if facts["kind"] == DEPLOYMENT
            else "no site trained alone"
        )
        return [f"No gain can be told: {why}, so that what a site reaches by itself is not known."], []
    texts, tables, style = [], [], metric_style(facts["metric"])
    for method in facts["gains"]:
        known = [one for one in method["sites"] if one["low"] is not None]
        better = [one["site"] for one in known if one["low"] > 0]
        worse = [one["site"] for one in known if one["high"] < 0]
        unsure = [one["site"] for one in method["sites"] if one["site"] not in (*better, *worse)]
        outcomes = {"better than alone": better, "worse than alone": worse, "not told from chance": unsure}
        parts = [
            f"{what} at {plural(len(sites), 'site')} ({listed(sites[:6])}{', ...' if len(sites) > 6 else ''})"
            for what, sites in outcomes.items()
            if sites
        ]
        seeds = f", means over {method['seeds']} seeds" if method["seeds"] > 1 else ""
        texts.append(f"{method['label']} in {style.noun}{seeds}: {'; '.join(parts)}, by 95 % intervals.")
        tables.append((f"{method['label']}: {style.noun} of every site on its test rows.", _site_table(method, style)))
    return texts, tables


def _site_table(method: Facts, style: MetricStyle) -> TextTable:
    style = style.for_values([one["alone"] for one in method["sites"]])
    reach = max(
        (max(abs(one["low"]), abs(one["high"])) for one in method["sites"] if one["low"] is not None), default=0
    )
    rows: list[list[TableCell | str]] = []
    for one in method["sites"]:
        known = one["low"] is not None
        interval = (one["low"], one["gain"], one["high"]) if known else None
        ends = f"{signed(one['low'], style)} to {signed(one['high'], style)}" if known else "–"
        rows.append([
            one["site"], f"{one['test']:,}", _with_unit(one["alone"], style), _with_unit(one["own"], style),
            signed(one["gain"], style), TableCell(ends, interval=interval, reach=reach),
        ])  # fmt: skip
    heads = ("Site", "Test rows", "Alone", "With others", "Gain", INTERVAL)
    return TextTable.of(method["label"], columns(*heads, texts=[INTERVAL]), rows)


def _with_unit(value: float, style: MetricStyle) -> str:
    return f"{shown(value, style)}{style.unit}"


def differences(facts: Facts) -> DossierSection | None:
    """Gaps between groups; None unless a column was named."""
    gaps = facts.get("gaps")
    if gaps is None:
        return None
    style, column = metric_style(gaps["metric"]), gaps["column"]
    texts = [
        f"Test rows are divided by the column {column} ({listed(gaps['groups'])}). A gap is the {style.noun} of a "
        "group less that of the site's other rows" + (" (lower is better)" if style.lower_is_better else "")
        + f". Groups with fewer than {FEWEST} test rows at a site are not shown. Where an interval holds zero, the "
        "rows show no gap, which is no proof that there is none."
    ]  # fmt: skip
    tables = []
    for model in gaps["models"]:
        texts += [_mean_sentence(model["label"], one, style) for one in model["mean"]]
        tables.append((f"{model['label']}: {style.noun} of every group.", _gap_table(model, style)))
    return DossierSection("differences", f"Gaps by {column}", texts, tables)


def _mean_sentence(label: str, mean: Facts, style: MetricStyle) -> str:
    gap, where = mean["gap"], plural(mean["sites"], "site")
    if gap is None:
        return f"{label}, {mean['group']}: {where} with enough rows of both sides, too few for a mean."
    points = " points" if style.in_percent else ""
    clear = "beyond chance" if gap["low"] > 0 or gap["high"] < 0 else "within chance"
    ends = f"95 % interval {signed(gap['low'], style)} to {signed(gap['high'], style)}"
    return (
        f"{label}, {mean['group']}: a mean gap of {signed(gap['value'], style)}{points} over {where}, {ends}; {clear}."
    )


def _gap_table(model: Facts, style: MetricStyle) -> TextTable:
    ends = [abs(entry["gap"][end]) for entry in model["sites"] if entry["gap"] and entry["gap"]["low"] is not None
            for end in ("low", "high")]  # fmt: skip
    rows: list[list[TableCell | str]] = []
    for entry in model["sites"]:
        gap, drawn = entry["gap"], TableCell("–")
        if gap is not None and gap["low"] is not None:
            text = f"{signed(gap['low'], style)} to {signed(gap['high'], style)}"
            drawn = TableCell(text, interval=(gap["low"], gap["value"], gap["high"]), reach=max(ends))
        rows.append([
            entry["site"], TableCell(entry["group"]), "–" if entry["rows"] is None else f"{entry['rows']:,}",
            "–" if entry["value"] is None else _with_unit(entry["value"], style),
            "–" if gap is None else signed(gap["value"], style), drawn,
        ])  # fmt: skip
    heads = ("Site", "Group", "Test rows", style.title, "Gap", INTERVAL)
    return TextTable.of(model["label"], columns(*heads, texts=["Group", INTERVAL]), rows)
