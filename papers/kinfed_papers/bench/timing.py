"""Contestants take turns; what they took, and how far that is from the machine's limits."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kinfed.data import Federation
from kinfed.engine import make_task
from kinfed.errors import ConfigError, unknown_name
from kinfed.pools import available_cores
from kinfed.server import Loop
from kinfed_papers.bench.contest import Timing, disagreement, fedavg
from kinfed_papers.bench.machine import Limits, describe_machine, forget_peak, measure_limits, peak_mb
from kinfed_papers.bench.plain_loop import PlainLoop
from kinfed_papers.bench.step_timing import StepComparison, compare_steps
from kinfed_papers.bench.step_workload import STEP_WORKLOADS
from kinfed_papers.bench.workload import WORKLOADS, Workload, synthetic


@dataclass
class BenchComparison:
    """One workload on some cores. `other` is the plain loop, or the engine on the smaller workload `against`."""

    workload: str
    title: str
    cores: int
    ours: Timing
    other: Timing
    target: float | None
    against: str | None
    disagreement: float | None  # largest difference of any parameter after a round on the same batches
    gflop: float  # of one round, by torch's own count
    gathered_mb: float  # bytes of one round's batches: read as uint8, written as float32
    floor: float  # seconds of one core for the products alone and one pass over the batches
    peak_mb: float | None

    @property
    def ratio(self) -> float:
        """The other's time in units of ours: medians."""
        return self.other.median / self.ours.median

    @property
    def best_ratio(self) -> float:
        return min(self.other.wall) / min(self.ours.wall)

    @property
    def cpu_ratio(self) -> float:
        return statistics.median(self.other.cpu) / statistics.median(self.ours.cpu)

    @property
    def distance(self) -> float:
        """Our processor time in units of the machine's limit."""
        return statistics.median(self.ours.cpu) / self.floor

    def figures(self) -> dict[str, Any]:
        derived = ("ratio", "best_ratio", "cpu_ratio", "distance")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass
class BenchResult:
    comparisons: list[BenchComparison]  # of whole rounds
    steps: list[StepComparison]  # of local steps of any model
    limits: Limits
    machine: dict[str, str | int]

    def to_json(self) -> str:
        figures = {
            "machine": self.machine,
            "limits": asdict(self.limits),
            "comparisons": [comparison.figures() for comparison in self.comparisons],
            "steps": [comparison.figures() for comparison in self.steps],
        }
        return json.dumps(figures, indent=2)


def run_benchmarks(
    which: Sequence[str] = (),
    repeats: int = 7,
    threads: Sequence[int] = (),
    *,
    quick: bool = False,
    weights: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Measure the named workloads (all if none is named) on the given numbers of cores (one, and all); `weights` is
    a folder with those of MiniLM, in whose place random ones serve."""
    known = (*WORKLOADS, *STEP_WORKLOADS)
    for name in which:
        if name not in known:
            raise unknown_name("workload", name, known)
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1; got {repeats}")
    cores = sorted(set(threads)) or sorted({1, available_cores()})
    if cores[0] < 1:
        raise ConfigError(f"threads are numbers of cores, at least 1; got {cores[0]}")
    chosen = which or known
    workloads = [each.quick() if quick else each for name, each in WORKLOADS.items() if name in chosen]
    of_steps = [each.quick() if quick else each for name, each in STEP_WORKLOADS.items() if name in chosen]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        progress("limits of one core")
        limits = measure_limits(workloads, seconds=0.0 if quick else 0.5)
        comparisons: list[BenchComparison] = []
        for workload in workloads:
            progress(workload.title)
            comparisons += _compare(workload, repeats, cores, limits, quick)
        steps: list[StepComparison] = []
        for each in of_steps:
            progress(each.title)
            steps += compare_steps(each, repeats, cores, weights)
    finally:
        torch.set_num_threads(before)
    return BenchResult(comparisons, steps, limits, describe_machine())


def engine(workload: Workload, federation: Federation, workers: int) -> Loop:
    task = make_task(workload.build, examples=inf)  # as in a long run
    return fedavg(task, federation, workload.training, workers, workload.participation)


def _compare(
    workload: Workload, repeats: int, cores: Sequence[int], limits: Limits, quick: bool
) -> list[BenchComparison]:
    gc.collect()
    forget_peak()
    federation = synthetic(workload)
    ours = {n: engine(workload, federation, n) for n in cores}
    small: dict[int, Loop] = {}
    difference = None
    others: dict[int, Callable[[], object]]
    if workload.against is None:
        loop = PlainLoop.of_round(workload, federation)
        difference = disagreement(workload.name, engine(workload, federation, 1), federation, loop)
        others = {n: loop.round for n in cores}
    else:
        smaller = WORKLOADS[workload.against].quick() if quick else WORKLOADS[workload.against]
        its_data = synthetic(smaller)
        small = {n: engine(smaller, its_data, n) for n in cores}
        others = {n: each.round for n, each in small.items()}
    timings = {n: (Timing(), Timing()) for n in cores}
    for repeat in range(repeats + 1):
        for n in cores:
            torch.set_num_threads(n)
            own, theirs = timings[n] if repeat else (Timing(), Timing())  # the first turn warms up
            own.measure(ours[n].round)
            theirs.measure(others[n])
    torch.set_num_threads(1)
    peak = peak_mb()
    for each in (*ours.values(), *small.values()):
        each.pool.close()
    steps = workload.active * workload.steps
    gflop, gathered = work_of_steps(workload.build(), workload.shape, workload.batch, steps)
    floor = limits.seconds(workload.name, gflop, gathered)
    return [
        BenchComparison(
            workload=workload.name,
            title=workload.title,
            cores=n,
            ours=timings[n][0],
            other=timings[n][1],
            target=workload.target,
            against=workload.against,
            disagreement=difference,
            gflop=gflop,
            gathered_mb=gathered * 1e3,
            floor=floor,
            peak_mb=peak,
        )
        for n in cores
    ]


def work_of_steps(module: nn.Module, shape: tuple[int, ...], batch: int, steps: int) -> tuple[float, float]:
    """GFLOP of `steps` steps on images, by torch's own count, and gigabytes of their batches: read as uint8, written as
    float32."""
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(batch, *shape)).sum().backward()
    return counter.get_total_flops() * steps / 1e9, 5.0 * prod(shape) * batch * steps / 1e9
