"""`kinfed tune`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from kinfed.cli.parameters import TrustPlugins, TypedSettings, plugin_words, settings_of, trust_recorded
from kinfed.cli.terminal import StopRequest, console, new_folder, say
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.tuning import Started

DEFAULT_TRIALS = 20
# Not among them: privacy, which tuning cannot account for, and what concerns files that trials do not write.
SETTINGS = (
    "plugins", "dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column",
    "weight_column", "time_column", "event_column", "person_column", "order_column", "task", "columns", "encoding",
    "accept",
    "stratify", "validation", "foreign_targets", "data", "model", "pretrain", "warm_start",
    "algorithms", "preset", "as_published", "rounds", "participation", "seeds", "dropout", "sampling", "stragglers",
    "loss", "class_weights",
    "lr", "batch", "steps", "epochs", "optimizer", "momentum", "nesterov", "betas", "eps", "weight_decay", "clip",
    "optimizer_state", "lr_decay", "lr_floor", "augment", "mode", "clock", "compress", "robust", "largest_norm",
    "eval_every", "device",
    "backend", "pool", "ray_address", "ray_gpus", "workers",
)  # fmt: skip
TEXTS = {
    "validation": "Share of training data to choose by (default 0.2).",
    "algorithms": "Methods to tune, e.g. fedavg,ditto (kinfed list algorithms).",
    "preset": "Settings of the first trial: tuned, or tuned:cnn (kinfed list presets).",
    "rounds": "Communication rounds of a trial (default 40).",
    "seeds": "Seeds that a trial is averaged over (default 0).",
    "lr": "Learning rate of the first trial (default 0.05).",
    "eval_every": "Rounds between checks whether --prune stops a trial (default 5).",
}


def tune(
    context: typer.Context,
    ranges: Annotated[
        list[str] | None, Option("--range", help="label.option=low:high, to replace the default range (repeatable).")
    ] = None,
    trials: Annotated[int | None, Option(help=f"Trials per method (default {DEFAULT_TRIALS}).")] = None,
    while_training: Annotated[
        bool,
        Option("--while-training", help="One run per method, in which clients try --trials configurations (FedEx)."),
    ] = False,
    prune: Annotated[bool, Option("--prune", help="Stop trials that fall behind early.")] = False,
    out: Annotated[Path | None, Option("--out", "-o", help="Folder of the tuning (default: tuned/<time>).")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the tuning in --out, or add trials.")] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Choose each method's settings on validation data, with the same budget for every method."""
    from kinfed.cli.display import TuningLines, run_sentence, tuning_table
    from kinfed.config import make_config
    from kinfed.tuning import read_tuning
    from kinfed.tuning import tune as search

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the tuning to continue")
    trust_recorded(out, trust_plugins)
    folder = out or new_folder("tuned")
    typed = settings_of(context)
    if while_training:
        _tune_while_training(_new_plan(typed, tuple(ranges or ()), prune), trials or DEFAULT_TRIALS, folder, resume)
        return
    if resume and not typed.change_results and not ranges:
        # "kinfed tune --out DIR --resume" alone is enough; it is computed how and where it is said now.
        typed.load_plugins()
        plan = read_tuning(folder)
        plan = replace(plan, config=make_config(None, {**plan.config.dump(), **typed.values}))
    else:
        plan = _new_plan(typed, tuple(ranges or ()), prune)
    trials = plan.trials if trials is None else trials
    say(f"{run_sentence(plan.config)}; {trials} trials per method")

    command = f"kinfed tune --out {shlex.quote(str(folder))} --resume{plugin_words(plan.config)}"
    how = f"finished trials are saved. To continue: {command}"
    with _stopping(how) as stop:
        result = search(
            plan.config, trials, folder, resume=resume, ranges=plan.ranges, prune=plan.prune, observer=TuningLines(),
            should_stop=stop,
        )  # fmt: skip
    console.print(tuning_table([(tuned.label, tuned.to_json()) for tuned in result.methods]))
    _say_settings(result.file)


@contextmanager
def _stopping(how: str) -> Iterator[StopRequest]:
    """A request to stop ends the command, which says how it can go on."""
    from kinfed.runs import Interrupted

    with StopRequest(console) as stop:
        try:
            yield stop
        except (Interrupted, KeyboardInterrupt):
            say(f"stopped; {how}")
            raise typer.Exit(130) from None


def _say_settings(file: Path) -> None:
    say(f"settings {file}")
    say(f"run with kinfed run {shlex.quote(str(file))}")


def _tune_while_training(plan: Started, configurations: int, folder: Path, resume: bool) -> None:
    from kinfed.cli.display import TuningLines, run_sentence
    from kinfed.engine import METRICS
    from kinfed.tuning import tune_while_training

    if plan.prune:
        raise ConfigError("--prune stops trials, of which tuning while training has none; leave it out")
    say(f"{run_sentence(plan.config)}; {configurations} configurations per method, tried while it trains")
    with _stopping("finished rounds are saved. To continue, repeat the command with --resume") as stop:
        result = tune_while_training(
            plan.config, configurations, folder, resume=resume, ranges=plan.ranges, observer=TuningLines(),
            should_stop=stop,
        )  # fmt: skip
    for one in result.methods:
        settings = ", ".join(f"{name}={value:g}" for name, value in one.settings.items()) or "as configured"
        figure = METRICS.named(one.metric).shown(one.value)
        say(f"{one.label}: {settings} (chance {max(one.chances):.2f}); {figure} on validation data")
    _say_settings(result.file)


def _new_plan(typed: TypedSettings, ranges: tuple[str, ...], prune: bool) -> Started:
    from kinfed.tuning import Started, parse_ranges

    config = typed.make_config({"seeds": (0,)})
    varied = parse_ranges(ranges, {label: options["method"] for label, options in config.algorithms.items()})
    return Started(config, DEFAULT_TRIALS, varied, prune)
