"""What a node answers beside training: what its table is like (method = "describe"), and how models that a server
brings do on its rows (method = "evaluate"). Both leave by the gate, with rules and prices of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.data import Problem, TableStatistics, parse_kinds
from kinfed.data.sources import is_table, read_table
from kinfed.deploy.node.gate import LARGEST_LOSS, Noise
from kinfed.deploy.node.node import NodeClient
from kinfed.deploy.node.node_data import ClientData, load_client_data
from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.node.requests import own_files
from kinfed.deploy.node.site_description import codes_of, described
from kinfed.deploy.settings import DESCRIBE
from kinfed.deploy.transport import wire
from kinfed.deploy.transport.wire import EXACT, MessageError, Packet
from kinfed.engine import METRICS, Judged, make_objective
from kinfed.errors import ModelError
from kinfed.privacy import Event
from kinfed.serving import ModelPipeline

if TYPE_CHECKING:
    import pyarrow as pa

MOST_MODELS = 200  # in a message


class QuestionClient(NodeClient):
    """A client that is asked, and trains nothing."""

    def shape_of_data(self) -> dict[str, Any]:
        if self.deployment.question != DESCRIBE:
            return super().shape_of_data()
        # Nothing yet: not all tables have the columns of a run, and counts leave by the description's rules.
        return {"columns": [], "counts": [0, 0, 0], "shape": [1], "rows": 0, "tokens": False, "own_roles": False}

    def answer(self, kind: str, order: Packet) -> Packet:
        answers = {wire.DESCRIBE: self.describe, wire.SCORE: self.score}
        if kind not in answers:
            raise MessageError(f"a request of kind {kind}, and nothing is trained here")
        return answers[kind](order)

    # ---- before any model ----

    def describe(self, order: Packet) -> Packet:
        """Rows, gaps, moments and categories of the whole table, without small counts; under privacy noised gaps."""
        rules = self.settings.rules
        table, names, codes = self._columns()
        statistics = TableStatistics.of_table(table, names, codes, self.settings.data)
        self.gate.check_describe(statistics.rows)
        if not rules.demands_privacy or rules.sums:
            led = TableStatistics.led_by_one(table, names, codes, self.settings.data)
            header = self._reply_header(order) | {
                "description": described(statistics, rules.smallest_count, led),
                "terms": EXACT,
            }
            rule = f"a description, counts from {rules.smallest_count} on"
            return self.gate.release(wire.DESCRIBE, Packet(header), rule, order.require("run", str))
        names = list(statistics.columns)
        counts = [statistics.rows, *(column.missing for column in statistics.columns.values())]

        def noised(noise: Noise) -> Packet:
            sums = torch.tensor([counts], dtype=torch.float64)
            rows, *gaps = (sums + noise(sums))[0].round().clamp_min(0).to(torch.int64).tolist()
            columns = {name: {"kind": "", "missing": min(gap, rows)} for name, gap in zip(names, gaps, strict=True)}
            header = self._reply_header(order) | {"description": {"rows": rows, "columns": columns}}
            return Packet(header | {"terms": f"noise {rules.evaluation_noise:g}"})

        return self.gate.at_price(
            wire.DESCRIBE, order, self._entry(order), (Event(1.0, 1, 1),), noised, data=statistics.to_json()
        )

    def _columns(self) -> tuple[pa.Table, list[str], dict[str, Any]]:
        """The table, its columns that the owner does not leave out, and which of them hold categories. The run has no
        say in kinds: a column that is told as numbers to one, and as categories to another, would tell small counts
        between the two."""
        settings, name = self.settings, self.name
        if not is_table(settings.data):
            raise Refused(f"{name} has arrays, and tables are what is described")
        options, table = settings.table_options, read_table(Path(settings.data))
        roles = options.split_column, options.person_column, options.weight_column, options.image_column
        left_out = {*options.ignored, *roles}
        names = [column for column in table.column_names if column not in left_out]
        return table, names, parse_kinds({column: "category" for column in codes_of(table, names)})

    # ---- models that a server brings ----

    def score(self, order: Packet) -> Packet:
        """Sums of all metrics of every model on the client's rows; under privacy noised ones of hits and losses."""
        split, rules = order.require("split", str), self.settings.rules
        self.gate.check_split(split)
        own = load_client_data(self.settings, self.deployment)
        rows = own.federation.split(split).rows
        self.gate.check_judged(len(rows))
        models = _models_of(order, self.settings.weights)
        judged = {name: self._judged(own, rows, model) for name, model in models.items()}
        if not rules.noises_scores:
            metrics = METRICS.of_problem(own.federation.problem)
            groups = {name: _sums(one, metrics) for name, one in judged.items()}
            header = self._reply_header(order) | {"scores": EXACT, "rows": len(rows)}
            rule = f"scores of {len(models)} models on {split} rows"
            return self.gate.release(wire.SCORE, Packet(header, groups), rule, order.require("run", str))

        def noised(noise: Noise) -> Packet:
            sums = torch.stack([_bounded(one) for one in judged.values()])  # [M, 2]
            hits, losses = (sums + noise(sums)).T
            correct = hits.round().clamp(0, len(rows))
            loss = LARGEST_LOSS * (100 * losses).round().clamp(0, 100 * len(rows)) / 100
            groups = {}
            for place, (name, one) in enumerate(judged.items()):
                count = torch.tensor(float(len(rows)), dtype=torch.float64)
                pairs = {"accuracy": correct[place], "log_loss": loss[place]} if one.problem.classifies else {}
                groups[name] = {metric: torch.stack([value, count]) for metric, value in pairs.items()}
            header = self._reply_header(order) | {"scores": f"noise {rules.evaluation_noise:g}", "rows": len(rows)}
            return Packet(header, groups)

        if not own.federation.problem.classifies:
            raise Refused(f"errors of numbers have no bound that noise could hide; {self.name} keeps them")
        data = {"rows": storage.checksum({"rows": rows, "labels": own.federation.labels})}
        events = (Event(1.0, 1, len(models)),)
        return self.gate.at_price(wire.SCORE, order, self._entry(order), events, noised, data=data)

    def _judged(self, own: ClientData, rows: Tensor, model: ModelPipeline) -> Judged:
        problem, labels = own.federation.problem, own.federation.labels[rows].numpy()
        theirs = model.inputs.problem
        if (theirs.kind, theirs.class_names) != (problem.kind, problem.class_names):
            raise MessageError(f"a model of {theirs.in_words()}, and the run is of {problem.in_words()}")
        outputs = _outputs(model, self._inputs(own), rows)
        outputs = theirs.restored(outputs) if theirs.is_regression else outputs
        in_unit = Problem.of_numbers() if problem.is_regression else problem
        return Judged(outputs.numpy(), labels, np.zeros(len(rows), np.int64), 1, in_unit)

    def _inputs(self, own: ClientData) -> Any:
        return read_table(Path(self.settings.data)) if own.table is not None else own.federation.features.raw


