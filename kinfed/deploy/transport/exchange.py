"""Requests to nodes and their answers, over any transport: who is where, who has answered, and for how long to wait.

Nodes come and go under numbers that mean nothing; clients have names. A node that appears is greeted, and says which
clients it has: mostly one. It proves it with the client's key: the first key that came with a name, or the one that the
operator wrote down for it, is the client's, and a node with another key is refused. A client that is away when it is
asked gets its message as soon as it is back, until the time is up; one whose node went down with the message gets it
again, and one whose process that should have answered was killed gets it once more. Every message has one answer at
most: a second one, an answer to an earlier request, or one that comes after the time is up is never looked at. A client
that is silent for long is named in the log, with all that is known of it.

A node that lets the time of a request pass without a word from any of its clients may be dead without anyone having
noticed. It is a suspect: it counts as not connected, so that no request with answers enough waits for it, and is asked
again and again who it is. That costs neither side anything, as an order would whose answer comes too late. As soon as
it says so it is back, and gets its share of the request that is under way.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kinfed.core import Silence
from kinfed.deploy.operations.audit_log import CAME, REFUSED, SENT
from kinfed.deploy.transport.enrolment_message import Greeting, read_greetings
from kinfed.deploy.transport.wire import HELLO, MessageError, Packet, plain_text
from kinfed.version import __version__

POLL_SECONDS = 0.5  # between looks for answers; each is two requests, which cost a superlink some milliseconds
HELLO_SECONDS = 300.0  # how long a greeting may stay without an answer before it is sent again
RETRY_SECONDS = 60.0  # after which a node that failed to say who it is, or a suspect, is asked again


@dataclass(frozen=True)
class Sent:
    node: int
    kind: str
    packet: Packet
    seconds: float  # after which the answer is no longer waited for


@dataclass(frozen=True)
class Answer:
    message: str  # the id of the message that this answers
    packet: Packet | None
    error: str = ""
    gone: bool = False  # the node went away with the message
    crashed: bool = False  # the node is there, but the process that should have answered died


class Transport(Protocol):
    def nodes(self) -> Collection[int]:
        """Numbers of the nodes that are connected now."""

    def send(self, messages: Sequence[Sent]) -> list[str]:
        """Ids of the messages, "" for those that could not be sent."""

    def receive(self, messages: Collection[str]) -> list[Answer]:
        """Answers that have come to these messages, each given once."""


@dataclass
class Contact:
    seen: float | None = None  # last time that its node was connected
    answered: float | None = None  # last time that it answered
    asked: float | None = None  # since when its answer is awaited; None: nothing is
    error: str = ""  # the last one
    failed: float | None = None  # when that was


@dataclass
class Presence:
    """Connections of clients, so that the log can give the reason for every silence; times of the exchange's clock."""

    contacts: dict[str, Contact] = field(default_factory=dict)

    def of(self, name: str) -> Contact:
        return self.contacts.setdefault(name, Contact())

    def see(self, names: Iterable[str], now: float) -> None:
        for name in names:
            self.of(name).seen = now

    def ask(self, name: str, now: float) -> None:
        contact = self.of(name)
        contact.asked = now if contact.asked is None else contact.asked

    def settle(self, name: str, now: float, error: str = "") -> None:
        """Note an answer, or the end of waiting for one with its error."""
        contact = self.of(name)
        contact.asked = None
        if error:
            self.note_error(name, now, error)
        else:
            contact.answered = contact.seen = now

    def note_error(self, name: str, now: float, error: str) -> None:
        """Note an error of a client whose answer is still awaited."""
        contact = self.of(name)
        contact.error, contact.failed = error, now

    def sentence(self, name: str, now: float, connected: Collection[str]) -> str:
        """The reason why there is nothing from this client yet."""
        contact = self.of(name)
        if name not in connected:
            where = "never seen yet" if contact.seen is None else f"not connected, last seen {_ago(now, contact.seen)}"
        elif contact.asked is None:
            where = "connected, not asked yet"
        else:
            where = f"connected, asked {_ago(now, contact.asked)}, no answer yet"
        last = "" if contact.failed is None else f"; last error {_ago(now, contact.failed)}: {contact.error}"
        return f"{name}: {where}{last}"


