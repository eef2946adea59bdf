"""Flower's grid as a transport: a node that stalls in sending its reply costs itself, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from flwr.app import Message, Metadata
from flwr.app.message import make_message
from flwr.serverapp import Grid

from kinfed.deploy.programs.flower import GridTransport, from_records, to_records
from kinfed.deploy.transport.exchange import Answer
from kinfed.deploy.transport.wire import MessageError, Packet


class Stalling(Grid):
    """A grid whose replies are there at once, but for those of a node that has announced one and does not send it."""

    def __init__(self, stalled: str) -> None:
        self.stalled, self.sent, self.pulled = stalled, threading.Event(), list[str]()

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *arguments: Any, **more: Any) -> Any: ...

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2, 3]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [str(message.metadata.dst_node_id) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for message in message_ids:
            self.pulled.append(message)
            if message == self.stalled:
                self.sent.wait(60)
            about = Metadata(1, f"reply-{message}", 1, 2, message, "", 0.0, 60.0, "train")
            yield make_message(about, content=to_records(Packet({"of": message})))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]: ...


def received(transport: GridTransport, wanted: list[str]) -> dict[str, Answer]:
    return {answer.message: answer for answer in transport.receive(wanted)}


def test_a_reply_that_is_announced_and_never_sent_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfed.deploy.programs.flower.PATIENCE_SECONDS", 0.2)
    grid = Stalling("2")
    transport = GridTransport(grid)
    answers = dict[str, Answer]()
    while len(answers) < 2:
        answers |= received(transport, ["1", "2", "3"])
    assert sorted(answers) == ["1", "3"]
    assert answers["3"].packet is not None
    assert answers["3"].packet.header == {"of": "3"}
    assert not received(transport, ["2"])
    assert grid.pulled.count("2") == 1  # not asked anew while it is awaited
    grid.sent.set()
    transport._pulls["2"].thread.join()
    assert received(transport, ["2"])["2"].packet is not None


def test_nobody_waits_for_a_reply_that_is_not_wanted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfed.deploy.programs.flower.PATIENCE_SECONDS", 0.2)
    grid = Stalling("2")
    transport = GridTransport(grid)
    assert not received(transport, ["2"])
    grid.sent.set()
    transport._pulls["2"].thread.join()
    assert not transport.receive([])
    assert not transport._pulls


def test_errors_of_the_grid_are_those_of_the_transport() -> None:
    class Broken(Stalling):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            raise ConnectionError("the superlink is gone")

    with pytest.raises(ConnectionError, match="is gone"):
        GridTransport(Broken("")).receive(["1"])


def test_many_small_arrays_travel_as_one_for_each_type() -> None:
    """Every array is an object that Flower sends and confirms apart: an evaluation of three models had thirty-three."""
    figures = {
        name: torch.tensor([value, 9.0], dtype=torch.float64) for name, value in zip("abcdef", range(6), strict=False)
    }
    packet = Packet({"rows": 9}, {"personal": figures, "figures": {}, "ids": {"k": torch.arange(3)}})
    records = to_records(packet)
    assert [len(one) for one in records.array_records.values()] == [2]
    arrived = from_records(records)
    assert arrived.digest() == packet.digest()
    assert arrived.groups.keys() == packet.groups.keys()
    one = Packet({"rows": 9}, {"up": {"w": torch.ones(1, 5)}})
    assert from_records(to_records(one)).digest() == one.digest()
    assert list(to_records(one).array_records) == ["up"]


@pytest.mark.parametrize("header", [{"packed": "x"}, {"packed": [], "values": [], "parts": []}, {"packed": []}])
def test_a_packed_message_holds_one(header: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        from_records(to_records(Packet(header)))
