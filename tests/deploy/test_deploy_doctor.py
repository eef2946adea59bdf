"""`kinfed deploy doctor` finds planted troubles, and says what to do about each."""

from __future__ import annotations

import datetime
import json
import os
import socket
import ssl
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from typer.testing import CliRunner

from kinfed.cli.app import app
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operations import checks
from kinfed.deploy.operations.checks import OK, WARNING, WRONG, Condition, version_advice
from kinfed.deploy.operator import certs as certificates
from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.operator.deploy_doctor import node_conditions, server_conditions
from kinfed.deploy.operator.services import ServerPlace
from kinfed.deploy.operator.site_kit import node_toml
from kinfed.version import __version__


class Door(BaseHTTPRequestHandler):
    """The server's door for nodes, as far as the doctor asks."""

    version, hours = __version__, 0.0

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header(checks.VERSION_HEADER, self.version)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=self.hours)
        return now.strftime("%a, %d %b %Y %H:%M:%S GMT")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "certs", ["127.0.0.1"], ["a", "b"])
    return tmp_path / "certs"


@pytest.fixture
def door(certs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(Door, "version", __version__)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "server.crt", certs / "server.key")
    server = HTTPServer(("127.0.0.1", 0), Door)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def node(tmp_path: Path, certs: Path, door: int) -> Path:
    (tmp_path / "a.csv").write_text("age,sick,fold\n" + "".join(f"{20 + k},{k % 2},train\n" for k in range(30)))
    settings = {"client": "a", "data": "a.csv", "label": "sick", "split": "fold", "vault": "vault"}
    (tmp_path / "node.toml").write_text(
        node_toml(f"127.0.0.1:{door}", settings, ca=str(certs / "ca.crt"), key=str(certs / "a"))
    )
    return tmp_path / "node.toml"


def wrong(conditions: list[Condition]) -> dict[str, tuple[str, str]]:
    return {one.check: (one.text, one.advice) for one in conditions if one.level == WRONG}


def test_a_node_in_order_has_nothing_wrong(node: Path) -> None:
    conditions = node_conditions(node)
    assert wrong(conditions) == {}
    assert {"settings", "reach", "clock", "versions", "certificate", "key", "disk", "vault", "rows", "roles"} <= {
        one.check for one in conditions
    }
    assert CliRunner().invoke(app, ["deploy", "doctor", str(node)]).exit_code == 0


def clock(node: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "hours", 1.0)


def disk(node: Path, patch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    patch.setattr(checks.shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**6))


def key(node: Path, patch: pytest.MonkeyPatch) -> None:
    (node.parent / "certs" / "a").chmod(0o644)


def certificate(node: Path, patch: pytest.MonkeyPatch) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    patch.setattr(certificates, "expiry", lambda path: past)


def reach(node: Path, patch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = node.read_text()
    first = text.index('server = "')
    node.write_text(text[:first] + f'server = "127.0.0.1:{port}"' + text[text.index("\n", first) :])


def foreign_authority(node: Path, patch: pytest.MonkeyPatch) -> None:
    make_certificates(node.parent / "others", ["127.0.0.1"])
    node.write_text(node.read_text().replace(str(node.parent / "certs" / "ca.crt"), str(node.parent / "others/ca.crt")))


def versions(node: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Door, "version", "9.1.0")


def rows(node: Path, patch: pytest.MonkeyPatch) -> None:
    node.write_text(node.read_text().replace('split = "fold"', 'split = "folds"'))


def vault(node: Path, patch: pytest.MonkeyPatch) -> None:
    log = Vault(node.parent / "vault").audit_log("a")
    log.append([{"event": "left", "kind": "train"}, {"event": "left", "kind": "train"}])
    log.path.write_bytes(log.path.read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize(("plant", "check", "says", "do"), [
    (clock, "clock", "behind the server's", "Set it"),
    (disk, "disk", "1 MB left", "free some room"),
    (key, "key", "read by others", "chmod 600"),
    (certificate, "certificate", "has expired", "new ca.crt"),
    (reach, "reach", "does not answer", "Nothing has to be open inwards"),
    (foreign_authority, "reach", "not signed by", "ask the operator for ca.crt"),
    (versions, "versions", "9.1.0", "install the same minor version"),
    (rows, "rows", 'split = "folds"', "name the columns as the table does"),
    (vault, "vault", "cut off", "restore the vault"),
])  # fmt: skip
def test_a_planted_trouble_is_found_alone(
    node: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], check: str, says: str, do: str
) -> None:
    plant(node, monkeypatch)
    found = wrong(node_conditions(node))
    assert set(found) == {check}
    text, advice = found[check]
    assert says in text
    assert any(part in advice for part in do.split("|"))


def test_a_server_s_certificate_for_another_name_is_told_apart(node: Path, certs: Path) -> None:
    node.write_text(node.read_text().replace('server = "127.0.0.1', 'server = "localhost'))
    text, advice = wrong(node_conditions(node))["reach"]
    assert "not for localhost" in text
    assert "--host localhost" in advice


def test_a_server_is_looked_at_before_it_runs(certs: Path, tmp_path: Path) -> None:
    def place(port: int) -> ServerPlace:
        return ServerPlace(certs, "127.0.0.1", port, 1, tmp_path / "superlink")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = wrong(server_conditions(place(taken.getsockname()[1])))
        assert "ports" in found
    os.remove(certs / "server.key")
    assert "server.key does not exist" in wrong(server_conditions(place(8000)))["files"][0]


def test_keys_of_sites_that_expire_are_named(certs: Path, tmp_path: Path) -> None:
    text = (certs / "b.pub").read_text().split(" until=")[0]
    soon = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=5)
    (certs / "b.pub").write_text(f"{text} until={soon}\n")
    found = [one for one in checks.members(certs) if one.level == WARNING]
    assert len(found) == 1
    assert "kinfed deploy key b --renew" in found[0].advice


def test_versions_of_one_minor_fit_together() -> None:
    assert version_advice("0.2.7", "0.2.0") == ""
    assert version_advice("", "0.2.0") == ""
    assert "kinfed==0.3.* with the extra node" in version_advice("0.3.0", "0.2.0")


def test_the_command_prints_json_and_its_status_says_whether_anything_is_wrong(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key(node, monkeypatch)
    done = CliRunner().invoke(app, ["deploy", "doctor", str(node), "--json"])
    assert done.exit_code == 1
    assert {one["level"] for one in json.loads(done.stdout) if one["check"] == "key"} == {WRONG}
    assert OK in {one["level"] for one in json.loads(done.stdout)}
