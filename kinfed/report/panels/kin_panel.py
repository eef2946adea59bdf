"""Kin: how much every client learns alone, from all or from its group, and what that gains.

Shares are those that a client measured last; the gain is that of its test examples over training alone, where the run
has both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kinfed.analysis import Interval, Method, gains, single_run
from kinfed.report.drawing.chart import Figure, axis, escape, layout
from kinfed.report.drawing.formats import plural
from kinfed.report.drawing.marks import bars
from kinfed.report.drawing.palette import LOCAL, faded, style_of
from kinfed.report.panels.base import MAX_BARS, Panel, client_names, seed_note, series

LEAST_SHOWN = 0.005  # share; below it is 0 %


@dataclass(frozen=True)
class ClientShares:
    """Shares of one client with one seed; `str` of it is one sentence for the person behind the client."""

    client: str
    alone: float  # shares of its predictions
    together: float
    adapted: float
    kin: int  # clients of its group, itself included; 0: one model for all
    gain: Interval | None = None  # over training alone, as the page shows it
    unit: str = " points"

    @property
    def is_helped(self) -> bool:
        return self.gain is not None and self.gain.low > 0

    @property
    def is_hurt(self) -> bool:
        return self.gain is not None and self.gain.high < 0

    def __str__(self) -> str:
        others = f"from its group of {self.kin}" if self.kin else "from all"
        if min(self.together, self.adapted) >= LEAST_SHOWN:
            others += f" ({_percent(self.together)} as it is, {_percent(self.adapted)} adapted to its own examples)"
        elif self.adapted > self.together:
            others += ", adapted to its own examples"
        parts = sorted([(self.together + self.adapted, others), (self.alone, "alone")], reverse=True)
        text = ", ".join(f"{_percent(share)} {words}" for share, words in parts if share >= LEAST_SHOWN)
        if self.gain is None:
            return f"{self.client} learns {text}."
        form = "+.1f" if self.unit else "+.3g"
        ends = (self.gain.mean, self.gain.low, self.gain.high)
        mean, low, high = (f"{value:{form}}".replace("-", "−") for value in ends)
        return f"{self.client} learns {text}; expected gain over alone {mean}{self.unit} [{low}, {high}]."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def shares(method: Method) -> Panel | None:
    by_seed = answers(method)
    if not by_seed:
        return None
    seed = min(by_seed)
    ordered = sorted(by_seed[seed], key=lambda answer: answer.alone)
    groups = {answer.kin for answer in ordered if answer.kin}
    text = " ".join(map(str, [_found_groups(method, seed, bool(groups)), ordered[0], *ordered[1:][-1:]]))
    judged = [answer for answer in ordered if answer.gain is not None]
    if judged:
        helped, hurt = sum(a.is_helped for a in judged), sum(a.is_hurt for a in judged)
        text += (
            f" {helped} of {plural(len(judged), 'client')} gain and {hurt} lose against training alone by more than "
            "chance explains, given the size of their test sets."
        )
    return Panel("Alone, together, or with one’s kin", text + seed_note(method, seed), (_bars(method, ordered),))


def in_short(method: Method) -> str | None:
    """One sentence on all clients of all seeds; None where the method recorded no shares."""
    by_seed = answers(method)
    return None if not by_seed else shares_in_short(method.label, by_seed)


def shares_in_short(label: str, by_seed: Mapping[int, Sequence[ClientShares]]) -> str:
    alone = fmean(answer.alone for clients in by_seed.values() for answer in clients)
    grouped = [seed for seed, clients in by_seed.items() if any(answer.kin for answer in clients)]
    found, others = "no groups of clients that are alike", "from all"
    if grouped:
        found = "groups of clients that are alike"
        found += f" with {len(grouped)} of {len(by_seed)} seeds" if len(by_seed) > 1 else ""
        others = "from its group" if len(grouped) == len(by_seed) else "from all or from its group"
    return (
        f"{label} found {found}: in the mean, a client learns {_percent(1 - alone)} {others} and "
        f"{_percent(alone)} alone."
    )


def answers(method: Method) -> dict[int, list[ClientShares]]:
    """The last shares of every client, by seed; {} where the method recorded none."""
    recorded = series(method, "clients")
    by_seed = {seed: _answers(method, seed, rounds) for seed, rounds in recorded.items()}
    return {seed: clients for seed, clients in by_seed.items() if clients}


def _answers(method: Method, seed: int, rounds: dict[int, object]) -> list[ClientShares]:
    figures = rounds[max(rounds)]
    needed = ("alone", "together", "adapted")
    if not isinstance(figures, dict) or any(key not in figures for key in needed):
        return []
    names = client_names(method, seed, len(figures["alone"]))
    assignment = _last(method, "assignment", seed) if _last(method, "groups", seed) not in (None, 1) else None
    sizes = Counter(group for group in assignment or () if group >= 0)
    gained, unit = _gains(method, seed), " points" if single_run(method.run).style.in_percent else ""
    clients = []
    for m, values in enumerate(zip(*(figures[key] for key in needed), strict=True)):
        kin = sizes[assignment[m]] if assignment and assignment[m] >= 0 else 0
        alone, together, adapted = map(float, values)
        clients.append(ClientShares(names[m], alone, together, adapted, kin, gained.get(names[m]), unit))
    return clients


def _last(method: Method, key: str, seed: int) -> Any:
    values = series(method, key).get(seed)
    return values[max(values)] if values else None


def _gains(method: Method, seed: int) -> dict[str, Interval]:
    """Gains over Local in the same run, by client and in the shown unit, where the run knows how sure it is."""
    comparison = single_run(method.run)
    scale = comparison.style.scale
    own = {g.client: g.likely for g in gains(comparison, method) if g.seed == seed}
    return {
        client: Interval(scale * one.mean, scale * one.low, scale * one.high, one.n)
        for client, one in own.items()
        if one is not None
    }


def _found_groups(method: Method, seed: int, has_groups: bool) -> str:
    groups = _last(method, "groups", seed)
    if has_groups and isinstance(groups, int):
        return f"Clients were divided into {plural(groups, 'group')}, whose models proved better than one for all."
    return "No groups proved better than one model for all."


def _bars(method: Method, answers: Sequence[ClientShares]) -> Figure:
    step = math.ceil(len(answers) / MAX_BARS)
    subset = answers[::step]
    place, names = list(range(1, len(subset) + 1)), [escape(str(answer)) for answer in subset]
    color = style_of(method).color
    layers = (
        ("alone", [a.alone for a in subset], LOCAL),
        ("from others", [a.together for a in subset], faded(color, 0.45)),
        ("from others, adapted", [a.adapted for a in subset], color),
    )
    data = [bars(place, values, shade, "%{text}", name=name, text=names) for name, values, shade in layers]
    x = axis("Clients, by what they learn alone" + ("" if step == 1 else f", every {step}th"), nticks=6)
    above = "Share of a client’s predictions: alone (grey), from others (pale), adapted (full)"
    description = f"Shares of every client’s predictions in {method.label}: alone, from others, adapted."
    return Figure(description, data, layout(x, axis(range=[0, 1], tickformat=".0%"), above), 300)
