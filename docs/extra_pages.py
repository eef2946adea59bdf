"""Hooks of MkDocs: pages that are made from files outside of docs/, folders in the navigation, doors of the package on
the page about Python, claims inside the site, and wide tables that narrow screens show as cards.

Documents link to files of the repository as a code host shows them (`../examples/halfway.py`). On the site those
files are pages: Markdown as it is, everything else as one block of code. A link to a file that is not there is left
as it is, and MkDocs refuses it."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent
GALLERY = ROOT / "examples" / "gallery"
EXAMPLES = [
    *sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")),
    *(path for path in sorted(GALLERY.glob("*.py")) if path.stem != "draw_all"),
]
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".cff": "yaml"}
CLAIMS = "benchmark/claims.md"
DOORS = ("author", "testing", "data", "deploy", "arena", "records", "serving", "analysis", "updates")
WIDE, WORDY = 5, 12  # columns of a wide table; letters in the mean cell of one that is made of words
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    if "MIKE_DOCS_VERSION" in os.environ:  # elsewhere there is no list of versions to look for
        config.extra["version"] = {"provider": "mike"}
    entries: list[Any] = config.nav or []
    named = set(_paths(entries))
    config.nav = [_expanded(entry, named) for entry in entries]
    return config


def _paths(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [path for part in parts for path in _paths(part)]


def _expanded(entry: Any, named: set[str]) -> Any:
    """An entry of the navigation in which "folder/*.md" is replaced by the pages that are not named elsewhere."""
    if isinstance(entry, dict):
        return {title: _expanded(part, named) for title, part in entry.items()}
    if not isinstance(entry, list):
        return entry
    result: list[Any] = []
    for part in entry:
        if isinstance(part, str) and "*" in part:
            pages = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.glob(part))]
            made = [_page_name(path) for path in EXAMPLES] if part.startswith("gallery/") else []
            result += [page for page in [*made, *pages] if page not in named]
        else:
            result.append(_expanded(part, named))
    return result


def on_files(files: Files, config: MkDocsConfig) -> Files:
    outside = {ROOT / name for name in ALWAYS}
    for file in list(files):
        if file.src_uri.endswith(".md"):
            text = (DOCS / file.src_uri).read_text("utf-8")
            outside |= {path for link in LINK.findall(text) if (path := _outside(file.src_uri, link)) is not None}
    files.append(File.generated(config, CLAIMS, content="# Claims\n"))
    for path in sorted(outside):
        files.append(File.generated(config, _page_name(path), content=_page_text(path)))
    return files


def _outside(page: str, link: str) -> Path | None:
    """The file of the repository that a link of a page leads to; None where it stays in docs/ or there is none."""
    path = Path(os.path.normpath((DOCS / page).parent / link))
    return None if path.is_relative_to(DOCS) or not path.is_file() else path


def _page_name(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.parent == GALLERY or path.suffix == ".ipynb":
        return f"gallery/{path.stem}.md"
    return f"{name.removesuffix('.md').lower()}.md".replace("_", "-") if name.endswith(".md") else f"source/{name}.md"


def _page_text(path: Path) -> str:
    text = path.read_text("utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return text.replace("](docs/", "](")
    if path.suffix == ".ipynb":
        return _notebook_text(json.loads(text))
    if path.parent == GALLERY:
        return _example_text(path.stem, text, name)
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def _example_text(stem: str, source: str, name: str) -> str:
    """An example of the gallery: what its docstring says, its picture, its code."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, _, text = docstring.partition("\n\n")
    code = source.split('"""', 2)[2].strip("\n")
    picture = f"![{title}]({stem}.svg){{ .picture }}\n\n"
    return f"# {title.rstrip('.')}\n\n{text}\n\n{picture}`python {name}`\n\n````python\n{code}\n````\n"


