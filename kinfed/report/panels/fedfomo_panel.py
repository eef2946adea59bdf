"""Who helps whom: affinities and mixing weights of FedFomo and FedFomo-MA.

Figures 2 and 5 of Zhang et al., "Personalized Federated Learning with First Order Model Optimization" (the matrix of
affinities over time) and 4, 6 and 7 (one client's view of all others), as far as a run records them: at its evaluated
rounds. Clients stand in the order of their groups, in rows of the group that they are judged on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kinfed.report.chart import Figure, Layout, Trace, axis, client_label, layout, numbers, safe, thinned
from kinfed.report.comparison import Method
from kinfed.report.palette import AXIS, GRID, HEAT_HIGH, HEAT_LOW, HUES, LOCAL, MUTED, SURFACE, faded
from kinfed.report.panels.panel import Panel, panel, series
from kinfed.runs.reader import Federation

MAX_STEPS = 25  # rounds, or clients, that a slider stops at
MAX_CLIENTS = 100  # squares of more would be too small to see

Matrix = list[list[float]]
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class World:
    """The clients of one seed: their names, the group each trains in, and the group each is judged on."""

    names: tuple[str, ...]
    groups: tuple[int, ...] | None
    targets: tuple[int, ...] | None
    group_names: tuple[str, ...] | None

    @classmethod
    def of(cls, federation: Federation | None, count: int) -> World:
        if federation is None or len(federation.names) != count:
            return cls(tuple(str(m) for m in range(count)), None, None, None)
        groups, moved = federation.groups, federation.description.get("target_of")
        targets = groups
        if groups is not None and isinstance(moved, list) and sorted(moved) == list(range(count)):
            targets = tuple(groups[m] for m in moved)
        return cls(federation.names, groups, targets, federation.group_names)

    def group(self, number: int) -> str:
        known = self.group_names is not None and 0 <= number < len(self.group_names)
        return safe(self.group_names[number]) if self.group_names and known else f"group {number}"

    def client(self, m: int) -> str:
        return client_label(self.names[m])

    def order(self, by: tuple[int, ...] | None) -> list[int]:
        return sorted(range(len(self.names)), key=lambda m: (by[m] if by else 0, m))

    def kin(self, i: int, n: int) -> bool:
        """Whether client n trains in the group that client i is judged on."""
        return self.groups is not None and self.targets is not None and self.groups[n] == self.targets[i]

    @property
    def foreign(self) -> bool:
        return self.targets != self.groups


@panel
def who_helps_whom(method: Method) -> Panel | None:
    recorded = series(method, "affinity")
    if not recorded:
        return None
    seed = min(recorded)
    rounds = dict(thinned(sorted(recorded[seed].items()), MAX_STEPS))
    last = max(rounds)
    count = len(rounds[last])
    if not 1 < count <= MAX_CLIENTS:
        return None
    world = World.of(method.run.federations.get(seed), count)
    figures = [_matrix(method, rounds, world), _views(method, rounds, world)]
    mixes = series(method, "weights").get(seed, {})
    if mixes and world.groups is not None:
        figures.append(_shares(method, mixes, world))
    return Panel("Who helps whom", _sentence(method, rounds[last], world, last, seed), tuple(figures))


def _sentence(method: Method, affinity: Matrix, world: World, last: int, seed: int) -> str:
    text = (
        "The server remembers how useful the model of every client proved to every other, and sends each client the "
        "models at the top of its list."
    )
    if world.groups is not None:
        hits, places = kin_found(affinity, world)
        whose = "whose group they are judged on" if world.foreign else "of their own group"
        if places:
            text += f" After round {last}, {hits} of {places} top places are held by clients {whose}."
        text += " Lines have the colours of the groups; thick ones are those that the client is judged on."
    if len(method.counted) > 1:
        text += f" Shown is seed {seed}."
    return text


def kin_found(affinity: Matrix, world: World) -> tuple[int, int]:
    """(hits, places): of the m highest affinities of each client, how many are clients that train in the group it is
    judged on, where m is the number of such clients. The server's list was taught by losses alone."""
    hits = places = 0
    for i, row in enumerate(affinity):
        others = [n for n in range(len(row)) if n != i]
        kin = {n for n in others if world.kin(i, n)}
        top = sorted(others, key=lambda n: -row[n])[: len(kin)]
        hits += len(kin & set(top))
        places += len(kin)
    return hits, places


