"""Predictions of one personal model for new examples; no server, no run, no training code.

    model = read_model("ditto-0-hospital-a.safetensors")          from `kinfed export`, or from a node's vault
    predictions = predict(model, "new.csv")
    predictions.labels, predictions.probabilities                  [n] names of classes, [n, C]

The file of a model says what the model must be fed: which columns in which order, scaled how, and what its outputs are
called. New examples go through the same `Features` as those it was trained on.
"""

from __future__ import annotations

import csv
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.core import storage
from kinfed.core.spreadsheet import escape_formula
from kinfed.data.features import Features
from kinfed.data.sources.table import is_table, load_inputs
from kinfed.data.sources.wordpiece import TextInput
from kinfed.engine.models import MODELS, Builder, build_model, own_model
from kinfed.engine.personal import module_from
from kinfed.errors import DataError, ModelError
from kinfed.runs.export import export_model

WIDTH = 1024  # examples at once


@dataclass(frozen=True)
class PersonalModel:
    module: nn.Module
    shape: tuple[int, ...]  # of an example
    tokens: bool
    columns: list[str] | None  # of the table it was trained on
    classes: list[str]
    mean: Tensor | None
    std: Tensor | None
    about: dict[str, str]  # client, algorithm, ...
    text: TextInput | None = None  # where it reads texts


@dataclass(frozen=True)
class Predictions:
    classes: list[str]
    probabilities: Tensor  # [n, C] float32
    names: list[str] | None = None  # [n] of the rows, where a column holds them

    @property
    def labels(self) -> list[str]:
        return [self.classes[index] for index in self.probabilities.argmax(1).tolist()]

    def write(self, path: Path) -> None:
        """CSV: the row's number (or name), the predicted class, its probability, and the probability of every class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["row", "prediction", "probability", *(f"p_{name}" for name in self.classes)])
        names = None if self.names is None else [escape_formula(name) for name in self.names]
        for number, (label, p) in enumerate(zip(self.labels, self.probabilities.tolist(), strict=True)):
            name = number + 1 if names is None else names[number]
            writer.writerow([name, escape_formula(label), f"{max(p):.6g}", *(f"{value:.6g}" for value in p)])
        storage.write_atomically(path, text.getvalue().encode())


def read_model(path: Path | str, build: Builder | None = None) -> PersonalModel:
    """A model with what it must be fed. `build` makes the module where the model is not one of kinfed's own."""
    path = Path(path)
    about = storage.read_metadata(path)
    if "inputs" not in about:
        raise ModelError(f"{path} does not say what its model must be fed; export it again with this version of kinfed")
    inputs: dict[str, Any] = json.loads(about["inputs"])
    shape, classes = tuple(inputs["shape"]), list(inputs["classes"])
    if build is None and about["model"] not in MODELS:
        raise ModelError(
            f"{path} holds a {about['model']}, which is none of kinfed's models; use runs.predict.read_model with "
            "the function that builds it"
        )
    if build is None:
        make = lambda: build_model(about["model"], shape, len(classes), inputs["options"])  # noqa: E731
    else:
        make = own_model(build, shape, len(classes))
    mean, std = (None if inputs[name] is None else torch.tensor(inputs[name]) for name in ("mean", "std"))
    module = _module(make, storage.read_tensors(path), path)
    text = None if inputs["text"] is None else TextInput(**inputs["text"])
    return PersonalModel(module, shape, inputs["tokens"], inputs["columns"], classes, mean, std, about, text)


def model_of_run(folder: Path, client: str, algorithm: str | None = None, seed: int | None = None) -> PersonalModel:
    """A client's personal model of a finished run."""
    with tempfile.TemporaryDirectory() as place:
        return read_model(export_model(folder, client, algorithm, seed, Path(place) / "model.safetensors").path)


def _module(make: Callable[[], nn.Module], tensors: dict[str, Tensor], path: Path) -> nn.Module:
    module = module_from(make, tensors)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"the parameters in {path} do not fit its model: {error}") from None
    return module.eval()


def predict(
    model: PersonalModel,
    table: Path | str,
    *,
    image_column: str | None = None,
    ignore: tuple[str, ...] | str = (),
    name_column: str | None = None,
) -> Predictions:
    """Predictions for every row of a table (.csv, .parquet, ...), or of x in an .npz file.

    Columns are found by their names, in any order; other columns do not matter. `name_column` names the rows."""
    path = Path(table)
    features, names = _inputs(model, path, image_column, ignore, name_column)
    blocks = []
    with torch.inference_mode():
        for rows in torch.split(torch.arange(len(features)), WIDTH):
            blocks.append(torch.softmax(model.module(features.gather(rows)).to(torch.float32), 1))
    probabilities = torch.cat(blocks)
    if not bool(torch.isfinite(probabilities).all()):
        row = int((~torch.isfinite(probabilities).all(1)).nonzero()[0])
        raise DataError(f"the model gives NaN for row {row + 1} of {path}; check the scale of its features")
    return Predictions(model.classes, probabilities, names)


def _inputs(
    model: PersonalModel, path: Path, image_column: str | None, ignore: tuple[str, ...] | str, name_column: str | None
) -> tuple[Features, list[str] | None]:
    names = None
    if is_table(str(path)):
        features, rows = load_inputs(path, model.columns, image_column, ignore, model.text)
        if name_column is not None:
            if name_column not in rows.column_names:
                raise DataError(f"{path} has no column {name_column!r}; it has {', '.join(rows.column_names)}")
            names = [str(value) for value in rows[name_column].to_pylist()]
        raw = features.raw
    else:
        raw = _array(path)
    if prod(raw.shape[1:]) != prod(model.shape):
        raise DataError(
            f"the model takes {prod(model.shape)} features (examples of shape {list(model.shape)}); {path} has "
            f"{prod(raw.shape[1:])}"
        )
    if model.tokens:
        if bool((raw != raw.round()).any()):
            raise DataError(f"the model takes token numbers; {path} has features that are not whole")
        raw = raw.to(torch.int64)
    return replace(Features(raw.reshape(-1, *model.shape)), mean=model.mean, std=model.std), names


def _array(path: Path) -> Tensor:
    if path.suffix.lower() != ".npz":
        raise DataError(f"new examples come as a table (.csv, .tsv, .parquet) or as x in an .npz file; got {path}")
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one array and is no .npz file; write it with numpy.savez(path, x=...)")
            x = arrays["x"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"cannot read x from {path}: {error}; write it with numpy.savez(path, x=...)") from None
    if x.dtype.kind not in "biuf" or x.ndim < 2 or not x.size:
        raise DataError(f"x of {path} should hold one row of numbers per example; got {x.dtype} of shape {x.shape}")
    raw = torch.from_numpy(x if x.dtype == np.uint8 else x.astype(np.float32))
    if not bool(torch.isfinite(raw.to(torch.float32)).all()):
        raise DataError(f"x of {path} holds NaN or infinite values; clean them first")
    return raw
