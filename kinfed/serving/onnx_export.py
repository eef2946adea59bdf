"""A model as an ONNX file, for runtimes without Python: raw rows in, probabilities out.

    inputs   of a table one per column, as they stand in it (kinfed.serving.onnx_columns); of all other data "features"
             [rows, ...]: examples before scaling, float32 or int64
    output   "probabilities" [rows, C], or of a regression "prediction" [rows] in the target's own unit

The file's metadata say what belongs to it: `classes`, `features` (what columns become, names such as `cp=2`), `inputs`
(the whole of it, as in kinfed's own files) and all that the model says of itself. PyTorch's exporter (torch.onnx, by
onnxscript) writes scaling and network, the helpers of the package onnx what columns become; nothing is checked with a
runtime here.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from kinfed.core import storage
from kinfed.data import Problem
from kinfed.errors import ConfigError, ModelError
from kinfed.serving.pipeline import ModelPipeline

try:
    import onnxscript  # noqa: F401  # what torch's exporter is made with

    from kinfed.serving.onnx_columns import with_columns
except ImportError as error:
    raise ConfigError(
        "ONNX files need the packages onnx and onnxscript, which are not installed: pip install 'kinfed[onnx]'"
    ) from error


class _Answer(nn.Module):
    """Turns outputs of the network into predictions."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem

    def forward(self, outputs: Tensor) -> Tensor:
        if self.problem.is_regression:
            return outputs[:, 0] * self.problem.scale + self.problem.mean
        return torch.softmax(outputs, 1)


def write_onnx(pipeline: ModelPipeline, path: Path) -> None:
    """Write the model as one file, for any number of rows."""
    inputs, learnt = pipeline.inputs, pipeline.inputs.preprocessing
    network = nn.Sequential(pipeline.with_scaling(), _Answer(inputs.problem)).eval()
    example = torch.zeros(2, *inputs.shape, dtype=torch.int64 if inputs.tokens else torch.float32)
    output = "prediction" if inputs.problem.is_regression else "probabilities"
    try:
        with _quietly():
            program = torch.onnx.export(
                network, (example,), None, dynamo=True, verbose=False, external_data=False, input_names=["features"],
                output_names=[output], dynamic_shapes=({0: torch.export.Dim("rows")},),
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
