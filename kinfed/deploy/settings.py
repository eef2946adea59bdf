"""What the operator of a deployment configures: `[tool.flwr.app.config]` of the app's pyproject.toml.

Flower hands the same flat table to the server and to every node, and `flwr run --run-config` overrides it. It knows no
null, so 0 and "" stand for "not set". Keys may be written with dashes or underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kinfed.algorithms import changes_data, make_algorithm
from kinfed.algorithms.base import Algorithm
from kinfed.errors import ConfigError, unknown_name
from kinfed.runs.config import RunConfig, make_config

STANDARD, NONE = "standard", "none"

# Settings of the run (runs.config) that mean here what they mean there, and those of them for which 0 is "not set".
_PASSED_ON = (
    "model", "rounds", "participation", "lr", "batch", "steps", "epochs", "momentum", "weight_decay", "lr_decay",
    "augment", "dp_noise", "dp_epsilon", "dp_clip", "dp_delta", "dp_budget", "dp_strict", "eval_every", "robust",
)  # fmt: skip
_ZERO_IS_UNSET = ("steps", "epochs", "augment", "robust", "dp_noise", "dp_epsilon", "dp_clip", "dp_delta", "dp_budget")
# How to run, not what to compute: they may change between the start of a run and its resumption.
_INCIDENTAL = ("out", "quorum", "deadline", "wait", "patience", "rounds")


class Deployment(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    out: str = "runs/deployment"
    """Folder of the run on the server's machine; a new `flwr run` with the same folder resumes it."""
    clients: str = "3"
    """How many clients there are, or their names separated by commas."""
    quorum: int = Field(0, ge=0)
    """Updates without which a round does not count; 0: of more than half of those called."""
    deadline: float = Field(600.0, gt=0)
    """Seconds that a round waits for its clients."""
    wait: float = Field(600.0, gt=0)
    """Seconds that the start waits for all clients to appear."""
    patience: int = Field(3, ge=1)
    """Rounds in a row without quorum after which the run stops."""

    method: str = "ditto"
    options: str = ""
    """Options of the method and, after "model.", of the model: "lam=0.5 model.width=8"."""
    model: str = "mlp"
    rounds: int = Field(20, ge=1)
    seed: int = 0
    participation: float = 1.0
    lr: float = 0.05
    batch: int = 20
    steps: int = Field(0, ge=0)
    epochs: int = Field(0, ge=0)
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    augment: str = ""
    eval_every: int = Field(5, ge=0)

    classes: str = "10"
    """How many classes (labels 0, 1, ...), or their names separated by commas."""
    label_column: str = "label"
    features: str = ""
    """Feature columns separated by commas; empty: all columns without another role, which must agree at all nodes."""
    scaling: str = STANDARD
    """standard: mean 0 and variance 1 over all clients (two sums per feature leave every node); none; or a number to
    divide by."""
    test_fraction: float = Field(0.25, ge=0, lt=1)
    validation: float = Field(0.0, ge=0, lt=1)
    """Share of training examples kept for validation; 0: a fifth where the method needs it, else none."""

    largest_norm: float = Field(0.0, ge=0)
    """An update whose Euclidean norm is larger is rejected; 0: no bound."""
    robust: str = ""
    """A robust average instead of the mean, by name; its options go into `options` after "robust."."""

    dp_noise: float = 0.0
    dp_epsilon: float = 0.0
    dp_clip: float = 0.0
    dp_delta: float = 0.0
    dp_budget: float = 0.0
    dp_strict: bool = False

    @field_validator("clients", "classes", "scaling", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        """`clients = 3` is as good as `clients = "3"`."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Deployment:
        given = {key.replace("-", "_"): value for key, value in values.items()}
        unknown = sorted(set(given) - set(cls.model_fields))
        if unknown:
            raise unknown_name("setting of the deployment", unknown[0], cls.model_fields)
        try:
            made = cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{first['loc'][0]}: {first['msg']}; got {first['input']!r}") from None
        _ = made.num_clients, made.class_names, made.divisor, made.run, made.algorithm
        if changes_data(made.algorithm):
            raise ConfigError(
                f"{made.method} has clients share examples, which no node of a deployment does; choose another method"
            )
        if made.run.privacy is not None and made.scaling == STANDARD and made.dp_strict:
            raise ConfigError(
                'dp_strict: epsilon does not cover the sums that scaling = "standard" takes from every node; '
                'use scaling = "none" or a number'
            )
        return made

    @property
    def num_clients(self) -> int:
        names = self.client_names
        if names is not None:
            return len(names)
        count = int(self.clients)
        if count < 1:
            raise ConfigError(f"a deployment has at least one client; got clients = {count}")
        return count

    @property
    def client_names(self) -> list[str] | None:
        """Where the operator listed them, in that order."""
        if self.clients.strip().lstrip("-").isdigit():
            return None
        return distinct("clients", self.clients)

    @property
    def class_names(self) -> list[str]:
        if self.classes.strip().isdigit():
            return [str(number) for number in range(_at_least_two(int(self.classes)))]
        names = distinct("classes", self.classes)
        _at_least_two(len(names))
        return names

    @property
    def feature_columns(self) -> list[str] | None:
        return distinct("features", self.features) if self.features.strip() else None

    @property
    def divisor(self) -> float | None:
        """What features are divided by, where `scaling` is a number."""
        if self.scaling in (STANDARD, NONE):
            return None
        try:
            number = float(self.scaling)
        except ValueError:
            raise unknown_name("scaling", self.scaling, (STANDARD, NONE, "a number")) from None
        if not 0 < number < float("inf"):
            raise ConfigError(f"scaling divides by a positive number; got {self.scaling}")
        return number

    def needed(self, called: int) -> int:
        """Updates without which a round of so many called clients does not count."""
        rule = self.run.robust_rule
        needed = min(self.quorum, called) if self.quorum else called // 2 + 1
        return needed if rule is None else max(needed, rule.least)

    @cached_property
    def run(self) -> RunConfig:
        """The same as the configuration of a run, for all that simulations and deployments share."""
        settings = {name: getattr(self, name) for name in _PASSED_ON}
        settings = {name: None if name in _ZERO_IS_UNSET and not value else value for name, value in settings.items()}
        dataset = {name: getattr(self, name) for name in ("classes", "features", "scaling", "test_fraction")}
        owned = ("model.", "robust.")
        sets = tuple(o if o.startswith(owned) else f"{self.method}.{o}" for o in self.options.split())
        algorithm = self.method.strip()
        return make_config(
            None,
            settings | {
                "dataset": {"name": "deployment", **dataset, "clients": self.clients},
                "algorithms": algorithm, "seeds": (self.seed,), "checkpoint_every": 1, "save_models": False,
                "validation": self.validation or "auto",
            },
            sets,
        )  # fmt: skip

    @cached_property
    def algorithm(self) -> Algorithm[Any, Any, Any, Any]:
        options = dict(self.run.algorithms[self.method])
        return make_algorithm(options.pop("method"), self.run.training, options)

    @property
    def validation_share(self) -> float:
        return self.validation or (0.2 if "needs validation" in self.algorithm.traits else 0.0)

    @property
    def folder(self) -> Path:
        return Path(self.out).expanduser()

    def fingerprint(self) -> str:
        """Equal for deployments that compute the same; more rounds only continue a run, unless noise was planned for
        so many of them."""
        settings = self.model_dump(exclude=set(_INCIDENTAL))
        rounds = self.rounds if self.dp_epsilon else 1
        return self.run.model_copy(update={"rounds": rounds}).fingerprint(settings)


def distinct(what: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{what} are different names separated by commas; got {text!r}")
    return names


def _at_least_two(count: int) -> int:
    if count < 2:
        raise ConfigError(f"there are at least two classes to tell apart; got {count}")
    return count
