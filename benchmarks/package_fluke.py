"""Methods of fluke-fl on what kinfed has drawn; see benchmarks/packages.py."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import torchvision_operators  # noqa: F401  before fluke, which imports torchvision
from fluke import DDict, FlukeENV
from fluke.algorithms import PersonalizedFL
from fluke.algorithms.fedrep import FedRep
from fluke.algorithms.fedrod import RODModel
from fluke.client import Client
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver
from packages import BATCH, LR, ROUNDS, Batches, KinfedRun, Models
from torch import nn


class FedRepOfCopies(FedRep):
    """fluke's FedRep gives all clients the same module where it is an object and no name; here each has a copy."""

    init_clients = PersonalizedFL.init_clients


@dataclass(frozen=True)
class Pair:
    """One method in both packages, with options that mean the same."""

    fluke: str  # module.Class under fluke.algorithms
    ours: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=lambda: {"weighted": True})
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    shared: Literal["all", "encoder", "head"] = "all"  # what the server has of the network
    own_model: bool = False  # clients are given a model of their own at the start
    streams: Sequence[str] = ("batches",)  # kinfed's stream of every pass that a client makes over its data in a round
    scored: Literal["trained", "received"] = "trained"
    """Clients' models as they are after the last local training, or once they have the server's last model: the one
    that kinfed scores."""


PAIRS = {
    "fedavg": Pair("fedavg.FedAVG"),
    "fedprox": Pair("fedprox.FedProx", {"mu": 0.5}, {"mu": 0.5}),
    "ditto": Pair("ditto.Ditto", {"lam": 0.5}, {"lam": 0.5, "tau": 1}, own_model=True, streams=("batches", "batches")),
    "fedper": Pair("fedper.FedPer", shared="encoder", own_model=True, scored="received"),
    "fedrep": Pair(
        "FedRepOfCopies", {"weights": "examples"}, {"tau": 1}, shared="encoder", own_model=True,
        streams=("head", "batches"), scored="received",
    ),
    "lgfedavg": Pair(
        "lg_fedavg.LGFedAVG", {"weights": "examples", "shared_layers": 1}, shared="head", own_model=True,
        scored="received",
    ),
    "fedbabu": Pair(
        "fedbabu.FedBABU", {"tune_steps": 0}, {"mode": "full", "fine_tuning_epochs": 0}, shared="encoder",
        own_model=True,
    ),
    "moon": Pair("moon.MOON", {"mu": 1.0, "tau": 0.5}, {"mu": 1.0, "tau": 0.5}),
    "fedlc": Pair("fedlc.FedLC", {"tau": 1.0}, {"tau": 1.0}),
    "scaffold": Pair("scaffold.SCAFFOLD", server={"weighted": False}),
    "fedrod": Pair("fedrod.FedROD", scored="received"),
    "fedala": Pair("fedala.FedALA", {"tol": 0.01}, {"conergence_threshold": 0.01}),
    "fedavgm": Pair("fedavgm.FedAVGM", {"beta1": 0.5}, server={"weighted": True, "momentum": 0.5}),
    "fedadam": Pair(
        "fedopt.FedOpt", {"server_lr": 0.02},
        server={"mode": "adam", "lr": 0.02, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "weighted": True},
    ),
    "fednova": Pair("fednova.FedNova"),
    "feddyn": Pair("feddyn.FedDyn", {"alpha": 0.1}, {"alpha": 0.1, "clipping": 0}),
    "apfl": Pair(
        "apfl.APFL", {"alpha": 0.5, "adaptive": False, "weights": "examples"}, {"lam": 0.5},
        {"weighted": True, "tau": 1}, own_model=True,
    ),
    "pfedme": Pair(
        "pfedme.PFedMe", {"lam": 5.0, "inner_steps": 5, "weights": "examples"}, {"k": 5},
        {"weighted": True, "beta": 1.0}, {"lamda": 5.0, "mu": 0.0},
    ),
}  # fmt: skip


class KinfedLoader(FastDataLoader):
    """A client's training rows in the batches that kinfed draws: every pass over it is the next one of `streams`, in
    the next round once all have been."""

    def __init__(self, ours: KinfedRun, client: int, streams: Sequence[str]) -> None:
        self._ours, self._client, self._streams, self._passes = ours, client, streams, 0
        super().__init__(*ours.rows(client, "train"), num_labels=ours.classes, batch_size=BATCH)

    def __iter__(self) -> Batches:
        round, place = divmod(self._passes, len(self._streams))
        self._passes += 1
        return self._ours.batches(self._client, round + 1, self._streams[place])


class AfterTraining(FederationObserver):
    """Clients' models after the last local training, before fluke's closing exchange."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self.models: list[nn.Module] = []

    def end_round(self, round: int) -> None:
        if round == ROUNDS:
            self.models = scored_models(self._clients)


def scored_models(clients: Sequence[Client]) -> list[nn.Module]:
    """What fluke's clients evaluate."""
    return [
        RODModel(deepcopy(client.model), deepcopy(client.inner_model))
        if hasattr(client, "inner_model")
        else deepcopy(client.local_model)
        for client in clients
    ]


def run(method: str, ours: KinfedRun) -> Models:
    pair = PAIRS[method]
    FlukeENV().set_seed(ours.seed)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    hidden, activation, last = ours.start()
    start = EncoderHeadNet(nn.Sequential(hidden, activation), last)
    algorithm = _class(pair.fluke)(len(ours.clients), _splitter(ours, pair.streams), _settings(pair, start))
    trained = AfterTraining(algorithm.clients)
    algorithm.set_callbacks([trained])
    algorithm.run(ROUNDS, 1.0)
    server = {"all": algorithm.server.model, "encoder": None, "head": None}[pair.shared]
    if method == "fedbabu":  # whose head stays at its start
        server = EncoderHeadNet(algorithm.server.model, start.head)
    models = trained.models if pair.scored == "trained" else scored_models(algorithm.clients)
    return Models(models, server, rows_differ=method == "fedrod")


def _splitter(ours: KinfedRun, streams: Sequence[str]) -> DataSplitter:
    loaders = [KinfedLoader(ours, client, streams) for client in ours.clients]
    return DataSplitter(DummyDataContainer(loaders, [None] * len(loaders), None, ours.classes))


def _settings(pair: Pair, start: EncoderHeadNet) -> DDict:
    client = {
        "batch_size": BATCH, "local_epochs": 1, "loss": "CrossEntropyLoss",
        "optimizer": DDict(name="SGD", lr=LR, **pair.optimizer),
        "scheduler": DDict(name="StepLR", step_size=1, gamma=1.0), **pair.client,
    }  # fmt: skip
    if pair.own_model:
        client["model"] = deepcopy(start)
    shared = deepcopy(start if pair.shared == "all" else getattr(start, pair.shared))
    return DDict(model=shared, client=DDict(client), server=DDict(dict(pair.server)))


def _class(name: str) -> Any:
    if name == FedRepOfCopies.__name__:
        return FedRepOfCopies
    module, cls = name.split(".")
    return getattr(importlib.import_module(f"fluke.algorithms.{module}"), cls)
