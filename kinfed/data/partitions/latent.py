"""Latent distributions: clients in groups that share a cluster of similar examples (FedFomo, Appendix A.5).

Every example is embedded (embedding.py), k-means finds D clusters over training and test rows together, clients
are assigned to clusters evenly, and the rows of a cluster are dealt equally to its clients. Test rows come from the
official test split where there is one. The clusters are those of the data set, the same for every seed of a run; the
seed deals the rows. Embeddings and clusters are kept in the cache folder.
"""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import cache, option, rng, storage
from kinfed.data.examples.features import fingerprint
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions import dealing, embedding
from kinfed.data.partitions.base import Assignment, Partition, check_has_classes
from kinfed.data.partitions.embedding import Embedder
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError

_CACHE_FORMAT = "embedded-1"
HELD_OUT = 0.1  # of the rows judge a network where the data set has no test split
PAPER_ACCURACY = 0.85
CACHED_FROM = 10_000  # examples; principal components of fewer are computed faster than read


@dataclass(frozen=True)
class Latent(Partition):
    """D clusters of similar examples, each dealt equally to its share of the clients (FedFomo)."""

    groups: int = option(5, "D, the number of latent distributions", ge=1)
    embedder: Literal["pca", "cnn", "vgg11"] = option(
        "pca", "what makes examples comparable: pca of pixels, or a network trained here"
    )
    components: int = option(256, "principal components that clusters are sought in", ge=1)
    by_label: bool = option(False, "every class is a distribution (FedFomo's code for CIFAR-10 with D = 10)")
    epochs: int = option(10, "training of the embedding network", ge=1)
    image_size: int | None = option(None, "pixels the network's images are scaled to; 224 in the paper's code")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._embedder()  # an image_size that is too small for the network is refused there

    def _embedder(self) -> Embedder:
        return Embedder(self.embedder, self.components, self.epochs, self.image_size)

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        check_has_classes(source, self.name)
        clients = self.clients(num_clients)
        if clients < self.groups:
            need = f"{self.groups} latent distributions need at least as many clients"
            raise ConfigError(f"{need}; got {clients}; use more clients or fewer groups")
        if self.by_label and self.groups != source.num_classes:
            found = f"{source.name} has {source.num_classes} classes; got groups = {self.groups}"
            raise ConfigError(f"by_label makes every class a distribution: {found}")
        own = source.labels, ["latent distributions are the classes themselves"]
        distribution, notes = own if self.by_label else self._clusters(source)
        member_of = torch.arange(clients) * self.groups // clients  # neighbours share a distribution
        rows, official = self.train_and_test_rows(source)
        owned = self._deal(rows, distribution, member_of, self.key(seed, "rows"))
        if bool((owned.count == 0).any()):
            short = int(member_of[owned.count == 0][0])
            raise ConfigError(
                f"latent distribution {short} has {int((distribution[rows] == short).sum())} training examples for "
                f"{int((member_of == short).sum())} clients; use fewer clients or groups"
            )
        names = source.class_names if self.by_label else None
        group_names = names or [f"distribution {g}" for g in range(self.groups)]
        if official is None:
            train, test = self.hold_out_test(owned, seed)
        else:
            train, test = owned, self._deal(official, distribution, member_of, self.key(seed, "test-rows"))
        return Assignment(train, test, groups=member_of, group_names=group_names, notes=notes)

    def _deal(self, rows: Tensor, distribution: Tensor, member_of: Tensor, key: Tensor) -> Ragged:
        """The rows of every distribution, in random order, in equal parts to its clients."""
        piles = dealing.by_class(rows, distribution, self.groups, key)
        counts = torch.zeros(len(member_of), self.groups, dtype=torch.int64)
        for group in range(self.groups):
            members = (member_of == group).nonzero().squeeze(1)
            counts[members, group] = dealing.evenly(piles.count[group : group + 1], len(members))[0]
        return dealing.deal(counts, piles)

    def _clusters(self, source: Source) -> tuple[Tensor, list[str]]:
        """[N] the cluster of every example, and what a reader should know about the embedding."""
        slow = self.embedder != "pca" or len(source) >= CACHED_FROM
        identity = f"{source.name}-{_identity(source, self._embedder())}" if slow else None
        stored = _cached(identity, f"{self.groups}-clusters", lambda: self._find(source, identity))
        accuracy = float(stored["accuracy"])
        if self.embedder == "pca":
            note = "clusters of the pixels' principal components, a stand-in for the VGG-11 embeddings of the paper"
        else:
            rows = "test" if source.has_official_test else "held-out"
            note = f"clusters of {self.embedder} embeddings; the network reached {accuracy:.1%} on {rows} rows"
            if self.embedder != "vgg11" or accuracy < PAPER_ACCURACY:
                note += f" (the paper: VGG-11, at least {PAPER_ACCURACY:.0%})"
        return stored["label"], [f"latent distributions are {note}"]

    def _find(self, source: Source, identity: str | None) -> dict[str, Tensor]:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning

        stored = _cached(identity, "embedding", lambda: _embed(source, self._embedder()))
        model = KMeans(self.groups, n_init=5, max_iter=100, random_state=embedding.SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct examples than groups, refused below
            label = torch.from_numpy(model.fit_predict(stored["x"].numpy())).to(torch.int64)
        kinds = len(torch.unique(label))
        if kinds < self.groups:
            raise ConfigError(f"{source.name} has only {kinds} kinds of examples; use at most that many groups")
        return {"label": label, "accuracy": stored["accuracy"]}


def _embed(source: Source, embedder: Embedder) -> dict[str, Tensor]:
    features = source.features.standardized(source.rows(test=False)) if source.standardize else source.features
    held_out = torch.zeros(len(source), dtype=torch.bool)
    if source.has_official_test:
        held_out[source.rows(test=True)] = True
    else:
        held_out[rng.permutation(rng.root(embedding.SEED, "held-out"), len(source))[: int(HELD_OUT * len(source))]] = 1
    vectors, accuracy = embedder(features, source.labels, source.num_classes, held_out)
    return {"x": vectors, "accuracy": torch.tensor(accuracy)}


def _identity(source: Source, embedder: Embedder) -> str:
    """Equal for equal examples, scaled in the same way, embedded by the same rule."""
    optional = {"mean": source.features.mean, "std": source.features.std, "is_test": source.is_test}
    scaling = storage.checksum({name: tensor for name, tensor in optional.items() if tensor is not None})
    examples = fingerprint(source.features, source.labels)
    settings = [_CACHE_FORMAT, examples, source.standardize, scaling, dataclasses.asdict(embedder)]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _cached(identity: str | None, kind: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of make(), kept in the cache folder; without an identity they are simply made."""
    return make() if identity is None else cache.cached("embedded", f"{identity}-{kind}", make)
