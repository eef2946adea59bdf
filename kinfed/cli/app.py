"""The command line. Mistakes get one clear sentence and exit status 2; an interrupted run says how to go on."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kinfed.cli import deploy_command as deployment
from kinfed.cli.arguments import integers, number
from kinfed.cli.interrupt import StopRequest
from kinfed.cli.reproduce_command import reproduce
from kinfed.errors import ConfigError, KinfedError, PoolError, StorageError

app = typer.Typer(
    name="kinfed",
    help="Personalized federated learning: one good model per client, compared honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(soft_wrap=False)

Config = Annotated[Path | None, typer.Argument(help="TOML file with settings; options below override it.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run (default: runs/<time>).")]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", envvar="KINFED_DATA", help="Folder with data sets: <DIR>/<dataset>/*.parquet."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="owner.option=value, e.g. ditto.lam=0.5, partition.classes=3 (repeatable)."),
]


@app.command()
def run(
    config: Config = None,
    dataset: Annotated[str | None, typer.Option(help="A name (kinfed list datasets), or a .csv/.parquet file.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data is shared out (kinfed list partitions).")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    client_column: Annotated[str | None, typer.Option(help="Column that names the client (own tables).")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the class (own tables).")] = None,
    group_column: Annotated[str | None, typer.Option(help="Column with the client's group (own tables).")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column with train, val or test (own tables).")] = None,
    validation: Annotated[str | None, typer.Option(help="Share of training data kept for validation, or auto.")] = None,
    foreign_targets: Annotated[
        bool | None, typer.Option("--foreign-targets", help="Shuffle validation and test sets among clients.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model (kinfed list models).")] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Methods, e.g. local,fedavg,weak=ditto, or all,-mocha (kinfed list algorithms).")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    participation: Annotated[float | None, typer.Option(help="Share of clients active in a round, in (0, 1].")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1,2.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of local training.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size.")] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round (default 20).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round instead of steps.")] = None,
    dp_noise: Annotated[
        float | None, typer.Option(help="Differential privacy: noise in units of the clipping norm.")
    ] = None,
    dp_epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy: find the noise for this epsilon instead.")
    ] = None,
    dp_clip: Annotated[float | None, typer.Option(help="Largest norm of an example's gradient (default 1).")] = None,
    dp_delta: Annotated[float | None, typer.Option(help="Delta of epsilon (default 1e-5).")] = None,
    dp_budget: Annotated[float | None, typer.Option(help="Leave out clients that would exceed this epsilon.")] = None,
    dp_strict: Annotated[
        bool | None, typer.Option("--dp-strict", help="Refuse methods that send what epsilon does not cover.")
    ] = None,
    robust: Annotated[
        str | None, typer.Option(help="Average of updates at the server: clip, median, trimmed_mean or krum.")
    ] = None,
    largest_norm: Annotated[float | None, typer.Option(help="Reject updates with a larger norm.")] = None,
    warm_start: Annotated[int | None, typer.Option(help="Rounds of FedAvg before every method.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Chance that an active client never replies.")] = None,
    stragglers: Annotated[float | None, typer.Option(help="Chance that a client does only part of its work.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Rounds between evaluations (0: only the last).")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints (default: 20 seconds between them).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    pool: Annotated[str | None, typer.Option(help="Where clients live: local, or ray for many machines.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster to join (default: one of this machine, for this run).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker threads or Ray workers (default: all cores).")] = None,
    state: Annotated[str | None, typer.Option(help="Where client states live: memory or disk.")] = None,
    data: DataFolder = None,
    sets: Sets = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out where it stopped.")] = False,
    report: Annotated[bool, typer.Option(help="Write report.html at the end.")] = True,
) -> None:
    """Run methods on the same clients, batches and starts; without arguments: the demo on digits."""
    settings = _settings(locals(), "config", "out", "resume", "report", "sets")
    _run(config, settings, tuple(sets or ()), out, resume, report)


def _settings(given: dict[str, Any], *not_settings: str) -> dict[str, Any]:
    settings = {k: v for k, v in given.items() if k not in not_settings and v is not None}
    if "seeds" in settings:
        settings["seeds"] = integers("--seeds", settings["seeds"])
    if settings.get("validation", "auto") != "auto":
        settings["validation"] = number("--validation", settings["validation"])
    return settings


def _run(
    config: Path | None, settings: dict[str, Any], sets: tuple[str, ...], out: Path | None, resume: bool, report: bool
) -> None:
    from kinfed.cli.display import display, results_table
    from kinfed.runs import experiment
    from kinfed.runs.config import NON_RESULT_SETTINGS, make_config

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the run to continue")
    decisive = [name for name in settings if name not in NON_RESULT_SETTINGS]
    if resume and out is not None and config is None and not decisive and not sets:
        # "kinfed run --out DIR --resume" alone is enough; where data lies and how to compute may differ this time.
        chosen = make_config(None, {**experiment.read_config(out).dump(), **settings})
    else:
        chosen = make_config(config, settings, sets)
    folder = out or Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    each = len(chosen.algorithms) * chosen.rounds + chosen.warm_start + chosen.pretrain
    total = len(chosen.seeds) * each
    console.print(_what(chosen), highlight=False, soft_wrap=True)
    with StopRequest(console) as stop, display(console, total) as shown:
        try:
            result = experiment.run(chosen, out=folder, resume=resume, observer=shown, should_stop=stop)
        except (experiment.Interrupted, KeyboardInterrupt):
            command = f"kinfed run --out {shlex.quote(str(folder))} --resume"
            console.print(f"stopped; what is done is saved. To continue: {command}", soft_wrap=True)
            raise typer.Exit(130) from None
        except PoolError as error:
            raise PoolError(
                f"{error}; continue from the last checkpoint with: kinfed run --out {shlex.quote(str(folder))} --resume"
            ) from error
    console.print(results_table([r.summary() for r in result.results]))
    console.print(f"results  {folder}", highlight=False, soft_wrap=True)
    if report:
        from kinfed.report import build

        console.print(f"report   {build([folder], folder / 'report.html')}", highlight=False, soft_wrap=True)


def _what(config: Any) -> str:
    from kinfed.runs.build import partition_name

    seeds = "seed" if len(config.seeds) == 1 else "seeds"
    return (
        f"{config.dataset.name} shared out by {partition_name(config)}, model {config.model.name}; "
        f"{', '.join(config.algorithms)}; "
        f"{config.rounds} rounds, participation {config.participation:g}, {len(config.seeds)} {seeds}"
    )


app.command()(reproduce)
app.command()(deployment.predict)
app.add_typer(deployment.deploy, name="deploy")
app.add_typer(deployment.vault, name="vault")


@app.command("list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, datasets, partitions, models or recipes; or one of their names, for its options."
        ),
    ] = None,
) -> None:
    """Show what there is, or the options of one method, data set, partition or model."""
    from kinfed.cli.listing import catalog, options_of
    from kinfed.errors import unknown_name
    from kinfed.reproduce.recipes import summaries

    kinds = catalog() | {"recipes": summaries()}
    if what is not None and what not in kinds:
        home = next((kind for kind, names in kinds.items() if what in names), None)
        if home is None:
            raise unknown_name("list", what, [*kinds, *(name for names in kinds.values() for name in names)])
        console.print(f"{what}: {kinds[home][what]}", highlight=False)
        for option in options_of(what):
            console.print(f"  --set {_owner(home, what)}.{option.name}={option.default}", highlight=False, markup=False)
            if option.text:
                console.print(f"      {option.text}", style="dim", highlight=False, markup=False)
        return
    for kind in [what] if what else kinds:
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for name, summary in kinds[kind].items():
            table.add_row(name, summary)
        console.print(table)
        if not what:
            console.print()
    if what is None:
        console.print("kinfed list NAME shows the options of a method, data set, partition or model.")


def _owner(kind: str, name: str) -> str:
    return name if kind == "algorithms" else kind.removesuffix("s")


@app.command("describe")
def describe_(
    config: Config = None,
    dataset: Annotated[str | None, typer.Option(help="A name, or a .csv/.parquet file.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data is shared out.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    client_column: Annotated[str | None, typer.Option(help="Column that names the client.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the class.")] = None,
    group_column: Annotated[str | None, typer.Option(help="Column with the client's group.")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column with train, val or test.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    data: DataFolder = None,
    sets: Sets = None,
    save: Annotated[Path | None, typer.Option(help="Save the federation in this folder.")] = None,
) -> None:
    """Show who holds what: sizes, classes per client, distance between clients' label distributions."""
    from kinfed.cli.federation_view import FederationView
    from kinfed.data.describe import describe
    from kinfed.runs.build import build_federation
    from kinfed.runs.config import make_config

    not_settings = ("config", "sets", "save", "seed", "describe", "make_config", "build_federation", "FederationView")
    settings = _settings({k: v for k, v in locals().items() if k != "not_settings"}, *not_settings)
    federation = build_federation(make_config(config, settings, tuple(sets or ())), seed)
    console.print(FederationView(describe(federation)))
    for note in federation.notes:
        console.print(f"note: {note}", highlight=False)
    if save is not None:
        federation.save(save)
        console.print(f"saved    {save}", highlight=False)


