"""The board's server: standard library, this machine only, read-only.

    with BoardServer(Path("runs"), port=8050) as board:
        board.serve_forever()

What it guards against: it listens on the loopback address alone, so that other machines reach nothing. A request whose
Host is not this address and port is refused: a page from elsewhere cannot read runs by a name of its own that it lets
point here (DNS rebinding). Only GET and HEAD are answered. A run is looked up among those that a search of the folder
has found; no part of an address ever becomes a path. Answers forbid other sites to frame or embed them, and allow the
board's own scripts only. Anyone with an account on this machine can read the board, like any local server.
"""

import time
from datetime import datetime
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from kinfed.analysis import compare, single_run
from kinfed.core import storage
from kinfed.errors import ConfigError, KinfedError
from kinfed.records import RunEntry, RunRecord, TrialRecord, find_runs, headline_text, load_run
from kinfed.report import headline, learning_curves, render, report_page
from kinfed.report.drawing import DARK, style_of

STATUS = "status.json"  # which a deployment's server writes every few seconds
HOST, PORT = "127.0.0.1", 8050
_SEARCH_EVERY = 1.0  # seconds for which a search of the folder is good
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Pages in folders may come from anyone: they can draw, and read nothing else of the board.
_SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; frame-ancestors 'none'"
)


class BoardServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int = PORT) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the folder that contains your runs, such as runs")
        self.folder = folder
        self._found: tuple[float, dict[str, RunEntry]] = (0.0, {})
        try:
            super().__init__((HOST, port), BoardRequest)
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used ({error.strerror}); give another with --port") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def hosts(self) -> set[str]:
        """Values that the Host of a request may have."""
        return {f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")}

    def runs(self) -> dict[str, RunEntry]:
        """Runs by name."""
        found_at, runs = self._found
        if time.monotonic() - found_at >= _SEARCH_EVERY or not runs:
            runs = {entry.name: entry for entry in find_runs(self.folder)}
            self._found = time.monotonic(), runs
        return runs


class BoardRequest(BaseHTTPRequestHandler):
    server: BoardServer
    server_version, sys_version = "kinfed", ""
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds that a connection may say nothing
    _FILES: ClassVar[dict[str, str]] = {"/board.js": "text/javascript", "/board.css": "text/css"}

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"the board is at " + self.server.url.encode(), "text/plain")
            return
        try:
            answer = self._answer(urlsplit(self.path).path)
        except Exception as error:  # files that were changed by hand, or invalid addresses: the board goes on
            reason = str(error) if isinstance(error, KinfedError) else f"this cannot be shown: {error!r}"
            answer = HTTPStatus.INTERNAL_SERVER_ERROR, reason.encode(), "text/plain", _POLICY
        self._send(*answer)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"the board is read-only", "text/plain")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _answer(self, path: str) -> tuple[HTTPStatus, bytes, str, str]:
        if path == "/":
            return self._page("list.html", title=f"Runs in {self.server.folder}", heading="Runs", name="")
        if path in self._FILES:
            return HTTPStatus.OK, _file(path[1:]), self._FILES[path], _POLICY
        if path == "/plotly.js":
            return HTTPStatus.OK, _plotly(), "text/javascript", _POLICY
        if path == "/api/runs":
            return self._json([listed(entry) for entry in self.server.runs().values()])
        if path.startswith("/both/"):
            return self._both(path.removeprefix("/both/").split("/"))
        kind, _, name = path[1:].partition("/")
        entry = self.server.runs().get(unquote(name)) if kind in ("run", "live", "report", "page") else None
        if entry is None or (entry.page is None and kind == "page"):
            return HTTPStatus.NOT_FOUND, b"there is no such run", "text/plain", _POLICY
        if kind == "page" and entry.page is not None:
            return HTTPStatus.OK, entry.page.read_bytes(), "text/html", _SANDBOX
        if kind == "live":
            return self._json(live_view(entry))
        if kind == "report":  # the run's page as it would be written now
            run = load_run(entry.path.resolve(), entry.name)
            return HTTPStatus.OK, report_page([run], compare([run])).encode(), "text/html", "frame-ancestors 'none'"
        return self._page("live.html", title=entry.name, heading=entry.name, name=entry.name)

    def _both(self, names: list[str]) -> tuple[HTTPStatus, bytes, str, str]:
        """Two runs side by side, as one report."""
        entries = [self.server.runs().get(unquote(name)) for name in names]
        if len(entries) != 2 or None in entries:
            return HTTPStatus.NOT_FOUND, b"name two runs of the list", "text/plain", _POLICY
        runs = [load_run(entry.path.resolve(), entry.name) for entry in entries if entry is not None]
        page = report_page(runs, compare(runs)).encode()
        return HTTPStatus.OK, page, "text/html", "frame-ancestors 'none'"

    def _page(self, template: str, **values: Any) -> tuple[HTTPStatus, bytes, str, str]:
        return HTTPStatus.OK, render(template, package="kinfed.board", **values).encode(), "text/html", _POLICY

    def _json(self, value: Any) -> tuple[HTTPStatus, bytes, str, str]:
        return HTTPStatus.OK, storage.to_json(value).encode(), "application/json", _POLICY

    def _send(self, status: HTTPStatus, content: bytes, kind: str, policy: str = _POLICY) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: the terminal is for the address."""


@cache
def _file(name: str) -> bytes:
    return files("kinfed.board").joinpath("templates", name).read_bytes()


@cache
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).encode()


def listed(entry: RunEntry) -> dict[str, Any]:
    """A row of the list."""
    plain = ("name", "kind", "state", "dataset", "algorithms", "done", "planned", "problem")
    return {name: getattr(entry, name) for name in plain} | {
        "opens": _opens(entry),
        "changed": datetime.fromtimestamp(entry.changed).strftime("%Y-%m-%d %H:%M"),
        "seeds": len(entry.settings.get("seeds") or ()),
        "rounds": entry.settings.get("rounds"),
        "best": "" if entry.best is None else str(entry.best),
    }


def _opens(entry: RunEntry) -> str:
    """What of the board shows an entry; "" if nothing does."""
    return "page" if entry.page is not None else "run" if entry.kind in ("run", "deployment") else ""


def live_view(entry: RunEntry) -> dict[str, Any]:
    """The state of one run: how far every method and seed is, and curves so far."""
    run = load_run(entry.path.resolve(), entry.name)
    comparison = single_run(run)
    figure = learning_curves(comparison) if any(trial.rounds for trial in run.trials) else None
    return {
        **listed(entry),
        "title": headline([run]) if run.trials else entry.name,
        "notes": list(run.notes),
        "trials": [
            _trial(trial, run, entry.planned if entry.kind == "deployment" else run.last_planned_round)
            for trial in run.trials
        ],
        "figure": None if figure is None else figure.payload,
        "methods": [{"label": method.label, "color": style_of(method).color} for method in comparison.methods],
        "dark": DARK,
        **_deployment(entry, run),
    }


def _deployment(entry: RunEntry, run: RunRecord) -> dict[str, Any]:
    """What a deployment's server last wrote of its sites: who is awaited, who is away, what is left of epsilon. Where
    the choice of clients is secret, the page does not say who was asked."""
    path = entry.path / STATUS
    if not path.is_file():
        return {"sites": []}
    status = storage.read_json(path, "the status of a deployment")
    hides = bool(status.get("secret_choice"))
    awaits = entry.state == "running" and not hides
    sites = [
        {
            "name": str(name),
            "connected": bool(site.get("connected")),
            "awaited": _clock(site.get("awaited_since")) if awaits else "",
            "answered": "" if hides else _clock(site.get("last_answer")),
            "error": str(site.get("last_error") or ""),
        }
        for name, site in dict(status.get("clients") or {}).items()
    ]
    awaited = ", ".join(str(site["name"]) for site in sites if site["awaited"])
    doing = str(status.get("doing", "")) + (f"; awaited: {awaited}" if awaited else "")
    title = f"{entry.name}: {', '.join(entry.algorithms)} at {len(sites)} sites"
    return {"sites": sites, "title": title, "doing": doing, "budget": _budget(run, status.get("epsilon_limit"))}


def _budget(run: RunRecord, limit: float | None) -> str:
    if limit is None:
        return ""
    figures = [one.method["privacy"] for trial in run.trials for one in trial.rounds if "privacy" in one.method]
    return (
        f"epsilon {figures[-1]['epsilon_max']:.3g} of {limit:g} is spent" if figures else f"epsilon {limit:g} at most"
    )


def _clock(text: Any) -> str:
    return "" if not text else datetime.fromisoformat(str(text)).astimezone().strftime("%H:%M:%S")


def _trial(trial: TrialRecord, run: RunRecord, planned: int | None) -> dict[str, Any]:
    personal, metric = trial.final.metrics.get("personal", {}), run.config.get("metric")
    return {
        "algorithm": trial.algorithm,
        "seed": trial.seed,
        "round": trial.rounds[-1].number if trial.rounds else trial.round,
        "planned": planned,
        "finished": trial.finished,
        "figure": headline_text(personal, metric if isinstance(metric, str) else None),
    }
