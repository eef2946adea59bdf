"""Colours of the report, and numbers as people write them. One look per method, the same in every figure of a page.

Figures are written with the colours of the light theme. The page swaps every colour listed in `DARK` when the
reader's system is dark, so a figure never needs to know about themes: it only has to take its colours from here.
The colours were chosen to differ under normal vision, protanopia, deuteranopia and tritanopia, and to stand out
from the background; beyond seven methods line dashes and markers tell apart those that share a colour.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kinfed.analysis import Method, MetricStyle, slots

MINUS, NARROW_SPACE = "\u2212", "\u202f"
BACKGROUND = "#ffffff"
SURFACE = "#f4f5f6"  # the empty end of heat maps
INK = "#1c1f23"
MUTED = "#5d636b"
GRID = "#e3e5e8"
AXIS = "#b3b8be"
HEAT_LOW = "#a9c7e8"
HEAT_HIGH = "#123f86"

LOCAL = "#868a90"
HUES = ("#17468f", "#dd6418", "#0b8457", "#c45fb0", "#2598e6", "#6f4a08", "#6d0f45")

# light colour -> its counterpart on a dark background
DARK = {
    **{BACKGROUND: "#15181c", SURFACE: "#1e2227", INK: "#e6e8ea", MUTED: "#9ea5ad", GRID: "#2b3036", AXIS: "#565d65"},
    **{HEAT_LOW: "#27508a", HEAT_HIGH: "#9dcbff", LOCAL: "#8f959d"},
    **dict(zip(HUES, ("#4370ee", "#e58a45", "#2fe39a", "#a85fb4", "#48b2f7", "#f3cd3c", "#d23f62"), strict=True)),
}

DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down")


@dataclass(frozen=True)
class Style:
    color: str  # a colour of the light theme, "#rrggbb"
    dash: str  # plotly's name of a line dash
    symbol: str  # plotly's name of a marker

    def faded(self, opacity: float) -> str:
        return faded(self.color, opacity)


def faded(color: str, opacity: float) -> str:
    """The colour as "#rrggbbaa": the page swaps the first six digits and keeps the opacity."""
    return f"{color}{round(255 * opacity):02x}"


def style_of(method: Method) -> Style:
    """The look of a method in every figure of a page."""
    return _style(method.slot)


def styles(algorithms: Iterable[str]) -> list[Style]:
    """One style for each entry, in order; no two alike up to 28 methods. An algorithm may occur more than once."""
    return [_style(slot) for slot in slots(list(algorithms))]


def _style(slot: tuple[int | None, int]) -> Style:
    hue, turn = slot
    if hue is None:
        return Style(LOCAL, DASHES[(2 + turn) % len(DASHES)], _SYMBOLS[turn % len(_SYMBOLS)])
    return Style(HUES[hue], DASHES[turn % len(DASHES)], _SYMBOLS[(hue + turn) % len(_SYMBOLS)])


def format_number(value: float, digits: int) -> str:
    """The number with a true minus and thousands apart; what is only small is never written as zero."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    tiny = abs(value) < 0.5 * 10**-digits
    text = f"{value:.1g}" if tiny else f"{value:,.{0 if abs(value) >= 1000 else digits}f}"
    return text.replace(",", NARROW_SPACE).replace("-", MINUS)


def shown(value: float, style: MetricStyle) -> str:
    """A value of a metric in its shown unit, which does not follow."""
    return format_number(style.scale * value, style.digits)


def signed(value: float, style: MetricStyle) -> str:
    """A difference of two values of a metric, with its sign."""
    return ("+" if value > 0 else "") + shown(value, style)


def plural(n: int, noun: str) -> str:
    """1 client, 2 clients."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}".replace(",", NARROW_SPACE)


def listed(things: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join([*([", ".join(things[:-1])] if len(things) > 1 else []), *things[-1:]])


def byte_size(count: float) -> str:
    """Bytes in the unit that people read: 292 bytes, 5.94 kB."""
    if count < 1000:
        return f"{count:.0f} bytes"
    return f"{count / 1e3:.3g} kB" if count < 1e6 else f"{count / 1e6:.3g} MB"


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def natural_order(name: str) -> list[tuple[int, str]]:
    """The key that sorts client 2 before client 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", name) if part]
