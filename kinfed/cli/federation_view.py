"""A picture of a federation for the terminal: one line per client, one shaded cell per class."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from kinfed.data import Description, TablePreprocessing

MOST_CLIENTS = 30  # lines shown; more clients are sampled by size
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
_LEVELS = (0.0, 0.05, 0.2, 0.5)  # a cell has shade i when the class's share of the client's data exceeds level i - 1
_SHADES, _ASCII_SHADES = "·░▒▓█", ".-+*#"


@dataclass(frozen=True)
class FederationView:
    """A description that rich prints as a picture as wide as the terminal."""

    description: Description

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield picture(self.description, options.max_width, ascii_only=options.ascii_only)


def picture(d: Description, width: int = 100, *, ascii_only: bool = False) -> Group:
    sample = _sample(d)
    parts: list[Table | Text] = [Text(d.in_words(), style="bold"), _quantiles(d)]
    if len(sample) < d.num_clients:
        parts.append(Text(f"{len(sample)} of {d.num_clients:,} clients, from the largest to the smallest:"))
    shades = _ASCII_SHADES if ascii_only else _SHADES
    columns = _columns(d)
    notes: list[Table | Text] = [*([] if columns is None else [columns]), *(Text(f"note: {note}") for note in d.notes)]
    if not d.problem.has_classes:
        return Group(*parts, _target_table(d, sample), *notes)
    parts.append(_grid(d, sample, width, shades))
    bounds = ["none", *(f"up to {level:.0%}" for level in _LEVELS[1:]), "more"]
    legend = "  ".join(f"{shade} {bound}" for shade, bound in zip(shades, bounds, strict=True))
    parts.append(Text(f"share of a client's training data: {legend}", style="dim"))
    return Group(*parts, *notes)


def _columns(d: Description) -> Table | None:
    """Table of columns: how each is encoded, and why."""
    learnt = d.inputs.get("preprocessing")
    if learnt is None:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="columns", title_justify="left")
    for heading in ("column", "is a", "features", "gaps", "because"):
        table.add_column(
            heading, no_wrap=heading in ("column", "is a"), justify="right" if heading == "features" else "left"
        )
    for column in TablePreprocessing.from_json(learnt).encodings:
        kind = "left out" if column.kind == "skip" else column.kind
        gaps = "yes" if getattr(column, "gaps", False) else ""
        features = str(len(column.features)) if column.features else "-"
        table.add_row(Text(column.name), kind, features, gaps, Text(column.reason))
    return table


def _quantiles(d: Description) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("per client")
    for name in ("min", "10%", "median", "90%", "max", "mean"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, list[int] | list[float], str]] = [("train examples", d.sizes("train"), ",.0f")]
    if sum(d.sizes("val")):
        rows.append(("val examples", d.sizes("val"), ",.0f"))
    rows.append(("test examples", d.sizes("test"), ",.0f"))
    if d.emd is not None and d.emd_code is not None:
        rows += [("classes", d.classes_held, ".0f"), ("EMD", d.emd, ".2f")]
        rows.append(("EMD as in FedFomo's code", d.emd_code, ".2f"))
    for name, values, form in rows:
        cells = [format(value, form) for value in np.quantile(values, [0, 0.1, 0.5, 0.9, 1])]
        mean = format(float(np.mean(values)), ".2f" if form == ".2f" else ",.1f")
        table.add_row(name, *cells, mean)
    return table


def _sample(d: Description) -> list[int]:
    """All clients in order, or a sample evenly spaced in size."""
    if d.num_clients <= MOST_CLIENTS:
        return list(range(d.num_clients))
    by_size = np.argsort(-np.array(d.sizes("train")), kind="stable")
    places = np.linspace(0, d.num_clients - 1, MOST_CLIENTS).round().astype(int)
    return [int(by_size[place]) for place in places]


def _client_table(names: list[str], figures: list[str], **about: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **about)
    for column in names + figures:
        table.add_column(column, justify="right" if column in figures else "left", no_wrap=True)
    return table


def _target_table(d: Description, sample: list[int]) -> Table:
    survival = d.problem.kind == "survival"
    figures = ["events", "median time"] if survival else ["target, mean", "deviation"]
    table = _client_table(["client"], ["train", "test", *figures])
    train, test, targets = d.sizes("train"), d.sizes("test"), d.targets or [(0.0, 0.0)] * d.num_clients
    for k in sample:
        mean, deviation = targets[k]
        first = f"{mean:.0%}" if survival else f"{mean:.4g}"
        table.add_row(Text(d.names[k]), f"{train[k]:,}", f"{test[k]:,}", first, f"{deviation:.4g}")
    return table


def _grid(d: Description, sample: list[int], width: int, shades: str) -> Table:
    names = d.class_names or [str(label) for label in range(d.num_classes)]
    client_names = [d.names[k] if len(d.names[k]) <= 16 else d.names[k][:15] + "~" for k in sample]
    groups = None
    if d.groups is not None:
        groups = [d.group_names[d.groups[k]] if d.group_names else str(d.groups[k]) for k in sample]
    taken = max(map(len, [*client_names, "client"])) + (max(map(len, [*groups, "group"])) + 2 if groups else 0)
    cell, per_cell = _cell_size(names, width - taken - 27)
    names_of = ["client"] if groups is None else ["client", "group"]
    table = _client_table(names_of, ["train", "test", "EMD"], padding=(0, 1, 0, 0))
    table.add_column(Text(_heading(names, cell, per_cell)), no_wrap=True)
    train, test, emd = d.sizes("train"), d.sizes("test"), d.emd or [0.0] * d.num_clients
    for line, k in enumerate(sample):
        picture_of_k = _cells(d.train[k], cell, per_cell, shades)
        group = [] if groups is None else [Text(groups[line])]
        table.add_row(Text(client_names[line]), *group, f"{train[k]:,}", f"{test[k]:,}", f"{emd[k]:.2f}", picture_of_k)
    return table


def _cell_size(names: list[str], room: int) -> tuple[int, int]:
    """Characters of a cell, and classes in it: wide cells for few classes, several classes in one for very many."""
    room = max(room, 10)
    for cell in range(min(max(map(len, names)), 6) + 1, 1, -1):
        if cell * len(names) <= room:
            return cell, 1
    return 1, -(-len(names) // room)


def _heading(names: list[str], cell: int, per_cell: int) -> str:
    if cell > 1:
        short = [name[: cell - 1] for name in names]
        if len(set(short)) < len(short):  # cut names that look alike say less than numbers
            short = [str(label)[1 - cell :] for label in range(len(names))]
        return "".join(name.ljust(cell) for name in short)
    together = f", {per_cell} to a cell" if per_cell > 1 else ""
    return f"classes {names[0]} to {names[-1]}{together}"


def _cells(counts: list[int], cell: int, per_cell: int, shades: str) -> Text:
    total = max(sum(counts), 1)
    line = Text()
    for begin in range(0, len(counts), per_cell):
        share = sum(counts[begin : begin + per_cell]) / total
        level = sum(share > bound for bound in _LEVELS)
        style = _COLOURS[begin // per_cell % len(_COLOURS)] if level else "dim"
        line.append(shades[level] * max(cell - 1, 1), style=style)
        line.append(" " * (cell - max(cell - 1, 1)))
    return line
