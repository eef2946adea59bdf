"""Numbers from the command line, or one clear sentence."""

from __future__ import annotations

from kinfed.errors import ConfigError


def integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas; got {text!r}") from None


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} takes a number or auto; got {text!r}") from None
