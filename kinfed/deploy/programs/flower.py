"""Flower's grid as a transport, and the two apps that Flower starts. Nothing else in kinfed needs Flower.

An app folder made by `kinfed deploy init` names `server_app` and `client_app`. Flower starts a process for the server's
part of a run, and one at a node for every message; both import the kinfed that is installed there.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from kinfed.deploy.node.gate import error_outside
from kinfed.deploy.node.node import Node
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Answer, Sent
from kinfed.deploy.transport.wire import (
    DESCRIBE,
    EVALUATE,
    HELLO,
    JUDGE,
    SCORE,
    SECURE_KINDS,
    SETTLE,
    SUMS,
    TOGETHER,
    TRAIN,
    WEIGH,
    MessageError,
    Packet,
    arrays,
    bundled,
    unbundled,
)  # fmt: skip
from kinfed.errors import KinfedError

_HEADER, _JSON = "header", "json"  # names of the record of a packet's header, and of the text in it
# Flower stores, sends and confirms every array as an object of its own: forty figures of an evaluation took longer than
# the training before it. More arrays than these travel as one for each type of number.
_FEW_ARRAYS = 2
_PACKED = "packed"  # in a header: this packet is one in another, and these groups of it are empty
_QUERIES = (HELLO, SUMS, TOGETHER, JUDGE, WEIGH, SETTLE, DESCRIBE, SCORE, *SECURE_KINDS)
_TYPES = {TRAIN: "train", EVALUATE: "evaluate"} | {kind: f"query.{kind}" for kind in _QUERIES}
PULL_SECONDS = 0.02  # per message between looks for replies, which cost a superlink some milliseconds each
PATIENCE_SECONDS = 1.0  # with looks that take long; their replies are taken up at a later one
_GONE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


def to_records(packet: Packet) -> RecordDict:
    if sum(map(len, packet.groups.values())) > _FEW_ARRAYS:
        packet = bundled([packet], **{_PACKED: [name for name, some in packet.groups.items() if not some]})
    records: dict[str, Any] = {_HEADER: ConfigRecord({_JSON: packet.header_json()})}
    for name, tensors in packet.groups.items():
        records[name] = ArrayRecord({key: Array(array) for key, array in arrays(tensors).items()})
    return RecordDict(records)


def from_records(content: RecordDict) -> Packet:
    record = content.config_records.get(_HEADER)
    text = "" if record is None else record.get(_JSON, "")
    try:
        groups = {name: {key: a.numpy() for key, a in some.items()} for name, some in content.array_records.items()}
    except (ValueError, TypeError, EOFError, OSError) as error:  # what numpy says of an array it cannot read
        raise MessageError(f"an array that cannot be read ({error})") from None
    packet = Packet.read(text, groups)
    if _PACKED not in packet.header:
        return packet
    parts, empty = unbundled(packet), packet.require(_PACKED, list)
    if len(parts) != 1:
        raise MessageError(f"a packed message holds one; got {len(parts)}")
    return Packet(parts[0].header, {**{str(name): {} for name in empty}, **parts[0].groups})


class _Pull:
    """One look for the reply to a message, in a thread of its own: Flower waits in it for as long as a node that has
    announced a reply may take to send it, however many others have answered and whatever the deadline is."""

    def __init__(self, grid: Grid, message: str) -> None:
        self._grid, self._message = grid, message
        self.replies: list[Message] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)  # no process waits for it at its end
        self.thread.start()

    def _run(self) -> None:
        try:
            self.replies = list(self._grid.pull_messages([self._message]))
        except Exception as error:
            self.error = error


class GridTransport:
    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._pulls: dict[str, _Pull] = {}
        self._next_pull = 0.0  # time from which on the superlink is asked again

    def nodes(self) -> Collection[int]:
        return list(self.grid.get_node_ids())

    def send(self, messages: Sequence[Sent]) -> list[str]:
        flower_messages = [
            Message(to_records(one.packet), dst_node_id=one.node, message_type=_TYPES[one.kind], ttl=one.seconds)
            for one in messages
        ]
        ids = list(self.grid.push_messages(flower_messages))
        return [str(one or "") for one in ids] if len(ids) == len(messages) else [""] * len(messages)

    def receive(self, messages: Collection[str]) -> list[Answer]:
        """Each reply is awaited apart, so that a node that stalls in sending one holds up no other."""
        now = time.monotonic()
        if now >= self._next_pull:
            new = [message for message in messages if message not in self._pulls]
            self._pulls |= {message: _Pull(self.grid, message) for message in new}
            self._next_pull = now + PULL_SECONDS * len(new)
        for pull in self._pulls.values():
            pull.thread.join(max(now + PATIENCE_SECONDS - time.monotonic(), 0.0))
        done = {message: pull for message, pull in self._pulls.items() if not pull.thread.is_alive()}
        self._pulls = {message: pull for message, pull in self._pulls.items() if message not in done}
        for pull in done.values():
            if pull.error is not None:
                raise pull.error
        return [_answer(reply) for message in messages if message in done for reply in done[message].replies]


def _answer(reply: Message) -> Answer:
    request = reply.metadata.reply_to_message_id
    if reply.has_error():
        code, reason = reply.error.code, reply.error.reason or ""
        crashed = code == ErrorCode.CLIENT_APP_CRASHED
        return Answer(request, None, _sentence(code, reason), gone=code in _GONE, crashed=crashed)
    try:
        return Answer(request, from_records(reply.content))
    except MessageError as error:
        return Answer(request, None, str(error))


def _sentence(code: int, reason: str) -> str:
    """Flower's text of an error, without its wrapping: <class 'X'>:<'text'>"""
    if code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and ":<'" in reason:
        kind, _, text = reason.partition(":<'")
        name = kind.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
        return f"{name}: {text.removesuffix(chr(39) + '>')}"
    return f"{reason or 'no reason given'} (code {code})"


def _answers(kind: str) -> Callable[[Message, Context], Message]:
    """The function that answers requests of a kind at a node."""

    def answer(message: Message, context: Context) -> Message:
        try:
            node = Node.of(context.node_config, context.run_config, message.metadata.dst_node_id)
        except Exception as error:  # settings of the node or the run: there is no client yet, and no gate
            raise error_outside(error, "this node", {}) from None
        return Message(to_records(node.answer(kind, from_records(message.content))), reply_to=message)

    return answer


server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        deployment = Deployment.parse(context.run_config)
        serve(deployment, GridTransport(grid), lambda text: log(logging.INFO, "kinfed: %s", text))
    except KinfedError as error:
        log(logging.ERROR, "kinfed: %s", error)
        raise


client_app.train()(_answers(TRAIN))
client_app.evaluate()(_answers(EVALUATE))
for _kind in _QUERIES:
    client_app.query(_kind)(_answers(_kind))
