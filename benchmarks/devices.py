"""The table of methods on the pretended device (tests/pretend_device.py), from rounds that are run here.

    python benchmarks/devices.py --page docs/benchmark/devices.md

Every method trains a small network for some rounds on the processor and on a device whose tensors do not mix with the
processor's. The table has the largest difference of all that the two ended with, and what the last round copied to the
device and back, and waited for."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/testing")]

import pretend_device  # noqa: E402
from test_contract import bench  # noqa: E402

from kinfed.algorithms import ALGORITHMS  # noqa: E402
from kinfed.errors import KinfedError  # noqa: E402
from kinfed.testing.workbench import ROUNDS, outcome  # noqa: E402

MARK = "<!-- benchmarks/devices.py -->"


def row(name: str, device: torch.device) -> str:
    """A method's line of the table."""
    method = bench(name)
    try:
        with method.loop(task=method.make_task().on(device)) as loop:
            for _ in range(ROUNDS - 1):
                loop.round()
            with pretend_device.traffic() as counter:
                loop.round()
            there = {part: tensor.cpu() for part, tensor in outcome(loop).items()}
    except KinfedError as error:
        return f"| `{name}` | refused: {str(error).split(';')[0]} | | | |"
    gaps = []
    for part, here in method.usual.items():
        size = here.double().abs().clamp_min(1)
        gap = (there[part].double() - here.double()).abs() / size
        gap[there[part].isnan() & here.isnan()] = 0.0
        gaps.append(float(gap.nan_to_num(math.inf).max()) if here.numel() else 0.0)
    return f"| `{name}` | {max(gaps):.0e} | {counter['to']} | {counter['from']} | {counter['waits']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="all by default")
    parser.add_argument("--page", type=Path, help="Markdown page whose table is replaced")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = ["| method | largest difference | copies to the device | and back | waits |", "|---|---:|---:|---:|---:|"]
    with pretend_device.pretended() as device:
        for name in options.methods or ALGORITHMS:
            rows.append(row(name, device))
            print(rows[-1], flush=True)
    if options.page is not None:
        before, _, after = options.page.read_text("utf-8").split(MARK)
        options.page.write_text(MARK.join([before, "\n" + "\n".join(rows) + "\n", after]), "utf-8")


if __name__ == "__main__":
    main()
