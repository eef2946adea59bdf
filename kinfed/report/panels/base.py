"""Parts of panels (see `kinfed.report.panels`): what a method recorded, the clients of a seed, figures that several
panels draw; and the panel of every plain number that a method records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kinfed.analysis import Method, average
from kinfed.data import Description
from kinfed.report.drawing import Figure, Layout, Trace, axis, escape, layout
from kinfed.report.drawing.chart import client_label, group_name, group_ticks, round_axis
from kinfed.report.drawing.looks import style_of
from kinfed.report.drawing.marks import bars, curve
from kinfed.report.tables import TextTable

MAX_NAMED_GROUPS = 12  # along an axis
MAX_NAMED_CLIENTS = 25
MAX_BARS = 200

ByRound = dict[int, dict[int, float]]  # {round: {seed: number}}


@dataclass(frozen=True)
class Panel:
    title: str
    sentence: str  # what to see, for a reader who is not a specialist; plain text
    figures: tuple[Figure, ...] = ()
    table: TextTable | None = None


def series(method: Method, key: str) -> dict[int, dict[int, Any]]:
    """{seed: {round: value}} of one of the method's own figures, over the complete trials, where it was recorded."""
    by_seed = {
        trial.seed: {entry.number: entry.method[key] for entry in trial.rounds if key in entry.method}
        for trial in method.complete_trials
    }
    return {seed: values for seed, values in by_seed.items() if values}


def first_series(method: Method, key: str) -> tuple[int, dict[int, Any]] | None:
    """(seed, {round: value}) of the first seed that recorded the figure."""
    return min(series(method, key).items(), key=lambda entry: entry[0], default=None)


def last_of_seeds(method: Method, key: str) -> list[Any]:
    """The figure that every seed recorded last."""
    return [by_round[max(by_round)] for by_round in series(method, key).values()]


def numbers_by_round(method: Method, key: str, read: Callable[[Any], float | None]) -> ByRound:
    """The numbers that `read` makes of one of the method's own figures, where they are not None."""
    by_round: ByRound = {}
    for seed, values in series(method, key).items():
        for number, value in values.items():
            if (known := read(value)) is not None:
                by_round.setdefault(number, {})[seed] = float(known)
    return by_round


def is_constant(by_round: ByRound) -> bool:
    return len({value for by_seed in by_round.values() for value in by_seed.values()}) < 2


def number_figure(description: str, method: Method, by_round: ByRound, y: Layout, title: str) -> Figure:
    """A number over rounds, mean over seeds."""
    points = [(number, mean) for number, values in sorted(by_round.items()) if (mean := average(values))]
    data = curve(method, points, "round %{x}: %{y:.4g}%{customdata}")
    return Figure(description, data, layout(round_axis(by_round), y, title), 220)


def client_names(method: Method, seed: int, count: int) -> Sequence[str]:
    federation = method.run.federations.get(seed)
    return [f"client {m}" for m in range(count)] if federation is None else federation.names[:count]


def ranked_bars(method: Method, entries: Sequence[tuple[float, str]], hover: str) -> tuple[Trace, str]:
    """One bar per client, (height, text) in this order, or for every k-th where they are many; and what the axis then
    has to say."""
    step = math.ceil(len(entries) / MAX_BARS)
    subset = entries[::step]
    heights, texts = [height for height, _ in subset], [text for _, text in subset]
    trace = bars(range(1, len(subset) + 1), heights, style_of(method).color, hover, name=method.label, text=texts)
    return trace, "" if step == 1 else f", every {step}th"


def seed_note(method: Method, seed: int) -> str:
    """The last sentence of panels that show one seed only."""
    return f" Shown is seed {seed}." if len(method.complete_trials) > 1 else ""


@dataclass(frozen=True)
class ClientGroups:
    """Names of the clients, the group each trains in, and the group each is judged on."""

    names: Sequence[str]
    groups: Sequence[int] | None
    targets: Sequence[int] | None
    group_names: Sequence[str] | None

    @classmethod
    def of(cls, federation: Description | None, count: int) -> ClientGroups:
        """Clients are numbered without a description of as many."""
        if federation is None or len(federation.names) != count:
            return cls([str(m) for m in range(count)], None, None, None)
        groups, moved = federation.groups, federation.description.get("target_of")
        targets = groups
        if groups is not None and isinstance(moved, list) and sorted(moved) == list(range(count)):
            targets = [groups[m] for m in moved]
        return cls(federation.names, groups, targets, federation.group_names)

    def client(self, m: int) -> str:
        """Escaped for plotly, as are the names of groups."""
        return client_label(self.names[m])

    def group(self, number: int) -> str:
        return escape(group_name(self.group_names, number))

    def order(self, by: Sequence[int] | None) -> list[int]:
        """The clients, those of a group side by side."""
        return sorted(range(len(self.names)), key=lambda m: (by[m] if by else 0, m))

    def ticks(self, by: Sequence[int] | None, order: Sequence[int]) -> Layout:
        """Ticks of an axis along which the clients stand in that order: names of groups, or of clients while few."""
        if by is not None and 1 < len(set(by)) <= MAX_NAMED_GROUPS:
            return group_ticks([by[m] for m in order], self.group_names, range(len(order)))
        if len(order) <= MAX_NAMED_CLIENTS:
            return {"tickvals": list(range(len(order))), "ticktext": [self.client(m) for m in order]}
        return {"showticklabels": False}

    def kin(self, i: int, n: int) -> bool:
        """Tell whether client n trains in the group that client i is judged on."""
        return self.groups is not None and self.targets is not None and self.groups[n] == self.targets[i]

    @property
    def foreign(self) -> bool:
        return self.targets != self.groups


MAX_SCALARS = 12


def scalars(method: Method) -> Panel | None:
    rounds = [entry.method for trial in method.complete_trials for entry in trial.rounds]
    keys = dict.fromkeys(key for own in rounds for key, value in own.items() if _number(value) is not None)
    figures: list[Figure] = []
    constants: list[str] = []
    for key in keys:
        by_round = numbers_by_round(method, key, _number)
        if is_constant(by_round):
            constants.append(f"{key} = {next(iter(next(iter(by_round.values())).values())):.4g}")
        else:
            description = f"{key} of {method.label} over rounds."
            figures.append(number_figure(description, method, by_round, axis(nticks=5), escape(key)))
    if not figures and not constants:
        return None
    text = "The numbers that the method itself recorded after each round"
    text += ", mean over seeds." if len(method.complete_trials) > 1 else "."
    if len(figures) > MAX_SCALARS:
        text += f" The first {MAX_SCALARS} of {len(figures)} are shown."
    if constants:
        text += " Unchanged throughout: " + ", ".join(constants) + "."
    return Panel("Recorded figures", text, tuple(figures[:MAX_SCALARS]))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
