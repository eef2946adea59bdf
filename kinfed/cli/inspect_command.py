"""`kinfed list` and `kinfed describe`: registered names, which the documentation lists too, and who holds
which data."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from typer import Argument, Option

from kinfed.cli import installed
from kinfed.cli.parameters import Plugins, settings_of
from kinfed.cli.terminal import console, plain_table, say
from kinfed.core import registry_of
from kinfed.errors import unknown_name

if TYPE_CHECKING:
    from kinfed.core import OptionDoc

# As `kinfed list` calls them, and as their registries do. Only the registries that are asked for are imported.
KINDS = {
    "algorithms": "algorithm", "datasets": "dataset", "partitions": "partition", "models": "model", "presets": "preset",
    "losses": "loss",
}  # fmt: skip
RECIPES = "recipes"
_OTHER_WORDS = {"method": "algorithms", "methods": "algorithms", "recipe": RECIPES}

DESCRIBE_SETTINGS = (
    "plugins", "dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column",
    "weight_column", "time_column", "event_column", "person_column", "order_column", "task", "columns", "encoding",
    "stratify", "data",
)  # fmt: skip


def list_(
    what: Annotated[
        str | None,
        Argument(
            help="methods, datasets, partitions, models, presets, losses or recipes; or one of them, for its options."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """List methods, data sets, partitions, models or recipes, or show the options of one of them."""
    what = None if what is None else kind_named(what)
    if what is not None and what not in (*KINDS, RECIPES):
        kind = kind_of(what)
        say(f"{what}: {names(kind)[what]}")
        if kind == "algorithms" and (paper := reference_of(what)):
            say(f"  {paper}")
        if kind == "models" and (sizes := model_sizes(what))[0]:
            say("  {} parameters for examples {}; gradients: {}".format(*sizes, gradient_path(what)))
        if kind == "presets":
            console.print(_preset_table(what))
        for option in options_of(what):
            say(f"  --set {owner(kind, what)}.{option.name}={option.default}")
            if option.text:
                say(f"      {option.text}" + (f" ({option.bounds})" if option.bounds else ""), style="dim")
        if kind == "algorithms":
            _say_published(what)
        return
    if what == "models":
        console.print(_model_table())
        say(
            "path: how gradients are computed; if two are given, the second is used in most runs (fused) or for "
            "small steps (batched)"
        )
        return
    for kind in (what,) if what else kinds():
        table = plain_table(title=kind, title_justify="left", show_header=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        for name, summary in names(kind).items():
            table.add_row(name, summary)
        console.print(table)
        if not what:
            say("")
    if what is None:
        say("kinfed list NAME shows the options of a method, data set, partition or model.")


def _say_published(name: str) -> None:
    """Say what --as-published changes, and in what the method differs from its paper all the same."""
    from kinfed.config import in_words

    facts = registry_of("algorithm")[name].facts
    if facts.get("published"):
        say(f"  --as-published: {in_words(facts['published'])}")
    if facts.get("unpublished"):
        say(f"  not as published, whatever the options: {facts['unpublished']}")


def _model_table() -> Table:
    """Models with their sizes and paths."""
    table = plain_table(title="models", title_justify="left")
    table.add_column("name", no_wrap=True, style="bold")
    for heading in ("parameters", "for examples", "path"):
        table.add_column(heading, no_wrap=heading == "for examples")
    table.add_column("")
    for name, summary in names("models").items():
        table.add_row(name, *model_sizes(name), gradient_path(name), summary)
    return table


def _preset_table(name: str) -> Table:
    """Settings of every method by model family; nothing if it has none."""
    from kinfed.config import in_words, preset_families, preset_methods

    table = plain_table()
    table.add_column("method", no_wrap=True, style="bold")
    by_family = {family: preset_methods(name, family) for family in preset_families(name)}
    for family in by_family:
        table.add_column(family)
    for method in registry_of("algorithm"):
        if any(method in settings for settings in by_family.values()):
            table.add_row(method, *(in_words(settings.get(method, {})) for settings in by_family.values()))
    return table


def describe(
    context: typer.Context,
    seed: Annotated[int, Option(help="Seed of the partition.")] = 0,
    save: Annotated[Path | None, Option(help="Save the federation in this folder.")] = None,
    save_partition: Annotated[
        Path | None, Option(help="Write who holds which rows into this file, for --partition file; no data.")
    ] = None,
) -> None:
    """Show which client holds what: sizes, classes per client, distances of label distributions."""
    from kinfed.cli.federation_view import FederationView
    from kinfed.data import audited
    from kinfed.data import describe as description_of
    from kinfed.runs import build_federation

    federation = audited(build_federation(settings_of(context).make_config(), seed, save_partition=save_partition))
    console.print(FederationView(description_of(federation)))
    if refused := list(dict.fromkeys(finding.name for finding in federation.findings if finding.refused)):
        say(f"refused by run, fit and tune unless --accept {','.join(refused)}")
    if save is not None:
        federation.save(save)
        say(f"saved    {save}")
    if save_partition is not None:
        say(f"saved    {save_partition}: kinfed run --partition file --set partition.path={save_partition}")


def kind_named(word: str) -> str:
    """The kind that a word such as "methods" or "model" stands for; other words are returned as they are."""
    return {**_OTHER_WORDS, **{singular: kind for kind, singular in KINDS.items()}}.get(word, word)


def kinds() -> tuple[str, ...]:
    """Kinds that can be listed: recipes only where the package that has them is installed."""
    return (*KINDS, RECIPES) if RECIPES in installed.names(installed.LISTS) else tuple(KINDS)


def names(kind: str) -> dict[str, str]:
    """Name -> one line, for one kind of thing."""
    if kind == RECIPES:
        return dict(installed.load_list(RECIPES))
    return {name: entry.summary for name, entry in registry_of(KINDS[kind]).items()}


def model_sizes(name: str) -> tuple[str, str]:
    """Parameters of a model, and the examples that they are counted for; empty if it has no example."""
    facts = registry_of("model")[name].facts
    if "example" not in facts:
        return "", ""
    trained, frozen = facts.get("trained"), facts.get("frozen", 0)
    if trained is None:
        from kinfed.engine import model_outline

        outline = model_outline(name)
        assert outline is not None  # it has an example
        trained, frozen = outline.trained, outline.frozen
    shape, classes = facts["example"]
    shared = f" + {_short(frozen)} frozen" if frozen else ""
    return f"{_short(trained)}{shared}", f"{'x'.join(map(str, shape))} -> {classes}"


def gradient_path(name: str) -> str:
    """How a model's gradients are computed; "" if it was registered without an example."""
    if known := registry_of("model")[name].facts.get("path"):
        return str(known)
    from kinfed.engine import model_outline

    outline = model_outline(name)
    return "" if outline is None else outline.backend


