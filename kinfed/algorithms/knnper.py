"""kNN-Per: FedAvg's model for all, and beside it a memory of each client's own examples.

Marfoq, Neglia, Vidal, Kameni: Personalized Federated Learning through Local Memorization, ICML 2022.

    training is FedAvg's;   personal: p(y | x) = λ_m p_kNN(y | x) + (1 − λ_m) softmax(z(x)), z of the current w

Neighbours are the option `knn` of every method (kinfed.algorithms.common.neighbours), as fine-tuning is; this is FedAvg
whose personal model is the server's, with `knn` set. λ = 0 (`knn_share`) is FedAvg's server model. Nothing else is
sent. A client that joins later needs no training of its own. The personal model holds features of examples, so it is
refused under differential privacy.
"""

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Cohort, ModelDown, Task


@dataclass(frozen=True)
class KNNPer(FedAvg):
    traits = frozenset({"needs classes"})

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return down.w
