"""Local steps of any model beside the same steps in a plain PyTorch loop."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import torch
from torch import nn

from kinfed.data import Federation
from kinfed.engine import ModuleTask, frozen_prefix, make_task
from kinfed.errors import KinfedError
from kinfed_papers.bench.contest import Timing, disagreement, fedavg
from kinfed_papers.bench.plain_loop import PlainLoop
from kinfed_papers.bench.step_workload import StepWorkload

PARITY_CLIENTS, PARITY_STEPS = 2, 20


@dataclass
class StepComparison:
    """One workload on some cores."""

    workload: str
    title: str
    backend: str  # of the engine's gradients
    parameters: int  # of a row: what is trained, and running statistics
    client_steps: int  # of every turn
    cores: int
    ours: Timing
    loop: Timing
    disagreement: float  # largest difference of any parameter after PARITY_STEPS steps on the same batches

    @property
    def ratios(self) -> list[float]:
        """The loop's time in units of ours, turn by turn: processor time, or on several cores that of the clock (there
        threads of torch burn processor time while they wait)."""
        sides = (self.ours.cpu, self.loop.cpu) if self.cores == 1 else (self.ours.wall, self.loop.wall)
        return [theirs / own for own, theirs in zip(*sides, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def milliseconds(self, timing: Timing) -> float:
        """Median per client and step, in the time that `ratios` compare."""
        return 1000 * statistics.median(timing.cpu if self.cores == 1 else timing.wall) / self.client_steps

    def figures(self) -> dict[str, Any]:
        times = {"our_ms": self.milliseconds(self.ours), "loop_ms": self.milliseconds(self.loop)}
        return asdict(self) | times | {"ratio": self.ratio, "ratios": self.ratios}


def compare_steps(workload: StepWorkload, repeats: int, cores: Sequence[int], weights: str) -> list[StepComparison]:
    """`weights`: folder with those of MiniLM, "" for random ones."""
    whole = _whole_task(workload, weights)
    parity = _parity(replace(workload, clients=PARITY_CLIENTS, steps=PARITY_STEPS), whole)
    task, federation, loop, _ = _sides(workload, whole)
    engines = {n: fedavg(task, federation, workload.training, n) for n in cores}
    timings = {n: (Timing(), Timing()) for n in cores}
    for repeat in range(repeats + 1):
        for n in cores:
            torch.set_num_threads(n)
            own, theirs = timings[n] if repeat else (Timing(), Timing())  # the first turn warms up
            turns = [(own, engines[n].round), (theirs, loop.round)]
            for timing, call in turns if repeat % 2 else reversed(turns):  # who follows whom must not matter
                timing.measure(call)
    torch.set_num_threads(1)
    for engine in engines.values():
        engine.pool.close()
    steps = workload.clients * workload.steps
    return [
        StepComparison(workload.name, workload.title, task.backend, task.num_params, steps, n, *timings[n], parity)
        for n in cores
    ]


def _whole_task(workload: StepWorkload, weights: str) -> ModuleTask:
    example = workload.federation().features.gather(torch.arange(2))
    # Compiled loops as in a long run.
    return make_task(lambda: workload.module(weights), example=example, batch=workload.batch, examples=inf)


def _sides(workload: StepWorkload, whole: ModuleTask) -> tuple[ModuleTask, Federation, PlainLoop, Federation]:
    """The engine's task and what it trains on; the loop, and what that trains on: the same examples."""
    examples = workload.federation()
    task, federation = whole, examples
    module, loops = copy.deepcopy(whole.module), examples
    if workload.cached:
        prefix = frozen_prefix(whole, examples.features.gather(torch.arange(2)))
        if prefix is None:
            raise KinfedError(f"{workload.name}: nothing of the model lies below what is trained")
        activations = prefix.activations(examples.features)
        task, federation = prefix.upper_task(activations, batch=workload.batch), replace(examples, features=activations)
        if workload.cached == "both":
            module, loops = nn.Sequential(*copy.deepcopy(prefix.cut.upper_layers(whole.module))), federation
    start = task.unflatten(task.init(0)).values()
    return task, federation, PlainLoop(module, start, loops, workload.training), loops


def _parity(workload: StepWorkload, whole: ModuleTask) -> float:
    task, federation, loop, examples = _sides(workload, whole)
    return disagreement(workload.name, fedavg(task, federation, workload.training, 1), examples, loop)
