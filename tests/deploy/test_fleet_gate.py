"""The door for nodes: of all that a superlink offers at one port, the Fleet API alone is passed on."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from kinfed.deploy.programs import fleet_gate
from kinfed.deploy.programs.fleet_gate import FleetGate

httpx = pytest.importorskip("httpx", reason="the extra flower is not installed")


def asked(path: bytes, method: str = "POST", scheme: str = "http") -> int:
    """The status with which the door itself answers, 0 where it passes the request on."""
    statuses: list[int] = []

    class Passing(FleetGate):
        async def _pass_on(self, *_: Any) -> None:
            statuses.append(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        if "status" in message:
            statuses.append(message["status"])

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    scope = {"type": scheme, "method": method, "raw_path": path, "path": path.decode("latin-1"), "headers": []}
    asyncio.run(Passing(1, __file__)(scope, receive, send))  # type: ignore[arg-type]
    (status,) = statuses
    return status


@pytest.mark.parametrize("path", [b"/v1/fleet/pull-messages", b"/v1/fleet/heartbeat"])
def test_requests_of_nodes_are_passed_on(path: bytes) -> None:
    assert asked(path) == 0
    assert asked(path, "GET") == 405


@pytest.mark.parametrize("path", [
    b"/v1/control/start-run", b"/v1/runtime/pull-task-input", b"/", b"", b"/v1/fleet", b"/v1/fleet/", b"v1/fleet/x",
    b"/v1/fleet/../control/start-run", b"/v1/fleet/%2e%2e/control/start-run", b"/v1/fleet//control", b"/v1/fleet/a/b",
    b"//v1/fleet/x", b"/v1/fleet/x?y=1", b"/v1/fleet/x%00", b"/V1/FLEET/x", b"/v1/control/v1/fleet/x", b"/v1/fleet/x;y",
])  # fmt: skip
def test_everything_else_is_turned_away(path: bytes) -> None:
    assert asked(path) == 404


def test_a_body_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_gate, "LARGEST_BODY", 10)

    async def read(*sizes: int) -> int:
        pieces = [{"type": "http.request", "body": bytes(size), "more_body": True} for size in sizes]
        messages = iter([*pieces, {"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> MutableMapping[str, Any]:
            return next(messages)

        return sum([len(piece) async for piece in fleet_gate._body(receive)])

    assert asyncio.run(read(4, 6)) == 10
    with pytest.raises(fleet_gate._TooLarge):
        asyncio.run(read(4, 7))


def test_a_request_that_breaks_off_is_dropped_without_a_word() -> None:
    """It was passed on as whole, and every one wrote a page of errors into the server's log."""
    messages = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> MutableMapping[str, Any]:
        return next(messages)

    async def send(message: MutableMapping[str, Any]) -> None:
        raise AssertionError(message)

    async def ask() -> None:
        gate = FleetGate(1, __file__)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=Reading(), base_url="https://superlink") as gate._client:
            await gate._pass_on({"path": "/v1/fleet/heartbeat", "headers": [(b"content-length", b"8")]}, receive, send)

    asyncio.run(ask())


class Reading(httpx.AsyncBaseTransport):
    """A superlink that reads requests to their end."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return httpx.Response(200)
