"""Contexts of CGPFL: who belongs to which, how far apart they are, and how many there should be.

Figure 3 (a) of Tang, Guo, Guo, "Personalized Federated Learning with Contextualized Generalization" (accuracy against
the number of contexts, the one chosen by CGPFL-Heur marked), Eq. (11), and the terms of its Theorem 4.2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kinfed.algorithms.cgpfl.bound import complexity, confidence, label_discrepancy
from kinfed.report.chart import Figure, Trace, axis, layout, numbers, safe, thinned
from kinfed.report.comparison import Method, family
from kinfed.report.palette import HEAT_HIGH, HEAT_LOW, INK, LOCAL, MUTED, SURFACE
from kinfed.report.panels.clusters_panel import membership
from kinfed.report.panels.panel import Panel, panel, series
from kinfed.report.statistics import Average, average
from kinfed.runs.reader import Federation, Run, Trial

MAX_CONTEXTS = 40  # in the map of distances
DELTA = 0.05  # of the bound


@panel
def contexts(method: Method) -> Panel | None:
    return membership(method, "context", "context")


# How far apart they are.


@panel
def distances(method: Method) -> Panel | None:
    recorded = series(method, "distances")
    if not recorded:
        return None
    seed = min(recorded)
    last = max(recorded[seed])
    matrix = recorded[seed][last]
    if not _is_square(matrix):
        return None
    figures = [_map(method, matrix, last)] if 1 < len(matrix) <= MAX_CONTEXTS else []
    costs = dict(_costs(method, seed))
    if costs:
        figures.append(_cost_curve(method, costs))
    text = _distances_sentence(matrix, costs.get(last)) + _bound_sentence(method, seed, len(matrix), costs.get(last))
    if len(method.counted) > 1:
        text += f" Shown is seed {seed}."
    return Panel("Context models", text.strip(), tuple(figures)) if figures else None


def _is_square(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(r, list) and len(r) == len(value) for r in value)


def _map(method: Method, matrix: list[list[float]], last: int) -> Figure:
    names = [str(k) for k in range(len(matrix))]
    trace: Trace = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": [numbers(None if i == j else value for j, value in enumerate(row)) for i, row in enumerate(matrix)],
        "zmin": 0,
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "showscale": False,
        "colorscale": [[0, SURFACE], [0.5, HEAT_LOW], [1, HEAT_HIGH]],
        "hovertemplate": "contexts %{y} and %{x}: %{z:.3g} apart<extra></extra>",
    }
    few = len(matrix) <= 8
    if few:
        trace |= {"texttemplate": "%{z:.2g}", "textfont": {"size": 12}}
    shown: dict[str, Any] = {"type": "category", "showgrid": False, "ticks": "", "showline": False, "nticks": 12}
    return Figure(
        description=f"Distances between the context models of {method.label} after round {last}.",
        data=[trace],
        layout=layout(axis("Context", **shown), axis(**shown, autorange="reversed"), "Distance between context models"),
        height=280,
    )


def _costs(method: Method, seed: int) -> Iterator[tuple[int, float]]:
    """(round, Σ_i (m_i/m) ‖θ_i − ω_k(i)‖²) of the clients' own models, where the run recorded them."""
    federation = method.run.federations.get(seed)
    for number, figures in sorted(series(method, "clients").get(seed, {}).items()):
        apart = figures.get("squared_distance_to_context") if isinstance(figures, dict) else None
        if federation is None or not isinstance(apart, list) or len(apart) != len(federation.sizes):
            continue
        pairs = [(a, m) for a, m in zip(apart, federation.sizes, strict=True) if a is not None]
        if total := sum(m for _, m in pairs):
            yield number, sum(a * m for a, m in pairs) / total


def _cost_curve(method: Method, costs: dict[int, float]) -> Figure:
    points = thinned(list(costs.items()))
    return Figure(
        description=f"Mean squared distance of the personal models of {method.label} from their contexts, over rounds.",
        data=[
            {
                "type": "scatter",
                "x": [number for number, _ in points],
                "y": numbers(value for _, value in points),
                "mode": "lines+markers" if len(points) <= 25 else "lines",
                "line": {"color": method.style.color, "width": 2},
                "marker": {"color": method.style.color, "size": 6},
                "hovertemplate": "round %{x}: %{y:.3g}<extra></extra>",
                "name": safe(method.label),
            }
        ],
        layout=layout(axis("Round"), axis(nticks=5, rangemode="tozero"), "Personal models to contexts, squared"),
        height=280,
    )


