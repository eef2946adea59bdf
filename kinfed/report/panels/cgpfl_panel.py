"""Contexts of CGPFL: how far apart they are, and how many there should be; the panel on clusters has who is in which.

Figure 3 (a) of Tang, Guo, Guo, "Personalized Federated Learning with Contextualized Generalization" (accuracy against
the number of contexts, the one chosen by CGPFL-Heur marked), Eq. (11), and the terms of its Theorem 4.2.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from kinfed.algorithms import complexity, confidence, label_discrepancy
from kinfed.analysis import Average, Method, average, family
from kinfed.records import RunRecord
from kinfed.report.drawing.chart import Figure, Layout, axis, escape, layout, round_axis, subsampled
from kinfed.report.drawing.looks import LOCAL, MUTED, plural, style_of
from kinfed.report.drawing.marks import dots, heat, line
from kinfed.report.panels.base import Panel, first_series, seed_note, series

MAX_CONTEXTS = 40  # in the map of distances
DELTA = 0.05  # of the bound


def distances(method: Method) -> Panel | None:
    if (recorded := first_series(method, "distances")) is None:
        return None
    seed, rounds = recorded
    last = max(rounds)
    matrix = rounds[last]
    is_matrix = isinstance(matrix, list) and bool(matrix) and all(isinstance(row, list) for row in matrix)
    if not is_matrix or any(len(row) != len(matrix) for row in matrix):
        return None
    figures = [_map(method, matrix, last)] if 1 < len(matrix) <= MAX_CONTEXTS else []
    costs = dict(_costs(method, seed))
    if costs:
        figures.append(_cost_curve(method, costs))
    text = _distances_sentence(matrix, costs.get(last)) + _bound_sentence(method, seed, len(matrix), costs.get(last))
    return Panel("Context models", text.strip() + seed_note(method, seed), tuple(figures)) if figures else None


def _map(method: Method, matrix: list[list[float]], last: int) -> Figure:
    names = [str(k) for k in range(len(matrix))]
    cells = [[None if i == j else value for j, value in enumerate(row)] for i, row in enumerate(matrix)]
    hover, numerals = "contexts %{y} and %{x}: %{z:.3g} apart", ".2g" if len(matrix) <= 8 else ""
    squares = heat(cells, hover, x=names, y=names, low=0, numerals=numerals)
    named: Layout = {"type": "category", "showgrid": False, "ticks": "", "showline": False, "nticks": 12}
    shape = layout(axis("Context", **named), axis(**named, autorange="reversed"), "Distance between context models")
    return Figure(f"Distances between the context models of {method.label} after round {last}.", [squares], shape, 280)


def _costs(method: Method, seed: int) -> Iterator[tuple[int, float]]:
    """(round, Σ_i (m_i/m) ‖θ_i − ω_k(i)‖²) of the clients' own models, where the run recorded them.

    The theorem has the nearest of all contexts (`algorithms.cgpfl.bound.cost`), which is at most this: a client is sent
    its own context's model and no other, and its θ_i never leaves it, so the nearest is not known in a run."""
    federation = method.run.federations.get(seed)
    for number, figures in sorted(series(method, "clients").get(seed, {}).items()):
        apart = figures.get("squared_distance_to_context") if isinstance(figures, dict) else None
        if federation is None or not isinstance(apart, list) or len(apart) != len(federation.sizes()):
            continue
        pairs = [(a, m) for a, m in zip(apart, federation.sizes(), strict=True) if a is not None]
        if total := sum(m for _, m in pairs):
            yield number, sum(a * m for a, m in pairs) / total


def _cost_curve(method: Method, costs: dict[int, float]) -> Figure:
    points, hover = subsampled(list(costs.items())), "round %{x}: %{y:.3g}"
    data = [line([n for n, _ in points], [v for _, v in points], style_of(method).color, hover, dots=True)]
    description = f"Mean squared distance of the personal models of {method.label} from their contexts, over rounds."
    y = axis(nticks=5, rangemode="tozero")
    return Figure(description, data, layout(round_axis(costs), y, "Personal models to contexts, squared"), 280)


def _distances_sentence(matrix: list[list[float]], cost: float | None) -> str:
    pairs = [(matrix[i][j], i, j) for i in range(len(matrix)) for j in range(i)]
    if not pairs:
        return ""
    (least, a, b), (most, c, d) = min(pairs), max(pairs)
    text = f"The nearest two context models, {b} and {a}, are {least:.2g} apart, the farthest, {d} and {c}, {most:.2g}"
    return text + ("." if cost is None else f"; a personal model is about {math.sqrt(cost):.2g} from its context.")


def _bound_sentence(method: Method, seed: int, count: int, cost: float | None) -> str:
    """The terms of Theorem 4.2 that can be known."""
    federation, size = method.run.federations.get(seed), method.run.parameters
    if federation is None or size is None or not sum(federation.sizes()):
        return ""
    m = sum(federation.sizes())
    terms = f"confidence {confidence(len(federation.names), m, DELTA):.2g}, complexity {complexity(count, size, m):.2g}"
    text = f" Of the paper’s bound on the generalization error, with {plural(count, 'context')}: {terms}"
    text += "" if cost is None else f", cost at most {cost:.2g} times an unknown constant"
    by_client = label_discrepancy(federation.train, federation.test)
    known = np.isfinite(by_client)  # of clients that have test examples
    if known.any():
        apart = np.average(by_client[known], weights=np.array(federation.sizes())[known])
        text += f"; labels of training and test examples differ by {apart:.2f} on average (0 if alike, 1 if disjoint)"
    return text + "."


