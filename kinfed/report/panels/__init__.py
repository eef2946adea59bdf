"""Panels: figures of single methods, from what a method writes about itself into each round.

A panel is a function from one method, over all its seeds, to a `Panel`, or to None if the method did not record
what the panel needs. Registering it is all that is needed to have it on the page:

    from kinfed.report.panels import PANELS, Panel, series

    @PANELS.register("mixing-weights", summary="how much of its own model each client keeps")
    def mixing_weights(method: Method) -> Panel | None:
        alphas = series(method, "alpha")
        if not alphas:
            return None
        figure = Figure(...)
        return Panel("Mixing weight", "How much of its own model each client keeps.", (figure,))

Draw with `kinfed.report.drawing.marks` and `kinfed.report.drawing.chart`, in colours of `kinfed.report.drawing.looks`
(they follow the reader's light or dark theme); pass every text from outside through `chart.escape`.
"""

from collections.abc import Callable

from kinfed.analysis import Method
from kinfed.core import Registry
from kinfed.report.panels.base import Panel, series

__all__ = ["PANELS", "Panel", "method_panels", "series"]

PANELS: Registry[Callable[[Method], Panel | None]] = Registry("panel")

# In the order of the page: name, where it is, what it shows.
for _name, _location, _summary in (
    ("kin", "shares_panel:shares", "Kin: how much each client learns alone, from all and from its group"),
    ("coefficients", "coefficients_panel:coefficients", "mixed models: coefficients with intervals, effects of sites"),
    (
        "importance",
        "importance_panel:importance",
        "trees: columns by their share of gains, and what trees say along them",
    ),
    ("recorded", "base:scalars", "every plain number that a method records, over rounds"),
    ("mixing", "shares_panel:mixing", "APFL: how much of its own model each client keeps"),
    ("clusters", "clusters_panel:clusters", "who trains with whom, for methods with several server models"),
    ("context-distances", "cgpfl_panel:distances", "CGPFL: how far apart the context models are"),
    ("context-choice", "cgpfl_panel:choice_of_number", "CGPFL-Heur: how many contexts there should be"),
    ("context-accuracy", "cgpfl_panel:accuracy_by_number", "CGPFL: accuracy against the number of contexts"),
    ("affinity", "fedfomo_panel:who_helps_whom", "FedFomo: who helps whom"),
    ("decisions", "selffl_panel:decisions", "Self-FL: who learns alone, who from all"),
    ("privacy", "privacy_panel:privacy", "what a private run promises to whom"),
    ("user-privacy", "privacy_panel:user_privacy", "what user-level privacy promises, and of which models"),
):
    PANELS.register(_name, f"{__name__}.{_location}", summary=_summary)


def method_panels(method: Method) -> list[Panel]:
    """Everything there is to show about the method."""
    return [panel for entry in PANELS.values() if (panel := entry.target(method)) is not None]
