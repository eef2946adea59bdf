"""The audit log: what left and what came, in lines that cannot be changed unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, write_nodes
from typer.testing import CliRunner

from kinfed.cli.app import app
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operations.audit_log import CAME, LEFT, REFUSED, SENT, AuditHead, AuditLog, unmatched
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import Packet
from kinfed.errors import KinfedError, StorageError

NAMES = ("a", "b", "c")


def deploy(folder: Path, rules: dict[str, Any] | None = None, **settings: Any) -> Loopback:
    rng = np.random.default_rng(0)
    x, owner = rng.normal(size=(90, 4)).astype(np.float32), np.repeat(np.arange(3), 30)
    nodes = write_nodes(folder, x, (x[:, 0] > 0).astype(np.int64), owner, NAMES)
    for number in nodes:
        nodes[number] |= rules or {}
    config = {"method": "fedavg", "model": "mlr", "clients": ",".join(NAMES), "rounds": 2, "steps": 1, "classes": 2,
              "out": str(folder / "run"), "scaling": "none", **settings}  # fmt: skip
    network = Loopback(config, nodes)
    serve(Deployment.parse(config), network, network.log.append, **network.time)
    return network


def logs(folder: Path, client: str = "a") -> tuple[AuditLog, AuditLog]:
    return Vault(folder / f"vault-{client}").audit_log(client), AuditLog(folder / "run" / "transfers.jsonl")


def test_every_message_is_in_both_logs_under_the_same_digest(tmp_path: Path) -> None:
    network = deploy(tmp_path)
    for client in NAMES:
        node, server = logs(tmp_path, client)
        left = [(entry["kind"], entry["content"]) for entry in node.read()]
        came = [(entry["kind"], entry["content"]) for entry in server.read() if entry["event"] == CAME
                and entry["client"] == client]  # fmt: skip
        assert left == came
        assert unmatched(node, server, client) == []
        assert [kind for kind, _ in left] == ["hello", "train", "train", "evaluate"]
    node, server = logs(tmp_path)
    trained = [entry for entry in node.read() if entry["kind"] == "train"]
    assert [(entry["round"], entry["rule"], entry["event"]) for entry in trained] == [
        (1, "an update", LEFT), (2, "an update", LEFT)
    ]  # fmt: skip
    sent = [entry for entry in server.read() if entry["event"] == SENT]
    assert len(sent) == sum("name" in one.packet.header for one in network.messages)
    assert node.verify().lines == 4


def test_refusals_are_logged_with_what_was_said_to_the_server(tmp_path: Path) -> None:
    with pytest.raises(KinfedError):
        deploy(tmp_path, {"methods": "ditto"}, patience=2)
    node, server = logs(tmp_path)
    refused = [entry for entry in node.read() if entry["event"] == REFUSED]
    assert {entry["rule"] for entry in refused} == {"Refused"}
    assert "takes part in ditto only" in refused[0]["text"]
    there = [entry for entry in server.read() if entry["event"] == REFUSED and entry["client"] == "a"]
    assert len(there) == len(refused)


def test_prices_stand_beside_what_left(tmp_path: Path) -> None:
    deploy(tmp_path, {"epsilon": "1000"}, **{"dp-noise": 2.0, "dp-clip": 1.0, "eval-every": 0})
    node, _ = logs(tmp_path)
    trained = [entry["epsilon"]["training"] for entry in node.read() if entry["kind"] == "train"]
    assert trained[0][0] < trained[1][0] < trained[1][1] == 1000


def spoiled(change: str, lines: list[bytes]) -> list[bytes]:
    if change == "changed":
        return [lines[0], lines[1].replace(b"an update", b"a greeting"), *lines[2:]]
    if change == "out":
        return [lines[0], *lines[2:]]
    if change == "moved":
        return [lines[0], lines[2], lines[1], *lines[3:]]
    return lines[:-1]


@pytest.mark.parametrize("change", ["changed", "out", "moved", "cut"])
def test_a_log_that_was_touched_is_not_whole(tmp_path: Path, change: str) -> None:
    deploy(tmp_path)
    node, _ = logs(tmp_path)
    node.path.write_bytes(b"".join(spoiled(change, node.path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(StorageError):
        node.verify()


def test_a_log_that_was_written_anew_is_known_by_an_earlier_head(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log.jsonl")
    log.append([{"event": LEFT, "kind": "train"}])
    head = log.verify()
    log.append([{"event": LEFT, "kind": "evaluate"}])
    assert log.verify(head).lines == 2
    for path in tmp_path.glob("*"):
        path.unlink()
    log.append([{"event": LEFT, "kind": "nothing"}, {"event": LEFT, "kind": "nothing"}])
    assert log.verify().lines == 2
    with pytest.raises(StorageError, match="never had the head"):
        log.verify(head)


def test_nothing_leaves_with_a_log_that_was_cut(tmp_path: Path) -> None:
    deploy(tmp_path)
    node, _ = logs(tmp_path)
    node.path.write_bytes(node.path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(StorageError, match="was cut"):
        node.append([{"event": LEFT, "kind": "train"}])


def test_what_a_crash_left_of_a_line_is_taken_off(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "log.jsonl")
    log.append([{"event": LEFT, "kind": "train"}])
    with log.path.open("ab") as file:
        file.write(b'{"n": 2, "eve')
    assert log.verify().lines == 1
    log.append([{"event": LEFT, "kind": "evaluate"}])
    assert [entry["kind"] for entry in log.read()] == ["train", "evaluate"]
    assert log.verify() == AuditHead(2, log.verify().digest)


def test_the_command_shows_verifies_and_compares(tmp_path: Path) -> None:
    deploy(tmp_path)
    node, server = logs(tmp_path)
    vault, run = str(tmp_path / "vault-a"), str(tmp_path / "run")
    shown = CliRunner().invoke(app, ["audit", "show", vault])
    assert "an update" in " ".join(shown.output.split())
    lines = CliRunner().invoke(app, ["audit", "show", run, "--json", "--client", "b"]).stdout.splitlines()
    assert {json.loads(line)["client"] for line in lines} == {"b"}
    verified = CliRunner().invoke(app, ["audit", "verify", vault, "--server", run])
    assert verified.exit_code == 0
    assert str(node.verify()) in verified.output
    server.append([{"event": CAME, "client": "a", "kind": "train", "content": "0" * 64}])
    other = CliRunner().invoke(app, ["audit", "verify", vault, "--server", run])
    assert other.exit_code == 1
    assert "line" in other.output


def test_logs_are_compared_whatever_letters_a_name_has_and_whatever_a_copy_is_called(tmp_path: Path) -> None:
    """The log of "süd" is in a file with a quoted name, which no line of the server has: all was said to be there."""
    log, server = AuditLog(tmp_path / "s%C3%BCd.jsonl"), tmp_path / "transfers.jsonl"
    log.append([{"event": LEFT, "client": "süd", "kind": "train", "content": "1" * 64}])
    AuditLog(server).append([{"event": CAME, "client": "süd", "kind": "train", "content": "0" * 64}])
    copy = log.path.rename(tmp_path / "copy.jsonl")
    (tmp_path / "s%C3%BCd.jsonl.head").rename(tmp_path / "copy.jsonl.head")
    forged = CliRunner().invoke(app, ["audit", "verify", str(copy), "--server", str(server)])
    assert forged.exit_code == 1
    assert "came from süd" in " ".join(forged.output.split())


def test_a_server_cannot_end_the_log_with_long_words(tmp_path: Path) -> None:
    network = deploy(tmp_path)
    node = Node.of(network.nodes_[100], network.run_config)
    order = {"name": "a", "run": "x" * 200_000, "round": 10**400, "accepted": 0, "effort": 1.0}
    for _ in range(2):
        with pytest.raises(KinfedError):
            node.answer("train", Packet(order))
    log, _ = logs(tmp_path)
    assert log.verify().lines == 6
    assert max(map(len, log.path.read_bytes().splitlines())) < 4_000
