"""Registries of what kinfed knows by name: algorithms, data sets, partitions, models, metrics, rules and panels.

    MODELS: Registry[Builder] = Registry("model")
    MODELS.register("mlp", mlp, summary="one hidden layer of 128")

    @MODELS.register("mine", summary="of my own")          # the same as a decorator
    def mine(shape, classes): ...

A target may be given as text, "package.module:name": it is imported when it is first used, so that listing names costs
no imports. Names of installed plugins (entry points of the group `kinfed.plugins`) are there at the first look-up;
files are loaded by kinfed.core.plugins.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar, overload

from kinfed.core.options import NoOptions, OptionDoc, Range, declared, describe_options, make_options
from kinfed.errors import ConfigError, KinfedError, unknown_name

T = TypeVar("T")

PLUGIN_GROUP = "kinfed.plugins"


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing: what `kinfed list` says of it, and how to get at it."""

    name: str
    location: T | str = field(repr=False)  # the target, or where to import it from
    title: str = ""  # as tables and figures print it; defaults to the name
    summary: str = ""  # one line
    reference: str = ""  # authors, title, year, where
    options_location: type[Any] | str | None = field(default=None, repr=False)  # dataclass of options; None: the target
    preset: Mapping[str, Any] = field(default_factory=dict)  # options that make this variant of the target
    tuning: Mapping[str, Range] | None = field(default=None, repr=False)  # None: as the options declare it
    facts: Mapping[str, Any] = field(default_factory=dict)  # what only this kind of entry has, by name

    @property
    def target(self) -> T:
        return imported(self.location)  # type: ignore[no-any-return]  # what was registered under this name

    @property
    def options(self) -> type[Any]:
        """The dataclass whose fields are the options."""
        if self.options_location is not None:
            return imported(self.options_location)  # type: ignore[no-any-return]
        target = self.target
        return target if isinstance(target, type) and hasattr(target, "__dataclass_fields__") else NoOptions

    def make(self, options: Mapping[str, Any] | None = None, owner: str = "") -> Any:
        """Build the target, a dataclass of options, with these over its preset; types and ranges are checked."""
        target: Any = self.target
        return make_options(target, {**self.preset, **(options or {})}, owner or self.name)

    def describe_options(self) -> list[OptionDoc]:
        return describe_options(self.options, self.preset)

    @property
    def space(self) -> dict[str, Range]:
        """Ranges that `kinfed tune` varies."""
        if self.tuning is not None:
            return dict(self.tuning)
        ranges = {name: declaration.tune for name, declaration in declared(self.options).items()}
        return {name: tune for name, tune in ranges.items() if tune is not None and name not in self.preset}


def imported(location: Any) -> Any:
    """Import what "package.module:name" stands for; anything but text stands for itself."""
    if not isinstance(location, str):
        return location
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(Mapping[str, Entry[T]]):
    """Entries by name, in the order in which they were registered. An unknown name is an error that names its like."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # as errors call it: "algorithm", "data set"
        self._entries: dict[str, Entry[T]] = {}

    @overload
    def register(self, name: str, target: T | str, **about: Any) -> T | str: ...
    @overload
    def register(self, name: str, target: None = None, **about: Any) -> Callable[[T], T]: ...
    def register(self, name: str, target: T | str | None = None, **about: Any) -> Any:
        """Add an entry, or make a decorator that does.

        `about`: title, summary, reference, preset, options (a dataclass, where the target is not one itself), space
        (what tuning varies); anything else is kept among the entry's facts."""
        if target is None:
            return lambda actual: self.register(name, actual, **about)
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            raise ConfigError(f"names in the registry ({self.kind}) are made of letters, digits, _ and -; got {name!r}")
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
        self.check(name, about)
        title, summary = about.pop("title", "") or name, about.pop("summary", "") or _first_line(target)
        reference, options, space = about.pop("reference", ""), about.pop("options", None), about.pop("space", None)
        preset = MappingProxyType(dict(about.pop("preset", None) or {}))
        facts = MappingProxyType(about)  # what is left
        self._entries[name] = Entry(name, target, title, summary, reference, options, preset, space, facts)
        return target

    def check(self, name: str, about: Mapping[str, Any]) -> None:
        """Refuse what an entry of this kind cannot be; a registry of things with facts of their own says what."""

    def unregister(self, name: str) -> None:
        """Forget an entry, for tests and for trying out a plugin again and again."""
        self._entries.pop(name, None)

    def name_of(self, target: object) -> str | None:
        """The first name under which a target was registered."""
        location = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
        plain = ((name, entry.location) for name, entry in self.items() if not entry.preset)
        return next((name for name, own in plain if own is target or (isinstance(own, str) and own == location)), None)

    def is_own(self, name: str) -> bool:
        """Whether kinfed itself has registered this name."""
        location = self[name].location
        module = location if isinstance(location, str) else getattr(location, "__module__", None) or ""
        return module.startswith("kinfed.")

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            load_installed_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_installed_plugins()
        return iter(list(self._entries))

    def __len__(self) -> int:
        load_installed_plugins()
        return len(self._entries)


