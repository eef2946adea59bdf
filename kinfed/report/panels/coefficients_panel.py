"""Coefficients of methods that learn by sums: a table with intervals, sites in order of their effects, checks."""

from __future__ import annotations

import math

from kinfed.analysis import Method
from kinfed.report.drawing import Figure, axis, escape, layout
from kinfed.report.drawing.looks import INK, style_of
from kinfed.report.drawing.marks import dots, level
from kinfed.report.panels.base import MAX_BARS, Panel, seed_note
from kinfed.report.tables import TableColumn, TextTable
from kinfed.serving import coefficients as fits

MOST_ROWS = 60  # of the table on a page; kinfed coefficients has all


def coefficients(method: Method) -> Panel | None:
    trials = [trial for trial in method.complete_trials if fits.has_coefficients(trial)]
    if not trials:
        return None
    seed = min(trial.seed for trial in trials)
    fit = fits.coefficients_of(method.run, method.algorithm, seed)
    text = " ".join(fit.sentences()) + seed_note(method, seed)
    if len(fit.rows) > MOST_ROWS:
        text += f" The first {MOST_ROWS} of {len(fit.rows)} coefficients are shown; kinfed coefficients has all."
    figures = () if not fit.sites else (_caterpillar(method, fit), *_checks(method, fit))
    return Panel("Coefficients and sites", text, figures, coefficient_table(fit, MOST_ROWS))


def coefficient_table(fit: fits.Coefficients, most: int | None = None) -> TextTable:
    """Estimate, standard error and interval of every coefficient; the p-value stands beside the interval. Of log odds,
    rates and hazards the ratio is shown with its interval, as people read it. Intervals by the profile likelihood stand
    beside Wald's, and deviations between and within sites below."""
    of = fit.ratio or "coefficient"
    columns = [
        TableColumn("coefficient", "name"), TableColumn("estimate"), TableColumn("standard error"),
        *([TableColumn(fit.ratio, definition="exp of the coefficient")] if fit.ratio else []),
        TableColumn("from", definition=f"lower end of the interval of the {of}"),
        TableColumn("to", definition=f"upper end of the interval of the {of}"),
        TableColumn("p", definition="of the hypothesis that the coefficient is zero"),
    ]  # fmt: skip
    rows = [(row.name, *_cells(row, bool(fit.ratio))) for row in fit.rows[:most]]
    if fit.profile is not None:
        columns += [TableColumn("profile from"), TableColumn("profile to")]
        ends = [fit.profile.rows.get(row.name) for row in fit.rows[:most]]
        rows = [(*row, *_ends(pair)) for row, pair in zip(rows, ends, strict=True)]
        rows += [(name, f"{value:.4g}", *[""] * 4, *_ends(pair)) for name, value, pair in fit.deviations()]
    return TextTable.of(f"coefficients of {fit.label}, 95 % intervals", columns, rows)


def _cells(row: fits.Coefficient, ratio: bool) -> list[str]:
    if row.is_left_out:
        return ["left out", *([""] * (5 if ratio else 4))]
    ends = (row.estimate, row.low, row.high) if ratio else (row.low, row.high)
    shown = (math.exp(min(value, 700.0)) for value in ends) if ratio else ends
    return [*("" if math.isnan(value) else f"{value:.4g}" for value in (row.estimate, row.se, *shown)), _p(row.p)]


def _ends(pair: tuple[float, float] | None) -> tuple[str, ...]:
    return ("", "") if pair is None else tuple(f"{value:.4g}" for value in pair)


def _p(value: float) -> str:
    return "" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _caterpillar(method: Method, fit: fits.Coefficients) -> Figure:
    step = math.ceil(len(fit.sites) / MAX_BARS)
    sites = fit.sites[::step]
    places = list(range(1, len(sites) + 1))
    texts = [f"{escape(one.name)}: {one.effect:.3g} ± {one.reach:.2g}" for one in sites]
    trace = dots(
        places, [one.effect for one in sites], style_of(method).color, "%{text}", name=method.label, text=texts,
        error=[one.reach for one in sites],
    )  # fmt: skip
    title = "effect of a site, with its 95 % interval" + ("" if step == 1 else f", every {step}th")
    traces = [level((0.5, len(sites) + 0.5), 0.0, INK, "all sites"), trace]
    about = f"Effects of {len(fit.sites)} sites on a row with average columns, in ascending order."
    return Figure(about, traces, layout(axis(showticklabels=False), axis(nticks=6), title), 260)


def _checks(method: Method, fit: fits.Coefficients) -> list[Figure]:
    """Deviation within every site, and influence of every site, beside its effect."""
    figures = []
    for key, title, about in (
        ("noise", "deviation of rows within a site", "A site far above the others fits the model badly."),
        ("influence", "influence of a site (Cook's distance)", "Without a site above 1 coefficients would differ."),
    ):
        sites = [one for one in fit.sites if not math.isnan(getattr(one, key))]
        if sites:
            values = [float(getattr(one, key)) for one in sites]
            texts = [f"{escape(one.name)}: {value:.3g}" for one, value in zip(sites, values, strict=True)]
            trace = dots([one.effect for one in sites], values, style_of(method).color, "%{text}", text=texts)
            x = axis("effect of the site", nticks=5)
            figures.append(Figure(f"{title}. {about}", [trace], layout(x, axis(nticks=5), title), 220))
    return figures
