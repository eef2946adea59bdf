"""Messages that hold some columns of a model, other ones for every client: what HeteroFL, LotteryFL, FLoRA and HetLoRA
have in common.

Rows have the full width, with zeros in columns that a client does not have. Only the others travel, and the mask in
bits: that is what is counted. A column is averaged over the clients that have it, and stays where none has.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from kinfed.author import Batches, ConfigError, Population, Task, Tree, each_step, mean_update, rng, sgd, toward_zero
from kinfed.core import masked_by, unpacked

Levels = Literal["chance", "group"]  # who has which of several sizes


def check_levels(what: str, text: str, count: int, by: Levels, population: Population) -> None:
    """Refuse sizes by group that are not one for each; `what` they are, as `text`."""
    if by == "group" and population.num_groups != count:
        raise ConfigError(f"{what} by group are one for each; got {text!r} with {population.num_groups} groups")


def dealt_levels(count: int, by: Levels, population: Population, purpose: str) -> Tensor:
    """[N] int64: which of `count` sizes a client has: that of its group, or dealt out in equal parts."""
    if by == "group":
        assert population.groups is not None  # as `check_levels` says
        return population.groups.clone()
    return rng.permutation(population.key(purpose), population.num_clients) % count


@dataclass
class MaskedDown(Tree):
    w: Tensor = field(metadata=masked_by("bits"))  # [n, P]
    bits: Tensor  # [n, ⌈P/8⌉] uint8

    @classmethod
    def of(cls, w: Tensor, bits: Tensor) -> Self:
        """The columns of one model w [P] that every client has."""
        return cls(torch.where(unpacked(bits, len(w)).to(w.device), w, 0.0), bits)


@dataclass
class MaskedUp(Tree):
    delta: Tensor = field(metadata=masked_by("bits"))  # [n, P]
    bits: Tensor  # [n, ⌈P/8⌉] uint8
    count: Tensor | None  # [n] examples; absent with equal weights


def train_masked(task: Task, theta: Tensor, batches: Batches, mask: Tensor) -> Tensor:
    """theta [n, P] after plain SGD on the trainable columns of each row's mask [n, P]; the others are zero before and
    after. Running statistics move freely."""
    trainable = task.trainable
    if bool(mask[:, trainable].all()):
        return sgd(task, theta, batches)
    x, share = theta.clone(memory_format=torch.contiguous_format), mask[:, trainable].to(theta.dtype)
    for batch, (now, own) in each_step(batches, x, share):
        task.descend_(now, batch, batches.lr, toward_zero(now, batches.training.weight_decay))
        now[:, trainable] *= own
    return x


def mean_where_held(up: MaskedUp) -> Tensor:
    """[P] Σ p_m delta_m over the clients that have a column, p_m adding up to 1 among them; 0 where none has."""
    mask = unpacked(up.bits, up.delta.shape[1])
    step = mean_update(up.delta, up.count)
    columns = (~mask.all(0)).nonzero().squeeze(1)
    if len(columns):
        weight = torch.ones(len(mask)) if up.count is None else up.count
        weight = weight.to(mask.device, torch.float64)[:, None]
        held = mask[:, columns]
        total = torch.where(held, weight * up.delta[:, columns].to(torch.float64), 0.0).sum(0)
        size = (weight * held).sum(0)
        step[columns] = torch.where(size > 0, total / size.clamp_min(torch.finfo(torch.float64).tiny), 0.0).to(step)
    return step