def choice_of_number(method: Method) -> Panel | None:
    """Eq. (11) of the first complete trial."""
    rounds = [(trial.seed, entry) for trial in method.complete_trials for entry in reversed(trial.rounds)]
    by_seed = {seed: one for seed, entry in rounds if (one := _context_choice(entry.method)) is not None}
    if not by_seed:
        return None
    seed = min(by_seed)
    choice = by_seed.pop(seed)
    text = (
        "Every further context has to be learned from the same examples, which costs generalization (first term), and "
        "brings context models nearer to their clients (second term). The number with the least sum is kept: "
        f"{choice.contexts} of at most {len(choice.complexity)}."
    )
    if by_seed:
        others = ", ".join(f"{one.contexts} with seed {other}" for other, one in sorted(by_seed.items()))
        text += f" Shown is seed {seed}; it was {others}."
    return Panel("How many contexts", text, (_terms(method, choice),))


@dataclass(frozen=True)
class ContextChoice:
    """Both terms of e(K) for K = 1, 2, ..., and the K that was chosen."""

    complexity: list[float]
    cost: list[float]  # times μ
    contexts: int

    @property
    def e(self) -> list[float]:
        return [a + b for a, b in zip(self.complexity, self.cost, strict=True)]


def _context_choice(figures: dict[str, Any]) -> ContextChoice | None:
    first, cost = figures.get("complexity"), figures.get("cost")
    mu, contexts = figures.get("mu"), figures.get("contexts")
    if not isinstance(first, list) or not isinstance(cost, list) or not first or len(first) != len(cost):
        return None
    if not isinstance(mu, int | float) or not isinstance(contexts, int) or not 1 <= contexts <= len(first):
        return None
    return ContextChoice([float(v) for v in first], [mu * float(v) for v in cost], contexts)


def _terms(method: Method, choice: ContextChoice) -> Figure:
    x, color = range(1, len(choice.e) + 1), style_of(method).color
    terms = (
        ("first term: complexity", choice.complexity, MUTED, 1.5, "dash"),
        ("second term: μ · cost", choice.cost, MUTED, 1.5, "dot"),
        ("e(K), their sum", choice.e, color, 2.5, "solid"),
    )
    data = [
        line(x, values, tone, f"K = %{{x}}: {name} %{{y:.3g}}", name=name, width=width, dash=dash)
        for name, values, tone, width, dash in terms
    ]
    star = dots(
        [choice.contexts], [choice.e[choice.contexts - 1]], color, "chosen: K = %{x}",
        name=f"chosen: {choice.contexts}", symbol="star", size=14,
    )  # fmt: skip
    description = f"Both terms of e(K) and their sum by number of contexts; {method.label} chose {choice.contexts}."
    below, left = axis("Number of contexts K", nticks=10), axis(nticks=5, rangemode="tozero")
    return Figure(description, [*data, star], layout(below, left, "e(K), Eq. (11)", legend_below=True), 340)


def accuracy_by_number(method: Method) -> Panel | None:
    """Figure 3 (a), beside the method that chooses, or else the first of the run."""
    run = method.run
    choosing, fixed = (
        [label for label in run.algorithms if family(run, label) == name] for name in ("cgpfl_heur", "cgpfl")
    )
    stars, points = (
        {label: point for label in labels if (point := _final(run, label)) is not None} for labels in (choosing, fixed)
    )
    if method.algorithm != next(iter([*choosing, *fixed]), None) or len({p.contexts for p in points.values()}) < 2:
        return None
    best = max(points.values(), key=lambda point: point.accuracy.mean)
    reached = f"{100 * best.accuracy.mean:.1f} % personal accuracy"
    text = f"Of the numbers of contexts that were tried, {best.contexts:g} did best, with {reached}."
    for point in stars.values():
        number = f"{point.contexts:g}" if point.contexts.is_integer() else f"{point.contexts:.1f} (mean over seeds)"
        text += f" CGPFL-Heur chose {number} and reached {100 * point.accuracy.mean:.1f} % (★)."
    return Panel("Accuracy and the number of contexts", text, (_against_number(method, points, stars),))


class ContextPoint(NamedTuple):
    contexts: float  # mean over seeds
    accuracy: Average


def _final(run: RunRecord, label: str) -> ContextPoint | None:
    trials = [trial for trial in run.trials if trial.algorithm == label and trial.finished]
    personal = {trial.seed: trial.final.metrics.get("personal", {}) for trial in trials}
    accuracy = average({seed: metrics["accuracy"] for seed, metrics in personal.items() if "accuracy" in metrics})
    last = [trial.rounds[-1].method.get("contexts") for trial in trials if trial.rounds]
    counts = [count for count in last if isinstance(count, int)]
    return ContextPoint(fmean(counts), accuracy) if counts and accuracy is not None else None


def _against_number(method: Method, points: dict[str, ContextPoint], stars: dict[str, ContextPoint]) -> Figure:
    ordered = dict(sorted(points.items(), key=lambda item: item[1].contexts))
    data = [line(**_coordinates(ordered), color=LOCAL, name="CGPFL", width=1.5, size=8, dots=True)]
    if stars:
        color = style_of(method).color
        data.append(dots(**_coordinates(stars), color=color, name="CGPFL-Heur", symbol="star", size=15))
    description = "Personal accuracy against the number of contexts; a star marks what CGPFL-Heur chose."
    shape = layout(axis("Number of contexts K", nticks=10), axis(nticks=6), "Personal accuracy, %")
    return Figure(description, data, shape, 320)


def _coordinates(points: dict[str, ContextPoint]) -> dict[str, Any]:
    means = {"x": [p.contexts for p in points.values()], "y": [100 * p.accuracy.mean for p in points.values()]}
    error, text = [100 * (p.accuracy.sd or 0.0) for p in points.values()], [escape(label) for label in points]
    return means | {"error": error, "text": text, "hover": "%{text}: K = %{x:.3g}, %{y:.1f} %"}
