"""One site in two federations, and servers and nodes of different versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, write_nodes

from kinfed.deploy.node.node import Node
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.enrolment_message import Greeting
from kinfed.deploy.transport.wire import HELLO, MessageError, Packet
from kinfed.errors import ConfigError, KinfedError
from kinfed.version import __version__

PRIVATE = {"dp-noise": 2.0, "dp-clip": 1.0}


def federation(folder: Path, names: tuple[str, str], shared: dict[str, Any], **settings: Any) -> Loopback:
    """A federation in which the first client is the site that both know."""
    rng = np.random.default_rng(0)
    x, owner = rng.normal(size=(60, 4)).astype(np.float32), np.repeat(np.arange(2), 30)
    folder.mkdir()
    nodes = write_nodes(folder, x, (x[:, 0] > 0).astype(np.int64), owner, names)
    nodes[100] |= shared
    config = {"method": "fedavg", "model": "mlr", "clients": ",".join(names), "rounds": 2, "steps": 1, "classes": 2,
              "out": str(folder / "run"), "scaling": "none", "wait": 1.0, **PRIVATE, **settings}  # fmt: skip
    network = Loopback(config, nodes)
    serve(Deployment.parse(config), network, network.log.append, **network.time)
    return network


@pytest.mark.parametrize("ledger", ["", "hospital"])
def test_two_federations_share_an_epsilon_where_they_share_a_ledger(tmp_path: Path, ledger: str) -> None:
    shared = {"vault": str(tmp_path / "vault"), "epsilon": "3.5", "ledger": ledger}
    federation(tmp_path / "first", ("a", "b"), shared)
    second = federation(tmp_path / "second", ("site-7", "c"), shared, quorum=1)
    refused = [line for line in second.log if "without site-7" in line and "no more than epsilon 3.5" in line]
    assert bool(refused) is bool(ledger)


def greeted(config: dict[str, Any], node: dict[str, Any], version: str) -> Packet:
    return Node.of(node, config).answer(HELLO, Packet({"kind": HELLO, "nonce": "0" * 32, "kinfed": version}))


def test_versions_of_one_minor_work_together_and_others_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = federation(tmp_path / "first", ("a", "b"), {})
    config, node = dict(network.run_config), network.nodes_[100]
    major, minor, patch = (int(part) for part in __version__.split("."))
    header = greeted(config, node, f"{major}.{minor}.{patch + 3}").header["clients"][0]
    assert header["kinfed"] == __version__
    assert Greeting.read(header | {"kinfed": f"{major}.{minor}.{patch + 3}"}, 100).name == "a"
    assert Greeting.read({key: value for key, value in header.items() if key != "kinfed"}, 100).name == "a"
    with pytest.raises(KinfedError, match=rf"kinfed=={major}.{minor + 1}"):
        greeted(config, node, f"{major}.{minor + 1}.0")
    with pytest.raises(MessageError, match=rf"a has kinfed .* the server .*kinfed=={major}.{minor}"):
        Greeting.read(header | {"kinfed": f"{major}.{minor + 1}.0"}, 100)


def test_settings_of_a_newer_server_are_ignored_while_they_are_not_set(tmp_path: Path) -> None:
    config = {"classes": 2, "clients": "a,b", "brand-new": ""}
    assert Deployment.parse(config).num_clients == 2
    with pytest.raises(ConfigError, match="install its version"):
        Deployment.parse(config | {"brand-new": 3})
