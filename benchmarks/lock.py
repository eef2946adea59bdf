"""How much of a round runs without the interpreter's lock, and what a second worker thread gives.

    python benchmarks/lock.py                      W1, and W2 with all methods
    python benchmarks/lock.py W1 --rounds 30

Processor time of one worker: inside compiled calls, which hold no lock, and in all. Of the rest, operations of torch on
whole models give the lock away, too, so `at least` is what two workers gain if the rest did not overlap at all. The
ratio of the clock, best rounds of one and of two workers in turns, needs two idle cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "contestants"))

import torch
from kinfed_side import KinfedSide
from work import WORKS, make_images

from kinfed.engine.compiled.fused_task import FusedTask

compiled_seconds: list[float] = []


def timed(original: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    """FusedTask._compiled whose kernels note the processor time of their thread."""

    def compiled(task: FusedTask, name: str) -> Callable[..., None]:
        kernel = original(task, name)

        def call(*arguments: Any) -> None:
            begin = time.thread_time()
            kernel(*arguments)
            compiled_seconds.append(time.thread_time() - begin)

        return call

    return compiled


def measure(name: str, method: str, rounds: int) -> str:
    images = make_images(WORKS[name])
    sides = {workers: KinfedSide(WORKS[name], images, method, workers) for workers in (1, 2)}
    clock: dict[int, list[float]] = {1: [], 2: []}
    spent: list[tuple[float, float]] = []
    for repeat in range(rounds + 2):
        for workers, side in sides.items():
            compiled_seconds.clear()
            wall, processor = time.perf_counter(), time.process_time()
            side.rounds(1)
            if repeat > 1:  # the first ones load compiled code and meet their clients
                clock[workers].append(time.perf_counter() - wall)
                if workers == 1:
                    spent.append((time.process_time() - processor, sum(compiled_seconds)))
    for side in sides.values():
        side.close()
    total, compiled = min(spent)
    least = total / (total - compiled / 2)
    cells = f"{1e3 * total:.1f}", f"{1e3 * compiled:.1f}", f"{100 * compiled / total:.0f} %", f"{least:.2f}"
    return f"| {name} | {method} | {' | '.join(cells)} | {min(clock[1]) / min(clock[2]):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["W1", "W2"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    FusedTask._compiled = timed(FusedTask._compiled)  # type: ignore[method-assign]
    print(f"{torch.__version__}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("| work | method | processor ms | compiled ms | without the lock | two workers, at least | by the clock |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in arguments.works:
        for method in WORKS[name].methods:
            print(measure(name, method, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
