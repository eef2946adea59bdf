"""Real processes: a superlink, supernodes, and what happens when they are killed, fail or lie.

Each story has a network of its own and runs through several faults in turn, for starting processes is what takes the
time; stories, which mostly wait, are played at the same time. Run them alone with:  python -m pytest -m flower
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.settings import Deployment
from kinfed.runs.loop_factory import simulate
from kinfed.serving.pipeline import ModelPipeline

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from flower_network import Network, network
from loopback import write_nodes

from kinfed.deploy.operator.certs import make_certificates

pytestmark = pytest.mark.flower

NAMES = ["a", "b"]
SUMMED = ["a", "b", "c", "d"]  # clients of the secure sums
KILLS = "KINFED_TEST_KILLS" in os.environ
FAULTS = KILLS or "KINFED_TEST_TRIAL" in os.environ
PATIENCE = float(os.environ.get("KINFED_TEST_DEADLINE", "60"))  # seconds; more on a machine that is busy otherwise
SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "rounds": 4, "clients": "a,b", "quorum": 1, "classes": "3", "scaling": "none",
    "steps": 4, "batch": 5, "eval-every": 0, "deadline": PATIENCE, "wait": 300.0,
}  # fmt: skip


LONGER = SETTINGS | {"rounds": 12}


def examples(sizes: tuple[int, ...] = (30, 17)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def models(nodes: dict[int, Any]) -> Tensor:
    modules = [ModelPipeline.read(Vault(config["vault"]).model_path()).module for config in nodes.values()]
    return torch.stack([torch.cat([t.reshape(-1) for t in module.state_dict().values()]) for module in modules])


def simulated(
    settings: dict[str, Any], missing: set[int], names: list[str] = NAMES, sizes: tuple[int, ...] = (30, 17)
) -> Tensor:
    """Personal models of these clients in one process, where the last one is missing in some rounds."""
    x, y, owner = (part[: sum(sizes[: len(names)])] for part in examples(sizes))
    deployment = Deployment.parse(settings)
    federation = Federation.from_arrays(x, y, np.array(names)[owner], num_classes=3)
    loop = simulate(federation, "mlr", deployment.algorithm)
    train = loop.pool.train

    def some(ids: Tensor, download: Any, round: int, *rest: Any, **more: Any) -> Any:
        return train(ids[:-1] if round in missing else ids, download, round, *rest, **more)

    loop.pool.train = some  # type: ignore[method-assign]
    for _ in loop.rounds(deployment.run.rounds):
        pass
    found = loop.evaluate(keep_models=True).models
    assert found is not None
    rows = [loop.task.module_of(row).state_dict() for row in found]  # type: ignore[attr-defined]
    return torch.stack([torch.cat([t.reshape(-1) for t in row.values()]) for row in rows])


@dataclass
class Ending:
    """What a story leaves: the log of its run, a record of each round, models [2, P] in the vaults, and the log of the
    node that nobody knows (where there is one)."""

    said: str
    records: list[dict[str, Any]]
    models: Tensor
    refusal: str = ""
    forger: str = ""  # the log of a registered node that says it is another's client


def killed_processes(tmp_path: Path) -> Ending:
    out, certs = tmp_path / "run", tmp_path / "certs"
    nodes = write_nodes(tmp_path, *examples(), NAMES)
    make_certificates(certs, ["127.0.0.1", "localhost"], [*NAMES, "stranger", "mallory"])
    with network(tmp_path / "net", certs=certs) as net:
        net.start_server()
        net.register(*NAMES, "mallory")
        for config in nodes.values():
            net.start_node(config["client"], config)
        net.start_node("mallory", nodes[101] | {"key": str(certs / "mallory"), "vault": str(tmp_path / "vault-m")})
        net.start_node("stranger", {"client": "b", "data": nodes[101]["data"], "key": str(certs / "b")})
        net.run(net.app(LONGER | {"out": str(out), "keys": str(certs)}))
        net.wait_text(out, "round 1 of 12")
        net.wait_for(lambda: net.log("node-b").count("Receiving: train message") == 2, 120, "b to get round 2")
        net.kill("node-b")
        net.wait_text(out, "1 of 2 updates")
        net.start_node("b", nodes[101])
        net.kill_program("superlink", "kinfed deploy server")  # the fork that does the server's part
        net.wait_text(out, "the server's part of this run has died; it is started again and resumes (try 1)")
        net.wait_for(lambda: net.text(out).count("resumed after round") == 1, 120, "the run to resume")
        net.kill_program("superlink", "flower-superlink")
        net.wait_for(lambda: net.text(out).count("resumed after round") == 2, 240, "the run to resume again")
        said = net.wait_done(out)
        refusal = net.log("node-stranger")
        forger = net.log("node-mallory")
    return Ending(said, records(out), models(nodes), refusal, forger)


@pytest.mark.skipif(not KILLS, reason="takes minutes: set KINFED_TEST_KILLS=1")
def test_killed_nodes_and_a_killed_server_cost_a_round_at_most(endings: Mapping[str, Future[Ending]]) -> None:
    """TLS and authentication. An unregistered key is refused, and a registered node that says it is b is not taken for
    it, not even while b is away: a node is killed in the middle of round 2, then the server's part of the run, then the
    superlink. The server starts both again by itself, and the run resumes. The models in the vaults are those of a
    simulation in which the killed node missed the same rounds.

    Not in every run of the tests: it takes minutes, for Flower takes a killed node for alive for about one. The same
    faults are in tests/deploy/test_deploy.py without processes, and in benchmarks/deployment_kills.py with them."""
    ending = endings["killed processes"].result()
    assert "Failed to activate SuperNode" in ending.refusal
    assert "SuperNode ID" not in ending.refusal  # it never got one
    assert ending.said.count("it says that it is b, with key") >= 2
    assert "Receiving: query.hello message" in ending.forger
    assert "Receiving: train message" not in ending.forger
    missed = {number for number, record in enumerate(ending.records, 1) if record["dropped"]}
    assert 2 in missed
    torch.testing.assert_close(ending.models, simulated(LONGER, missed), rtol=0, atol=1e-6)


_FAULTY = """
import resource, signal
import numpy as np
from flwr.app import Array, ArrayRecord
import kinfed.deploy.programs.flower as flower

