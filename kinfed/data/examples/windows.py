"""Examples of the batch of each client and step: windows of a random order of the client's examples."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng

DRAW_BITS = 39  # of a draw decide the place of an example in an order
MOST_EXAMPLES = 1 << (63 - DRAW_BITS)  # whose places, and segments whose numbers, fit into a word beside a draw


class Windows:
    """Batches of n clients as row indices; client i owns rows[start[i] : start[i] + count[i]].

    `steps` [n] is how many batches of at most `batch` examples each client needs, `key` [n] decides the order of its
    examples; `by_epoch`: a batch never reaches into the next epoch; `weights` are of every entry of `rows`."""

    def __init__(
        self, rows: Tensor, start: Tensor, count: Tensor, steps: Tensor, key: Tensor, batch: int, by_epoch: bool,
        weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.start, self.count, self.weights = rows, start.numpy(), count.numpy(), weights
        self.batch, self.by_epoch = batch, by_epoch
        self.size = torch.from_numpy(np.minimum(self.batch, self.count))  # [n] examples of a batch, the largest ones
        self.per_epoch = -(-self.count // self.batch)
        if self.by_epoch:
            self.epochs = -(-steps.numpy() // np.maximum(self.per_epoch, 1))  # [n] that a client begins
        else:
            self.epochs = -(-(steps.numpy() * self.size.numpy()) // np.maximum(self.count, 1))
        self.key = key.numpy().view(np.uint64)

    @cached_property
    def order(self) -> np.ndarray:
        """Random orders of every (client, epoch), client after client."""
        return _epoch_orders(self.key, self.count, self.epochs)

    @cached_property
    def offset(self) -> np.ndarray:
        """[n] where each client begins in `order`."""
        total = self.count * self.epochs
        return np.asarray(total.cumsum() - total)

    def examples(self, active: Tensor | slice, step: int, together: int, width: int) -> tuple[Tensor, Tensor]:
        """(row index [S, n, B], weight [S, n, B]) of the batches of `together` steps from `step`."""
        pick = active if isinstance(active, slice) else active.numpy()
        count = self.count[pick][None, :, None]
        number = step + np.arange(together)[:, None, None]
        column = np.arange(width)[None, None, :]
        if self.by_epoch:
            per_epoch = self.per_epoch[pick][None, :, None]
            inside = (number % per_epoch) * self.batch
            size = np.minimum(self.batch, count - inside)
            position = (number // per_epoch) * count + inside
        else:
            size = np.broadcast_to(self.size.numpy()[pick][None, :, None], (together, count.shape[1], 1))
            position = number * size
        valid = column < size
        position = position + np.where(valid, column, 0)
        local = self.order[self.offset[pick][None, :, None] + position]
        place = torch.from_numpy(self.start[pick][None, :, None] + local)
        weight = torch.from_numpy(np.where(valid, np.float32(1) / size.astype(np.float32), np.float32(0)))
        return self.rows[place], weight if self.weights is None else weight * self.weights[place]


def _epoch_orders(key: np.ndarray, count: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """One sort for the whole cohort: the segment number stands in the high bits, the random draw below it. The number
    of random bits is fixed and equal draws keep their places, so an order does not depend on who else is sorted."""
    if int(epochs.sum()) > MOST_EXAMPLES:
        half = [slice(None, len(count) // 2), slice(len(count) // 2, None)]
        return np.concatenate([_epoch_orders(key[part], count[part], epochs[part]) for part in half])
    client = np.arange(len(count)).repeat(epochs)
    epoch = np.arange(len(client)) - (epochs.cumsum() - epochs).repeat(epochs)
    keys = rng.fold_words(key[client], epoch.view(np.uint64))
    lengths = count[client]
    segment = np.arange(len(client)).repeat(lengths)
    place = np.arange(len(segment)) - (lengths.cumsum() - lengths).repeat(lengths)
    draw = rng.words_at(keys[segment], place.view(np.uint64))
    packed = (segment << DRAW_BITS) | (draw >> np.uint64(64 - DRAW_BITS)).view(np.int64)
    sorting = packed.argsort()
    ranked = packed[sorting]
    if (ranked[1:] == ranked[:-1]).any():
        sorting = packed.argsort(kind="stable")
    return np.asarray(place[sorting])
