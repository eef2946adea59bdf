"""HetLoRA: adapters of which every client trains the first ranks, as many as it can afford, averaged by what they say.

Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024.

    client m:  the first r_m rows of A and columns of B, by local training
    server:    A ← Σ p_m [A_m; 0],   B ← Σ p_m [B_m, 0],   p_m ∝ (Σ over layers of ‖B_m A_m‖²)^½

Missing ranks count as zeros, and what else is trained (a head) has the same weights. With all ranks the model's and
`weights` by examples it is FedAvg with plain steps, to rounding.

Decisions. p_m are those of the paper ("norm"), or by numbers of examples, or equal; if all norms are 0 they are equal.
The paper also lets clients lower their ranks while they train, when a penalty has made the last ones small: left out,
so that a client's rank is what it can afford. One scale α/r holds for all ranks. `ranks` are dealt out once, in equal
parts and at random, or go by the clients' groups. The personal model is the client's own after its last training.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.common.low_rank import matrix
from kinfed.algorithms.common.masked_rows import MaskedDown, MaskedUp
from kinfed.algorithms.common.one_model import Client
from kinfed.algorithms.flora import RanksByClient, Server
from kinfed.author import Cohort, RoundInfo, Task, example_counts, mean_update, option
from kinfed.core import packed, unpacked


@dataclass(frozen=True)
class HetLoRA(RanksByClient):
    weights: Literal["norm", "examples", "equal"] = option("norm", "weights of the average: ‖B A‖, by N_m, or equal")

    single_updates = "weighs adapters by their norms"

    def client_update(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> tuple[Client, MaskedUp]:
        theta, delta, mask = self.trained(task, down, data)
        count = example_counts("examples", data) if self.weights == "examples" else None
        return Client(theta, torch.ones_like(client.seen)), MaskedUp(delta, packed(mask), count)

    def aggregate(self, server: Server, ids: Tensor, up: MaskedUp, round: RoundInfo) -> Server:
        assert round.server_task is not None  # the loop gives it
        sent = unpacked(up.bits, len(server.w)).to(server.w.device)
        rows = torch.where(sent, server.w + up.delta, 0.0)
        weight = up.count
        if self.weights == "norm":
            squares = torch.zeros(len(ids), dtype=torch.float64, device=rows.device)
            for adapter in self.adapters(round.server_task):
                product = matrix(rows, adapter.B).double() @ matrix(rows, adapter.A).double()
                squares += product.square().sum((1, 2))
            weight = squares.sqrt() if bool(squares.any()) else None
        return Server(mean_update(rows, weight), server.level, server.bits)
