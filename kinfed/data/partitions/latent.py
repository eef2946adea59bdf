"""Latent distributions: clients in groups that share a cluster of similar examples (FedFomo, Appendix A.5).

Every example is embedded, k-means finds D clusters over training and test rows together, clients
are assigned to clusters evenly, and the rows of a cluster are dealt equally to its clients. Test rows come from the
official test split if it has one. The clusters are those of the data set, the same for every seed of a run; the
seed deals the rows. Embeddings and clusters are kept in the cache folder. Embedded are

  pca    the pixels themselves
  cnn    the last hidden layer (256) of a small convolutional network, trained here
  vgg11  the second fully connected layer (4096, before its ReLU) of VGG-11, trained here

all reduced to a number of principal components. The networks learn the labels of the training rows; how well they tell
rows that they did not see is part of the result, because an embedding is only as good as that. They are made, ordered
and trained from a fixed seed; their last digits still depend on the machine and its threads.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinfed.core import cache, option, rng, storage
from kinfed.data.examples.augment import AUGMENTATIONS
from kinfed.data.examples.features import Features, fingerprint
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions.base import Assignment, Partition, by_class, check_has_classes, deal, evenly
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError

log = logging.getLogger(__name__)

_CACHE_FORMAT = "embedded-1"
SEED = 0
ROWS_AT_ONCE = 500
BATCH = 128
MIN_SIDE = {"cnn": 8, "vgg11": 32}  # pixels; VGG-11 halves an image five times
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
            mismatch = f"{source.name} has {source.num_classes} classes; got groups = {self.groups}"
            raise ConfigError(f"by_label makes every class a distribution: {mismatch}")
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
        piles = by_class(rows, distribution, self.groups, key)
        counts = torch.zeros(len(member_of), self.groups, dtype=torch.int64)
        for group in range(self.groups):
            members = (member_of == group).nonzero().squeeze(1)
            counts[members, group] = evenly(piles.count[group : group + 1], len(members))[0]
        return deal(counts, piles)

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
        model = KMeans(self.groups, n_init=5, max_iter=100, random_state=SEED)
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
        held_out[rng.permutation(rng.root(SEED, "held-out"), len(source))[: int(HELD_OUT * len(source))]] = 1
    vectors, accuracy = embedder(features, source.labels, source.num_classes, held_out)
    return {"x": vectors, "accuracy": torch.tensor(accuracy)}


def _identity(source: Source, embedder: Embedder) -> str:
    """Equal for equal examples, scaled in the same way, embedded by the same rule."""
    optional = {"mean": source.features.mean, "std": source.features.std, "is_test": source.is_test}
    scaling = storage.checksum({name: tensor for name, tensor in optional.items() if tensor is not None})
    examples = fingerprint(source.features, source.labels)
    settings = [_CACHE_FORMAT, examples, source.standardize, scaling, dataclasses.asdict(embedder)]
    return storage.record_digest(settings)[:16]


def _cached(identity: str | None, kind: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of make(), kept in the cache folder; without an identity they are simply made."""
    return make() if identity is None else cache.cached("embedded", f"{identity}-{kind}", make)


@dataclass(frozen=True)
class Embedder:
    kind: str  # pca, cnn or vgg11
    components: int = 256
    epochs: int = 10
    image_size: int | None = None  # images are scaled to this many pixels; None: as they are, if large enough

    def __post_init__(self) -> None:
        if self.kind not in ("pca", *MIN_SIDE):
            raise ConfigError(f"an embedder is one of pca, {', '.join(MIN_SIDE)}; got {self.kind!r}")
        if self.components < 1 or self.epochs < 1:
            raise ConfigError(f"components and epochs are at least 1; got {self.components} and {self.epochs}")
        least = MIN_SIDE.get(self.kind, 1)
        if self.image_size is not None and self.image_size < least:
            raise ConfigError(f"{self.kind} needs an image_size of at least {least}; got {self.image_size}")

    def __call__(self, features: Features, labels: Tensor, num_classes: int, held_out: Tensor) -> tuple[Tensor, float]:
        """Embed all examples, [N, D] float32. Rows marked in held_out [N] bool are embedded but not learned from; the
        accuracy of the network on these comes second, NaN without a network."""
        if features.is_tokens:
            raise ConfigError("the examples are tokens, which this partition cannot embed; use another one")
        if self.kind == "pca":
            everything = lambda rows: features.gather(rows).flatten(1)  # noqa: E731
            return principal_components(everything, len(features), self.components), torch.nan
        if len(features.shape) != 3:
            raise ConfigError(f"embedder {self.kind} is for images; examples here have the shape {features.shape}")
        with torch.random.fork_rng(devices=[]):  # layers and dropout draw from torch's global generator
            torch.default_generator.manual_seed(SEED)
            network = self._network(features, num_classes)
            network.learn(labels, (~held_out).nonzero().squeeze(1), self.epochs)
        accuracy = network.accuracy(labels, held_out.nonzero().squeeze(1))
        return principal_components(network.hidden, len(features), self.components), accuracy

    def _network(self, features: Features, num_classes: int) -> _Network:
        channels, *sides = features.shape
        size = self.image_size or max(MIN_SIDE[self.kind], *sides)
        resize = None if sides == [size, size] else size
        if self.kind == "vgg11":
            return _Network(*vgg11(channels, size, num_classes), features, resize, lr=0.02)
        # Narrow convolutions take two thirds of the time with channels last; VGG-11's gain nothing.
        return _Network(*small_cnn(channels, size, num_classes), features, resize, 0.05, torch.channels_last)


