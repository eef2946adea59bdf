"""FedCAC: what matters to a client comes from clients for whom the same matters, everything else from all.

Wu, Liu, Niu, Zhu, Tang: Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
Cautiously Aggressive Collaboration, ICCV 2023, Algorithm 1.

    client i:  θ_i from its start by local training;   sensitivity |(θ_i − start) ⊙ θ_i|
               M_i [T]: the τ largest of every parameter tensor are critical
    server:    O_ij = 1 − ‖M_i − M_j‖₁ / (2 ‖M_i‖₁);   j helps i where O_ij ≥ Ō + (t/β) (O_max − Ō)
               w: the average of the round's models;   u_i: the mean of the models of i and of its helpers
               start_i = u_i where M_i is 1, w elsewhere

The longer training goes on, the more alike a helper must be; after round β there are none, and critical parameters are
the client's own. τ = 0 is FedAvg, bit for bit; τ = 1 with β < 1 is local training for clients that have trained.

Decisions. The server merges u_i and w, as it knows M_i: one model travels down where the authors' code sends two. M_i
travels as bits. Ties of the sensitivity go to the first in the row, and a tensor has the largest whole number below τ
times its size of critical ones. All last known models and masks take part, also of clients that are away; Ō and O_max
are of all pairs of known clients. w weighs by examples, u_i equally (the authors' code). A client that has not trained
yet starts from w.

Masks have trainable columns only; running statistics (of BatchNorm, say) come from w. The server keeps N models and N
masks, and `max_gb` refuses what would not fit.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import ModelDown, check_memory
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, Population, RoundInfo, Task, Weights, example_counts, mean_update, sgd, weighted_mean
from kinfed.core import Range, Tree, option, packed, unpacked


@dataclass
class Server(Tree):
    w: Tensor  # [P] the average of the last round
    theta: Tensor  # [N, P] last known models
    critical: Tensor  # [N, ⌈T/8⌉] uint8: bits of their masks
    known: Tensor  # [N] bool: has sent them
    helps: Tensor  # [N, N] bool: j helps i; all know themselves
    overlap: Tensor  # [] float64: Ō of the last round


@dataclass
class Up(Tree):
    theta: Tensor  # [n, P]
    critical: Tensor  # [n, ⌈T/8⌉] uint8: bits of M_i
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FedCAC(DeploysLastModel[Server, ModelDown, Up]):
    weights: Weights = option("examples", "weights of the average of all: by N_m, or equal")
    tau: float = option(
        0.5, "τ: share of critical parameters; 0 is FedAvg", ge=0, le=1, tune=Range(0.1, 0.9, log=False)
    )
    beta: float = option(100.0, "β: the round after which no client helps with critical parameters", gt=0)
    max_gb: float = option(4.0, "refuse models and masks that take more than this many gigabytes of memory", gt=0)

    single_updates = "keeps every single model"

    def check(self, task: Task, population: Population) -> None:
        n = population.num_clients
        what = f"FedCAC's server keeps the models and masks of all {n:,} clients"
        check_memory(what, n * (4.125 * task.num_params + n), self.max_gb)

    def init_server(self, task: Task, population: Population) -> Server:
        n, w = population.num_clients, task.init(population.seed)
        bits = torch.zeros(n, -(-task.trainable.stop // 8), dtype=torch.uint8, device=w.device)
        zero = torch.zeros((), dtype=torch.float64)
        return Server(w, w.repeat(n, 1), bits, torch.zeros(n, dtype=torch.bool), torch.eye(n, dtype=torch.bool), zero)

    def download(self, server: Server, ids: Tensor) -> ModelDown:
        return ModelDown(torch.stack([self._start(server, i) for i in ids.tolist()]) if len(ids) else server.theta[:0])

    def _start(self, server: Server, i: int) -> Tensor:
        """[P]: critical parameters from the clients that help client i, the others from all."""
        if not bool(server.known[i]):
            return server.w
        helpers = server.helps[i].nonzero().squeeze(1)
        u = weighted_mean(server.theta[helpers], torch.ones(len(helpers)))
        start = server.w.clone()
        critical = unpacked(server.critical[i], len(start))
        return torch.where(critical, u, start)

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, Up]:
        theta = sgd(task, down.w, data.train.batches(self.training))
        critical = self._critical(task, down.w, theta)
        up = Up(theta, packed(critical[:, task.trainable]), example_counts(self.weights, data))
        return Client(theta, torch.ones_like(client.seen)), up

    def _critical(self, task: Task, start: Tensor, theta: Tensor) -> Tensor:
        """bool [n, P]: the τ largest sensitivities of every parameter."""
        mask = torch.zeros_like(theta, dtype=torch.bool)
        for slot in task.slots:
            number = int(self.tau * (slot.stop - slot.start) + 1e-9)  # 0.29 * 100 is 28.999999999999996
            if not slot.trainable or not number:
                continue
            columns = slice(slot.start, slot.stop)
            sensitivity = ((theta[:, columns] - start[:, columns]) * theta[:, columns]).abs()
            largest = torch.sort(sensitivity, dim=1, descending=True, stable=True).indices[:, :number]
            mask[:, columns] = mask[:, columns].scatter(1, largest, True)
        return mask

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        theta, bits, known = server.theta.clone(), server.critical.clone(), server.known.clone()
        theta[ids], bits[ids], known[ids] = up.theta, up.critical, True
        w = server.w + mean_update(up.theta - server.w, up.count)
        helps = torch.eye(len(known), dtype=torch.bool)
        members = known.nonzero().squeeze(1)
        overlap = overlaps(bits[members], theta.shape[1])
        others = overlap[~torch.eye(len(members), dtype=torch.bool)]
        mean = others.mean() if len(others) else torch.zeros((), dtype=torch.float64)
        if len(others) and round.number <= self.beta:
            threshold = mean + round.number / self.beta * (others.max() - mean)
            helps[members[:, None], members] |= overlap >= threshold - 1e-12  # rounding must not shut out the largest
        return Server(w, theta, bits, known, helps, mean)

    def figures(self, server: Server) -> dict[str, Any]:
        helpers = server.helps.sum(1, dtype=torch.float64).mean() - 1
        return {"overlap": float(server.overlap), "helpers": float(helpers)}


def overlaps(bits: Tensor, width: int) -> Tensor:
    """[n, n] float64: O_ij of masks in bits [n, ⌈T/8⌉]. Masks without a critical parameter overlap fully."""
    size = torch.zeros(len(bits), dtype=torch.float64)
    common = torch.zeros(len(bits), len(bits), dtype=torch.float64)
    for block in torch.split(bits.cpu(), 1 << 13, 1):
        mask = unpacked(block, 8 * block.shape[1]).to(torch.float64)
        size += mask.sum(1)
        common += mask @ mask.T
    difference = size[:, None] + size - 2 * common
    return 1 - difference / (2 * size.clamp_min(1))[:, None]
