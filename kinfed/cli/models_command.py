"""Commands on finished models: export, adopt, forget, watch, insure."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import DeclaredCommand, OptionPanel, Plugins, RunFolderArgument, TrustPlugins, trust_recorded
from kinfed.cli.results_command import Algorithm, Seed
from kinfed.cli.terminal import console, say
from kinfed.errors import ConfigError


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
            raise ConfigError("give --client NAME, one of the sites of the fit")
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
    """Mix a model of a deployment, or an adopted one, with the site's own, at hardly any risk."""
    from kinfed.serving import ModelPipeline
    from kinfed.tabular import insure

    models = [ModelPipeline.read(path) for path in (own, *others)]
    insured = insure(models[0], models[1:], rows, label_column, alone_prior=alone_prior)
    insured.model.save(out)
    for sentence in insured.sentences():
        say(sentence)
    say(f"wrote    {out}")
