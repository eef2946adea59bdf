"""Privacy: the promises of a private run to examples and to users, and their cost in accuracy."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from kinfed.analysis import Comparison, Method
from kinfed.records import ClientRecord, Kind
from kinfed.report.charts.figures import metric_figure, over_rounds, reading
from kinfed.report.drawing.chart import Figure, Trace, axis, client_label, escape, layout, log_axis
from kinfed.report.drawing.marks import curve, method_level
from kinfed.report.panels.base import Panel, is_constant, last_of_seeds, number_figure, numbers_by_round, ranked_bars


def privacy(method: Method) -> Panel | None:
    if not (last := last_of_seeds(method, "privacy")):
        return None
    clients = [client for trial in method.complete_trials for client in trial.clients if "epsilon" in client.values]
    return Panel("Privacy", _sentence(last, clients), (_each_client(method, clients),) if clients else ())


def _sentence(last: Sequence[dict[str, Any]], clients: Sequence[ClientRecord]) -> str:
    """`last`: what every seed recorded at its last evaluation."""
    one, noises = last[0], [float(entry["noise"]) for entry in last]
    noise = " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(noises), max(noises))))
    settings = f"clipping norm {one['clip']:g}, noise {noise} times that"
    largest = [entry["epsilon_max"] for entry in last]
    if None in largest:
        text = f"Gradients were clipped, but no noise was added ({settings}): there is no privacy, ε is infinite."
    else:
        text = f"No client’s ε exceeds {max(largest):.3g} at δ = {_delta(one)} ({settings})"
        if clients:
            text += f"; the mean over clients is {fmean(client.values['epsilon'] for client in clients):.3g}"
        text += (
            ". This covers every gradient of a client’s training examples in all rounds, against anyone who sees "
            "everything the client sent, and its model."
        )
    if refused := max(int(entry["refused"]) for entry in last):
        who = "One client" if refused == 1 else f"{refused} clients"
        text += f" {who} had to stop early to stay within the budget."
    if one["not_covered"]:
        text += f" Not covered by ε: {'; '.join(map(str, one['not_covered']))}."
    return text


def _delta(figures: dict[str, Any]) -> str:
    return f"{figures['delta']:g}".replace("e-0", "e-")


def _each_client(method: Method, clients: Sequence[ClientRecord]) -> Figure:
    ordered = sorted(clients, key=lambda client: client.values["epsilon"], reverse=True)
    about = [f"{client_label(client.client)}, {client.n_train} training examples" for client in ordered]
    epsilons = [client.values["epsilon"] for client in ordered]
    each, of = ranked_bars(method, list(zip(epsilons, about, strict=True)), "ε = %{y:.3g}<br>%{text}")
    seeds = " of all seeds" if len(method.complete_trials) > 1 else ""
    x = axis(f"Clients{seeds}{of}", showticklabels=False, ticks="")
    shape = layout(x, axis(nticks=5, rangemode="tozero"), "ε of each client, least private first")
    return Figure(f"ε of every client under {method.label}, sorted.", [each], shape, 280)


def accuracy_against_epsilon(comparison: Comparison) -> Figure | None:
    """Private methods as lines over the ε spent so far, the others as level lines where they end."""
    metric = comparison.metric
    spent = {method.index: _spent(method) for method in comparison.methods}
    everything = [value for by_round in spent.values() for value in by_round.values()]
    if not everything:
        return None
    low, high = min(everything), max(everything)

    def draw(method: Method, kind: Kind) -> list[Trace]:
        by_round, epsilons = over_rounds(method, kind, metric), spent[method.index]
        name = f"<b>{escape(method.label)}</b><br>"
        if by_round and not epsilons:
            hover = f"{name}{reading(metric, spread='')}, not private"
            return [method_level(method, (low, high), by_round[max(by_round)].mean, hover)]
        points = [(epsilons[number], mean) for number, mean in by_round.items() if number in epsilons]
        return curve(method, points, f"{name}at ε = %{{x:.3g}}: {reading(metric)}") if points else []

    title = "Largest ε of any client so far"
    x = log_axis(title, low, high) if high > 10 * low else axis(title)
    return metric_figure(comparison, draw, x, "against the ε spent so far")


def _spent(method: Method) -> dict[int, float]:
    """{round: ε_max, mean over seeds}, where it is finite and more than 0."""
    by_round = numbers_by_round(method, "privacy", lambda figures: figures["epsilon_max"] or None)
    return {number: fmean(by_seed.values()) for number, by_seed in by_round.items()}


def user_privacy(method: Method) -> Panel | None:
    last = last_of_seeds(method, "user_privacy")
    return Panel("User-level privacy", _user_sentence(last), tuple(_user_figures(method))) if last else None


def _user_sentence(last: Sequence[dict[str, Any]]) -> str:
    """`last`: what every seed recorded at its last evaluation."""
    one, largest = last[0], [entry["epsilon"] for entry in last]
    noise = f"noise {'at least ' if one.get('at_nodes') else ''}{one['noise']:.3g} times the clipping norm"
    settings = (
        f"{noise} in the sum of a round, divided by {one['expected']:.4g} "
        f"expected clients; neighbours: {one['neighbours']}"
    )
    if None in largest:
        return (
            f"Updates were clipped, but no noise was added ({settings}): there is no user-level privacy, ε is infinite."
        )
    if not any(largest):
        return "Nothing leaves the clients: there is no server model to protect, and no noise."
    promise = f"private at (ε, δ) = ({max(largest):.3g}, {_delta(one)}) per client, over all rounds ({settings})"
    if one.get("at_nodes"):
        others = one["conspirators"]
        against = "the server" + (f" and up to {others} clients that conspire with it" if others else "")
        return (
            f"Sums of updates and server model {promise}, also against {against}: nodes add the noise inside secure "
            "sums. Personal models stay with their clients: they have no noise, and are not covered; nor are counts of "
            "examples, scores and other figures on this page."
        )
    return (
        f"Server model {promise}. Personal models stay with their clients: they have no noise, and are not covered. "
        "The server itself sees updates, or with secure sums their sum, without noise and is trusted; scores and other "
        "figures on this page are not covered."
    )


def _user_figures(method: Method) -> Iterator[Figure]:
    """ε over rounds, and the clipping norm where it moves."""
    for name, title in (("epsilon", "ε of every client so far"), ("clip", "Clipping norm")):
        by_round = numbers_by_round(method, "user_privacy", lambda figures: figures[name] or None)  # noqa: B023
        if not is_constant(by_round):
            description = f"{title} under {method.label}, over rounds."
            yield number_figure(description, method, by_round, axis(nticks=5, rangemode="tozero"), title)
