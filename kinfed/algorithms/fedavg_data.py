"""FedAvg + Data: FedAvg after clients have shared some of their examples.

Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data, 2018, section 4 (data sharing).

    G from all D_m,  |G| = β Σ N_m;   client m:  min_w f(w; D_m + G_m),  G_m a random fraction α of G;   then FedAvg

Their example is β = 10 % and α = 50 %, each client receiving as much as 5 % of all examples; the default, for the
"5 % sharing" of the FedFomo paper, is β = 5 % and α = 1. Weights of the average count D_m + G_m.

The exchange comes before the first round and costs no round: everyone gives what was drawn from its training examples
and receives its part of the pool. Its bytes are counted with those of the first round: every example of G once up,
every example received (those of one's own are not sent back) once down. Raw examples leave the clients: this is no
private method, and in a deployment the exchange is a step of its own, before clients are started with what they hold
then. `exchange` does it for a simulation.

Decisions:
  * Zhao et al. take G from data that no client has. As in FedFomo's comparison it comes from the clients' training
    examples here, drawn uniformly from all of them; a donor keeps what it gave.
  * FedFomo's released code lets every client give the fraction β/K of its examples, so that its pool is β times one
    average client instead of β times all data: `share_base="client"`.
  * Zhao et al. start from a model trained on G at the server; FedFomo does not say. `warm_steps` does so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kinfed.algorithms.fedavg import FedAvg, Server
from kinfed.data.federation import Federation, Population
from kinfed.data.sharing import share_examples
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class FedAvgData(FedAvg):
    share: float = 0.05
    """β: size of the pool, as a part of all training examples (or of an average client's)."""
    alpha: float = 1.0
    """α: the part of the pool that each client receives."""
    share_base: str = "global"
    """What `share` is a part of: "global" (all training examples) or "client" (an average client's)."""
    warm_steps: int = 0
    """Steps on the pool by which the server trains the first model; 0 for none."""

    symmetric = False
    private = False
    leaks = ("training examples themselves, given to the server and to other clients",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "alpha"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} lies in (0, 1]; got {getattr(self, name)}")
        if self.share_base not in ("global", "client"):
            raise ConfigError(f"share_base is global or client; got {self.share_base!r}")
        if self.warm_steps < 0:
            raise ConfigError(f"warm_steps must not be negative; got {self.warm_steps}")

    def exchange(self, federation: Federation, clients: Population) -> tuple[Federation, Population]:
        examples = len(torch.unique(federation.train.rows))
        base = examples if self.share_base == "global" else examples / clients.num_clients
        size = max(round(self.share * base), 1)
        return share_examples(federation, clients, size, self.alpha, clients.key("shared-examples"))

    def init_server(self, task: Task, clients: Population) -> Server:
        if clients.pool is None:
            raise ConfigError(
                "FedAvg + Data trains on examples that clients share before the first round, and none were shared; "
                "give the pool and the loop what method.exchange(federation, population) returns"
            )
        server = super().init_server(task, clients)
        if self.warm_steps:
            pool = replace(clients.pool, features=clients.pool.features.on(task.device))
            training = self.training.with_steps(self.warm_steps)
            server = replace(server, w=sgd(task, server.w[None], pool.batches(training, stream="warm"))[0])
        return server
