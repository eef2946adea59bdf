"""How many clients should a chunk hold, and how many bytes should a gather fetch?

    python benchmarks/chunks.py mlr --sizes 10,17,25,34,50 --gather-kb 512,1024,2048 --repeats 15

Every setting takes its turn in every repeat, so a busy moment of the machine meets all of them. The answer is what
CHUNK_BYTES, STEP_FLOPS (kinfed.pools.local_pool) and GATHER_BYTES (kinfed.data.examples.batches) are set from.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from kinfed.data.examples import batches
from kinfed.pools.local_pool import available_cores
from kinfed.report.tables import TextTable
from kinfed.server.loop import Loop
from kinfed_papers.bench.contest import Timing
from kinfed_papers.bench.timing import engine
from kinfed_papers.bench.workload import WORKLOADS, synthetic


def main() -> None:
    parser = argparse.ArgumentParser("chunks.py")
    parser.add_argument("workload", choices=[name for name, w in WORKLOADS.items() if w.model != "cnn"])
    parser.add_argument("--sizes", default="10,17,25,34,50", help="clients per chunk")
    parser.add_argument("--gather-kb", default="1024")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    federation = synthetic(workload)
    gathers = [int(size) << 10 for size in arguments.gather_kb.split(",")]
    loops: dict[tuple[int, int], Loop] = {}
    for size in map(int, arguments.sizes.split(",")):
        for workers in sorted({1, available_cores()}):
            loop = engine(workload, federation, workers)
            loop.pool._chunk = size
            loops[size, workers] = loop
    timings = {(*key, gather): Timing() for key in loops for gather in gathers}
    torch.set_num_threads(1)
    for repeat in range(arguments.repeats + 1):
        for (size, workers, gather), timing in timings.items():
            batches.GATHER_BYTES = gather
            target = timing if repeat else Timing()  # the first turn warms up
            target.measure(loops[size, workers].round)
    rows = [
        [
            str(size),
            str(workers),
            f"{gather >> 10} KB",
            *(f"{1000 * seconds:.1f} ms" for seconds in (timing.median, min(timing.wall), min(timing.cpu))),
        ]
        for (size, workers, gather), timing in timings.items()
    ]
    headings = ("clients per chunk", "workers", "gather", "median", "best", "processor time, best")
    Console(width=110).print(TextTable.of(workload.title, headings, rows))
    for loop in loops.values():
        loop.pool.close()


if __name__ == "__main__":
    main()
