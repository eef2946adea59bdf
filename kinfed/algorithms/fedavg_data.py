"""FedAvg + Data: FedAvg after clients share some of their examples.

Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data, 2018, section 4 (data sharing).

    G from all D_m,  |G| = β Σ N_m;   client m:  min_w f(w; D_m + G_m),  G_m a random fraction α of G;   then FedAvg

Their example is β = 10 % and α = 50 %, each client receiving as much as 5 % of all examples; the default, for the
"5 % sharing" of the FedFomo paper, is β = 5 % and α = 1. Weights of the average count D_m + G_m.

The exchange comes before the first round and costs no round: everyone gives what was drawn from its training examples
and receives its part of the pool. Its bytes are counted with those of the first round: every example of G once up,
every example received (those of one's own are not sent back) once down. Raw examples leave the clients: this is no
private method, and in a deployment the exchange is a step of its own, before clients are started with what they hold
then. `share_examples` does it for a simulation (kinfed.algorithms.prepare_data calls it).

Decisions:
  * Zhao et al. take G from data that no client has. As in FedFomo's comparison it comes from the clients' training
    examples here, drawn uniformly from all of them; a donor keeps what it gave.
  * FedFomo's released code lets every client give the fraction β/K of its examples, so that its pool is β times one
    average client instead of β times all data: `share_base="client"`.
  * Zhao et al. start from a model trained on G at the server; FedFomo does not say. `warm_steps` does so.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.author import ConfigError, Federation, Population, Task, option, sgd
from kinfed.data import share_examples as add_shared_examples


@dataclass(frozen=True)
class FedAvgData(FedAvg):
    share: float = option(
        0.05, "β: size of the pool, as a part of all training examples (or of an average client's)", gt=0, le=1
    )
    alpha: float = option(1.0, "α: the part of the pool that each client receives", gt=0, le=1)
    share_base: Literal["global", "client"] = option(
        "global", "what `share` is a part of: all training examples, or an average client's"
    )
    warm_steps: int = option(0, "steps on the pool by which the server trains the first model; 0 for none", ge=0)

    traits = frozenset({"draws by client", "state to deploy"})
    leaks = "training examples themselves, given to the server and to other clients"

    def init_server(self, task: Task, population: Population) -> Server:
        if population.pool is None:
            raise ConfigError(
                "FedAvg + Data trains on examples that clients share before the first round, and none were shared; "
                "give the pool and the loop what prepare_data(algorithm, federation, population) returns"
            )
        server = super().init_server(task, population)
        if self.warm_steps:
            pool, training = population.pool.on(task.device), self.training.with_steps(self.warm_steps)
            server = replace(server, w=sgd(task, server.w[None], pool.batches(training, stream="warm"))[0])
        return server


def share_examples(
    algorithm: FedAvgData, federation: Federation, population: Population
) -> tuple[Federation, Population]:
    """Every client's training examples with its part of the pool, and the population that knows of the pool."""
    examples = len(torch.unique(federation.train.rows))
    base = examples if algorithm.share_base == "global" else examples / population.num_clients
    size = max(round(algorithm.share * base), 1)
    return add_shared_examples(federation, population, size, algorithm.alpha, population.key("shared-examples"))