honest = flower.client_app

def client_app(message, context):
    if not context.run_config["out"].endswith("/run"):
        return honest(message, context)
    if message.metadata.message_type == "query.hello" and context.node_config["client"] == "c,d":  # forges b's name
        context.node_config |= {"client": "b", "key": context.node_config["key"].replace("{client}", "c")}
    if message.metadata.message_type != "train" or context.node_config["client"] != "b":
        return honest(message, context)
    round = flower.from_records(message.content).header["round"]
    if round == 1:
        raise ValueError("the scanner is switched off")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if round == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # the disk has room for this much
    try:
        reply = honest(message, context)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if round == 2:
        up = reply.content["up"]
        reply.content["up"] = ArrayRecord({k: Array(a.numpy() * np.float32("nan")) for k, a in up.items()})
    return reply

flower.client_app = client_app
"""


_GOES_AWAY = """
import kinfed.deploy.node.node as node

answer = node.Node.answer

def without_d(self, kind, order):
    if kind == "mask" and order.header["name"] == "d":
        raise ConnectionError("gone between two requests")
    return answer(self, kind, order)

node.Node.answer = without_d
"""
# An operator who has changed the server's own kinfed, so that it runs what apps bring.
_HOSTILE_OPERATOR = """
from kinfed.deploy.programs import task_programs

task_programs.TASKS["flwr-serverapp"] = lambda: task_programs._flower_program("flwr-serverapp")
"""
_HOSTILE_APP = """
import os
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

FOLDER = Path({folder!r})
(FOLDER / f"imported-{{os.getpid()}}").touch()
client_app = ClientApp()
server_app = ServerApp()

@client_app.train()
def train(message, context):
    (FOLDER / "ran-at-a-node").touch()
    return Message(RecordDict(), reply_to=message)

