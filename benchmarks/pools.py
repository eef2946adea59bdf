"""What a round costs beside the training itself, on the local pool and on Ray.

    python benchmarks/pools.py                          a Ray cluster of this machine
    python benchmarks/pools.py --ray-address HOST:6379  one of many
    python benchmarks/pools.py --nodes 2 --clients 10000 --active 100 --steps 20 --batch 10 --models small
    python benchmarks/pools.py --workers 16 --clients 64 --models large --methods fedavg,scaffold   the driver's load

Clients take one step on one example unless told otherwise, so that nearly all of a round is messages, states and
waiting. `--nodes` starts a cluster of so many nodes on this machine, with one CPU each. Every pool takes its turn in
every repeat. `driver` is the processor time of this process in a round, which all workers wait for. The tables are
those of docs/costs.md.
"""

from __future__ import annotations

import argparse
import time
from math import inf
from statistics import median
from typing import Any

import torch
from ray.cluster_utils import Cluster
from rich.console import Console
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.ray_pool import RayCluster
from kinfed.report.tables import TableColumn, TextTable
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule


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
    parser.add_argument("--models", default="small,large")
    parser.add_argument("--active", type=int, default=None, help="clients of a round; all where absent")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=0, help="of a cluster that is started on this machine")
    arguments = parser.parse_args()
    numbers = torch.Generator().manual_seed(0)
    training = LocalTraining(batch=arguments.batch, steps=arguments.steps)
    share = 1.0 if arguments.active is None else arguments.active / arguments.clients
    n = max(4, 2 * arguments.batch) * arguments.clients
    x, y = torch.randn(n, 784, generator=numbers), torch.randint(0, 10, (n,), generator=numbers)
    data = Federation.from_arrays(x.numpy(), y.numpy(), torch.arange(n).numpy() % arguments.clients, num_classes=10)
    began = time.perf_counter()
    nodes = None
    if arguments.nodes:
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(arguments.nodes - 1):
            nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
    cluster = RayCluster(arguments.ray_address if nodes is None else nodes.address, arguments.workers)
    models = {"small": small, "large": large}
    rows = [
        row
        for model in arguments.models.split(",")
        for name in arguments.methods.split(",")
        for row in measure(
            make_algorithm(name, training), name, make_task(models[model], examples=inf), data, share, cluster,
            arguments.repeats,
        )
    ]  # fmt: skip
    cluster.close()
    if nodes is not None:
        nodes.shutdown()
    console = Console(width=110)
    words = [TableColumn(heading, "text") for heading in ("method", "pool")]
    figures = ("first round", "round, median", "best", "driver", "evaluation", "messages")
    active = arguments.clients if arguments.active is None else arguments.active
    title = f"{active:,} of {arguments.clients:,} clients, {arguments.steps} steps of {arguments.batch}, "
    title += f"{cluster.size} Ray workers, {1e-6 * x.numel() * 4:,.0f} MB of examples"
    console.print(TextTable.of(title, [TableColumn("parameters"), *words, *figures], rows))
    console.print(f"{time.perf_counter() - began:.0f} s in all")


def measure(
    method: Any, name: str, task: Any, data: Federation, share: float, cluster: RayCluster, repeats: int
) -> list[tuple[str, ...]]:
    loops, first = {}, {}
    for pool in ("local", "ray"):
        began = time.perf_counter()
        clients: Any = LocalPool(method, task, data, 0) if pool == "local" else cluster.pool(method, task, data, 0)
        loops[pool] = Loop(method, task, clients, data.population(0, share), Schedule(share))
        loops[pool].round()
        first[pool] = time.perf_counter() - began
    seconds: dict[str, list[float]] = {pool: [] for pool in loops}
    processor: dict[str, list[float]] = {pool: [] for pool in loops}
    moved = {}
    for _ in range(repeats):
        for pool, loop in loops.items():
            used = time.process_time()
            report = loop.round()
            processor[pool].append(time.process_time() - used)
            seconds[pool].append(report.seconds)
            moved[pool] = report.bytes_down + report.bytes_up
    rows = []
    for pool, loop in loops.items():
        began = time.perf_counter()
        loop.evaluate()
        evaluation = time.perf_counter() - began
        times = (first[pool], median(seconds[pool]), min(seconds[pool]), median(processor[pool]), evaluation)
        texts = (f"{1000 * value:.{digits}f} ms" for value, digits in zip(times, (0, 1, 1, 1, 0), strict=True))
        rows.append((f"{task.num_params:,}", name, pool, *texts, f"{moved[pool] / 1e6:.1f} MB"))
        loop.pool.close()
    return rows


if __name__ == "__main__":
    main()
