"""FedBN: normalization layers of one's own, everything else shared.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
Algorithm 1.

    θ_m = (shared, norm_m);   clients train both, the server averages the shared part, normalization layers never leave

Made for clients whose labels mean the same while their features do not (other cameras, scanners, scales): what differs
is taken out by each client's own scale, shift and running statistics. The personal model joins the current shared part
and the client's own layers. There is no server model: it would have no statistics.

Normalization layers are found by their type. The released code goes by "bn" in a parameter's name, which misses those
with other names (`downsample.1` of a ResNet). LayerNorm and GroupNorm count as well; they have no running statistics,
and with them this is not the paper's method. `own` names other layers instead.

Weights are by examples; the released code averages equally (`weights="equal"`). A client that has not trained yet has
initial layers, whose statistics are of no data: fine-tuning steps (`finetune`) before the model is used move them.
"""

from dataclasses import dataclass

from kinfed.algorithms.common.partial import PartlyShared
from kinfed.author import ColumnSplit, ConfigError, Task, option, parse_patterns


@dataclass(frozen=True)
class FedBN(PartlyShared):
    own: str = option(
        "", "own layers by name or pattern, separated by commas, instead of all normalization layers by their type"
    )

    def split(self, task: Task) -> ColumnSplit:
        own = parse_patterns(self.own) or task.norm_layers()
        if not own:
            raise ConfigError(
                "FedBN keeps normalization layers with the clients, and the model has none; its layers are "
                f"{', '.join(task.layer_names())}: choose a model with BatchNorm, or name other layers by own"
            )
        return ColumnSplit.owning(task.slots, own)
