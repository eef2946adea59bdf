"""Things that kinfed knows by name, for `kinfed list` and the documentation."""

from __future__ import annotations

import re
import sys

from kinfed.cli import installed
from kinfed.core import OptionDoc, registry_of
from kinfed.errors import unknown_name

# As `kinfed list` calls them, and as their registries do. Only the registries that are asked for are imported.
KINDS = {
    "algorithms": "algorithm", "datasets": "dataset", "partitions": "partition", "models": "model", "presets": "preset",
}  # fmt: skip
RECIPES = "recipes"
_OTHER_WORDS = {"method": "algorithms", "methods": "algorithms", "recipe": RECIPES}


def kind_named(word: str) -> str:
    """The kind that a word such as "methods" or "model" stands for; other words are returned as they are."""
    return {**_OTHER_WORDS, **{singular: kind for kind, singular in KINDS.items()}}.get(word, word)


def kinds() -> tuple[str, ...]:
    """Kinds that can be listed: recipes only where the package that has them is installed."""
    return (*KINDS, *(kind for kind in (RECIPES,) if kind in installed.names(installed.LISTS)))


def names(kind: str) -> dict[str, str]:
    """Name -> one line, for one kind of thing."""
    if kind == RECIPES:
        return dict(installed.load_list(RECIPES))
    return {name: entry.summary for name, entry in registry_of(KINDS[kind]).items()}


def model_sizes(name: str) -> tuple[str, str]:
    """Parameters of a model, and the examples that they are counted for; empty where it was registered without
    an example."""
    facts = registry_of("model")[name].facts
    if "example" not in facts:
        return "", ""
    trained, frozen = facts.get("trained"), facts.get("frozen", 0)
    if trained is None:
        from kinfed.engine import model_outline

        outline = model_outline(name)
        assert outline is not None  # it has an example
        trained, frozen = outline.trained, outline.frozen
    shape, classes = facts["example"]
    shared = f" + {_short(frozen)} frozen" if frozen else ""
    return f"{_short(trained)}{shared}", f"{'x'.join(map(str, shape))} -> {classes}"


def gradient_path(name: str) -> str:
    """How a model's gradients are computed; "" where it was registered without an example."""
    if known := registry_of("model")[name].facts.get("path"):
        return str(known)
    from kinfed.engine import model_outline

    outline = model_outline(name)
    return "" if outline is None else outline.backend


def _short(count: int) -> str:
    """1,234 as it is, from ten thousand on 12k, then 1.2M."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def preset_rows(name: str) -> tuple[list[str], dict[str, list[str]]]:
    """Families of a preset, and for every method its settings in each of them ("" where there are none)."""
    from kinfed.config import in_words, preset_families, preset_methods

    families = preset_families(name)
    by_family = [preset_methods(name, family) for family in families]
    methods = [method for method in registry_of("algorithm") if any(method in table for table in by_family)]
    return families, {method: [in_words(table.get(method, {})) for table in by_family] for method in methods}


def kind_of(name: str) -> str:
    """The kind of thing that has this name."""
    known: list[str] = [*kinds()]
    for kind in kinds():
        if name in (here := names(kind)):
            return kind
        known += here
    raise unknown_name("name", name, known)


def reference_of(name: str) -> str:
    """The paper of a method: as registered, or else the paragraph with a year in the docstring of its module (which
    begins with the method's name where the module has several)."""
    entry = registry_of("algorithm")[name]
    if entry.reference:
        return entry.reference
    head = sys.modules[entry.target.__module__].__doc__ or ""
    papers = [text for text in head.split("\n\n")[1:] if re.match(r"\S.*\b(19|20)\d\d\b", text, re.S)]
    own = f"`{name}`: "
    papers.sort(key=lambda text: not text.startswith(own))
    return " ".join(papers[0].removeprefix(own).split()) if papers else ""


def owner(kind: str, name: str) -> str:
    """Owner of a thing's options in --set: an algorithm has its own, of the others there is one in a run."""
    return name if kind == "algorithms" else KINDS.get(kind, kind)


def options_of(name: str) -> list[OptionDoc]:
    """The options of a method, data set, partition or model, as --set takes them."""
    kind = kind_of(name)
    if kind == RECIPES:
        return []
    return registry_of(KINDS[kind])[name].describe_options()
