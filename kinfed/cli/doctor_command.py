"""`kinfed doctor`: what is installed, what this machine can do, and which data there are."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from kinfed.cli.terminal import console, say
from kinfed.version import __version__

if TYPE_CHECKING:
    from kinfed.cli.installation import Package


def doctor() -> None:
    """Show what is installed, which backends and devices there are, and which data; exit status 1 where a package is
    missing or does not fit."""
    from kinfed.cli.installation import BASE, requirements

    packages = requirements()
    wrong = [package for package in packages[BASE] if not package.fits]
    _show_machine()
    _show_packages(packages.pop(BASE), packages)
    if not any(package.name == "torch" for package in wrong):
        _show_engine()
        _show_data()
    if wrong:
        say(f"wrong    {'; '.join(map(str, wrong))}", style="red")
        say("install again, with the versions that were tested: pip install -c constraints.txt .")
        raise typer.Exit(1)
    say("nothing is wrong")


def _show_machine() -> None:
    from kinfed.pools import physical_memory

    memory = physical_memory()
    say(f"kinfed   {__version__} in {Path(__file__).parents[1]}")
    say(f"python   {platform.python_version()} ({sys.executable}), {platform.platform()}")
    if memory is not None:
        say(f"memory   {memory / 2**30:.1f} GB")


def _show_packages(base: list[Package], extras: dict[str, list[Package]]) -> None:
    from kinfed.cli.installation import EXTRAS

    say(f"base     {', '.join(map(str, base))}")
    table = Table("extra", "here", "packages", "for", box=None, padding=(0, 2, 0, 0))
    for extra, packages in extras.items():
        here = "yes" if all(package.fits for package in packages) else "no"
        table.add_row(extra, here, ", ".join(map(str, packages)), EXTRAS[extra])
    console.print(table)
    if lacking := [extra for extra, packages in extras.items() if not all(package.fits for package in packages)]:
        say(f"what is not here: pip install 'kinfed[{','.join(lacking)}]'")


def _show_engine() -> None:
    import torch

    from kinfed.engine import is_installed
    from kinfed.pools import available_cores

    devices = ["cpu", *(f"cuda ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        devices.append("mps")
    say(f"cores    {available_cores()} for worker threads")
    say(f"devices  {', '.join(devices)}")
    say(f"backends {'fused (compiled), ' if is_installed() else ''}stacked, rows, batched, vmap")


def _show_data() -> None:
    from kinfed.core import cache
    from kinfed.data.sources import data_folder

    folder = data_folder(None)
    named = "KINFED_DATA" if os.environ.get("KINFED_DATA") else "KINFED_DATA or --data name another"
    there = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    sets = [name for name in there if any((folder / name).rglob("*.parquet"))]
    names = ", ".join(sets) or "none yet; kinfed list datasets says which come with kinfed"
    say(f"data     {folder} ({named}): {names}")
    say(f"cache    {cache.cache_folder()}")
