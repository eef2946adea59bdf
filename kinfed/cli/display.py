"""Display of a running experiment: a live line on a terminal, plain lines elsewhere; and the table at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinfed.api import LiveDisplay, Speed
from kinfed.cli.terminal import say
from kinfed.engine import METRICS, Metric
from kinfed.records import Baseline, headline_text
from kinfed.runs import NullObserver

if TYPE_CHECKING:
    from kinfed.config import RunConfig
    from kinfed.records import FinalRecord
    from kinfed.server import RoundReport

PLAIN_EVERY = 10.0  # seconds between lines without a terminal

Metrics = dict[str, float]


class PlainDisplay(NullObserver):
    """Lines for logs: one when a method starts, one now and then, one when it ends."""

    def __init__(self, console: Console, metric: str | None = None) -> None:
        self._console, self._metric, self._speed = console, metric, Speed()
        self._rounds, self._done, self._last = 0, 0, 0.0

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        self._rounds, self._done, self._last, self._speed = rounds, first, time.monotonic(), Speed()
        if first:
            self._say(f"{label} seed {seed}: continues after round {first} of {rounds}")

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        self._done += 1
        rate = self._speed.after_round()
        ends = self._done >= self._rounds
        if not ends and time.monotonic() - self._last < PLAIN_EVERY:
            return
        self._last = time.monotonic()
        left = "" if ends else f", {(self._rounds - self._done) / max(rate, 1e-9):.0f} s left"
        accuracy = "" if personal is None else f", {headline_text(personal, self._metric)}"
        self._say(f"{label} seed {seed}: round {self._done}/{self._rounds}, {rate:.1f} rounds/s{left}{accuracy}")

    def finished(self, result: FinalRecord) -> None:
        if self._done < self._rounds:
            self._say(f"{result.label} seed {result.seed}: has learnt all that it can after round {self._done}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def display(console: Console, total_rounds: int, metric: str | None = None) -> AbstractContextManager[NullObserver]:
    live = console.is_terminal
    return LiveDisplay(console, total_rounds, metric) if live else nullcontext(PlainDisplay(console, metric))


def run_sentence(config: RunConfig) -> str:
    """One sentence on what a run will do."""
    from kinfed.runs import partition_name

    seeds = f"{len(config.seeds)} {'seed' if len(config.seeds) == 1 else 'seeds'}"
    return (
        f"{config.dataset.name} divided by {partition_name(config)}, {config.model_in_words}; "
        f"{', '.join(config.algorithms)}; {config.rounds} rounds, participation {config.participation:g}, {seeds}"
    )


def results_table(results: Sequence[dict[str, Any]], baselines: Sequence[Baseline] = ()) -> Table:
    """Means over seeds, with the standard deviation over several, and the baseline without a model."""
    name = results[0].get("metric", "accuracy")
    metric, worst = METRICS.find(name), "worst10" if name == "accuracy" else f"{name}_worst10"
    unit = f" {metric.unit}".rstrip() if metric else " %"
    table = _titled(f"{metric.title if metric else name}{unit}, last round, test data of {_participants(results)}")
    private = any("privacy" in r for r in results)
    hidden = any("user_privacy" in r for r in results)
    columns = [f"personal{unit}", "worst 10%", f"server{unit}", "MB/round", "s/round"]
    for heading in columns + ["epsilon"] * private + ["user eps"] * hidden:
        table.add_column(heading, justify="right", no_wrap=True)
    for label in dict.fromkeys(r["algorithm"] for r in results):
        trials = [r for r in results if r["algorithm"] == label]
        rounds = sum(r["rounds"] for r in trials)
        table.add_row(
            Text(label + (" (diverged)" if any(r["diverged"] for r in trials) else "")),
            _figure(trials, "personal", name, metric),
            _figure(trials, "personal", worst, metric),
            _figure(trials, "server", name, metric),
            f"{sum(r['bytes_down'] + r['bytes_up'] for r in trials) / rounds / 1e6:.3g}",
            f"{sum(r['seconds'] for r in trials) / rounds:.2g}",
            *((f"{max(r['privacy']['epsilon_max'] for r in trials):.3g}",) if private else ()),
            *((f"{max(r['user_privacy']['epsilon'] for r in trials):.3g}",) if hidden else ()),
        )
    if baselines:
        entries = [{"personal": baseline.personal} for baseline in baselines]
        figures = [_figure(entries, "personal", figure, metric) for figure in (name, worst)]
        table.add_row(
            f"({baselines[0].name.split()[0]})", *figures, "-", "-", "-", *["-"] * (private + hidden), style="dim"
        )
    return table


def _titled(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE)
    table.add_column("method")
    return table


def _participants(results: Sequence[dict[str, Any]]) -> str:
    """Clients behind the figures: all clients, or those that took part in a round."""
    clients, counts = max(r["clients"] for r in results), sorted({r["took_part"] for r in results})
    if counts == [clients]:
        return f"all {clients} clients"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"the {number} of {clients} clients that took part"


def outsiders_sentence(results: Sequence[dict[str, Any]]) -> str:
    """Sentence on clients that took part in no round; "" if all did."""
    if all(r["took_part"] == r["clients"] for r in results):
        return ""
    return (
        "clients that took part in no round are not counted: they have the server's model at best; summary.json and "
        "the report give the figures of all clients too"
    )


def _figure(results: Sequence[dict[str, Any]], kind: str, name: str, metric: Metric | None) -> str:
    values = [r[kind][name] for r in results if r[kind] and r[kind].get(name) is not None]
    if not values:
        return "-"
    scale, form = (100, ".1f") if metric is not None and metric.percent else (1, ".4g")
    values = [scale * value for value in values]
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


class TuningLines(NullObserver):
    """One line about every finished trial of a tuning."""

    def note(self, text: str) -> None:
        say(text)


def tuning_table(methods: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Table of the settings that tuning chose for each method."""
    metric = methods[0][1].get("metric", "accuracy") if methods else "accuracy"
    shown = METRICS.named(metric).shown
    table = _titled(f"mean over clients of {metric} on validation data")
    for name in ("as configured", "tuned"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for label, record in methods:
        settings = ", ".join(f"{name}={value:g}" for name, value in record["settings"].items()) or "as configured"
        edge = f"  ({', '.join(record['at_edge'])} at the edge: widen with --range)" if record["at_edge"] else ""
        table.add_row(label, shown(record["default"]), shown(record["best"]), settings + edge)
    return table
