"""The configuration of a run: validated, complete, and the same from TOML, command line and Python.

Every setting is declared once, in `RunConfig`: type, range, default, one line of text, and the panel of `kinfed run
--help` it stands in. The command line is made from these declarations (kinfed.cli.parameters), so this module is
imported for `--help` and needs no torch: what a setting means to the engine is imported where it is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kinfed.config.algorithm_choice import parse_algorithms
from kinfed.config.config_fields import (
    COMMUNICATION,
    DATA,
    EVALUATION,
    METHODS,
    MODEL,
    PLACE,
    PRIVACY,
    ROBUSTNESS,
    ROUNDS,
    TRAINING,
    Choice,
    Named,
    as_codec,
    as_numbers,
    plugin_files,
    setting,
)
from kinfed.config.plain_values import recordable
from kinfed.config.presets import PresetUse, as_preset, with_preset
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.data import LocalTraining
    from kinfed.privacy import Privacy
    from kinfed.server import Schedule, Speeds
    from kinfed.updates import Codec, Rule, SecureSettings, StalenessRule, UserPrivacy

DEFAULT_ALGORITHMS = ("local", "fedavg", "fedavg_smooth", "ditto", "selffl", "fedfomo", "cgpfl")
DEFAULT_MODEL = "mlp"
DEFAULT_STEPS = 20
# Settings that say how and where to compute, not what: they change neither results nor the identity of a run. Of
# plugins the content counts, not the place.
NON_RESULT_SETTINGS = (
    "plugins", "workers", "data", "checkpoint_every", "state", "save_models", "pool", "ray_address", "ray_gpus",
)  # fmt: skip


class RunConfig(BaseModel):
    """Everything that decides the results of a run. Every field has a default: the default run is the demo."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # First: names that plugins register can be used in all others.
    plugins: Annotated[tuple[Path, ...], BeforeValidator(plugin_files)] = setting(
        (), METHODS, "Python file that registers your own methods, data sets, models, ... (repeatable).",
        option="--plugin",
    )  # fmt: skip
    dataset: Choice = setting(
        Named(name="digits"), DATA, "A name (kinfed list datasets), or a .csv/.parquet file.", registry="dataset"
    )
    partition: Choice | None = setting(
        None, DATA, "How the data is divided among clients (kinfed list partitions).", registry="partition"
    )
    clients: int | None = setting(None, DATA, "Number of clients.", ge=1)
    client_column: str | None = setting(None, DATA, "Column that names the client (own tables).")
    label_column: str | None = setting(None, DATA, "Column with the class, or the number to predict (own tables).")
    task: Literal["auto", "classification", "regression"] = setting(
        "auto", DATA, "Whether the label column holds classes or numbers (own tables); auto decides and says so."
    )
    group_column: str | None = setting(None, DATA, "Column with the client's group (own tables).")
    split_column: str | None = setting(None, DATA, "Column with train, val or test (own tables).")
    weight_column: str | None = setting(None, DATA, "Column with the weight of a row in training (own tables).")
    columns: str | None = setting(
        None, DATA, "Types of columns, to override the rule: age=number,zip=category,note=skip (tables)."
    )
    stratify: bool = setting(
        False,
        DATA,
        "Draw test and validation rows in proportion to each client's classes, or quartiles of a number.",
    )
    folds: int | None = setting(
        None, DATA, "Cross-validation with this many stratified folds of every client's rows.", ge=2
    )
    validation: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = setting(
        "auto", DATA, "Share of training data kept for validation, or auto."
    )
    public: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = setting(
        "auto", DATA, "Share of training data made public, for methods that distil on it, or auto."
    )
    foreign_targets: bool = setting(False, DATA, "Shuffle validation and test sets among clients.")
    data: Path | None = setting(None, DATA, "Folder with data sets: <DIR>/<dataset>/*.parquet.", variable="KINFED_DATA")
    model: Choice = setting(Named(name=DEFAULT_MODEL), MODEL, "Model (kinfed list models).", registry="model")
    frozen: str = setting("", MODEL, "Parameters that are not trained: names or patterns, such as body.*,*.bias.")
    cache: bool = setting(
        True,
        MODEL,
        "Compute the output of frozen lower layers once per example, if that is exact.",
    )
    pretrain: int = setting(
        0, MODEL, "Rounds of training on the pooled data of all clients, as the common start.", ge=0
    )
    warm_start: int = setting(0, MODEL, "Rounds of FedAvg before every method.", ge=0)
    algorithms: Annotated[dict[str, dict[str, Any]], BeforeValidator(parse_algorithms)] = setting(
        lambda: list(DEFAULT_ALGORITHMS), METHODS,
        "Methods, e.g. local,fedavg,weak=ditto; all,-mocha: all that can run except one (kinfed list methods).",
        registry="algorithm",
    )  # fmt: skip
    preset: Annotated[PresetUse | None, BeforeValidator(as_preset)] = setting(
        None, METHODS, "Settings of methods for the model's family: tuned, or tuned:cnn (kinfed list presets).",
        registry="preset",
    )  # fmt: skip
    rounds: int = setting(40, ROUNDS, "Communication rounds.", ge=1)
    participation: float = setting(0.5, ROUNDS, "Share of clients active in a round, in (0, 1].")
    seeds: Annotated[tuple[int, ...], BeforeValidator(as_numbers)] = setting((0, 1, 2), ROUNDS, "Seeds, e.g. 0,1,2.")
    dropout: float = setting(0.0, ROUNDS, "Chance that an active client never replies.")
    sampling: Literal["fixed", "poisson"] = setting(
        "fixed",
        ROUNDS,
        "Clients of a round: a fixed number, or each one independently (poisson).",
    )
    stragglers: float = setting(0.0, ROUNDS, "Chance that a client does only part of its work.")
    loss: Literal["auto", "cross_entropy", "squared", "absolute", "huber"] = setting(
        "auto", TRAINING, "Loss of an example: cross_entropy of classes; squared, absolute or huber of numbers."
    )
    huber_delta: float = setting(
        1.0, TRAINING, "Where loss huber turns from squared to absolute, in standard deviations of the target.", gt=0
    )
    class_weights: str = setting(
        "none", TRAINING,
        "How much classes count: none, balanced (by all clients' training rows), by_client, or sick=5,well=1.",
    )  # fmt: skip
    lr: float = setting(0.05, TRAINING, "Learning rate of local training.")
    batch: int = setting(20, TRAINING, "Batch size.")
    steps: int | None = setting(None, TRAINING, f"Local steps per round (default {DEFAULT_STEPS}).")
    epochs: int | None = setting(None, TRAINING, "Local epochs per round instead of steps.")
    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", TRAINING, "Local optimizer, as in torch.optim.")
    momentum: float = setting(0.0, TRAINING, "Momentum of local training with sgd, in [0, 1).")
    nesterov: bool = setting(False, TRAINING, "Nesterov's form of momentum.")
    betas: Annotated[tuple[float, float], BeforeValidator(as_numbers)] = setting(
        (0.9, 0.999), TRAINING, "Decay of the means of gradients and of their squares, with adam and adamw."
    )
    eps: float = setting(1e-8, TRAINING, "Added to the denominator in adam and adamw.")
    weight_decay: float = setting(0.0, TRAINING, "Weight decay of local training.")
    clip: float | None = setting(None, TRAINING, "Clip a client's gradient to this norm (default: no clipping).")
    optimizer_state: Literal["reset", "kept"] = setting(
        "reset", TRAINING, "Momentum or moments: reset in every round, or kept by each client."
    )
    lr_decay: float = setting(1.0, TRAINING, "Factor on the learning rate after every round, in (0, 1].")
    lr_floor: float = setting(0.0, TRAINING, "The learning rate does not decay below this.")
    augment: str | None = setting(None, TRAINING, "Augmentation of training images: crop, flip or crop_flip.")
    dp_noise: float | None = setting(None, PRIVACY, "Differential privacy: noise in units of the clipping norm.")
    dp_epsilon: float | None = setting(None, PRIVACY, "Differential privacy: find the noise for this epsilon instead.")
    dp_clip: float | None = setting(None, PRIVACY, "Largest norm of an example's gradient (default 1).")
    dp_delta: float | None = setting(None, PRIVACY, "Delta of epsilon (default 1e-5).")
    dp_budget: float | None = setting(None, PRIVACY, "Leave out clients that would exceed this epsilon.")
    dp_strict: bool = setting(False, PRIVACY, "Refuse methods that send what epsilon does not cover.")
    user_noise: float | None = setting(
        None, PRIVACY, "User-level privacy of the server's models: noise in units of the clipping norm."
    )
    user_epsilon: float | None = setting(None, PRIVACY, "User-level privacy: find the noise for this epsilon instead.")
    user_clip: float | None = setting(None, PRIVACY, "Largest norm of a client's update (default 1).")
    user_delta: float | None = setting(None, PRIVACY, "Delta of the user-level epsilon (default 1e-5).")
    user_quantile: float | None = setting(
        None, PRIVACY, "Adaptive clipping: user_clip is the start and follows this quantile of updates' norms."
    )
    secure_sum: bool = setting(False, PRIVACY, "Secure aggregation: the server sees only the sum of a round's updates.")
    secure_range: float = setting(1000.0, PRIVACY, "Secure aggregation: largest number that an update may hold.")
    secure_least: int = setting(3, PRIVACY, "Secure aggregation: minimum number of clients in a sum.")
    mode: Choice = setting(
        Named(name="sync"), COMMUNICATION, "Synchronous rounds (sync), or asynchronous ones: fedbuff, fedasync.",
        registry="mode",
    )  # fmt: skip
    clock: Choice | None = setting(
        None, COMMUNICATION, "Simulated time: lognormal or equal speeds of clients (default: none; async: lognormal).",
        registry="clock",
    )  # fmt: skip
    compress: Annotated[Choice | None, BeforeValidator(as_codec)] = setting(
        None, COMMUNICATION, "Compression of updates: qsgd:7 (levels), topk:0.01 (share), or a registered codec.",
        registry="codec",
    )  # fmt: skip
    robust: Choice | None = setting(
        None, ROBUSTNESS, "Robust average at the server: clip, median, trimmed_mean or krum.",
        registry="robust rule",
    )  # fmt: skip
    largest_norm: float = setting(0.0, ROBUSTNESS, "Reject updates with a larger norm (0: none).", ge=0)
    metric: str | None = setting(
        None, EVALUATION, "Headline metric: accuracy, balanced_accuracy, f1, auroc, average_precision, log_loss, "
        "brier, calibration_error, relative_false_accepts, rmse, mae, r2, or a scorer of scikit-learn (default: "
        "accuracy, or rmse of numbers).",
    )  # fmt: skip
    eval_every: int = setting(5, EVALUATION, "Rounds between evaluations (0: only the last).", ge=0)
    eval_clients: int | None = setting(
        None, EVALUATION, "Evaluate a fixed sample of this many clients (default: all).", ge=1
    )
    checkpoint_every: int | None = setting(
        None, EVALUATION, "Rounds between checkpoints (default: 20 seconds between them).", ge=1
    )
    save_models: bool = setting(True, EVALUATION, "Save the personal models of evaluated clients at the end.")
    device: str = setting("cpu", PLACE, "cpu, cuda or mps.")
    backend: Literal["auto", "fused", "stacked", "rows", "batched", "vmap"] = setting(
        "auto", PLACE, "How gradients are computed; fused uses compiled loops (extra `fast`)."
    )
    pool: Literal["local", "ray"] = setting("local", PLACE, "Where clients live: local, or ray for many machines.")
    ray_address: str | None = setting(None, PLACE, "Ray cluster to join (default: a new one on this machine).")
    ray_gpus: float = setting(
        0.0, PLACE, "GPUs of each Ray worker, with device = cuda; a fraction shares one among several.", ge=0
    )
    workers: int | None = setting(None, PLACE, "Worker threads or Ray workers (default: all cores).", ge=1)
    state: Literal["auto", "memory", "disk"] = setting(
        "auto", PLACE, "Where client states live; auto moves them to disk above a quarter of the machine's memory."
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The methods by name, and what else is not as it is by default."""
        yield "algorithms", list(self.algorithms)
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("algorithms", "steps") and value != field.get_default(call_default_factory=True):
                yield name, value
        if self.steps is not None and self.steps != DEFAULT_STEPS:
            yield "steps", self.steps

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, values: Any) -> Any:
        """A preset becomes options of methods. Without steps or epochs the default number of steps applies, and is
        written down."""
        if not isinstance(values, Mapping):
            return values
        values = with_preset(values, DEFAULT_ALGORITHMS, DEFAULT_MODEL)
        if values.get("steps") is None and values.get("epochs") is None:
            return {**values, "steps": DEFAULT_STEPS}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if len(set(self.seeds)) != len(self.seeds) or not self.seeds:
            raise ValueError("seeds must be distinct, and at least one")
        if any(not 0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError("seeds are whole numbers from 0 to 2^63 - 1")
        for label in self.algorithms:
            if not _is_label(label):
                raise ValueError(
                    f"labels of algorithms hold letters, digits, '-', '_' and '.'; got {label!r}. Options are given "
                    "as --set ditto.lam=0.5"
                )
        if self.ray_address is not None and self.pool != "ray":
            raise ValueError(f"ray_address is for pool = ray; the pool is {self.pool}")
        if self.ray_gpus and (self.pool, self.device) != ("ray", "cuda"):
            raise ValueError(f"ray_gpus is for pool = ray and device = cuda; these are {self.pool} and {self.device}")
        if self.pool == "ray" and self.device != "cpu" and not self.ray_gpus:
            raise ValueError(
                f"Ray sets no GPU aside unless it is asked to: give ray_gpus with device = {self.device}, or use cpu"
            )
        if self.folds is not None and self.foreign_targets:
            raise ValueError("folds test every client's own rows, and foreign_targets shuffles them; leave out one")
        if self.pool == "ray" and self.state == "disk":
            raise ValueError(
                "state = disk is for the local pool; Ray moves states to disk by itself when memory is short"
            )
        return self

    @property
    def training(self) -> LocalTraining:
        from kinfed.data import LocalTraining

        return LocalTraining(
            lr=self.lr, batch=self.batch, steps=self.steps, epochs=self.epochs, optimizer=self.optimizer,
            momentum=self.momentum, nesterov=self.nesterov, betas=self.betas, eps=self.eps,
            weight_decay=self.weight_decay, clip=self.clip, optimizer_state=self.optimizer_state,
            lr_decay=self.lr_decay, lr_floor=self.lr_floor, augment=self.augment, poisson=self.privacy is not None,
        )  # fmt: skip

    @property
    def privacy(self) -> Privacy | None:
        from kinfed.privacy import Privacy

        names = ("noise", "epsilon", "clip", "delta", "budget")
        values = {name: value for name in names if (value := getattr(self, f"dp_{name}")) is not None}
        if not values and not self.dp_strict:
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
        return Privacy(**values, strict=self.dp_strict)

    @property
    def user_privacy(self) -> UserPrivacy | None:
        from kinfed.updates import NO_ROBUST_RULE, UserPrivacy

        names = ("noise", "epsilon", "clip", "delta", "quantile")
        values = {name: value for name in names if (value := getattr(self, f"user_{name}")) is not None}
        if not values:
            return None
        if self.pretrain:
            raise ConfigError(
                "pre-training sees the data of all clients in one place, without noise; leave out pretrain or the "
                "user_ settings"
            )
        if self.robust is not None:
            raise ConfigError(NO_ROBUST_RULE)
        return UserPrivacy(**values)

    @property
    def secure(self) -> SecureSettings | None:
        from kinfed.updates import SecureSettings

        settings = SecureSettings(self.secure_range, self.secure_least)
        if not self.secure_sum:
            return None
        settings.check_server(self.robust, self.largest_norm)
        if self.pretrain:
            raise ConfigError(
                "pre-training sees the data of all clients in one place, and secure_sum hides even their updates; "
                "leave out one of the two"
            )
        return settings

    @property
    def robust_rule(self) -> Rule | None:
        from kinfed.updates import make_rule

        return None if self.robust is None else make_rule(self.robust.name, self.robust.options)

    @property
    def codec(self) -> Codec | None:
        from kinfed.updates import make_codec

        if self.compress is None:
            return None
        if self.secure_sum:
            raise ConfigError(
                "a secure sum adds masks to exact numbers, and codes of compressed updates cannot be added up; leave "
                "out compress or secure_sum"
            )
        return make_codec(self.compress.name, self.compress.options)

    @property
    def speeds(self) -> Speeds | None:
        """Of the clients, where there is a clock; asynchronous rounds have one in any case."""
        from kinfed.server import make_speeds

        if self.clock is not None:
            return make_speeds(self.clock.name, self.clock.options)
        return None if self.staleness_rule is None else make_speeds("lognormal")

    @property
    def staleness_rule(self) -> StalenessRule | None:
        """How asynchronous updates count; None where rounds are synchronous."""
        from kinfed.updates import make_staleness_rule

        rule = make_staleness_rule(self.mode.name, self.mode.options)
        if rule is None:
            return None
        for name, wanted in (
            ("privacy", "dp_"),
            ("user_privacy", "user_"),
            ("secure", "secure_sum"),
            ("robust", "robust"),
        ):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{wanted}: privacy is accounted, and sums and robust averages are taken, over the clients that a "
                    f"round has called, which mode {self.mode.name} does not have; leave out one of the two"
                )
        return rule

    @property
    def schedule(self) -> Schedule:
        from kinfed.server import Schedule

        return Schedule(self.participation, self.dropout, self.stragglers, self.sampling)

    def fixed_options(self, label: str) -> dict[str, Any]:
        """Options of a method that were set for it, without those of a preset."""
        preset = {} if self.preset is None else self.preset.options.get(label, {})
        return {name: value for name, value in self.algorithms[label].items() if name not in preset}

    def check_folds(self) -> None:
        """Refuse folds under privacy: they are several trainings on the same rows."""
        if self.folds is not None and (self.privacy is not None or self.user_privacy is not None):
            raise ConfigError(
                f"folds = {self.folds}: models of all folds are trained on the same rows, and epsilon would count one "
                "training; leave out folds under differential privacy"
            )

    def check(self) -> None:
        """Refuse values that training, schedule, privacy, secure sums, codec, robust rule or clock do not take."""
        for part in ("training", "schedule", "privacy", "user_privacy", "secure", "codec", "robust_rule", "speeds"):
            getattr(self, part)  # each checks its values when it is made
        self.check_folds()

    def dump(self) -> dict[str, Any]:
        """Plain values, for config.json; `make_config` makes an equal configuration from them."""
        values: dict[str, Any] = recordable(self.model_dump())
        return values

    def fingerprint(self, extra: Mapping[str, Any] | None = None) -> str:
        """Identity of the results: equal for configurations that give equal results."""
        decisive = {name: value for name, value in self.dump().items() if name not in NON_RESULT_SETTINGS}
        plugins = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in self.plugins)
        text = json.dumps([decisive, plugins, dict(extra or {})], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_label(label: str) -> bool:
    return bool(label) and all(c.isalnum() or c in "-_." for c in label) and not label.startswith(".")
