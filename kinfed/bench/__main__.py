"""python -m kinfed.bench [WORKLOAD ...] [--repeats 7] [--threads 1,2] [--quick] [--json FILE]"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kinfed.bench import WORKLOADS, print_result, run_benchmarks


def main() -> None:
    parser = argparse.ArgumentParser("python -m kinfed.bench", description="Measure rounds against a plain loop.")
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; all where none is named")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", default="", help="numbers of cores, such as 1,2")
    parser.add_argument("--quick", action="store_true", help="tiny workloads: does everything run?")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    given = parser.parse_args()
    console = Console()
    with console.status("") as status:
        result = run_benchmarks(
            given.workloads,
            given.repeats,
            [int(count) for count in given.threads.split(",") if count],
            quick=given.quick,
            progress=status.update,
        )
    print_result(result, console)
    if given.json is not None:
        given.json.write_text(result.to_json() + "\n")


if __name__ == "__main__":
    main()
