"""Local steps of models of every kind beside the same steps in a plain PyTorch loop: the table of docs/speed.md.

    python benchmarks/steps.py --weights minilm                        all models, on one core and on all (two: 15 min.)
    python benchmarks/steps.py --weights minilm --page docs/speed.md  and puts it into the page, between its marks
    python benchmarks/steps.py user-dropout lstm --threads 1 --repeats 15

Every workload is one of `kinfed bench`: both sides take turns, and must first agree after twenty steps on the same
batches, with the same draws where the model draws. The page's table is never written by hand: rows that are measured
replace those of the same workload and cores, and all others stay, as long as machine, torch and Python are the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kinfed.core import storage
from kinfed.pools.memory import keep_freed_memory
from kinfed_papers.bench import STEP_WORKLOADS, BenchResult, StepComparison, run_benchmarks

BEGIN, END = "<!-- benchmarks/steps.py -->", "<!-- end -->"
HEADINGS = ("workload", "backend", "parameters", "cores", "loop", "kinfed", "ratio", "range", "difference", "turns")
PROVENANCE = ("load", "date")  # of the machine while the row was measured, in waiting processes; when that was
Rows = dict[tuple[str, str], tuple[str, ...]]  # cells by workload and cores


def measured_rows(result: BenchResult, load: float) -> Rows:
    when = (f"{load:.1f}", datetime.date.today().isoformat())
    rows = [(*cells(comparison), *when) for comparison in result.steps]
    return {(row[0], row[3]): row for row in rows}


def cells(comparison: StepComparison) -> tuple[str, ...]:
    ratios = comparison.ratios
    return (
        f"`{comparison.workload}`",
        comparison.backend,
        f"{comparison.parameters:,}",
        str(comparison.cores),
        f"{comparison.milliseconds(comparison.loop):.3g}",
        f"{comparison.milliseconds(comparison.ours):.3g}",
        f"{comparison.ratio:.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{comparison.disagreement:.0e}",
        str(len(ratios)),
    )


def machine_line(machine: Mapping[str, str | int]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}. "
        "Times on one core are of the processor, on several of the clock, which a busy machine spoils; load: processes "
        "that ran or waited."
    )


def markdown(rows: Rows, machine: str) -> str:
    """The table in the order of the workloads, the machine, and what the workloads are."""
    headings = (*HEADINGS, *PROVENANCE)
    order = [f"`{name}`" for name in STEP_WORKLOADS]
    lines = [f"| {' | '.join(headings)} |", "|---|---|" + "---:|" * (len(headings) - 2)]
    lines += [
        f"| {' | '.join(rows[key])} |" for key in sorted(rows, key=lambda key: (order.index(key[0]), int(key[1])))
    ]
    measured = {name for name, _ in rows}
    titles = [f"* `{name}`: {w.title}" for name, w in STEP_WORKLOADS.items() if f"`{name}`" in measured]
    return "\n".join([*lines, "", machine, "", *titles])


def rows_of(page: Path, machine: str) -> Rows:
    """What the page has already; nothing where another machine measured it."""
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    if machine not in table:
        return {}
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {(row[0], row[3]): tuple(row) for row in lines}


def put_into(page: Path, table: str) -> None:
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} should hold the marks {BEGIN} and {END}, between which the table goes")
    storage.write_atomically(page, f"{before}{BEGIN}\n{table}\n{END}{after}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", default=list(STEP_WORKLOADS), help="of `kinfed bench`; all where absent"
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side")
    parser.add_argument("--threads", type=int, nargs="*", default=[], help="numbers of cores (default: one, and all)")
    parser.add_argument("--weights", default="", help="folder with MiniLM's weights; random ones where absent")
    parser.add_argument("--page", type=Path, help="Markdown page to put the table into")
    arguments = parser.parse_args()
    keep_freed_memory()  # as `kinfed bench` does, for both sides
    rows: Rows = {}
    began = time.perf_counter()
    for name in arguments.workloads:
        result = run_benchmarks([name], arguments.repeats, arguments.threads, weights=arguments.weights)
        machine = machine_line(result.machine)
        measured = measured_rows(result, os.getloadavg()[0])
        print("\n".join(" ".join(row) for row in measured.values()), flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s so far", flush=True)
        rows |= measured
        if arguments.page is not None:  # after each: what was measured stays if this is stopped
            put_into(arguments.page, markdown(rows_of(arguments.page, machine) | measured, machine))
    print(markdown(rows, machine))


if __name__ == "__main__":
    main()
