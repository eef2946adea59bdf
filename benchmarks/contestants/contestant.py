"""One contestant in a process of its own. The referee (benchmarks/rivals.py) writes one command a line:

    rounds N      compute N rounds; answers with seconds of the processor and of the clock
    accuracy      of the server's model
    limit         seconds that the machine needs at best for a round (kinfed's side)

and reads one JSON object a line. With --job the whole job is done at once: all rounds and a test of the model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from work import EIGHT, WORKS, Images, Side


@dataclass(frozen=True)
class Entry:
    """A contestant: where its class is, and what it can do."""

    module: str
    name: str
    methods: tuple[str, ...] = EIGHT
    works: tuple[str, ...] = tuple(WORKS)

    def load(self) -> type[Side]:
        side: type[Side] = getattr(importlib.import_module(self.module), self.name)
        return side


def _works_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in WORKS if name not in names)


SIDES = {
    "kinfed": Entry("kinfed_side", "KinfedSide"),
    "loop": Entry("loop_side", "LoopSide"),
    # fedjax's models have no running statistics, and haiku no encoder of transformers.
    "fedjax": Entry("fedjax_side", "FedjaxSide", ("fedavg", "fedprox", "apfl"), _works_but("RESNET18", "TRANSFORMER")),
    "pfl": Entry(  # averages no running statistics
        "pfl_side", "PflSide", ("fedavg", "fedprox", "scaffold"), _works_but("RESNET18")
    ),
    "flower": Entry("flower_side", "FlowerSide", ("fedavg",), ("LR_MNIST", "W2")),  # a task of Ray per client
}


def entry_of(name: str) -> Entry:
    """One of SIDES, or of a class `path/to/file.py:Class`, which is tried at everything."""
    if ":" not in name:
        return SIDES[name]
    file, _, attribute = name.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    return Entry(Path(file).stem, attribute)


def processor_seconds(with_descendants: bool) -> float:
    """Of this process so far, and of all that it started and that still run, to a hundredth of a second."""
    own = time.process_time()
    if not with_descendants:
        return own
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(folder.name)] = int(fields[1])
            seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, grew = {os.getpid()}, True
    while grew:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, grew = family | more, bool(more)
    return own + sum(seconds[process] for process in family if process != os.getpid())


def main() -> None:
    parser = argparse.ArgumentParser("contestant.py")
    parser.add_argument("side")
    parser.add_argument("work")
    parser.add_argument("method")
    parser.add_argument("images", type=Path)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--job", action="store_true")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.environ["KINFED_RIVALS_IMAGES"] = str(arguments.images)
    answer = whole_job(arguments) if arguments.job else None
    if answer is not None:
        print(json.dumps(answer), file=answers)
    else:
        serve(arguments, answers)
    answers.flush()
    os._exit(0)  # libraries may leave threads that nobody waits for


def serve(arguments: argparse.Namespace, answers: Any) -> None:
    cls, work = entry_of(arguments.side).load(), WORKS[arguments.work]
    side = cls(work, Images.load(arguments.images), arguments.method, arguments.cores)
    print(json.dumps({"versions": side.versions()}), file=answers)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "rounds":
            processor, clock = processor_seconds(side.has_processes), time.perf_counter()
            side.rounds(int(words[0]))
            clock = time.perf_counter() - clock
            answer = {"cpu": processor_seconds(side.has_processes) - processor, "wall": clock}
        elif command == "accuracy":
            answer = {"accuracy": side.accuracy()}
        else:
            answer = {"limit": side.limit(arguments.method)}  # type: ignore[attr-defined]
        print(json.dumps(answer), file=answers)
    side.close()


def whole_job(arguments: argparse.Namespace) -> dict[str, float]:
    work = WORKS[arguments.work]
    if arguments.side == "kinfed":
        from kinfed_side import whole_job as kinfed_job

        with tempfile.TemporaryDirectory() as place:
            accuracy = kinfed_job(
                work, Images.load(arguments.images), arguments.method, arguments.cores, Path(place) / "run"
            )
        return {"accuracy": accuracy, "cpu": processor_seconds(False)}
    cls = entry_of(arguments.side).load()
    side = cls(work, Images.load(arguments.images), arguments.method, arguments.cores)
    side.rounds(work.rounds)
    answer = {"accuracy": side.accuracy(), "cpu": processor_seconds(side.has_processes)}
    side.close()
    return answer


if __name__ == "__main__":
    main()
