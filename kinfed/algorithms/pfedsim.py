"""pFedSim: FedAvg first; then every client has its own head, and a body mixed from clients whose heads are alike.

Tan, Zhou, Liu, Wang, Yu: pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning, arXiv
2305.15706, 2023.

    rounds 1 to T_g:  FedAvg
    later:    server:    body_i = Σ_j p_ij body_j,   p_ij ∝ −log(1 − s_ij),   s_ij = max(0, mean_c cos(W_i[c], W_j[c]))
              client i:  θ_i by local training from (body_i, its own head)

W_i[c] is the row of client i's head for class c. s never exceeds 0.9999, which is s_ii: heads that are equal share
bodies equally, and where no other head is alike (s_ij = 0) the client goes on alone from its own model. With T_g at the
number of rounds or above this is FedAvg, bit for bit.

Decisions. T_g is a number of rounds, half of them in the paper. In the second phase everybody begins at the model of
the first, and takes part in mixes from its first upload on, with its last known model, whether or not it was called in
the last round; released code knows only pairs that were called together. The server has a client's head from its last
upload and sends the whole start, d numbers; the authors send the body. A client that has not been called in the second
phase starts from what FedAvg left, and so do newcomers.

Running statistics (of BatchNorm, say) are mixed with the bodies, in shares that add up to one. The server keeps N
models, and `max_gb` refuses what would not fit.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, check_memory
from kinfed.algorithms.common.heads import required_body
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, Population, Range, RoundInfo, Task, Tree, example_counts, mean_update, option, sgd

MOST_ALIKE = 0.9999


@dataclass
class Server(Tree):
    w: Tensor  # [P] the model of the first phase
    theta: Tensor  # [N, P] last models of the second phase
    known: Tensor  # [N] bool: has sent one
    p: Tensor  # [N, N] float64 shares of bodies; rows of known clients add up to 1
    is_head: Tensor  # [P] bool
    weight: Tensor  # [C, d_f] int64: the columns of W
    personal: Tensor  # [] bool: the second phase


@dataclass(frozen=True)
class PFedSim(DeploysLastModel[Server, ModelDown, DeltaUp]):
    weights: Weights = option("examples", "weights of FedAvg in the first phase: by N_m, or equal")
    fedavg_rounds: int = option(
        20, "T_g: rounds of FedAvg before clients have models of their own", ge=0, tune=Range(5, 40, whole=True)
    )
    max_gb: float = option(4.0, "refuse models that take more than this many gigabytes of the server's memory", gt=0)

    single_updates = "keeps every single model"

    def check(self, task: Task, population: Population) -> None:
        required_body("pFedSim", task, reads_features=False)
        n = population.num_clients
        what = f"pFedSim's server keeps the models of all {n:,} clients"
        check_memory(what, 4 * n * (task.num_params + 2 * n), self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        n, w = population.num_clients, task.init(population.seed)
        columns = torch.arange(task.num_params, dtype=torch.float64)[None]
        weight = task.head.split(columns)[0][0].to(torch.int64).clone()
        no_client, p = torch.zeros(n, dtype=torch.bool), torch.eye(n, dtype=torch.float64)
        return Server(w, w.repeat(n, 1), no_client, p, task.head.mask, weight, torch.tensor(False))

    def plan(self, server: Server, active: Tensor, round: RoundInfo) -> tuple[Server, Tensor]:
        return replace(server, personal=torch.tensor(round.number > self.fedavg_rounds)), active

    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown(self._starts(server, ids))

    def _starts(self, server: Server, ids: Tensor) -> Tensor:
        """[n, P]: where these clients' local training begins."""
        if not bool(server.personal):
            return server.w.expand(len(ids), -1)
        return torch.stack([self._start(server, i) for i in ids.tolist()]) if len(ids) else server.theta[:0]

    def _start(self, server: Server, i: int) -> Tensor:
        """[P]: a mixed body under the client's own head; one row at a time, whatever others are asked for."""
        if not bool(server.known[i]):
            return server.w
        body = server.p[i].to(server.theta) @ server.theta
        return torch.where(server.is_head.to(body.device), server.theta[i], body)

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        theta = sgd(task, down.w, data.train.batches(self.training))
        return Client(theta, torch.ones_like(client.seen)), DeltaUp(theta - down.w, example_counts(self.weights, data))

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        if not bool(server.personal):
            return replace(server, w=server.w + mean_update(up.delta, up.count))
        theta, known = server.theta.clone(), server.known.clone()
        theta[ids], known[ids] = self._starts(server, ids) + up.delta, True
        return replace(server, theta=theta, known=known, p=_shares(theta, known, server.weight))

    def figures(self, server: Server) -> dict[str, Any]:
        return {"own_share": float(server.p.diagonal().mean())}


def _shares(theta: Tensor, known: Tensor, weight: Tensor) -> Tensor:
    """p [N, N] of models [N, P]; clients that have sent none have no share in any body, and none of their own."""
    members = known.nonzero().squeeze(1)
    rows = theta[members][:, weight.reshape(-1)].to("cpu", torch.float64).reshape(-1, *weight.shape)  # [n, C, d_f]
    directions = torch.nn.functional.normalize(rows, dim=-1).flatten(1)
    alike = (directions @ directions.T / len(weight)).clamp(0, MOST_ALIKE).fill_diagonal_(MOST_ALIKE)  # s
    closeness = -torch.log1p(-alike)
    p = torch.eye(len(known), dtype=torch.float64)
    p[members[:, None], members] = closeness / closeness.sum(1, keepdim=True)
    return p
