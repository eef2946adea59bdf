"""HeteroFL: clients train the leading units of every hidden layer, as many as they can afford, of one common network.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021.

    client m:  θ_m from w by local training of the first ⌈r_m · width⌉ units of each hidden layer; inputs and classes
               are complete
    server:    every parameter ← its mean over the clients of the round that have it; unchanged where none has

r = 1 for all is FedAvg (with equal weights, as the paper averages), bit for bit. A client of rate r has about r² of the
parameters, and that is what travels; the personal model is its narrow network, in a row of full width with zeros.

Which columns belong to a width follows from the shapes of a chain of linear and convolutional layers, each of which
reads all channels of the one before (flattened channel by channel where a linear layer follows a convolution), with
batch normalization between them. Others (residual, recurrent, attention, grouped convolutions, other normalizations)
are refused by name. Units outside of a client's width have no weights in or out: gradients of those inside are those
of the small network.

Decisions. Rates are dealt out once, in equal parts and at random (the paper's fixed setting), or go by the clients'
groups (device types). The paper's scaler, which
divides hidden activations by r in training only, is left out: a client's own model would be another one in use than in
training. So is its loss without the classes that a client lacks: it tells the server which ones they are. Running
statistics (of BatchNorm) are averaged over the clients that have the channel; the paper collects them anew after
training. Rows are equally wide here, so that a step is the work of the whole network: simulation saves bytes, not time.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from kinfed.algorithms.common.masked_rows import (
    Levels,
    MaskedDown,
    MaskedUp,
    check_levels,
    dealt_levels,
    mean_where_held,
    train_masked,
)
from kinfed.algorithms.common.one_model import Client, DeploysLastModel
from kinfed.author import Cohort, ConfigError, Population, RoundInfo, Weights, example_counts, own_or_server, take_rows
from kinfed.core import Tree, option, packed, unpacked
from kinfed.engine import ParameterSlot, Task

CHAINED = ("Linear", "Conv1d", "Conv2d", "Conv3d")
NORMALIZATION = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    level: Tensor  # [N] int64: which of the rates a client has
    bits: Tensor  # [L, ⌈P/8⌉] uint8: the columns of each rate


@dataclass(frozen=True)
class HeteroFL(DeploysLastModel[Server, MaskedDown, MaskedUp]):
    rates: str = option("1,0.5,0.25", "r: shares of hidden units, dealt out to clients in equal parts; 1 is FedAvg")
    by: Levels = option("chance", "rates are dealt out, or those of the clients' groups in order")
    weights: Weights = option("equal", "weights of the average: equal (paper), or by N_m")

    traits = frozenset({"no momentum", "draws by client"})
    single_updates = "averages every parameter over those clients that have it"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shares()

    def shares(self) -> tuple[float, ...]:
        try:
            shares = tuple(float(part) for part in self.rates.split(",") if part.strip())
        except ValueError:
            shares = ()
        if not shares or not all(0 < share <= 1 for share in shares):
            raise ConfigError(
                f"HeteroFL's rates are shares of hidden units in (0, 1], separated by commas; got {self.rates!r}"
            )
        return shares

    def check(self, task: Task, population: Population) -> None:
        width_mask(task.slots, 1.0)
        check_levels("HeteroFL's rates", self.rates, len(self.shares()), self.by, population)

    def init_server(self, task: Task, population: Population) -> Server:
        shares = self.shares()
        bits = packed(torch.stack([width_mask(task.slots, share) for share in shares]))
        level = dealt_levels(len(shares), self.by, population, "heterofl")
        return Server(task.init(population.seed), level, bits)

    def download(self, server: Server, ids: Tensor) -> MaskedDown:
        return MaskedDown.of(server.w, take_rows(server.bits, server.level[ids]))

    def client_update(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> tuple[Client, MaskedUp]:
        mask = unpacked(down.bits, task.num_params).to(down.w.device)
        theta = train_masked(task, _complete(task, down.w, mask, data.seed), data.train.batches(self.training), mask)
        theta = _complete(task, theta, mask, data.seed)
        delta = torch.where(mask, theta - down.w, 0.0)
        up = MaskedUp(delta, down.bits, example_counts(self.weights, data))
        return Client(theta, torch.ones_like(client.seen)), up

    def aggregate(self, server: Server, ids: Tensor, up: MaskedUp, round: RoundInfo) -> Server:
        return Server(server.w + mean_where_held(up), server.level, server.bits)

    def personalize(self, task: Task, client: Client, down: MaskedDown, data: Cohort) -> Tensor:
        mask = unpacked(down.bits, task.num_params).to(down.w.device)
        return own_or_server(client.seen, client.theta, _complete(task, down.w, mask, data.seed))


def _complete(task: Task, theta: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Rows [n, P] with the running statistics of the start in channels that a client does not have: they count for
    nothing, and a variance is positive."""
    behind = slice(task.trainable.stop, None)
    if behind.start == theta.shape[1]:
        return theta
    whole = theta.clone()
    whole[:, behind] = torch.where(mask[:, behind], theta[:, behind], task.init(seed)[behind])
    return whole


def width_mask(slots: tuple[ParameterSlot, ...], rate: float) -> Tensor:
    """bool [P]: columns of a chain of layers with the first ⌈rate · width⌉ units of every hidden one."""
    mask = torch.zeros(slots[-1].stop, dtype=torch.bool)
    matrices = [slot for slot in slots if len(slot.shape) > 1]
    if len(matrices) < 2:
        raise ConfigError("HeteroFL narrows hidden layers, and this model has none; choose a deeper model")
    units: Tensor | None = None  # which outputs of the layer before a client has; None: the model's inputs
    by_layer: dict[str, Tensor] = {}
    for slot in slots:
        if slot.kind in CHAINED and len(slot.shape) > 1:
            inputs = _inputs(slot, units)
            width = slot.shape[0]
            narrow = ceil(rate * width - 1e-9)  # 0.28 * 25 is 7.000000000000001
            units = torch.arange(width) < (width if slot is matrices[-1] else narrow)
            by_layer[slot.layer] = units
            shape = (1, -1) + (1,) * (len(slot.shape) - 2)
            block = (units.view(-1, *(1,) * (len(slot.shape) - 1)) & inputs.view(shape)).expand(slot.shape)
        elif slot.kind in CHAINED and slot.shape == by_layer[slot.layer].shape:
            block = by_layer[slot.layer]
        elif slot.kind in NORMALIZATION and (units is not None or slot.layer in by_layer):
            block = by_layer.setdefault(slot.layer, units if units is not None else mask[:0])
            if slot.shape != block.shape:
                raise _unclear(slot)
        else:
            raise _unclear(slot)
        mask[slot.start : slot.stop] = block.reshape(-1)
    return mask


def _inputs(slot: ParameterSlot, units: Tensor | None) -> Tensor:
    """bool [in]: inputs of a layer that come from units of the layer before; several in a row from one channel."""
    width = slot.shape[1]
    if units is None:
        return torch.ones(width, dtype=torch.bool)
    if width % len(units):
        raise _unclear(slot)
    return units.repeat_interleave(width // len(units))


def _unclear(slot: ParameterSlot) -> ConfigError:
    return ConfigError(
        f"HeteroFL derives widths from chains of linear and convolutional layers with batch normalization, and cannot "
        f"for {slot.name} ({slot.kind or 'of unknown kind'}, {list(slot.shape)}); choose such a model, or leave the "
        "method out"
    )
