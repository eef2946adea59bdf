"""The catalogue of data sets. `load_source("mnist")`, or the path of your own table (see table.py).

Images stay uint8; a batch is (raw - mean) / std with, by option `standardize`:

  unit      [0, 1]                                    default for gray images
  centred   [-1, 1]: (x - 0.5) / 0.5 of unit          default for CIFAR (the pFedMe generator)
  pixel     (x - mean) / (std + 0.001) per pixel      FedProx's MNIST; statistics over all examples, test ones too
  imagenet  mean and std of ImageNet per channel      FedFomo's CIFAR

`examples` takes so many images, drawn at random, training and test images in their proportion: the same ones for every
seed, so that a smaller data set is still one data set.

A new data set is a function from (options, data folder, seed) to a Source, and one `register_source` line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.core.options import NoOptions, build
from kinfed.data.features import Features
from kinfed.data.source import Source
from kinfed.data.sources import class_names, hub, images, table, text, wakeword
from kinfed.data.sources.hub import ParquetSet
from kinfed.errors import ConfigError, DataError, unknown_name

__all__ = ["SOURCES", "Source", "SourceEntry", "load_source", "register_source"]

Standardize = Literal["unit", "centred", "pixel", "imagenet"]


@dataclass(frozen=True)
class SourceEntry:
    """One line of `kinfed list datasets`, and how to load it."""

    name: str
    summary: str
    options: type[Any]
    load: Callable[[Any, Path | None, int], Source]
    names_clients: bool = False  # it is shared out by its own clients (partition column) unless another rule is named


SOURCES: dict[str, SourceEntry] = {}


def register_source(
    name: str,
    summary: str,
    load: Callable[[Any, Path | None, int], Source],
    options: type[Any] = NoOptions,
    *,
    names_clients: bool = False,
) -> None:
    if name in SOURCES:
        raise ConfigError(f"data set {name!r} is registered already")
    SOURCES[name] = SourceEntry(name, summary, options, load, names_clients)


def load_source(
    name: str, data_dir: Path | None = None, seed: int = 0, options: Mapping[str, Any] | None = None
) -> Source:
    """A data set of the catalogue, or a table if `name` is the path of one. `seed` is for generated data only."""
    given = options or {}
    if name in SOURCES:
        entry = SOURCES[name]
        chosen = build(entry.options, given, f"data set {name}")
        source = entry.load(chosen, data_dir, seed)
        if isinstance(chosen, ImageOptions) and chosen.examples is not None:
            source = _fewer(source, chosen.examples)
        source.options = dataclasses.asdict(chosen)
        return source
    if table.is_table(name):
        return table.load_table(Path(name), build(table.TableOptions, given, f"table {name}"))
    error = unknown_name("data set", name, SOURCES)
    raise ConfigError(f"{error}; or give the path of a {', '.join(table.SUFFIXES)} file")


@dataclass(frozen=True)
class ImageOptions:
    examples: Annotated[int | None, "only so many images, drawn at random; none: all"] = None


@dataclass(frozen=True)
class GrayOptions(ImageOptions):
    standardize: Annotated[Standardize, "unit [0,1], centred [-1,1] or pixel (FedProx)"] = "unit"


@dataclass(frozen=True)
class ColourOptions(ImageOptions):
    standardize: Annotated[Standardize, "unit [0,1], centred [-1,1], pixel or imagenet (FedFomo)"] = "centred"


@dataclass(frozen=True)
class LettersOptions(GrayOptions):
    letters: Annotated[int, "how many letters from a on: 10 (a-j) as in the papers, 26 for all"] = 10

    def __post_init__(self) -> None:
        if not 2 <= self.letters <= 26:
            raise ConfigError(f"letters takes the first 2 to 26 letters; got {self.letters}")


def _fewer(source: Source, count: int) -> Source:
    """`count` of the examples, training and test rows in proportion. Pixels keep the statistics of the whole set."""
    if not 1 <= count <= len(source):
        raise ConfigError(f"examples takes 1 to {len(source):,} images of {source.name}; got {count:,}")
    train, test = source.rows(test=False), source.rows(test=True)
    tested = round(count * len(test) / len(source))
    key = rng.root(0, "examples")
    drawn = [
        rng.choose(rng.fold(key, i), len(rows), n)
        for i, (rows, n) in enumerate(((train, count - tested), (test, tested)))
    ]
    kept = torch.cat([train[drawn[0]], test[drawn[1]]]).sort().values
    return dataclasses.replace(
        source,
        features=dataclasses.replace(source.features, raw=source.features.raw[kept]),
        labels=source.labels[kept],
        is_test=None if source.is_test is None else source.is_test[kept],
        notes=[*source.notes, f"{count:,} of the {len(source):,} images of {source.name}, drawn at random"],
    )


def standardized(raw: Tensor, how: Standardize) -> Features:
    """uint8 images [N, channels, height, width] with the mean and std of a scheme, in units of the raw values."""
    if how == "unit":
        return Features(raw, None, torch.tensor(255.0))
    if how == "centred":
        return Features(raw, torch.tensor(127.5), torch.tensor(127.5))
    if how == "pixel":
        mean, std = _pixel_statistics(raw)
        return Features(raw, mean, std + 0.001)
    if raw.shape[1] != 3:
        raise ConfigError("standardize=imagenet is for colour images; use unit, centred or pixel")
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None] * 255
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None] * 255
    return Features(raw, mean, std)


def _pixel_statistics(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every pixel. Sums of bytes are exact in float64, so one pass suffices."""
    total = torch.zeros(raw.shape[1:], dtype=torch.float64)
    square = torch.zeros_like(total)
    for part in torch.split(raw, 4096):
        values = part.to(torch.float64)
        total += values.sum(0)
        square += values.square().sum(0)
    mean = total / len(raw)
    variance = (square / len(raw) - mean.square()).clamp_min(0)
    return mean.to(torch.float32), variance.sqrt().to(torch.float32)


