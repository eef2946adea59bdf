"""The benchmark's figures for people."""

from __future__ import annotations

from rich.console import Console

from kinfed.report import TableColumn, TextTable
from kinfed_papers.bench.step_timing import PARITY_STEPS, StepComparison
from kinfed_papers.bench.timing import BenchComparison, BenchResult


def print_result(result: BenchResult, console: Console | None = None) -> None:
    console = console or Console()
    if result.comparisons:
        _print_rounds(result, console)
    if result.steps:
        _print_steps(result.steps, console)
    machine = result.machine
    console.print(
        f"{machine['processor']}, {machine['cores']} core(s), torch {machine['torch']}, Python {machine['python']}"
    )


def _print_rounds(result: BenchResult, console: Console) -> None:
    headings = ("cores", "plain loop", "kinfed", "ratio", "of best", "wanted", "limit", "peak")
    rows = map(_cells, result.comparisons)
    title = "One round: medians, contestants taking turns"
    table = TextTable.of(title, [TableColumn("workload", "name"), *headings], rows).console()
    table.padding = (0, 0, 0, 1)  # nine columns fit 80 characters
    console.print(table)
    for title in dict.fromkeys(f"{comparison.workload}: {comparison.title}" for comparison in result.comparisons):
        console.print(title)
    for comparison in result.comparisons:
        if comparison.against is not None:
            console.print(
                f"{comparison.workload}, {comparison.cores} core(s): a round takes {1 / comparison.ratio:.1f} times as "
                f"long as {comparison.against}'s"
            )
    limits = result.limits
    products = ", ".join(f"{name} {rate:.0f}" for name, rate in limits.products.items())
    console.print(
        f"One core: products {limits.peak_gflops:.0f} GFLOP/s at best, of the workloads' own shapes {products}; "
        f"copies {limits.copy_gb:.1f} GB/s (read + written). "
        "ratio: plain loop / kinfed, medians; of best: of the shortest rounds; limit: kinfed's processor time in units "
        "of what the products alone plus one pass over the batches would take."
    )


def _print_steps(steps: list[StepComparison], console: Console) -> None:
    headings = ("backend", "size", "cores", "loop", "kinfed", "ratio", "range", "parity")
    title = "Steps of any model: ms per client and step, contestants taking turns"
    table = TextTable.of(title, [TableColumn("workload", "name"), *headings], map(_step_cells, steps)).console()
    table.padding = (0, 0, 0, 1)  # nine columns fit 80 characters
    console.print(table)
    for title in dict.fromkeys(f"{comparison.workload}: {comparison.title}" for comparison in steps):
        console.print(title)
    console.print(
        "Processor time on one core, time of the clock on several; medians. size: parameters that are trained, and "
        "running statistics; ratio: plain loop / kinfed of the same turn, its median and its range; parity: the "
        f"largest difference of any parameter to plain torch after {PARITY_STEPS} steps on the same batches."
    )


def _step_cells(c: StepComparison) -> tuple[str, ...]:
    return (
        c.workload,
        c.backend,
        f"{c.parameters:,}",
        str(c.cores),
        f"{c.milliseconds(c.loop):.3g}",
        f"{c.milliseconds(c.ours):.3g}",
        f"{c.ratio:.2f}",
        f"{min(c.ratios):.2f}-{max(c.ratios):.2f}",
        f"{c.disagreement:.0e}",
    )


def _cells(c: BenchComparison) -> tuple[str, ...]:
    loop = c.against is None
    return (
        c.workload,
        str(c.cores),
        _seconds(c.other.median) if loop else "",
        _seconds(c.ours.median),
        f"{c.ratio:.1f}" if loop else "",
        f"{c.best_ratio:.1f}" if loop else "",
        "" if c.target is None else f"{c.target:g}",
        f"{c.distance:.1f}x",
        "" if c.peak_mb is None else f"{c.peak_mb / 1024:.2f} GB",
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
