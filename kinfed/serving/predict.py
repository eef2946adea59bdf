"""Predictions of one model for the examples of a file; no server, no run, no training code.

predictions = predict(ModelPipeline.read("hospital-a.safetensors"), "new.csv")
predictions.labels, predictions.probabilities                  [n] names of classes, [n, C]
"""

import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from kinfed.data import Packing, TablePreprocessing
from kinfed.data.sources import is_table, load_inputs, read_table
from kinfed.engine import MODELS, Builder
from kinfed.errors import DataError
from kinfed.serving.export import TrainedModels
from kinfed.serving.pipeline import ModelPipeline, Predictions


def model_of_run(
    folder: Path, client: str | None, algorithm: str | None = None, seed: int | None = None,
    build: Builder | None = None,
) -> ModelPipeline:  # fmt: skip
    """A client's personal model of a finished run, or without a client the server's. `build` makes the module where it
    is not one of kinfed's own."""
    trained = TrainedModels.open(folder, algorithm, seed)
    _check_code(trained, build)
    return ModelPipeline.from_parts(*trained.parts(client), str(folder), build)


def server_model_of_run(
    folder: Path, algorithm: str | None = None, seed: int | None = None, build: Builder | None = None
) -> ModelPipeline | None:
    """The server's model of a finished run, where it has one for all clients."""
    trained = TrainedModels.open(folder, algorithm, seed)
    _check_code(trained, build)
    parts = trained.server_parts()
    return None if parts is None else ModelPipeline.from_parts(*parts, str(folder), build)


def _check_code(trained: TrainedModels, build: Builder | None) -> None:
    """A model that is not one of kinfed's is made by the code of a plugin, which must be named, and be the run's."""
    name = trained.run.layout()["model"]
    if build is None and (name not in MODELS or not MODELS.is_own(name)):
        trained.run.trusted_settings  # noqa: B018  (it refuses other plugins, and tells how to name the right ones)


def predict(
    model: ModelPipeline, table: Path | str, *, image_column: str | None = None, ignore: tuple[str, ...] | str = (),
    name_column: str | None = None, level: float | None = None,
) -> Predictions:  # fmt: skip
    """Predictions for every row of a table (.csv, .parquet, ...), or of x or a model's several inputs in an .npz file.

    Columns are found by their names, in any order; other columns do not matter. `name_column` names the rows. `ignore`
    is for models whose training data had no column names. `level` asks for prediction sets."""
    path = Path(table)
    if not is_table(str(path)):
        return model.predictions(_arrays(path, model.inputs.packing), where=str(path), level=level)
    rows = _read(path)
    names = None if name_column is None else _texts(rows, name_column, path)
    return model.predictions(_examples(model, rows, path, image_column, ignore), names, str(path), level)


def predict_by_client(
    model_of: Callable[[str | None], ModelPipeline], known: Collection[str], table: Path | str, client_column: str,
    name_column: str | None = None, level: float | None = None,
) -> Predictions:  # fmt: skip
    """Predictions for every row of a table by the model of the client that the row's cell names; `model_of(None)`, the
    server's, predicts for clients that are not `known`."""
    path = Path(table)
    rows = _read(path)
    clients = _texts(rows, client_column, path)
    names = None if name_column is None else _texts(rows, name_column, path)
    strangers = sorted(set(clients) - set(known))
    notes: dict[str, None] = {}
    if strangers:
        first = ", ".join(strangers[:5]) + (", ..." if len(strangers) > 5 else "")
        notes[f"rows of clients that were not there ({first}) are predicted by the server's model"] = None
    places: dict[str | None, list[int]] = {}
    for place, client in enumerate(clients):
        places.setdefault(client if client in known else None, []).append(place)
    parts = []
    for owner, rows_of_owner in places.items():
        where = f"{path} (rows of {owner or 'other clients'})"
        parts.append(model_of(owner).predictions(rows.take(rows_of_owner), where=where, level=level))
        notes |= dict.fromkeys(parts[-1].notes)
    order = torch.tensor([place for rows_of_owner in places.values() for place in rows_of_owner]).argsort()
    outputs = torch.cat([part.outputs for part in parts])[order]
    ends, reach = None, None
    if parts[0].ends is not None:
        ends = torch.cat([torch.as_tensor(part.ends) for part in parts])[order]
    elif level is not None:
        reach = torch.cat([torch.as_tensor(part.threshold) for part in parts])[order]
    return Predictions(parts[0].problem, outputs, names, list(notes), reach, ends)


def _read(path: Path) -> pa.Table:
    rows = read_table(path)
    if rows.num_rows == 0:
        raise DataError(f"{path} has a header but no rows")
    return rows


def _texts(rows: pa.Table, column: str, path: Path) -> list[str]:
    if column not in rows.column_names:
        raise DataError(f"{path} has no column {column!r}; it has {', '.join(rows.column_names)}")
    return ["" if value is None else str(value).strip() for value in rows[column].to_pylist()]


def _examples(
    model: ModelPipeline, rows: pa.Table, path: Path, image_column: str | None, ignore: tuple[str, ...] | str
) -> Any:
    if image_column is not None or model.inputs.text is not None:
        return load_inputs(path, image_column, model.inputs.text)[0].raw
    if model.inputs.preprocessing is not None:
        return rows
    left_out = tuple(name.strip() for name in ignore.split(",")) if isinstance(ignore, str) else ignore
    names = [name for name in rows.column_names if name not in left_out]  # of a model of arrays without names: numbers
    if not names:
        raise DataError(f"{path} has no feature columns left")
    return TablePreprocessing.plain(names).encode(rows, str(path)).raw


def _arrays(path: Path, packing: Packing | None) -> Any:
    """x of a file; of several inputs arrays by name, or those that numpy.savez(path, a, b) calls arr_0, arr_1."""
    if path.suffix.lower() != ".npz":
        raise DataError(f"new examples come as a table (.csv, .tsv, .parquet) or as x in an .npz file; got {path}")
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one array and is no .npz file; write it with numpy.savez(path, x=...)")
            if packing is not None:
                names = packing.names or [f"arr_{number}" for number in range(len(packing.inputs))]
                inputs = {name: arrays[name] for name in names}
                return inputs if packing.names else tuple(inputs.values())
            x: np.ndarray[Any, Any] = arrays["x"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        what = "x" if packing is None else f"the model's inputs ({packing.in_words()})"
        raise DataError(f"cannot read {what} from {path}: {error}; write it with numpy.savez(path, x=...)") from None
    if x.dtype.kind not in "biuf" or x.ndim < 2 or not x.size:
        raise DataError(f"x of {path} should hold one row of numbers per example; got {x.dtype} of shape {x.shape}")
    return x
