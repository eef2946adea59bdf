"""Hooks of MkDocs: pages that are made from files outside of docs/, and folders in the navigation.

Documents link to files of the repository as a code host shows them (`../examples/halfway.py`). On the site those
files are pages: Markdown as it is, everything else as one block of code. A link to a file that is not there is left
as it is, and MkDocs refuses it."""

from __future__ import annotations

import ast
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
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
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
            parts.append(source.replace(".ipynb)", ".md)"))
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

    text = LINK.sub(replaced, markdown)
    if here in {_page_name(ROOT / name) for name in ALWAYS}:
        text = re.sub(r"\]\(([A-Z_]+\.md)\)", lambda match: f"]({_page_name(ROOT / match[1])})", text)
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """claims.html is no page of MkDocs, which leaves its links to Markdown as they are: here pages end in .html."""
    page = Path(config.site_dir) / "benchmark" / "claims.html"
    page.write_text(re.sub(r'href="([\w-]+)\.md"', r'href="\1.html"', page.read_text("utf-8")), "utf-8")


def _relative(target: str, page: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")