def _digits(options: NoOptions, data_dir: Path | None, seed: int) -> Source:
    from sklearn.datasets import load_digits  # slow to import, and only this set needs it

    bunch = load_digits()
    raw = torch.from_numpy(bunch.images).to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    return Source("digits", Features(raw, None, torch.tensor(16.0)), labels, 10, class_names.DIGITS)


@dataclass(frozen=True)
class ImageSet:
    """A data set of Parquet files with one image and one label column."""

    name: str
    files: ParquetSet
    image: str
    label: str
    class_names: list[str]
    notes: tuple[str, ...] = ()

    def tensors(self, data_dir: Path | None) -> dict[str, Tensor]:
        found = hub.obtain(self.files, data_dir)
        return images.cached(self.name, [file for part in found.values() for file in part], lambda: self._decode(found))

    def _decode(self, found: dict[str, list[Path]]) -> dict[str, Tensor]:
        raw, labels, is_test = [], [], []
        for split, files in found.items():
            for file in files:
                table = images.read_parquet(file, [self.image, self.label])
                encoded = images.image_bytes(table[self.image], file.parent, str(file))
                raw.append(images.decode(encoded, str(file)))
                if table[self.label].null_count:
                    raise DataError(f"{file}: column {self.label} has empty cells; fetch the file again")
                labels.append(torch.tensor(table[self.label].to_pylist(), dtype=torch.int64))
                is_test.append(torch.full((len(table),), split == "test"))
        if len({part.shape[1:] for part in raw}) != 1:
            raise DataError(f"data set {self.name}: the images of its files differ in size")
        return {"raw": torch.cat(raw), "labels": torch.cat(labels), "is_test": torch.cat(is_test)}

    def load(self, options: Any, data_dir: Path | None, seed: int) -> Source:
        stored = self.tensors(data_dir)
        official = stored["is_test"] if bool(stored["is_test"].any()) else None
        features = standardized(stored["raw"], options.standardize)
        return Source(
            self.name, features, stored["labels"], len(self.class_names), self.class_names, official,
            notes=list(self.notes),
        )  # fmt: skip

    def load_present_classes(self, options: Any, data_dir: Path | None, seed: int) -> Source:
        """Only the classes that occur, numbered anew."""
        stored = self.tensors(data_dir)
        present, labels = torch.unique(stored["labels"], return_inverse=True)
        names = [self.class_names[c] for c in present.tolist()]
        features = standardized(stored["raw"], options.standardize)
        return Source(self.name, features, labels, len(names), names, stored["is_test"], notes=list(self.notes))

    def load_letters(self, options: LettersOptions, data_dir: Path | None, seed: int) -> Source:
        stored = self.tensors(data_dir)
        kept = (stored["labels"] < options.letters).nonzero().squeeze(1)
        features = standardized(stored["raw"][kept], options.standardize)
        names = self.class_names[: options.letters]
        return Source(self.name, features, stored["labels"][kept], len(names), names, notes=list(self.notes))


