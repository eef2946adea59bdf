"""The benchmark's figures for people."""

from __future__ import annotations

from rich.console import Console

from kinfed.bench.timing import BenchComparison, BenchResult
from kinfed.report.tables import TableColumn, TextTable


def print_result(result: BenchResult, console: Console | None = None) -> None:
    console = console or Console()
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
    machine = result.machine
    console.print(
        f"{machine['processor']}, {machine['cores']} core(s), torch {machine['torch']}, Python {machine['python']}"
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
