"""The server's door for nodes: of all that a superlink offers at one port, only the Fleet API is passed on.

A superlink serves its Fleet API (nodes), its Control API (`flwr run`, `flwr supernode register`) and its Runtime API
(task programs) at one address, and asks for no key at the Control API. `kinfed deploy server` therefore
binds the superlink to this machine alone, and this program listens where nodes reach it: over TLS with the server's
certificate, for the paths of the Fleet API and no others, with bodies of a bounded size.

    python -m kinfed.deploy.programs.fleet_gate HOST PORT SUPERLINK_PORT CERTS
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from kinfed.deploy.operations.checks import VERSION_HEADER
from kinfed.version import __version__

PREFIX = "/v1/fleet/"
LARGEST_BODY = 64 << 20  # bytes; Flower cuts what is larger than a few megabytes into pieces
SECONDS = 300.0  # a request may take; the longest waits of Flower's own clients are shorter
# Headers that speak of one connection, not of the message.
_OF_CONNECTION = (b"host", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class FleetGate:
    """An ASGI application that passes requests of nodes on to the superlink at this machine's `port`, which it knows by
    the certificate authority in the file `ca`."""

    def __init__(self, port: int, ca: Path) -> None:
        self._address, self._ca = f"https://127.0.0.1:{port}", ca

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            status = _refusal(scope)
            await (_say(send, status) if status else self._pass_on(scope, receive, send))

    async def _live(self, receive: Receive, send: Send) -> None:
        import ssl

        import httpx

        context = ssl.create_default_context(cafile=str(self._ca))
        async with httpx.AsyncClient(
            base_url=self._address, verify=context, timeout=SECONDS, trust_env=False
        ) as client:
            self._client = client
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        import httpx

        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _OF_CONNECTION]
        request = self._client.build_request("POST", scope["path"], headers=headers, content=_body(receive))
        try:
            answer = await self._client.send(request, stream=True)
        except _TooLarge:
            return await _say(send, 413)
        except _Gone:
            return None
        except httpx.HTTPError:
            return await _say(send, 503)
        try:
            headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in _OF_CONNECTION]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()


class _TooLarge(Exception):
    pass


class _Gone(Exception):
    """The asking side has gone away before the end of the request."""


def _refusal(scope: Scope) -> int:
    """The status with which a request is turned away; 0 where it is passed on. The path is taken as it came: one with
    percent signs, dots or slashes more is another one."""
    raw = scope.get("raw_path") or b""
    name = raw.removeprefix(PREFIX.encode())
    if raw == name or not name or not all(chr(byte).isalnum() or byte == ord("-") for byte in name):
        return 404
    return 0 if scope["method"] == "POST" else 405


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        piece = message.get("body", b"")
        size += len(piece)
        if size > LARGEST_BODY:
            raise _TooLarge
        yield piece
        if not message.get("more_body", False):
            return


async def _say(send: Send, status: int) -> None:
    """Answer without content. The version is there for `kinfed deploy doctor` at a node, which compares its own."""
    headers = [(b"content-length", b"0"), (VERSION_HEADER.encode(), __version__.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Listen until the process is asked to end."""
    import uvicorn

    host, port, superlink, certs = sys.argv[1:]
    folder = Path(certs)
    uvicorn.run(
        FleetGate(int(superlink), folder / "ca.crt"), host=host, port=int(port), log_level="warning", lifespan="on",
        ssl_certfile=str(folder / "server.crt"), ssl_keyfile=str(folder / "server.key"), timeout_keep_alive=75,
        server_header=False, access_log=False, limit_concurrency=1000,
    )  # fmt: skip


if __name__ == "__main__":
    main()
