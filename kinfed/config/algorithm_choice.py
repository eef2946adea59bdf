"""The algorithms of a run: texts, tables or objects become {label: {"method": name, option: value, ...}}.

"local,ditto"  "all,-mocha"  ["local", "weak=ditto"]  {"weak": {"method": "ditto", "lam": 0.1}}
[MyMethod(lam=0.1), "ditto"]  {"mine": MyMethod()}
"""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from kinfed.config.config_fields import plain
from kinfed.core import declared, registry_of

METHOD = "method"  # the key that names the algorithm among its options
OPTIONAL = "optional"  # the key of what "all" names: where it cannot run on this model and data it is left out


def parse_algorithms(value: Any) -> dict[str, dict[str, Any]]:
    """Options by label. ValueError, in one sentence, for what cannot be one."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Iterable):
        value = [value]
    choices = dict(value) if isinstance(value, Mapping) else _from_list(value)
    if not choices:
        raise ValueError("name at least one algorithm")
    return {label: _options(label, choice) for label, choice in choices.items()}


def split_choice(choice: Mapping[str, Any]) -> tuple[str, dict[str, Any], bool]:
    """The name of an algorithm, its options, and whether it is left out where it cannot run."""
    options = {name: value for name, value in choice.items() if name not in (METHOD, OPTIONAL)}
    return choice[METHOD], options, bool(choice.get(OPTIONAL, False))


def _from_list(items: Any) -> dict[str, Any]:
    """Choices from "all", every other registered algorithm that can run, "-mocha", without it, and "label=ditto"."""
    named = list(items)
    others = [name for name in registry_of("algorithm") if name not in named]
    listed = [name for item in named for name in (others if item == "all" else [item])]
    excluded = {item[1:] for item in listed if isinstance(item, str) and item.startswith("-")}
    choices: dict[str, Any] = {}
    for item in listed:
        if not isinstance(item, str):
            _add_object(choices, item, listed)
        elif not item.startswith("-"):
            label, _, method = item.partition("=")
            if label in choices:
                raise ValueError("a method is listed twice; give variants labels of their own: weak=ditto,strong=ditto")
            choices[label] = {METHOD: method or label} | ({} if item in named else {OPTIONAL: True})
    if unknown := excluded - choices.keys():
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be left out, because it is not listed")
    return {label: choice for label, choice in choices.items() if label not in excluded}


def _add_object(choices: dict[str, Any], method: Any, listed: list[Any]) -> None:
    """Add the method under its name, or where that is taken under name-2, name-3 and so on."""
    options = _described(method)
    name = label = options[METHOD]
    labels_in_text = {item.partition("=")[0] for item in listed if isinstance(item, str)}
    number = 1
    while label in choices or label in labels_in_text:
        number += 1
        label = f"{name}-{number}"
    choices[label] = options


def _options(label: str, choice: Any) -> dict[str, Any]:
    if choice is None or isinstance(choice, Mapping):
        options = {METHOD: label, **(choice or {})}
    elif isinstance(choice, str):
        options = {METHOD: choice}
    else:
        options = _described(choice)
    if not isinstance(options[METHOD], str):
        raise ValueError(f"the method of {label} is a name; got {reprlib.repr(options[METHOD])}")
    return {str(name): plain(option, f"{label}.{name}") for name, option in options.items()}


def _described(method: Any) -> dict[str, Any]:
    """An object as its registered name, with the options and the settings of local training that are not defaults."""
    from kinfed.algorithms import Algorithm

    if not isinstance(method, Algorithm):
        hint = "; call the class to make one" if isinstance(method, type) else ""
        raise ValueError(
            f"algorithms are names, or objects of a class derived from kinfed.Algorithm; got {method!r}{hint}"
        )
    options = {METHOD: _registered_name(type(method))}
    known = declared(type(method))
    for name, value in _changed(method).items():
        if name == "training":
            options |= _changed(value)
        elif name in known:
            options[name] = value
        else:
            where = f"{type(method).__name__}.{name}"
            raise ValueError(
                f"{where} is {value!r} and not declared as an option, so that the run could not record it; declare it: "
                f'{name} = option({getattr(type(method), name, value)!r}, "what it is")'
            )
    return options


def _changed(settings: Any) -> dict[str, Any]:
    """Fields of a dataclass whose values are not their defaults."""
    changed = {}
    for field in dataclasses.fields(settings):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = getattr(settings, field.name)
        if field.init and (default is dataclasses.MISSING or value != default):
            changed[field.name] = value
    return changed


def _registered_name(kind: type[Any]) -> str:
    """The name of an algorithm's class; a class without one gets its own name in lower case."""
    algorithms = registry_of("algorithm")
    if (registered := algorithms.name_of(kind)) is not None:
        return registered
    name = kind.__name__.lower()
    if name in algorithms:
        other = algorithms[name].target
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(
                f"there is another algorithm {name}; give yours a name: kinfed.register('algorithm', 'my_{name}', "
                f"{kind.__name__})"
            )
        algorithms.unregister(name)  # the same class, defined again: a notebook's cell was run twice
    algorithms.register(name, kind)
    return name
