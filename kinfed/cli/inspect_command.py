"""`kinfed list` and `kinfed describe`: what there is, and who holds what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kinfed.cli.parameters import Plugins, settings_of
from kinfed.cli.terminal import console, say

DESCRIBE_SETTINGS = (
    "plugins", "dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column",
    "weight_column", "columns", "stratify", "data",
)  # fmt: skip


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, datasets, partitions, models, presets or recipes; or the name of one, to see its options."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, data sets, partitions, models or recipes, or show the options of one of them."""
    from kinfed.cli import listing

    what = None if what is None else listing.kind_named(what)
    if what is not None and what not in (*listing.KINDS, listing.RECIPES):
        kind = listing.kind_of(what)
        say(f"{what}: {listing.names(kind)[what]}")
        if kind == "algorithms" and (paper := listing.reference_of(what)):
            say(f"  {paper}")
        if kind == "models" and (sizes := listing.model_sizes(what))[0]:
            say("  {} parameters for examples {}; gradients: {}".format(*sizes, listing.gradient_path(what)))
        if kind == "presets":
            console.print(_preset_table(what))
        for option in listing.options_of(what):
            say(f"  --set {listing.owner(kind, what)}.{option.name}={option.default}")
            if option.text:
                say(f"      {option.text}" + (f" ({option.bounds})" if option.bounds else ""), style="dim")
        return
    if what == "models":
        console.print(_model_table())
        say(
            "path: how gradients are computed; where two are given, the second is used in most runs (fused) or for "
            "small steps (batched)"
        )
        return
    for kind in (what,) if what else listing.kinds():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for name, summary in listing.names(kind).items():
            table.add_row(name, summary)
        console.print(table)
        if not what:
            say("")
    if what is None:
        say("kinfed list NAME shows the options of a method, data set, partition or model.")


def _model_table() -> Table:
    """Models with their sizes and paths."""
    from kinfed.cli import listing

    table = Table(title="models", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True, style="bold")
    for heading in ("parameters", "for examples", "path"):
        table.add_column(heading, no_wrap=heading == "for examples")
    table.add_column("")
    for name, summary in listing.names("models").items():
        table.add_row(name, *listing.model_sizes(name), listing.gradient_path(name), summary)
    return table


def _preset_table(name: str) -> Table:
    """Settings of every method by model family."""
    from kinfed.cli import listing

    families, rows = listing.preset_rows(name)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True, style="bold")
    for family in families:
        table.add_column(family)
    for method, settings in rows.items():
        table.add_row(method, *settings)
    return table


def describe(
    context: typer.Context,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Save the federation in this folder.")] = None,
) -> None:
    """Show who holds what: sizes, classes per client, how far apart label distributions are."""
    from kinfed.cli.federation_view import FederationView
    from kinfed.data import describe as description_of
    from kinfed.runs import build_federation

    federation = build_federation(settings_of(context).make_config(), seed)
    console.print(FederationView(description_of(federation)))
    if save is not None:
        federation.save(save)
        say(f"saved    {save}")
