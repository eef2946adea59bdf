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
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.core import escape_formula, storage
from kinfed.data import Features, Problem
from kinfed.engine import MODELS, Builder, MixtureModule, model_for, module_from
from kinfed.errors import ConfigError, DataError, ModelError
from kinfed.serving import intervals
from kinfed.serving.model_inputs import ModelInputs

WIDTH = 1024  # examples at once
MIXTURE = "mixture"  # the kind of a model that is several
TECHNICAL = ("inputs", "parts", "sets")  # facts in a file that are for programs
_ENDS = ("from", "to")


@dataclass(frozen=True)
class Predictions:
    problem: Problem
    outputs: Tensor  # [n, ...] `Problem.predicted`: probabilities, or numbers in the target's unit; float32
    names: list[str] | None = None  # [n] of the rows, where a column holds them
    notes: list[str] = field(default_factory=list)  # what a reader should know: unseen categories, absent columns
    threshold: Tensor | None = None  # [n] of prediction sets, where these were asked for
    ends: Tensor | None = None  # [n, 2] of intervals by what a model knows of itself (kinfed.serving.intervals)

    @property
    def classes(self) -> list[str]:
        return self.problem.class_labels

    @property
    def probabilities(self) -> Tensor:
        """[n, C] of classes or labels, or of outliving each period of survival."""
        if not self.problem.has_probabilities:
            raise ModelError("a model of a regression gives numbers and no probabilities; ask for its values")
        return self.outputs

    @property
    def values(self) -> Tensor:
        """[n], or [n, K] of several numbers"""
        if self.problem.has_probabilities:
            raise ModelError("a model of classes gives probabilities and labels; it has no values")
        return self.outputs

    @property
    def labels(self) -> list[str]:
        if not self.problem.has_classes:
            raise ModelError(f"labels are names of classes, and the problem is {self.problem.in_words()}")
        return [self.classes[index] for index in self.probabilities.argmax(1).tolist()]

    @property
    def sets(self) -> list[list[str]] | Tensor:
        """[n] the classes in each prediction set, the likeliest among them; or the ends [n, 2] of intervals: of a
        number, a count, or of the chance of the second of two classes."""
        if self.ends is not None:
            return self.ends
        if self.threshold is None:
            raise ConfigError("ask for prediction sets by their level: predictions(rows, level=0.9)")
        if self.problem.is_regression:
            return torch.stack([self.outputs - self.threshold, self.outputs + self.threshold], 1)
        inside = (1 - self.probabilities <= self.threshold[:, None]).scatter(1, self.outputs.argmax(1)[:, None], True)
        return [[name for name, one in zip(self.classes, row, strict=True) if one] for row in inside.tolist()]

    @property
    def header(self) -> list[str]:
        if not self.problem.has_classes:
            return ["row", *self.problem.prediction_names, *([] if self._plain else ["low", "high"])]
        sets = [] if self._plain else ["set"] if self.ends is None else [f"p_{self.classes[1]} {end}" for end in _ENDS]
        return ["row", "prediction", "probability", *sets, *(f"p_{name}" for name in self.classes)]

    @property
    def _plain(self) -> bool:
        """Whether neither sets nor intervals were asked for."""
        return self.threshold is None and self.ends is None

    def lines(self) -> list[list[str]]:
        """The row's number (or name) and the prediction; of classes also its probability and that of every class."""
        names = [str(number + 1) for number in range(len(self.outputs))] if self.names is None else self.names
        if not self.problem.has_classes:
            values = self.outputs.flatten(1) if self.outputs.dim() > 1 else self.outputs[:, None]
            ends = [[]] * len(names) if self._plain else torch.as_tensor(self.sets).tolist()
            rows = zip(names, values.tolist(), ends, strict=True)
            return [[name, *(f"{number:.6g}" for number in (*row, *pair))] for name, row, pair in rows]
        if self.ends is not None:
            sets = [[f"{end:.6g}" for end in row] for row in self.ends.tolist()]
        else:
            sets = [[]] * len(names) if self._plain else [[" | ".join(one)] for one in self.sets]
        return [
            [name, label, f"{max(p):.6g}", *inside, *(f"{value:.6g}" for value in p)]
            for name, label, p, inside in zip(names, self.labels, self.probabilities.tolist(), sets, strict=True)
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
        source = f"columns={columns}" if columns else self.inputs.shape_in_words
        about = ", ".join(f"{name}={value!r}" for name, value in self.about.items() if name not in TECHNICAL)
        return f"ModelPipeline({about}, {source}, classes={self.classes})"

    @property
    def classes(self) -> list[str]:
        """Names of the classes; none of a regression."""
        return self.inputs.classes

    def encode(self, rows: Any, where: str = "the table") -> tuple[Features, list[str]]:
        """Rows as features that are scaled when they are gathered, and notes on values that training has not seen.

        Rows of a table: a frame, a dictionary of columns, or an array of its columns, all numbers. Other models take
        arrays of examples; of several inputs a dict or a tuple of arrays."""
        inputs, learnt = self.inputs, self.inputs.preprocessing
        if learnt is not None:
            encoded = learnt.encode(rows, where)
            mean, std = self._scale
            return Features(encoded.raw, mean, std), encoded.notes
        if inputs.packing is not None and not isinstance(rows, Tensor):
            raw = inputs.packing.pack(rows, where)
        else:
            raw = rows if isinstance(rows, Tensor) else torch.from_numpy(_numbers(rows, where))
        features = Features(inputs.examples(raw, where), inputs.mean, inputs.std)
        features.check_finite()
        return features, []

    def transform(self, rows: Any) -> Tensor:
        """[n, ...] what the module is fed."""
        features, _ = self.encode(rows)
        return features.gather(torch.arange(len(features)))

    def predictions(
        self, rows: Any, names: list[str] | None = None, where: str = "the table", level: float | None = None
    ) -> Predictions:
        """Probabilities of every class, or the number, for every row, with notes; with a `level` such as 0.9 also sets
        that hold the truth about so often (models of `kinfed fit`; of `lmm` and `glmm` by the variance that they
        carry)."""
        calibrated = level is not None and f"{level:g}" in json.loads(self.about.get("sets", "{}"))
        by_model = level is not None and not calibrated and hasattr(self.module, "uncertainty")
        by_model = by_model and self.inputs.problem.kind in intervals.KINDS
        threshold = None if level is None or by_model else self.set_threshold(level)
        features, notes = self.encode(rows, where)
        blocks, known = [], []
        self.module.eval()
        with torch.inference_mode():
            for index in torch.split(torch.arange(len(features)), WIDTH):
                x = features.gather(index)
                blocks.append(self.module(x).to(torch.float32))
                if by_model:
                    known.append(self.module.uncertainty(x))  # type: ignore[operator]  # of a model by sums
        problem = self.inputs.problem
        outputs = torch.cat(blocks) if blocks else torch.zeros(0, problem.outputs)
        if not bool(torch.isfinite(outputs).all()):
            row = int((~torch.isfinite(outputs).flatten(1).all(1)).nonzero()[0])
            raise DataError(f"the model gives NaN for row {row + 1} of {where}; check the scale of its features")
        values: Tensor = problem.predicted(outputs)
        reach = None if threshold is None else torch.full((len(values),), threshold)
        ends = intervals.ends(problem, level, outputs, known) if by_model and level is not None else None
        return Predictions(problem, values, names, notes, reach, ends)

    def predict(self, rows: Any) -> list[str] | np.ndarray[Any, np.dtype[np.float32]]:
        """[n] the name of the most probable class; of numbers and counts these, in the target's unit; of survival the
        chance to outlive each period, of several labels that of each."""
        predictions = self.predictions(rows)
        return predictions.labels if self.inputs.problem.has_classes else predictions.outputs.numpy()

    def predict_proba(self, rows: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[n, C] in the order of `classes`, of labels, or of periods."""
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
        inputs, kind = ModelInputs.from_json(about["inputs"], where), about.get("model", "")
        if build is None and kind == MIXTURE:
            return cls._read_mixture(tensors, about, inputs, where)
        if build is not None:
            make = model_for(inputs.problem, inputs.shape, build, packing=inputs.packing)
        elif kind in MODELS:
            make = model_for(inputs.problem, inputs.shape, kind, inputs.options, inputs.packing)
        else:
            raise ModelError(
                f"{where} holds a {kind or 'model without a name'}, which is none of kinfed's models; give `build`, "
                "the function that builds it (ModelPipeline.read, result.personal_model)"
            )
        try:
            module = module_from(make, tensors)
            module.load_state_dict(tensors)
        except RuntimeError as error:  # no memory for what it says it is, too
            raise ModelError(f"the parameters in {where} do not fit its model: {error}") from None
        return cls(module.eval(), inputs, _without_inputs(about))

    @classmethod
    def _read_mixture(
        cls, tensors: dict[str, Tensor], about: Mapping[str, str], inputs: ModelInputs, where: str
    ) -> ModelPipeline:
        try:
            parts = [(str(kind["model"]), dict(kind["options"])) for kind in json.loads(about["parts"])]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ModelError(f"{where} holds a mixture and does not say of what") from None
        if MIXTURE in dict(parts):
            raise ModelError(f"{where} holds a mixture of mixtures, which nothing of kinfed's makes")
        modules = []
        for number, (kind, options) in enumerate(parts):
            start = f"components.{number}."
            own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            part = {"model": kind, "inputs": replace(inputs, options=options).to_json()}
            modules.append(cls.from_parts(own, part, where).module)
        shares = tensors.get("pi", torch.zeros(0))
        if not modules or tuple(shares.shape) != (len(modules),):
            raise ModelError(f"{where} holds a mixture of {len(modules)} models, and not a share for each")
        return cls(MixtureModule(modules, shares).eval(), inputs, _without_inputs(about))

    @classmethod
    def mixture(cls, parts: Sequence[ModelPipeline], shares: Sequence[float]) -> ModelPipeline:
        """One model Σ share p of several with the same inputs and classes: of probabilities, or of numbers."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if any(
            one.inputs.shape_in_words != first.inputs.shape_in_words or one.classes != first.classes for one in parts
        ):
            raise ModelError("models are mixed where they take the same inputs and give the same classes")
        kinds = [{"model": one.about["model"], "options": dict(one.inputs.options)} for one in parts]
        about = {**first.about, "model": MIXTURE, "parts": json.dumps(kinds)}
        named = zip(parts, shares, strict=True)
        about["algorithm"] = " + ".join(f"{share:.4f} {one.about.get('algorithm', '')}" for one, share in named)
        module = MixtureModule([one.module for one in parts], torch.tensor(shares, dtype=torch.float32))
        return cls(module.eval(), first.inputs, about)

    def with_sets(self, thresholds: Mapping[float, float]) -> ModelPipeline:
        """The same model with thresholds of prediction sets by level (kinfed.theory.certificates)."""
        known = {f"{level:g}": threshold if isfinite(threshold) else None for level, threshold in thresholds.items()}
        return replace(self, about={**self.about, "sets": json.dumps(known)})

    def set_threshold(self, level: float) -> float:
        """The largest score in a prediction set of that level; refused where the file has none."""
        known = json.loads(self.about.get("sets", "{}"))
        if (name := f"{level:g}") not in known:
            levels = ", ".join(known) or 'none: kinfed fit calibrates sets, and so does algorithm="auto" of estimators'
            raise ConfigError(f"prediction sets of level {level:g} are not in this model's file; it has {levels}")
        return inf if known[name] is None else float(known[name])

    def with_scaling(self) -> nn.Module:
        """The module behind its scaling: it takes encoded rows that are not scaled yet (`encode`)."""
        scaled = any(part is not None for part in self._scale)
        return nn.Sequential(_Scaling(*self._scale) if scaled else nn.Identity(), self.module)  # tokens stay whole

    @property
    def _scale(self) -> tuple[Tensor | None, Tensor | None]:
        learnt, inputs = self.inputs.preprocessing, self.inputs
        return (inputs.mean, inputs.std) if learnt is None or not learnt.standardize else (learnt.mean, learnt.std)


def _without_inputs(about: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in about.items() if name not in ("inputs", storage.CHECKSUM)}


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
