"""Nodes in this process, under a clock of its own: real messages, real vaults, no network and no waiting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.deploy.node.node import Node
from kinfed.deploy.transport.exchange import Answer, Sent
from kinfed.deploy.transport.wire import MessageError, Packet, arrays
from kinfed.errors import KinfedError

Tamper = Callable[[str, Sent, Packet], Packet | list[Packet] | None]  # (client, question, answer) -> what arrives


def through_the_wire(packet: Packet) -> Packet:
    """As it arrives at the other end."""
    return Packet.read(packet.header_json(), {name: arrays(tensors) for name, tensors in packet.groups.items()})


def _received(number: str, packet: Packet) -> Answer:
    """The answer that arrives; of one that cannot be read, why."""
    try:
        return Answer(number, through_the_wire(packet))
    except MessageError as error:
        return Answer(number, None, str(error))


@dataclass
class Loopback:
    run_config: Mapping[str, Any]
    nodes_: dict[int, dict[str, Any]]  # node-config by number
    tamper: Tamper | None = None
    delay: dict[str, float] = field(default_factory=dict)  # seconds until a client's answer arrives
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    messages: list[Sent] = field(default_factory=list)
    offline: set[int] = field(default_factory=set)
    _mail: list[tuple[float, Answer]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def time(self) -> dict[str, Any]:
        return {"clock": self.clock, "sleep": self.sleep}

    def nodes(self) -> Collection[int]:
        return [number for number in self.nodes_ if number not in self.offline]

    def send(self, messages: Sequence[Sent]) -> list[str]:
        ids = []
        for one in messages:
            number = f"m{len(self.messages)}"
            self.messages.append(one)
            ids.append(number)
            config = self.nodes_[one.node]
            client = one.packet.header.get("name", config["client"])
            try:
                answer = Node.of(config, self.run_config, one.node).answer(one.kind, through_the_wire(one.packet))
            except KinfedError as error:
                self._post(client, Answer(number, None, f"{type(error).__name__}: {error}"))
                continue
            changed = answer if self.tamper is None else self.tamper(client, one, answer)
            for packet in changed if isinstance(changed, list) else [changed]:
                if packet is not None:
                    self._post(client, _received(number, packet))
        return ids

    def receive(self, messages: Collection[str]) -> list[Answer]:
        ready = [a for when, a in self._mail if when <= self.now and a.message in messages]
        given = {id(a) for a in ready}
        self._mail = [(when, a) for when, a in self._mail if id(a) not in given]
        return ready

    def _post(self, client: str, answer: Answer) -> None:
        self._mail.append((self.now + self.delay.get(client, 0.0), answer))


def write_nodes(folder: Path, x: np.ndarray, y: np.ndarray, owner: np.ndarray, names: Sequence[str]) -> dict[int, Any]:
    """One .npz and one vault per client; the node-configs."""
    nodes = {}
    for number, name in enumerate(names):
        mine = owner == number
        np.savez(folder / f"{name}.npz", x=x[mine], y=y[mine])
        nodes[100 + number] = {
            "client": name, "data": str(folder / f"{name}.npz"), "vault": str(folder / f"vault-{name}"),
        }  # fmt: skip
    return nodes


def trusting(pool: type) -> Callable[..., bool]:
    """`KeyRecord.is_of` as nodes check it; the `pool` of a server that lies checks nothing."""
    from kinfed.deploy.secure.secure_messages import KeyRecord

    check = KeyRecord.is_of

    def is_of(self: KeyRecord, *arguments: Any) -> bool:
        asked_by_server = sys._getframe(1).f_code is pool._read_update.__code__  # type: ignore[attr-defined]
        return asked_by_server or check(self, *arguments)

    return is_of
