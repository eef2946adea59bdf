"""Label skew by the laws that PFLlib and FL-bench have made common: their "Dirichlet(0.1)" is another distribution than
that of independent draws, and their "pathological" split another than shards.

With 100 clients, ten classes of 6,000 examples and alpha = 0.1, a client holds 4.2 classes and 72 % of its examples are
of the most frequent one; `dirichlet` gives 5.1 classes and 65 %. Both laws read the data set's training and test
examples as one and divide every client's, three quarters for training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.partitions.base import SPLIT_TEXT, CountPartition, TestRows
from kinfed.data.partitions.label_skew import dirichlet_logits, size_range
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class ClosingDirichlet(CountPartition):
    """Every class, one after the other, is divided by proportions from a symmetric Dirichlet(alpha) among the clients
    that hold fewer than N / K examples so far; the others are closed. The whole draw is repeated until every client
    has `min_size` examples: at least 10 here, so that every client can be tested; 1 in PFLlib, 32 in FL-bench."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    alpha: float = option(0.1, "concentration: 0.1 very uneven, 100 nearly iid", gt=0)
    min_size: int = option(10, "smallest client (before its test examples are taken)", ge=1)

    _ATTEMPTS: ClassVar[int] = 1000

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        key = self.key(seed, "proportions")
        for attempt in range(self._ATTEMPTS):
            counts = self._draw(rng.fold(key, attempt), available, clients)
            if int(counts.sum(1).min()) >= self.min_size:
                return counts, []
        raise ConfigError(
            f"partition {self.name}: in {self._ATTEMPTS} draws with alpha = {self.alpha} some of {clients} clients "
            f"never had {self.min_size} examples; use fewer clients, a larger alpha or a smaller min_size"
        )

    def _draw(self, key: Tensor, available: Tensor, clients: int) -> Tensor:
        logits = dirichlet_logits(self.alpha, key, len(available), clients)  # [C, K]
        quota = float(available.sum()) / clients
        counts = torch.zeros(clients, len(available), dtype=torch.int64)
        for label, total in enumerate(available.tolist()):
            if total == 0:
                continue
            closed = counts.sum(1) >= quota  # never all of them: K closed clients hold all N examples
            shares = torch.softmax(logits[label].masked_fill(closed, -torch.inf), 0)
            cuts = torch.floor(torch.cumsum(shares, 0) * total + 1e-9).to(torch.int64)
            cuts[-1] = total
            counts[:, label] = torch.diff(cuts, prepend=torch.zeros(1, dtype=torch.int64))
        return counts


@dataclass(frozen=True)
class ClassBlocks(CountPartition):
    """`classes` classes for every client: class by class, the first ceil(K / C * classes) clients that still take one
    share it, in equal parts with `balanced`, otherwise in parts drawn uniformly from a tenth of an equal part to an
    equal part; the last of them takes what is left, which is the most by far."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    classes: int = option(2, "classes of a client", ge=1)
    balanced: bool = option(False, "equal parts of every class")

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        num_classes = len(available)
        if self.classes > num_classes:
            raise ConfigError(f"classes = {self.classes}, but {source.name} has {num_classes} classes")
        counts = torch.zeros(clients, num_classes, dtype=torch.int64)
        free = torch.full((clients,), self.classes)
        places = -(-clients * self.classes // num_classes)  # ceil(K / C * classes)
        for label, total in enumerate(available.tolist()):
            takers = free.nonzero().squeeze(1)[:places]
            if not len(takers):
                continue
            free[takers] -= 1
            part = total / len(takers)
            sizes = torch.full((len(takers) - 1,), int(part))
            if not self.balanced:
                low = max(part / 10, 1 / num_classes)
                draw = rng.uniform(rng.fold(self.key(seed, "sizes"), label), len(takers) - 1)
                sizes = (low + draw * max(part - low, 0)).to(torch.int64)
            counts[takers[:-1], label] = sizes
            counts[takers[-1], label] = total - int(sizes.sum())
        if empty := int((counts.sum(1) == 0).sum()):
            raise ConfigError(
                f"partition {self.name}: {empty} of {clients} clients would hold no example; use fewer clients, or "
                "more classes for each"
            )
        left = int(available.sum() - counts.sum())
        notes = [f"{left:,} examples of classes that no client takes are unused"] if left else []
        return counts, [*notes, f"sizes {size_range(counts)}"]
