"""A request of one run to nodes, which travels with those of others: one message to each client, and one back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from kinfed.deploy.transport.exchange import Exchange
from kinfed.deploy.transport.wire import TOGETHER, MessageError, Packet, bundled, plain_text, unbundled


@dataclass(frozen=True)
class NodeRequest:
    """Orders by client. It is answered by the reasons, by client, why there is no answer that could be used."""

    exchange: Exchange
    kind: str
    orders: Mapping[str, Packet]
    seconds: float
    take: Callable[[str, Packet], None]  # raises MessageError for an answer that cannot be used
    needed: int

    @property
    def together(self) -> Hashable:
        return id(self.exchange)

    def answers(self, requests: Sequence[NodeRequest]) -> list[dict[str, str]]:
        if len(requests) == 1:
            return [self.exchange.request(self.kind, self.orders, self.seconds, self.take, self.needed)]
        reasons: list[dict[str, str]] = [{} for _ in requests]
        asked: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            for name in request.orders:
                asked.setdefault(name, []).append(number)

        def take(name: str, answer: Packet) -> None:
            parts, numbers = unbundled(answer), asked[name]
            if len(parts) != len(numbers):
                raise MessageError(f"an answer to {len(parts)} requests, and {len(numbers)} were asked together")
            for number, part in zip(numbers, parts, strict=True):
                if "error" in part.header:
                    reasons[number][name] = plain_text(str(part.header["error"]))
                    continue
                try:
                    requests[number].take(name, part)
                except MessageError as error:
                    reasons[number][name] = str(error)

        packets = {
            name: bundled([requests[number].orders[name] for number in numbers], kind=TOGETHER, name=name)
            for name, numbers in asked.items()
        }
        seconds, needed = max(one.seconds for one in requests), max(one.needed for one in requests)
        for name, reason in self.exchange.request(TOGETHER, packets, seconds, take, needed).items():
            for number in asked[name]:
                reasons[number][name] = reason
        return reasons
