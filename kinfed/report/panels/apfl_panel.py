"""How much of its own model each client of APFL keeps, over rounds and by the size of its data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kinfed.report.chart import Figure, Trace, axis, client_label, layout, log_axis, numbers, safe, thinned
from kinfed.report.comparison import Method
from kinfed.report.palette import INK, faded
from kinfed.report.panels.panel import Panel, panel, series

MAX_LINES = 60  # clients drawn one by one; beyond, the middle 80 %


@dataclass(frozen=True)
class Shares:
    """α of all clients of one seed, at every evaluated round."""

    seed: int
    rounds: tuple[int, ...]
    alpha: tuple[tuple[float, ...], ...]  # by round, then by client
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None


@panel
def mixing(method: Method) -> Panel | None:
    shares = _recorded(method)
    if shares is None:
        return None
    last = shares.alpha[-1]
    ordered = sorted(range(len(last)), key=lambda m: last[m])
    least, most = ordered[0], ordered[-1]
    text = (
        f"α is the part of a client’s own model in the mixture it uses; the rest is the model of all. After round "
        f"{shares.rounds[-1]} it is {100 * statistics.median(last):.0f} % for the median client"
    )
    if len(last) > 1:
        text += (
            f", from {100 * last[least]:.0f} % at {shares.names[least]} to {100 * last[most]:.0f} % at "
            f"{shares.names[most]}"
        )
    text += "."
    if len(method.counted) > 1:
        text += f" Shown is seed {shares.seed}."
    figures = [_over_rounds(method, shares)]
    if shares.sizes is not None and len(set(shares.sizes)) > 1:
        figures.append(_by_size(method, shares))
    return Panel("Own or server model", text, tuple(figures))


def _recorded(method: Method) -> Shares | None:
    if method.family != "apfl":
        return None
    for seed, rounds in sorted(series(method, "clients").items()):
        rows = [
            (n, tuple(map(float, f["alpha"])))
            for n, f in sorted(rounds.items())
            if isinstance(f, dict) and f.get("alpha")
        ]
        if not rows:
            continue
        federation, count = method.run.federations.get(seed), len(rows[-1][1])
        rows = [row for row in rows if len(row[1]) == count]
        known = federation is not None and len(federation.names) == count
        names = (
            tuple(federation.names) if federation is not None and known else tuple(f"client {m}" for m in range(count))
        )
        sizes = tuple(federation.sizes) if federation is not None and known else None
        return Shares(seed, tuple(n for n, _ in rows), tuple(a for _, a in rows), names, sizes)
    return None


def _over_rounds(method: Method, shares: Shares) -> Figure:
    columns = thinned(list(zip(shares.rounds, shares.alpha, strict=True)), 200)
    x = [number for number, _ in columns]
    data: list[Trace] = []
    if len(shares.names) <= MAX_LINES:
        for m, name in enumerate(shares.names):
            data.append(
                {
                    "type": "scatter",
                    "x": x,
                    "y": numbers(alpha[m] for _, alpha in columns),
                    "mode": "lines+markers" if len(x) == 1 else "lines",
                    "line": {"color": method.style.faded(0.35), "width": 1.2},
                    "marker": {"color": method.style.faded(0.35), "size": 5},
                    "hovertemplate": f"{client_label(name)}, round %{{x}}: α = %{{y:.2f}}<extra></extra>",
                    "name": safe(name),
                }
            )
    else:
        low, high = zip(*(_middle(alpha) for _, alpha in columns), strict=True)
        data.append(
            {
                "type": "scatter",
                "x": x + x[::-1],
                "y": numbers((*high, *reversed(low))),
                "mode": "lines",
                "line": {"width": 0},
                "fill": "toself",
                "fillcolor": method.style.faded(0.2),
                "hoverinfo": "skip",
                "name": "four of five clients",
            }
        )
    data.append(
        {
            "type": "scatter",
            "x": x,
            "y": numbers(statistics.median(alpha) for _, alpha in columns),
            "mode": "lines+markers" if len(x) <= 25 else "lines",
            "line": {"color": INK, "width": 2.2},
            "marker": {"color": INK, "size": 5},
            "hovertemplate": "round %{x}: median α = %{y:.2f}<extra></extra>",
            "name": "median",
        }
    )
    drawn = "one line per client" if len(shares.names) <= MAX_LINES else "band: four of five clients"
    return Figure(
        description="α of the clients over rounds, and its median.",
        data=data,
        layout=layout(axis("Round"), axis(range=[-0.03, 1.03], nticks=6), f"α; {drawn}; dark: median"),
        height=290,
    )


def _middle(values: tuple[float, ...]) -> tuple[float, float]:
    """The 10 % and 90 % quantiles."""
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def _by_size(method: Method, shares: Shares) -> Figure:
    sizes = shares.sizes or ()
    dots = thinned(list(zip(sizes, shares.alpha[-1], shares.names, strict=True)), 1500)
    wide = max(sizes) > 8 * max(min(sizes), 1)
    title = "Training examples of the client"
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": [size for size, _, _ in dots],
            "y": numbers(alpha for _, alpha, _ in dots),
            "text": [f"{client_label(name)}, {size} training examples" for size, _, name in dots],
            "mode": "markers",
            "marker": {"color": method.style.faded(0.5), "size": 7, "line": {"width": 0.5, "color": faded(INK, 0.3)}},
            "hovertemplate": "%{text}: α = %{y:.2f}<extra></extra>",
            "name": safe(method.label),
        }
    ]
    return Figure(
        description="α of every client after the last evaluated round, against the number of its training examples.",
        data=data,
        layout=layout(
            log_axis(title, max(min(sizes), 1), max(sizes)) if wide else axis(title),
            axis(range=[-0.03, 1.03], nticks=6),
            f"α after round {shares.rounds[-1]}",
        ),
        height=290,
    )
