"""The rounds that are measured, and the data they train on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from kinfed.core import rng
from kinfed.data import Features, Federation, LocalTraining, Problem, Ragged
from kinfed.engine import build_model

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """One round of FedAvg."""

    name: str
    model: str
    shape: tuple[int, ...]  # of one example
    clients: int
    participation: float
    steps: int
    batch: int
    examples: int  # mean number per client
    fewest: int  # examples that every client has
    product: tuple[int, int, int]  # rows, inputs, outputs of the matrix product that takes most of the time
    target: float | None = None  # times as fast as the plain loop
    against: str | None = None  # compared with the engine on this smaller workload instead of the plain loop

    @property
    def active(self) -> int:
        return max(int(self.participation * self.clients + 1e-9), 1)

    @property
    def title(self) -> str:
        many = (
            f"{self.active:,} of {self.clients:,} clients" if self.active < self.clients else f"{self.active} clients"
        )
        return f"{self.model} {'x'.join(map(str, self.shape))}, {many}, {self.steps} steps of {self.batch}"

    @property
    def training(self) -> LocalTraining:
        return LocalTraining(lr=0.03, batch=self.batch, steps=self.steps)

    def build(self) -> nn.Module:
        return build_model(self.model, self.shape, CLASSES)

    def quick(self) -> Workload:
        """So small that it takes a moment: shows that everything runs, says nothing about speed."""
        return replace(self, clients=6, participation=0.5, steps=2, batch=4, examples=12, fewest=4, target=None)


_MLR = Workload(
    name="mlr",
    model="mlr",
    shape=(1, 28, 28),
    clients=1_000,
    participation=0.1,
    steps=20,
    batch=10,
    examples=69,
    fewest=10,
    product=(10, 784, 10),
    target=7.0,
)
_MLP = Workload(
    name="mlp",
    model="mlp",
    shape=(1, 28, 28),
    clients=40,
    participation=1.0,
    steps=20,
    batch=20,
    examples=500,
    fewest=50,
    product=(20, 784, 128),
    target=3.0,
)
_CNN = Workload(
    name="cnn",
    model="cnn",
    shape=(3, 32, 32),
    clients=15,
    participation=1.0,
    steps=20,
    batch=32,
    examples=600,
    fewest=64,
    product=(32 * 10 * 10, 32 * 5 * 5, 64),
    target=1.4,
)
_MANY_CLIENTS = replace(_MLR, name="mlr-10k", clients=10_000, target=None, against="mlr")

WORKLOADS = {workload.name: workload for workload in (_MLR, _MLP, _CNN, _MANY_CLIENTS)}


def synthetic(workload: Workload, seed: int = 0) -> Federation:
    """Random uint8 images; sizes are `fewest` plus lognormal(0, 2) scaled to the mean, as FedProx deals MNIST."""
    key = rng.root(seed, "benchmark")
    share = torch.exp(2.0 * rng.normal(rng.fold(key, 0), workload.clients))
    spread = (workload.examples - workload.fewest) * workload.clients
    count = workload.fewest + (share * (spread / share.sum())).to(torch.int64)
    total = int(count.sum())
    raw = torch.empty(total, *workload.shape, dtype=torch.uint8)
    flat, block = raw.view(-1), 1 << 24  # in blocks: the draws of all bytes at once would take several times the data
    for number, begin in enumerate(range(0, len(flat), block)):
        piece = flat[begin : begin + block]
        piece.copy_(rng.bits(rng.fold(key, 1, number), -(-len(piece) // 8)).view(torch.uint8)[: len(piece)])
    labels = rng.bits(rng.fold(key, 2), total) % CLASSES
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    one = (1,) * len(workload.shape)
    no_client = Ragged.empty(workload.clients)
    return Federation(
        features=Features(raw, torch.full(one, 127.5), torch.full(one, 73.9)),
        labels=labels,
        problem=Problem.of_classes(CLASSES),
        train=Ragged(offsets, torch.arange(total)),
        val=no_client,
        test=no_client,
        names=[str(client) for client in range(workload.clients)],
        description={"dataset": "synthetic", "partition": "power law"},
    )
