"""Methods as their papers have them: the setting `as_published`.

    kinfed run --algorithms qffl,apple,fedavg --as-published

Some options have other defaults than the paper, for a reason that the method's file gives. A method's registration
says what the paper has (`published`, options with their values), and in words what no option makes as the paper has it
(`unpublished`). The setting writes the options into the configuration, beneath those that the user has set for the
method and above those of a preset, so that a run does not change when a registration does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kinfed.config.algorithm_choice import parse_algorithms, split_choice
from kinfed.config.config_fields import plain, plugin_files
from kinfed.config.preset_files import in_words
from kinfed.core import registry_of
from kinfed.errors import ConfigError


def with_published(values: Mapping[str, Any], default_algorithms: Iterable[str]) -> Mapping[str, Any]:
    """The settings of a run with the options of the papers beneath those of its algorithms."""
    plugin_files(values.get("plugins", ()))  # which may register methods
    try:
        algorithms = parse_algorithms(values.get("algorithms", default_algorithms))
    except ValueError as error:
        raise ConfigError(f"algorithms: {error}") from error
    return {**values, "algorithms": {label: {**_published(choice), **choice} for label, choice in algorithms.items()}}


def is_as_published(choice: Mapping[str, Any]) -> bool:
    """Whether an algorithm has all options of its paper where the defaults are others; False if none are."""
    published = _published(choice)
    return bool(published) and not _unlike(choice, published)


def published_notes(algorithms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Notes for a reader of the results, one for each algorithm whose defaults are not its paper's."""
    notes = []
    for label, choice in algorithms.items():
        published, words = _published(choice), _entry(choice).facts.get("unpublished")
        unlike = _unlike(choice, published)
        if unlike:
            notes.append(f"{label} is not as published, with {in_words(unlike)}")
        elif published:
            notes.append(f"{label} is as published, with {in_words(published)}" + (f", but: {words}" if words else ""))
        elif words:
            notes.append(f"{label} is not as published: {words}")
    return notes


def _published(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of the paper of the variant that this choice is: fedamp with attention = cosine is heurfedamp."""
    return _entry(choice).facts.get("published") or {}


def _entry(choice: Mapping[str, Any]) -> Any:
    """The registration of the variant."""
    method, options, _ = split_choice(choice)
    algorithms = registry_of("algorithm")
    values = {**algorithms[method].preset, **options}
    for other in algorithms.values():
        if other.location == algorithms[method].location and other.preset and other.preset.items() <= values.items():
            return other
    return algorithms[method]


def _unlike(choice: Mapping[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the paper that the choice does not have."""
    return {
        name: value
        for name, value in published.items()
        if name not in choice or plain(choice[name], name) != plain(value, name)
    }