def _matrix(method: Method, rounds: dict[int, Matrix], world: World) -> Figure:
    """The colours of a step span the values that occur in it; the own model is always a candidate and left out."""
    rows, columns = world.order(world.targets), world.order(world.groups)

    def step(affinity: Matrix) -> dict[str, Any]:
        shown = [[None if n == i else affinity[i][n] for n in columns] for i in rows]
        values = [value for row in shown for value in row if value is not None]
        low, high = min(values), max(values)
        return {"z": [[numbers(row) for row in shown]], "zmin": low, "zmax": high if high > low else low + 1}

    steps = {str(number): step(affinity) for number, affinity in rounds.items()}
    first = list(steps.values())[-1]
    details = [[[world.client(i), world.client(n)] for n in columns] for i in rows]
    data: list[Trace] = [
        {
            "type": "heatmap",
            "z": first["z"][0],
            "zmin": first["zmin"],
            "zmax": first["zmax"],
            "customdata": details,
            "xgap": 1 if len(rows) <= 40 else 0,
            "ygap": 1 if len(rows) <= 40 else 0,
            "hoverongaps": False,
            "colorscale": [[0, SURFACE], [0.6, HEAT_LOW], [1, HEAT_HIGH]],
            "showscale": False,
            "hovertemplate": "%{customdata[1]} for %{customdata[0]}: %{z:.3g}<extra></extra>",
        }
    ]
    rows_are, columns_are = ("judged on", "trained in") if world.foreign else ("client", "whose model")
    base = layout(
        axis(
            "The stronger the colour, the more helpful",
            showgrid=False,
            showline=False,
            **_ticks(world, world.groups, columns),
        ),
        axis(
            showgrid=False,
            autorange="reversed",
            scaleanchor="x",
            constrain="domain",
            **_ticks(world, world.targets, rows),
        ),
        f"Rows: {rows_are}; columns: {columns_are}",
    )
    base["xaxis"] |= {"ticks": "", "constrain": "domain"}
    base["yaxis"] |= {"ticks": ""}
    return Figure(
        description=f"Affinities between the clients under {method.label}, as a matrix that steps over rounds.",
        data=data,
        layout=_with_slider(base, "After round ", steps, len(steps) - 1),
        height=520,
    )


def _ticks(world: World, groups: tuple[int, ...] | None, order: list[int]) -> Layout:
    """Names of groups in the middle of their clients; single clients where there are no groups."""
    if groups is None:
        shown = len(order) <= 25
        return {"tickvals": list(range(len(order))), "ticktext": [world.client(m) for m in order]} if shown else {}
    places: dict[int, list[int]] = {}
    for place, client in enumerate(order):
        places.setdefault(groups[client], []).append(place)
    return {
        "tickvals": [(found[0] + found[-1]) / 2 for found in places.values()],
        "ticktext": [world.group(group) for group in places],
    }


def _views(method: Method, rounds: dict[int, Matrix], world: World) -> Figure:
    """One line per other client, in the colour of its group; thick where it trains on what the client is judged on."""
    order = world.order(world.targets)
    chosen = thinned(order, MAX_STEPS)
    x = list(rounds)

    def step(i: int) -> dict[str, Any]:
        y = [[None] * len(x) if n == i else numbers(rounds[number][i][n] for number in x) for n in range(len(order))]
        return {"y": y, "line.width": [3 if world.kin(i, n) else 1.2 for n in range(len(order))]}

    steps = {_view_name(world, i): step(i) for i in chosen}
    first = next(iter(steps.values()))
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": x,
            "y": first["y"][n],
            "mode": "lines",
            "line": {"width": first["line.width"][n], **_look(world, n)},
            "hovertemplate": f"{world.client(n)}{_of_group(world, n)}<br>round %{{x}}: %{{y:.3g}}<extra></extra>",
            "name": world.client(n),
        }
        for n in range(len(order))
    ]
    base = layout(axis("Round"), axis(nticks=6), "One client’s affinity to all others")
    return Figure(
        description=f"Affinity of one client to every other over rounds under {method.label}, client by client.",
        data=data,
        layout=_with_slider(base, "", steps, 0),
        height=520,
    )


