"""Secure aggregation: the server learns the weighted sum of a round's updates, and of no single one anything else.

What travels is masked so that all masks cancel in the sum (kinfed.deploy.secure.masks). They cancel exactly, because
updates are whole numbers of a step h, added up modulo 2^64:

    Σ_m N_m Δ_m  ≈  h Σ_m N_m [Δ_m / h],      h = 2^−f,  f the largest for which the sum of all clients cannot wrap

N_m are whole numbers (of examples, or 1), and their sum travels in the same vector. The mean is off by h/2 at most in
every coordinate; with the declared range of 1000 and 10^5 examples h is 2.9e-11, far below what float32 tells apart.

A simulation adds up the same whole numbers and leaves out the masks, which would cancel: the sums are those of the
protocol bit for bit, and so are its bytes (`ProtocolSize`), which a test compares with real messages. What would need
single updates is refused: methods that do more than average, robust rules, a largest norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kinfed.algorithms import COUNT, RoundInfo, averaged_rows, mean_from_row
from kinfed.core import Tree
from kinfed.errors import ConfigError
from kinfed.updates.promises import NO_SINGLE_UPDATES, SecureSettings
from kinfed.updates.stages import Stage, Updates, by_columns

FINEST = 40  # f at most: finer than float32 has any use for
COARSEST = 12  # f at least: h = 2.4e-4
RING_BITS = 64
KEYS_BYTES = 192  # two public keys, a commitment, a signature
SEALED_BYTES = 92  # an encrypted pair of shares: nonce, two shares, tag
SHARE_BYTES = 32
SIGNATURE_BYTES = 96


@dataclass(frozen=True)
class FixedPoint:
    """Numbers in [−largest, largest] as whole numbers of a step; a sum with weights of `total` fits into 63 bits."""

    largest: float
    total: int  # of all weights

    def __post_init__(self) -> None:
        if self.bits < COARSEST:
            raise ConfigError(
                f"sums of {self.total} examples with numbers up to {self.largest:g} do not fit into {RING_BITS} bits "
                "with a useful step; lower secure_range"
            )

    @property
    def bits(self) -> int:
        """f"""
        room = RING_BITS - 2 - math.ceil(math.log2(self.largest * max(self.total, 1)))
        return min(FINEST, room, 52 - math.ceil(math.log2(self.largest)))  # and so that float64 holds it exactly

    @property
    def step(self) -> float:
        """h"""
        return 2.0**-self.bits

    def encode(self, rows: Tensor, weights: Tensor) -> Tensor:
        """int64 [n, W + 1]: weights [n] (whole numbers) times rows [n, W], and the weights themselves."""
        whole = weights.to("cpu", torch.int64)
        values = (rows.detach().to("cpu", torch.float64) * 2.0**self.bits).round().to(torch.int64)
        return torch.cat([values * whole[:, None], whole[:, None]], 1)

    def decode(self, total: Tensor) -> tuple[Tensor, int]:
        """The mean, float64 [W], and the sum of weights, from a sum [W + 1] of encoded rows."""
        weight = int(total[-1])
        return total[:-1].to(torch.float64) * (self.step / max(weight, 1)), weight

    def holds(self, total: Tensor) -> bool:
        """Whether this can be the sum of rows within the declared range."""
        weight = int(total[-1])
        most = weight * math.ceil(self.largest * 2.0**self.bits)
        return 0 < weight <= self.total and int(total[:-1].abs().max() if len(total) > 1 else 0) <= most


@dataclass(frozen=True)
class ProtocolSize:
    """Bytes of a round in which all of n clients answer every request (kinfed.deploy.secure.secure_round), beside the
    model that training starts from. Numbers of clients are public and not counted."""

    clients: int  # n
    width: int  # W: numbers in an update

    @property
    def up(self) -> int:
        each = KEYS_BYTES + self.clients * (SEALED_BYTES + SHARE_BYTES) + 8 * (self.width + 1) + SIGNATURE_BYTES
        return self.clients * each

    @property
    def down(self) -> int:
        # All keys; the shares for this client; three times who is still there; signatures of all.
        each = self.clients * (KEYS_BYTES + SEALED_BYTES + 3 + SIGNATURE_BYTES)
        return self.clients * each


class SecureSum(Stage):
    """The sums of a simulation's rounds, and what a client adds to one."""

    name = "secure_sum"
    refuses = True
    excludes: ClassVar[Mapping[str, str]] = {
        "robust": NO_SINGLE_UPDATES.format("robust"),
        "screening": NO_SINGLE_UPDATES.format("largest_norm"),
    }

    def __init__(
        self, settings: SecureSettings, averages: tuple[str, ...], total: int, *, adds_up: bool = True
    ) -> None:
        """`total`: examples (or clients, where all weigh the same) that a round can have at most; `adds_up`: not where
        a later stage takes the sum, of updates that clients have shortened (user-level privacy)."""
        self.least, self.averages, self.total, self.adds_up = settings.least, averages, total, adds_up
        self.fixed_point = FixedPoint(settings.largest, total)

    def out_of_range(self, up: Tree) -> dict[int, str]:
        """Reasons, by row, why a client does not send its update."""
        if not self.averages:
            return {}
        largest = self.fixed_point.largest
        most = torch.stack([getattr(up, name).flatten(1).abs().amax(1).cpu() for name in self.averages]).amax(0)
        return {
            row: f"its update holds {float(most[row]):.3g}, and secure_range is {largest:g}"
            for row in (most > largest).nonzero().squeeze(1).tolist()
        }

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        """Leave the mean of all updates, as the server decodes it from their sum."""
        if not self.averages:
            return updates
        updates = updates.without(self.out_of_range(updates.rows))
        if (clients := len(updates.ids)) < self.least:
            note = f"{clients} update(s) are too few to be added up, which takes {self.least}; not used"
            return replace(updates.unused(note), nbytes=0)
        size = self.size(updates.rows, clients)
        mean = self.mean(updates.rows) if self.adds_up else None
        weight = float(example_weights(updates.rows, clients).sum())
        return replace(updates, mean=mean, weight=weight, nbytes=size.up, nbytes_down=size.down)

    def mean(self, up: Tree) -> Tree:
        rows = averaged_rows(up, self.averages)
        weights = example_weights(up, len(rows))
        code = self.fixed_point
        mean = by_columns(lambda block: code.decode(code.encode(block, weights).sum(0))[0], rows)
        return mean_from_row(up, self.averages, mean.to(rows.device, rows.dtype))

    def encode(self, up: Tree) -> Tensor:
        """int64 [W + 1]: what one client's update [1, ...] adds to the sum."""
        rows = averaged_rows(up, self.averages)
        return self.fixed_point.encode(rows, example_weights(up, len(rows)))[0]

    def size(self, up: Tree, clients: int) -> ProtocolSize:
        width = sum(getattr(up, name)[0].numel() for name in self.averages)
        return ProtocolSize(clients, width)


def example_weights(up: Tree, rows: int) -> Tensor:
    """int64 [n]: what clients weigh: their numbers of examples where updates have them, else all the same."""
    count = getattr(up, COUNT, None)
    return torch.ones(rows, dtype=torch.int64) if count is None else count.round().to("cpu", torch.int64)
