"""What every comparison needs: the engine's side of it, a clock, and the proof that both sides compute the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from kinfed.algorithms import prepare_data
from kinfed.algorithms.fedavg import FedAvg
from kinfed.data import Federation, LocalTraining
from kinfed.engine import ModuleTask
from kinfed.engine.rows import Draws, KeyedDraws
from kinfed.errors import KinfedError
from kinfed.pools import LocalPool
from kinfed.server import Loop
from kinfed_papers.bench.plain_loop import Example, PlainLoop

AGREEMENT = 1e-4  # largest difference of any parameter between engine and loop after one round on equal batches


@dataclass
class Timing:
    """Seconds of every measured round: on the clock, and of all processors together."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def fedavg(
    task: ModuleTask, federation: Federation, training: LocalTraining, workers: int, participation: float = 1.0
) -> Loop:
    """Rounds of FedAvg by the engine."""
    algorithm = FedAvg(training)
    federation, clients = prepare_data(algorithm, federation, federation.population(0, participation))
    return Loop(algorithm, task, LocalPool(algorithm, task, federation, 0, workers=workers), clients)


def disagreement(name: str, ours: Loop, federation: Federation, loop: PlainLoop) -> float:
    """Largest difference of any parameter after one round in which both train on the same batches, and models that
    draw draw the same. Sides that do not agree cannot be compared: an error."""
    active = ours.schedule.active(0, 1, federation.num_clients)
    ours.round()
    ours.pool.close()
    draws = Draws(torch.device("cpu"))

    def same(client: int) -> Iterator[Example]:
        alone = federation.cohort(torch.tensor([client]), 0, 1)
        for _, batch in alone.train.batches(ours.algorithm.training):
            draws.begin(batch, 0)
            with KeyedDraws(draws):  # the caller's step on this batch
                yield batch.x[0], batch.y[0]

    loop.train(active.tolist(), same)
    difference = float((ours.server.named()["w"] - loop.parameters()).abs().max())
    if not difference <= AGREEMENT:
        raise KinfedError(
            f"{name}: engine and plain loop should agree to {AGREEMENT:g} after a round on the same "
            f"batches; they differ by {difference:.2g}, so their times cannot be compared"
        )
    return difference
