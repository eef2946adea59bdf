"""Pages from Jinja2 templates: the only place where HTML is made of texts.

All templates escape what they are given. `page.html` is the skeleton (styles, scripts, header, footer) that every page
extends, `elements.html` has the macros that pages are composed of: notes, folds, tables, figures, downloads.

A package with templates of its own names itself, and may extend and import those of the report:

    render("recipe.html", package="kinfed_papers", title=..., ...)

A page forbids itself any request and any script but its own (by their hashes, in its content security policy), so
even a string that slipped through unescaped could neither run nor call home.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kinfed.report.drawing.looks import DARK, plural, style_of
from kinfed.report.drawing.svg import palette_rules, still_picture

REPORT = "kinfed.report"
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
        content = self.text.encode(errors="surrogateescape")  # a path that the locale cannot read stays as it is
        return f"data:{kind};charset=utf-8;base64,{base64.b64encode(content).decode()}"


def render(template: str, package: str = REPORT, **values: Any) -> str:
    """The template of the package, or else of the report, with these values."""
    return environment(package).get_template(template).render(values)


@cache
def environment(package: str = REPORT) -> Environment:
    """Make the environment. Every process compiles its templates (0.2 s for all): a cache's writer could run code."""
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, REPORT))]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    templates.filters |= {"plural": plural, "style": style_of}
    # The smallest build of plotly.js that draws all marks of the report, a third of the whole (see its folder).
    plotly = partial(_resource, "plotly-cartesian.min.js", "plotly")
    templates.globals |= {"resource": _resource, "plotly": plotly, "policy": _policy, "dark_colors": DARK}
    templates.globals |= {"still": still_picture, "palette_rules": palette_rules}
    return templates


@cache
def _resource(name: str, folder: str = "templates") -> Markup:
    """A file of ours, word for word."""
    return Markup(files(REPORT).joinpath(folder, name).read_text(encoding="utf-8"))


def _policy(scripts: Sequence[str]) -> Markup:
    """The content security policy that allows these scripts and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return Markup(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
