"""`kinfed run`, and `kinfed init`, which writes a file for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import TrustPlugins, TypedSettings, plugin_words, settings_of, trust_recorded
from kinfed.cli.terminal import StopRequest, console, new_folder, say
from kinfed.errors import ConfigError, PoolError

if TYPE_CHECKING:
    from kinfed.config import RunConfig

Out = Annotated[Path | None, Option("--out", "-o", help="Folder of the run (default: runs/<time>).")]


def run(
    context: typer.Context,
    out: Out = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in --out where it stopped.")] = False,
    extend: Annotated[
        bool, Option("--extend", help="Add --rounds (the new total), --seeds or --algorithms to the run in --out.")
    ] = False,
    report: Annotated[bool, Option(help="Write report.html at the end.")] = True,
    track: Annotated[
        list[str] | None,
        Option("--track", help="Also log to tensorboard, mlflow or wandb; each is an extra (repeatable)."),
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare methods on the same clients, batches and starting models; without arguments, on digits."""
    from kinfed.api import total_rounds
    from kinfed.cli.display import display, outsiders_sentence, results_table, run_sentence
    from kinfed.runs import Interrupted, Observers, experiment
    from kinfed.trackers import make_trackers

    trust_recorded(out, trust_plugins)
    config = _config(settings_of(context), out, resume, extend)
    folder = out or new_folder("runs")
    continuation = f"kinfed run --out {shlex.quote(str(folder))} --resume{plugin_words(config)}"
    say(run_sentence(config))
    trackers = make_trackers(track or ())
    with StopRequest(console) as stop, display(console, total_rounds(config), config.metric) as progress:
        observer = Observers((progress, *trackers))
        try:
            result = experiment.run(
                config, out=folder, resume=resume, extend=extend, observer=observer, should_stop=stop
            )
        except (Interrupted, KeyboardInterrupt):
            say(f"stopped; what is done is saved. To continue: {continuation}")
            raise typer.Exit(130) from None
        except PoolError as error:
            raise PoolError(f"{error}; continue from the last checkpoint with: {continuation}") from error
    summaries = [r.to_json() for r in result.results]
    console.print(results_table(summaries, result.baselines))
    if sentence := outsiders_sentence(summaries):
        say(sentence)
    say(f"results  {folder}")
    if report:
        from kinfed.report import build

        say(f"report   {build([folder], folder / 'report.html')}")


def _config(typed: TypedSettings, out: Path | None, resume: bool, extend: bool) -> RunConfig:
    from kinfed.config import make_config
    from kinfed.runs import read_config

    if extend:
        if out is None:
            raise ConfigError("--extend needs --out, the folder of the run to extend")
        from kinfed.runs import grown_config

        return grown_config(out, typed.file, typed.values, typed.sets)
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    if not resume or out is None or typed.change_results:
        return typed.make_config()
    # "kinfed run --out DIR --resume" alone is enough; where data lies and how to compute may differ this time.
    typed.load_plugins()
    return make_config(None, {**read_config(out).dump_for_pool(typed.values.get("pool")), **typed.values})


def init(
    context: typer.Context,
    file: Annotated[Path, Argument(help="TOML file to write; one that exists is left alone.")] = Path("run.toml"),
) -> None:
    """Write a TOML file to edit, with every setting explained; the options given here are set in it."""
    from kinfed.config import config_toml
    from kinfed.core import storage

    if file.exists():
        raise ConfigError(f"{file} exists already; name another file, or remove it first")
    text = config_toml(settings_of(context).make_config(), shlex.quote(str(file)))
    storage.write_atomically(file, text.encode())
    say(f"wrote    {file}")
    say(f"edit it, then: kinfed run {shlex.quote(str(file))}")
