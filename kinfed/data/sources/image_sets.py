"""Data sets of images. Images stay uint8; a batch is (raw - mean) / std with, by option `standardize`:

  unit      [0, 1]                                    default for gray images
  centred   [-1, 1]: (x - 0.5) / 0.5 of unit          default for CIFAR (the pFedMe generator)
  pixel     (x - mean) / (std + 0.001) per pixel      FedProx's MNIST; statistics over all examples, test ones too
  imagenet  mean and std of ImageNet per channel      FedFomo's CIFAR

`examples` images are taken, drawn at random, training and test images in their proportion: the same ones for every
seed, so that a smaller data set is still one data set. Decoding stays in one thread: Pillow spends most of the time for
small images holding the interpreter lock, and two threads measured slower than one.
"""

import io
import string
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kinfed.core import NoOptions, option
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import hub
from kinfed.data.sources.hub import ParquetSet
from kinfed.data.sources.source import Source, subsample
from kinfed.errors import ConfigError, DataError

Standardize = Literal["unit", "centred", "pixel", "imagenet"]


@dataclass(frozen=True)
class ImageOptions:
    examples: int | None = option(None, "only this many images, drawn at random; none: all")
    standardize: Standardize = option("unit", "unit [0,1], centred [-1,1] or pixel (FedProx)")


@dataclass(frozen=True)
class ColourOptions(ImageOptions):
    standardize: Standardize = option("centred", "unit [0,1], centred [-1,1], pixel or imagenet (FedFomo)")


@dataclass(frozen=True)
class LettersOptions(ImageOptions):
    letters: int = option(10, "how many letters from a on: 10 (a-j) as in the papers, 26 for all", ge=2, le=26)


@dataclass(frozen=True)
class ImageSet:
    """A data set of Parquet files with one image and one label column; `load` is its entry in SOURCES."""

    name: str
    files: ParquetSet
    image: str  # name of the column of images
    label: str  # name of the column of labels
    class_names: list[str]
    notes: tuple[str, ...] = ()
    renumber: bool = False  # only the classes that occur, numbered anew

    def load(self, options: ImageOptions, data_dir: Path | None, seed: int) -> Source:
        stored, names = self.tensors(data_dir), self.class_names
        if isinstance(options, LettersOptions):
            names, rows = names[: options.letters], (stored["labels"] < options.letters).nonzero().squeeze(1)
            stored = {name: tensor[rows] for name, tensor in stored.items()}
        labels, is_test = stored["labels"], stored["is_test"]
        if self.renumber:
            present, labels = torch.unique(labels, return_inverse=True)
            names = [names[c] for c in present.tolist()]
        has_both = bool(is_test.any()) and not bool(is_test.all())  # test rows alone cannot be told from others
        source = Source(
            self.name, standardized(stored["raw"], options.standardize), labels,
            Problem.of_classes(len(names), names), is_test if has_both else None, notes=list(self.notes),
        )  # fmt: skip
        return subsample(source, options.examples, "images")

    def tensors(self, data_dir: Path | None) -> dict[str, Tensor]:
        """raw [N, channels, height, width] uint8, labels [N], is_test [N]; decoded once."""
        splits = hub.obtain(self.files, data_dir)
        files = {file: split == "test" for split, files in splits.items() for file in files}
        return hub.cached(self.name, files, lambda: self._decode(files))

    def _decode(self, files: dict[Path, bool]) -> dict[str, Tensor]:
        """`files` says of each whether its images are for testing."""
        raw, labels, tables = read_images(self.name, list(files), self.image, self.label)
        is_test = [torch.full((len(table),), test) for table, test in zip(tables, files.values(), strict=True)]
        return {"raw": raw, "labels": labels, "is_test": torch.cat(is_test)}


def read_images(
    name: str, files: Sequence[Path], image: str, label: str, *others: str
) -> tuple[Tensor, Tensor, list[pa.Table]]:
    """raw [N, channels, height, width] uint8 and labels [N] of a data set's files, and their tables without the images,
    with the columns `others`; neither these nor the labels may have gaps. Encoded images are held file by file."""
    raw, labels, tables = [], [], []
    for file in files:
        table = hub.read_parquet(file, [image, label, *others])
        for column in (label, *others):
            if table[column].null_count:
                raise DataError(f"{file}: column {column} has empty cells; fetch the file again")
        raw.append(decode(encoded_values(table[image], file.parent, str(file)), str(file)))
        labels.append(torch.tensor(table[label].to_pylist(), dtype=torch.int64))
        tables.append(table.drop_columns([image]))
    if len({block.shape[1:] for block in raw}) != 1:
        raise DataError(f"data set {name}: the images of its files differ in size")
    return torch.cat(raw), torch.cat(labels), tables