def _notebook_text(notebook: dict[str, Any]) -> str:
    """A notebook with its outputs: texts and code as they are, tables as HTML, pictures within the page."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = re.sub(r"\[!\[(.*?)\]\(\S+\)\]\((\S+)\)", r"[\1](\2)", source)  # pages load no badges
            parts.append(re.sub(r"(?<!:)(\]\((?!http)\S*)\.ipynb\)", r"\1.md)", source))
            continue
        parts.append(f"````python\n{source}\n````")
        for output in cell["outputs"]:
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{data['image/png'].strip()}){{ .picture }}")
            elif "text/html" in data:
                parts.append(re.sub(r"\n\s*\n", "\n", data["text/html"]))
            else:
                text = data.get("text/plain") or "".join(output.get("text", []))
                parts.append(f"````text\n{text.rstrip()}\n````")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        path = _outside(here, match[1])
        return match[1] if path is None else _relative(_page_name(path), here)

    text = LINK.sub(replaced, markdown).replace("(claims.html)", "(claims.md)")
    if here == "api.md":
        text += "\n\n## Doors\n\nWhat else a room of the package offers, and may change before 1.0:"
        text += "".join(map(_door, DOORS))
    if here in {_page_name(ROOT / name) for name in ALWAYS}:
        text = re.sub(r"\]\(([A-Z_]+\.md)\)", lambda match: f"]({_page_name(ROOT / match[1])})", text)
    return text


def _door(room: str) -> str:
    """What a door of the package offers, with the first sentence about each."""
    door = importlib.import_module(f"kinfed.{room}")
    lines = [f"\n\n### kinfed.{room}\n"]
    for name in sorted(door.__all__, key=str.lower):
        thing = getattr(door, name)
        about = (inspect.getdoc(thing) or "") if inspect.isroutine(thing) or inspect.isclass(thing) else ""
        if about and not about.startswith(f"{name}("):  # dataclasses have their fields for one
            first = re.split(r"(?<=[.:;])\s|\n\n", about)[0].rstrip(".:;")
            lines.append(f"- `{name}`: {html.escape(first)}")
    return "\n".join(lines)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _claims() if page.file.src_uri == CLAIMS else re.sub(r"<table>.*?</table>", _labelled, content, flags=re.S)


def _labelled(match: re.Match[str]) -> str:
    """A wide table of words whose cells know their column, so that a narrow screen can show its rows as cards."""
    table = match[0]
    heads = [_words(head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)]
    cells = [_words(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", table, re.S)]
    if len(heads) < WIDE or not cells or sum(map(len, cells)) < WORDY * len(cells):
        return table
    column = iter(heads * (len(cells) // len(heads) + 1))
    labelled = re.sub(r"<td", lambda _: f'<td data-label="{html.escape(next(column))}"', table)
    return labelled.replace("<table>", "<table data-wide>")


def _words(cell: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()


def _claims() -> str:
    """The page of claims inside the site: its style holds for its part of the page, in the site's colours."""
    text = (DOCS / "benchmark" / "claims.html").read_text("utf-8")
    style, body = text.split("<style>", 1)[1].split("</style>", 1)
    light, dark = (re.search(rf"{start}\s*:root (\{{.*?\}})", style, re.S) for start in ("", r"dark\) \{"))
    assert light is not None
    assert dark is not None
    colors = f'.claims {light[1]}\n[data-md-color-scheme="slate"] .claims {dark[1]}'
    style = re.sub(r"^body \{", "& {", style, flags=re.M)
    style = re.sub(r"([\d.]+)rem", lambda size: f"{0.8 * float(size[1]):g}rem", style)  # the site's are 20 pixels
    content = body.split("<body>", 1)[1].split("</body>", 1)[0]
    content = re.sub(r'href="([\w-]+)\.md"', r'href="\1.html"', content)
    return f'<style>{colors}\n.claims.claims {{{style}}}</style><div class="claims">{content}</div>'


def _relative(target: str, page: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")
