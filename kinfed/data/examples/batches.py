"""Mini-batches as a pure function of (seed, round, client).

Every client reads its examples as an endless stream: epoch after epoch, each a fresh random order keyed by
(seed, round, client, epoch). A batch is a window of that stream, so all methods of a seed see the same batches,
in any chunk, on any pool, after any resume.

  * `steps=L`: L batches of exactly min(batch, n) examples; a batch may reach into the next epoch.
  * `epochs=E`: every example exactly E times; the last batch of an epoch may be smaller.

The stream starts anew each round. A cursor that carries on over rounds would make a method's batches depend on
how many steps it took before, and two methods could no longer be compared on equal batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from kinfed.core import as_slice, rng
from kinfed.data.examples.augment import augmentation, draws
from kinfed.data.examples.features import Features
from kinfed.data.examples.local_training import LocalTraining
from kinfed.data.examples.optimizer_state import MemoryView
from kinfed.data.examples.windows import Windows

PLAN_EXAMPLES = 1 << 15  # examples of one plan of batches: planning one step costs as much as planning dozens
FEW = 32  # examples per client in the first batch of `Split.in_order`
GATHER_BYTES = 1 << 20  # examples fetched together: few enough to stay in cache until they are used


@dataclass
class PoissonSample:
    """Poisson samples that the rows of a batch are: rows with equal keys hold the same sample."""

    key: Tensor  # [n] int64
    q: Tensor  # [n] float64, the chance of every example to be in the sample
    expected: Tensor  # [n] float32, the expected size, by which sums are divided

    def rows(self, index: Tensor | slice) -> PoissonSample:
        return PoissonSample(self.key[index], self.q[index], self.expected[index])


@dataclass
class Batch:
    """One batch for each of n clients. Rows of clients with fewer examples are padded with weight 0."""

    x: Tensor  # [n, B, ...]
    y: Tensor  # [n, B] int64
    weight: Tensor  # [n, B] float32; the loss of a row is sum(weight * loss). 1/B each where all examples count alike
    ids: Tensor  # [n] clients
    round: int = 0
    step: int = 0
    sample: PoissonSample | None = None  # set where batches are Poisson samples
    seed: int = 0  # with `stream`: of the draws that models make in training
    stream: str = ""
    may_pad: bool = True  # False: no row holds padding, and it need not be looked for
    steps_ahead: int = 0  # that the same clients are sure to take after this one, as far as they are planned

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def rows(self, index: Tensor | slice) -> Batch:
        return replace(
            self, x=self.x[index], y=self.y[index], weight=self.weight[index], ids=self.ids[index],
            sample=None if self.sample is None else self.sample.rows(index),
        )  # fmt: skip


@dataclass
class Split:
    """One split (train, val or test) of some clients."""

    features: Features
    labels: Tensor  # [N] all labels of the data set, where the raw features lie
    ids: Tensor  # [n] clients
    start: Tensor  # [n] where each client's list begins in `rows`
    count: Tensor  # [n] examples of each client
    rows: Tensor  # all index lists of the split, one after the other
    seed: int
    round: int
    effort: Tensor | None = None  # [n] share of the local work that stragglers finish, 1 for the others
    longest: int = 0  # most examples of any client of the federation, in this cohort or not (width of states)
    memory: MemoryView | None = None  # of local loops, where optimizers go on from the round before
    weights: Tensor | None = None  # float32, how much every entry of `rows` counts; None: all alike

    def take(self, index: Tensor | slice) -> Split:
        index = index.cpu() if isinstance(index, Tensor) else index  # lists of examples are the host's
        effort = None if self.effort is None else self.effort[index]
        memory = None if self.memory is None else self.memory.take(index)
        ids, start, count = self.ids[index], self.start[index], self.count[index]
        return replace(self, ids=ids, start=start, count=count, effort=effort, memory=memory)

    def places(self) -> tuple[Tensor, Tensor]:
        """Places of all clients' examples in `rows`, client after client, and the owner [0 .. n) of each."""
        owner = torch.repeat_interleave(torch.arange(len(self.count)), self.count)
        first = torch.cumsum(self.count, 0) - self.count
        return self.start[owner] + torch.arange(len(owner)) - first[owner], owner

    def targets(self, index: Tensor) -> Tensor:
        """Labels at `index` (any shape), on the device."""
        return self.features.to_device(self.labels[self.features.places(index)])

    def on(self, device: torch.device) -> Split:
        """These examples, and no others, on a device."""
        if self.features.raw.device == device:
            return self
        rows, places = torch.unique(self.rows, return_inverse=True)
        old, labels = self.features, self.labels[self.features.places(rows)].to(device)
        features = Features(old.rows(rows).to(device), old.mean, old.std, device, old.vectors, old.packing)
        return replace(self, features=features, labels=labels, rows=places)

    def scaled(self, factor: Tensor) -> Split:
        """The same examples with every client's losses times its factor [n]."""
        weights = torch.ones(len(self.rows)) if self.weights is None else self.weights.clone()
        place, owner = self.places()
        weights[place] *= factor.to(weights)[owner]
        return replace(self, weights=weights)

    def joined(self, other: Split) -> Split:
        """The examples of two splits of the same clients, for local steps: those of `other` come last."""
        (own, owner), (others, their_owner) = self.places(), other.places()
        order = torch.argsort(torch.cat([owner, their_owner]), stable=True)
        place = torch.cat([own, others + len(self.rows)])[order]
        weights = None
        if self.weights is not None and other.weights is not None:
            weights = torch.cat([self.weights, other.weights])[place]
        count = self.count + other.count
        return replace(
            self, start=torch.cumsum(count, 0) - count, count=count, rows=torch.cat([self.rows, other.rows])[place],
            longest=self.longest + other.longest, weights=weights,
        )  # fmt: skip

    def batches(
        self, training: LocalTraining, steps: Tensor | None = None, stream: str = "batches", loop: int = 0
    ) -> Batches:
        """The batches of this round; `steps` [n] overrides the number of steps per client.

        `stream` names an independent sequence of batches, for methods that need several per step. `loop` numbers the
        local loop, for methods that run several in a round: each has moments of its own where clients keep them."""
        count = training.num_steps(self.count) if steps is None else steps
        if self.effort is not None:
            share = torch.ceil(self.effort.to(torch.float64) * count - 1e-6)  # 0.07 * 100 is 7.000000000000001
            count = torch.minimum(count, share.clamp_min(1).to(torch.int64))
        return Batches(self, training, count, stream, loop)

    def in_order(self, width: int = 256) -> Iterator[tuple[Tensor | slice, Batch]]:
        """All examples in order, at most `width` at a time; weights are 0 for padding and positive for examples: how
        much each counts, 1 where all count alike.

        Batches of several clients begin with FEW examples per client and double up to `width`, so that clients with
        little data are not padded to the length of the largest. The sizes do not depend on which clients are in the
        cohort; only a single client, which needs no padding, is read `width` examples at a time from the start."""
        longest = int(self.count.max()) if len(self.count) else 0
        begin, most = 0, width if len(self.count) == 1 else min(FEW, width)
        while begin < longest:
            rows: Tensor | slice = slice(None)
            active = self.count > begin
            split = self
            if not bool(active.all()):
                rows = as_slice(active.nonzero().squeeze(1))  # a view of models where the largest clients come first
                split = self.take(rows)
            size = (split.count - begin).clamp_max(most)
            column = torch.arange(int(size.max()))
            valid = column < size[:, None]
            position = split.start[:, None] + begin + torch.where(valid, column, 0)
            index, weight = self.rows[position], valid.to(torch.float32)
            if self.weights is not None:
                weight *= self.weights[position]
            index, weight = self.features.places(index), self.features.to_device(weight)
            yield rows, Batch(self.features.gather(index), self.targets(index), weight, split.ids, self.round)
            begin, most = begin + most, min(2 * most, width)


