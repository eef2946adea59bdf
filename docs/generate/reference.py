"""The reference page, made from the registries: what every method sends and keeps, and every option of everything.

    python docs/generate/reference.py > docs/reference.md

A test compares the page with what this makes."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kinfed.algorithms import ALGORITHMS, Algorithm, AnyAlgorithm, PrivacyProfile, make_algorithm
from kinfed.config import DEFAULTS, HEADINGS, RunConfig
from kinfed.core import OptionDoc, Tree, declared, describe_options, registry_of
from kinfed.data import LocalTraining
from kinfed.deploy import message_types
from kinfed.testing import REFERENCES

HEAD = """# Reference

Made from the registries by `make reference`; do not edit. What the methods are and why is in [methods.md](methods.md).

## Methods

*Down*, *up* and *keeps* are the fields of the messages and of a client's state: what is not named there did not travel.
*Gradients* are those per batch in a round. *Privacy*: what epsilon does not cover, or why the method is refused.
*Robust*: whether a robust average may take the mean's place.

"""
SETTINGS_TEXT = """Names are those of TOML files and of `kinfed.run`; `kinfed init` writes a file with all of them.

"""
TABLE_HEAD = """| name | method | down | up | keeps | gradients | privacy | robust | needs |
|---|---|---|---|---|---|---|---|---|
"""


# Of all but methods: the registry, and its heading.
KINDS = (
    ("dataset", "Data sets"),
    ("partition", "Partitions"),
    ("model", "Models"),
    ("codec", "Codecs"),
    ("mode", "Modes of rounds"),
    ("clock", "Clocks"),
)


_DECISIONS = re.compile("(Decision|Deviation|Difference)s?[.:]")


def reference() -> str:
    """The page as Markdown."""
    parts = [HEAD + method_table(ALGORITHMS)]
    parts.append("\n## Settings of a run\n\n" + SETTINGS_TEXT + _settings_table())
    parts.append(
        "\n## Options of every method\n\n"
        + _options_table([*describe_options(LocalTraining), *describe_options(Algorithm)])
    )
    for name, entry in ALGORITHMS.items():
        own = [doc for doc in entry.describe_options() if doc.name not in declared(Algorithm)]
        table = _options_table(own).rstrip() if own else ""
        paragraphs = [_agreement(name), _decisions(entry.target), _published(entry.facts), table]
        if any(paragraphs):
            parts.append("\n\n".join([f"\n### `{name}`: {entry.title}", *filter(None, paragraphs)]) + "\n")
    for kind, heading in KINDS:
        parts.append(f"\n## {heading}\n")
        for name, entry in registry_of(kind).items():
            parts.append(f"\n### `{name}`\n\n{entry.summary}\n")
            if docs := entry.describe_options():
                parts.append("\n" + _options_table(docs))
    return "".join(parts)


def _agreement(name: str) -> str:
    """What tests have shown of the method beside an independent implementation; "" without one."""
    if name not in REFERENCES:
        return ""
    _, options = REFERENCES[name]
    setting = ", ".join(f"`{option}={value}`" for option, value in options.items())
    return (
        "Agrees to 1e-6 with an [independent implementation](adding-a-method.md#an-independent-implementation)"
        f'{f" at {setting}" if setting else ""}: `kinfed.testing.check_reference("{name}")`.'
    )


def _decisions(target: type) -> str:
    """Where the method deviates from its paper or fills a gap, as the head of its file says it."""
    text = sys.modules[target.__module__].__doc__ or ""
    return " ".join(next((part for part in text.split("\n\n") if _DECISIONS.match(part)), "").split())


def _published(facts: Mapping[str, Any]) -> str:
    """What `as_published` changes, and what no option does."""
    options = ", ".join(f"`{name}={value}`" for name, value in facts.get("published", {}).items())
    words = facts.get("unpublished")
    changed = f"With `as_published`: {options}." if options else ""
    return " ".join(filter(None, [changed, f"Not as published, whatever the options: {words}." if words else ""]))


def _settings_table() -> str:
    rows, declarations = [], declared(RunConfig)
    for heading, names in HEADINGS.items():
        for name in names:
            option = declarations[name].flag or "--" + name.replace("_", "-")
            rows.append(
                _row(heading, f"`{name}`", f"`{option}`", _setting_value(DEFAULTS[name]), declarations[name].text)
            )
    return "| | setting | option | default | what |\n|---|---|---|---|---|\n" + "".join(rows)


def _setting_value(default: Any) -> str:
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default)) or "none"
    return _value(getattr(default, "name", default))


def method_table(names: Iterable[str]) -> str:
    """What these methods send, keep, compute and need."""
    return TABLE_HEAD + "".join(_method_row(name) for name in names)


def _method_row(name: str) -> str:
    algorithm = make_algorithm(name, LocalTraining())
    down, up = message_types(algorithm)
    profile = algorithm.privacy(torch.tensor([100]))
    adds_up = "adds up sums over rows" if getattr(algorithm, "adds_up", False) else ""
    robust = f"no: {algorithm.single_updates or adds_up}" if algorithm.single_updates or adds_up else "yes"
    return _row(
        f"`{name}`",
        f"{ALGORITHMS[name].title}: {ALGORITHMS[name].summary}",
        _fields(down),
        _fields(up),
        _fields(_client_type(algorithm)),
        _gradients(profile),
        _privacy(profile),
        robust,
        ", ".join(sorted(algorithm.traits)),
    )


def _fields(kind: type[Tree]) -> str:
    return ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind)) or "nothing"


def _client_type(algorithm: AnyAlgorithm) -> type[Tree]:
    hints = typing.get_type_hints(type(algorithm).client_update)
    kind: type[Tree] = typing.get_args(hints["return"])[0]
    return kind


def _gradients(profile: PrivacyProfile | None) -> str:
    if profile is None or profile.impossible:
        return ""
    if profile.per_round is None:
        return "no bound"
    return ", ".join(str(k) for k, batches in sorted(profile.per_round.items()) if int(batches[0]))


def _privacy(profile: PrivacyProfile | None) -> str:
    if profile is None:
        return "refused: declares nothing"
    if profile.impossible:
        return f"refused: {profile.impossible}"
    return "; ".join(profile.uncovered) or "covered"


def _options_table(docs: list[OptionDoc]) -> str:
    rows = (_row(f"`{doc.name}`", doc.type, _value(doc.default), doc.bounds, doc.text) for doc in docs)
    return "| option | type | default | range | what |\n|---|---|---|---|---|\n" + "".join(rows)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _value(default: Any) -> str:
    if default is None or default == "":
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


if __name__ == "__main__":
    print(reference(), end="")
