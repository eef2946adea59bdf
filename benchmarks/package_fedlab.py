"""Methods of fedlab on what kinfed has drawn; see benchmarks/packages.py.

fedlab weighs clients alike and keeps one server model: kinfed's methods have equal weights here, and server models are
compared. Its Ditto and its IFCA stop at their first round (both call the module tqdm as a function, and use
attributes that their base class does not set), so they are not in the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torchvision_operators  # noqa: F401  before fedlab, which imports torchvision
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.feddyn import FedDynSerialClientTrainer, FedDynServerHandler
from fedlab.contrib.algorithm.fednova import FedNovaSerialClientTrainer, FedNovaServerHandler
from fedlab.contrib.algorithm.fedprox import FedProxSerialClientTrainer, FedProxServerHandler
from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler
from fedlab.core.standalone import StandalonePipeline
from packages import BATCH, LR, ROUNDS, Batches, KinfedRun, Models

EQUAL = {"weights": "equal"}


@dataclass(frozen=True)
class Pair:
    """One method in both packages, with options that mean the same."""

    trainer: type[Any]
    handler: type[Any] = SyncServerHandler
    ours: Mapping[str, Any] = field(default_factory=lambda: EQUAL)
    client: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] | None = None  # None: its server has no settings


PAIRS = {
    "fedavg": Pair(SGDSerialClientTrainer),
    "fedprox": Pair(FedProxSerialClientTrainer, FedProxServerHandler, {**EQUAL, "mu": 0.5}, {"mu": 0.5}),
    "scaffold": Pair(ScaffoldSerialClientTrainer, ScaffoldServerHandler, {}, server={"lr": 1.0}),
    "fednova": Pair(FedNovaSerialClientTrainer, FedNovaServerHandler, server={"option": "uniform"}),
    "feddyn": Pair(FedDynSerialClientTrainer, FedDynServerHandler, {"alpha": 0.1}, {"alpha": 0.1}, {"alpha": 0.1}),
}


@dataclass
class KinfedPasses:
    """The batches of a client's next pass over its rows."""

    ours: KinfedRun
    client: int
    passes: int = 0

    def __iter__(self) -> Batches:
        self.passes += 1
        return self.ours.batches(self.client, self.passes)

    def __len__(self) -> int:
        return -(-len(self.ours.rows(self.client, "train")[1]) // BATCH)


class KinfedDataset:
    """fedlab asks for a client's loader in every round."""

    def __init__(self, ours: KinfedRun) -> None:
        self._passes = [KinfedPasses(ours, client) for client in ours.clients]

    def get_dataloader(self, client: int, batch_size: int) -> KinfedPasses:
        return self._passes[client]


class QuietPipeline(StandalonePipeline):
    def evaluate(self) -> None:
        """Nothing: models are scored after the last round."""


def run(method: str, ours: KinfedRun) -> Models:
    pair = PAIRS[method]
    handler = pair.handler(ours.start(), ROUNDS, 1.0)
    if pair.server is not None:
        handler.setup_optim(**pair.server)
    trainer = pair.trainer(ours.start(), len(ours.clients))
    trainer.setup_dataset(KinfedDataset(ours))
    trainer.setup_optim(1, BATCH, LR, **pair.client)
    QuietPipeline(handler, trainer).main()
    return Models(server=handler.model)
