"""Self-FL: decisions of its clients, how much to take from the others and how long to train.

Figures 10 and 11 of Chen et al., "Self-Aware Personalized Federated Learning", as far as a run records them: the
paper's histogram is over the active clients of a round, this one over every client's latest decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from kinfed.analysis import Method
from kinfed.report.drawing.chart import Figure, axis, escape, layout, round_axis
from kinfed.report.drawing.looks import INK, faded, plural, style_of
from kinfed.report.drawing.marks import bars, line
from kinfed.report.panels.base import Panel, client_names, ranked_bars, series

BINS = 20


@dataclass(frozen=True)
class Decision:
    """A client's state after a round. −1 stands for what it cannot know yet."""

    client: str
    seed: int
    variance: float  # σ_m²
    weight: float  # ρ_m, of the others
    raw: float  # l_m before rounding and cap
    steps: int  # taken in its last round; 0 before the first

    @property
    def decided(self) -> bool:
        return self.raw >= 0

    @property
    def gain(self) -> float:
        """1/(1 − ρ): how many times smaller the method believes the client's variance to become."""
        return math.inf if self.weight >= 1 else 1 / (1 - self.weight)


def in_words(decision: Decision) -> str:
    """One sentence for the person behind the client."""
    who, steps = decision.client, plural(decision.steps, "step")
    if decision.steps == 0:
        return f"{who} has not taken part yet and uses the model for all."
    if not decision.decided:
        return f"{who} does not know its uncertainty yet and trains as in FedAvg, {steps} a round."
    share = decision.weight
    degrees = ((0.9, "almost entirely from all"), (0.5, "mostly from all"), (0.1, "mostly alone"))
    manner = next((words for least, words in degrees if share >= least), "almost entirely alone")
    return (
        f"{who} learns {manner}: its models vary by {decision.variance:.3g} from round to round, so the others are "
        f"given a weight of {100 * share:.0f} % and it trains {steps} (the rule asks for {decision.raw:.1f})."
    )


def decisions(method: Method) -> Panel | None:
    by_round = _decisions_by_round(method)
    if not by_round:
        return None
    last = max(by_round)
    ordered = sorted((d for d in by_round[last] if d.decided), key=lambda d: d.weight)
    if not ordered:
        return None
    mostly_all = sum(d.weight >= 0.5 for d in ordered)
    text = (
        f"After round {last}, {mostly_all} of {len(ordered)} clients learn mostly from all and "
        f"{len(ordered) - mostly_all} mostly alone. {' '.join(map(in_words, ordered[:1] + ordered[1:][-1:]))}"
    )
    if undecided := len(by_round[last]) - len(ordered):
        text += f" {undecided} more cannot tell yet: that takes two rounds of their own."
    if len(method.complete_trials) > 1:
        text += " Clients of all seeds are counted."
    text += (
        " The gain is the method’s own estimate, in multiples of the client’s variance, not a measurement; where "
        "clients differ a lot, it is too high. “Who is helped, who is hurt” shows the measured gain."
    )
    figures = (_histogram(method, ordered, last), _trajectory(method, by_round), _believed_gain(method, ordered))
    return Panel("Who learns alone, who from all", text, figures)


def _decisions_by_round(method: Method) -> dict[int, list[Decision]]:
    """{round: decisions of all clients of all seeds}, rounds ascending."""
    by_round: dict[int, list[Decision]] = {}
    needed = ("sigma_m_sq", "weight_of_others", "raw_steps", "steps")
    for seed, rounds in series(method, "clients").items():
        for number, figures in rounds.items():
            if isinstance(figures, dict) and all(key in figures for key in needed):
                names = client_names(method, seed, len(figures["steps"]))
                for name, variance, weight, raw, steps in zip(names, *(figures[key] for key in needed), strict=True):
                    decision = Decision(name, seed, float(variance), float(weight), float(raw), int(steps))
                    by_round.setdefault(number, []).append(decision)
    return dict(sorted(by_round.items()))


def _histogram(method: Method, decisions: Sequence[Decision], last: int) -> Figure:
    values = [d.raw for d in decisions]
    cap, top = method.options.get("l_max", 40), _nice_top(max(values))
    counts, edges = (part.tolist() for part in np.histogram(values, bins=BINS, range=(0, top)))
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    texts, width = [f"{a:.3g} to {b:.3g}" for a, b in pairwise(edges)], 0.92 * top / BINS
    hover, color = "%{text} steps: %{y} clients", style_of(method).color
    data = [bars(middles, counts, color, hover, name=method.label, width=width, text=texts)]
    if isinstance(cap, int) and not isinstance(cap, bool) and cap < top:
        hover = f"no client trains more than {cap} steps"
        data.append(line([cap, cap], [0, max(counts)], INK, hover, name="cap", width=1.5, dash="dash"))
    description = f"How many local steps the rule of {method.label} asks for, over clients, after round {last}."
    x, y = axis("Local steps by the rule, before the cap"), axis(dtick=max(1, math.ceil(max(counts) / 5)))
    return Figure(description, data, layout(x, y, f"Clients after round {last}"), 280)


def _trajectory(method: Method, by_round: dict[int, list[Decision]]) -> Figure:
    """The client that has decided most often (of those, the first), above the median over clients."""
    paths: dict[tuple[int, str], list[tuple[int, Decision]]] = {}
    medians: dict[int, float] = {}
    for number, every in by_round.items():
        if decisions := [d for d in every if d.decided]:
            medians[number] = median(d.raw for d in decisions)
        for d in decisions:
            paths.setdefault((d.seed, d.client), []).append((number, d))
    path = max(paths.values(), key=len)
    one = path[0][1]
    seeds = f", seed {one.seed}" if len(method.complete_trials) > 1 else ""
    data = [
        line(
            medians, medians.values(), faded(INK, 0.5), "round %{x}: median of all clients %{y:.1f}", name="median",
            width=1.5, dash="dot",
        ),
        line(
            [number for number, _ in path], [d.raw for _, d in path], style_of(method).color,
            f"{escape(one.client)}{seeds}, round %{{x}}: %{{y:.1f}}", name=one.client, shape="hv", dots=True,
        ),
    ]  # fmt: skip
    description = f"Local steps by the rule over rounds, for {one.client} and the median of all clients."
    x, y = round_axis(medians, f"Round; {escape(one.client)}{seeds}"), axis(nticks=5, rangemode="tozero")
    return Figure(description, data, layout(x, y, "Steps of one client; dotted: median"), 280)


def _believed_gain(method: Method, ordered: Sequence[Decision]) -> Figure:
    ceiling = max((d.gain for d in ordered if math.isfinite(d.gain)), default=1.0)
    entries = [(min(d.gain, ceiling), escape(in_words(d))) for d in reversed(ordered)]
    each, of = ranked_bars(method, entries, "gain %{y:.3g}<br>%{text}")
    y = axis(nticks=5, **({"type": "log"} if ceiling > 30 else {"rangemode": "tozero"}))
    x = axis(f"Clients{of}, from most to least gain", showticklabels=False, ticks="")
    description = f"The gain over learning alone that {method.label} believes each client to have, sorted."
    return Figure(description, [each], layout(x, y, "Believed gain over alone"), 280)


def _nice_top(value: float) -> float:
    """The least of 1, 2, 4, 5, 8 times a power of ten that is above the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 4, 5, 8, 10, 20) if m * power > value)