def standardized(raw: Tensor, scheme: Standardize) -> Features:
    """uint8 images [N, channels, height, width] with the mean and std of a scheme, in units of the raw values."""
    if scheme == "unit":
        return Features(raw, None, torch.tensor(255.0))
    if scheme == "centred":
        return Features(raw, torch.tensor(127.5), torch.tensor(127.5))
    if scheme == "pixel":
        mean, std = _pixel_statistics(raw)
        return Features(raw, mean, std + 0.001)
    if raw.shape[1] != 3:
        raise ConfigError("standardize=imagenet is for colour images; use unit, centred or pixel")
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None] * 255
    return Features(raw, mean, std)


def _pixel_statistics(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every pixel. Sums of bytes are exact in float64, so one pass suffices."""
    total = torch.zeros(raw.shape[1:], dtype=torch.float64)
    square = torch.zeros_like(total)
    for block in torch.split(raw, 4096):
        values = block.to(torch.float64)
        total += values.sum(0)
        square += values.square().sum(0)
    mean = total / len(raw)
    variance = (square / len(raw) - mean.square()).clamp_min(0)
    return mean.to(torch.float32), variance.sqrt().to(torch.float32)


def load_digits(options: NoOptions, data_dir: Path | None, seed: int) -> Source:
    """Digits from the file that scikit-learn comes with: importing scikit-learn to read it takes a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits comes with scikit-learn, which is not installed; pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    raw = torch.from_numpy(table[:, :-1]).to(torch.uint8).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, -1]).to(torch.int64)
    return Source("digits", Features(raw, None, torch.tensor(16.0)), labels, Problem.of_classes(10, DIGITS))


# Characters 0 to 61: digits, then upper-case, then lower-case letters.
_FEMNIST = ParquetSet("femnist", ("train",), "flwrlabs/femnist")
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_CHOICES = {"all": CHARACTERS, "digits": CHARACTERS[:10], "upper": CHARACTERS[10:36], "lower": CHARACTERS[36:]}


@dataclass(frozen=True)
class FemnistOptions(ImageOptions):
    characters: Literal["all", "digits", "upper", "lower"] = option("all", "which characters: all 62, or one kind")
    first: int | None = option(
        None, "of these, only this many from the first on: 10 of lower are a-j; none: all", ge=2, le=62
    )


def load_femnist(options: FemnistOptions, data_dir: Path | None, seed: int) -> Source:
    """FEMNIST: handwritten characters with their writers (LEAF), as the hub data set flwrlabs/femnist has them. Clients
    are the writers of the characters that the options leave; a partition sets test examples aside at every client."""
    files = hub.obtain(_FEMNIST, data_dir)["train"]
    stored = hub.cached("femnist", files, lambda: _decode_femnist(files))
    names = _CHOICES[options.characters][: options.first]
    if options.first is not None and options.first > len(names):
        raise ConfigError(f"characters={options.characters} are {len(names)}; first={options.first} asks for more")
    first_label = CHARACTERS.index(names[0])
    labels = stored["labels"] - first_label
    rows = ((labels >= 0) & (labels < len(names))).nonzero().squeeze(1)
    if len(rows) == 0:
        raise DataError(f"femnist holds none of the characters {names[0]} to {names[-1]}; fetch its files again")
    present, owners = torch.unique(stored["writers"][rows], return_inverse=True)
    features, problem = standardized(stored["raw"][rows], options.standardize), Problem.of_classes(len(names), names)
    writers = [bytes(name.tolist()).rstrip(b"\0").decode() for name in stored["writer_names"][present]]
    source = Source("femnist", features, labels[rows], problem, owners=owners, owner_names=writers)
    return subsample(source, options.examples, "images")


def _decode_femnist(files: list[Path]) -> dict[str, Tensor]:
    """raw [N, 1, 28, 28] uint8, labels [N], writers [N], and writer_names [writers, longest] as bytes of UTF-8."""
    raw, labels, tables = read_images("femnist", files, "image", "character", "writer_id")
    if int(labels.min()) < 0 or int(labels.max()) >= len(CHARACTERS):
        raise DataError(
            f"data set femnist: characters are numbers from 0 to {len(CHARACTERS) - 1}; got {int(labels.min())} to "
            f"{int(labels.max())}"
        )
    writers = [name for table in tables for name in table["writer_id"].to_pylist()]
    number = {name: k for k, name in enumerate(sorted(set(writers)))}
    encoded = [name.encode() for name in number]
    longest = max(map(len, encoded))
    writer_names = torch.tensor([[*name.ljust(longest, b"\0")] for name in encoded], dtype=torch.uint8)
    numbers = torch.tensor([number[name] for name in writers])
    return {"raw": raw, "labels": labels, "writers": numbers, "writer_names": writer_names}


