"""Shares of what clients learn alone. Kin: how much every client learns alone, from all or from its group, and what
that gains; APFL: the part of its own model that each client keeps, over rounds and by the size of its data.

Shares of Kin are those that a client measured last; the gain is that of its test examples over training alone, where
the run has both.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from kinfed.analysis import Interval, Method, gains, single_run
from kinfed.report.drawing import Figure, Layout, axis, escape, layout
from kinfed.report.drawing.chart import client_label, round_axis, size_axis, subsampled
from kinfed.report.drawing.looks import INK, LOCAL, faded, plural, style_of
from kinfed.report.drawing.marks import band, bars, dots, line
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
    groups, summary = _last(method, "groups", seed), "No groups proved better than one model for all."
    if any(answer.kin for answer in ordered) and isinstance(groups, int):
        summary = f"Clients were divided into {plural(groups, 'group')}, whose models proved better than one for all."
    text = " ".join(map(str, [summary, ordered[0], *ordered[1:][-1:]]))
    if judged := [answer for answer in ordered if answer.gain is not None]:
        helped, hurt = sum(a.is_helped for a in judged), sum(a.is_hurt for a in judged)
        text += (
            f" {helped} of {plural(len(judged), 'client')} gain and {hurt} lose against training alone by more than "
            "chance explains, given the size of their test sets."
        )
    return Panel("Alone, together, or with one’s kin", text + seed_note(method, seed), (_bars(method, ordered),))


def in_short(method: Method) -> str | None:
    """One sentence on all clients of all seeds; None if the method recorded no shares."""
    by_seed = answers(method)
    return None if not by_seed else shares_in_short(method.label, by_seed)


def shares_in_short(label: str, by_seed: Mapping[int, Sequence[ClientShares]]) -> str:
    alone = fmean(answer.alone for clients in by_seed.values() for answer in clients)
    grouped = [seed for seed, clients in by_seed.items() if any(answer.kin for answer in clients)]
    groups_text, others = "no groups of clients that are alike", "from all"
    if grouped:
        groups_text = "groups of clients that are alike"
        groups_text += f" with {len(grouped)} of {len(by_seed)} seeds" if len(by_seed) > 1 else ""
        others = "from its group" if len(grouped) == len(by_seed) else "from all or from its group"
    return (
        f"{label} found {groups_text}: in the mean, a client learns {_percent(1 - alone)} {others} and "
        f"{_percent(alone)} alone."
    )


def answers(method: Method) -> dict[int, list[ClientShares]]:
    """The last shares of every client, by seed; {} if the method recorded none."""
    by_seed = {seed: _answers(method, seed, rounds) for seed, rounds in series(method, "clients").items()}
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
    own = {g.client: one for g in gains(comparison, method) if g.seed == seed and (one := g.likely) is not None}
    return {name: Interval(scale * g.mean, scale * g.low, scale * g.high, g.n) for name, g in own.items()}


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


MAX_LINES = 60  # clients drawn one by one; beyond, the middle 80 %
ALPHA: Layout = {"range": [-0.03, 1.03], "nticks": 6}  # its axis


@dataclass(frozen=True)
class MixingShares:
    """α of all clients of one seed, at every evaluated round."""

    seed: int
    rounds: tuple[int, ...]
    alpha: tuple[tuple[float, ...], ...]  # by round, then by client
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None


def mixing(method: Method) -> Panel | None:
    shares = _recorded_shares(method)
    if shares is None:
        return None
    last = shares.alpha[-1]
    least, most = (choose(range(len(last)), key=lambda m: last[m]) for choose in (min, max))
    text = (
        f"α is the part of a client’s own model in the mixture it uses; the rest is the model of all. After round "
        f"{shares.rounds[-1]} it is {_percent(median(last))} for the median client"
    )
    if len(last) > 1:
        low, high = (f"{_percent(last[m])} at {shares.names[m]}" for m in (least, most))
        text += f", from {low} to {high}"
    figures = [_over_rounds(method, shares)]
    if shares.sizes is not None and len(set(shares.sizes)) > 1:
        figures.append(_by_size(method, shares, shares.sizes))
    return Panel("Own or server model", f"{text}.{seed_note(method, shares.seed)}", tuple(figures))


def _recorded_shares(method: Method) -> MixingShares | None:
    if method.family != "apfl":
        return None
    for seed, rounds in sorted(series(method, "clients").items()):
        known = {
            n: figures["alpha"] for n, figures in rounds.items() if isinstance(figures, dict) and "alpha" in figures
        }
        rows = [(number, tuple(map(float, alpha))) for number, alpha in sorted(known.items()) if alpha]
        if not rows:
            continue
        count = len(rows[-1][1])
        numbers, alpha = zip(*(row for row in rows if len(row[1]) == count), strict=True)
        federation = method.run.federations.get(seed)
        if federation is not None and len(federation.names) == count:
            return MixingShares(seed, numbers, alpha, tuple(federation.names), tuple(federation.sizes()))
        return MixingShares(seed, numbers, alpha, tuple(f"client {m}" for m in range(count)), None)
    return None


def _over_rounds(method: Method, shares: MixingShares) -> Figure:
    columns = subsampled(list(zip(shares.rounds, shares.alpha, strict=True)), 200)
    x = [number for number, _ in columns]
    if len(shares.names) <= MAX_LINES:
        above = "one line per client"
        data = [
            line(
                x, [alpha[m] for _, alpha in columns], style_of(method).faded(0.35),
                f"{client_label(name)}, round %{{x}}: α = %{{y:.2f}}", name=name, width=1.2, size=5,
            )
            for m, name in enumerate(shares.names)
        ]  # fmt: skip
    else:
        above = "band: four of five clients"
        tenths = [quantiles(alpha, n=10, method="inclusive") for _, alpha in columns]
        data = [band(x, [q[0] for q in tenths], [q[-1] for q in tenths], style_of(method).faded(0.2), above)]
    medians = [median(alpha) for _, alpha in columns]
    data.append(line(x, medians, INK, "round %{x}: median α = %{y:.2f}", name="median", width=2.2, size=5, dots=True))
    shape = layout(round_axis(x), axis(**ALPHA), f"α; {above}; thick: median")
    return Figure("α of the clients over rounds, and its median.", data, shape, 290)


def _by_size(method: Method, shares: MixingShares, sizes: tuple[int, ...]) -> Figure:
    points = subsampled(list(zip(sizes, shares.alpha[-1], shares.names, strict=True)), 1500)
    marks = dots(
        [size for size, _, _ in points], [alpha for _, alpha, _ in points], style_of(method).faded(0.5),
        "%{text}: α = %{y:.2f}", name=method.label, outline={"width": 0.5, "color": faded(INK, 0.3)},
        text=[f"{client_label(name)}, {size} training examples" for size, _, name in points],
    )  # fmt: skip
    description = "α of every client after the last evaluated round, against the number of its training examples."
    shape = layout(size_axis(sizes), axis(**ALPHA), f"α after round {shares.rounds[-1]}")
    return Figure(description, [marks], shape, 290)
