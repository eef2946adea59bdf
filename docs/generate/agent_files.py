"""llms.txt and AGENTS.md, from the navigation of the site, the first sentences of its pages and CONTRIBUTING.md.

python docs/generate/agent_files.py        writes both; a test compares them
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_LONGEST = 220  # characters of the sentence about a page


class _Loader(yaml.SafeLoader):
    """mkdocs.yml may name Python objects; they are not made."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def sections() -> Iterator[tuple[str, list[tuple[str, Path]]]]:
    """Sections of the navigation with titles and files of their pages."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Loader)["nav"]
    for entry in navigation:
        ((title, parts),) = entry.items()
        pages = [pair for part in (parts if isinstance(parts, list) else [{title: parts}]) for pair in _pages(part)]
        yield title, pages


def _pages(part: Any) -> list[tuple[str, Path]]:
    name, file = next(iter(part.items())) if isinstance(part, dict) else ("", part)
    path = DOCS / str(file)
    return [(name or _title(path), path)] if "*" not in str(file) and path.is_file() else []


def _title(path: Path) -> str:
    return next(line.removeprefix("# ") for line in path.read_text("utf-8").splitlines() if line.startswith("# "))


def sentence(path: Path) -> str:
    """The first sentence of a page, without markup."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text("utf-8"), flags=re.S)
    blocks = [block for block in text.split("\n\n") if block.strip() and not re.match(r"\s*(\d+\.|[#`<!|\-\[])", block)]
    if not blocks:
        return ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(blocks[0].split()))
    plain = re.sub(r"[*`]", "", plain)
    first = re.split(r"(?<=[.?!]) ", plain)[0]
    return first if len(first) <= _LONGEST else first[: _LONGEST - 1].rsplit(" ", 1)[0] + " …"


def llms() -> str:
    """The map of the documentation for language models (llmstxt.org)."""
    lines = ["# kinfed", "", f"> {sentence(DOCS / 'index.md').rstrip('.')}.", ""]
    for title, pages in sections():
        if pages:
            lines += [f"## {title}", ""]
            lines += [f"- [{name}](docs/{path.relative_to(DOCS).as_posix()}): {sentence(path)}" for name, path in pages]
            lines.append("")
    return "\n".join(lines)


def agents() -> str:
    """Instructions for programs that change this repository: what people are told, and where things are."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    parts = re.split(r"^## ", contributing, flags=re.M)
    wanted = [part for part in parts if part.startswith("What a change needs")]
    commands = parts[0].partition("\n")[2].strip()
    made_of = (
        "Made from CONTRIBUTING.md by docs/generate/agent_files.py; what holds for people holds here. llms.txt maps\n"
        "the documentation, docs/glossary.md has the words, and every room's `__init__.pyi` the names others may use."
    )
    parts = ["# For agents", made_of, "## Commands", commands, *(f"## {part.strip()}" for part in wanted)]
    return "\n\n".join(parts) + "\n"


def files() -> dict[Path, str]:
    return {ROOT / "llms.txt": llms(), ROOT / "AGENTS.md": agents()}


if __name__ == "__main__":
    for place, content in files().items():
        place.write_text(content, "utf-8")
