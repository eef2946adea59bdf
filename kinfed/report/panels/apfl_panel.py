"""APFL: the part of its own model that each client keeps, over rounds and by the size of its data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles

from kinfed.analysis import Method
from kinfed.report.drawing.chart import Figure, Layout, axis, client_label, layout, round_axis, size_axis, subsampled
from kinfed.report.drawing.marks import band, dots, line
from kinfed.report.drawing.palette import INK, faded, style_of
from kinfed.report.panels.base import Panel, seed_note, series

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
        f"{shares.rounds[-1]} it is {100 * median(last):.0f} % for the median client"
    )
    if len(last) > 1:
        text += (
            f", from {100 * last[least]:.0f} % at {shares.names[least]} to {100 * last[most]:.0f} % at "
            f"{shares.names[most]}"
        )
    figures = [_over_rounds(method, shares)]
    if shares.sizes is not None and len(set(shares.sizes)) > 1:
        figures.append(_by_size(method, shares, shares.sizes))
    return Panel("Own or server model", f"{text}.{seed_note(method, shares.seed)}", tuple(figures))


def _recorded_shares(method: Method) -> MixingShares | None:
    if method.family != "apfl":
        return None
    for seed, rounds in sorted(series(method, "clients").items()):
        rows = [
            (number, tuple(map(float, figures["alpha"])))
            for number, figures in sorted(rounds.items())
            if isinstance(figures, dict) and figures.get("alpha")
        ]
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