def _short(count: int) -> str:
    """1,234 as it is, from ten thousand on 12k, then 1.2M."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def kind_of(name: str) -> str:
    """The kind of thing that has this name."""
    known: list[str] = [*kinds()]
    for kind in kinds():
        if name in (here := names(kind)):
            return kind
        known += here
    raise unknown_name("name", name, known)


def reference_of(name: str) -> str:
    """The paper of a method: as registered, or else the paragraph with a year in the docstring of its module (which
    begins with the method's name where the module has several)."""
    entry = registry_of("algorithm")[name]
    if entry.reference:
        return entry.reference
    head = sys.modules[entry.target.__module__].__doc__ or ""
    papers = [text for text in head.split("\n\n")[1:] if re.match(r"\S.*\b(19|20)\d\d\b", text, re.S)]
    own = f"`{name}`: "
    papers.sort(key=lambda text: not text.startswith(own))
    return " ".join(papers[0].removeprefix(own).split()) if papers else ""


def owner(kind: str, name: str) -> str:
    """Owner of a thing's options in --set: an algorithm has its own, of the others there is one in a run."""
    return name if kind == "algorithms" else KINDS.get(kind, kind)


def options_of(name: str) -> list[OptionDoc]:
    """The options of a method, data set, partition or model, as --set takes them."""
    kind = kind_of(name)
    return [] if kind == RECIPES else registry_of(KINDS[kind])[name].describe_options()
