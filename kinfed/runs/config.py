"""The configuration of a run: validated, complete, and the same from TOML, command line and Python."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from kinfed.algorithms import ALGORITHMS
from kinfed.data.batches import LocalTraining
from kinfed.errors import ConfigError, unknown_name
from kinfed.privacy.policy import Privacy
from kinfed.server.robust import Rule, make_rule
from kinfed.server.schedule import Schedule

DEFAULT_ALGORITHMS = ("local", "fedavg", "fedavg_smooth", "ditto", "selffl", "fedfomo", "cgpfl")
DEFAULT_STEPS = 20
# Settings that say how to compute, not what: they change neither results nor the identity of a run.
INCIDENTAL = ("workers", "data", "checkpoint_every", "state", "save_models", "pool", "ray_address")


class Named(BaseModel):
    """A thing chosen by name, with its options: "classes" or {name = "classes", classes = 3}."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and "options" not in value:
        return {"name": value.get("name"), "options": {k: v for k, v in value.items() if k != "name"}}
    return value


Choice = Annotated[
    Named, BeforeValidator(_named), PlainSerializer(lambda v: {"name": v.name, **v.options}, return_type=dict)
]


_CHOSEN = ("dataset", "partition", "model", "robust")  # settings that are a Named


def _without_left_out(items: list[str]) -> list[str]:
    left_out = {item[1:] for item in items if item.startswith("-")}
    named = [item for item in items if not item.startswith("-")]
    if unknown := left_out - {item.partition("=")[0] for item in named}:
        raise ValueError(f"{', '.join(sorted(unknown))} cannot be left out of what is not listed")
    return [item for item in named if item.partition("=")[0] not in left_out]


