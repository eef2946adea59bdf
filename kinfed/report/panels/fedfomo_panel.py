"""FedFomo: who helps whom, by affinities and mixing weights of FedFomo and FedFomo-MA.

Figures 2 and 5 of Zhang et al., "Personalized Federated Learning with First Order Model Optimization" (the matrix of
affinities over time) and 4, 6 and 7 (one client's view of all others), as far as a run records them: at its evaluated
rounds. Clients stand in the order of their groups, in rows of the group that they are judged on.
"""

from typing import Any

from kinfed.analysis import Method
from kinfed.report.drawing.chart import Figure, Layout, Trace, axis, escape, layout, numbers, round_axis, subsampled
from kinfed.report.drawing.looks import AXIS, DASHES, GRID, HUES, LOCAL, MUTED, faded, style_of
from kinfed.report.drawing.marks import heat, line, ramp, stacked
from kinfed.report.panels.base import ClientGroups, Panel, first_series, seed_note, series

MAX_STEPS = 25  # rounds, or clients, that a slider stops at
MAX_CLIENTS = 100  # squares of more would be too small to see

Matrix = list[list[float]]


def who_helps_whom(method: Method) -> Panel | None:
    if (recorded := first_series(method, "affinity")) is None:
        return None
    seed = recorded[0]
    rounds = dict(subsampled(sorted(recorded[1].items()), MAX_STEPS))
    last = max(rounds)
    count = len(rounds[last])
    if not 1 < count <= MAX_CLIENTS:
        return None
    clients = ClientGroups.of(method.run.federations.get(seed), count)
    figures = [_matrix(method, rounds, clients), _views(method, rounds, clients)]
    mixes = series(method, "weights").get(seed, {})
    if mixes and clients.groups is not None:
        figures.append(_shares(method, mixes, clients))
    return Panel("Who helps whom", _sentence(method, rounds[last], clients, last, seed), tuple(figures))


def _sentence(method: Method, affinity: Matrix, clients: ClientGroups, last: int, seed: int) -> str:
    text = (
        "The server remembers how useful the model of every client proved to every other, and sends each client the "
        "models at the top of its list."
    )
    if clients.groups is not None:
        hits, places = kin_found(affinity, clients)
        whose = "whose group they are judged on" if clients.foreign else "of their own group"
        if places:
            text += f" After round {last}, {hits} of {places} top places are held by clients {whose}."
        text += " Lines have the colours of the groups; thick ones are those that the client is judged on."
    return text + seed_note(method, seed)


def kin_found(affinity: Matrix, clients: ClientGroups) -> tuple[int, int]:
    """(hits, places): of the m highest affinities of each client, how many are clients that train in the group it is
    judged on, where m is the number of such clients. The server's list was taught by losses alone."""
    hits = places = 0
    for i, row in enumerate(affinity):
        others = sorted((n for n in range(len(row)) if n != i), key=lambda n: -row[n])
        kin = {n for n in others if clients.kin(i, n)}
        hits += len(kin & set(others[: len(kin)]))
        places += len(kin)
    return hits, places


def _matrix(method: Method, rounds: dict[int, Matrix], clients: ClientGroups) -> Figure:
    """The colours of a step span the values that occur in it; the own model is always a candidate and left out."""
    rows, columns = clients.order(clients.targets), clients.order(clients.groups)

    def step(affinity: Matrix) -> dict[str, Any]:
        cells = [[None if n == i else affinity[i][n] for n in columns] for i in rows]
        values = [value for row in cells for value in row if value is not None]
        low, high = min(values), max(values)
        return {"z": [[numbers(row) for row in cells]], "zmin": low, "zmax": high if high > low else low + 1}

    steps = {str(number): step(affinity) for number, affinity in rounds.items()}
    latest = list(steps.values())[-1]
    pairs = [[[clients.client(i), clients.client(n)] for n in columns] for i in rows]
    hover, ends = "%{customdata[1]} for %{customdata[0]}: %{z:.3g}", {"low": latest["zmin"], "high": latest["zmax"]}
    squares = heat(latest["z"][0], hover, details=pairs, colors=ramp(0.6), **ends)
    bare: Layout = {"showgrid": False, "ticks": "", "constrain": "domain"}
    along, down = clients.ticks(clients.groups, columns), clients.ticks(clients.targets, rows)
    x = axis("The stronger the colour, the more helpful", showline=False, **bare, **along)
    y = axis(autorange="reversed", scaleanchor="x", **bare, **down)
    rows_are, columns_are = ("judged on", "trained in") if clients.foreign else ("client", "whose model")
    base = layout(x, y, f"Rows: {rows_are}; columns: {columns_are}")
    description = f"Affinities between the clients under {method.label}, as a matrix that steps over rounds."
    return Figure(description, [squares], _with_slider(base, "After round ", steps, len(steps) - 1), 520)