_BOTH = ("train", "test")

_MNIST = ImageSet("mnist", ParquetSet("mnist", _BOTH, "ylecun/mnist"), "image", "label", class_names.DIGITS)
_FASHION_MNIST = ImageSet(
    "fashion_mnist",
    ParquetSet("fashion_mnist", _BOTH, "zalando-datasets/fashion_mnist"),
    "image",
    "label",
    class_names.FASHION_MNIST,
)
_CIFAR10 = ImageSet("cifar10", ParquetSet("cifar10", _BOTH, "uoft-cs/cifar10"), "img", "label", class_names.CIFAR10)
_CIFAR100 = ImageSet(
    "cifar100",
    ParquetSet("cifar100", _BOTH, "uoft-cs/cifar100", "the 20-class subset is a data set of its own: cifar100_subset"),
    "img",
    "fine_label",
    class_names.CIFAR100,
)
_CIFAR100_SUBSET = ImageSet(
    "cifar100_subset",
    ParquetSet("cifar100_subset", _BOTH),
    "img",
    "fine_label",
    class_names.CIFAR100,
    ("cifar100_subset has some of CIFAR-100's classes and images; its figures are not CIFAR-100 figures",),
)
_LETTERS = ImageSet(
    "letters",
    ParquetSet("ocr_letters_lowercase", ("all",)),
    "image",
    "label",
    class_names.LETTERS,
    ("letters are 16x8 OCR letters, a stand-in for the lower-case part of FEMNIST",),
)
_EMNIST_LETTERS = ImageSet(
    "emnist_letters_subset",
    ParquetSet("emnist_letters_test_subset", ("test",)),
    "image",
    "label",
    class_names.LETTERS,
    ("emnist_letters_subset holds the letters a-m of EMNIST's test split; its labels were derived, not published",),
)


def _load_emnist_letters(options: GrayOptions, data_dir: Path | None, seed: int) -> Source:
    source = _EMNIST_LETTERS.load_present_classes(options, data_dir, seed)
    source.is_test = None  # every row is a test row of EMNIST: nothing to tell apart
    return source


register_source("digits", "1,797 8x8 digits from scikit-learn; no download", _digits)
register_source("mnist", "70,000 28x28 digits, 60,000 + 10,000", _MNIST.load, GrayOptions)
register_source("fashion_mnist", "70,000 28x28 pieces of clothing, 60,000 + 10,000", _FASHION_MNIST.load, GrayOptions)
register_source("cifar10", "60,000 32x32 colour images, 10 classes, 50,000 + 10,000", _CIFAR10.load, ColourOptions)
register_source("cifar100", "60,000 32x32 colour images, 100 classes, 50,000 + 10,000", _CIFAR100.load, ColourOptions)
register_source(
    "cifar100_subset", "2,400 images of 20 CIFAR-100 classes", _CIFAR100_SUBSET.load_present_classes, ColourOptions
)
register_source(
    "letters", "16x8 handwritten lower-case letters, a stand-in for FEMNIST", _LETTERS.load_letters, LettersOptions
)
register_source("emnist_letters_subset", "10,000 28x28 letters a-m, both cases", _load_emnist_letters, GrayOptions)
register_source(
    "sentiment140", "tweets by user, two sentiments, GloVe word vectors", text.SENTIMENT140.load, text.TweetOptions,
    names_clients=True,
)  # fmt: skip
register_source(
    "sentiment140_subset", "39,415 tweets, for trying the text task only", text.SENTIMENT140_SUBSET.load,
    text.SubsetOptions, names_clients=True,
)  # fmt: skip
register_source(
    "wakeword", "a word against others on five types of devices, a substitute for Self-FL's private audio",
    wakeword.load, wakeword.WakewordOptions, names_clients=True,
)  # fmt: skip
