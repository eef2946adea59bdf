"""Settings of a run in groups, each setting declared once: type, range, default and one sentence.

What the engine has settings of its own for (local training, participation, privacy, secure sums, tables) is declared
there and taken over by reference. `RunConfig` has all groups for bases; the command line, the TOML template and the
reference page show them under the headings of `HEADINGS`. Nothing here needs torch.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kinfed.config.algorithm_choice import parse_algorithms
from kinfed.config.config_fields import Choice, Named, accepted_names, as_codec, as_models, plugin_files
from kinfed.config.presets import PresetUse, as_preset
from kinfed.core import declared, option, option_of
from kinfed.data import TaskName, TrainingSettings
from kinfed.data.sources import TableOptions
from kinfed.privacy import Privacy
from kinfed.server import Participation
from kinfed.updates import Sampling, SecureSettings, UserPrivacy

DEFAULT_ALGORITHMS = ("local", "fedavg", "fedavg_smooth", "ditto", "selffl", "fedfomo", "cgpfl")
DEFAULT_MODEL = "mlp"
DEFAULT_STEPS = TrainingSettings.steps  # where neither steps nor epochs are given
Share = Literal["auto"] | float


@dataclass(frozen=True)
class PluginSettings:
    plugins: Annotated[tuple[Path, ...], BeforeValidator(plugin_files)] = option(
        (), "Python file that registers your own methods, data sets, models, ... (repeatable).", flag="--plugin"
    )


@dataclass(frozen=True)
class DataSettings:
    dataset: Choice = option(
        Named(name="digits"), "A name (kinfed list datasets), or a .csv/.parquet file.", registry="dataset"
    )
    partition: Choice | None = option(
        None, "How the data is divided among clients (kinfed list partitions).", registry="partition"
    )
    clients: int | None = option(None, "Number of clients.", ge=1)
    client_column: str | None = option_of(TableOptions, "client_column")
    label_column: str | None = option_of(TableOptions, "label_column")
    task: TaskName = option_of(TableOptions, "task")
    group_column: str | None = option_of(TableOptions, "group_column")
    split_column: str | None = option_of(TableOptions, "split_column")
    weight_column: str | None = option_of(TableOptions, "weight_column")
    time_column: str | None = option_of(TableOptions, "time_column")
    event_column: str | None = option_of(TableOptions, "event_column")
    person_column: str | None = option_of(TableOptions, "person_column")
    order_column: str | None = option_of(TableOptions, "order_column")
    columns: str | None = option_of(TableOptions, "columns", None)
    encoding: str | None = option_of(TableOptions, "encoding", None)
    stratify: bool = option(
        False, "Draw test and validation rows in proportion to each client's classes, or quartiles of a number."
    )
    folds: int | None = option(
        None,
        "Cross-validation with this many stratified folds of every client's rows (in order with order_column).",
        ge=2,
    )
    validation: Share = option("auto", "Share of training data kept for validation, or auto.", ge=0, lt=1)
    public: Share = option(
        "auto", "Share of training data made public, for methods that distil on it, or auto.", ge=0, lt=1
    )
    foreign_targets: bool = option(False, "Shuffle validation and test sets among clients.")
    accept: Annotated[str, BeforeValidator(accepted_names)] = option(
        "", "Findings of the data audit to accept, e.g. label_copy,units; all: no audit."
    )
    data: Path | None = option(None, "Folder with data sets: <DIR>/<dataset>/*.parquet.", variable="KINFED_DATA")


@dataclass(frozen=True)
class ModelSettings:
    model: Choice = option(Named(name=DEFAULT_MODEL), "Model (kinfed list models).", registry="model")
    models: Annotated[dict[str, dict[str, Any]] | None, BeforeValidator(as_models)] = option(
        None, "Several architectures, e.g. phone=mlr,server=mlp: by the clients' groups, or in turn.", registry="model"
    )
    frozen: str = option("", "Parameters that are not trained: names or patterns, such as body.*,*.bias.")
    cache: bool = option(True, "Compute the output of frozen lower layers once per example, if that is exact.")
    pretrain: int = option(0, "Rounds of training on the pooled data of all clients, as the common start.", ge=0)
    warm_start: int = option(0, "Rounds of FedAvg before every method.", ge=0)


@dataclass(frozen=True)
class MethodSettings:
    algorithms: Annotated[dict[str, dict[str, Any]], BeforeValidator(parse_algorithms)] = option(
        DEFAULT_ALGORITHMS,
        "Methods, e.g. local,fedavg,weak=ditto; all,-mocha: all that can run except one (kinfed list methods).",
        registry="algorithm",
    )
    preset: Annotated[PresetUse | None, BeforeValidator(as_preset)] = option(
        None, "Settings of methods for the model's family: tuned, or tuned:cnn (kinfed list presets).",
        registry="preset",
    )  # fmt: skip
    as_published: bool = option(
        False, "Methods with the options of their papers, not kinfed's defaults; options that you set win."
    )


@dataclass(frozen=True)
class RoundSettings:
    rounds: int = option(40, "Communication rounds.", ge=1)
    participation: float = option_of(Participation, "participation", 0.5)
    seeds: tuple[int, ...] = option((0, 1, 2), "Seeds, e.g. 0,1,2.")
    dropout: float = option_of(Participation, "dropout")
    sampling: Sampling = option_of(Participation, "sampling")
    stragglers: float = option_of(Participation, "stragglers")


@dataclass(frozen=True)
class LossSettings:
    loss: str = option(
        "auto", "Loss of an example: auto takes the problem's own (kinfed list losses).", registry="loss"
    )
    huber_delta: float = option(
        1.0, "Where loss huber turns from squared to absolute, in standard deviations of the target.", gt=0
    )
    class_weights: str = option(
        "none", "How much classes count: none, balanced (by all clients' training rows), by_client, or sick=5,well=1."
    )


@dataclass(frozen=True)
class StepSettings(TrainingSettings):
    # None: DEFAULT_STEPS, unless epochs are given.
    steps: int | None = option_of(TrainingSettings, "steps", None)


@dataclass(frozen=True)
class ProtectionSettings:
    """Privacy and secure sums. There is none if no dp_ or user_ setting is given: their defaults are none."""

    dp_noise: float | None = option_of(Privacy, "noise")
    dp_epsilon: float | None = option_of(Privacy, "epsilon")
    dp_clip: float | None = option_of(Privacy, "clip", None)
    dp_delta: float | None = option_of(Privacy, "delta", None)
    dp_budget: float | None = option_of(Privacy, "budget")
    dp_strict: bool = option_of(Privacy, "strict")
    user_noise: float | None = option_of(UserPrivacy, "noise")
    user_epsilon: float | None = option_of(UserPrivacy, "epsilon")
    user_clip: float | None = option_of(UserPrivacy, "clip", None)
    user_delta: float | None = option_of(UserPrivacy, "delta", None)
    user_quantile: float | None = option_of(UserPrivacy, "quantile")
    user_at_nodes: bool = option_of(UserPrivacy, "at_nodes")
    user_conspirators: int = option_of(UserPrivacy, "conspirators")
    secure_sum: bool = option(False, "Secure aggregation: the server sees only the sum of a round's updates.")
    secure_range: float = option_of(SecureSettings, "largest")
    secure_least: int = option_of(SecureSettings, "least")


@dataclass(frozen=True)
class CommunicationSettings:
    mode: Choice = option(
        Named(name="sync"), "Synchronous rounds (sync), or asynchronous ones: fedbuff, fedasync.", registry="mode"
    )
    clock: Choice | None = option(
        None, "Simulated time: lognormal or equal speeds of clients (default: none; async: lognormal).",
        registry="clock",
    )  # fmt: skip
    compress: Annotated[Choice | None, BeforeValidator(as_codec)] = option(
        None, "Compression of updates: qsgd:7 (levels), topk:0.01 (share), or a registered codec.", registry="codec"
    )


@dataclass(frozen=True)
class RobustnessSettings:
    robust: Choice | None = option(
        None, "Robust average at the server: clip, median, trimmed_mean or krum.", registry="robust rule"
    )
    largest_norm: float = option(0.0, "Reject updates with a larger norm (0: none).", ge=0, infinite=True)


@dataclass(frozen=True)
class EvaluationSettings:
    metric: str | None = option(
        None, "Headline metric: accuracy, balanced_accuracy, f1, auroc, average_precision, log_loss, "
        "brier, calibration_error, relative_false_accepts, rmse, mae, r2, or a scorer of scikit-learn (default: "
        "accuracy, or rmse of numbers).",
    )  # fmt: skip
    eval_every: int = option(5, "Rounds between evaluations (0: only the last).", ge=0)
    early_stopping: int = option(
        0, "Record the round where each client, and the server, would have stopped: that of its best validation "
        "metric before this many evaluations without a better one (0: off).", ge=0,
    )  # fmt: skip
    stopped_models: bool = option(
        False, "Results and models are those of the rounds where clients and the server stopped (default: of the last "
        "round); a method ends when all have.",
    )  # fmt: skip
    eval_clients: int | None = option(None, "Evaluate a fixed sample of this many clients (default: all).", ge=1)
    checkpoint_every: int | None = option(None, "Rounds between checkpoints (default: 20 seconds between them).", ge=1)
    save_models: bool = option(True, "Save the personal models of evaluated clients at the end.")
    client_rounds: bool = option(False, "Keep every client's metrics of every evaluated round, as Parquet.")


@dataclass(frozen=True)
class PlaceSettings:
    device: str = option("cpu", "cpu, cuda or mps.")
    backend: Literal["auto", "fused", "stacked", "rows", "batched", "vmap"] = option(
        "auto", "How gradients are computed; fused uses compiled loops (extra `fast`)."
    )
    pool: Literal["local", "ray"] = option("local", "Where clients live: local, or ray for many machines.")
    ray_address: str | None = option(None, "Ray cluster to join (default: a new one on this machine).")
    ray_gpus: float = option(
        0.0, "GPUs of each Ray worker, with device = cuda; a fraction shares one among several.", ge=0
    )
    workers: int | None = option(None, "Worker threads or Ray workers (default: all cores).", ge=1)
    state: Literal["auto", "memory", "disk"] = option(
        "auto", "Where client states live; auto moves them to disk above a quarter of the machine's memory."
    )


# In the order of config.json. Plugins come first: names that they register can be used in all other settings.
GROUPS = (
    PluginSettings, DataSettings, ModelSettings, MethodSettings, RoundSettings, LossSettings, StepSettings,
    ProtectionSettings, CommunicationSettings, RobustnessSettings, EvaluationSettings, PlaceSettings,
)  # fmt: skip
DEFAULTS: dict[str, Any] = {field.name: field.default for group in GROUPS for field in fields(group)}

# Headings of the help and of files, in their order, with the names of the settings beneath.
HEADINGS: dict[str, tuple[str, ...]] = {
    heading: tuple(name for group in groups for name in declared(group))
    for heading, groups in {
        "Data": (DataSettings,),
        "Model": (ModelSettings,),
        "Methods": (PluginSettings, MethodSettings),
        "Rounds": (RoundSettings,),
        "Local training": (LossSettings, StepSettings),
        "Communication": (CommunicationSettings,),
        "Privacy": (ProtectionSettings,),
        "Robustness": (RobustnessSettings,),
        "Evaluation and files": (EvaluationSettings,),
        "Where it runs": (PlaceSettings,),
    }.items()
}
