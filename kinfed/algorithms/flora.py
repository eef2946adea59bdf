"""FLoRA: clients train adapters of ranks of their own; the server stacks them, which adds up their products exactly.

Wang, Shen, He, Sun, Wang, Lyu, Li: FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations, NeurIPS 2024.

    W = W0 + (α/r) (B A + R)
    client m:  A_m [r_m, in], B_m [out, r_m] by local training from a new A and B = 0 upon W0 and R
    server:    R ← R + Σ p_m B_m A_m = R + [B_1 ... B_n] [p_1 A_1; ...; p_n A_n];   A anew, B ← 0;
               whatever else is trained is averaged

A round moves W by Σ p_m of what each client's training moved it by, exactly. Clients with rank r_m have, train and send
the first r_m rows of A and columns of B.

Decisions. R goes down as it is (the paper sends the stack, which clients merge into their W0). New A are the start that
the model would have had with another seed, by the round, the same for all clients. One scale α/r holds for all ranks, r
being the model's. `ranks` are dealt out once, in equal parts and at random, or go by the clients' groups; none named is
the model's rank for all. The personal model is the client's own after its last training, upon the R that it had.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.common.averaging import Weights
from kinfed.algorithms.common.low_rank import Adapter, adapters_of, matrix, mean_product, rank_columns, residual_columns
from kinfed.algorithms.common.masked_rows import Levels, MaskedDown, MaskedUp, check_levels, dealt_levels, train_masked
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, ConfigError, Population, RoundInfo, Task, Tree, example_counts, mean_update, option
from kinfed.core import packed, take_rows, unpacked


@dataclass
class Server(Tree):
    w: Tensor  # [P] adapters, residuals and what else is trained
    level: Tensor  # [N] int64: which of the ranks a client has
    bits: Tensor  # [L, ⌈P/8⌉] uint8: the columns of each rank


@dataclass(frozen=True)
class RanksByClient(DeploysLastModel[Server, MaskedDown, MaskedUp]):
    """Clients that train the first ranks of every adapter, as many as they can afford."""

    ranks: str = option("", "r_m: ranks that are dealt out to clients in equal parts; none: the model's for all")
    by: Levels = option("chance", "ranks are dealt out, or those of the clients' groups in order")

    traits = frozenset({"no momentum", "draws by client"})
    residual = False  # whether the model must have residuals

    def adapters(self, task: Task) -> list[Adapter]:
        return adapters_of(type(self).__name__, task, residual=self.residual)

    def levels(self, task: Task) -> list[int]:
        """The ranks, of which none is larger than the model's."""
        most, name = max(adapter.rank for adapter in self.adapters(task)), type(self).__name__
        parts = [part.strip() for part in self.ranks.split(",") if part.strip()] or [str(most)]
        if not all(part.isdigit() and 1 <= int(part) <= most for part in parts):
            raise ConfigError(
                f"{name}'s ranks are whole numbers from 1 to the model's {most}, separated by commas; got "
                f"{self.ranks!r}"
            )
        return [int(part) for part in parts]

    def check(self, task: Task, population: Population) -> None:
        check_levels(f"{type(self).__name__}'s ranks", self.ranks, len(self.levels(task)), self.by, population)

    def init_server(self, task: Task, population: Population) -> Server:
        adapters, levels = self.adapters(task), self.levels(task)
        bits = packed(torch.stack([rank_columns(adapters, task.num_params, rank) for rank in levels]))
        level = dealt_levels(len(levels), self.by, population, "ranks")
        return Server(task.init(population.seed), level, bits)

    def download(self, server: Server, ids: Tensor) -> MaskedDown:
        return MaskedDown.of(server.w, take_rows(server.bits, server.level[ids]))

    def trained(self, task: Task, down: MaskedDown, data: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """(models [n, P] after local training, their changes, and the columns that were trained)."""
        still = residual_columns(self.adapters(task), task.num_params).to(down.w.device)
        mask = unpacked(down.bits, task.num_params).to(down.w.device) & ~still
        theta = train_masked(task, down.w, data.train.batches(self.training), mask | still)
        return theta, torch.where(mask, theta - down.w, 0.0), mask


@dataclass(frozen=True)
class FLoRA(RanksByClient):
    weights: Weights = option("examples", "weights of the sum: by N_m, or equal")

    residual = True
    single_updates = "multiplies the two matrices of every single adapter"

    def client_update(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> tuple[Client, MaskedUp]:
        theta, delta, mask = self.trained(task, down, data)
        up = MaskedUp(delta, packed(mask), example_counts(self.weights, data))
        return Client(theta, torch.ones_like(client.seen)), up

    def aggregate(self, server: Server, ids: Tensor, up: MaskedUp, round: RoundInfo) -> Server:
        task = round.server_task
        assert task is not None  # the loop gives it
        p = torch.ones(len(ids)) if up.count is None else up.count
        share, fresh = p.double() / p.double().sum(), task.init(round.population.seed, round.number)
        sent = unpacked(up.bits, len(server.w)).to(server.w.device)
        rows = torch.where(sent, server.w + up.delta, 0.0)
        w = server.w + mean_update(up.delta, up.count)
        for adapter in self.adapters(task):
            assert adapter.R is not None
            matrix(w, adapter.R).copy_(matrix(server.w, adapter.R) + mean_product(rows, adapter, share).to(w.dtype))
            matrix(w, adapter.A).copy_(matrix(fresh, adapter.A))
            matrix(w, adapter.B).zero_()
        return Server(w, server.level, server.bits)
