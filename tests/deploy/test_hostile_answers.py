"""Whatever a site answers is read, or refused in its name: no value of an answer ends a run for everybody."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from kinfed.data import Problem, TableStatistics
from kinfed.deploy.server.question_pages import description_page, matrix_page
from kinfed.deploy.server.question_server import read_description, read_scores
from kinfed.deploy.server.search_answers import (
    joined_choices,
    learnt_parts,
    read_advantages,
    read_figures,
    read_settled,
    read_statistics,
)
from kinfed.deploy.transport.wire import FORMAT, MessageError, Packet
from kinfed.engine.scoring.metrics import METRICS
from kinfed.errors import DataError
from kinfed.tabular.home_search import ChosenTries
from kinfed.tabular.portfolio import Contender

VALUES: list[Any] = [
    None, True, -1, 0, 10**400, -(10**400), 1e308, -1e308, float("inf"), float("nan"), "", "\x1b[2J<b>", [], {}, [[]],
    {"a": 1}, [10**400], [None] * 3, ["a"] * 3, [float("nan")] * 3, [float("inf")] * 3, [1e308] * 3, [True] * 3,
]  # fmt: skip
TENSORS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t * float("nan"), lambda t: t * 0 + float("inf"), lambda t: t * 0 + 1e308, lambda t: t * 0 - 1e308,
    lambda t: t * 0 - 1, lambda t: t[:0], lambda t: t[None], lambda t: t.to(torch.int64) - 2**62, lambda t: t.bool(),
]  # fmt: skip

TABLE = pa.table({"age": [50.0, 61.0, None, 40.0], "ward": ["a", "b", "a", "a"]})
STATISTICS = TableStatistics.of_table(TABLE, ["age", "ward"], {}, "west").to_json()
PART = {
    "statistics": STATISTICS, "target": {"count": 4, "mean": 1.0, "square": 2.0}, "counts": [4, 0, 1],
    "validated": [3, 1, 1],
}  # fmt: skip
ESTIMATE = {"value": 0.1, "low": -0.1, "high": 0.3, "at_least": 0.0}
SETTLED = {
    "taken": "alone", "rows": [4, 4, 1], "test_gain": [0.1, 0.2], "gain": ESTIMATE, "gain_chosen": ESTIMATE,
    "own_columns": [["dose", True, 0.1, 0.05]],
}  # fmt: skip
DESCRIBED = {"terms": "exact", "description": {"rows": 60, "columns": {
    "age": {"kind": "number", "missing": 3, "mean": 50.0, "deviation": 9.0},
    "ward": {"kind": "category", "missing": None, "categories": {"a": 40}, "others": [2, 20]},
}}}  # fmt: skip
SUMS = {"east": {name: torch.tensor([3.0, 4.0]) for name in ("accuracy", "log_loss")}}
SEEN = {"advantages": {"seen": torch.tensor([0.1, 0.2]).double(), "covariance": torch.eye(2).double()}}
CONTENDERS = [Contender("alone", "local", "personal"), Contender("one_model", "fedavg", "server")]


def described(answer: Packet) -> None:
    read = read_description(answer)
    description_page({"east": read_description(Packet(DESCRIBED)), "north": read, "west": read}, {})


def scored(answer: Packet) -> None:
    sites = {"west": read_scores(answer, ["east"], ["accuracy", "log_loss"])}
    matrix_page({"metric": "accuracy", "models": ["east"], "sites": sites}, {})


def judged(answer: Packet) -> None:
    tried = {(name, 0): (2.0, 4.0) for name in ("alone", "one_model")}
    ChosenTries.of(METRICS.named("log_loss"), CONTENDERS, 1, [tried, read_figures(answer)])


def weighed(answer: Packet) -> None:
    answers = {0: read_advantages(Packet({}, SEEN), 2), 1: read_advantages(answer, 2)}
    joined_choices(["one_model", "fine_tuned"], ["east", "west"], answers)


def learnt(answer: Packet) -> None:
    of_sites = [read_statistics(Packet({"parts": [PART, PART]}), 1, 5, 1e6), read_statistics(answer, 1, 5, 1e6)]
    learnt_parts(of_sites, Problem.of_numbers(), None, ("y",))


READERS: dict[str, tuple[Packet, Callable[[Packet], Any]]] = {
    "describe": (Packet(DESCRIBED), described),
    "score": (Packet({"rows": 4, "scores": "exact"}, SUMS), scored),
    "judge": (Packet({"figures": [["alone", 0, 2.0, 4], ["one_model", 0, 1.5, 4]]}), judged),
    "weigh": (Packet({}, SEEN), weighed),
    "settle": (Packet(SETTLED), lambda answer: read_settled(answer, ["alone", "one_model"], ["dose"])),
    "sums": (Packet({"parts": [PART, PART]}), learnt),
}  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all that a header holds."""
    if here:
        yield here
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*here, key))


def variants(packet: Packet) -> Iterator[tuple[str, Packet]]:
    """The answer with one value changed, or left out."""
    for place in places(packet.header):
        for value in [*VALUES, ...]:
            header = copy.deepcopy(packet.header)
            holder: Any = header
            for key in place[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[place[-1]]
            else:
                holder[place[-1]] = value
            yield f"{place} = {str(value)[:30]}", Packet(header, packet.groups)
    for group, some in packet.groups.items():
        for name, tensor in some.items():
            for number, change in enumerate(TENSORS):
                yield f"{group}/{name} {number}", Packet(packet.header, {group: {**some, name: change(tensor)}})


@pytest.mark.parametrize("kind", READERS)
def test_an_answer_is_read_or_refused_whatever_it_says(kind: str) -> None:
    packet, read = READERS[kind]
    read(packet)
    fell = []
    for what, changed in variants(packet):
        try:
            read(Packet.read(changed.header_json(), {group: {name: t.numpy() for name, t in some.items()}
                                                     for group, some in changed.groups.items()}))  # fmt: skip
        except (MessageError, DataError):  # a DataError is said of all sites, in words
            continue
        except Exception as error:
            fell.append(f"{what}: {error!r}")
    assert not fell


@pytest.mark.parametrize("worth", [
    [], [["age", True, 0.1, 0.05]], [["dose", True, 0.1, 0.05]] * 2, [["dose", False, 0.1, 0.05]],
    [["dose", True, 0.1, -0.05]], [["dose", True, 0.1, None]], [["dose", True, None, 0.05]],
])  # fmt: skip
def test_a_site_says_of_the_columns_that_it_was_sent_what_they_can_buy(worth: list[Any]) -> None:
    for columns in (SETTLED["own_columns"], [["dose", True, None, None]], [["dose", False, None, None]]):
        read_settled(Packet({**SETTLED, "own_columns": columns}), ["alone"], ["dose"])
    with pytest.raises(MessageError, match="what each buys"):
        read_settled(Packet({**SETTLED, "own_columns": worth}), ["alone"], ["dose"])


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-" + "9" * 5000, str(1 << 64)])
def test_a_header_holds_no_whole_number_beyond_64_bits(number: str) -> None:
    with pytest.raises(MessageError, match="without a readable header"):
        Packet.read(f'{{"format": {FORMAT}, "rows": {number}}}', {})
    assert Packet.read(f'{{"format": {FORMAT}, "rows": {(1 << 64) - 1}}}', {}).header["rows"] == (1 << 64) - 1
