"""Inputs of a model and the meaning of its outputs: JSON in the file of every model, so that the file alone is enough
to predict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.data import Description, Federation, Packing, Problem
from kinfed.data.sources import TextInput
from kinfed.errors import DataError, ModelError

if TYPE_CHECKING:
    from kinfed.data import TablePreprocessing

MOST_NUMBERS = 10**8  # in an example


@dataclass(frozen=True)
class ModelInputs:
    shape: tuple[int, ...]  # of an example
    problem: Problem  # its classes, or the mean and scale of its target
    tokens: bool = False
    mean: Tensor | None = None  # of arrays and images: a model is fed (x - mean) / std
    std: Tensor | None = None
    preprocessing: TablePreprocessing | None = None  # of tables: what columns become, with their scaling
    text: TextInput | None = None  # which column of texts becomes its tokens, and how
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    packing: Packing | None = None  # of several inputs

    @property
    def classes(self) -> list[str]:
        return self.problem.class_labels

    @property
    def columns(self) -> list[str] | None:
        """Columns of the table it was trained on; None if it was none."""
        return None if self.preprocessing is None else self.preprocessing.columns

    @property
    def shape_in_words(self) -> str:
        """Shape of one example, or of its inputs."""
        return f"shape {list(self.shape)}" if self.packing is None else self.packing.in_words()

    def examples(self, raw: Tensor, where: str) -> Tensor:
        """Rows [n, ...] with as many numbers as an example has, in its shape; token numbers as integers."""
        if prod(raw.shape[1:]) != prod(self.shape):
            raise DataError(
                f"the model takes {prod(self.shape)} features (examples of shape {list(self.shape)}); {where} has "
                f"{prod(raw.shape[1:])}"
            )
        if self.tokens:
            if bool((raw != raw.round()).any()):
                raise DataError(f"the model takes token numbers; {where} has features that are not whole")
            raw = raw.to(torch.int64)
        return raw.reshape(-1, *self.shape)

    @classmethod
    def of_description(cls, data: Description, options: Mapping[str, Any], client: str | None = None) -> ModelInputs:
        """Inputs of a run, from the description in its folder; those of a client with its own columns."""
        inputs, source = data.inputs, data.description.get("dataset_options", {})
        mean, std = (None if inputs[name] is None else torch.tensor(inputs[name]) for name in ("mean", "std"))
        return cls(
            tuple(inputs["shape"]), data.problem, inputs["tokens"], mean, std,
            _learnt(inputs.get("preprocessing"), inputs.get("own_columns", {}).get(client)),
            TextInput.of_options(source), options, Packing.from_json(inputs.get("packing")),
        )  # fmt: skip

    @classmethod
    def of_federation(cls, data: Federation, options: Mapping[str, Any], client: str | None = None) -> ModelInputs:
        """Inputs of models of a federation; those of a client with its own columns."""
        features, learnt = data.features, data.preprocessing
        if learnt is not None and client is not None and data.own_columns:
            learnt = learnt.at_site(list(data.own_columns[data.names.index(client)]))
        mean, std = (features.mean, features.std) if learnt is None else (None, None)
        text = TextInput.of_options(data.description.get("dataset_options", {}))
        tokens, packing = features.is_tokens, features.packing
        return cls(features.shape, data.problem, tokens, mean, std, learnt, text, options, packing)

    def to_json(self) -> str:
        scale = {name: None if t is None else t.tolist() for name, t in (("mean", self.mean), ("std", self.std))}
        shape, problem = list(self.shape), self.problem.to_json()
        plain = {"shape": shape, "problem": problem, "tokens": self.tokens, "options": self.options}
        learnt = None if self.preprocessing is None else self.preprocessing.to_json()
        text = None if self.text is None else asdict(self.text)
        packed = {} if self.packing is None else {"packing": self.packing.to_json()}
        return json.dumps({**plain, **scale, "preprocessing": learnt, "text": text, **packed})

    @classmethod
    def from_json(cls, text: str, where: str) -> ModelInputs:
        """ModelError if it is none; `where` names the file."""
        try:
            record = json.loads(text)
            mean, std = (None if record[name] is None else torch.tensor(record[name]) for name in ("mean", "std"))
            shape = tuple(record["shape"])
            if not all(type(length) is int and length > 0 for length in shape) or prod(shape) > MOST_NUMBERS:
                raise ValueError(f"examples of shape {str(shape)[:60]}")
            learnt = _learnt(record["preprocessing"])
            if learnt is not None and len(learnt.features) != prod(shape):
                raise ValueError(f"its columns make {len(learnt.features)} numbers, and it takes {prod(shape)}")
            packing = Packing.from_json(record.get("packing"))
            if packing is not None and shape != (packing.numbers,):
                raise ValueError(f"its inputs make {packing.numbers} numbers, and it takes {list(shape)}")
            return cls(
                shape, Problem.from_json(record["problem"]), bool(record["tokens"]), mean, std, learnt,
                None if record["text"] is None else TextInput(**record["text"]), dict(record["options"]),
                packing,
            )  # fmt: skip
        except (ValueError, LookupError, TypeError, RuntimeError, DataError) as error:  # too deep or large ones, too
            raise ModelError(
                f"{where} does not say what its model must be fed ({error}); export it with this version of kinfed"
            ) from None


def _learnt(record: Any, own: Any = None) -> TablePreprocessing | None:
    """Read from JSON, with own columns as a client has learnt them; None if the data were no table."""
    if record is None:
        return None
    from kinfed.data import TablePreprocessing  # with pyarrow, which only tables need

    learnt = TablePreprocessing.from_json(record)
    return learnt if own is None else learnt.at_site(own)
