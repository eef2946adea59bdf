"""The data of some clients in one round, and what a server may know of all of them."""

from dataclasses import dataclass, replace

from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.batches import Split
from kinfed.data.examples.optimizer_state import LoopMemory, MemoryView


@dataclass
class Cohort:
    """The data of some clients in one round: what the client side of an algorithm sees."""

    ids: Tensor  # [n]
    train: Split
    val: Split
    test: Split
    seed: int
    round: int
    groups: Tensor | None = None  # [n] device type, latent distribution, ...: known to the client
    public: Split | None = None  # examples that everyone knows, the same for all clients

    def __len__(self) -> int:
        return len(self.ids)


def with_memory(cohort: Cohort, memory: LoopMemory | None) -> Cohort:
    """The cohort in a round of training, whose optimizers go on from `memory` and leave there what they end with."""
    return cohort if memory is None else replace(cohort, train=replace(cohort.train, memory=MemoryView(memory)))


@dataclass(frozen=True)
class Population:
    """Facts that a server may know before training: how many clients there are, and how many take part in a round."""

    num_clients: int
    seed: int
    participation: float = 1.0
    groups: Tensor | None = None  # [K] public group labels, such as device types
    num_groups: int = 0
    pool: Split | None = None  # examples that the server holds: public ones, or what a method had clients share
    exchanged: tuple[int, int] = (0, 0)  # bytes down and up before the first round
    weighs_examples: bool = False  # whether some examples count more than others in training

    def key(self, purpose: str) -> Tensor:
        return rng.root(self.seed, purpose)
