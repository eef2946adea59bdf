"""Numbers as people write them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinfed.analysis import MetricStyle

MINUS = "\u2212"
NARROW_SPACE = "\u202f"


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


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def natural_order(name: str) -> list[tuple[int, str]]:
    """The key that sorts client 2 before client 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", name) if part]
