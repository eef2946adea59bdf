"""Models of a finished run, without the code that trained them.

A run folder holds all personal models of a method as one matrix [K, P] and, in model.json, the name and shape of
every parameter in a row; together they give a state dict for plain PyTorch.

A row of FedEM is a mixture (kinfed.engine.personal.personal_models): its state dict has the K models as components.0
..., and their weights as pi, and fits a MixtureModule. That of a model with an extension has the model's parameters
under "model." and the rest as "extra", and fits an ExtendedModule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kinfed.core import storage
from kinfed.engine import Architectures, ModuleTask, named_parameters
from kinfed.errors import ConfigError, ModelError, StorageError
from kinfed.records import Models, RunFiles, client_number
from kinfed.serving.model_inputs import ModelInputs


@dataclass(frozen=True)
class Exported:
    path: Path
    summary: str


def save_layout(folder: Path, name: str, models: ModuleTask | Architectures) -> None:
    """Write model.json once per run and, if there are any, frozen parameters and constant buffers. Where clients have
    several architectures, it is the server's, with the layouts of all and the width of rows side by side."""
    task = models.server_task
    assert isinstance(task, ModuleTask)
    layout, buffers = _layout(name, task), _buffers(task)
    if isinstance(models, Architectures):
        parts = dict(zip(models.names, models.tasks, strict=True))
        layout["architectures"] = {label: _layout(label, one) for label, one in parts.items()}
        layout["side_by_side"] = models.num_params
        buffers = {f"{label}.{key}": value for label, one in parts.items() for key, value in _buffers(one).items()}
    storage.write_json(folder / "model.json", layout)
    if buffers:
        storage.make_folder(folder / "models")
        storage.write_tensors(RunFiles(folder).buffers_path, buffers)


def _layout(name: str, task: ModuleTask) -> dict[str, Any]:
    layers = [{"name": layer.name, "shape": list(layer.shape)} for layer in task.slots]
    return {
        "model": name, "parameters": task.num_params, "layers": layers, "aliases": task.aliases(),
        "constants": task.constants_digest(), "backend": task.backend,
    }  # fmt: skip


def _buffers(task: ModuleTask) -> dict[str, Tensor]:
    in_row = {slot.name for slot in task.slots} | task.aliases().keys()
    return {key: value for key, value in task.state_dict(task.init(0)).items() if key not in in_row}


def architecture_of(run: RunFiles, row: Tensor) -> str | None:
    """The architecture of a client's row, where a run has several; None of one alone, and of the server's model."""
    layout = run.layout()
    if len(row) != layout.get("side_by_side"):
        return None
    names: list[str] = list(layout["architectures"])
    return names[int(row[-1])]


def state_dict(run: RunFiles, row: Tensor) -> dict[str, Tensor]:
    """State dict for `module.load_state_dict`, of one row of a run's models."""
    layout = run.layout()
    buffers = run.buffers()
    if "architectures" in layout:
        name = architecture_of(run, row) or next(iter(layout["architectures"]))
        layout = layout["architectures"][name]
        row = row[: layout["parameters"]]
        buffers = {key.removeprefix(f"{name}."): t for key, t in buffers.items() if key.startswith(f"{name}.")}
    try:
        return named_parameters(row, layout["parameters"], lambda plain: _parameters(layout, plain) | buffers)
    except (ModelError, AttributeError, KeyError, TypeError) as error:  # a stranger's file
        raise StorageError(f"{run.path / 'model.json'} does not describe these models: {error}") from error


def _parameters(layout: Mapping[str, Any], row: Tensor) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    position = 0
    for layer in layout["layers"]:
        size = math.prod(layer["shape"])
        out[layer["name"]] = row[position : position + size].reshape(layer["shape"]).clone()
        position += size
    return out | {name: out[first].clone() for name, first in layout.get("aliases", {}).items()}


def export_model(
    folder: Path, client: str | None, algorithm: str | None = None, seed: int | None = None, out: Path | None = None
) -> Exported:
    """Write the client's personal model, or without a client the server's, as a state dict in safetensors, with what it
    must be fed in the file's head:

    ModelPipeline.read(path).predict(rows)                              raw rows in (kinfed.serving.pipeline)
    module.load_state_dict(safetensors.torch.load_file(path))           the plain module, fed encoded and scaled rows"""
    run = TrainedModels.open(folder, algorithm, seed)
    tensors, about = run.parts(client)
    name = storage.file_name(f"{run.algorithm}-{run.seed}-{client or 'server'}", any_letters=True)
    path = out or Path(f"{name}.safetensors")
    storage.write_tensors(path, tensors, about)
    note = ""
    if about.get("took_part", str(True)) != str(True):
        note = "; the client took part in no round" + (
            ", so nothing of its own is in this model" if run.models.server is None else ": this is the server's model"
        )
    parameters = run.models.personal.shape[1]
    if (label := about.get("architecture")) is not None:
        parameters = run.run.layout()["architectures"][label]["parameters"]
    return Exported(path, f"{about['model']}, {parameters} parameters" + note)


Parts = tuple[dict[str, Tensor], dict[str, str]]  # the state dict of a model, and what a file says about it


@dataclass(frozen=True)
class TrainedModels:
    """Models of one method and seed of a finished run."""

    run: RunFiles
    algorithm: str
    seed: int
    models: Models

    @classmethod
    def open(cls, folder: Path, algorithm: str | None, seed: int | None) -> TrainedModels:
        """Models of the only method, and of the first seed, if none is named."""
        run = RunFiles(folder)
        label, number = run.label(algorithm), run.seed(seed)
        return cls(run, label, number, run.models(label, number))

    def parts(self, client: str | None) -> Parts:
        """The client's model; without a client the server's, or an error where it has not one for all clients."""
        names = self.run.description(self.seed).names
        if client is not None:
            number = client_number(names, client)
            row = self.models.personal[number]
            about = {
                "client": client,
                **self._about(row, client),
                "took_part": str(bool(self.models.took_part[number])),
            }
            return state_dict(self.run, row), about
        if (parts := self.server_parts()) is None:
            raise ConfigError(
                f"{self.algorithm} has no model of the server's for all clients; name a --client, one of "
                f"{', '.join(names[:5])}" + (", ..." if len(names) > 5 else "")
            )
        return parts

    def server_parts(self) -> Parts | None:
        row = self.models.server_model
        return None if row is None else (state_dict(self.run, row), self._about(row))

    def _about(self, row: Tensor, client: str | None = None) -> dict[str, str]:
        return {"algorithm": self.algorithm, "seed": str(self.seed), **about_model(self.run, self.seed, row, client)}


def about_model(run: RunFiles, seed: int, row: Tensor, client: str | None = None) -> dict[str, str]:
    """What a file says of a model: its name, its architecture if a run has several, and its inputs; those of a client
    with its own columns."""
    name, architecture, options = run.layout()["model"], {}, run.model_options
    if (label := architecture_of(run, row)) is not None:
        model = run.config.model_of(label)
        name, options, architecture = model.name, model.options, {"architecture": label}
    inputs = ModelInputs.of_description(run.description(seed), options, client).to_json()
    return {"model": name, **architecture, "inputs": inputs}
