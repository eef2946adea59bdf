"""Commands on the folders of runs: report, export, adopt, gain, compare, runs, board."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import (
    DeclaredCommand,
    OptionPanel,
    Plugins,
    RunFolderArgument,
    TrustPlugins,
    trust_recorded,
)
from kinfed.cli.terminal import console, say
from kinfed.errors import ConfigError

Algorithm = Annotated[str | None, Option(help="Method (if the run has several).")]
Seed = Annotated[int | None, Option(help="Seed (default: the first).")]


def report(
    folders: Annotated[list[Path], Argument(help="Run folders to show on one page.")],
    out: Annotated[
        Path | None,
        Option(
            "--out", "-o", help="Page to write (default: report.html of the run; comparison.html here for several)."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Build the HTML page of one or several runs."""
    from kinfed.report import build

    say(f"report   {build(folders, out)}")


def export(
    folder: Annotated[Path, Argument(help="Folder of a finished run, or of kinfed fit.")],
    client: Annotated[
        str | None, Option(help="Name of the client, as in clients.csv (default: the server's model).")
    ] = None,
    algorithm: Algorithm = None,
    seed: Seed = None,
    out: Annotated[Path | None, Option("--out", "-o", help="File to write (.safetensors or .onnx).")] = None,
    onnx: Annotated[bool, Option("--onnx", help="Write ONNX, preprocessing included (extra onnx).")] = False,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write one client's personal model, or the server's, as safetensors that plain PyTorch loads, or as ONNX."""
    from kinfed.core import storage
    from kinfed.serving import export_model, model_of_run
    from kinfed.tabular import FitResult, is_fit

    trust_recorded(folder, trust_plugins)
    if not onnx and not is_fit(folder):
        exported = export_model(folder, client, algorithm, seed, out)
        say(f"wrote    {exported.path} ({exported.summary})")
        return
    model = FitResult.read(folder).model(client) if is_fit(folder) else model_of_run(folder, client, algorithm, seed)
    name = storage.file_name(client or "server", any_letters=True)
    path = out or Path(f"{name}.{'onnx' if onnx else 'safetensors'}")
    if onnx:
        from kinfed.serving import write_onnx

        write_onnx(model, path)
    else:
        model.save(path)
    say(f"wrote    {path} ({model.about['model']}, {model.about['algorithm']})")


def coefficients(
    folder: RunFolderArgument,
    algorithm: Algorithm = None,
    seed: Seed = None,
    profile: Annotated[
        bool, Option("--profile", help="Intervals by the profile likelihood, too (method lmm).")
    ] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", help="File to write: .csv, .tex or .md (default: the terminal).")
    ] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Show coefficients with standard errors and intervals, and how sites differ (methods lmm, glmm and cox)."""
    from kinfed.core import storage
    from kinfed.newcomers import profiled
    from kinfed.records import load_run
    from kinfed.report import coefficient_table
    from kinfed.serving import coefficients as fits

    if profile:
        trust_recorded(folder, trust_plugins)
    run = load_run(folder.resolve(), folder.name)
    fit = fits.coefficients_of(run, algorithm, seed)
    if profile:
        fit = profiled(folder, fit.label, seed=fit.seed)
    table = coefficient_table(fit)
    if out is None:
        console.print(table)
    else:
        forms = {".csv": table.csv, ".tex": table.latex, ".md": table.markdown}
        if out.suffix not in forms:
            raise ConfigError(f"--out writes .csv, .tex or .md; got {out}")
        storage.write_atomically(out, forms[out.suffix]().encode())
    for sentence in fit.sentences():
        say(sentence)
    if out is not None:
        say(f"wrote    {out}")


def newcomer_panels() -> Iterator[OptionPanel]:
    """Options of `kinfed adopt` that say how the new client's table is read."""
    from kinfed.data.sources import TableOptions

    names = ("label_column", "time_column", "event_column", "split_column", "weight_column", "image_column",
             "text_column", "tokenizer", "ignore")  # fmt: skip
    yield OptionPanel(None, TableOptions, names)


AdoptCommand = DeclaredCommand.of(
    newcomer_panels,
    after="table",
    texts={
        "label_column": "Column with the class, or the number to predict.",
        "split_column": "Column with train, val or test.",
        "weight_column": "Column with the weight of a row in training.",
        "text_column": "Column of texts (default: as in the run).",
        "tokenizer": "Its tokenizer's folder (default: as in the run).",
    },
)


def adopt(
    context: typer.Context,
    folder: RunFolderArgument,
    table: Annotated[Path, Option(help="The newcomer's data: a .csv or .parquet file, one row per example.")],
    algorithm: Algorithm = None,
    seed: Seed = None,
    rounds: Annotated[int | None, Option(help="Rounds of local training (default: as a client's in the run).")] = None,
    group: Annotated[str | None, Option(help="The newcomer's group, if the method needs it.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="File for the model (.safetensors).")] = None,
    out_alone: Annotated[Path | None, Option(help="File for what it learns alone (for kinfed insure, watch).")] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Let a new client join a finished run; compares its model with training alone and the server's."""
    from kinfed.newcomers import adopt as adopt_client
    from kinfed.newcomers import newcomer_from_table

    trust_recorded(folder, trust_plugins)
    newcomer = newcomer_from_table(folder, table, **context.obj, seed=seed)
    adoption = adopt_client(folder, newcomer, algorithm, seed=seed, rounds=rounds, group=group)
    console.print(adoption)
    if out is not None:
        adoption.save(folder, out)
        say(f"wrote    {out}")
    if out_alone is not None:
        adoption.save_alone(folder, out_alone)
        say(f"wrote    {out_alone}")


def forget(
    folder: RunFolderArgument,
    client: Annotated[list[str], Option(help="Name of a client to forget; may be given several times.")],
    out: Annotated[Path, Option("--out", "-o", help="Folder for the models and the record.")],
    algorithm: Algorithm = None,
    seed: Seed = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Take clients out of a finished run, exactly (method lmm): the fit as if they had never taken part."""
    from kinfed.newcomers import forget as forget_clients

    trust_recorded(folder, trust_plugins)
    forgotten = forget_clients(folder, client, algorithm, seed=seed)
    forgotten.save(out)
    for sentence in forgotten.coefficients().sentences():
        say(sentence)
    say(f"{', '.join(forgotten.names)} left no sum in {out}; {folder} is as it was: delete it to forget them there")
    say(f"wrote    {out} ({len(forgotten.models)} models, server.safetensors, forgotten.json)")


def watch(
    model: Annotated[Path, Argument(help="Folder of kinfed fit, or a model file with --against.")],
    table: Annotated[Path, Argument(help="New labelled rows in the order they came: .csv or .parquet.")],
    client: Annotated[str | None, Option(help="The site whose model is watched (of a fit).")] = None,
    label_column: Annotated[str | None, Option(help="Column with the truth (default: as in the fit).")] = None,
    against: Annotated[Path | None, Option(help="File of the site's own model.")] = None,
    alpha: Annotated[float, Option(help="Chance of a false alarm, however often you look.")] = 0.05,
) -> None:
    """Watch a deployed model on new rows: is it still as good as the site's own, do its sets cover? Exit 1: alarm."""
    from kinfed.serving import ModelPipeline
    from kinfed.tabular import FitResult, is_fit
    from kinfed.tabular import watch as watches

    if is_fit(model):
        if client is None:
            raise ConfigError("which site? Give --client NAME, one of the sites of the fit")
        result = watches.watch_site(FitResult.read(model), client, table, label_column, alpha)
    elif against is None or label_column is None:
        raise ConfigError("a model file is watched beside another: give --against FILE and --label-column NAME")
    else:
        result = watches.watch_models(
            ModelPipeline.read(model), ModelPipeline.read(against), table, label_column, alpha
        )
    for sentence in result.sentences():
        say(sentence)
    if result.is_alarmed:
        raise typer.Exit(1)


def insure(
    own: Annotated[Path, Argument(help="File of the model that the site trained alone.")],
    others: Annotated[list[Path], Argument(help="Files of models that learnt with others.")],
    rows: Annotated[Path, Option(help="Labelled rows that trained and chose no model: .csv or .parquet.")],
    label_column: Annotated[str, Option(help="Column with the truth.")],
    out: Annotated[Path, Option("--out", "-o", help="File of the mixture.")],
    alone_prior: Annotated[float, Option(help="Prior weight of the own model.")] = 0.5,
) -> None:
    """Mix a model of a deployment, or an adopted one, with the site's own: it can hardly cost more than that."""
    from kinfed.serving import ModelPipeline
    from kinfed.tabular import insure

    models = [ModelPipeline.read(path) for path in (own, *others)]
    insured = insure(models[0], models[1:], rows, label_column, alone_prior=alone_prior)
    insured.model.save(out)
    for sentence in insured.sentences():
        say(sentence)
    say(f"wrote    {out}")


def gain(
    source: Annotated[
        Path, Argument(help="Folder of a run or of kinfed fit, or a table: client, estimate, variance, n.")
    ],
    algorithm: Annotated[str | None, Option(help="Method of the run (default: the best federated one).")] = None,
    seed: Annotated[int | None, Option(help="Seed of the run (default: the first).")] = None,
    s0: Annotated[float | None, Option(help="Variance between clients, if known.")] = None,
    margin: Annotated[float, Option(help="Changes smaller than this share count as none.")] = 0.05,
    limit: Annotated[int, Option(help="Clients to show.")] = 40,
) -> None:
    """Show who gains from federating: every client's figure alone and with a method, measured in a run that has local.
    Of Self-FL runs and of tables, also each client's theoretical error."""
    from kinfed.analysis import gain
    from kinfed.tabular import FitResult, is_fit

    if is_fit(source):
        from kinfed.cli.fit_command import show_gains

        if algorithm is not None or seed is not None:
            raise ConfigError(
                f"{source} holds the choice of every site; one method is in a folder of {source / 'runs'}"
            )
        show_gains(FitResult.read(source), limit)
        return
    if source.is_dir():
        from kinfed.report import measured_gain

        reason = None
        try:
            table, sentence = measured_gain(source, algorithm, limit)
        except ConfigError as error:
            reason = error
        else:
            console.print(table)
            say(sentence)
        try:
            gains = gain.gain_from_run(source, algorithm, seed, s0=s0, margin=margin)
        except ConfigError:
            if reason is not None:
                raise reason from None
            return
    else:
        gains = gain.gain_from_table(source, s0=s0, margin=margin)
    console.print(gain.render(gains, limit))
    say(gain.summary(gains))


def compare(
    first: Annotated[Path, Argument(help="Folder of a run.")],
    second: Annotated[Path, Argument(help="Folder of another run.")],
    tolerance: Annotated[float, Option(help="Largest difference between numbers that counts as none.")] = 0.0,
) -> None:
    """Check whether two runs have the same results, apart from times; exit status 1 if they differ."""
    from kinfed.records import same_results

    differences = same_results(first, second, tolerance=tolerance)
    for line in differences:
        say(line)
    if differences:
        raise typer.Exit(1)
    say("same results")


Folder = Annotated[Path, Argument(help="Folder with runs in it, at any depth.")]


def runs(
    folder: Folder = Path("runs"),
    dataset: Annotated[str, Option(help="Only runs on this data set.")] = "",
    algorithm: Annotated[str, Option(help="Only runs with this method.")] = "",
    state: Annotated[str, Option(help="Only runs that are finished, running, stopped or damaged.")] = "",
    where: Annotated[
        list[str] | None, Option(help="Only runs with this setting, e.g. rounds=40 or algorithms.ditto.lam=0.1.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON line per run, with all its settings.")] = False,
) -> None:
    """List the runs in a folder, newest first."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    from kinfed.records import find_runs, matching

    pairs = [text.partition("=") for text in where or ()]
    if wrong := [name + equals for name, equals, value in pairs if not equals or not value]:
        raise ConfigError(f"--where takes setting=value, such as rounds=40; got {wrong[0]!r}")
    wanted = {name.strip(): value.strip() for name, _, value in pairs}
    every = find_runs(folder)
    chosen = matching(every, dataset=dataset, algorithm=algorithm, state=state, where=wanted)
    if as_json:
        for run in chosen:
            about = {"path": str(run.path), "state": run.state, "done": run.done, "planned": run.planned}
            best = None if run.best is None else {"algorithm": run.best.algorithm, run.best.metric: run.best.mean}
            print(json.dumps({**about, "best": best, "settings": dict(run.settings)}))
        return
    if not chosen:
        say(f"none of the {len(every)} runs in {folder} match" if every else f"there are no runs in {folder}")
        return
    title = Text(f"{len(chosen)} of {len(every)} runs in {folder}")
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE)
    for heading in ("run", "state", "data", "methods", "seeds", "rounds", "best mean", "changed"):
        is_figure = heading in ("seeds", "rounds")
        # Names fold on narrow terminals: a cut one could not be copied.
        table.add_column(heading, overflow="fold", justify="right" if is_figure else "left")
    for run in chosen:
        table.add_row(
            Text(run.name),
            run.state if run.state in ("finished", "damaged") else f"{run.state}, {run.done} of {run.planned}",
            Text(run.dataset),
            Text(", ".join(run.algorithms[:6]) + (", ..." if len(run.algorithms) > 6 else "")),
            str(len(run.settings.get("seeds") or ())),
            str(run.settings.get("rounds", "")),
            Text("" if run.best is None else str(run.best)),
            datetime.fromtimestamp(run.changed).strftime("%m-%d %H:%M"),
        )
    console.print(table)


def board(
    folder: Folder = Path("runs"),
    port: Annotated[int, Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)] = 8050,
    show: Annotated[bool, Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a local, read-only page with all runs in a folder, and running ones live."""
    from kinfed.board import BoardServer

    with BoardServer(folder, port) as server:
        say(f"board    {server.url}  (this machine only, read-only; Ctrl-C ends it)")
        if show:
            typer.launch(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")