# What the numbers of the labels mean.
DIGITS = list(string.digits)
LETTERS = list(string.ascii_lowercase)
FASHION_MNIST = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR100 = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
]  # fmt: skip

_BOTH = ("train", "test")
_SUBSET_ADVICE = "the 20-class subset is a data set of its own: cifar100_subset"


def _on_hub(name: str, repository: str, image: str, label: str, classes: list[str], advice: str = "") -> ImageSet:
    return ImageSet(name, ParquetSet(name, _BOTH, repository, advice), image, label, classes)


load_mnist = _on_hub("mnist", "ylecun/mnist", "image", "label", DIGITS).load
load_fashion_mnist = _on_hub("fashion_mnist", "zalando-datasets/fashion_mnist", "image", "label", FASHION_MNIST).load
load_cifar10 = _on_hub("cifar10", "uoft-cs/cifar10", "img", "label", CIFAR10).load
load_cifar100 = _on_hub("cifar100", "uoft-cs/cifar100", "img", "fine_label", CIFAR100, _SUBSET_ADVICE).load
load_cifar100_subset = ImageSet(
    "cifar100_subset", ParquetSet("cifar100_subset", _BOTH), "img", "fine_label", CIFAR100,
    ("cifar100_subset has some of CIFAR-100's classes and images; its figures are not CIFAR-100 figures",),
    renumber=True,
).load  # fmt: skip
load_letters = ImageSet(
    "letters", ParquetSet("ocr_letters_lowercase", ("all",)), "image", "label", LETTERS,
    ("letters are 16x8 OCR letters, a stand-in for the lower-case part of FEMNIST",),
).load  # fmt: skip
load_emnist_letters_subset = ImageSet(
    "emnist_letters_subset", ParquetSet("emnist_letters_test_subset", ("test",)), "image", "label", LETTERS,
    ("emnist_letters_subset holds the letters a-m of EMNIST's test split; its labels were derived, not published",),
    renumber=True,
).load  # fmt: skip


def decode(images: Sequence[bytes | Path | None], where: str) -> Tensor:
    """uint8 [N, channels, height, width]; gray images have one channel, all others three (RGB).

    All must have the size of the first and be gray or coloured as it is; `where` names them in errors."""
    first = _pixels(images[0], 0, where)
    out = np.empty((len(images), *first.shape), np.uint8)
    out[0] = first
    for row in range(1, len(images)):
        pixels = _pixels(images[row], row, where)
        if pixels.shape != first.shape:
            sizes = f"the image in row {row} is {_size(pixels)}, the first one {_size(first)}"
            raise DataError(f"{where}: {sizes}; bring all images to one size and colour mode")
        out[row] = pixels
    stacked = torch.from_numpy(out)
    return stacked[:, None] if first.ndim == 2 else stacked.permute(0, 3, 1, 2).contiguous()


def encoded_values(column: pa.ChunkedArray, folder: Path, where: str) -> list[bytes | Path | None]:
    """Encoded images (or sounds) from a hub column (struct of bytes and path), bytes, or paths relative to `folder`."""
    kind = column.type
    if pa.types.is_struct(kind):
        values = [value or {} for value in column.to_pylist()]
        return [v.get("bytes") or (folder / v["path"] if v.get("path") else None) for v in values]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(column.to_pylist())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [None if path is None else folder / path for path in column.to_pylist()]
    raise DataError(f"{where}: images should be bytes, paths, or structs of both; got {kind}")


def _pixels(image: bytes | Path | None, row: int, where: str) -> np.ndarray[Any, Any]:
    if image is None:
        raise DataError(f"{where}: the image in row {row} is missing")
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:  # of the installation for nodes, which has no images
        raise DataError(f"{where}: reading images needs pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            if opened.mode in ("I", "F") or opened.mode.startswith("I;"):
                raise DataError(f"{where}: the image in row {row} has more than 8 bits per pixel; convert it to 8 bits")
            gray = opened.mode in ("1", "L", "LA")
            return np.asarray(opened.convert("L" if gray else "RGB"))
    except FileNotFoundError:
        raise DataError(f"{where}: the image in row {row}, {image!s}, does not exist") from None
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: cannot decode the image in row {row}: {error}") from error


def _size(pixels: np.ndarray[Any, Any]) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]} {'gray' if pixels.ndim == 2 else 'RGB'}"