@dataclass
class Batches:
    """Iterate to get (rows, batch): `rows` says which clients still train and indexes the cohort's rows.

    Clients with unequal step counts leave as they finish, so no step is computed and thrown away. Where step counts
    never rise from one client to the next, `rows` is always a slice, and theta[rows] a view."""

    split: Split
    training: LocalTraining
    steps: Tensor  # [n] int64; a client without examples takes none
    stream: str = "batches"
    loop: int = 0  # whose moments an optimizer goes on from
    lr: float = field(init=False)

    def __post_init__(self) -> None:
        self.lr = self.training.rate(self.split.round)
        self.steps = torch.where(self.split.count > 0, self.steps.to(torch.int64), 0)

    def __len__(self) -> int:
        return int(self.steps.max()) if len(self.steps) else 0

    def take(self, index: Tensor | slice) -> Batches:
        return Batches(self.split.take(index), self.training, self.steps[index], self.stream, self.loop)

    def __iter__(self) -> Iterator[tuple[Tensor | slice, Batch]]:
        return self._poisson() if self.training.poisson else self._windows(reusing_memory=False)

    def reusing_memory(self) -> Iterator[tuple[Tensor | slice, Batch]]:
        """Iterate as usual, for loops that keep no batch: the next batch may overwrite it, in memory that is still in
        the cache."""
        return self._poisson() if self.training.poisson else self._windows(reusing_memory=True)

    def windows(self) -> Windows:
        """Examples that form the batches of every client, for loops that fetch them on their own."""
        split = self.split
        key = rng.fold(_round_key(split.seed, self.stream, split.round), split.ids)
        by_epoch, batch = self.training.epochs is not None, self.training.batch
        return Windows(split.rows, split.start, split.count, self.steps, key, batch, by_epoch, split.weights)

    def _windows(self, reusing_memory: bool) -> Iterator[tuple[Tensor | slice, Batch]]:
        split, steps, window = self.split, self.steps, self.windows()
        step, total = 0, len(self)
        while step < total:
            active = self._active(step)
            ids = split.ids[active]
            width = int(window.size[active].max())
            # Plan until the set of active clients changes, or as many steps as a plan may hold.
            planned = min(int(steps[active].min()) - step, max(1, PLAN_EXAMPLES // (len(ids) * width)))
            index, weight = window.examples(active, step, planned, width)
            may_pad = not bool(weight.all())
            index = split.features.places(index)
            y, w = split.targets(index).unbind(0), split.features.to_device(weight).unbind(0)
            together = max(1, GATHER_BYTES // (len(ids) * width * max(split.features.example_bytes, 1)))
            shape = (min(together, planned), len(ids), width, *split.features.shape)
            memory = torch.empty(shape, device=split.features.device) if reusing_memory else None
            s = 0
            for piece in torch.split(index, together):
                into = None if memory is None else memory if len(piece) == len(memory) else memory[: len(piece)]
                for x in self._gather(piece, ids, step + s, into).unbind(0):
                    number, ahead = (split.round, step + s), planned - s - 1
                    yield active, Batch(x, y[s], w[s], ids, *number, None, split.seed, self.stream, may_pad, ahead)
                    s += 1
            step += planned

    def _gather(self, index: Tensor, ids: Tensor, step: int, into: Tensor | None = None) -> Tensor:
        """Examples at index [S, n, B] of these clients, for S steps from `step`; augmented if `training` says so."""
        split, name = self.split, self.training.augment
        if name is None:
            return split.features.gather(index, into=into)
        change = augmentation(name, split.features.shape)
        steps = step + torch.arange(len(index))
        draw = draws(split.seed, self.stream, split.round, ids, steps, index.shape[2]).reshape(-1)
        return split.features.gather(index, lambda raw: change(raw, draw), into)

    def _active(self, step: int) -> Tensor | slice:
        """The clients that take this step: a slice where they are the first ones, else their indices."""
        left = self.steps > step
        alive = int(left.sum())
        if alive == len(left):
            return slice(None)
        return slice(0, alive) if bool(left[:alive].all()) else left.nonzero().squeeze(1)

    def _poisson(self) -> Iterator[tuple[Tensor | slice, Batch]]:
        """Each example of a client joins with probability q = min(1, batch/n); the expected size divides the sum."""
        split = self.split
        key = rng.fold(rng.root(split.seed, "poisson-" + self.stream), split.round, split.ids)
        for step in range(len(self)):
            rows = self._active(step)
            now, step_key = split.take(rows), rng.fold(key[rows], step)
            place, owner = now.places()
            offset = place - now.start[owner]
            q = (self.training.batch / now.count.to(torch.float64)).clamp_max(1.0)
            joins = rng.to_unit(rng.at(step_key[owner], offset)) < q[owner]
            owner, offset = owner[joins], offset[joins]
            size = torch.bincount(owner, minlength=len(now.count))
            width = max(int(size.max()), 1)
            column = torch.arange(len(owner)) - (torch.cumsum(size, 0) - size)[owner]
            index = now.rows[now.start][:, None].expand(-1, width).clone()
            place = now.start[owner] + offset
            index[owner, column] = now.rows[place]
            weight = torch.zeros(len(now.count), width)
            expected = now.count.clamp_max(self.training.batch).to(torch.float32)
            share = 1.0 / expected[owner]
            weight[owner, column] = share if now.weights is None else share * now.weights[place]
            x = self._gather(index[None], now.ids, step)[0]
            y, weight = split.targets(index), split.features.to_device(weight)
            sample = PoissonSample(step_key, q, expected)
            yield rows, Batch(x, y, weight, now.ids, split.round, step, sample, split.seed, self.stream)


@lru_cache(maxsize=64)
def _round_key(seed: int, stream: str, round: int) -> Tensor:
    """Cached, because every chunk of a round needs it; never written to."""
    return rng.fold(rng.root(seed, stream), round)
