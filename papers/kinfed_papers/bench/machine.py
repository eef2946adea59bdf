"""What this machine can do at best, measured: products, copies, memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kinfed.pools import available_cores
from kinfed_papers.bench.workload import Workload


@dataclass
class Limits:
    """What one core can do."""

    peak_gflops: float  # a product of two 1024x1024 matrices
    copy_gb: float  # bytes read plus bytes written per second, in blocks larger than the caches of a core
    products: dict[str, float]  # GFLOP/s of each workload's own product, operands in cache

    def seconds(self, workload: str, gflop: float, gigabytes: float) -> float:
        """Seconds of one core for products at the workload's rate, and one pass over the batches."""
        return gflop / self.products[workload] + gigabytes / self.copy_gb


def measure_limits(workloads: Sequence[Workload], seconds: float) -> Limits:
    """Best of as many tries as fit `seconds` each, on one thread."""
    side = 1024
    square = torch.ones(side, side)
    peak = 2.0 * side**3 / _best(lambda: torch.mm(square, square), seconds) / 1e9
    source = torch.ones(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2.0 * len(source) / _best(lambda: target.copy_(source), seconds) / 1e9
    products = {workload.name: _product(workload, seconds) for workload in workloads}
    return Limits(peak, copy, products)


def _product(workload: Workload, seconds: float) -> float:
    rows, inputs, outputs = workload.product
    n = max(1, (1 << 18) // (inputs * (rows + outputs)))  # a megabyte of operands
    x, w = torch.ones(n, rows, inputs), torch.ones(n, outputs, inputs).transpose(1, 2)
    return 2.0 * n * rows * inputs * outputs / _best(lambda: torch.bmm(x, w), seconds) / 1e9


def _best(call: Callable[[], object], seconds: float) -> float:
    """Shortest time of one call; one call warms up."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best


def describe_machine() -> dict[str, str | int]:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return {
        "processor": name,
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def forget_peak() -> None:
    """Start the process's peak of resident memory anew, where the system can (Linux)."""
    control = Path("/proc/self/clear_refs")
    if control.exists():
        control.write_text("5")


def peak_mb() -> float | None:
    """Peak of resident memory since `forget_peak`; None if the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024 if "VmHWM" in fields else None
