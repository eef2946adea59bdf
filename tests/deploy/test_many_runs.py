"""Many runs in one round: requests that travel together, and come back to the runs that asked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import through_the_wire

from kinfed.deploy.node.gate import Released
from kinfed.deploy.transport.node_request import NodeRequest
from kinfed.deploy.transport.wire import LARGEST_NUMBER, TOGETHER, MessageError, Packet, bundled, unbundled
from kinfed.pools import Steps, in_step

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(int(torch.tensor(shape).prod())).reshape(shape).to(dtype),
    SHAPES, st.sampled_from(DTYPES),
)  # fmt: skip
GROUPS = st.dictionaries(st.sampled_from(["down", "up", "x/y"]), st.dictionaries(st.text("ab.", max_size=2), TENSORS))
NUMBERS = st.integers(-LARGEST_NUMBER, LARGEST_NUMBER)
HEADERS = st.dictionaries(st.text(max_size=3), st.one_of(NUMBERS, st.text(max_size=3), st.lists(NUMBERS, max_size=2)))
PACKETS = st.builds(Packet, HEADERS, GROUPS)


@settings(max_examples=25)
@given(st.lists(PACKETS, max_size=3))
def test_packets_in_one_are_the_packets(parts: list[Packet]) -> None:
    arrived = unbundled(through_the_wire(bundled(parts, kind=TOGETHER)))
    assert [one.header for one in arrived] == [one.header for one in parts]
    for one, part in zip(arrived, parts, strict=True):
        there = {group: some for group, some in part.groups.items() if some}
        assert {group: list(some) for group, some in one.groups.items()} == {g: list(some) for g, some in there.items()}
        for group, some in there.items():
            for name, tensor in some.items():
                torch.testing.assert_close(one.groups[group][name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layout", [[["g", "x", "float32", [3]]], [["g", "x", "float64", [2]]], [["g", "x", "float32", [-2]]], [["g"]], []]
)
def test_a_layout_that_does_not_fit_is_refused(layout: list[object]) -> None:
    packet = bundled([Packet({"a": 1}, {"g": {"x": torch.ones(2)}})])
    packet.header["parts"][0][1] = layout
    with pytest.raises(MessageError, match="parts"):
        unbundled(packet)


def test_what_several_headers_say_is_sent_once() -> None:
    encoding = {"columns": list(range(1000))}
    one, many = (
        len(bundled([Packet({"e": encoding, "n": n}) for n in range(count)]).header_json()) for count in (1, 50)
    )
    assert many < 2 * one


@dataclass(frozen=True)
class Asked:
    value: int
    log: list[list[int]]
    together: str = "all"

    def answers(self, requests: Sequence[Asked]) -> list[int]:
        self.log.append([one.value for one in requests])
        return [2 * one.value for one in requests]


def test_runs_advance_in_step_and_get_their_own_answers() -> None:
    log: list[list[int]] = []

    def run(start: int, rounds: int, way: str = "all") -> Steps[list[int]]:
        heard = []
        for number in range(rounds):
            heard.append((yield Asked(start + number, log, way)))
        return heard

    assert in_step([run(1, 2), run(10, 1), run(5, 0), run(20, 2, "other")]) == [[2, 4], [20], [], [40, 42]]
    assert log == [[1, 10], [20], [2], [21]]


def test_an_error_in_one_run_ends_the_others() -> None:
    ended: list[str] = []

    def fails() -> Steps[None]:
        yield Asked(1, [])
        raise ValueError("broken")

    def waits() -> Steps[None]:
        try:
            yield Asked(1, [])
            yield Asked(2, [])
        finally:
            ended.append("closed")

    with pytest.raises(ValueError, match="broken"):
        in_step([waits(), fails()])
    assert ended == ["closed"]


class Answers:
    """An exchange whose client a answers all, and b all but the second part, which is an error there."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    def request(self, kind, packets, seconds, take, needed=None):  # type: ignore[no-untyped-def]
        self.asked.append((kind, sorted(packets)))
        for name, packet in packets.items():
            if name == "c":
                continue
            answers = [Released({**part.header, "from": name}) for part in unbundled(through_the_wire(packet))]
            if name == "b":
                answers[1] = Released.of_error(MessageError("no such split"))
            take(name, through_the_wire(Released.bundled(answers)))
        return {"c": "not connected"} if "c" in packets else {}


def test_one_message_to_each_client_carries_all_runs() -> None:
    exchange, heard = Answers(), dict[tuple[int, str], int]()

    def run(number: int, clients: str) -> Steps[dict[str, str]]:
        def take(name: str, answer: Packet) -> None:
            if name == "a" and number == 2:
                raise MessageError("not finite")
            heard[number, name] = answer.require("run", int)

        orders = {name: Packet({"kind": "train", "run": number, "name": name}) for name in clients}
        assert isinstance(exchange, Answers)
        reasons = yield NodeRequest(exchange, "train", orders, 9.0, take, len(orders))  # type: ignore[arg-type]
        return dict(reasons)

    reasons = in_step([run(0, "abc"), run(1, "ab"), run(2, "ac")])
    assert exchange.asked == [(TOGETHER, ["a", "b", "c"])]
    assert heard == {(0, "a"): 0, (0, "b"): 0, (1, "a"): 1}
    assert reasons == [
        {"c": "not connected"}, {"b": "MessageError: no such split"}, {"a": "not finite", "c": "not connected"},
    ]  # fmt: skip
