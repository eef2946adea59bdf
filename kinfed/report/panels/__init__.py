"""Panels: figures of single methods, from what a method writes about itself into each round.

A panel is a function from one method, over all its seeds, to a `Panel`, or to None where the method did not record
what the panel needs. Registering it is all that is needed to have it on the page:

    from kinfed.report.panels import Panel, register_panel, series

    @register_panel
    def mixing_weights(method: Method) -> Panel | None:
        alphas = series(method, "alpha")
        if not alphas:
            return None
        figure = Figure(...)
        return Panel("Mixing weight", "How much of its own model each client keeps.", (figure,))

Draw with `kinfed.report.marks` and `kinfed.report.chart`, in colours of `kinfed.report.palette` (they follow the
reader's light or dark theme); pass every text from outside through `chart.escape`.
"""

from __future__ import annotations

from collections.abc import Callable

from kinfed.report.comparison import Method
from kinfed.report.panels.apfl_panel import mixing
from kinfed.report.panels.base import Panel, series
from kinfed.report.panels.cgpfl_panel import accuracy_by_number, choice_of_number, contexts, distances
from kinfed.report.panels.clusters_panel import clusters
from kinfed.report.panels.fedfomo_panel import who_helps_whom
from kinfed.report.panels.privacy_panel import privacy
from kinfed.report.panels.scalars_panel import scalars
from kinfed.report.panels.selffl_panel import decisions

__all__ = ["Panel", "PanelMaker", "panels", "register_panel", "series"]

PanelMaker = Callable[[Method], Panel | None]

# In the order of the page.
_PANELS: list[PanelMaker] = [
    scalars,
    mixing,
    clusters,
    contexts,
    distances,
    choice_of_number,
    accuracy_by_number,
    who_helps_whom,
    decisions,
    privacy,
]


def register_panel(make: PanelMaker) -> PanelMaker:
    """Have the panel on every page that it has something to show for, after those registered before."""
    if make not in _PANELS:
        _PANELS.append(make)
    return make


def panels(method: Method) -> list[Panel]:
    """Everything there is to show about the method."""
    return [panel for make in _PANELS if (panel := make(method)) is not None]
