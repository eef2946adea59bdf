"""A model as an ONNX file, for runtimes without Python: raw rows in, probabilities out.

    inputs   of a table one per column, as they stand in it (below); of all other data "features"
             [rows, ...]: examples before scaling, float32 or int64; of several inputs one each, by its name or as
             "input 0", ..., float32, int64 or bool
    outputs  "probabilities" [rows, C] of classes, labels or outliving each period, or "prediction" [rows] of numbers
             and counts in the target's own unit
             "deviation" [rows] of models of lmm and glmm beside it: the standard deviation of the target around its
             prediction, in its own unit; of classes and counts that of the log odds or the log of the mean

The file's metadata say what belongs to it: `classes`, `features` (what columns become, names such as `cp=2`), `inputs`
(the whole of it, as in kinfed's own files), `sets` (thresholds of prediction sets by level: classes with 1 − p at most
that, and the likeliest; of numbers half the width of the interval; null holds everything) and all that the model says
of itself. PyTorch's exporter (torch.onnx, by
onnxscript) writes scaling and network, the helpers of the package onnx what columns become; nothing is checked with a
runtime here. The inputs of a table are called as their columns:

    number     float64 [rows, 1]     NaN is a missing cell; false and true are 0 and 1
    date       float64 [rows, 1]     days since 1970-01-01, with the time of day as a fraction; NaN is a missing cell
    category   text [rows, 1]        "" is a missing cell; numbers and dates that are categories as in the table
    text       float32 [rows, S]     scores by `ModelPipeline.encode`, which hashes words by BLAKE2b; ONNX does not

The graph is what kinfed.data.preprocessing.encodings does, in the standard operators and, for categories, LabelEncoder
of ai.onnx.ml, which runtimes for classical models have. Texts are compared as they are: trim blanks around them first.
All inputs are needed; a column that a table lacks is one of missing cells.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.core import storage
from kinfed.data import TablePreprocessing, encodings
from kinfed.errors import ConfigError, ModelError
from kinfed.serving import intervals
from kinfed.serving.pipeline import ModelPipeline

try:
    import onnxscript  # noqa: F401  # what torch's exporter is made with
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, compose, helper, numpy_helper
except ImportError as error:
    raise ConfigError(
        "ONNX files need the packages onnx and onnxscript, which are not installed: pip install 'kinfed[onnx]'"
    ) from error

ML = "ai.onnx.ml"
ML_VERSION = 2  # the first whose LabelEncoder maps texts to whole numbers
NETWORK, COLUMNS = "kinfed network/", "kinfed columns/"  # before names inside the graph: no column is called so


class _Answer(nn.Module):
    """The model behind its scaling: what is predicted, and how far it may be off where the model knows."""

    def __init__(self, pipeline: ModelPipeline) -> None:
        super().__init__()
        self.scaling, self.model = pipeline.with_scaling().children()
        self.problem, self.packing = pipeline.inputs.problem, pipeline.inputs.packing

    @property
    def knows_deviations(self) -> bool:
        return hasattr(getattr(self.model, "extension", None), "uncertainty") and self.problem.kind in intervals.KINDS

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x: Tensor = self.scaling(inputs[0] if self.packing is None else self.packing.joined(inputs))
        answer: Tensor = self.problem.predicted(self.model(x))
        if not self.knows_deviations:
            return answer
        spread, noise, _ = self.model.uncertainty(x)  # type: ignore[operator]  # of a model by sums
        scale = self.problem.scale if self.problem.is_regression else 1.0
        return answer, (spread + noise).sqrt() * scale


def write_onnx(pipeline: ModelPipeline, path: Path) -> None:
    """Write the model as one file, for any number of rows."""
    inputs, learnt = pipeline.inputs, pipeline.inputs.preprocessing
    network = _Answer(pipeline).eval()
    examples = {"features": torch.zeros(2, *inputs.shape, dtype=torch.int64 if inputs.tokens else torch.float32)}
    if inputs.packing is not None:
        empty = inputs.packing.unpack(torch.zeros(2, inputs.packing.numbers, dtype=inputs.packing.dtype))
        named = empty.items() if isinstance(empty, dict) else enumerate(empty)
        examples = {name if isinstance(name, str) else f"input {name}": value for name, value in named}
    outputs = ["probabilities" if inputs.problem.has_probabilities else "prediction"]
    outputs += ["deviation"] if network.knows_deviations else []
    try:
        with _quietly():
            program = torch.onnx.export(
                network, tuple(examples.values()), None, dynamo=True, verbose=False, external_data=False,
                input_names=list(examples), output_names=outputs,
                dynamic_shapes=(tuple({0: torch.export.Dim("rows")} for _ in examples),),
            )  # fmt: skip
    except Exception as error:  # of many kinds, for whatever a module does that ONNX cannot say
        kind, sentence = type(error).__name__, str(error).splitlines()[0] if str(error) else ""
        raise ModelError(
            f"PyTorch cannot write this model as ONNX ({kind}: {sentence}); export it as safetensors"
        ) from None
    assert program is not None
    model = program.model_proto if learnt is None else with_columns(program.model_proto, learnt)
    about = {**pipeline.about, "inputs": inputs.to_json(), "classes": json.dumps(pipeline.classes)}
    if learnt is not None:
        about["features"] = json.dumps(learnt.features)
    for name, text in about.items():
        model.metadata_props.add(key=name, value=text)
    storage.write_atomically(path, model.SerializeToString())


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter tells of packages that it does not need, and of its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def with_columns(network: ModelProto, learnt: TablePreprocessing) -> ModelProto:
    """The network, whose only input is what `learnt` encodes, with an input for every column instead."""
    model = compose.add_prefix(network, NETWORK, rename_outputs=False)
    (features,) = (one.name for one in model.graph.input)
    columns = ColumnGraph(learnt, features)
    names = [one.name for one in (*columns.inputs, *model.graph.output)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"names in an ONNX graph must be unique, and the column {twice[0]!r} repeats one; rename it")
    nodes = [*columns.nodes, *model.graph.node]
    del model.graph.input[:], model.graph.node[:]
    model.graph.input.extend(columns.inputs)
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(columns.constants)
    model.opset_import.append(helper.make_opsetid(ML, ML_VERSION))
    return model


class ColumnGraph:
    """The nodes, constants and inputs of all columns; `output` names what they make together."""

    def __init__(self, learnt: TablePreprocessing, output: str) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.inputs: list[ValueInfoProto] = []
        blocks: dict[int, list[str]] = {}
        lacking = {}
        for number, one in enumerate(learnt.used):
            self._prefix = f"{COLUMNS}{number}"
            if isinstance(one, encodings.OwnColumn):
                if one.here is None:
                    lacking[number] = one
                else:
                    blocks[number] = [self._effect(one, self._plain(one.here))]
            elif isinstance(one, encodings.TextEncoding):
                blocks[number] = [self._input(f"{one.name} score", TensorProto.FLOAT, len(one.features))]
            else:
                blocks[number] = self._plain(one)
        for number, one in lacking.items():  # zeros, as many as another column has rows
            other, of = next((inputs, learnt.used[place]) for place, inputs in blocks.items())
            self._prefix = f"{COLUMNS}{number}"
            blocks[number] = [self._product(other, np.zeros((len(of.features), len(one.features))))]
        self._node("Concat", [part for number in sorted(blocks) for part in blocks[number]], output=output, axis=1)

    def _plain(self, one: encodings.PlainEncoding) -> list[str]:
        if isinstance(one, encodings.NumberEncoding):
            return self._number(one)
        return self._date(one) if isinstance(one, encodings.DateEncoding) else self._category(one)

    def _effect(self, one: encodings.OwnColumn, parts: list[str]) -> str:
        whole = self._node("Concat", parts, axis=1)
        centre = self._constant(np.array(one.centre)[None], np.float32)
        return self._product([self._node("Sub", [whole, centre])], np.array(one.weights))

    def _product(self, parts: list[str], weights: Any) -> str:
        return self._node("MatMul", [self._node("Concat", parts, axis=1), self._constant(weights, np.float32)])

    def _number(self, one: encodings.NumberEncoding) -> list[str]:
        cells = self._input(one.name, TensorProto.DOUBLE, 1)
        missing = self._node("IsNaN", [cells])
        parts = [] if one.constant else [self._float(self._filled(cells, missing, one.mean or 0.0))]
        return [*parts, *([self._float(missing)] if one.gaps else [])]

    def _date(self, one: encodings.DateEncoding) -> list[str]:
        cells = self._input(one.name, TensorProto.DOUBLE, 1)
        missing = self._node("IsNaN", [cells])
        days = self._filled(cells, missing, one.mean)
        parts = [self._float(days)]
        for _, period in one.periods:
            turns = self._node("Div", [days, self._constant(period)])
            part = self._node("Sub", [turns, self._node("Floor", [turns])])
            angle = self._float(self._node("Mul", [part, self._constant(2 * pi)]))
            for circle in ("Sin", "Cos"):
                point = self._node(circle, [angle])
                parts.append(self._node("Where", [missing, self._constant(0.0, np.float32), point]))
        return [*parts, *([self._float(missing)] if one.gaps else [])]

    def _category(self, one: encodings.CategoryEncoding) -> list[str]:
        cells = self._input(one.name, TensorProto.STRING, 1)
        known, missing, other = one.places()
        names, places = [*known, ""], [*known.values(), missing]
        place = self._node(
            "LabelEncoder", [cells], domain=ML, keys_strings=names, values_int64s=places, default_int64=other
        )
        every = self._constant(np.arange(len(one.features)), np.int64)
        return [self._float(self._node("Equal", [place, every]))]

    def _filled(self, cells: str, missing: str, value: float) -> str:
        return self._node("Where", [missing, self._constant(value), cells])

    def _float(self, value: str) -> str:
        return self._node("Cast", [value], to=TensorProto.FLOAT)

    def _input(self, name: str, kind: int, width: int) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, ["rows", width]))
        return name

    def _constant(self, value: Any, kind: Any = np.float64) -> str:
        name = f"{self._prefix}/constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    def _node(self, operator: str, inputs: Sequence[str], output: str = "", domain: str = "", **options: Any) -> str:
        output = output or f"{self._prefix}/{operator} {len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], domain=domain, **options))
        return output
