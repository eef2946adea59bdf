"""Megabytes of the base install and of what each extra adds, from the packages installed here, with all they need.

python benchmarks/install_sizes.py"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from kinfed.cli.doctor_command import EXTRAS

MEGABYTE = 1e6


PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]


def of_kinfed(extra: str) -> set[str]:
    """All packages that kinfed, or one of its extras, needs, as pyproject.toml says it."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return set().union(*(needed(Requirement(text).name) for text in texts))


def needed(name: str) -> set[str]:
    """Normalized names of all packages that an installed package needs, itself included."""
    names: set[str] = set()
    waiting = [(name, "")]
    while waiting:
        current, its_extra = waiting.pop()
        known = _normalized(current) in names
        names.add(_normalized(current))
        if known and not its_extra:
            continue
        for text in metadata.requires(current) or []:
            requirement = Requirement(text)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", its_extra}):
                following = [(requirement.name, e) for e in requirement.extras or [""]]
                waiting += [pair for pair in following if _normalized(pair[0]) not in names]
    return names


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def size(name: str) -> float:
    """Megabytes of an installed package's files."""
    files = metadata.files(name) or []
    paths = (Path(str(file.locate())) for file in files)
    return sum(path.stat().st_size for path in paths if path.is_file()) / MEGABYTE


def main() -> None:
    base = of_kinfed("")
    sizes = {name: size(name) for name in base}
    largest = sorted(base, key=lambda name: -sizes[name])[:5]
    print("| install | adds, MB | packages | the largest |\n|---|---:|---:|---|")
    named = ", ".join(f"{name} {sizes[name]:.0f}" for name in largest)
    print(f"| `kinfed` | {sum(sizes.values()):.0f} | {len(base)} | {named} |")
    for extra in (*EXTRAS, "docs", "dev"):
        try:
            added = of_kinfed(extra) - base
        except metadata.PackageNotFoundError as error:
            print(f"| `kinfed[{extra}]` | | | not measured: {error.name} is not installed here |")
            continue
        sizes = {name: size(name) for name in added}
        largest = sorted(added, key=lambda name: -sizes[name])[:3]
        named = ", ".join(f"{name} {sizes[name]:.0f}" for name in largest)
        print(f"| `kinfed[{extra}]` | {sum(sizes.values()):.0f} | {len(added)} | {named} |")


if __name__ == "__main__":
    main()
