"""What a round costs beside the training itself, on the local pool and on Ray.

    python benchmarks/pools.py                          a Ray cluster of this machine
    python benchmarks/pools.py --ray-address HOST:6379  one of many

Clients take one step on one example, so that nearly all of a round is messages, states and waiting. Every pool takes
its turn in every repeat. The table is that of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Federation
from kinfed.engine.task import make_task
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.ray_pool import RayCluster
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule

WORK = LocalTraining(batch=1, steps=1)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))  # 7,850 parameters


def large() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3800), nn.ReLU(), nn.Linear(3800, 10))  # 3.0 million


def main() -> None:
    parser = argparse.ArgumentParser("pools.py")
    parser.add_argument("--ray-address", default=None)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--methods", default="fedavg,ditto")
    given = parser.parse_args()
    numbers = torch.Generator().manual_seed(0)
    n = 4 * given.clients
    x, y = torch.randn(n, 784, generator=numbers), torch.randint(0, 10, (n,), generator=numbers)
    data = Federation.from_arrays(x.numpy(), y.numpy(), torch.arange(n).numpy() % given.clients, num_classes=10)
    began = time.perf_counter()
    cluster = RayCluster(given.ray_address, given.workers)
    table = Table("parameters", "method", "pool", "first round", "round, median", "best", "evaluation", "messages")
    for model in (small, large):
        for name in given.methods.split(","):
            for row in measured(name, make_task(model), data, cluster, given.repeats):
                table.add_row(*row)
    cluster.close()
    console = Console(width=110)
    console.print(table)
    console.print(f"{given.clients} clients, {cluster.size} Ray workers; {time.perf_counter() - began:.0f} s in all")


def measured(name: str, task: Any, data: Federation, cluster: RayCluster, repeats: int) -> list[tuple[str, ...]]:
    method = make_algorithm(name, WORK)
    loops, first = {}, {}
    for pool in ("local", "ray"):
        began = time.perf_counter()
        made: Any = LocalPool(method, task, data, 0) if pool == "local" else cluster.pool(method, task, data, 0)
        loops[pool] = Loop(method, task, made, data.population(0), Schedule())
        loops[pool].round()
        first[pool] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {pool: [] for pool in loops}
    moved = {}
    for _ in range(repeats):
        for pool, loop in loops.items():
            report = loop.round()
            seconds[pool].append(report.seconds)
            moved[pool] = report.bytes_down + report.bytes_up
    rows = []
    for pool, loop in loops.items():
        began = time.perf_counter()
        loop.evaluate()
        evaluation = time.perf_counter() - began
        rows.append((
            f"{task.num_params:,}", name, pool, f"{1000 * first[pool]:.0f} ms",
            f"{1000 * median(seconds[pool]):.1f} ms", f"{1000 * min(seconds[pool]):.1f} ms",
            f"{1000 * evaluation:.0f} ms", f"{moved[pool] / 1e6:.1f} MB",
        ))  # fmt: skip
        loop.pool.close()
    return rows


if __name__ == "__main__":
    main()
