"""`kinfed doctor`: what is installed, what this machine can do, and which data there are."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from kinfed.cli.terminal import console, plain_table, say
from kinfed.version import __version__

# What each extra is for; pyproject.toml says what it holds.
EXTRAS = {
    "fast": "compiled loops (backend fused)",
    "dp": "epsilon of differential privacy",
    "tune": "kinfed tune",
    "ray": "rounds on several machines (--pool ray)",
    "node": "what a node or server of a deployment needs: flower and dp",
    "flower": "real clients (kinfed deploy)",
    "text": "tokenizers of pretrained encoders",
    "audio": "recordings (data set wakeword)",
    "onnx": "models as ONNX (kinfed export --onnx)",
    "huggingface": "federations from Hugging Face datasets",
    "tensorboard": "curves in TensorBoard (--track tensorboard)",
    "mlflow": "runs in MLflow (--track mlflow)",
    "wandb": "runs in Weights & Biases (--track wandb)",
}
BASE = ""


@dataclass(frozen=True)
class Package:
    """A requirement of kinfed as it is met here."""

    name: str
    wanted: str  # "<3,>=2.6"; "" is any version
    version: str | None  # None: not installed
    fits: bool  # installed, in a version that is admitted

    def __str__(self) -> str:
        if self.version is None:
            return f"{self.name}{self.wanted} is not installed"
        return f"{self.name} {self.version}" + ("" if self.fits else f" does not fit {self.wanted}")


def requirements(texts: list[str] | None = None) -> dict[str, list[Package]]:
    """Requirements of the base install (BASE) and of each extra, as met here; `texts`: those of another package."""
    from importlib import metadata

    from packaging.requirements import Requirement

    def package(requirement: Requirement) -> Package:
        name, specifier = requirement.name, requirement.specifier
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Package(name, str(specifier), None, False)
        return Package(name, str(specifier), version, specifier.contains(version, prereleases=True))

    packages: dict[str, list[Package]] = {extra: [] for extra in (BASE, *EXTRAS)}
    for text in metadata.requires("kinfed") or [] if texts is None else texts:
        requirement = Requirement(text)
        for extra, parts in packages.items():
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                parts.append(package(requirement))
                break  # what the base needs is not told again for every extra
    return packages


def doctor() -> None:
    """Show what is installed, which backends and devices there are, and which data; exit status 1 if a package is
    missing or does not fit."""
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
    say(f"base     {', '.join(map(str, base))}")
    table = plain_table("extra", "here", "packages", "for")
    lacking = [extra for extra, packages in extras.items() if not all(package.fits for package in packages)]
    for extra, packages in extras.items():
        table.add_row(extra, "no" if extra in lacking else "yes", ", ".join(map(str, packages)), EXTRAS[extra])
    console.print(table)
    if lacking:
        say(f"not installed: pip install 'kinfed[{','.join(lacking)}]'")


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
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    sets = [name for name in folders if any((folder / name).rglob("*.parquet"))]
    names = ", ".join(sets) or "none yet; kinfed list datasets shows those that come with kinfed"
    say(f"data     {folder} ({named}): {names}")
    say(f"cache    {cache.cache_folder()}")
