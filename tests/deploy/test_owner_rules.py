"""What an operator, an accident or a hostile order may try at a node, and the sentences that follow."""

from __future__ import annotations

import contextlib
import http.server
import resource
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinfed.deploy.node.node import Node
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.operator.services import NodeFile, clock_fault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.server.status import read_status
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.errors import ConfigError, StorageError
from tests.deploy import test_gate
from tests.deploy.test_gate import network

config = test_gate.config  # a fixture


# ---- settings that a run cannot have, before anybody is asked ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": "method=ditto"}, "method says fedavg, and the options method=ditto"),
        ({"model": "mlp", "options": "model.width=8"}, "option|options"),
        ({"metric": "rmse"}, "rmse"),
        ({"loss": "huber"}, "huber|loss"),
    ],
)
def test_wrong_options_are_refused_before_clients_enrol(settings: dict[str, Any], message: str) -> None:
    """`options = "method=ditto"` ran Ditto at nodes whose owners allowed fedavg alone; options of a model were read
    after all nodes had enrolled."""
    with pytest.raises(ConfigError, match=message):
        Deployment.parse(test_gate.RUN | settings)


# ---- orders ----


@pytest.mark.parametrize(
    "header", [{"number": 2**62}, {"number": -1}, {"num_clients": 2**62}, {"longest": [2**39] * 3}]
)
def test_an_order_of_enormous_numbers_takes_no_memory(config: dict[str, Any], header: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=f"^{min(header).replace('num_clients', 'number')} should be"):
        test_gate.ask(config, "train", {}, **header)


# ---- a run without updates ----


def test_a_run_without_any_update_is_not_done(tmp_path: Path) -> None:
    """It ended with "done" and 0 of 4 updates, where it had fewer rounds than its patience."""
    net, nodes = network(tmp_path, {"dp-noise": ""})
    for node in nodes.values():
        node["methods"] = "ditto"
    with pytest.raises(TooFewClients, match="no round of 2 had enough updates"):
        serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    assert not any(line.startswith("done") for line in net.log)
    assert read_status(tmp_path / "run").state == "stopped"


def test_data_that_have_shrunk_are_named_as_such(tmp_path: Path) -> None:
    """The sentence was that the client computed more private gradients than the method takes."""
    net, nodes = network(tmp_path, {"dp-noise": 5.0})

    def shrink(client: str, question: Any, answer: Any) -> Any:
        if question.kind == "hello" and client == "b":
            data = dict(np.load(nodes[101]["data"]))
            np.savez(nodes[101]["data"], **{name: rows[:18] for name, rows in data.items()})
        return answer

    net.tamper = shrink
    serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    assert any("dropped b: it takes each of its examples with chance" in line for line in net.log), net.log
    assert any("fewer training examples now" in line for line in net.log)


# ---- nothing is paid for what cannot leave ----


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """In this process, so that a planted bug is in it."""
    most, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_without_room_costs_no_epsilon(config: dict[str, Any]) -> None:
    """Six answers were paid for and one had arrived, where the disk was full."""
    with no_file_above(40_000), pytest.raises(StorageError, match=r"^cannot find room to answer in \(vault\)"):
        test_gate.ask(config, "train", {})
    page = Vault(config["vault"]).privacy_log("a").read()
    assert page.answers == ()
    test_gate.ask(config, "train", {})
    assert len(Vault(config["vault"]).privacy_log("a").read().answers) == 1


# ---- clocks ----


@pytest.mark.parametrize(("ahead", "words"), [(600, " s ahead of"), (-900, " s behind"), (0, "")])
def test_a_wrong_clock_is_named_and_not_the_key(tmp_path: Path, ahead: int, words: str) -> None:
    make_certificates(tmp_path, ["127.0.0.1"], [])

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(int(time.time()) - ahead)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    file = NodeFile(f"127.0.0.1:{server.server_port}", {"client": "a"}, tmp_path, tmp_path / "ca.crt")
    sentence = clock_fault(file)
    thread.join()
    server.server_close()
    assert bool(sentence) == bool(words)
    assert words in sentence
    if words:
        assert sentence.endswith("the key is not at fault")
    assert clock_fault(file) == ""  # nobody listens any more: that is no matter of clocks


def test_several_clients_of_a_node_keep_ledgers_of_their_own(config: dict[str, Any], tmp_path: Path) -> None:
    Path(config["data"]).rename(tmp_path / "x.npz")
    for name in ("a", "b"):
        (tmp_path / f"{name}.npz").write_bytes((tmp_path / "x.npz").read_bytes())
    both = config | {"client": "a,b", "data": str(tmp_path / "{client}.npz")}
    answer = Node.of(both, test_gate.RUN).answer("hello", Packet({"nonce": "00"}))
    assert [greeting["name"] for greeting in answer.header["clients"]] == ["a", "b"]
    for name in ("a", "b"):
        assert Vault(config["vault"]).privacy_log(name).read().released == {"": {"hello: a greeting": 1}}
