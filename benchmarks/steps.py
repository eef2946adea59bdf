"""Local steps of models of every kind beside the same steps in a plain PyTorch loop: the table of docs/models.md.

    python benchmarks/steps.py --weights minilm                        all models, on one core and on all
    python benchmarks/steps.py --weights minilm --page docs/models.md  and puts it into the page, between its marks
    python benchmarks/steps.py user-dropout lstm --threads 1 --repeats 15

Every workload is one of `kinfed bench`: both sides take turns, and must first agree after twenty steps on the same
batches, with the same draws where the model draws. The page's table is replaced as a whole, never by hand.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from kinfed.bench import STEP_WORKLOADS, BenchResult, StepComparison, run_benchmarks
from kinfed.core import storage

BEGIN, END = "<!-- benchmarks/steps.py -->", "<!-- end -->"
HEADINGS = ("workload", "backend", "parameters", "cores", "loop", "kinfed", "ratio", "range", "difference", "turns")


def markdown(results: Sequence[BenchResult], load: tuple[float, float]) -> str:
    """The table and where it comes from; `load` of the machine before and after, in waiting processes."""
    rows = [cells(comparison) for result in results for comparison in result.steps]
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---|" + "---:|" * (len(HEADINGS) - 2)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    machine = results[0].machine
    lines += [
        "",
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}, "
        f"{datetime.date.today()}; load {load[0]:.1f} to {load[1]:.1f} while it was measured. Times on one core are of "
        "the processor, on several of the clock, which a busy machine spoils.",
    ]
    titles = dict.fromkeys(f"* `{c.workload}`: {c.title}" for result in results for c in result.steps)
    return "\n".join([*lines, "", *titles])


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
    before = os.getloadavg()[0]
    results = []
    for name in arguments.workloads:
        results.append(run_benchmarks([name], arguments.repeats, arguments.threads, weights=arguments.weights))
        for comparison in results[-1].steps:
            print(" ".join(cells(comparison)), flush=True)
        table = markdown(results, (before, os.getloadavg()[0]))
        if arguments.page is not None:  # after each: what was measured stays if this is stopped
            put_into(arguments.page, table)
    print(table)


if __name__ == "__main__":
    main()
