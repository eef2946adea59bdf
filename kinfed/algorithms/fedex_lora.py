"""FedEx-LoRA: FedAvg of adapters, with what the average of both matrices misses put into a residual.

Singhal, Ponkshe, Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language
Models, ACL 2025.

    W = W0 + (α/r) (B A + R)       R [out, in], the same for all, zero at first; no client trains it
    client m:  A_m, B_m from the received A, B by local training upon W0 and R
    server:    A ← Σ p_m A_m,   B ← Σ p_m B_m,   R ← R + Σ p_m B_m A_m − B A

so that W is Σ p_m W_m exactly, which the means of A and B alone are not. With one client it is FedAvg on adapters, and
without R it always is. The model must have residuals (kinfed.lora(..., residual=True)); to other methods these are
columns that nothing moves.

Decisions. R goes down as it is; the paper sends what a round adds to it as factors, which is less if few clients with
low ranks take part and all hear of every round. The mean is by examples. The personal model is the client's own after
its last training, upon the R that it had then.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import Weights, mean_update
from kinfed.algorithms.common.low_rank import adapters_of, matrix, mean_product, residual_columns
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, ColumnSplit, DeltaUp, ModelDown, Population, RoundInfo, Task, Tree, option, sgd
from kinfed.author import example_counts as counts


@dataclass
class Server(Tree):
    w: Tensor  # [P] adapters, residuals and what else is trained


@dataclass(frozen=True)
class FedExLoRA(DeploysLastModel[Server, ModelDown, DeltaUp]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    single_updates = "multiplies the two matrices of every single adapter"

    def check(self, task: Task, population: Population) -> None:
        adapters_of("FedEx-LoRA", task, residual=True)

    def split(self, task: Task) -> ColumnSplit:
        """Residuals, and all that clients train."""
        adapters = adapters_of("FedEx-LoRA", task, residual=True)
        return ColumnSplit.from_mask(residual_columns(adapters, task.num_params))

    def sent_columns(self, task: Task) -> Tensor:
        return self.split(task).shared_mask

    def init_server(self, task: Task, population: Population) -> Server:
        return Server(task.init(population.seed))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        split = self.split(task)
        mask = split.shared_mask.to(down.w.device) if self.training.weight_decay else None  # else nothing moves R
        theta = sgd(task, down.w, data.train.batches(self.training), mask=mask)
        delta = split.take_shared(theta) - split.take_shared(down.w)
        return Client(theta, torch.ones_like(client.seen)), DeltaUp(delta, counts(self.weights, data))

    def aggregate(self, server: Server, ids: Tensor, up: DeltaUp, round: RoundInfo) -> Server:
        task = round.server_task
        assert task is not None  # the loop gives it
        split, p = self.split(task), torch.ones(len(ids)) if up.count is None else up.count
        old, share = split.take_shared(server.w[None]), p.double() / p.double().sum()
        rows = split.join(split.take_own(server.w[None]).expand(len(ids), -1), old + up.delta)
        w = split.join(split.take_own(server.w[None]), old + mean_update(up.delta, up.count))[0]
        for adapter in adapters_of("FedEx-LoRA", task, residual=True):
            assert adapter.R is not None
            of_means = matrix(w, adapter.B).double() @ matrix(w, adapter.A).double()
            matrix(w, adapter.R).add_((mean_product(rows, adapter, share) - of_means).to(w.dtype))
        return Server(w)