def _transfer(
    event: str, client: str, kind: str, order: Packet, packet: Packet | None, rule: str = ""
) -> dict[str, Any]:
    """An entry of the audit log about a message that answers, or is, an order."""
    place = {key: order.header[key] for key in ("run", "round") if key in order.header}
    about = {} if packet is None else {"bytes": packet.nbytes, "content": packet.digest()}
    return {"event": event, "client": client, **place, "kind": kind, **about, **({"rule": rule} if rule else {})}


def _ago(now: float, then: float) -> str:
    return f"{max(now - then, 0.0):.0f} s ago"


@dataclass(frozen=True)
class _Open:
    """A greeting without an answer yet."""

    node: int
    since: float
    nonce: str


Take = Callable[[str, Packet], None]  # (client, its answer); raises MessageError for one that cannot be used


@dataclass
class _Asked:
    """A request to many clients, and how far it has come."""

    kind: str
    packets: Mapping[str, Packet]
    take: Take
    open: dict[str, Packet]  # without an answer yet
    pending: dict[str, str] = field(default_factory=dict)  # clients by message
    reasons: dict[str, str] = field(default_factory=dict)  # why there is no answer, by client
    crashed: set[str] = field(default_factory=set)
    good: int = 0  # answers that could be used


@dataclass
class Exchange:
    transport: Transport
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    largest_count: int = 10**6  # of examples that a client may say it has
    keys: dict[str, str] = field(default_factory=dict)  # the public key that a client belongs to, by name
    only_known: bool = False  # names without a key are refused, too
    clients: dict[int, list[str]] = field(default_factory=dict)  # names by node
    greetings: dict[str, Greeting] = field(default_factory=dict)  # what a client last said of itself, by name
    troubles: dict[int, str] = field(default_factory=dict)  # nodes that could not say who they are
    presence: Presence = field(default_factory=Presence)
    watch: Callable[[], None] = lambda: None  # called at every look for answers
    record: Callable[[list[dict[str, Any]]], None] = lambda _: None  # entries of the audit log
    trips: int = 0  # requests so far, each one message to every client and its answer
    _retry: dict[int, float] = field(default_factory=dict)  # when nodes in trouble are greeted again
    _greeted: dict[str, _Open] = field(default_factory=dict)  # by message
    _logged: set[str] = field(default_factory=set)  # troubles that the log has already
    _suspects: dict[int, list[str]] = field(default_factory=dict)  # clients of nodes that have let a deadline pass

    def find(self, enough: Callable[[], bool], seconds: float, wanted: int, listed: Collection[str] = ()) -> None:
        """Ask nodes who they are until enough have said it, or the time is up. `wanted` and `listed` are for the log:
        how many clients there should be, and their names where they are known."""
        start = self.clock()
        silence, end = Silence(start), start + seconds
        while not enough() and self.clock() < end:
            self._discover(set(self.transport.nodes()))
            for answer in self.transport.receive(list(self._greeted)):
                self._on_hello(answer)
            self.watch()
            if not enough():
                if silence.is_due(self.clock()):
                    self._say_who_is_missing(wanted, listed, start, end)
                self.sleep(POLL_SECONDS)

    def _say_who_is_missing(self, wanted: int, listed: Collection[str], start: float, end: float) -> None:
        now, here = self.clock(), self.present()
        missing = [self.presence.sentence(name, now, here) for name in sorted(set(listed) - here)]
        reasons = missing + self.strangers() or ["no other node is connected"]
        self.say(
            f"waiting for {now - start:.0f} s, for {end - now:.0f} s more at most: {len(here)} of {wanted} clients are "
            f"here ({', '.join(sorted(here)) or 'none'}); {'; '.join(reasons)}"
        )

    def strangers(self) -> list[str]:
        """Sentences about nodes that are connected and have not said whose they are."""
        now = self.clock()
        quiet = [
            f"node {greeted.node} is connected, and was asked who it is {now - greeted.since:.0f} s ago; no answer yet"
            for greeted in self._greeted.values()
        ]
        return quiet + [f"node {node} cannot take part: {trouble}" for node, trouble in self.troubles.items()]

    def request(
        self, kind: str, packets: Mapping[str, Packet], seconds: float, take: Take, needed: int | None = None
    ) -> dict[str, str]:
        """Send each client its own request, and hand over the answers as they come. Ends when all have answered, when
        the time is up, or when `needed` have and no other client is connected. Returns, by client, why there is
        none."""
        self.trips += 1
        start = self.clock()
        silence, end = Silence(start), start + seconds
        needed = len(packets) if needed is None else needed
        asked = _Asked(kind, packets, take, dict(packets))
        while asked.open and self.clock() < end:
            online = set(self.transport.nodes())
            self._discover(online)
            where = self._where(online)
            if asked.good >= needed and not any(name in where for name in asked.open):
                break
            self._send(asked, where, end)
            self._receive(asked)
            self.watch()
            if asked.open:
                if silence.is_due(self.clock()):
                    self._say_who_is_silent(kind, asked.open, len(packets), start, end)
                self.sleep(POLL_SECONDS)
        connected = self._where(self.transport.nodes())
        if self.clock() >= end:
            self._suspect(asked.open.keys(), packets.keys() - asked.open.keys(), self.clock() - seconds / 2)
        doubtful = {name for names in self._suspects.values() for name in names}
        for name in asked.open:
            why = "no sign of life since an earlier request" if name in doubtful else "not connected"
            why = f"no answer within {seconds:g} s" if name in connected else why
            asked.reasons[name] = f"{why} ({asked.reasons[name]})" if name in asked.reasons else why
            self.presence.settle(name, self.clock(), asked.reasons[name])
        return asked.reasons

    def _send(self, asked: _Asked, where: Mapping[str, int], end: float) -> None:
        """Send their requests to clients that are connected and have none."""
        kind, packets, waiting = asked.kind, asked.packets, set(asked.pending.values())
        free = [name for name in asked.open if name in where and name not in waiting]
        messages = [Sent(where[name], kind, packets[name], max(end - self.clock(), 1.0)) for name in free]
        self.record([_transfer(SENT, name, kind, packets[name], packets[name]) for name in free])
        for name, message in zip(free, self.transport.send(messages) if messages else [], strict=True):
            if message:
                asked.pending[message] = name
                self.presence.ask(name, self.clock())

    def _receive(self, asked: _Asked) -> None:
        """Hand over what has come."""
        arrivals, reasons = [], asked.reasons
        for answer in self.transport.receive([*asked.pending, *self._greeted]):
            if answer.message in self._greeted:
                self._on_hello(answer)
                continue
            name = asked.pending.pop(answer.message, "")
            if name not in asked.open:
                continue
            order = asked.packets[name]
            if answer.packet is None:
                reasons[name] = plain_text(answer.error)
                arrivals.append(_transfer(REFUSED, name, asked.kind, order, None, reasons[name]))
                if answer.gone or (answer.crashed and name not in asked.crashed):
                    # Asked again when it is back; after a crash once, for what kills it may be the message.
                    asked.crashed |= {name} if answer.crashed else set()
                    self.presence.note_error(name, self.clock(), reasons[name])
                    continue
            else:
                try:
                    asked.take(name, answer.packet)
                    asked.good += 1
                    reasons.pop(name, None)
                except MessageError as error:
                    reasons[name] = str(error)
                not_used = f"not used: {reasons[name]}" if name in reasons else ""
                arrivals.append(_transfer(CAME, name, asked.kind, order, answer.packet, not_used))
            self.presence.settle(name, self.clock(), reasons.get(name, ""))
            del asked.open[name]
        self.record(arrivals)

    def _suspect(self, silent: Collection[str], answered: Collection[str], before: float) -> None:
        """Doubt nodes of which all clients that were asked are silent, and some were asked `before` a time."""
        for node, names in list(self.clients.items()):
            asked = [self.presence.of(name).asked for name in names if name in silent]
            if any(when is not None and when <= before for when in asked) and not set(names) & set(answered):
                self._suspects[node] = self.clients.pop(node)
                self.say(f"{', '.join(names)}: no answer; from now on waited for only after a sign of life")

    def _say_who_is_silent(self, kind: str, names: Collection[str], asked: int, start: float, end: float) -> None:
        now, here = self.clock(), self.present()
        each = [self.presence.sentence(name, now, here) for name in sorted(names)]
        self.say(
            f"{kind}: waiting for {now - start:.0f} s, for {end - now:.0f} s more at most: {asked - len(names)} of "
            f"{asked} have answered; {'; '.join(each + self.strangers())}"
        )

    def present(self) -> set[str]:
        """Clients of the nodes that have said whose they are."""
        return {name for names in self.clients.values() for name in names}

    def _where(self, online: Collection[int]) -> dict[str, int]:
        return {name: node for node in online for name in self.clients.get(node, [])}

    def _discover(self, online: set[int]) -> None:
        now = self.clock()
        self._greeted = {m: greeted for m, greeted in self._greeted.items() if now - greeted.since <= HELLO_SECONDS}
        # A node that went away may come back as another client's.
        self.clients = {node: names for node, names in self.clients.items() if node in online}
        self._suspects = {node: names for node, names in self._suspects.items() if node in online}
        self.presence.see(self.present(), now)
        for node in [node for node in self.troubles if node not in online or now >= self._retry[node]]:
            del self.troubles[node], self._retry[node]
        awaited = {
            greeted.node
            for greeted in self._greeted.values()
            if greeted.node not in self._suspects or now - greeted.since < RETRY_SECONDS
        }
        busy = awaited | self.clients.keys() | self.troubles.keys()
        new = [_Open(node, now, secrets.token_hex(16)) for node in sorted(online - busy)]
        messages = [
            Sent(one.node, HELLO, Packet({"kind": HELLO, "nonce": one.nonce, "kinfed": __version__}), HELLO_SECONDS)
            for one in new
        ]
        for one, message in zip(new, self.transport.send(messages) if messages else [], strict=True):
            if message:
                self._greeted[message] = one

    def _on_hello(self, answer: Answer) -> None:
        greeted = self._greeted.pop(answer.message)
        if answer.packet is None:
            if not answer.gone:
                self._quarantine(greeted.node, plain_text(answer.error))
            return
        try:
            greetings = read_greetings(answer.packet, self.largest_count)
            self._check_keys(answer.packet, greetings, greeted)
        except MessageError as error:
            self._quarantine(greeted.node, str(error))
            return
        self.record([_transfer(CAME, one.name, HELLO, Packet(), answer.packet) for one in greetings])
        if self._suspects.pop(greeted.node, None) is not None:
            self.say(f"{', '.join(greeting.name for greeting in greetings)}: back after a silence")
        for greeting in greetings:
            self._drop_stale(greeting.name)
            self.keys.setdefault(greeting.name, greeting.key)
        self.clients[greeted.node] = [greeting.name for greeting in greetings]
        self.presence.see(self.clients[greeted.node], self.clock())
        self.greetings |= {greeting.name: greeting for greeting in greetings}

    def _check_keys(self, answer: Packet, greetings: list[Greeting], greeted: _Open) -> None:
        from kinfed.deploy.transport.client_keys import fingerprint, is_signed

        for greeting, header in zip(greetings, answer.require("clients", list), strict=True):
            name, known = greeting.name, self.keys.get(greeting.name)
            if not is_signed(header, greeted.nonce, greeted.node):
                raise MessageError(f"its greeting as {name} is not signed with the key that it names")
            if known is None and self.only_known:
                raise MessageError(f"it says that it is {name}, but the folder of keys has no {name}.pub")
            if known not in (None, greeting.key):
                raise MessageError(
                    f"it says that it is {name}, with key {fingerprint(greeting.key)}; {name} belongs to key "
                    f"{fingerprint(known or '')}"
                )

    def _drop_stale(self, name: str) -> None:
        """Forget the older connection of a client: a killed node stays listed for a while."""
        known = {**self._suspects, **self.clients}
        former = next((node for node, names in known.items() if name in names), None)
        if former is None:
            return
        known[former].remove(name)
        self.say(f"client {name} has appeared on a new node; its former one is not asked any more")
        if not known[former]:
            self.clients.pop(former, None)
            self._suspects.pop(former, None)
            self.troubles[former], self._retry[former] = f"another node has appeared as {name}", float("inf")

    def _quarantine(self, node: int, trouble: str) -> None:
        """Greet a node again after a while; the log has its trouble once."""
        self.troubles[node], self._retry[node] = trouble, self.clock() + RETRY_SECONDS
        if trouble not in self._logged:
            self._logged.add(trouble)
            self.say(f"a node that has appeared cannot take part: {trouble}")