@server_app.main()
def main(grid, context):
    content = RecordDict({{"header": ConfigRecord({{"json": "{{}}"}})}})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages)
    text = "\\n".join(reply.error.reason if reply.has_error() else "an answer" for reply in replies)
    (FOLDER / "replies.new").write_text(text)
    (FOLDER / "replies.new").rename(FOLDER / "replies")
"""
SUMMED_SIZES = (30, 17, 12, 22)
SECURE: dict[str, Any] = SETTINGS | {
    "method": "fedavg", "rounds": 1, "clients": ",".join(SUMMED), "quorum": 0, "secure-sum": True, "deadline": 300.0,
    "batch": 100,  # all rows: which of them a smaller batch has is the nodes' secret
}  # fmt: skip


class Attack(NamedTuple):
    """What a hostile operator's app reached: processes that ran its code, whether a node did, and the nodes' replies;
    and the status of requests by path at the door for nodes, and at the superlink itself."""

    imported: int
    at_a_node: bool
    replies: list[str]
    door: dict[str, int]
    superlink: dict[str, int]


class Endings(NamedTuple):
    faults: Ending | None
    sums: Ending
    attack: Attack


def faults_and_secure_sums(tmp_path: Path) -> Endings:
    """Runs in one network with TLS, warm workers and nodes of which some have two clients: a secure sum
    of all four, from which d goes away between its shares and its masked update; then, where that is asked for, a
    faulty b, and a forger; last an app of the operator's own, who has changed the server for it."""
    out, summed, certs = tmp_path / "run", tmp_path / "summed", tmp_path / "certs"
    nodes = write_nodes(tmp_path, *examples(SUMMED_SIZES), SUMMED)
    make_certificates(certs, ["127.0.0.1", "localhost"], SUMMED)
    places = {"data": str(tmp_path / "{client}.npz"), "vault": str(tmp_path / "vault-{client}"), "peers": str(certs)}
    with network(tmp_path / "net", certs=certs) as net:
        net.start_server(faults=_HOSTILE_OPERATOR)
        # Every node is two processes that load torch; the faults need b apart from a.
        shares = {"a": "a", "b": "b", "c": "c,d"} if FAULTS else {"a": "a,b", "c": "c,d"}
        net.register(*shares)
        for name, clients in shares.items():
            config = places | {"client": clients, "key": str(certs / "{client}")}
            net.start_node(name, config, faults=_GOES_AWAY + (_FAULTY if FAULTS else ""))
        net.run(net.app(SECURE | {"out": str(summed), "keys": str(certs)}, name="sums"))
        said = net.wait_done(summed)
        sums = Ending(said, records(summed), models(nodes))
        faults = None
        if FAULTS:
            net.run(net.app(SETTINGS | {"out": str(out), "deadline": 300.0, "keys": str(certs)}, name="faults"))
            said = net.wait_done(out)
            faults = Ending(said, records(out), models(dict(list(nodes.items())[:2])))
        attack = _attack(net, tmp_path / "attack")
        warm = [net.log(name) for name in ("superlink", "node-a")]
    assert all("warm worker: does what flwr-" in log and "cannot be reached" not in log for log in warm)
    return Endings(faults, sums, attack)


def _attack(net: Network, folder: Path) -> Attack:
    folder.mkdir()
    net.run(net.app({}, name="hostile", shim=_HOSTILE_APP.format(folder=str(folder))))
    net.wait_for(lambda: (folder / "replies").exists(), 120, "the nodes' replies")
    paths = ["/v1/control/list-runs", "/v1/runtime/pull-task-input", "/v1/fleet/../control/list-runs", "/docs", "/",
             "/v1/fleet/%2e%2e/control/list-runs", "//v1/control/list-runs", "/v1/fleet/get-run"]  # fmt: skip
    statuses = [{path: _status(net, port, path) for path in paths} for port in (net.port, net.control_port)]
    imported = len(list(folder.glob("imported-*")))
    return Attack(
        imported, (folder / "ran-at-a-node").exists(), (folder / "replies").read_text().splitlines(), *statuses
    )


