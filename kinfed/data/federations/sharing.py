"""Examples that clients give away before training: a pool at the server, and a part of it for everyone.

The pool holds copies. They lie behind the data set's own examples, so that nothing is stored twice but what is shared,
and what happens to a donor's data later does not reach the copies.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.batches import Split
from kinfed.data.examples.features import Features
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation, Population
from kinfed.errors import ConfigError


@dataclass
class SharedFeatures(Features):
    """Features with copies of some examples behind them: index len(raw) + i is copy i."""

    copies: Tensor = field(default_factory=lambda: torch.empty(0))

    def __len__(self) -> int:
        return len(self.raw) + len(self.copies)

    def on(self, device: torch.device, *, resident: bool = False) -> Self:
        copies = self.copies.to(device) if resident else self.copies
        return replace(self, raw=self.raw.to(device) if resident else self.raw, copies=copies, device=device)

    def rows(self, index: Tensor) -> Tensor:
        own, index = len(self.raw), self.places(index)
        examples = self.raw.index_select(0, index.clamp_max(own - 1))
        copied = (index >= own).nonzero().squeeze(1)
        if self.raw.device.type != "cpu":
            return examples.index_copy_(0, copied, self.copies.index_select(0, index[copied] - own))
        # By numpy, which copies whole rows: torch would take twice as long for these as for all the others.
        examples.numpy()[copied.numpy()] = self.copies.numpy()[(index[copied] - own).numpy()]
        return examples


def share_examples(
    federation: Federation, clients: Population, size: int, fraction: float, key: Tensor
) -> tuple[Federation, Population]:
    """The clients' training examples with a shared pool, and what the server knows about it.

    `size` different training examples are drawn for the pool; every client trains on its own and on a random
    `fraction` of the pool, less what it owns itself. Counted in bytes: every drawn example once up, and every example
    that a client receives once down, as raw features and a label."""
    rows = torch.unique(federation.train.rows)
    if not 1 <= size <= len(rows):
        raise ConfigError(f"a pool holds between 1 and all {len(rows)} training examples; got {size}")
    if not 0 < fraction <= 1:
        raise ConfigError(f"clients receive a fraction of the pool in (0, 1]; got {fraction}")
    donated = rows[rng.choose(rng.fold(key, 0), len(rows), size)]
    num_received = max(round(fraction * size), 1)
    first = len(federation.labels)
    lists = []
    for client, own in enumerate(federation.train.lists()):
        choice = rng.choose(rng.fold(key, 1, client), size, num_received)
        lists.append(first + choice[~torch.isin(donated[choice], own)])
    received = Ragged.of(lists)
    old = federation.features
    inputs = old.raw, old.mean, old.std, old.device, old.vectors, old.packing
    features = SharedFeatures(*inputs, copies=old.rows(donated))
    columns = {name: getattr(federation, name) for name in ("labels", "tags", "weights")}
    longer: dict[str, Any] = {name: torch.cat([x, x[donated]]) for name, x in columns.items() if x is not None}
    shared = replace(federation, features=features, train=federation.train.joined(received), **longer)
    labels = shared.labels
    pool = Split(
        features, labels, torch.tensor([0]), torch.tensor([0]), torch.tensor([size]), first + torch.arange(size),
        clients.seed, 0,
    )  # fmt: skip
    example_bytes = old.raw[0].numel() * old.raw.element_size() + labels.element_size()
    down, up = clients.exchanged
    exchanged = (down + example_bytes * len(received.rows), up + example_bytes * size)
    return shared, replace(clients, pool=pool, exchanged=exchanged)