def _models_of(order: Packet, folder: str) -> dict[str, ModelPipeline]:
    """The models in a message: kinds that are installed here, with the numbers that came. Files that they are made from
    are those of the owner's `folder`."""
    records = order.require("models", dict)
    if not 0 < len(records) <= MOST_MODELS:
        raise MessageError(f"1 to {MOST_MODELS} models are judged at a time; got {len(records)}")
    models = {}
    for name, about in records.items():
        if not isinstance(about, dict) or not all(isinstance(about.get(key), str) for key in ("model", "inputs")):
            raise MessageError("a model comes with its kind and its inputs")
        try:
            models[name] = ModelPipeline.from_parts(order.group(name), _with_own_files(about, folder), "the message")
        except ModelError as error:
            raise MessageError(str(error)) from None
    return models


def _with_own_files(about: dict[str, Any], folder: str) -> dict[str, Any]:
    """The description of a model and of the parts of a mixture, with files of this machine alone."""
    try:
        inputs, parts = json.loads(about["inputs"]), json.loads(about.get("parts", "[]"))
        inputs["options"] = own_files(about["model"], inputs["options"], folder)
        for part in parts:
            part["options"] = own_files(part["model"], part["options"], folder)
    except (ValueError, LookupError, TypeError):
        raise MessageError("a model whose inputs cannot be read") from None
    return {**about, "inputs": json.dumps(inputs), "parts": json.dumps(parts)}


@torch.no_grad()
def _outputs(model: ModelPipeline, inputs: Any, rows: Tensor) -> Tensor:
    """[T, C] what the model says of some rows."""
    features, _ = model.encode(inputs, "the data of the client")
    return torch.cat([model.module(features.gather(part)).double() for part in torch.split(rows, 1000)])


def _sums(judged: Judged, metrics: list[Any]) -> dict[str, Tensor]:
    """Numerator and denominator [2] by metric."""
    pairs = {metric.name: metric.sums(judged) for metric in metrics}
    return {
        name: torch.tensor([float(one[0][0]), float(one[1][0])], dtype=torch.float64) for name, one in pairs.items()
    }


def _bounded(judged: Judged) -> Tensor:
    """[2] how many rows are right, and the sum of losses in units of the largest that counts."""
    outputs, target = torch.from_numpy(judged.output), torch.from_numpy(judged.target)
    losses = make_objective(judged.problem).losses(outputs, target).nan_to_num(LARGEST_LOSS, LARGEST_LOSS)
    return torch.stack(
        [(outputs.argmax(-1) == target).sum(), losses.clamp(0, LARGEST_LOSS).sum() / LARGEST_LOSS]
    ).double()
