"""Rounds of kinfed: what `kinfed run` does in a round, and the whole job with its files and its page."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_training import network
from work import (
    DITTO_LAM,
    FEDPROX_MU,
    LSTM_UNITS,
    MEAN,
    PFEDME_LAM,
    PFEDME_STEPS,
    RESNET_WIDTH,
    SCALE,
    TRANSFORMER_WIDTH,
    Images,
    Side,
    Work,
    versions_of,
)

import kinfed
from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.models import build_model
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.memory import keep_freed_memory
from kinfed.report import build
from kinfed.server.loop import Loop

OPTIONS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": FEDPROX_MU},
    "ditto": {"lam": DITTO_LAM},
    "pfedme": {"lam": PFEDME_LAM, "inner_steps": PFEDME_STEPS},
}


class KinfedSide(Side):
    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as the command does
        self._work, self._images = work, images
        training = LocalTraining(lr=work.lr, batch=work.batch, steps=None, epochs=work.epochs)
        algorithm = make_algorithm(method, training, OPTIONS.get(method))
        example = torch.zeros(2, *work.shape)
        task = make_task(
            lambda: own_network(work), example=example, batch=work.batch, examples=inf
        )  # compiled, as in a long run
        data = federation(work, images)
        data, population = prepare_data(algorithm, data, data.population(0, work.active / work.clients))
        self._loop = Loop(algorithm, task, LocalPool(algorithm, task, data, 0, workers=cores), population)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self._loop.round()

    def accuracy(self) -> float:
        score = self._loop.evaluate().server_model
        return float("nan") if score is None else float(score.correct.sum() / score.count.sum())

    def versions(self) -> dict[str, Any]:
        return versions_of("kinfed", "torch", "numba")

    def limit(self, method: str) -> float:
        """Seconds of one core for the products of a round at the rate of its largest, measured now, and one pass over
        its batches."""
        from kinfed_papers.bench.machine import measure_limits  # no part of a job
        from kinfed_papers.bench.timing import work_of_steps
        from kinfed_papers.bench.workload import Workload

        work = self._work
        count = torch.from_numpy(self._images.offsets).diff()
        steps = work.active * float(self._loop.algorithm.training.num_steps(count).float().mean())
        gflop, gigabytes = work_of_steps(network(work), work.shape, work.batch, 1)
        gflop += _uncounted_gflop(work)
        like = Workload(
            name=work.name, model=work.model, shape=work.shape, clients=work.clients, participation=1.0, steps=1,
            batch=work.batch, examples=work.examples, fewest=work.fewest, product=_largest_product(work),
        )  # fmt: skip
        limits = measure_limits([like], seconds=0.3)
        return limits.seconds(work.name, GRADIENTS.get(method, 1.0) * steps * gflop, steps * gigabytes)

    def close(self) -> None:
        self._loop.close()


# Of a local step, in units of FedAvg's; FedRep's steps on the head have a forward pass and little else.
GRADIENTS = {"apfl": 2.0, "ditto": 2.0, "pfedme": float(PFEDME_STEPS), "perfedavg": 2.0, "fedrep": 4 / 3}


def _uncounted_gflop(work: Work) -> float:
    """Of a step: torch does not count the products inside its LSTM, forward and twice as many backward."""
    if work.model != "lstm":
        return 0.0
    length, width = work.shape
    return 3 * 2 * work.batch * length * 4 * LSTM_UNITS * (width + LSTM_UNITS) / 1e9


def own_network(work: Work) -> nn.Module:
    """The model as a user of kinfed names it: its own LSTM is torch's, with a last output that it knows."""
    if work.model == "lstm":
        return build_model("lstm", work.shape, work.classes, {"hidden": LSTM_UNITS, "layers": 1})
    return network(work)


def _largest_product(work: Work) -> tuple[int, int, int]:
    """Rows, inputs and outputs of the product that takes most of the time."""
    batch, positions = work.batch, work.batch * work.shape[0]
    products = {
        "mlr": (batch, 784, work.classes), "mlp": (batch, 784, 128), "dense": (batch, 784, 200),
        "cnn": (batch * 10 * 10, 32 * 5 * 5, 64), "lstm": (batch, LSTM_UNITS, 4 * LSTM_UNITS),
        "resnet18": (batch * 32 * 32, 9 * RESNET_WIDTH, RESNET_WIDTH),
        "transformer": (positions, TRANSFORMER_WIDTH, 3 * TRANSFORMER_WIDTH),
    }  # fmt: skip
    return products[work.model]


def federation(work: Work, images: Images) -> Federation:
    """Clients test on equal shares of the held-out examples."""
    raw = torch.from_numpy(images.x), torch.from_numpy(images.test_x)
    first = len(images.x)
    shares = torch.linspace(0, len(images.test_x), work.clients + 1).to(torch.int64)
    one = (1,) * len(work.shape)
    return Federation(
        features=Features(torch.cat(raw), torch.full(one, float(MEAN)), torch.full(one, float(SCALE))),
        labels=torch.cat([torch.from_numpy(images.y), torch.from_numpy(images.test_y)]),
        problem=Problem.of_classes(work.classes),
        train=Ragged(torch.from_numpy(images.offsets), torch.arange(first)),
        val=Ragged.empty(work.clients),
        test=Ragged(shares, torch.arange(first, first + len(images.test_x))),
        names=[str(client) for client in range(work.clients)],
    )


def whole_job(work: Work, images: Images, method: str, cores: int, folder: Path) -> float:
    """All rounds, the evaluation of all clients, the run's files and its page: the accuracy of the server's model."""
    result = kinfed.run(
        federation=federation(work, images), model=lambda shape, classes: network(work), algorithms=method,
        rounds=work.rounds, participation=work.active / work.clients, lr=work.lr, batch=work.batch, steps=None,
        epochs=work.epochs, seeds=(0,), eval_every=0, workers=cores, out=folder,
    )  # fmt: skip
    build([folder], folder / "report.html")
    return float(result.result(method).server["accuracy"])
