"""What commands print with. Names from outside, such as "[/bold]" and ":x:", are text and never markup."""

from __future__ import annotations

from rich.console import Console

console = Console(soft_wrap=False, markup=False, emoji=False)


def say(text: str, *, style: str | None = None) -> None:
    """A line that is not cut, wrapped or coloured by rich, so that paths in it can be copied."""
    console.print(text, style=style, highlight=False, soft_wrap=True)
