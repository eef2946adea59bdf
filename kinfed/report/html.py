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
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import BytecodeCache, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from kinfed.core import cache as code_cache
from kinfed.core import storage
from kinfed.errors import StorageError
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
        return f"data:{kind};charset=utf-8;base64,{base64.b64encode(self.text.encode()).decode()}"


class TemplateCache(BytecodeCache):
    """Compiled templates in the cache folder, as Python keeps compiled modules: compiling takes half of the time of a
    small page. Jinja2 compares the text of a template, so nothing is ever out of date; a damaged file is made again (so
    no `FileSystemBytecodeCache`, which would run it), and a folder that cannot be written costs time, not the page."""

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            content = self._path(bucket).read_bytes()
        except (OSError, StorageError):
            return
        code = code_cache.unsealed(content, bucket.key)
        if code is not None:
            bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = bucket.bytecode_to_string()
        with suppress(StorageError):  # it is compiled again next time
            path = self._path(bucket)
            storage.make_folder(path.parent)
            storage.write_atomically(path, code_cache.sealed(code, bucket.key))

    def _path(self, bucket: Bucket) -> Path:
        """A file by versions of Python and Jinja2, which do not read each other's code."""
        versions = f"{sys.implementation.cache_tag}-jinja2-{jinja2.__version__}"
        return code_cache.cache_folder() / "templates" / versions / f"{bucket.key}.code"


def render(template: str, package: str = REPORT, **values: Any) -> str:
    """The template of the package, or else of the report, with these values."""
    return environment(package).get_template(template).render(values)


@cache
def environment(package: str = REPORT) -> Environment:
    templates = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, REPORT))]), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, bytecode_cache=TemplateCache(),
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