def small_cnn(channels: int, size: int, classes: int) -> tuple[nn.Module, nn.Module]:
    """Body and head: three convolutions, each halving the image, and a hidden layer of 256."""
    layers: list[nn.Module] = []
    width = channels
    for wider in (32, 64, 128):
        layers += [nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.MaxPool2d(2), nn.ReLU()]
        width = wider
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * (size // 8) ** 2, 256))
    return body, nn.Sequential(nn.ReLU(), nn.Linear(256, classes))


def vgg11(channels: int, size: int, classes: int) -> tuple[nn.Module, nn.Module]:
    """Simonyan and Zisserman's network A with batch normalization; at 224 pixels of the original's size.

    The first fully connected layer takes what five halvings leave, up to 7x7, so that small images need no scaling."""
    layers: list[nn.Module] = []
    width = channels
    for block in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for wider in block:
            layers += [nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
            width = wider
        layers.append(nn.MaxPool2d(2))
    side = min(size // 32, 7)
    body = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(side), nn.Flatten(),
        nn.Linear(512 * side**2, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096),
    )  # fmt: skip
    return body, nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Linear(4096, classes))


@dataclass
class _Network:
    """A classifier in two parts: what the body makes of an image is the embedding, the head names the class."""

    body: nn.Module
    head: nn.Module
    features: Features
    resize: int | None
    lr: float
    memory: torch.memory_format = torch.contiguous_format

    def __post_init__(self) -> None:
        self.body.to(memory_format=self.memory)  # type: ignore[call-overload]

    def _images(self, rows: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = self.features.gather(rows, change)
        if self.resize is not None:
            x = nn.functional.interpolate(x, (self.resize, self.resize), mode="bilinear", antialias=True)
        return x.contiguous(memory_format=self.memory)

    def learn(self, labels: Tensor, rows: Tensor, epochs: int) -> None:
        """SGD with momentum, one cycle of the learning rate. Colour photographs are cropped and mirrored at random;
        signs are not, for which left and right mean something."""
        whole = nn.Sequential(self.body, self.head).train()
        augment = AUGMENTATIONS["crop_flip"] if self.features.shape[0] == 3 else None
        optimizer = torch.optim.SGD(whole.parameters(), self.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        batches = max(len(rows) // BATCH, 1)  # a small rest is left out: batch statistics of a few images are poor
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=epochs * batches)
        key = rng.root(SEED, "embedding")
        for epoch in range(epochs):
            order = rows[rng.permutation(rng.fold(key, epoch, 0), len(rows))]
            draw = rng.bits(rng.fold(key, epoch, 1), len(rows))
            total = 0.0
            for begin in range(0, batches * BATCH, BATCH):
                batch, bits = order[begin : begin + BATCH], draw[begin : begin + BATCH]
                x = self._images(batch, None if augment is None else functools.partial(augment, draw=bits))
                loss = nn.functional.cross_entropy(whole(x), labels[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                cycle.step()
                total += float(loss.detach())
            log.info("embedding: epoch %d of %d, training loss %.3f", epoch + 1, epochs, total / batches)
        whole.eval()

    @torch.no_grad()
    def hidden(self, rows: Tensor) -> Tensor:
        out: Tensor = self.body(self._images(rows))
        return out

    @torch.no_grad()
    def accuracy(self, labels: Tensor, rows: Tensor) -> float:
        parts = torch.split(rows, ROWS_AT_ONCE)
        hits = sum(int((self.head(self.hidden(part)).argmax(1) == labels[part]).sum()) for part in parts)
        return hits / max(len(rows), 1)


def principal_components(of: Callable[[Tensor], Tensor], count: int, components: int) -> Tensor:
    """[count, D] float32: the leading components of the vectors of(rows) [n, F], D = min(components, count, F).

    Exact, from the covariance, or from the products of the vectors where these are fewer than F. The vectors are asked
    for a few hundred at once; all of them are held only where they are fewer than F."""
    parts = torch.split(torch.arange(count), ROWS_AT_ONCE)
    mean = torch.stack([of(part).sum(0, dtype=torch.float64) for part in parts]).sum(0) / count
    centre = mean.to(torch.float32)  # its rounding is a shift too small to turn an axis
    if count < len(mean):
        x = torch.cat([of(part) - centre for part in parts]).to(torch.float64)
        values, vectors = _leading(x @ x.T, components)
        return (vectors * values.clamp_min(0).sqrt()).to(torch.float32)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for part in parts:
        x = of(part) - centre
        scatter += x.T @ x  # products of a few hundred rows in float32, their sum in float64
    axes = _leading(scatter, components)[1].to(torch.float32)
    return torch.cat([(of(part) - centre) @ axes for part in parts])


def _leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest eigenvalues of a symmetric matrix and their vectors, largest first."""
    from scipy.linalg import eigh  # a few leading ones, in a third of the time that all would take

    size = len(matrix)
    values, vectors = eigh(matrix.numpy(), subset_by_index=[max(size - count, 0), size - 1], overwrite_a=True)
    return torch.from_numpy(values[::-1].copy()), torch.from_numpy(vectors[:, ::-1].copy())
