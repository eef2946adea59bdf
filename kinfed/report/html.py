"""Pages from Jinja2 templates: the only place where HTML is made of texts.

All templates escape what they are given. `page.html` is the skeleton (styles, scripts, header, footer) that every page
extends, `elements.html` has the macros that pages are composed of: notes, folds, tables, figures, downloads.

A package with templates of its own names itself, and may extend and import those of the report:

    render("recipe.html", package="kinfed.reproduce", title=..., ...)

A page forbids itself any request and any script but its own (by their hashes, in its content security policy), so
even a string that slipped through unescaped could neither run nor call home.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kinfed.report.chart import Figure
from kinfed.report.formats import plural
from kinfed.report.palette import DARK, Style

REPORT = "kinfed.report"
MAX_BUTTONS = 6  # more choices than this are offered as a list to open
MAX_DOWNLOAD = 1_500_000  # characters in a data: link; browsers refuse much longer ones


@dataclass(frozen=True)
class Download:
    """A file that a page carries inside itself, offered as a link."""

    name: str
    description: str
    text: str

    @property
    def href(self) -> str | None:
        """None for a file too long to be kept in a page."""
        if len(self.text) > MAX_DOWNLOAD:
            return None
        kind = "text/csv" if self.name.endswith(".csv") else "text/plain"
        return f"data:{kind};charset=utf-8;base64,{base64.b64encode(self.text.encode()).decode()}"


def render(template: str, package: str = REPORT, **values: Any) -> str:
    """The template of the package, or else of the report, with these values."""
    return environment(package).get_template(template).render(values)


@cache
def environment(package: str = REPORT) -> Environment:
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, REPORT))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    made.filters["plural"] = plural
    made.globals |= {"resource": _resource, "plotly": _plotly, "policy": _policy, "dark_colors": DARK}
    return made


@cache
def _resource(name: str) -> Markup:
    """A file of ours beside the templates, word for word."""
    return Markup(files(REPORT).joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    return Markup(get_plotlyjs())


def _policy(scripts: Sequence[str]) -> Markup:
    """The content security policy that allows these scripts and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return Markup(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


# Pieces as strings, until all pages are templates.


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
        f'<script type="application/json">{inline_json(figure.payload)}</script>'
        + (f"<figcaption>{esc(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )


def choice(figure: Figure, label: str) -> str:
    """Lets the reader choose a view; it applies to all figures of the section that have it."""
    if len(figure.views) < 2:
        return ""
    chosen = figure.first_view
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


def document(
    *, title: str, kicker: str, heading: str, lead: str, links: Sequence[tuple[str, str]], main: str,
    footer: Sequence[str], figures: bool = True,
) -> str:  # fmt: skip
    """A whole page. `lead` and `main` are HTML, all other texts are plain; `links` go to the ids of sections."""
    return render(
        "fragments.html", title=title, kicker=kicker, heading=heading, lead=Markup(lead), links=links,
        main=Markup(main), footer=footer, figures=figures,
    )  # fmt: skip