def _view_name(world: World, i: int) -> str:
    name = world.names[i]
    if world.groups is None or world.targets is None:
        return safe(name)
    if world.foreign:
        return f"{safe(name)}: trains in {world.group(world.groups[i])}, judged on {world.group(world.targets[i])}"
    return f"{safe(name)}, {world.group(world.groups[i])}"


def _of_group(world: World, n: int) -> str:
    return "" if world.groups is None else f", {world.group(world.groups[n])}"


def _look(world: World, n: int) -> dict[str, str]:
    if world.groups is None:
        return {"color": faded(LOCAL, 0.8), "dash": "solid"}
    place = sorted(set(world.groups)).index(world.groups[n])
    return {"color": HUES[place % len(HUES)], "dash": _DASHES[place // len(HUES) % len(_DASHES)]}


def _shares(method: Method, mixes: dict[int, Matrix], world: World) -> Figure:
    """Of what clients mix: the own model, models trained on what they are judged on, all others; mean over clients."""
    parts: dict[str, list[float]] = {"own model": [], "of the target’s group": [], "others": []}
    x = []
    for number, mix in thinned(sorted(mixes.items()), 4 * MAX_STEPS):
        rows = [(i, row) for i, row in enumerate(mix) if sum(row) > 0]
        if not rows:
            continue
        x.append(number)
        own = sum(row[i] for i, row in rows)
        kin = sum(w for i, row in rows for n, w in enumerate(row) if n != i and world.kin(i, n))
        for part, amount in zip(parts.values(), (own, kin, sum(sum(row) for _, row in rows) - own - kin), strict=True):
            part.append(100 * amount / len(rows))
    colours = (LOCAL, method.style.color, AXIS)
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": x,
            "y": numbers(values),
            "mode": "lines",
            "stackgroup": "mix",
            "line": {"width": 0.5, "color": colour},
            "fillcolor": faded(colour, 0.75),
            "hovertemplate": f"{name}: %{{y:.0f}} %<extra>round %{{x}}</extra>",
            "name": name,
        }
        for (name, values), colour in zip(parts.items(), colours, strict=True)
    ]
    base = layout(
        axis("Round"),
        axis(range=[0, 100], ticksuffix=" %"),
        "What clients mix, on average",
        showlegend=True,
        legend={"orientation": "h", "y": -0.22, "font": {"size": 12, "color": MUTED}},
        margin={"l": 44, "r": 16, "t": 30, "b": 80},
    )
    return Figure(
        description=f"Shares of the models that clients of {method.label} mix, over rounds.",
        data=data,
        layout=base,
        height=340,
    )


def _with_slider(base: Layout, prefix: str, steps: dict[str, dict[str, Any]], active: int) -> Layout:
    slider = {
        "active": active,
        "currentvalue": {"prefix": prefix, "xanchor": "left", "font": {"size": 13, "color": MUTED}},
        "pad": {"t": 44, "b": 4},
        "len": 1,
        "bgcolor": GRID,
        "activebgcolor": AXIS,
        "bordercolor": AXIS,
        "tickcolor": AXIS,
        "ticklen": 4,
        # Numbers fit below the slider; names do not, and only the chosen one is shown, above it.
        "font": {"size": 11, "color": MUTED if prefix else "rgba(0,0,0,0)"},
        "steps": [
            {"label": label, "value": label, "method": "restyle", "args": [change]} for label, change in steps.items()
        ],
    }
    return base | {"sliders": [slider], "margin": {"l": 44, "r": 16, "t": 30, "b": 120}}
