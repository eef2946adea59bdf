"""Methods of pfl on what kinfed has drawn; see benchmarks/packages.py.

pfl keeps one server model, and has the server's optimizers of FedOpt by taking any optimizer of torch: those whose
formulas torch has are compared. Its clients are weighed by what a postprocessor says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from packages import BATCH, LR, ROUNDS, Batches, KinfedRun, Models
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import FederatedNNAlgorithm, NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

MU, SERVER_LR, TAU = 0.5, 0.05, 0.01
ADAPTIVE = {"server_lr": SERVER_LR, "tau": TAU}
ServerOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def _step(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


@dataclass(frozen=True)
class Pair:
    """One method in both packages, with options that mean the same."""

    ours: Mapping[str, Any] = field(default_factory=dict)
    method: type[FederatedNNAlgorithm] = FederatedAveraging
    params: type[NNAlgorithmParams] = NNAlgorithmParams
    options: Callable[[], Mapping[str, Any]] = dict  # anew for every run: some hold states of clients
    server: ServerOptimizer = _step
    by_examples: bool = True  # weights of clients


PAIRS = {
    "fedavg": Pair(),
    "fedprox": Pair({"mu": MU}, FedProx, FedProxParams, lambda: {"mu": MU}),
    "scaffold": Pair(
        {}, SCAFFOLD, SCAFFOLDParams,
        lambda: {"use_gradient_as_control_variate": False, "user_state_storage": InMemoryUserStateStorage()},
        by_examples=False,
    ),
    "fedavgm": Pair({"beta1": 0.9}, server=lambda own: torch.optim.SGD(own, lr=1.0, momentum=0.9)),
    "fedadagrad": Pair(
        ADAPTIVE,
        server=lambda own: torch.optim.Adagrad(own, lr=SERVER_LR, eps=TAU, initial_accumulator_value=TAU**2),
    ),
    "fedadam": Pair(ADAPTIVE, server=lambda own: torch.optim.Adam(own, lr=SERVER_LR, betas=(0.9, 0.99), eps=TAU)),
}  # fmt: skip


class Network(nn.Module):
    """A network as pfl asks for it."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """None, though pfl asks in the first round: models are scored after the last one."""
        return {}


class KinfedClient(Dataset):
    """A client's rows, in the batches of a round."""

    def __init__(self, ours: KinfedRun, client: int, round: int) -> None:
        super().__init__(ours.rows(client, "train"), user_id=str(client))
        self._kinfed_batches = lambda: ours.batches(client, round)

    def iter(self, batch_size: int | None) -> Batches:
        return self._kinfed_batches()


class KinfedClients(FederatedDatasetBase):
    """Everybody, in every round."""

    def __init__(self, ours: KinfedRun) -> None:
        super().__init__()
        self._ours, self._round = ours, 0

    def __next__(self) -> tuple[Dataset, int]:
        raise NotImplementedError("clients come as a whole cohort")

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Dataset, int]]:
        self._round += 1
        for client in self._ours.clients:
            yield KinfedClient(self._ours, client, self._round), 0


def run(method: str, ours: KinfedRun) -> Models:
    pair, clients = PAIRS[method], len(ours.clients)
    network = Network(ours.start())
    model = PyTorchModel(network, torch.optim.SGD, pair.server(network.parameters()))
    options = dict(pair.options())
    if issubclass(pair.params, SCAFFOLDParams):
        options["population"] = clients
    common = {"central_num_iterations": ROUNDS, "evaluation_frequency": ROUNDS + 1, "train_cohort_size": clients}
    data = KinfedClients(ours)
    pair.method().run(
        pair.params(**common, val_cohort_size=0, **options),
        SimulatedBackend(data, data, [WeightByDatapoints()] if pair.by_examples else []),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
        send_metrics_to_platform=False,
    )
    return Models(server=network.layers)
