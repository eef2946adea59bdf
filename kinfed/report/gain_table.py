"""The gain that a run measured: every client's figure alone and with a method, for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from kinfed.analysis import Comparison, Method, client_gains, gains, single_run, summarize_gains
from kinfed.errors import ConfigError
from kinfed.records import load_runs
from kinfed.report.method_tables import sites_table
from kinfed.report.sentences import best_federated


def measured_gain(folder: Path, algorithm: str | None = None, limit: int = 40) -> tuple[Table, str]:
    """A table of the clients, largest gain first, and the balance in a sentence. The method is the best federated one
    of the run unless it is named; Local of the same run is what it is compared with."""
    comparison = single_run(load_runs([folder])[0])
    method = _method(comparison, algorithm)
    values = gains(comparison, method)
    if not values:
        raise ConfigError(
            f"{folder} has no finished run of local with the same clients as {method.algorithm}; gains are measured "
            "against training alone, so add local to the algorithms"
        )
    s, style = summarize_gains(client_gains(values)), comparison.style
    table = sites_table(method, values, style, comparison.baselines, most=len(values))
    assert table is not None  # all clients are wanted
    shown = Table(box=SIMPLE, title=table.title, title_justify="left", title_style="dim", padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        shown.add_column(column.heading, justify="left" if number == 0 or column.kind == "text" else "right")
    for row in table.rows[:limit]:
        shown.add_row(*(Text(cell.text) for cell in row))
    mean = style.scale * s.mean
    return shown, (
        f"{method.label} helps {s.helped} of {s.n} clients, leaves {s.unchanged} as they were and hurts {s.hurt}; the "
        f"mean gain in {style.noun} is {mean:+.3g}{' points' if style.in_percent else ''}"
    )


def _method(comparison: Comparison, algorithm: str | None) -> Method:
    if algorithm is None:
        best = best_federated(comparison)
        if best is None:
            raise ConfigError("the run has no finished method besides local; run one, such as fedavg or ditto")
        return best
    for method in comparison.methods:
        if method.algorithm == algorithm:
            return method
    names = ", ".join(method.algorithm for method in comparison.methods)
    raise ConfigError(f"the run has no method {algorithm!r}; it has {names}")
