"""Pieces of HTML that the report is made of. Whatever text they are given, they escape it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable

from kinfed.report.chart import Figure
from kinfed.report.palette import DARK, Style

MAX_BUTTONS = 6  # more choices than this are offered as a list to open
MAX_DOWNLOAD = 1_500_000  # characters in a data: link; browsers refuse much longer ones


def esc(text: str) -> str:
    return html.escape(text, quote=True)


def inline_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def notes(texts: Iterable[str]) -> str:
    said = "".join(f"<p>{esc(text)}</p>" for text in texts)
    return f'<div class="note" role="note">{said}</div>' if said else ""


def scroll(table: str, label: str) -> str:
    """Wide tables scroll inside their own box, reachable by keyboard."""
    return f'<div class="scroll" role="region" aria-label="{esc(label)}" tabindex="0">{table}</div>'


def fold(summary: str, body: str) -> str:
    return f"<details><summary>{esc(summary)}</summary>{body}</details>"


def theme_colors(style: Style) -> str:
    return f"--light:{style.color};--dark:{DARK[style.color]}"


def swatch(style: Style) -> str:
    """A piece of the method's line, in the colour of the reader's theme."""
    return f'<span class="swatch {style.dash}" style="{theme_colors(style)}"></span>'


def drawing(figure: Figure, caption: str = "") -> str:
    payload = {
        "data": figure.data,
        "layout": figure.layout,
        "height": figure.height,
        "views": [{"key": view.key, "patch": view.patch} for view in figure.views],
        "chosen": _chosen(figure),
    }
    legend = "".join(
        f'<li><button type="button" value="{method.index}" aria-pressed="true">'
        f"{swatch(method.style)}{esc(method.label)}</button></li>"
        for method in figure.methods
    )
    return (
        "<figure>"
        + (f'<ul class="legend" aria-label="Methods; press to hide or show">{legend}</ul>' if legend else "")
        + f'<div class="plot" role="img" aria-label="{esc(figure.description)}" style="height:{figure.height}px" '
        f'data-legend="{"yes" if legend else "no"}"></div>'
        f'<script type="application/json">{inline_json(payload)}</script>'
        + (f"<figcaption>{esc(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )


def _chosen(figure: Figure) -> str | None:
    return figure.chosen or (figure.views[0].key if figure.views else None)


def choice(figure: Figure, label: str) -> str:
    """Lets the reader choose a view; it applies to all figures of the section that have it."""
    if len(figure.views) < 2:
        return ""
    chosen = _chosen(figure)
    if len(figure.views) > MAX_BUTTONS:
        options = "".join(
            f'<option value="{esc(view.key)}"{" selected" if view.key == chosen else ""}>{esc(view.label)}</option>'
            for view in figure.views
        )
        return f'<div class="controls"><label>{esc(label)} <select>{options}</select></label></div>'
    buttons = "".join(
        f'<button type="button" value="{esc(view.key)}" aria-pressed="{str(view.key == chosen).lower()}">'
        f"{esc(view.label)}</button>"
        for view in figure.views
    )
    return f'<div class="controls"><div class="views" role="group" aria-label="{esc(label)}">{buttons}</div></div>'


def download(name: str, what: str, text: str) -> str:
    if len(text) > MAX_DOWNLOAD:
        return f"<code>{esc(name)}</code>: {esc(what)}; too long to be kept in this page, see the files of the run"
    encoded = base64.b64encode(text.encode()).decode()
    kind = "text/csv" if name.endswith(".csv") else "text/plain"
    return f'<a download="{esc(name)}" href="data:{kind};charset=utf-8;base64,{encoded}">{esc(name)}</a>: {esc(what)}'