@app.command("report")
def report_(
    folders: Annotated[list[Path], typer.Argument(help="Run folders to show on one page.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Page to write.")] = None,
) -> None:
    """Build the HTML page of one or several runs."""
    from kinfed.report import build

    target = out or (folders[0] / "report.html")
    console.print(f"report   {build(folders, target)}", highlight=False, soft_wrap=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    client: Annotated[str, typer.Option(help="Name of the client, as in clients.csv.")],
    algorithm: Annotated[str | None, typer.Option(help="Method (where the run has several).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (default: the first).")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write (.safetensors).")] = None,
) -> None:
    """Write one client's personal model as safetensors that plain PyTorch loads."""
    from kinfed.runs.export import export_model

    written = export_model(folder, client, algorithm, seed, out)
    console.print(f"wrote    {written.path} ({written.summary})", highlight=False, soft_wrap=True)


@app.command()
def adopt(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    table: Annotated[Path, typer.Option(help="The newcomer's data: a .csv or .parquet file, a row per example.")],
    label_column: Annotated[str, typer.Option(help="Column with the class.")],
    split_column: Annotated[str | None, typer.Option(help="Column with train, val or test.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Column of images instead of feature columns.")] = None,
    ignore: Annotated[str, typer.Option(help="Columns that are not features, separated by commas.")] = "",
    algorithm: Annotated[str | None, typer.Option(help="Method (where the run has several).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (default: the first).")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of local training (default: as a client's in the run).")
    ] = None,
    group: Annotated[str | None, typer.Option(help="The newcomer's group, where the method needs it.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the model (.safetensors).")] = None,
) -> None:
    """A new client joins a finished run: its model, beside training alone and the server's model."""
    from kinfed.runs.adopt import adopt as adopt_client
    from kinfed.runs.adopt import newcomer_from_table

    newcomer = newcomer_from_table(
        folder, table, label_column, split_column=split_column, image_column=image_column, ignore=ignore, seed=seed
    )
    found = adopt_client(folder, newcomer, algorithm, seed=seed, rounds=rounds, group=group)
    console.print(found)
    if out is not None:
        found.save(folder, out)
        console.print(f"wrote    {out}", highlight=False, soft_wrap=True)


@app.command()
def gain(
    source: Annotated[Path, typer.Argument(help="Folder of a Self-FL run, or a table: client, estimate, variance, n.")],
    algorithm: Annotated[str | None, typer.Option(help="Self-FL method of the run (default: the first).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run (default: the first).")] = None,
    s0: Annotated[float | None, typer.Option(help="Variance between clients, where it is known.")] = None,
    margin: Annotated[float, typer.Option(help="Smaller changes than this share count as none.")] = 0.05,
    limit: Annotated[int, typer.Option(help="Clients to show.")] = 40,
) -> None:
    """Who gains from federating: each client's theoretical error alone, with Self-FL's estimate, with the exact one."""
    from kinfed.runs.gain import gain_from_table, render, summary
    from kinfed.runs.gain_of_run import gain_from_run

    if source.is_dir():
        found = gain_from_run(source, algorithm, seed, s0=s0, margin=margin)
    else:
        found = gain_from_table(source, s0=s0, margin=margin)
    console.print(render(found, limit))
    console.print(summary(found), highlight=False, soft_wrap=True)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another run.")],
    tolerance: Annotated[float, typer.Option(help="Largest difference between numbers that counts as none.")] = 0.0,
) -> None:
    """Say whether two runs have the same results, times aside; exit status 1 where they differ."""
    from kinfed.runs.folder import same_results

    differences = same_results(first, second, tolerance=tolerance)
    for line in differences:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if differences:
        raise typer.Exit(1)
    console.print("same results")


@app.command()
def bench(
    workloads: Annotated[list[str] | None, typer.Argument(help="mlr, mlp, cnn, mlr-10k; all where absent.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of each contestant.")] = 7,
    threads: Annotated[str, typer.Option(help="Numbers of cores, e.g. 1,2 (default: one, and all).")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny workloads: does everything run?")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Measure rounds against a plain PyTorch loop and against the limits of this machine."""
    from kinfed.bench import print_result, run_benchmarks
    from kinfed.core import storage

    with console.status("") as status:
        result = run_benchmarks(
            workloads or (), repeats, integers("--threads", threads), quick=quick, progress=status.update
        )
    print_result(result, console)
    if json is not None:
        storage.write_atomically(json, (result.to_json() + "\n").encode())


@app.command()
def tune(
    config: Config = None,
    dataset: Annotated[str | None, typer.Option(help="A name, or a .csv/.parquet file.")] = None,
    partition: Annotated[str | None, typer.Option(help="How data is shared out.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    client_column: Annotated[str | None, typer.Option(help="Column that names the client.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the class.")] = None,
    group_column: Annotated[str | None, typer.Option(help="Column with the client's group.")] = None,
    split_column: Annotated[str | None, typer.Option(help="Column with train, val or test.")] = None,
    validation: Annotated[str | None, typer.Option(help="Share of training data to choose by (default 0.2).")] = None,
    model: Annotated[str | None, typer.Option(help="Model (kinfed list models).")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Methods to tune, e.g. fedavg,ditto.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds of a trial.")] = None,
    participation: Annotated[float | None, typer.Option(help="Share of clients active in a round, in (0, 1].")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds that a trial is averaged over (default 0).")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size.")] = None,
    steps: Annotated[int | None, typer.Option(help="Local steps per round (default 20).")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round instead of steps.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker threads (default: all cores).")] = None,
    data: DataFolder = None,
    sets: Sets = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", help="label.option=low:high instead of the usual range (repeatable)."),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Trials per method (default 20).")] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Stop trials early that fall behind.")] = False,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the tuning in --out, or add trials.")] = False,
) -> None:
    """Choose each method's settings on validation data, with the same budget for every method."""
    settings = _settings(locals(), "config", "out", "resume", "sets", "ranges", "trials", "prune")
    _tune(config, settings, tuple(sets or ()), tuple(ranges or ()), trials, prune, out, resume)


def _tune(
    config: Path | None,
    settings: dict[str, Any],
    sets: tuple[str, ...],
    ranges: tuple[str, ...],
    trials: int | None,
    prune: bool,
    out: Path | None,
    resume: bool,
) -> None:
    from kinfed.algorithms.search_spaces import parse_ranges
    from kinfed.cli.display import tuning_line, tuning_table
    from kinfed.runs.config import make_config
    from kinfed.runs.experiment import Interrupted
    from kinfed.runs.tune import read_tuning
    from kinfed.runs.tune import tune as search

    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the tuning to continue")
    folder = out or Path("tuned") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if resume and config is None and not settings and not sets and not ranges:
        before = read_tuning(folder)  # "kinfed tune --out DIR --resume" alone is enough
        chosen, varied, prune = before.config, before.ranges, before.prune
        trials = before.trials if trials is None else trials
    else:
        chosen = make_config(config, settings, sets)
        varied = parse_ranges(ranges, {label: options["method"] for label, options in chosen.algorithms.items()})
        if "seeds" not in chosen.model_fields_set:
            chosen = chosen.model_copy(update={"seeds": (0,)})
    trials = 20 if trials is None else trials
    console.print(f"{_what(chosen)}; {trials} trials per method", highlight=False, soft_wrap=True)

    def watch(*trial: Any) -> None:
        console.print(tuning_line(*trial), highlight=False, markup=False, soft_wrap=True)

    with StopRequest(console) as stop:
        try:
            result = search(
                chosen, trials, folder, resume=resume, ranges=varied, prune=prune, watch=watch, should_stop=stop
            )
        except (Interrupted, KeyboardInterrupt):
            command = f"kinfed tune --out {shlex.quote(str(folder))} --resume"
            console.print(f"stopped; finished trials are saved. To continue: {command}", soft_wrap=True)
            raise typer.Exit(130) from None
    console.print(tuning_table([(tuned.label, tuned.to_json()) for tuned in result.methods]))
    console.print(f"settings {result.file}", highlight=False, soft_wrap=True)
    console.print(f"run with kinfed run {shlex.quote(str(result.file))}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of the command `kinfed`."""
    try:
        app()
    except KinfedError as error:
        _complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; say nothing more
        sys.exit(1)
    except OSError as error:
        _complain(str(StorageError(f"{error.filename or 'disk'}: {error.strerror or error}")))


def _complain(sentence: str) -> None:
    Console(stderr=True).print(f"error: {sentence}", style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(2)
