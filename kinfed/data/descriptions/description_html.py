"""A picture of a federation for notebooks: one row per client, one square per class, drawn as SVG inside HTML.

It needs no script and no style sheet, so that a notebook shows it wherever it is read. Texts have the colour of what
stands around them, in light and dark themes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinfed.data.descriptions.description import Description

MOST_CLIENTS = 40  # rows; more clients are sampled by size
MOST_CLASSES = 60  # columns; more classes are counted and not drawn
_CELL, _LABEL, _BAR, _TOP = 16, 150, 160, 22  # pixels: a square, the names beside it, the longest bar, the head
_COLOUR = "#2598e6"


def description_html(d: Description) -> str:
    lines = [f"<p style='margin: .3em 0'><b>{escape(d.in_words())}</b></p>"]
    rows = _shown(d)
    if len(rows) < d.num_clients:
        lines.append(f"<p style='margin: .3em 0; opacity: .7'>{len(rows)} of {d.num_clients:,} clients, by size</p>")
    lines.append(_picture(d, rows))
    lines += [f"<p style='margin: .3em 0; opacity: .75'>note: {escape(note)}</p>" for note in d.notes]
    return "<div>" + "".join(lines) + "</div>"


def _shown(d: Description) -> list[int]:
    """Places of clients: all, or some from the largest to the smallest."""
    places, sizes = list(range(len(d.names))), d.sizes()
    if len(places) <= MOST_CLIENTS:
        return places
    ordered = sorted(places, key=lambda place: -sizes[place])
    return [ordered[round(i * (len(ordered) - 1) / (MOST_CLIENTS - 1))] for i in range(MOST_CLIENTS)]


def _picture(d: Description, rows: list[int]) -> str:
    classes = d.class_labels if 0 < d.num_classes <= MOST_CLASSES else []
    sizes, grid = d.sizes(), _CELL * len(classes)
    largest = max([sizes[k] for k in rows], default=1) or 1
    width, height = _LABEL + grid + _BAR + 120, _TOP + _CELL * len(rows) + 4
    marks = [_text(_LABEL + grid + 8, _TOP - 8, "training examples", muted=True)]
    marks += [
        _text(_LABEL + _CELL * c + _CELL / 2, _TOP - 8, _cut(label, 2), muted=True, middle=True, title=label)
        for c, label in enumerate(classes)
    ]
    for row, k in enumerate(rows):
        y, total = _TOP + _CELL * row, max(sizes[k], 1)
        marks.append(_text(_LABEL - 8, y + _CELL - 5, _cut(d.names[k], 20), end=True, title=d.names[k]))
        for c, label in enumerate(classes):
            if count := d.train[k][c]:
                said = f"{d.names[k]}: {count} of {total} are {label}"
                marks.append(_square(_LABEL + _CELL * c, y, _CELL - 2, 0.12 + 0.88 * count / total, said))
        marks.append(_square(_LABEL + grid + 8, y + 3, _BAR * sizes[k] / largest, 0.45, f"{sizes[k]:,}", _CELL - 8))
        figure = f"{sizes[k]:,}"
        if d.targets is not None:
            mean, deviation = d.targets[k]
            figure += f", target {mean:.3g} ± {deviation:.3g}"
        marks.append(_text(_LABEL + grid + 14 + _BAR * sizes[k] / largest, y + _CELL - 5, figure, muted=True))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='Training examples of every client by class' "
        f"width='{width}' height='{height}' viewBox='0 0 {width} {height}' fill='currentColor' "
        f"font-family='system-ui, sans-serif' font-size='11' style='max-width: 100%'>{''.join(marks)}</svg>"
    )


def _text(
    x: float, y: float, text: str, *, muted: bool = False, middle: bool = False, end: bool = False, title: str = ""
) -> str:
    anchor = "middle" if middle else "end" if end else "start"
    said = f"<title>{escape(title)}</title>" if title else ""
    opacity = " opacity='.65'" if muted else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{opacity}>{escape(text)}{said}</text>"


def _square(x: float, y: float, width: float, opacity: float, title: str, height: float = _CELL - 2) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height}' rx='2' fill='{_COLOUR}' "
        f"fill-opacity='{opacity:.2f}'><title>{escape(title)}</title></rect>"
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - 1, 1)] + "…"
