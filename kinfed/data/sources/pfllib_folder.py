"""Data sets that PFLlib's generators wrote: a folder with config.json, train/0.npz, test/0.npz, train/1.npz, ... with
the examples {"x", "y"} of every client."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kinfed.core import option, storage
from kinfed.data.examples.arrays import as_features
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.sources.plain_pickle import read_plain_pickle
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError


@dataclass(frozen=True)
class PfllibOptions:
    folder: str = option("", "the data set's folder in PFLlib, such as dataset/MNIST")
    tokens: bool = option(False, "examples are token ids")


def load_pfllib(options: PfllibOptions, data_dir: Path | None, seed: int) -> Source:
    """The clients of a folder of PFLlib, with its training and test examples."""
    if not options.folder:
        raise ConfigError("data set pfllib needs its folder: --set dataset.folder=PFLlib/dataset/MNIST")
    folder = Path(options.folder)
    config = storage.read_json(folder / "config.json", "what PFLlib writes beside a data set")
    try:
        clients, num_classes = int(config["num_clients"]), int(config["num_classes"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'config.json'} does not say num_clients and num_classes") from error
    parts = [(k, part, _read(folder / part / f"{k}.npz")) for k in range(clients) for part in ("train", "test")]
    labels = torch.from_numpy(np.concatenate([y for _, _, (_, y) in parts]).astype(np.int64))
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(f"{folder}: labels {int(labels.min())} to {int(labels.max())} of {num_classes} classes")
    try:
        examples = np.concatenate([x for _, _, (x, _) in parts])
    except ValueError as error:
        raise DataError(f"{folder}: examples differ in shape between clients ({error})") from error
    return Source(
        folder.name,
        Features(as_features(examples, options.tokens)),
        labels,
        Problem.of_classes(num_classes),
        is_test=torch.cat([torch.full((len(y),), part == "test") for _, part, (_, y) in parts]),
        owners=torch.cat([torch.full((len(y),), k) for k, _, (_, y) in parts]),
        owner_names=[f"client-{k:0{len(str(clients - 1))}d}" for k in range(clients)],
    )


def _read(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(x [n, ...], y [n]) of one client."""
    try:
        with zipfile.ZipFile(path) as archive:
            stored = io.BytesIO(archive.read("data.npy"))
        major, _ = np.lib.format.read_magic(stored)
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        read_header(stored)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no file of PFLlib: {error}") from error
    content = read_plain_pickle(stored.read(), path)
    try:
        record = content.item()  # a single dictionary in an array of objects
        x, y = np.asarray(record["x"]), np.asarray(record["y"]).reshape(-1)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold x and y of one client") from error
    if len(x) != len(y) or x.dtype == object:
        raise DataError(f"{path}: {len(x)} examples of type {x.dtype} beside {len(y)} labels")
    return x, y
