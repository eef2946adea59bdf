"""The configuration of a run: validated, complete, and the same from TOML, command line and Python.

The settings are declared in kinfed.config.setting_groups. This module is imported for `--help` and needs no torch: what
a setting means to the engine is imported where it is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from kinfed.config import setting_groups as groups
from kinfed.config.config_fields import Named, as_named, recordable
from kinfed.config.excludes import Where, refuse_exclusions
from kinfed.config.presets import with_preset
from kinfed.config.published import with_published
from kinfed.config.setting_groups import DEFAULT_ALGORITHMS, DEFAULT_MODEL, DEFAULT_STEPS, DEFAULTS
from kinfed.core import convert, declared, plugins
from kinfed.data import LocalTraining, TrainingSettings
from kinfed.errors import ConfigError, unknown_name
from kinfed.privacy import Privacy
from kinfed.updates import SecureSettings, UserPrivacy

if TYPE_CHECKING:
    from kinfed.server import Schedule, Speeds
    from kinfed.updates import Codec, Rule, StalenessRule

# Settings that say how and where to compute, not what: they change neither results nor the identity of a run. Of
# plugins the content counts, not the place.
NON_RESULT_SETTINGS = (
    "plugins", "workers", "data", "checkpoint_every", "state", "save_models", "pool", "ray_address", "ray_gpus",
    "accept", "client_rounds",
)  # fmt: skip
# Settings that came later: by default they leave the identity of a run as it was before there were any.
LATER_SETTINGS = (
    "person_column", "order_column", "encoding", "user_at_nodes", "user_conspirators", "models", "as_published",
)  # fmt: skip
_OF_ONE_POOL = ("ray_address", "ray_gpus", "workers", "state")  # mean nothing, or something else, on another pool


# The groups in reverse: Python collects the fields of bases from the last to the first.
@dataclass(frozen=True, init=False, repr=False)
class RunConfig(
    groups.PlaceSettings, groups.EvaluationSettings, groups.RobustnessSettings, groups.CommunicationSettings,
    groups.ProtectionSettings, groups.StepSettings, groups.LossSettings, groups.RoundSettings, groups.MethodSettings,
    groups.ModelSettings, groups.DataSettings, groups.PluginSettings,
):  # fmt: skip
    """Everything that decides the results of a run. Every setting has a default: the default run is the demo.

    Example:

        >>> config = kinfed.RunConfig(algorithms="local,ditto", rounds=10, lr=0.01)
        >>> config.rounds, config.training.lr, config.changed["lr"]
        (10, 0.01, 0.01)
    """

    def __init__(self, **settings: Any) -> None:
        """Settings by name, as they were typed or as they are. A preset becomes options of methods. Without steps or
        epochs the default number of steps applies, and is written down."""
        if unknown := settings.keys() - declared(RunConfig).keys():
            raise unknown_name("setting", min(unknown), declared(RunConfig))
        if convert(RunConfig, "as_published", settings.get("as_published") or False):
            settings = dict(with_published(settings, DEFAULT_ALGORITHMS))
        values = dict(with_preset(settings, DEFAULT_ALGORITHMS, DEFAULT_MODEL))
        if values.get("steps") is None and values.get("epochs") is None:
            values["steps"] = DEFAULT_STEPS
        for name, default in DEFAULTS.items():
            object.__setattr__(self, name, convert(RunConfig, name, values.get(name, default)))
        self._take_first_model()
        self._check_values()
        refuse_exclusions(self.settings)

    def __repr__(self) -> str:
        """The methods by name, and what else is not as it is by default."""
        changed = {name: value for name, value in self.changed.items() if (name, value) != ("steps", DEFAULT_STEPS)}
        fields = {"algorithms": [], **changed} | {"algorithms": list(self.algorithms)}
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def _take_first_model(self) -> None:
        """Let `model` be the first of several architectures: the server's."""
        if not self.models:
            return
        first = next(iter(self.architectures.values()))
        if self.model not in (DEFAULTS["model"], first):
            raise ConfigError(f"model = {self.model.name}: the models of all clients are in models; leave model out")
        object.__setattr__(self, "model", first)

    def _check_values(self) -> None:
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ConfigError("seeds must be distinct, and at least one")
        if any(not 0 <= seed < 2**63 for seed in self.seeds):
            raise ConfigError("seeds are whole numbers from 0 to 2^63 - 1")
        for label in self.algorithms:
            if not _is_label(label):
                raise ConfigError(
                    f"labels of algorithms hold letters, digits, '-', '_' and '.'; got {label!r}. Options are given "
                    "as --set ditto.lam=0.5"
                )
        if self.ray_address is not None and self.pool != "ray":
            raise ConfigError(f"ray_address is for pool = ray; the pool is {self.pool}")
        if self.ray_gpus and (self.pool, self.device) != ("ray", "cuda"):
            raise ConfigError(f"ray_gpus is for pool = ray and device = cuda; these are {self.pool} and {self.device}")
        if self.pool == "ray" and self.device != "cpu" and not self.ray_gpus:
            raise ConfigError(
                f"Ray sets no GPU aside unless it is asked to: give ray_gpus with device = {self.device}, or use cpu"
            )

    @property
    def model_in_words(self) -> str:
        """The model by name, or the models of all architectures."""
        named = (f"{label} {model.name}" for label, model in self.architectures.items())
        return f"models {', '.join(named)}" if self.models else f"model {self.model.name}"

    @property
    def architectures(self) -> dict[str, Named]:
        """The models of several architectures by name; empty if all clients have one."""
        return {name: Named(**as_named(choice)) for name, choice in (self.models or {}).items()}

    def model_of(self, architecture: str | None) -> Named:
        """The model of an architecture; the only one, or the server's, if none is named."""
        return self.model if architecture is None else self.architectures[architecture]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in declared(RunConfig)}

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that differ from their defaults, as plain values."""
        return {name: _plain(value) for name, value in self.settings.items() if value != DEFAULTS[name]}

    @property
    def training(self) -> LocalTraining:
        values = {name: getattr(self, name) for name in declared(TrainingSettings)}
        return LocalTraining(**values, poisson=self.privacy is not None)

    @property
    def privacy(self) -> Privacy | None:
        values = self._given("dp_", Privacy)
        return Privacy(**values) if values else None

    @property
    def user_privacy(self) -> UserPrivacy | None:
        values = self._given("user_", UserPrivacy)
        return UserPrivacy(**values) if values else None

    def _given(self, prefix: str, kind: type[Any]) -> dict[str, Any]:
        """The options of a group whose names have a prefix among the settings, where they are set."""
        values = {name: getattr(self, prefix + name) for name in declared(kind)}
        return {name: value for name, value in values.items() if value != DEFAULTS[prefix + name]}

    @property
    def secure(self) -> SecureSettings | None:
        return SecureSettings(self.secure_range, self.secure_least) if self.secure_sum else None

    @property
    def robust_rule(self) -> Rule | None:
        from kinfed.updates import RULES

        return None if self.robust is None else RULES[self.robust.name].make(self.robust.options)

    @property
    def codec(self) -> Codec | None:
        from kinfed.updates import CODECS

        return None if self.compress is None else CODECS[self.compress.name].make(self.compress.options)

    @property
    def speeds(self) -> Speeds | None:
        """Speeds of clients, with a clock; asynchronous rounds have one in any case."""
        from kinfed.server import CLOCKS

        if self.clock is None and self.staleness_rule is None:
            return None
        clock = self.clock or Named(name="lognormal")
        speeds: Speeds = CLOCKS[clock.name].make(clock.options)
        return speeds

    @property
    def staleness_rule(self) -> StalenessRule | None:
        """How asynchronous updates count; None if rounds are synchronous."""
        from kinfed.updates import MODES, StalenessRule

        rule = MODES[self.mode.name].make(self.mode.options, f"mode {self.mode.name}")
        return rule if isinstance(rule, StalenessRule) else None

    @property
    def round_numbers(self) -> range:
        """Numbers of the rounds of every method, which follow those of a warm start."""
        return range(self.warm_start + 1, self.warm_start + self.rounds + 1)

    @property
    def schedule(self) -> Schedule:
        from kinfed.server import Schedule

        return Schedule(self.participation, self.dropout, self.stragglers, self.sampling)

    def fixed_options(self, label: str) -> dict[str, Any]:
        """Options of a method that were set for it, without those of a preset."""
        preset = {} if self.preset is None else self.preset.options.get(label, {})
        return {name: value for name, value in self.algorithms[label].items() if name not in preset}

    def check(self, where: Where = "") -> None:
        """Refuse values that training, privacy, codec, robust rule or clock do not take, and settings that are not
        taken together in this place."""
        refuse_exclusions(self.settings, where)
        for part in ("training", "privacy", "user_privacy", "codec", "robust_rule", "speeds"):
            getattr(self, part)  # each checks its values when it is made
        if self.user_privacy is not None:
            self.user_privacy.check_sums(self.secure)

    def dump_for_pool(self, pool: str | None) -> dict[str, Any]:
        """What `dump` gives, to go on with on this pool (None: the same): without settings of the one before."""
        moves = pool is not None and pool != self.pool
        return {name: value for name, value in self.dump().items() if not (moves and name in _OF_ONE_POOL)}

    @property
    def code(self) -> dict[str, str]:
        """Digests of the code of plugins, by names for readers."""
        return dict(zip(plugins.content_names(self.plugins), map(plugins.digest_of, self.plugins), strict=True))

    def dump(self) -> dict[str, Any]:
        """Plain values, for config.json; `make_config` makes an equal configuration from them."""
        return {name: recordable(_plain(value)) for name, value in self.settings.items()}

    def fingerprint(self, extra: Mapping[str, Any] | None = None) -> str:
        """Identity of the results: equal for configurations that give equal results. `extra` are digests of what else
        decides them."""
        return run_fingerprint(self.dump(), {**self.code, **(extra or {})})


def run_fingerprint(settings: Mapping[str, Any], contents: Mapping[str, Any]) -> str:
    """Identity of a run from its recorded settings, and from the digests of data and code."""
    later = [name for name in LATER_SETTINGS if settings.get(name) == DEFAULTS[name]]
    decisive = {name: value for name, value in settings.items() if name not in (*NON_RESULT_SETTINGS, *later)}
    # The empty list stood for plugins once; without plugins a run keeps the fingerprint that it had.
    text = json.dumps([decisive, [], dict(contents)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        return {"name": value.name, **value.options}
    return value.model_dump() if isinstance(value, BaseModel) else value


def _is_label(label: str) -> bool:
    return bool(label) and all(c.isalnum() or c in "-_." for c in label) and not label.startswith(".")
