"""Numbers as people write them."""

from __future__ import annotations

import math
import re

MINUS = "\u2212"
NARROW_SPACE = "\u202f"


def format_number(value: float, digits: int) -> str:
    """With a true minus, thousands apart, and never zero for what is only small."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    tiny = abs(value) < 0.5 * 10**-digits
    text = f"{value:.1g}" if tiny else f"{value:,.{0 if abs(value) >= 1000 else digits}f}"
    return text.replace(",", NARROW_SPACE).replace("-", MINUS)


def format_points(value: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return ("+" if value > 0 else "") + format_number(100 * value, 1)


def plural(n: int, noun: str) -> str:
    """1 client, 2 clients."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}".replace(",", NARROW_SPACE)


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def natural_order(name: str) -> list[tuple[int, str]]:
    """The key that sorts client 2 before client 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part.casefold()) for part in re.split(r"(\d+)", name) if part]
