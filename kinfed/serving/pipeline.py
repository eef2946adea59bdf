"""A model with all that belongs to it: raw rows in, probabilities with the names of classes out.

    pipeline = result.personal_model("hospital-a", "ditto")       of a run in memory
    pipeline = ModelPipeline.read("hospital-a.safetensors")       from `kinfed export`, or from a node's vault
    pipeline.predict(frame), pipeline.predict_proba(frame)        [n] names of classes, [n, C]
    pipeline.module(pipeline.transform(frame))                    the plain torch module, and what it is fed

The file is safetensors with JSON in its head, never pickle. The torch module is the one that was trained: rows are
encoded and scaled before it (`with_scaling` puts the scaling into a module, for runtimes that take nothing else).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.core import escape_formula, storage
from kinfed.data import Features, Problem
from kinfed.engine import MODELS, Builder, build_model, module_from, own_model
from kinfed.errors import DataError, ModelError
from kinfed.serving.model_inputs import ModelInputs

WIDTH = 1024  # examples at once


@dataclass(frozen=True)
class Predictions:
    problem: Problem
    outputs: Tensor  # [n, C] probabilities of classes, or [n] numbers in the target's unit; float32
    names: list[str] | None = None  # [n] of the rows, where a column holds them
    notes: list[str] = field(default_factory=list)  # what a reader should know: unseen categories, absent columns

    @property
    def classes(self) -> list[str]:
        return self.problem.class_labels

    @property
    def probabilities(self) -> Tensor:
        """[n, C]"""
        if self.problem.is_regression:
            raise ModelError("a model of a regression gives numbers and no probabilities; ask for its values")
        return self.outputs

    @property
    def values(self) -> Tensor:
        """[n]"""
        if not self.problem.is_regression:
            raise ModelError("a model of classes gives probabilities and labels; it has no values")
        return self.outputs

    @property
    def labels(self) -> list[str]:
        return [self.classes[index] for index in self.probabilities.argmax(1).tolist()]

    @property
    def header(self) -> list[str]:
        if self.problem.is_regression:
            return ["row", "prediction"]
        return ["row", "prediction", "probability", *(f"p_{name}" for name in self.classes)]

    def lines(self) -> list[list[str]]:
        """The row's number (or name) and the prediction; of classes also its probability and that of every class."""
        names = [str(number + 1) for number in range(len(self.outputs))] if self.names is None else self.names
        if self.problem.is_regression:
            return [[name, f"{value:.6g}"] for name, value in zip(names, self.outputs.tolist(), strict=True)]
        return [
            [name, label, f"{max(p):.6g}", *(f"{value:.6g}" for value in p)]
            for name, label, p in zip(names, self.labels, self.probabilities.tolist(), strict=True)
        ]

    def csv_text(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        for name, label, *numbers in self.lines():
            writer.writerow([name if self.names is None else escape_formula(name), escape_formula(label), *numbers])
        return text.getvalue()

    def write(self, path: Path) -> None:
        storage.write_atomically(path, self.csv_text().encode())


@dataclass(frozen=True)
class ModelPipeline:
    module: nn.Module
    inputs: ModelInputs
    about: Mapping[str, str] = field(default_factory=dict)  # model, client, algorithm, ...

    def __repr__(self) -> str:
        columns = self.inputs.columns
        source = f"columns={columns}" if columns else f"shape={list(self.inputs.shape)}"
        about = ", ".join(f"{name}={value!r}" for name, value in self.about.items() if name != "inputs")
        return f"ModelPipeline({about}, {source}, classes={self.classes})"

    @property
    def classes(self) -> list[str]:
        """Names of the classes; none of a regression."""
        return self.inputs.classes

    def encode(self, rows: Any, where: str = "the table") -> tuple[Features, list[str]]:
        """Rows as features that are scaled when they are gathered, and notes on values that training has not seen.

        Rows of a table: a frame, a dictionary of columns, or an array of its columns, all numbers. Other models take
        arrays of examples."""
        inputs, learnt = self.inputs, self.inputs.preprocessing
        if learnt is not None:
            encoded = learnt.encode(rows, where)
            mean, std = self._scale
            return Features(encoded.raw, mean, std), encoded.notes
        raw = rows if isinstance(rows, Tensor) else torch.from_numpy(_numbers(rows, where))
        if prod(raw.shape[1:]) != prod(inputs.shape):
            raise DataError(
                f"the model takes {prod(inputs.shape)} features (examples of shape {list(inputs.shape)}); {where} has "
                f"{prod(raw.shape[1:])}"
            )
        if inputs.tokens:
            if bool((raw != raw.round()).any()):
                raise DataError(f"the model takes token numbers; {where} has features that are not whole")
            raw = raw.to(torch.int64)
        features = Features(raw.reshape(-1, *inputs.shape), inputs.mean, inputs.std)
        features.check_finite()
        return features, []

    def transform(self, rows: Any) -> Tensor:
        """[n, ...] what the module is fed."""
        features, _ = self.encode(rows)
        return features.gather(torch.arange(len(features)))

    def predictions(self, rows: Any, names: list[str] | None = None, where: str = "the table") -> Predictions:
        """Probabilities of every class, or the number, for every row, with notes."""
        features, notes = self.encode(rows, where)
        blocks = []
        self.module.eval()
        with torch.inference_mode():
            for index in torch.split(torch.arange(len(features)), WIDTH):
                blocks.append(self.module(features.gather(index)).to(torch.float32))
        problem = self.inputs.problem
        outputs = torch.cat(blocks) if blocks else torch.zeros(0, problem.outputs)
        if not bool(torch.isfinite(outputs).all()):
            row = int((~torch.isfinite(outputs).all(1)).nonzero()[0])
            raise DataError(f"the model gives NaN for row {row + 1} of {where}; check the scale of its features")
        values = problem.restored(outputs[:, 0]) if problem.is_regression else torch.softmax(outputs, 1)
        return Predictions(problem, values, names, notes)

    def predict(self, rows: Any) -> list[str] | np.ndarray[Any, np.dtype[np.float32]]:
        """[n] the name of the most probable class; of a regression the number, in the target's unit."""
        predictions = self.predictions(rows)
        return predictions.values.numpy() if self.inputs.problem.is_regression else predictions.labels

    def predict_proba(self, rows: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[n, C] in the order of `classes`."""
        return self.predictions(rows).probabilities.numpy()

    def save(self, path: Path | str) -> None:
        tensors = {name: tensor.detach().contiguous().clone() for name, tensor in self.module.state_dict().items()}
        storage.write_tensors(Path(path), tensors, {**self.about, "inputs": self.inputs.to_json()})

    @classmethod
    def read(cls, path: Path | str, build: Builder | None = None) -> ModelPipeline:
        """Read a file of `save` or `kinfed export`. `build` makes the module where it is not one of kinfed's own."""
        path = Path(path)
        about = storage.read_metadata(path)
        if "inputs" not in about:
            raise ModelError(
                f"{path} does not say what its model must be fed; export it again with this version of kinfed"
            )
        return cls.from_parts(storage.read_tensors(path), about, str(path), build)

    @classmethod
    def from_parts(
        cls, tensors: dict[str, Tensor], about: Mapping[str, str], where: str, build: Builder | None = None
    ) -> ModelPipeline:
        """Make it from a state dict and the facts in a file."""
        inputs = ModelInputs.from_json(about["inputs"], where)
        shape, outputs = inputs.shape, inputs.problem.outputs
        if build is not None:
            make = own_model(build, shape, outputs)
        elif about["model"] in MODELS:
            make = partial(build_model, about["model"], shape, outputs, inputs.options)
        else:
            raise ModelError(
                f"{where} holds a {about['model']}, which is none of kinfed's models; give `build`, the "
                "function that builds it (ModelPipeline.read, result.personal_model)"
            )
        module = module_from(make, tensors)
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            raise ModelError(f"the parameters in {where} do not fit its model: {error}") from None
        about = {name: text for name, text in about.items() if name not in ("inputs", storage.CHECKSUM)}
        return cls(module.eval(), inputs, about)

    def with_scaling(self) -> nn.Module:
        """The module behind its scaling: it takes encoded rows that are not scaled yet (`encode`)."""
        return nn.Sequential(_Scaling(*self._scale), self.module)

    @property
    def _scale(self) -> tuple[Tensor | None, Tensor | None]:
        learnt, inputs = self.inputs.preprocessing, self.inputs
        return (inputs.mean, inputs.std) if learnt is None or not learnt.standardize else (learnt.mean, learnt.std)


class _Scaling(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor | None, std: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()) if mean is None else mean)
        self.register_buffer("std", torch.ones(()) if std is None else std)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * (1.0 / self.std)


def _numbers(rows: Any, where: str) -> np.ndarray[Any, Any]:
    array = np.asarray(rows)
    if array.dtype.kind not in "biuf" or array.ndim < 2 or not array.size:
        raise DataError(f"{where} should hold one row of numbers per example; got {array.dtype} of shape {array.shape}")
    return array if array.dtype == np.uint8 else array.astype(np.float32)
