"""What a run costs as the number of clients grows and the number of active ones does not.

    python benchmarks/scale.py                                  100 active of 100 ... 1,000,000 clients
    python benchmarks/scale.py --clients 1000,100000 --algorithms fedavg,ditto --markdown

Every number of clients has a process of its own, which makes a federation, runs all rounds with a run folder as `kinfed
run` does, and writes the report. Figures are processor time on one worker. Clients own rows of one pool of images, so
that what grows is the number of clients and not the data. The table is that of docs/benchmark/scale.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import kinfed
from kinfed.core import rng
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.report import build
from kinfed.report.tables import TableColumn, TextTable
from kinfed.runs.observer import NullObserver
from kinfed_papers.bench.machine import describe_machine, peak_mb

IMAGES, TRAINED = 60_000, 50_000  # of the pool; clients train on the first ones and are tested on the others
TRAIN, TEST = 20, 4  # examples of a client
CLASSES = 10


@dataclass
class Costs:
    """Seconds of processor time, but for the last two."""

    clients: int
    algorithm: str
    federation: float  # making it, with its checks
    set_up: float  # to the first round
    round: float  # median, without the first
    evaluation: float  # of the sample, with its line in the journal
    files: float  # last checkpoint, models, clients.csv, summary
    report: float
    peak_mb: float
    folder_mb: float


def main() -> None:
    parser = argparse.ArgumentParser("scale.py")
    parser.add_argument("--clients", default="100,1000,10000,100000,1000000")
    parser.add_argument("--algorithms", default="fedavg,ditto")
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--eval-clients", type=int, default=1000)
    parser.add_argument("--model", default="mlr")
    parser.add_argument("--markdown", action="store_true", help="the table for docs/benchmark/scale.md")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)  # one measurement, in this process
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(asdict(measure(arguments))))
        return
    costs = [
        Costs(**in_process_of_its_own(arguments, clients, algorithm))
        for algorithm in arguments.algorithms.split(",")
        for clients in arguments.clients.split(",")
    ]
    machine = describe_machine()
    headings = ("federation", "set-up", "round", "evaluation", "files", "report", "peak memory", "folder")
    title = (
        f"{arguments.active} active clients, {arguments.model}, {arguments.rounds} rounds of 20 steps of 10 examples, "
        f"{arguments.eval_clients:,} evaluated; processor time. {machine['processor']}, torch {machine['torch']}, "
        f"{date.today()}"
    )
    columns = [TableColumn("clients"), TableColumn("method", "text"), *headings]
    table = TextTable.of(title, columns, map(cells, costs))
    if arguments.markdown:
        print(f"{title}\n\n{table.markdown()}")
    else:
        Console(width=120).print(table)


def in_process_of_its_own(arguments: argparse.Namespace, clients: str, algorithm: str) -> dict[str, Any]:
    options = {
        "--clients": clients, "--algorithms": algorithm, "--active": arguments.active, "--rounds": arguments.rounds,
        "--eval-clients": arguments.eval_clients, "--model": arguments.model,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    output = subprocess.run([sys.executable, __file__, "--json", *words], check=True, stdout=subprocess.PIPE).stdout
    costs: dict[str, Any] = json.loads(output)
    print(f"{algorithm}, {int(clients):,} clients: {1000 * costs['round']:.1f} ms a round", file=sys.stderr)
    return costs


def federation_of(clients: int) -> Federation:
    """Clients with a few rows each of one pool of random images."""
    key = rng.root(0, "scale")
    raw = rng.bits(rng.fold(key, 0), IMAGES * 98).view(torch.uint8).reshape(IMAGES, 1, 28, 28)

    def rows(number: int, low: int, high: int, each: int) -> Ragged:
        draw = rng.bits(rng.fold(key, number), clients * each).remainder(high - low) + low
        return Ragged(torch.arange(clients + 1) * each, draw)

    return Federation(
        features=Features(raw, torch.full((1, 1, 1), 127.5), torch.full((1, 1, 1), 73.9)),
        labels=rng.bits(rng.fold(key, 1), IMAGES).remainder(CLASSES),
        problem=Problem.of_classes(CLASSES),
        train=rows(2, 0, TRAINED, TRAIN),
        val=Ragged.empty(clients),
        test=rows(3, TRAINED, IMAGES, TEST),
        names=[f"client-{number}" for number in range(clients)],
    )


@dataclass
class Clock(NullObserver):
    """Processor time when the first round began and after every round."""

    marks: list[float] = field(default_factory=list)

    def started(self, label: str, seed: int, done: int, total: int) -> None:
        self.marks.append(time.process_time())

    def round(self, *_: Any) -> None:
        self.marks.append(time.process_time())


def measure(arguments: argparse.Namespace) -> Costs:
    torch.set_num_threads(1)
    clients, clock = int(arguments.clients), Clock()
    began = time.process_time()
    federation = federation_of(clients)
    made = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        kinfed.run(
            federation=federation, model=arguments.model, algorithms=arguments.algorithms, rounds=arguments.rounds,
            participation=min(arguments.active / clients, 1.0), steps=20, batch=10, seeds=(0,), eval_every=0, workers=1,
            eval_clients=arguments.eval_clients, out=folder, observer=clock,
        )  # fmt: skip
        ended = time.process_time()
        build([folder], folder / "report.html")
        reported = time.process_time()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    first, *marks = clock.marks
    rounds = [after - before for before, after in zip(clock.marks, marks, strict=False)]
    usual = median(rounds[1:-1])
    return Costs(
        clients, arguments.algorithms, made - began, first - made, usual, rounds[-1] - usual, ended - marks[-1],
        reported - ended, peak_mb() or float("nan"), size / 1e6,
    )  # fmt: skip


def cells(costs: Costs) -> tuple[str, ...]:
    seconds = (costs.federation, costs.set_up, costs.round, costs.evaluation, costs.files, costs.report)
    texts = (f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms" for value in seconds)
    memory, folder = f"{costs.peak_mb / 1024:.2f} GB", f"{costs.folder_mb:.1f} MB"
    return f"{costs.clients:,}", costs.algorithm, *texts, memory, folder


if __name__ == "__main__":
    main()
