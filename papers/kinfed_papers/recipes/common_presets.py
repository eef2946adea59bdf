"""Recipes whose methods have tuned settings: what the page says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kinfed.algorithms import ALGORITHMS, tuning_space
from kinfed_papers.part_records import part_config
from kinfed_papers.recipe import RunPart

PRESET = "tuned"


def preset_notes(parts: Iterable[RunPart]) -> list[str]:
    """What the preset sets for the methods of the parts, once for every family of models."""
    uses = (part_config(part, None, {}).preset for part in parts)
    notes = (note for use in uses if use is not None for note in use.notes())
    return list(dict.fromkeys(note[0].upper() + note[1:] + "." for note in notes))


def own_defaults(method: str) -> Mapping[str, Any]:
    """The options that tuning varies, at their defaults, but for the learning rate: a preset leaves them alone."""
    varied = tuning_space(method)
    return {doc.name: doc.default for doc in ALGORITHMS[method].describe_options() if doc.name in varied}
