"""FedPer: shared base layers, a head of one's own.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, 2019.

    θ_m = (base, head_m);   clients train both, the server averages the base by examples, heads never leave

An empty head (`head_layers = 0`) is FedAvg. The personal model joins the current base and the client's own head, as
it was left by its last training; a client that has not trained yet uses the common initial head.
"""

from dataclasses import dataclass

from kinfed.algorithms.common.partial import PartlyShared
from kinfed.author import ColumnSplit, Task, last_layers, option, parse_patterns


@dataclass(frozen=True)
class FedPer(PartlyShared):
    head_layers: int = option(1, "how many of the last layers form the head (K_P in the paper)", ge=0)
    head: str = option("", "layers of the head by name or pattern, separated by commas, instead of head_layers")

    def split(self, task: Task) -> ColumnSplit:
        head = parse_patterns(self.head) or last_layers(task.slots, self.head_layers)
        return ColumnSplit.owning(task.slots, head)
