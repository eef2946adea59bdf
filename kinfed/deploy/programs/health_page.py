"""The program that answers /health and /metrics, and tells alerts; a service starts it where one of them is asked for.

    /health     200 where nothing is wrong, else 503; JSON with all conditions and what to do
    /metrics    Prometheus text (kinfed.deploy.operations.metrics_text)

It is a process of its own, which reads files: it answers, too, where the service hangs. It has no other path, and takes
GET alone. Without a host it listens for this machine, and answers no request that names another: a page from elsewhere
that is open in a browser here could read it by a name that it lets point here. No key is asked for, so name
another host only if everyone who reaches it may see which sites and runs there are. A client with more connections than
there is room for is not answered; alerts are told all the same.

    python -m kinfed.deploy.programs.health_page '{"side": "node", "listen": "127.0.0.1:9464", ...}'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kinfed.deploy.operations.alerts import Alerts
from kinfed.deploy.operations.checks import WRONG, Condition, worst
from kinfed.deploy.operations.log_lines import say_json, wants_json
from kinfed.deploy.operations.metrics_text import CONTENT_TYPE, render
from kinfed.deploy.operations.watched import Watched, WatchedNode, WatchedServer
from kinfed.errors import ConfigError, KinfedError
from kinfed.version import __version__

LOOK_SECONDS = 15.0  # between looks for troubles to tell
ALERT = "KINFED_ALERT"  # the variable with the hook that is told of troubles
LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 32  # at a time


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of "9464" (this machine alone) or "host:9464"."""
    host, colon, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536 or (colon and not host):
        raise ConfigError(f"--health is a port of this machine, such as 9464, or host:port; got {text!r}")
    return host.strip("[]") or LOOPBACK, int(port)


def watched(about: Mapping[str, Any]) -> Watched:
    """The node or server that the program's argument describes."""
    common = {
        "side": about["side"], "heartbeat": Path(about["heartbeat"]), "folder": Path(about["folder"]),
        "certificates": {Path(path): advice for path, advice in about.get("certificates", {}).items()},
    }  # fmt: skip
    if about["side"] == "node":
        return WatchedNode(**common, logs={name: Path(path) for name, path in about["logs"].items()})
    return WatchedServer(**common, notes=Path(about["notes"]), members=Path(about["members"]))


class HealthPages:
    """Looks at a subject, one at a time."""

    def __init__(self, subject: Watched) -> None:
        self.subject, self._lock = subject, threading.Lock()

    def conditions(self) -> list[Condition]:
        with self._lock:
            try:
                return list(self.subject.conditions())
            except (KinfedError, OSError) as error:
                return [Condition("health", WRONG, str(error), "look at the file that it names")]

    def page(self, path: str) -> tuple[int, str, str]:
        """Status, type and text."""
        if path == "/metrics":
            with self._lock:
                return 200, CONTENT_TYPE, render(self.subject.samples())
        if path != "/health":
            return 404, "text/plain; charset=utf-8", "/health and /metrics\n"
        conditions = self.conditions()
        level = worst(conditions)
        about = {"status": level, "side": self.subject.side, "kinfed": __version__,
                 "conditions": [dataclasses.asdict(condition) for condition in conditions]}  # fmt: skip
        return 503 if level == WRONG else 200, "application/json", json.dumps(about, indent=1) + "\n"


class HealthServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], pages: HealthPages) -> None:
        self.pages, self._room = pages, threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread began that would give the room back
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def is_meant(self, host: str) -> bool:
        """Whether a request that names this host may be answered; programs that are no browser may name none."""
        here, port = str(self.server_address[0]), self.server_address[1]
        return not ip_address(here).is_loopback or host in ("", *(f"{name}:{port}" for name in (here, "localhost")))


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = 10  # seconds in which a request comes
    server_version, sys_version = "kinfed", ""

    def do_GET(self) -> None:
        try:
            if self.server.is_meant(self.headers.get("Host", "")):
                status, kind, text = self.server.pages.page(self.path.partition("?")[0])
            else:
                status, kind, text = 421, "text/plain; charset=utf-8", "this page is for this machine, by its address\n"
        except (KinfedError, OSError) as error:  # a file is damaged; /health says which
            status, kind, text = 500, "text/plain; charset=utf-8", f"{error}\n"
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    """Answer and look until the process is ended."""
    about = json.loads(sys.argv[1])
    pages = HealthPages(watched(about))
    say = say_json("health") if wants_json() else lambda text: print(text, flush=True)
    if about.get("listen"):
        server = HealthServer(parse_listen(about["listen"]), pages)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    hook = os.environ.get(ALERT, "")
    alerts = Alerts(hook, about["side"], about["name"], say) if hook else None
    while True:
        time.sleep(LOOK_SECONDS)
        if alerts is not None:
            alerts.look(pages.conditions())


if __name__ == "__main__":
    main()