def _views(method: Method, rounds: dict[int, Matrix], clients: ClientGroups) -> Figure:
    """One line per other client, in the colour of its group; thick where it trains on what the client is judged on."""
    order = clients.order(clients.targets)
    x = list(rounds)

    def step(i: int) -> dict[str, Any]:
        y = [[None] * len(x) if n == i else numbers(rounds[number][i][n] for number in x) for n in range(len(order))]
        return {"y": y, "line.width": [3 if clients.kin(i, n) else 1.2 for n in range(len(order))]}

    steps = {_view_name(clients, i): step(i) for i in subsampled(order, MAX_STEPS)}
    first = next(iter(steps.values()))

    def one_line(n: int) -> Trace:
        color, dash = _look(clients, n)
        group = "" if clients.groups is None else f", {clients.group(clients.groups[n])}"
        hover = f"{clients.client(n)}{group}<br>round %{{x}}: %{{y:.3g}}"
        return line(x, first["y"][n], color, hover, name=clients.names[n], width=first["line.width"][n], dash=dash)

    base = layout(round_axis(x), axis(nticks=6), "One client’s affinity to all others")
    description = f"Affinity of one client to every other over rounds under {method.label}, client by client."
    return Figure(description, [one_line(n) for n in range(len(order))], _with_slider(base, "", steps, 0), 520)


def _view_name(clients: ClientGroups, i: int) -> str:
    name = escape(clients.names[i])
    if clients.groups is None or clients.targets is None:
        return name
    home, target = clients.group(clients.groups[i]), clients.group(clients.targets[i])
    return f"{name}: trains in {home}, judged on {target}" if clients.foreign else f"{name}, {home}"


def _look(clients: ClientGroups, n: int) -> tuple[str, str]:
    """Colour and dash of a client's line: those of its group."""
    if clients.groups is None:
        return faded(LOCAL, 0.8), "solid"
    place = sorted(set(clients.groups)).index(clients.groups[n])
    return HUES[place % len(HUES)], DASHES[place // len(HUES) % len(DASHES)]


def _shares(method: Method, mixes: dict[int, Matrix], clients: ClientGroups) -> Figure:
    """Shares of what clients mix, in the mean: the own model, models trained on what they are judged on, others."""
    parts: dict[str, list[float]] = {"own model": [], "of the target’s group": [], "others": []}
    x = []
    for number, mix in subsampled(sorted(mixes.items()), 4 * MAX_STEPS):
        rows = [(i, row) for i, row in enumerate(mix) if sum(row) > 0]
        if not rows:
            continue
        x.append(number)
        own = sum(row[i] for i, row in rows)
        kin = sum(w for i, row in rows for n, w in enumerate(row) if n != i and clients.kin(i, n))
        for part, amount in zip(parts.values(), (own, kin, sum(sum(row) for _, row in rows) - own - kin), strict=True):
            part.append(100 * amount / len(rows))
    colors = (LOCAL, style_of(method).color, AXIS)
    data = [
        stacked(x, values, faded(color, 0.75), f"round %{{x}}, {name}: %{{y:.0f}} %", name)
        for (name, values), color in zip(parts.items(), colors, strict=True)
    ]
    y = axis(range=[0, 100], ticksuffix=" %")
    shape = layout(round_axis(x), y, "What clients mix, on average", legend_below=True)
    return Figure(f"Shares of the models that clients of {method.label} mix, over rounds.", data, shape, 340)


def _with_slider(base: Layout, prefix: str, steps: dict[str, dict[str, Any]], active: int) -> Layout:
    slider = {
        "active": active,
        "currentvalue": {"prefix": prefix, "xanchor": "left", "font": {"size": 13, "color": MUTED}},
        **{"pad": {"t": 44, "b": 4}, "len": 1, "bgcolor": GRID, "activebgcolor": AXIS, "bordercolor": AXIS},
        **{"tickcolor": AXIS, "ticklen": 4},
        # Numbers fit below the slider; names do not, and only the chosen one is shown, above it.
        "font": {"size": 11, "color": MUTED if prefix else "rgba(0,0,0,0)"},
        "steps": [
            {"label": label, "value": label, "method": "restyle", "args": [change]} for label, change in steps.items()
        ],
    }
    return base | {"sliders": [slider], "margin": {"l": 44, "r": 16, "t": 30, "b": 120}}
