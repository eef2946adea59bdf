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
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Federation
from kinfed.engine.task import make_task
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.ray_pool import RayCluster
from kinfed.report.tables import TableColumn, TextTable
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule

ONE_STEP = LocalTraining(batch=1, steps=1)


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
    arguments = parser.parse_args()
    numbers = torch.Generator().manual_seed(0)
    n = 4 * arguments.clients
    x, y = torch.randn(n, 784, generator=numbers), torch.randint(0, 10, (n,), generator=numbers)
    data = Federation.from_arrays(x.numpy(), y.numpy(), torch.arange(n).numpy() % arguments.clients, num_classes=10)
    began = time.perf_counter()
    cluster = RayCluster(arguments.ray_address, arguments.workers)
    rows = [
        row
        for model in (small, large)
        for name in arguments.methods.split(",")
        for row in measure(name, make_task(model), data, cluster, arguments.repeats)
    ]
    cluster.close()
    console = Console(width=110)
    words = [TableColumn(heading, "text") for heading in ("method", "pool")]
    figures = ("first round", "round, median", "best", "evaluation", "messages")
    title = f"{arguments.clients} clients, {cluster.size} Ray workers"
    console.print(TextTable.of(title, [TableColumn("parameters"), *words, *figures], rows))
    console.print(f"{time.perf_counter() - began:.0f} s in all")


def measure(name: str, task: Any, data: Federation, cluster: RayCluster, repeats: int) -> list[tuple[str, ...]]:
    method = make_algorithm(name, ONE_STEP)
    loops, first = {}, {}
    for pool in ("local", "ray"):
        began = time.perf_counter()
        clients: Any = LocalPool(method, task, data, 0) if pool == "local" else cluster.pool(method, task, data, 0)
        loops[pool] = Loop(method, task, clients, data.population(0), Schedule())
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
        times = (first[pool], median(seconds[pool]), min(seconds[pool]), evaluation)
        texts = (f"{1000 * value:.{digits}f} ms" for value, digits in zip(times, (0, 1, 1, 0), strict=True))
        rows.append((f"{task.num_params:,}", name, pool, *texts, f"{moved[pool] / 1e6:.1f} MB"))
        loop.pool.close()
    return rows


if __name__ == "__main__":
    main()
