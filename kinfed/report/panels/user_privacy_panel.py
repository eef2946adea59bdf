"""User-level privacy: what it promises about which models, and how ε and the clipping norm went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinfed.analysis import Method, average
from kinfed.report.drawing.chart import Figure, axis, layout, round_axis
from kinfed.report.drawing.marks import curve
from kinfed.report.panels.base import Panel, series


def user_privacy(method: Method) -> Panel | None:
    recorded = series(method, "user_privacy")
    if not recorded:
        return None
    last = [by_round[max(by_round)] for by_round in recorded.values()]
    return Panel("User-level privacy", _sentence(last), tuple(_figures(method, recorded)))


def _sentence(last: Sequence[dict[str, Any]]) -> str:
    """`last`: what every seed recorded at its last evaluation."""
    one, largest = last[0], [entry["epsilon"] for entry in last]
    settings = (
        f"noise {one['noise']:.3g} times the clipping norm in the sum of a round, divided by {one['expected']:.4g} "
        f"expected clients; neighbours: {one['neighbours']}"
    )
    delta = f"{one['delta']:g}".replace("e-0", "e-")
    if None in largest:
        return (
            f"Updates were clipped, but no noise was added ({settings}): there is no user-level privacy, ε is infinite."
        )
    if not any(largest):
        return "Nothing leaves the clients: there is no server model to protect, and no noise."
    return (
        f"Server model private at (ε, δ) = ({max(largest):.3g}, {delta}) per client, over all rounds ({settings}). "
        "Personal models stay with their clients: they have no noise, and are not covered. The server itself sees "
        "single updates and is trusted; scores and other figures on this page are not covered."
    )


def _figures(method: Method, recorded: Mapping[int, Mapping[int, dict[str, Any]]]) -> list[Figure]:
    """ε over rounds, and the clipping norm where it moves; mean over seeds."""
    figures = []
    for name, title in (("epsilon", "ε of every client so far"), ("clip", "Clipping norm")):
        by_round: dict[int, dict[int, float]] = {}
        for seed, entries in recorded.items():
            for number, entry in entries.items():
                if entry[name]:
                    by_round.setdefault(number, {})[seed] = float(entry[name])
        if len({value for by_seed in by_round.values() for value in by_seed.values()}) < 2:
            continue
        points = [(number, mean) for number, values in sorted(by_round.items()) if (mean := average(values))]
        figures.append(
            Figure(
                description=f"{title} under {method.label}, over rounds.",
                data=curve(method, points, "round %{x}: %{y:.4g}%{customdata}"),
                layout=layout(round_axis(by_round), axis(nticks=5, rangemode="tozero"), title),
                height=220,
            )
        )
    return figures
