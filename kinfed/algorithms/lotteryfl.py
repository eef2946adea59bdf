"""LotteryFL: every client looks for a sparse network of its own in the common one, and only that part travels.

Li, Sun, Wang, Duan, Li, Chen, Li: LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery
Ticket Hypothesis on Non-IID Datasets, 2020.

    client m:  x = M_m ⊙ w
               if x is right on more than `accuracy` of its validation examples, and more than `least` of the weights
               are left: prune the share `prune` of smallest |x| of every weight, and x = M_m ⊙ (the common start)
               θ_m from x by local training of what is left;   send M_m ⊙ θ_m
    server:    every parameter ← its mean over the clients of the round that have it; unchanged where none has

A client that prunes goes back to the start, which is what makes a lottery ticket of it, and does so whenever it is
called and does well. No client prunes with accuracy = 1, which is FedAvg with equal weights, bit for bit.

Decisions. Accuracy is that on validation examples; the authors' code looks at the client's test examples. Weights are
matrices and kernels; biases and normalization layers are never pruned, and go back to the start with the rest. Of equal
magnitudes the first in the row go. Training is confined to what is left; the authors' code trains all parameters and
masks the result, so that its average counts what the client throws away. The deployed model is the client's after
training; "masked" beside it is M_m ⊙ w with the present w, by which the authors judge. Going back to the start costs
rounds, after which models recover; w as a whole is no client's network, and its own accuracy says little.

What travels: parameters that are left, and the mask in bits (d/32 numbers). The server keeps N masks. A reply that is
lost costs nothing: the client's own mask is the one that counts. Running statistics (of BatchNorm, say) are averaged.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, RoundInfo, gradient_steps
from kinfed.algorithms.common.masked_rows import MaskedDown, MaskedUp, mean_where_held, train_masked
from kinfed.algorithms.common.one_model import OneModel
from kinfed.author import Cohort, Population, Range, Task, Tree, Weights, example_counts, option, own_or_server
from kinfed.core import packed, unpacked
from kinfed.engine import ParameterSlot


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    bits: Tensor  # [N, ⌈P/8⌉] uint8: masks as last heard of


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the last local model, zero where it is pruned
    bits: Tensor  # [n, ⌈P/8⌉] uint8: M_m
    left: Tensor  # [n] share of the weights that are left
    seen: Tensor  # [n] bool: has trained


@dataclass(frozen=True)
class LotteryFL(OneModel[Server, Client, MaskedDown, MaskedUp]):
    prune: float = option(0.2, "share of the weights left that is pruned at a time", gt=0, lt=1, tune=Range(0.05, 0.5))
    accuracy: float = option(
        0.5, "prune where the masked model is right on more than this share of validation examples", ge=0, le=1
    )
    least: float = option(0.5, "prune while more than this share of the weights is left", ge=0, le=1)
    weights: Weights = option("equal", "weights of the average: equal (the authors' code), or by N_m")

    traits = frozenset({"needs validation", "needs classes", "no momentum"})
    single_updates = "averages every parameter over those clients that have it"

    def init_server(self, task: Task, population: Population) -> Server:
        everything = packed(torch.ones(1, task.num_params, dtype=torch.bool))
        return Server(task.init(population.seed), everything.repeat(population.num_clients, 1))

    def init_client(self, task: Task, data: Cohort) -> Client:
        n = len(data)
        everything = packed(torch.ones(1, task.num_params, dtype=torch.bool)).expand(n, -1)
        start = task.init(data.seed).expand(n, -1)
        return Client(start, everything, torch.ones(n), torch.zeros(n, dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> MaskedDown:
        return MaskedDown.of(server.w, server.bits[ids])

    def client_update(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> tuple[Client, MaskedUp]:
        mask = unpacked(client.bits, task.num_params).to(down.w.device)
        x = torch.where(mask, down.w, 0.0)
        pruning = self._does_well(task, x, data).to(client.left.device) & (client.left > self.least)
        if bool(pruning.any()):
            rows = pruning.nonzero().squeeze(1)
            mask, x = mask.clone(), x.clone()
            mask[rows] = pruned(task.slots, x[rows], mask[rows], self.prune)
            trainable = task.trainable
            x[rows, trainable] = torch.where(mask[rows], task.init(data.seed), 0.0)[:, trainable]
        theta = train_masked(task, x, data.train.batches(self.training), mask)
        bits = packed(mask).to(client.bits.device)
        left = torch.where(pruning, client.left * (1 - self.prune), client.left)
        up = MaskedUp(torch.where(mask, theta - down.w, 0.0), bits, example_counts(self.weights, data))
        return Client(theta, bits, left, torch.ones_like(client.seen)), up

    def _does_well(self, task: Task, x: Tensor, data: Cohort) -> Tensor:
        """bool [n]; a client without validation examples cannot tell."""
        if self.accuracy == 1:
            return torch.zeros(len(data), dtype=torch.bool)
        score = task.score(x, data.val)
        return score.correct > self.accuracy * score.count

    def aggregate(self, server: Server, ids: Tensor, up: MaskedUp, round: RoundInfo) -> Server:
        bits = server.bits.clone()
        bits[ids] = up.bits.to(bits.device)
        return replace(server, w=server.w + mean_where_held(up), bits=bits)

    def personalize(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> dict[str, Tensor]:
        mask = unpacked(client.bits, task.num_params).to(down.w.device)
        masked = torch.where(mask, down.w, 0.0)
        return {"personal": own_or_server(client.seen, client.theta, masked), "masked": masked}

    def client_figures(self, client: Client) -> dict[str, Tensor]:
        return {"left": client.left}

    def privacy(self, count: Tensor) -> PrivacyProfile:
        leak = {"whether the common model does well on each client's validation examples": "accuracy = 1"}
        uncovered = {} if self.accuracy == 1 else leak
        return gradient_steps(self.training.num_steps(count), weights=self.weights, uncovered=uncovered)


def pruned(slots: tuple[ParameterSlot, ...], x: Tensor, mask: Tensor, share: float) -> Tensor:
    """bool [n, P]: the mask without the share of smallest |x| of every matrix and kernel, of what it has left."""
    mask = mask.clone()
    for slot in slots:
        if not slot.trainable or len(slot.shape) < 2:
            continue
        columns = slice(slot.start, slot.stop)
        left = mask[:, columns]
        size = torch.where(left, x[:, columns].abs(), torch.inf)
        order = torch.sort(size, dim=1, stable=True).indices
        number = torch.floor(share * left.sum(1, dtype=torch.float64) + 1e-9).to(torch.int64)
        goes = torch.arange(left.shape[1], device=left.device) < number[:, None]
        mask[:, columns] = left & ~torch.zeros_like(left).scatter(1, order, goes)
    return mask
