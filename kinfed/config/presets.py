"""Presets: settings of methods by the family of the model, such as those that tuning has found.

    kinfed run --preset tuned --model cnn_tutorial --algorithms local,fedavg,ditto
    kinfed.run(preset="tuned:cnn", model=my_network, algorithms="local,ditto")        # the family by name
    kinfed.register("preset", "ours", Path("presets"), summary="tuned on our wards")

What a user says wins: an option of a method over that of the preset, `lr` of the run over all the preset's learning
rates. A configuration holds the values themselves, so that a run does not change when files of presets do.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kinfed.config.algorithm_choice import METHOD, parse_algorithms
from kinfed.config.config_fields import Named, as_named, plugin_files
from kinfed.config.preset_files import in_words, preset_families, preset_methods
from kinfed.core import registry_of
from kinfed.errors import ConfigError, unknown_name


class PresetUse(BaseModel):
    """A preset with the options that it has set in a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    name: str
    family: str | None = None  # None: that of the model, which has none
    model: str | None = None  # whose family it is; None if the family was named
    own_lr: bool = False  # lr of the run was given, so that learning rates of the preset are not used
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)  # by label; empty if the user has set them all
    missing: tuple[str, ...] = ()  # labels without a setting in the preset: they have their defaults

    def notes(self) -> list[str]:
        """Notes for a reader of the results."""
        family, notes = self.family or f"{self.model}, which belongs to no family", []
        if text := "; ".join(f"{label} {in_words(options)}" for label, options in self.options.items() if options):
            notes.append(f"preset {self.name}, for {family}: {text}")
        if self.missing:
            unequal = ", not on equal terms with methods that have one" if text else ""
            notes.append(f"no {self.name} setting for {', '.join(self.missing)} on {family}: defaults{unequal}")
        return notes

    def limited_to(self, labels: Container[str]) -> PresetUse:
        """This one for some of the methods."""
        options = {label: options for label, options in self.options.items() if label in labels}
        missing = tuple(label for label in self.missing if label in labels)
        return self.model_copy(update={"options": options, "missing": missing})

    def joined(self, choice: Any) -> Any:
        """This one with what the same preset has set for further methods, where `choice` records that; `choice` itself
        where it is another preset."""
        named = as_preset(choice)
        if not isinstance(named, Mapping):
            return choice
        if (named.get("name"), named.get("family") or self.family) != (self.name, self.family):
            return choice
        more = PresetUse(**named)
        missing = tuple(dict.fromkeys((*self.missing, *more.missing)))
        return self.model_copy(update={"options": {**self.options, **more.options}, "missing": missing}).model_dump()

    def check_model(self, is_own: bool) -> None:
        """Refuse to guess the family of a user's own network."""
        if is_own and self.model is not None:
            raise ConfigError(
                f"preset {self.name} has settings by the family of the model, and yours has no name; say which family "
                f'it belongs to: preset = "{self.name}:cnn" ({", ".join(preset_families(self.name)) or "it has none"})'
            )


def as_preset(value: Any) -> Any:
    """Name and family from one word: tuned, or tuned:cnn."""
    if isinstance(value, str):
        name, _, family = value.partition(":")
        return {"name": name, "family": family or None}
    return value


def with_preset(values: Mapping[str, Any], default_algorithms: Iterable[str], default_model: str) -> Mapping[str, Any]:
    """The settings of a run with the options of the preset that they name beneath those of their algorithms, and with
    what it has set. Settings that were recorded have them already, but for algorithms that have joined since."""
    choice = as_preset(values.get("preset"))
    if not isinstance(choice, Mapping):
        return values  # none, or nothing that a preset can be, which validation says
    plugin_files(values.get("plugins", ()))  # which may register models and presets
    algorithms = parse_algorithms(values.get("algorithms", default_algorithms))
    use = PresetUse(**choice) if "options" in choice else _new_use(choice, values, default_model)
    new = {label: chosen for label, chosen in algorithms.items() if label not in (*use.options, *use.missing)}
    methods = preset_methods(use.name, use.family) if new else {}
    options, missing = dict(use.options), list(use.missing)
    for label, chosen in new.items():
        if chosen[METHOD] not in methods:
            missing.append(label)
            continue
        preset = methods[chosen[METHOD]]
        options[label] = {key: preset[key] for key in preset if key not in chosen and not (key == "lr" and use.own_lr)}
        if "lr" in options[label]:
            _check_plain_sgd(use.name, label, {**values, **chosen})
    return {
        **values,
        "algorithms": {label: {**options.get(label, {}), **chosen} for label, chosen in algorithms.items()},
        "preset": use.model_copy(update={"options": options, "missing": tuple(missing)}).model_dump(),
    }


def _new_use(choice: Mapping[str, Any], values: Mapping[str, Any], default_model: str) -> PresetUse:
    """A preset that was chosen just now, before it has set anything."""
    name, family, model = str(choice.get("name")), choice.get("family"), None
    if family is None:
        chosen = values.get("model", default_model)
        model = chosen.name if isinstance(chosen, Named) else Named(**as_named(chosen)).name
        family = registry_of("model")[model].facts.get("family")
    elif family not in (families := preset_families(name)):
        raise unknown_name(f"family of preset {name}", str(family), families)
    return PresetUse(name=name, family=family, model=model, own_lr="lr" in values)


def _check_plain_sgd(preset: str, label: str, settings: Mapping[str, Any]) -> None:
    """A learning rate means another thing to another rule of local steps."""
    optimizer, momentum = settings.get("optimizer") or "sgd", float(settings.get("momentum") or 0)
    if optimizer != "sgd" or momentum:
        rule = f"momentum = {momentum:g}" if optimizer == "sgd" else f"optimizer = {optimizer}"
        raise ConfigError(
            f"the learning rates of preset {preset} are for plain SGD, but {label} has {rule}; set lr yourself, or "
            "leave out one of the two"
        )