def _first_line(target: object) -> str:
    text = "" if isinstance(target, str) else getattr(target, "__doc__", None) or ""
    return text.strip().split("\n")[0]


_installed_are_loaded = False


def load_installed_plugins() -> None:
    """Import what installed packages offer under the entry-point group `kinfed.plugins`; once per process."""
    global _installed_are_loaded
    if _installed_are_loaded:
        return
    _installed_are_loaded = True  # first: a plugin that looks names up must not load itself again
    from importlib import metadata  # which takes its time, and completing a word needs no plugins

    for point in metadata.entry_points(group=PLUGIN_GROUP):
        try:
            point.load()
        except KinfedError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the installed plugin {point.name} ({point.value}) cannot be loaded: {error!r}; repair or uninstall it"
            ) from error


# Where the registry of each kind of thing is. Imported when it is first needed: these rooms lie above this one.
REGISTRIES = {
    "algorithm": "kinfed.algorithms:ALGORITHMS",
    "dataset": "kinfed.data.sources:SOURCES",
    "partition": "kinfed.data.sources:PARTITIONS",
    "model": "kinfed.engine:MODELS",
    "extension": "kinfed.algorithms.algorithm_names:EXTENSIONS",
    "loss": "kinfed.engine:LOSSES",
    "metric": "kinfed.engine:METRICS",
    "robust rule": "kinfed.updates:RULES",
    "stage": "kinfed.updates:STAGES",
    "codec": "kinfed.updates:CODECS",
    "mode": "kinfed.updates:MODES",
    "clock": "kinfed.server:CLOCKS",
    "preset": "kinfed.config:PRESETS",
    "panel": "kinfed.report:PANELS",
}
_OTHER_WORDS = {"method": "algorithm", "data set": "dataset", "rule": "robust rule"}


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind of thing, such as "algorithm" or "model": a key of REGISTRIES."""
    kind = _OTHER_WORDS.get(kind, kind)
    if kind not in REGISTRIES:
        raise unknown_name("kind of thing", kind, REGISTRIES)
    return imported(REGISTRIES[kind])  # type: ignore[no-any-return]  # all of them are registries


def register(kind: str, name: str, target: Any = None, **about: Any) -> Any:
    """Add a thing of your own under a name, or make a decorator that does.

    - `kind`: "algorithm", "dataset", "partition", "model", "metric", "codec", "robust rule", "preset" ...
    - `target`: the class or function; where it is absent, a decorator is returned.
    - `about`: title, summary, reference and others; see `Registry.register`.

    Example:

        >>> @kinfed.register("model", "linear", summary="a model of my own")
        ... def linear(shape, classes):
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
        >>> kinfed.run(model="linear", algorithms="fedavg", clients=3, rounds=1, seeds=[0]).config.model.name
        'linear'
    """
    return registry_of(kind).register(name, target, **about)
