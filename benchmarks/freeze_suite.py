"""Write digests and baselines of a suite's federations into its file; those that are there stay as they are.

    python benchmarks/freeze_suite.py mine.toml

A frozen suite is not written anew: this is for a suite that is being made. Federations whose data are not here are left
without, and are refused where somebody asks for them."""

from __future__ import annotations

import sys
from pathlib import Path

import kinfed.arena
from kinfed.arena import suite
from kinfed.errors import MissingDataError


def main(name: str) -> None:
    file = Path(name) if name.endswith(".toml") else Path(kinfed.arena.__file__).parent / f"{name}.toml"
    text = file.read_text("utf-8")
    whole = suite(name)
    seeds = whole.budgets["full"].seeds
    for one in whole.all_federations:
        if one.digests:
            continue
        try:
            digests = [one.unchecked(seed).digest() for seed in seeds]
            baselines = [one.baseline(seed) for seed in seeds]
        except MissingDataError as error:
            print(f"{one.name}: {error}")
            continue
        lines = [f'name = "{one.name}"', f"digests = {digests}".replace("'", '"'), f"baselines = {baselines}"]
        text = text.replace(lines[0] + "\n", "\n".join(lines) + "\n")
        file.write_text(text, "utf-8")
        print(f"{one.name}: {one.axis}, without a model {baselines[0]:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["arena-1"])
