"""A client's greeting, read with suspicion: every value is checked before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kinfed.deploy.operations.checks import version_advice
from kinfed.deploy.transport.wire import MessageError, Packet, plain_text

LONGEST_NAME = 100  # characters
MOST_NUMBERS = 10**8  # in one example, and columns of a table
MOST_CLIENTS = 10_000  # of one node


@dataclass(frozen=True)
class Greeting:
    name: str
    group: str
    columns: tuple[str, ...]
    counts: tuple[int, int, int]  # training, validation and test examples
    rows: int  # training examples before some are kept for validation
    shape: tuple[int, ...]  # of an example
    tokens: bool
    key: str  # public key of whom the client belongs to
    own_roles: bool = False  # the node draws itself which rows are for the test, whatever the run says

    @classmethod
    def read(cls, header: Mapping[str, Any], largest_count: int) -> Greeting:
        """Read a greeting; MessageError if anything in it is not what it should be."""
        packet = Packet(dict(header))
        name, group = (_name(packet.require(key, str), key) for key in ("name", "group"))
        if not name:
            raise MessageError("a client without a name")
        version = plain_text(str(header.get("kinfed", "")), 20)
        if advice := version_advice(version, of=name, here="the server", theirs_is_node=True):
            raise MessageError(advice)
        counts = _whole_numbers(packet, "counts", 0, largest_count)
        shape = _whole_numbers(packet, "shape", 1, MOST_NUMBERS)
        if len(counts) != 3 or len(shape) > 8 or prod(shape) > MOST_NUMBERS:
            raise MessageError(f"{name} has three counts, and examples of at most {MOST_NUMBERS} numbers")
        rows = _whole(packet.header.get("rows"), "rows", 0, 2 * largest_count)
        if not counts[0] <= rows <= counts[0] + counts[1]:
            raise MessageError(f"{name} has {counts[0]} training examples of {rows} rows")
        columns = packet.require("columns", list)
        if len(columns) > MOST_NUMBERS or not all(isinstance(c, str) and c.isprintable() for c in columns):
            raise MessageError(f"{name} should have feature columns with printable names")
        return cls(
            name, group, tuple(columns), (counts[0], counts[1], counts[2]), rows, tuple(shape),
            packet.require("tokens", bool), packet.require("key", str), packet.require("own_roles", bool),
        )  # fmt: skip


def read_greetings(answer: Packet, largest_count: int) -> list[Greeting]:
    """Greetings of all clients of a node."""
    headers = answer.require("clients", list)
    if not headers or len(headers) > MOST_CLIENTS or not all(isinstance(header, dict) for header in headers):
        raise MessageError("a node should name its clients")
    greetings = [Greeting.read(header, largest_count) for header in headers]
    if len({greeting.name for greeting in greetings}) < len(greetings):
        raise MessageError("a node names a client twice")
    return greetings


def _name(text: str, what: str) -> str:
    if len(text) > LONGEST_NAME or text != plain_text(text) or "," in text:
        raise MessageError(
            f"a {what} is plain text of at most {LONGEST_NAME} characters without commas and brackets; got {text!r}"
        )
    return text


def _whole_numbers(packet: Packet, key: str, least: int, most: int) -> list[int]:
    return [_whole(value, key, least, most) for value in packet.require(key, list)]


def _whole(value: Any, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise MessageError(f"{what} should be whole numbers from {least} to {most}; got {_short(value)}")
    return value


def _short(value: Any) -> str:
    """Text of a value for an error: numbers of a million digits are not written out."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"a number of {value.bit_length()} bits"
    return plain_text(repr(value), 60)
