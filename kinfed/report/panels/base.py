"""What panels are made of; see `kinfed.report.panels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kinfed.analysis import Method
from kinfed.report.drawing.chart import Figure, Trace
from kinfed.report.drawing.marks import bars
from kinfed.report.drawing.palette import style_of

MAX_BARS = 200


@dataclass(frozen=True)
class Panel:
    title: str
    sentence: str  # what to see, for a reader who is not a specialist; plain text
    figures: tuple[Figure, ...] = ()


def series(method: Method, key: str) -> dict[int, dict[int, Any]]:
    """{seed: {round: value}} of one of the method's own figures, over the complete trials, where it was recorded."""
    by_seed = {
        trial.seed: {entry.number: entry.method[key] for entry in trial.rounds if key in entry.method}
        for trial in method.complete_trials
    }
    return {seed: values for seed, values in by_seed.items() if values}


def ranked_bars(method: Method, entries: Sequence[tuple[float, str]], hover: str) -> tuple[Trace, str]:
    """One bar per client, (height, text) in this order, or for every k-th where they are many; and what the axis then
    has to say."""
    step = math.ceil(len(entries) / MAX_BARS)
    subset = entries[::step]
    heights, texts = [height for height, _ in subset], [text for _, text in subset]
    trace = bars(range(1, len(subset) + 1), heights, style_of(method).color, hover, name=method.label, text=texts)
    return trace, "" if step == 1 else f", every {step}th"


def seed_note(method: Method, seed: int) -> str:
    """For panels that show one seed only."""
    return f" Shown is seed {seed}." if len(method.complete_trials) > 1 else ""
