"""Requests to sites beside training: what tables are like ("describe"), and how models do there ("evaluate").

    <out>/deployment.json                 the clients
    <out>/describe.json, describe.html    rows, gaps, means and categories by site, and what looks like other units
    <out>/evaluate.json, evaluate.html    every model at every site

One message to every site. A site that is missing, or whose owner refuses, is named; the others are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.server.answer_checks import check_same_request, is_number
from kinfed.deploy.server.enrol import Roster, TooFewClients, enrol_clients
from kinfed.deploy.server.question_pages import description_page, doubts, matrix_page, matrix_table
from kinfed.deploy.settings import DESCRIBE, Deployment
from kinfed.deploy.transport.exchange import Exchange
from kinfed.deploy.transport.wire import DESCRIBE as ASK_DESCRIPTION
from kinfed.deploy.transport.wire import SCORE, MessageError, Packet, plain_text
from kinfed.engine import METRICS
from kinfed.errors import ConfigError
from kinfed.report import write_page
from kinfed.serving import ModelPipeline

MOST_COLUMNS, MOST_CATEGORIES = 100_000, 10_000
LONGEST_NAME = 200  # characters of a column or a category
KINDS = ("number", "boolean", "date", "unreadable", "category", "text", "empty", "")


class QuestionServer:
    def __init__(self, deployment: Deployment, exchange: Exchange, folder: Path) -> None:
        self.deployment, self.exchange, self.folder = deployment, exchange, folder

    def execute(self) -> Path:
        """Ask, write what came, and return its page."""
        run, roster = enrol_clients(self.deployment, self.exchange, self.folder / "deployment.json")
        if self.deployment.question == DESCRIBE:
            return self._describe(run, roster)
        return self._evaluate(run, roster)

    def _describe(self, run: str, roster: Roster) -> Path:
        sites = self._ask(ASK_DESCRIPTION, run, roster, Packet(), read_description)
        storage.write_json(self.folder / "describe.json", {"run": run, "sites": sites})
        for sentence in doubts(sites):
            self.exchange.say(sentence)
        return write_page(self.folder / "describe.html", description_page(sites, self.missing))

    def _evaluate(self, run: str, roster: Roster) -> Path:
        models = read_models(self.deployment.judged)
        records = {name: {**one.about, "inputs": one.inputs.to_json()} for name, one in models.items()}
        groups = {name: dict(one.module.state_dict()) for name, one in models.items()}
        question = Packet({"models": records, "split": "test"}, groups)
        known = [metric.name for metric in METRICS.of_problem(self.deployment.problem)]
        sites = self._ask(SCORE, run, roster, question, lambda answer: read_scores(answer, list(models), known))
        headline = METRICS.headline(self.deployment.problem, self.deployment.run_settings.get("metric")).name
        record = {"run": run, "metric": headline, "models": list(models), "sites": sites}
        storage.write_json(self.folder / "evaluate.json", record)
        for line in matrix_table(record, headline).markdown().splitlines():
            self.exchange.say(line)
        return write_page(self.folder / "evaluate.html", matrix_page(record, self.missing))

    def _ask(
        self, kind: str, run: str, roster: Roster, question: Packet, read: Callable[[Packet], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Answers by site; why others have given none is in `missing`."""
        answers: dict[str, dict[str, Any]] = {}
        orders = {
            name: Packet({"kind": kind, "run": run, "round": 0, "number": k, "name": name, **question.header},
                         question.groups)
            for k, name in enumerate(roster.names)
        }  # fmt: skip

        def take(name: str, answer: Packet) -> None:
            check_same_request(orders[name], answer)
            answers[name] = read(answer)

        self.missing = self.exchange.request(kind, orders, self.deployment.deadline, take)
        for name, reason in sorted(self.missing.items()):
            self.exchange.say(f"without {name}: {reason}")
        if not answers:
            raise TooFewClients(f"no site has answered; {min(self.missing.items())}")
        return {name: answers[name] for name in roster.names if name in answers}


def read_models(places: str) -> dict[str, ModelPipeline]:
    """Models by name, from files or a folder of them."""
    paths: list[Path] = []
    for place in (Path(one.strip()).expanduser() for one in places.split(",") if one.strip()):
        paths += sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not paths:
        raise ConfigError(f"{places} holds no .safetensors files; write some with kinfed export")
    if len({path.stem for path in paths}) < len(paths):
        raise ConfigError("two models have the same name; a model has the name of its file")
    return {path.stem: ModelPipeline.read(path) for path in paths}


def read_description(answer: Packet) -> dict[str, Any]:
    """What a site says of its table; MessageError if it is no description."""
    record = answer.require("description", dict)
    columns = record.get("columns")
    if not _is_count(record.get("rows")) or not isinstance(columns, dict) or len(columns) > MOST_COLUMNS:
        raise MessageError("a description has rows and columns")
    read: dict[str, Any] = {}
    for name, column in columns.items():
        if not isinstance(column, dict) or column.get("kind") not in KINDS or not 0 < len(name) <= LONGEST_NAME:
            raise MessageError("a column of a description has a name and a kind")
        own: dict[str, Any] = {"kind": column["kind"]}
        missing = column.get("missing")
        if missing is not None and not (_is_count(missing) and missing <= record["rows"]):
            raise MessageError(f"column {name}: gaps are counted in rows")
        own["missing"] = missing
        if moments := column.keys() & {"mean", "deviation"}:
            if len(moments) < 2 or not all(is_number(column[key]) for key in moments):
                raise MessageError(f"column {name}: its mean and deviation are two numbers")
            own |= {key: float(column[key]) for key in moments}
        if "categories" in column:
            own["categories"] = _categories(name, column["categories"])
            others = column.get("others")
            if not isinstance(others, list) or len(others) != 2 or not all(map(_is_count, others)):
                raise MessageError(f"column {name}: others are two counts")
            own["others"] = others
        read[plain_text(name, LONGEST_NAME)] = own
    return {"rows": record["rows"], "columns": read, "terms": plain_text(answer.require("terms", str))}


def _categories(column: str, record: Any) -> dict[str, int]:
    if not isinstance(record, dict) or len(record) > MOST_CATEGORIES or not all(map(_is_count, record.values())):
        raise MessageError(f"column {column}: categories are counts by name")
    return {plain_text(name, LONGEST_NAME): count for name, count in record.items()}


def read_scores(answer: Packet, models: list[str], metrics: list[str]) -> dict[str, Any]:
    """Values of metrics by model at a site; MessageError if they are none."""
    rows = answer.require("rows", int)
    if rows < 1 or answer.groups.keys() - set(models):
        raise MessageError("scores of the models that were sent, on some rows")
    scores: dict[str, dict[str, float | None]] = {}
    for name in models:
        own = answer.group(name)
        if own.keys() - set(metrics) or any(tuple(pair.shape) != (2,) for pair in own.values()):
            raise MessageError("scores are two sums for every metric")
        if not all(bool(pair.isfinite().all()) for pair in own.values()):
            raise MessageError("scores are finite sums")
        scores[name] = {metric: _value(metric, pair) for metric, pair in own.items()}
    return {"rows": rows, "scores": scores, "terms": plain_text(answer.require("scores", str))}


def _value(metric: str, sums: Any) -> float | None:
    value = float(METRICS.named(metric).value(sums.double()))
    return value if math.isfinite(value) else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
