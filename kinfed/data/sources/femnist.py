"""FEMNIST: handwritten characters with their writers (LEAF), as the hub data set flwrlabs/femnist has them.

Columns: image (28x28, gray), writer_id, character (0 to 61: digits, then upper-case, then lower-case letters). There is
no official test split: a partition sets test examples aside at every client."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import option
from kinfed.data.examples.problem import Problem
from kinfed.data.sources import hub
from kinfed.data.sources.hub import ParquetSet
from kinfed.data.sources.image_sets import ImageOptions, read_images, standardized
from kinfed.data.sources.source import Source, subsample
from kinfed.errors import ConfigError, DataError

FILES = ParquetSet("femnist", ("train",), "flwrlabs/femnist")
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
CHOICES = {"all": CHARACTERS, "digits": string.digits, "upper": string.ascii_uppercase, "lower": string.ascii_lowercase}


@dataclass(frozen=True)
class FemnistOptions(ImageOptions):
    characters: Literal["all", "digits", "upper", "lower"] = option("all", "which characters: all 62, or one kind")
    first: int | None = option(None, "of these, only the first so many: 10 of lower are a-j; none: all", ge=2, le=62)


def load_femnist(options: FemnistOptions, data_dir: Path | None, seed: int) -> Source:
    """Clients are the writers of the characters that the options leave."""
    files = hub.obtain(FILES, data_dir)["train"]
    stored = hub.cached("femnist", files, lambda: _decode(files))
    names = CHOICES[options.characters][: options.first]
    if options.first is not None and options.first > len(names):
        raise ConfigError(f"characters={options.characters} are {len(names)}; first={options.first} asks for more")
    first_label = CHARACTERS.index(names[0])
    labels = stored["labels"] - first_label
    rows = ((labels >= 0) & (labels < len(names))).nonzero().squeeze(1)
    if len(rows) == 0:
        raise DataError(f"femnist holds none of the characters {names[0]} to {names[-1]}; fetch its files again")
    present, owners = torch.unique(stored["writers"][rows], return_inverse=True)
    source = Source(
        "femnist",
        standardized(stored["raw"][rows], options.standardize),
        labels[rows],
        Problem.of_classes(len(names), list(names)),
        owners=owners,
        owner_names=[_text(stored["writer_names"][k]) for k in present.tolist()],
    )
    return source if options.examples is None else subsample(source, options.examples, "images")


def _decode(files: list[Path]) -> dict[str, Tensor]:
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
    return {
        "raw": raw,
        "labels": labels,
        "writers": torch.tensor([number[name] for name in writers]),
        "writer_names": torch.tensor([[*name.ljust(longest, b"\0")] for name in encoded], dtype=torch.uint8),
    }


def _text(padded: Tensor) -> str:
    return bytes(padded.tolist()).rstrip(b"\0").decode()