def _status(net: Network, port: int, path: str) -> int:
    """The status of a request whose path is sent as it is."""
    connection = HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=net.certs / "ca.crt"))
    with contextlib.closing(connection):
        connection.request("POST", path, b"", {"content-type": "application/protobuf"})
        return connection.getresponse().status


def test_no_code_of_an_app_runs_at_a_node(endings: Mapping[str, Future[Any]]) -> None:
    """The operator's own app runs at the server, which the operator has changed, and sends messages to the nodes; they
    refuse it and import nothing of it."""
    attack = endings["faults and secure sums"].result().attack
    assert attack.imported == 1  # the server's part: the attack did take place
    assert not attack.at_a_node
    assert len(attack.replies) == (3 if FAULTS else 2)
    assert all("only the kinfed that is installed here is run" in reply for reply in attack.replies)


def test_nodes_reach_the_fleet_api_alone(endings: Mapping[str, Future[Any]]) -> None:
    attack = endings["faults and secure sums"].result().attack
    fleet = "/v1/fleet/get-run"
    assert {path: status for path, status in attack.door.items() if status != 404} == {fleet: attack.superlink[fleet]}
    assert attack.superlink["/v1/control/list-runs"] != 404  # what the door is there for


def test_a_secure_sum_over_tls_is_that_of_the_clients_that_stayed(endings: Mapping[str, Future[Any]]) -> None:
    """d has shared its secrets and sends no masked update: the others' shares take its masks off the sum, which is that
    of plain averaging without d. Nodes know the keys of the others from their folder of peers."""
    ending = endings["faults and secure sums"].result().sums
    assert "secure sums: no update leaves a node but masked" in ending.said
    assert "round 1, mask: without d: ConnectionError: gone between two requests" in ending.said
    assert [record["dropped"] for record in ending.records] == [1]
    plain = SECURE | {"secure-sum": False}
    expected = simulated(plain, {1}, SUMMED, SUMMED_SIZES)
    torch.testing.assert_close(ending.models, expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(not FAULTS, reason="takes a minute of both cores: set KINFED_TEST_TRIAL=1")
def test_errors_lies_and_full_disks_cost_their_client_a_round_each(endings: Mapping[str, Future[Any]]) -> None:
    """b's app raises in round 1, its update is NaN in round 2, its disk is full in round 3; round 4 is as if nothing
    had happened, and a never notices."""
    ending = endings["faults and secure sums"].result().faults
    assert "round 1: without b: ValueError: the scanner is switched off" in ending.said
    assert "round 2: dropped b: its update holds NaN or infinity" in ending.said
    assert "round 3: without b: StorageError: cannot write" in ending.said
    assert "what was written before is intact" in ending.said
    assert [record["dropped"] for record in ending.records] == [1, 1, 1, 0]
    expected = simulated(SETTINGS, {1, 2, 3}, NAMES, SUMMED_SIZES)
    torch.testing.assert_close(ending.models, expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(not FAULTS, reason="takes a minute of both cores: set KINFED_TEST_TRIAL=1")
def test_a_registered_node_cannot_take_anothers_name_over_tls(endings: Mapping[str, Future[Any]]) -> None:
    """In the same run the third node says that it is b, with a key that the superlink knows and that is not b's."""
    ending = endings["faults and secure sums"].result().faults
    assert ending.said.count("a node that has appeared cannot take part: it says that it is b, with key") == 1
    assert "b belongs to key" in ending.said


STORIES: dict[str, Callable[[Path], Any]] = {"faults and secure sums": faults_and_secure_sums}
if KILLS:
    STORIES["killed processes"] = killed_processes


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Any]]:
    """All stories, begun. Every wait in them has a limit; their threads do not keep a process that wants to end."""

    def play(story: Callable[[Path], Any], folder: Path, ending: Future[Any]) -> None:
        try:
            ending.set_result(story(folder))
        except BaseException as error:
            ending.set_exception(error)

    begun: dict[str, Future[Any]] = {}
    for name, story in STORIES.items():
        begun[name] = Future()
        folder = tmp_path_factory.mktemp("story")
        threading.Thread(target=play, args=(story, folder, begun[name]), daemon=True).start()
    return begun
