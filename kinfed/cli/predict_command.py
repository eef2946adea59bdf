"""`kinfed predict`: answers of one model, or of each client's own, for new examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import Plugins, TrustPlugins, trust_recorded
from kinfed.cli.terminal import console, plain_table, say
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.serving import ModelPipeline, Predictions


def predict(
    table: Annotated[Path, Argument(help="New examples: .csv, .tsv, .parquet, or x (or inputs) in .npz.")],
    out: Annotated[
        Path | None, Option("--out", "-o", help="CSV file to write (default: print to the terminal).")
    ] = None,
    model: Annotated[Path | None, Option(help="A model file (kinfed export, kinfed vault export).")] = None,
    vault: Annotated[Path | None, Option(envvar="KINFED_VAULT", help="Take the model from a vault.")] = None,
    run: Annotated[str | None, Option(help="Folder of a run or of kinfed fit, or a run in the vault.")] = None,
    client: Annotated[str | None, Option(help="Whose model (default of a folder: the server's).")] = None,
    client_column: Annotated[
        str | None, Option(help="Column that names the client of each row: each by its own model of --run.")
    ] = None,
    algorithm: Annotated[str | None, Option(help="Method (if the run has several).")] = None,
    seed: Annotated[int | None, Option(help="Seed (of a run folder).")] = None,
    image_column: Annotated[str | None, Option(help="Column of images instead of feature columns.")] = None,
    ignore: Annotated[str, Option(help="Columns that are not features (models without column names).")] = "",
    name_column: Annotated[str | None, Option(help="Column that names the rows in the output.")] = None,
    level: Annotated[
        float | None,
        Option(
            "--set",
            "--interval",
            help="Add sets or intervals that hold the truth this often, such as 0.9 (of fit, lmm, glmm).",
        ),
    ] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Predict classes with probabilities, or numbers, for new examples with one model; needs no server."""
    from kinfed.serving import predict as predicting

    trust_recorded(None if run is None else Path(run), trust_plugins)
    if client_column is not None:
        if run is None or not Path(run).is_dir() or client is not None:
            raise ConfigError("--client-column chooses among the models of a folder: give --run DIR, and no --client")
        by_client = _predictions_by_client(table, Path(run), client_column, algorithm, seed, name_column, level)
        _show(by_client, out, run)
        return
    source = _source(model, run, client, algorithm, seed, vault)
    predictions = predicting.predict(
        source, table, image_column=image_column, ignore=ignore, name_column=name_column, level=level
    )
    about = ", ".join(f"{key} {source.about[key]}" for key in ("client", "algorithm", "round") if key in source.about)
    _show(predictions, out, about)


def _source(
    model: Path | None, run: str | None, client: str | None, algorithm: str | None, seed: int | None, vault: Path | None
) -> ModelPipeline:
    """The one model that was asked for."""
    from kinfed.deploy import Vault
    from kinfed.serving import ModelPipeline, model_of_run
    from kinfed.tabular import FitResult, is_fit

    if model is not None:
        return ModelPipeline.read(model)
    if run is not None and is_fit(Path(run)):
        return FitResult.read(run).model(client)
    if run is not None and (Path(run) / "config.json").exists():
        return model_of_run(Path(run), client, algorithm, seed)
    if vault is not None:
        return ModelPipeline.read(Vault(vault).model_path(run, client))
    raise ConfigError(
        "name a model: --model FILE, --run DIR (of kinfed fit or kinfed run) with --client NAME, or --vault DIR"
    )


def _predictions_by_client(
    table: Path, folder: Path, column: str, algorithm: str | None, seed: int | None, name_column: str | None,
    level: float | None,
) -> Predictions:  # fmt: skip
    from kinfed.records import RunFiles
    from kinfed.serving import model_of_run, predict_by_client
    from kinfed.tabular import FitResult, is_fit

    if is_fit(folder):
        result = FitResult.read(folder)
        return predict_by_client(result.model, [one.site for one in result.sites], table, column, name_column, level)
    run = RunFiles(folder)
    names = run.description(run.seed(seed)).names
    return predict_by_client(
        lambda client: model_of_run(folder, client, algorithm, seed), names, table, column, name_column, level
    )


def _show(predictions: Predictions, out: Path | None, about: str) -> None:
    for note in predictions.notes:
        typer.echo(f"note     {note}", err=True)  # predictions may go to another program
    if out is not None:
        predictions.write(out)
        say(f"wrote    {out} ({len(predictions.outputs)} rows; {about})")
        return
    if not console.is_terminal:  # it goes into a file or another program
        typer.echo(predictions.csv_text(), nl=False)
        return
    from rich.text import Text

    table = plain_table()
    for heading in predictions.header:
        table.add_column(Text(heading))
    for line in predictions.lines():
        table.add_row(*map(Text, line))
    console.print(table)
