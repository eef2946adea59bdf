"""`kinfed bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kinfed.cli import console, integers


def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            help="Rounds: mlr, mlp, cnn, mlr-10k. Steps: user-mlp, user-dropout, user-lstm, lstm, lstm-small, "
            "user-transformer, transformer, resnet18, resnet18-momentum, minilm, minilm-small, minilm-last2, "
            "minilm-last2-cached, minilm-head, minilm-head-cached. All if absent."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds of each contestant.")] = 7,
    threads: Annotated[str, typer.Option(help="Numbers of cores, e.g. 1,2 (default: one, and all).")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny workloads, to check that everything runs.")] = False,
    weights: Annotated[str, typer.Option(help="Folder with MiniLM's weights (default: random weights).")] = "",
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Measure rounds against a plain PyTorch loop and against the limits of this machine."""
    from kinfed.core import storage
    from kinfed_papers.bench import print_result, run_benchmarks

    with console.status("") as status:
        result = run_benchmarks(
            workloads or (),
            repeats,
            integers("--threads", threads),
            quick=quick,
            weights=weights,
            progress=status.update,
        )
    print_result(result, console)
    if json is not None:
        storage.write_atomically(json, (result.to_json() + "\n").encode())