def _distances_sentence(matrix: list[list[float]], cost: float | None) -> str:
    pairs = [(matrix[i][j], i, j) for i in range(len(matrix)) for j in range(i)]
    text = ""
    if pairs:
        (least, a, b), (most, c, d) = min(pairs), max(pairs)
        text = (
            f"The nearest two context models, {b} and {a}, are {least:.2g} apart, the farthest, {d} and {c}, {most:.2g}"
        )
        text += "." if cost is None else f"; a personal model is about {math.sqrt(cost):.2g} from its context."
    return text


def _bound_sentence(method: Method, seed: int, count: int, cost: float | None) -> str:
    """The terms of Theorem 4.2 that can be known."""
    federation, size = method.run.federations.get(seed), _parameters(method.run)
    if federation is None or size is None or not sum(federation.sizes):
        return ""
    m = sum(federation.sizes)
    text = (
        f" Of the paper’s bound on the generalization error, with {count} context{'' if count == 1 else 's'}: "
        f"confidence {confidence(len(federation.names), m, DELTA):.2g}, complexity "
        f"{complexity(count, size, m):.2g}"
    )
    text += "" if cost is None else f", cost {cost:.2g} times an unknown constant"
    apart = _discrepancy(federation)
    if apart is not None:
        text += f"; labels of training and test examples differ by {apart:.2f} on average (0 if alike, 1 if disjoint)"
    return text + "."


def _discrepancy(federation: Federation) -> float | None:
    """Mean over clients, weighted by their examples, of those that have test examples."""
    found = label_discrepancy(federation.train, federation.test)
    known = np.isfinite(found)
    return float(np.average(found[known], weights=np.array(federation.sizes)[known])) if known.any() else None


def _parameters(run: Run) -> int | None:
    """d, from the file that describes the run's models."""
    try:
        found = json.loads((run.path / "model.json").read_text(encoding="utf-8"))["parameters"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


# How many there should be.


@panel
def choice_of_number(method: Method) -> Panel | None:
    """Eq. (11) of the first counted seed."""
    found = {
        trial.seed: curve
        for trial in method.counted
        if (curve := next((c for entry in trial.rounds if (c := _curve(entry.method)) is not None), None)) is not None
    }
    if not found:
        return None
    seed = min(found)
    curve = found[seed]
    text = (
        "Every further context has to be learned from the same examples, which costs generalization (first term), and "
        "brings context models nearer to their clients (second term). The number with the least sum is kept: "
        f"{curve.chosen} of at most {len(curve.complexity)}."
    )
    others = {s: c.chosen for s, c in found.items() if s != seed}
    if others:
        listed = ", ".join(f"{chosen} with seed {s}" for s, chosen in sorted(others.items()))
        text += f" Shown is seed {seed}; it was {listed}."
    return Panel("How many contexts", text, (_terms(method, curve),))


@dataclass(frozen=True)
class Curve:
    complexity: list[float]
    cost: list[float]  # times μ
    chosen: int

    @property
    def e(self) -> list[float]:
        return [a + b for a, b in zip(self.complexity, self.cost, strict=True)]


def _curve(figures: dict[str, Any]) -> Curve | None:
    first, cost = figures.get("complexity"), figures.get("cost")
    mu, chosen = figures.get("mu"), figures.get("contexts")
    if not isinstance(first, list) or not isinstance(cost, list) or not first or len(first) != len(cost):
        return None
    if not isinstance(mu, int | float) or not isinstance(chosen, int) or not 1 <= chosen <= len(first):
        return None
    return Curve([float(v) for v in first], [mu * float(v) for v in cost], chosen)


def _terms(method: Method, curve: Curve) -> Figure:
    x = list(range(1, len(curve.e) + 1))
    lines = (
        ("first term: complexity", curve.complexity, {"color": MUTED, "width": 1.5, "dash": "dash"}),
        ("second term: μ · cost", curve.cost, {"color": MUTED, "width": 1.5, "dash": "dot"}),
        ("e(K), their sum", curve.e, {"color": method.style.color, "width": 2.5}),
    )
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": x,
            "y": numbers(values),
            "mode": "lines",
            "line": line,
            "hovertemplate": f"K = %{{x}}: {name} %{{y:.3g}}<extra></extra>",
            "name": name,
        }
        for name, values, line in lines
    ]
    data.append(
        {
            "type": "scatter",
            "x": [curve.chosen],
            "y": numbers([curve.e[curve.chosen - 1]]),
            "mode": "markers",
            "marker": {"color": method.style.color, "symbol": "star", "size": 14},
            "hovertemplate": "chosen: K = %{x}<extra></extra>",
            "name": f"chosen: {curve.chosen}",
        }
    )
    return Figure(
        description=f"Both terms of e(K) and their sum by number of contexts; {method.label} chose {curve.chosen}.",
        data=data,
        layout=layout(
            axis("Number of contexts K", nticks=10),
            axis(nticks=5, rangemode="tozero"),
            "e(K), Eq. (11)",
            showlegend=True,
            legend={"orientation": "h", "y": -0.24, "font": {"size": 12, "color": MUTED}},
            margin={"l": 44, "r": 16, "t": 30, "b": 80},
        ),
        height=340,
    )


