"""Health, metrics, alerts and lines of logs, from the files of a deployment that was run."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_audit_log import NAMES, deploy

from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operations import checks
from kinfed.deploy.operations.alerts import Alerts
from kinfed.deploy.operations.checks import OK, WARNING, WRONG, Condition
from kinfed.deploy.operations.log_lines import json_lines, place_lines, rewritten
from kinfed.deploy.operations.metrics_text import Sample, render
from kinfed.deploy.operations.watched import WatchedNode, WatchedServer
from kinfed.deploy.programs.health_page import MOST_CONNECTIONS, HealthPages, HealthServer, parse_listen
from kinfed.errors import ConfigError


def heartbeat(folder: Path, *, runs: bool = True, age: float = 0.0) -> Path:
    path = folder / "service.json"
    programs = {"supernode": {"runs": runs, "starts": 2}}
    path.write_text(json.dumps({"written": time.time() - age, "programs": programs, "tasks": 7}))
    return path


def node_of(folder: Path, **beat: Any) -> WatchedNode:
    logs = {"a": Vault(folder / "vault-a").audit_log("a").path}
    return WatchedNode("node", heartbeat(folder, **beat), folder / "vault-a", logs=logs)


def server_of(folder: Path) -> WatchedServer:
    notes = folder / "unfinished"
    notes.mkdir()
    (notes / "ended-0123.json").write_text(json.dumps({"run": "1", "out": str(folder / "run")}))
    return WatchedServer("server", heartbeat(folder), folder, notes=notes)


def values(watched: Any) -> dict[tuple[str, str], float]:
    """By name and the values of its labels."""
    return {(sample.name, " ".join(sample.labels.values())): sample.value for sample in watched.samples()}


def test_metrics_of_a_node_say_what_left_and_what_is_left_of_epsilon(tmp_path: Path) -> None:
    deploy(tmp_path, {"epsilon": "1000"}, **{"dp-noise": 2.0, "dp-clip": 1.0})
    node = node_of(tmp_path)
    before = values(node)
    assert before["kinfed_messages_total", "a train left"] == 2
    assert before["kinfed_program_up", "supernode"] == 1
    spent, left = (before[f"kinfed_epsilon_{which}", "a training"] for which in ("spent", "left"))
    assert 0 < spent < 1000
    assert spent + left == pytest.approx(1000)
    assert values(node) == before  # what was counted is not counted again
    text = render(node.samples())
    assert "30" not in {line.rpartition(" ")[2] for line in text.splitlines()}  # a has 30 rows, which nobody asked for


def test_metrics_of_a_server_say_rounds_sites_and_bytes(tmp_path: Path) -> None:
    deploy(tmp_path)
    server = values(server_of(tmp_path))
    assert server["kinfed_rounds_total", "run"] == server["kinfed_rounds_planned", "run"] == 2
    assert server["kinfed_run_state", "run done fedavg"] == 1
    assert server["kinfed_sites", "run"] == 3
    assert server["kinfed_messages_total", "run b train came"] == 2
    journal = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert server["kinfed_run_bytes_total", "run up"] == sum(record["bytes_up"] for record in journal)


def test_where_the_choice_of_clients_is_secret_metrics_do_not_tell_it(tmp_path: Path) -> None:
    deploy(tmp_path, **{"user-noise": 1.0, "user-clip": 1.0, "participation": 0.67})
    samples = list(server_of(tmp_path).samples())
    told = {sample.name for sample in samples if {"site", "client"} & sample.labels.keys()}
    assert told == {"kinfed_site_connected"}
    assert "kinfed_sites_awaited" not in {sample.name for sample in samples}


def test_labels_are_escaped() -> None:
    assert render([Sample("kinfed_sites", 3, {"run": 'a"b\\c\nd'})]).splitlines()[-1] == (
        'kinfed_sites{run="a\\"b\\\\c\\nd"} 3'
    )


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler] | None = None, pages: HealthPages | None = None) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), handler) if handler else HealthServer(("127.0.0.1", 0), pages)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_health_answers_503_where_something_is_wrong_and_says_what_to_do(tmp_path: Path) -> None:
    deploy(tmp_path)
    node = node_of(tmp_path)
    with listening(pages=HealthPages(node)) as address:
        with urllib.request.urlopen(f"{address}/health") as answer:
            assert json.load(answer)["status"] == OK
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"kinfed_messages_total" in answer.read()
        heartbeat(tmp_path, runs=False)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}/health")
        with refused.value:
            assert refused.value.code == 503
            wrong = [condition for condition in json.load(refused.value)["conditions"] if condition["level"] == WRONG]
        assert [(condition["check"], bool(condition["advice"])) for condition in wrong] == [("programs", True)]
        for path in ("/", "/health/../metrics", "/run"):
            with pytest.raises(urllib.error.HTTPError) as missing:
                urllib.request.urlopen(address + path)
            missing.value.close()
            assert missing.value.code == 404


def test_a_page_from_elsewhere_reads_nothing_by_a_name_of_its_own(tmp_path: Path) -> None:
    """DNS rebinding: its name points to this machine, and the browser sends it as Host."""
    with listening(pages=HealthPages(WatchedNode("node", heartbeat(tmp_path), tmp_path))) as address:
        port = address.rpartition(":")[2]
        for host, status in ((f"evil.example:{port}", 421), ("evil.example", 421), (f"localhost:{port}", 200)):
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
            connection.request("GET", "/metrics", headers={"Host": host})
            answer = connection.getresponse()
            text = answer.read()
            connection.close()
            assert answer.status == status
            assert (b"kinfed_" in text) == (status == 200)


def test_every_address_of_this_machine_alone_is_one() -> None:
    with HealthServer(("127.0.0.1", 0), None) as server:  # type: ignore[arg-type]
        server.server_address = "127.0.0.2", 9464
        meant = {host: server.is_meant(f"{host}:9464") for host in ("evil.example", "localhost", "127.0.0.2")}
    assert meant == {"evil.example": False, "localhost": True, "127.0.0.2": True}


def test_a_connection_for_which_no_thread_begins_leaves_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with HealthServer(("127.0.0.1", 0), None) as server, socket.socket() as request:  # type: ignore[arg-type]
        for _ in range(MOST_CONNECTIONS + 1):
            with pytest.raises(RuntimeError, match="new thread"):
                server.process_request(request, None)


def test_connections_that_say_nothing_leave_room_for_alerts(tmp_path: Path) -> None:
    """A thousand would have taken all files that the process may open, so that it could tell nobody of a trouble."""
    before = threading.active_count()
    with (
        listening(pages=HealthPages(WatchedNode("node", heartbeat(tmp_path), tmp_path))) as address,
        contextlib.ExitStack() as stack,
    ):
        door = "127.0.0.1", int(address.rpartition(":")[2])
        silent = [stack.enter_context(socket.create_connection(door, 5)) for _ in range(MOST_CONNECTIONS + 1)]
        assert silent[-1].recv(1) == b""
        assert threading.active_count() - before <= MOST_CONNECTIONS + 1


def test_a_service_that_hangs_is_reported(tmp_path: Path) -> None:
    assert [condition.level for condition in checks.service(heartbeat(tmp_path, age=120))] == [WRONG]
    assert [condition.level for condition in checks.service(tmp_path / "nothing.json")] == [WRONG]


def test_a_damaged_audit_log_is_found(tmp_path: Path) -> None:
    deploy(tmp_path)
    node = node_of(tmp_path)
    next(iter(node.logs.values())).write_bytes(b"nonsense\n")
    assert WRONG in {condition.level for condition in node.conditions() if condition.check == "audit log"}


def test_alerts_are_told_once_and_when_they_end(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ncat >> {told}\necho >> {told}\n")
    hook.chmod(0o700)
    alerts = Alerts(str(hook), "node", "a", lambda text: None)
    full = Condition("disk", WRONG, "/srv has 12 MB left", "free some room")
    alerts.look([full])
    alerts.look([Condition("disk", WRONG, "/srv has 11 MB left", "free some room")])
    alerts.look([Condition("disk", OK, "/srv has 2 GB left")])
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(line["state"], line["check"]) for line in lines] == [("begins", "disk"), ("ended", "disk")]


def test_a_webhook_that_fails_is_tried_again() -> None:
    bodies, says = [], []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(bodies) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Hook) as address:
        alerts = Alerts(address, "server", "fl", says.append)
        trouble = Condition("keys of sites", WARNING, "b expires", "renew it")
        for _ in range(3):
            alerts.look([trouble])
    assert [body["state"] for body in bodies] == ["begins", "begins"]
    assert "tried again" in says[0]
    with pytest.raises(ConfigError, match="is no command"):
        Alerts("page-me 'without an end", "server", "fl", says.append)


def test_lines_of_a_message_have_one_identifier_at_server_and_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KINFED_LOG", "json")
    with json_lines("both"):
        deploy(tmp_path)
        logging.getLogger("kinfed.node").warning("no answer")
    place_lines(run=None, round=None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    trained = [line for line in lines if line.get("kind") == "train" and line.get("round") == 2]
    by_event = {event: {line["id"] for line in trained if line["event"] == event} for event in ("sent", "left", "came")}
    run = trained[0]["run"]
    assert by_event["sent"] == by_event["left"] == by_event["came"] == {f"{run}/2/{name}" for name in NAMES}
    assert lines[-1]["level"] == "warning"
    assert json.loads(rewritten("plain text", "superlink"))["text"] == "plain text"


@pytest.mark.parametrize("text", ["", "x", "0", "70000", ":9464"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_listen(text)
    assert parse_listen("9464") == ("127.0.0.1", 9464)
    assert parse_listen("[::]:9464") == ("::", 9464)