def _methods(value: Any) -> Any:
    """ "local,ditto" or ["local", "weak=ditto"] or {"weak": {"method": "ditto", "lam": 0.1}} -> the last form.

    In a list "all" stands for every registered method, and "-mocha" leaves one out."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        value = _without_left_out([name for item in value for name in (ALGORITHMS if item == "all" else [item])])
        labels = [item.partition("=") for item in value]
        if len({label for label, _, _ in labels}) < len(labels):
            raise ValueError("a method is listed twice; give variants labels of their own: weak=ditto,strong=ditto")
        value = {label: {"method": method or label} for label, _, method in labels}
    if isinstance(value, Mapping):
        value = {label: {"method": label, **(options or {})} for label, options in value.items()}
        if not value:
            raise ValueError("name at least one algorithm")
    return value


# Written as the plain name where there are no options: what runs recorded before models had any reads the same.
ModelChoice = Annotated[
    Named, BeforeValidator(_named), PlainSerializer(lambda v: {"name": v.name, **v.options} if v.options else v.name)
]


class RunConfig(BaseModel):
    """Everything that decides the results of a run. Every field has a default: the default run is the demo."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    dataset: Choice = Named(name="digits")
    partition: Choice | None = None
    clients: int | None = Field(None, ge=1)
    client_column: str | None = None
    label_column: str | None = None
    group_column: str | None = None
    split_column: str | None = None
    validation: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = "auto"
    foreign_targets: bool = False
    model: ModelChoice = Named(name="mlp")
    algorithms: Annotated[dict[str, dict[str, Any]], BeforeValidator(_methods)] = Field(
        default_factory=lambda: list(DEFAULT_ALGORITHMS)  # type: ignore[arg-type]
    )
    rounds: int = Field(40, ge=1)
    participation: float = 0.5
    dropout: float = 0.0
    stragglers: float = 0.0
    seeds: tuple[int, ...] = (0, 1, 2)
    lr: float = 0.05
    batch: int = 20
    steps: int | None = None
    epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    lr_floor: float = 0.0
    augment: str | None = None
    dp_noise: float | None = None
    dp_epsilon: float | None = None
    dp_clip: float | None = None
    dp_delta: float | None = None
    dp_budget: float | None = None
    dp_strict: bool = False
    robust: Choice | None = None
    largest_norm: float = Field(0.0, ge=0)
    pretrain: int = Field(0, ge=0)
    warm_start: int = Field(0, ge=0)
    eval_every: int = Field(5, ge=0)
    checkpoint_every: int | None = Field(None, ge=1)  # rounds; None: as time passes
    device: str = "cpu"
    path: Literal["auto", "stacked", "rows", "vmap"] = "auto"
    pool: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int | None = Field(None, ge=1)
    state: Literal["memory", "disk"] = "memory"
    save_models: bool = True
    data: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, values: Any) -> Any:
        """Without steps or epochs the default number of steps applies, and is written down."""
        if isinstance(values, Mapping) and values.get("steps") is None and values.get("epochs") is None:
            return {**values, "steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ValueError("seeds must be distinct, and at least one")
        if any(not 0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError("seeds are whole numbers from 0 to 2^63 - 1")
        if any(not _is_label(label) for label in self.algorithms):
            raise ValueError("labels of algorithms may hold letters, digits, '-', '_' and '.'")
        if self.ray_address is not None and self.pool != "ray":
            raise ValueError(f"ray_address is for pool = ray; the pool is {self.pool}")
        if self.pool == "ray" and self.state == "disk":
            raise ValueError(
                "state = disk is for the local pool; Ray moves states to disk by itself when memory is short"
            )
        return self

    @property
    def training(self) -> LocalTraining:
        return LocalTraining(
            lr=self.lr, batch=self.batch, steps=self.steps, epochs=self.epochs, momentum=self.momentum,
            weight_decay=self.weight_decay, lr_decay=self.lr_decay, lr_floor=self.lr_floor, augment=self.augment,
            poisson=self.privacy is not None,
        )  # fmt: skip

    @property
    def privacy(self) -> Privacy | None:
        names = ("noise", "epsilon", "clip", "delta", "budget")
        given = {name: value for name in names if (value := getattr(self, f"dp_{name}")) is not None}
        if not given and not self.dp_strict:
            return None
        if self.pretrain:
            raise ConfigError(
                "pre-training sees the data of all clients in one place, which no privacy among them covers; "
                "leave pretrain out"
            )
        if self.warm_start and self.dp_epsilon is not None:
            raise ConfigError(
                "a warm start is common to all methods, and its noise would have to be known before theirs is found "
                "for dp_epsilon; give dp_noise, or leave warm_start out"
            )
        return Privacy(**given, strict=self.dp_strict)

    @property
    def robust_rule(self) -> Rule | None:
        return None if self.robust is None else make_rule(self.robust.name, self.robust.options)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.participation, self.dropout, self.stragglers)

    def dump(self) -> dict[str, Any]:
        """Plain values, for config.json."""
        values: dict[str, Any] = json.loads(self.model_dump_json())
        return values

    def fingerprint(self, extra: Mapping[str, Any] | None = None) -> str:
        """Identity of the results: equal for configurations that give equal results."""
        decisive = {k: v for k, v in self.dump().items() if k not in INCIDENTAL}
        for name in ("pretrain", "robust", "largest_norm"):
            if not decisive[name]:
                del decisive[name]  # runs from before it existed keep their identity
        text = json.dumps([decisive, dict(extra or {})], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_label(label: str) -> bool:
    return bool(label) and all(c.isalnum() or c in "-_." for c in label) and not label.startswith(".")


def make_config(
    file: Path | None = None, settings: Mapping[str, Any] | None = None, sets: tuple[str, ...] = ()
) -> RunConfig:
    """Configuration from a TOML file, overridden by `settings`, then by "owner.option=value" texts.

    The owner is `dataset`, `partition`, `model`, the label of an algorithm, or absent for a setting of the run."""
    values: dict[str, Any] = _read_toml(file) if file is not None else {}
    values |= {k: v for k, v in (settings or {}).items() if v is not None}
    if "algorithms" in values:
        try:
            values["algorithms"] = _methods(values["algorithms"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    for text in sets:
        _apply(values, text)
    unknown = set(values) - set(RunConfig.model_fields)
    if unknown:
        raise unknown_name("setting", sorted(unknown)[0], RunConfig.model_fields)
    try:
        config = RunConfig(**values)
    except ValidationError as error:
        raise ConfigError(_first_complaint(error)) from error
    _ = config.training, config.schedule, config.privacy, config.robust_rule  # refuse bad values before anything runs
    return config


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _apply(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes owner.option=value, such as ditto.lam=0.5; got {text!r}")
    value = _literal(raw.strip())
    owner, dot, option = key.strip().rpartition(".")
    if not dot:
        values[option] = value
        return
    if owner in _CHOSEN:
        current = values.get(owner) or RunConfig.model_fields[owner].default
        if current is None:
            raise ConfigError(f"--set {key} needs --{owner} to say which one it is for")
        chosen = current if isinstance(current, Named) else Named(**_named(current))
        values[owner] = {"name": chosen.name, **chosen.options, option: value}
        return
    methods = values.setdefault("algorithms", _methods(list(DEFAULT_ALGORITHMS)))
    if owner not in methods:
        raise unknown_name("owner in --set", owner, [*_CHOSEN, *methods])
    methods[owner] = {**methods[owner], option: value}


def _literal(text: str) -> Any:
    """A TOML value where the text is one (0.5, true, [1, 2]), otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _first_complaint(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("constrained-float", "float"))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}; got {first['input']!r}" if where else message
