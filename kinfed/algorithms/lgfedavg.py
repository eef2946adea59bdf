"""LG-FedAvg: local lower layers (a representation of one's own), global upper layers.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning
with Local and Global Representations, 2020.

    θ_m = (local_m, global);   active clients train both, the server averages the global part equally

Equal weights are those of the released code. Running statistics (of BatchNorm, say) of local layers stay with the
clients.

By default the last two layers are global (the last one of only two), as the method describes. The
authors' CIFAR configuration shares the *convolutions* instead, by the order of a list; `shared` by name gives
that. Everything global, by name, is FedAvg with equal weights; a model of one layer is refused otherwise. The authors
start from a network trained by FedAvg: use the run's warm start. They report each user's best round on test data;
here, as everywhere, the last round counts.
"""

from dataclasses import dataclass

from kinfed.algorithms.common.partial import PartlyShared
from kinfed.author import ColumnSplit, ConfigError, Population, Task, Weights, last_layers, option, parse_patterns


@dataclass(frozen=True)
class LGFedAvg(PartlyShared):
    shared_layers: int = option(
        2, "how many of the last layers are shared; where the model has no more, one less than it has", ge=1
    )
    shared: str = option("", "shared layers by name or pattern, separated by commas, instead of shared_layers")
    weights: Weights = option("equal", "weights of the average: equal (released code), or by N_m")

    def split(self, task: Task) -> ColumnSplit:
        most = min(self.shared_layers, len(task.layer_names()) - 1)
        shared = parse_patterns(self.shared) or last_layers(task.slots, most)
        return ColumnSplit.owning(task.slots, shared).swapped()

    def check(self, task: Task, population: Population) -> None:
        if len(task.layer_names()) < 2 and not self.shared:
            raise ConfigError(
                f"LG-FedAvg keeps lower layers with the clients, but the model has only {task.layer_names()[0]!r}; "
                "choose a deeper model"
            )
        super().check(task, population)
