"""Rounds of pfl-research: its own FedAvg, FedProx and SCAFFOLD with PyTorch, in one process."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch_training import network
from turnstile import Turnstile
from work import FEDPROX_MU, Images, Side, Work, versions_of

MANY = 1_000_000  # rounds: as many as are asked for


class _Model(nn.Module):
    """What pfl asks of a module: its loss, and metrics, of which rounds need none."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net, self._loss = network(work), nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self._loss(self(x), y)
        return out

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class _Gate(TrainingProcessCallback):  # type: ignore[misc]
    def __init__(self, turnstile: Turnstile) -> None:
        self._turnstile = turnstile

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._turnstile.wait_for_turn()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        return not self._turnstile.wait_for_turn(), Metrics()


class PflSide(Side):
    def __init__(self, work: Work, images: Images, method: str, cores: int) -> None:
        torch.set_num_threads(cores)
        torch.manual_seed(0)
        train, test = (torch.from_numpy(x) for x in images.standardized())
        self._test, self._test_y, y = test, torch.from_numpy(images.test_y), torch.from_numpy(images.y)
        begin, end = images.offsets[:-1], images.offsets[1:]

        def of_user(k: int) -> Dataset:
            return Dataset((train[begin[k] : end[k]], y[begin[k] : end[k]]), user_id=str(k))

        users = list(range(work.clients))
        data = FederatedDataset(of_user, get_user_sampler("minimize_reuse", users))
        self._module = _Model(work)
        optimizer = torch.optim.SGD(self._module.parameters(), lr=1.0)
        model = PyTorchModel(self._module, torch.optim.SGD, optimizer)
        training = NNTrainHyperParams(
            local_num_epochs=work.epochs, local_num_steps=None, local_learning_rate=work.lr,
            local_batch_size=work.batch,
        )  # fmt: skip
        common = {
            "central_num_iterations": MANY, "evaluation_frequency": MANY, "train_cohort_size": work.active,
            "val_cohort_size": 0,
        }  # fmt: skip
        algorithm: Any = FederatedAveraging()
        parameters: Any = NNAlgorithmParams(**common)
        if method == "fedprox":
            algorithm, parameters = FedProx(), FedProxParams(**common, mu=FEDPROX_MU)
        elif method == "scaffold":
            algorithm = SCAFFOLD()
            parameters = SCAFFOLDParams(
                **common, population=work.clients, use_gradient_as_control_variate=False,
                user_state_storage=InMemoryUserStateStorage(),
            )  # fmt: skip
        self._turnstile = Turnstile()
        gate = _Gate(self._turnstile)
        backend = SimulatedBackend(training_data=data, val_data=data)
        self._turnstile.start(lambda: algorithm.run(parameters, backend, model, training, callbacks=[gate]))

    def rounds(self, count: int) -> None:
        self._turnstile.let_pass(count)

    def accuracy(self) -> float:
        with torch.no_grad():
            return float((self._module(self._test).argmax(1) == self._test_y).float().mean())

    def versions(self) -> dict[str, Any]:
        return versions_of("pfl", "torch")

    def close(self) -> None:
        self._turnstile.close()