@panel
def accuracy_by_number(method: Method) -> Panel | None:
    """Figure 3 (a), beside the method that chooses, or else the first of the run."""
    run = method.run
    given = {label: _final(run, label) for label in run.algorithms if family(run, label) == "cgpfl"}
    chosen = {label: _final(run, label) for label in run.algorithms if family(run, label) == "cgpfl_heur"}
    points = {label: result for label, result in given.items() if result is not None}
    if method.algorithm != next(iter([*chosen, *given]), None) or len({p.contexts for p in points.values()}) < 2:
        return None
    stars = {label: result for label, result in chosen.items() if result is not None}
    best = max(points.values(), key=lambda point: point.accuracy.mean)
    text = (
        f"Of the numbers of contexts that were tried, {best.contexts:g} did best, with "
        f"{100 * best.accuracy.mean:.1f} % personal accuracy."
    )
    for point in stars.values():
        number = f"{point.contexts:g}" if point.contexts.is_integer() else f"{point.contexts:.1f} (mean over seeds)"
        text += f" CGPFL-Heur chose {number} and reached {100 * point.accuracy.mean:.1f} % (★)."
    return Panel("Accuracy and the number of contexts", text, (_against_number(method, points, stars),))


@dataclass(frozen=True)
class Point:
    contexts: float  # mean over seeds
    accuracy: Average


def _final(run: Run, label: str) -> Point | None:
    trials = [trial for trial in run.trials if trial.algorithm == label and trial.finished]
    accuracy = average({t.seed: t.final.metrics["personal"]["accuracy"] for t in trials if _has_accuracy(t)})
    counts = [trial.rounds[-1].method.get("contexts") for trial in trials if trial.rounds]
    known = [count for count in counts if isinstance(count, int)]
    return Point(sum(known) / len(known), accuracy) if known and accuracy is not None else None


def _has_accuracy(trial: Trial) -> bool:
    return "accuracy" in trial.final.metrics.get("personal", {})


def _against_number(method: Method, points: dict[str, Point], stars: dict[str, Point]) -> Figure:
    ordered = sorted(points.items(), key=lambda item: item[1].contexts)
    data: list[Trace] = [
        _trace(ordered, {"color": LOCAL, "symbol": "circle", "size": 8}, "lines+markers", "CGPFL"),
        *(
            [
                _trace(
                    list(stars.items()),
                    {"color": method.style.color, "symbol": "star", "size": 15},
                    "markers",
                    "CGPFL-Heur",
                )
            ]
            if stars
            else []
        ),
    ]
    return Figure(
        description="Personal accuracy against the number of contexts; a star marks what CGPFL-Heur chose.",
        data=data,
        layout=layout(axis("Number of contexts K", nticks=10), axis(nticks=6), "Personal accuracy, %"),
        height=320,
    )


def _trace(points: list[tuple[str, Point]], marker: dict[str, Any], mode: str, name: str) -> Trace:
    spread = [100 * (point.accuracy.sd or 0.0) for _, point in points]
    return {
        "type": "scatter",
        "x": numbers(point.contexts for _, point in points),
        "y": numbers((point.accuracy.mean for _, point in points), 100),
        "error_y": {"type": "data", "array": numbers(spread), "color": INK, "thickness": 1, "visible": any(spread)},
        "text": [safe(label) for label, _ in points],
        "mode": mode,
        "line": {"color": marker["color"], "width": 1.5},
        "marker": marker,
        "hovertemplate": "%{text}: K = %{x:.3g}, %{y:.1f} %<extra></extra>",
        "name": name,
    }
