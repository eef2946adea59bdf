"""The reason of every silence: who is awaited, since when, what it last said; in the log and in status.json."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import kinfed
from loopback import Loopback, write_nodes
from manifests import change_manifest

from kinfed.core.backoff import LONGEST_PAUSE, Silence
from kinfed.deploy.server.deployment_server import TooFewClients, serve
from kinfed.deploy.server.status import DONE, RUNNING, STOPPED, read_progress, read_status
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Presence, Sent
from kinfed.deploy.transport.wire import TRAIN, Packet
from kinfed.errors import KinfedError, StorageError

SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "rounds": 2, "clients": "a,b", "classes": "2", "scaling": "none", "steps": 1,
    "batch": 5, "eval-every": 0, "deadline": 100.0, "wait": 100.0,
}  # fmt: skip


def make(folder: Path, **settings: Any) -> Loopback:
    numbers = np.random.default_rng(0)
    owner = np.repeat([0, 1], 12)
    x, y = numbers.normal(size=(24, 3)).astype(np.float32), np.arange(24) % 2
    return Loopback(SETTINGS | {"out": str(folder / "run")} | settings, write_nodes(folder, x, y, owner, ["a", "b"]))


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def lines(net: Loopback, pattern: str) -> list[str]:
    return [line for line in net.log if re.search(pattern, line)]


def test_silence_is_spoken_of_less_and_less_often() -> None:
    silence = Silence(0.0)
    spoken = [now for now in range(2000) if silence.is_due(float(now))]
    assert spoken == [30, 90, 210, 450, 750, 1050, 1350, 1650, 1950]
    assert max(b - a for a, b in itertools.pairwise(spoken)) == LONGEST_PAUSE


def test_a_sentence_says_what_is_known() -> None:
    presence = Presence()
    assert presence.sentence("a", 5.0, set()) == "a: never seen yet"
    presence.see(["a"], 10.0)
    assert presence.sentence("a", 15.0, {"a"}) == "a: connected, not asked yet"
    presence.ask("a", 20.0)
    presence.ask("a", 30.0)  # asked again: awaited since the first time
    assert presence.sentence("a", 40.0, {"a"}) == "a: connected, asked 20 s ago, no answer yet"
    presence.note_error("a", 45.0, "its node went away")
    assert presence.sentence("a", 50.0, set()) == (
        "a: not connected, last seen 40 s ago; last error 5 s ago: its node went away"
    )
    presence.settle("a", 60.0)
    assert presence.of("a").asked is None
    assert presence.of("a").answered == presence.of("a").seen == 60.0


def test_the_log_names_who_is_slow_and_for_how_long(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.delay["b"] = 70.0
    run(net)
    first = lines(net, "^train: waiting for")[0]
    assert "waiting for 30 s, for 70 s more at most: 1 of 2 have answered" in first
    assert "b: connected, asked 30 s ago, no answer yet" in first
    assert "a:" not in first


def test_the_log_names_who_has_not_appeared(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.offline.add(101)
    with pytest.raises(TooFewClients):
        run(net)
    first, second = lines(net, "clients are here")
    assert "waiting for 30 s, for 70 s more at most: 1 of 2 clients are here (a); b: never seen yet" in first
    assert "waiting for 90 s" in second


def test_the_log_tells_a_node_that_does_not_say_who_it_is(tmp_path: Path) -> None:
    """As under load: the node is connected, and its first answer takes longer than anybody waits."""
    net = make(tmp_path)
    net.delay["b"] = 1000.0
    with pytest.raises(TooFewClients, match="node 101 is connected, and was asked who it is 100 s ago; no answer yet"):
        run(net)
    assert "node 101 is connected, and was asked who it is 30 s ago" in lines(net, "clients are here")[0]


def test_a_node_that_cannot_take_part_is_explained_while_waiting(tmp_path: Path) -> None:
    net = make(tmp_path)
    (tmp_path / "b.npz").unlink()
    with pytest.raises(TooFewClients):
        run(net)
    assert "node 101 cannot take part: StorageError" in lines(net, "clients are here")[0]


def dies(net: Loopback, node: int, from_round: int, until: float = float("inf")) -> None:
    """Nothing comes from this node any more, from a round on until a time; it stays listed."""
    dead = False

    def lose(_: str, sent: Sent, answer: Packet) -> Packet | None:
        nonlocal dead
        dead = dead or (sent.kind == TRAIN and sent.packet.header["round"] >= from_round)
        return None if sent.node == node and dead and net.now < until else answer

    net.tamper = lose


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_dead_node_costs_one_deadline_and_not_one_in_every_round(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=8, quorum=1)
    dies(net, 101, from_round=3)
    records = journal(run(net))
    assert [record["dropped"] for record in records] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert 100 <= net.now < 120  # seconds: one deadline, and no other
    assert len(lines(net, "^b: no answer; from now on waited for only after a sign of life")) == 1
    assert lines(net, "round 4: without b: no sign of life since an earlier request")
    asked = [sent.packet.header["round"] for sent in net.messages if sent.node == 101 and sent.kind == TRAIN]
    assert asked == [1, 2, 3]  # no order whose answer nobody waits for, and for which the node might pay


def test_a_suspect_that_says_who_it_is_takes_part_again_and_is_waited_for(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=8, quorum=1)
    net.delay["a"] = 20.0  # a round takes 20 s; a suspect is asked every minute who it is
    dies(net, 101, from_round=2, until=200.0)
    records = journal(run(net))
    dropped = [record["dropped"] for record in records]
    assert dropped[:3] == [0, 1, 1]
    assert dropped[-2:] == [0, 0]
    assert lines(net, "^b: back after a silence")


def test_a_node_that_is_slow_and_in_time_is_no_suspect(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=3, quorum=1)
    net.delay["b"] = 60.0
    assert [record["dropped"] for record in journal(run(net))] == [0, 0, 0]
    assert not lines(net, "sign of life")


def test_a_suspect_is_needed_where_there_is_no_quorum_without_it(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=3, quorum=2, patience=9)
    dies(net, 101, from_round=2, until=150.0)
    records = journal(run(net))
    assert [record["dropped"] for record in records] == [0, 2, 0]  # round 3 waits until b is back


def test_a_client_that_comes_back_on_another_node_leaves_its_suspect_behind(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=6, quorum=1)
    dies(net, 101, from_round=2)
    net.nodes_ |= {102: net.nodes_[101]}
    net.offline.add(102)
    sleep = net.sleep

    def come_back(seconds: float) -> None:
        sleep(seconds)
        if net.now > 100.0:
            net.offline.discard(102)

    records = journal(serve(Deployment.parse(net.run_config), net, net.log.append, clock=net.clock, sleep=come_back))
    assert records[-1]["dropped"] == 0
    last = [sent.node for sent in net.messages if sent.kind == TRAIN and sent.packet.header["round"] == 6]
    assert sorted(last) == [100, 102]
    assert lines(net, "client b has appeared on a new node; its former one is not asked any more")


def status_during(net: Loopback, when: Callable[[Loopback], bool]) -> dict[str, Any]:
    """status.json at the last moment at which `when` holds."""
    path, sleep, seen = Path(net.run_config["out"]) / "status.json", net.sleep, dict[str, Any]()

    def look(seconds: float) -> None:
        if when(net) and path.exists():
            seen.update(json.loads(path.read_text()))
        sleep(seconds)

    serve(Deployment.parse(net.run_config), net, net.log.append, clock=net.clock, sleep=look)
    return seen


def test_the_status_names_who_is_awaited_since_when(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.delay["b"] = 40.0
    status = status_during(net, lambda net: 50 < net.now < 78)  # b is greeted until 40, and trained until 80
    assert status["state"] == RUNNING
    assert status["doing"] == "round 1 of 2"
    assert status["clients"]["a"]["awaited_since"] is None
    assert status["clients"]["b"]["awaited_since"] is not None
    assert status["clients"]["b"]["connected"]


def test_the_status_of_a_finished_run(tmp_path: Path) -> None:
    folder = run(make(tmp_path))
    status, progress = read_status(folder), read_progress(folder)
    assert status is not None
    assert (status.state, list(status.clients), status.nodes) == (DONE, ["a", "b"], [])
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert progress.rounds == 2
    assert progress.bytes_up == sum(record["bytes_up"] for record in records) > 0
    assert progress.bytes_down == sum(record["bytes_down"] for record in records) > 0
    assert progress.personal == records[-1]["personal"]
    done = kinfed("deploy", "status", folder, cwd=tmp_path)
    assert done.returncode == 0
    assert "ditto: done since" in done.stdout
    assert "rounds   2 of 2" in done.stdout
    assert f"{progress.bytes_up:,} from clients" in done.stdout


def test_the_status_of_a_run_that_stopped_has_the_reason(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.offline.add(101)
    with pytest.raises(TooFewClients):
        run(net)
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == STOPPED
    assert "1 of 2 clients appeared" in status.reason
    assert "1 of 2 clients appeared" in kinfed("deploy", "status", tmp_path / "run", cwd=tmp_path).stdout


def test_a_server_that_died_is_told_from_one_that_waits(tmp_path: Path) -> None:
    folder = run(make(tmp_path))
    path = folder / "status.json"
    old = json.loads(path.read_text()) | {
        "state": RUNNING,
        "doing": "round 2 of 2",
        "written": "2020-01-01T00:00:00+00:00",
    }
    path.write_text(json.dumps(old))
    assert "it has probably died" in kinfed("deploy", "status", folder, cwd=tmp_path).stdout


def test_the_status_shows_privacy_and_its_budget(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    net = make(tmp_path, **{"method": "fedavg", "dp-noise": 2.0, "dp-budget": 50.0})
    folder = run(net)
    shown = kinfed("deploy", "status", folder, cwd=tmp_path).stdout
    assert re.search(r"epsilon  \d[\d.]* \(of 50\)", shown)


def test_a_site_that_leaves_is_named_and_costs_the_others_nothing(tmp_path: Path) -> None:
    net = make(tmp_path, **{"rounds": 3, "quorum": 1})
    count = 0

    def leave(seconds: float) -> None:
        nonlocal count
        count += len(lines(net, "^round 1 of 3")) and 101 not in net.offline
        if count:
            net.offline.add(101)
        net.now += seconds

    net.delay["a"] = 1.0  # so that there is time to leave
    folder = serve(Deployment.parse(net.run_config), net, net.log.append, clock=net.clock, sleep=leave)
    assert lines(net, "^round 3: without b: not connected")
    assert lines(net, "the last evaluation is without b; their vaults hold an older model")
    status = read_status(folder)
    assert status is not None
    assert status.state == DONE
    assert status.clients["a"]["connected"]
    assert not status.clients["b"]["connected"]
    assert status.clients["b"]["last_error"] == "not connected"


def test_a_site_that_joins_later_takes_part_in_a_new_run_only(tmp_path: Path) -> None:
    """The clients of a run are fixed: in its folder another list is refused, and a new folder takes all."""
    net = make(tmp_path, clients="a")
    run(net)
    later = make(tmp_path, clients="a,b")
    with pytest.raises(KinfedError, match="holds another run"):
        run(later)
    assert later.messages == []  # nobody was asked anything
    later = make(tmp_path, clients="a,b", out=str(tmp_path / "second"))
    status = read_status(run(later))
    assert status is not None
    assert list(status.clients) == ["a", "b"]
    assert len(list((tmp_path / "vault-a").glob("*/a/model.safetensors"))) == 2  # the former run's model stays


def test_an_upgrade_between_rounds_is_in_the_log_and_loses_none(tmp_path: Path) -> None:
    folder = run(make(tmp_path))
    change_manifest(folder, kinfed="0.0.1")
    net = make(tmp_path, rounds=4)
    run(net)
    assert lines(net, "was run with other versions so far .*0.0.1")
    assert lines(net, "resumed after round 2")
    assert read_progress(folder).rounds == 4


def test_a_folder_without_status_and_a_damaged_one(tmp_path: Path) -> None:
    done = kinfed("deploy", "status", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds no status.json" in done.stderr
    (tmp_path / "status.json").write_text('{"state": "running"}')
    with pytest.raises(StorageError, match="is not the status of a deployment"):
        read_status(tmp_path)
