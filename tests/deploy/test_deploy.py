"""A deployment with nodes in this process: the same numbers as a simulation, whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes
from torch import Tensor

from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.core import Tree
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import TooFewClients, serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import MessageError, Packet, message_types, tree_of
from kinfed.engine.personal.personal_models import module_for
from kinfed.errors import ConfigError, DataError, KinfedError, StorageError
from kinfed.records.run_folder import RunFolder
from kinfed.runs.loop_factory import simulate
from kinfed.server.loop import Loop
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["a", "b", "c"]
SETTINGS: dict[str, Any] = {
    "method": "ditto", "model": "mlr", "rounds": 3, "clients": 3, "classes": "3", "scaling": "none", "steps": 4,
    "batch": 5, "eval-every": 0, "deadline": 60.0, "wait": 60.0,
}  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (30, 17, 24))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


@pytest.fixture
def net(tmp_path: Path) -> Loopback:
    return make(tmp_path)


def make(folder: Path, **settings: Any) -> Loopback:
    run_config = SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}
    return Loopback(run_config, write_nodes(folder, *examples(), NAMES))


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def simulated(net: Loopback, standardize: bool = False) -> Loop:
    """The same clients in one process, after the same rounds."""
    x, y, owner = examples()
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3, standardize=standardize)
    deployment = Deployment.parse(net.run_config)
    if deployment.validation_share:
        federation = federation.with_validation(deployment.validation_share, 0)
    loop = simulate(federation, "mlr", deployment.algorithm, participation=deployment.run.participation)
    for _ in loop.rounds(deployment.run.rounds):
        pass
    return loop


def models(net: Loopback, nodes: list[int] | None = None) -> Tensor:
    """[K, width] what the vaults hold."""
    rows = []
    for number in net.nodes_ if nodes is None else nodes:
        config = net.nodes_[number]
        module = ModelPipeline.read(Vault(config["vault"]).model_path()).module
        rows.append(torch.cat([t.detach().reshape(-1) for t in module.state_dict().values()]))
    return torch.stack(rows)


def expected(loop: Loop) -> Tensor:
    found = loop.evaluate(keep_models=True).models
    assert found is not None
    modules = [module_for(loop.task, row) for row in found]  # type: ignore[arg-type]
    return torch.stack([torch.cat([t.reshape(-1) for t in m.state_dict().values()]) for m in modules])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# ---- the same numbers ----

METHODS = {
    "local": "", "fedavg": "", "ditto": "", "fedadam": "", "apfl": "", "pfedme": "", "ifca": "clusters=2",
    "fedem": "components=2", "selffl": "", "fedfomo": "models=2", "cgpfl": "contexts=2", "mocha": "",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_gives_the_models_of_a_simulation(tmp_path: Path, method: str) -> None:
    net = make(tmp_path, method=method, options=METHODS[method])
    folder, loop = run(net), simulated(net)
    torch.testing.assert_close(models(net), expected(loop), rtol=0, atol=1e-6)
    evaluation = loop.evaluate()
    assert evaluation.personal is not None
    result = json.loads((folder / "summary.json").read_text())["results"][0]
    right = float(evaluation.personal.correct.sum() / evaluation.personal.count.sum())
    assert result["personal"]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("method", ["heterofl", "lotteryfl", "fedpac", "fedcp", "gpfl", "knnper"])
def test_masked_messages_and_extended_models_are_those_of_a_simulation(tmp_path: Path, method: str) -> None:
    """Messages that hold other columns for every client travel as such, and are as many bytes as a simulation counts;
    personal models with an extension are in the vault with it, and predict as in one process."""
    net = make(tmp_path, method=method, model="mlp", rounds=2, steps=2)
    folder = run(net)
    x, y, owner = examples()
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    deployment = Deployment.parse(net.run_config)
    if deployment.validation_share:
        federation = federation.with_validation(deployment.validation_share, 0)
    loop = simulate(federation, "mlp", deployment.algorithm)
    reports = list(loop.rounds(2))
    torch.testing.assert_close(models(net), expected(loop), rtol=0, atol=1e-6)
    counted = [(record["bytes_down"], record["bytes_up"]) for record in records(folder)]
    assert counted == [(report.bytes_down, report.bytes_up) for report in reports]
    first = next(one.packet for one in net.messages if one.kind == "train" and one.packet.header["round"] == 1)
    assert sum(t.numel() * t.element_size() for t in first.group("down").values()) <= counted[0][0]


KEPT: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "betas": "0.8,0.99", "optimizer_state": "kept"}


def test_moments_of_local_optimizers_stay_in_the_vaults(tmp_path: Path) -> None:
    net = make(tmp_path, participation=0.67, rounds=4, **KEPT)
    run(net)
    loop = simulated(net)
    torch.testing.assert_close(models(net), expected(loop), rtol=0, atol=1e-6)
    simulation = loop.pool.states()
    steps = dict(zip(simulation["ids"].tolist(), simulation["moments.rows.1.steps"].tolist(), strict=True))
    for number, config in enumerate(net.nodes_.values()):
        (entry,) = Vault(config["vault"]).entries()
        state = Vault(config["vault"]).entry(entry.run, entry.client).state(entry.round)
        assert state is not None
        assert state["optimizer/1.steps"].tolist() == [steps[number]]
    assert not any("optimizer" in group or "moments" in group for one in net.messages for group in one.packet.groups)


def test_only_some_clients_take_part_in_a_round(tmp_path: Path) -> None:
    net = make(tmp_path, participation=0.67, rounds=4)
    folder = run(net)
    assert [r["active"] for r in records(folder)] == [2, 2, 2, 2]
    torch.testing.assert_close(models(net), expected(simulated(net)), rtol=0, atol=1e-6)


def test_one_node_may_have_several_clients(tmp_path: Path) -> None:
    """Also when one of them moves to a node of its own."""
    net = make(tmp_path, scaling="standard", method="fedavg", rounds=4)
    apart = net.nodes_.copy()
    together = {"client": "a, b,c", "data": str(tmp_path / "{client}.npz"), "vault": str(tmp_path / "vault-{client}")}
    net.nodes_.clear()
    net.nodes_[7] = together

    def move(name: str, question: Sent, answer: Packet) -> Packet:
        if question.packet.header.get("round") == 3:
            net.nodes_[8] = apart[102]
        return answer

    net.tamper = move
    run(net)
    assert "client c has appeared on a new node; its former one is not asked any more" in net.log
    assert {one.node for one in net.messages if one.packet.header.get("name") == "c"} == {7, 8}
    assert {one.node for one in net.messages if one.packet.header.get("name") == "a"} == {7}
    loop = simulated(net, standardize=True)
    net.nodes_ = apart
    torch.testing.assert_close(models(net), expected(loop), rtol=0, atol=1e-6)


def test_scaling_is_found_together(tmp_path: Path) -> None:
    net = make(tmp_path, scaling="standard", method="fedavg")
    run(net)
    torch.testing.assert_close(models(net), expected(simulated(net, standardize=True)), rtol=0, atol=1e-6)


def test_bytes_are_those_of_the_messages(net: Loopback) -> None:
    folder = run(net)
    sent = [one.packet for one in net.messages if one.kind == "train"]
    down = sum(t.numel() * t.element_size() for packet in sent for t in packet.group("down").values())
    assert sum(r["bytes_down"] for r in records(folder)) == down


def field_names(kind: type) -> list[str]:
    """Of a message, with those of trees in it."""
    hints, names = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        is_tree = isinstance(inner, type) and issubclass(inner, Tree)
        names += [f"{field.name}.{name}" for name in field_names(inner)] if is_tree else [field.name]
    return names


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_messages_of_every_method_can_be_put_together_again(name: str) -> None:
    down, up = message_types(make_algorithm(name, LocalTraining(), {}))
    for kind in (down, up):
        made = {name: torch.ones(1, 2) for name in field_names(kind)}
        assert tree_of(kind, made).named().keys() == made.keys()
        with pytest.raises(MessageError, match="has no strange"):
            tree_of(kind, made | {"strange": torch.ones(1)})


# ---- what goes wrong ----


def without(net: Loopback, client: str, rounds: set[int]) -> Tensor:
    """Models of a simulation in which this client's updates of some rounds never arrive."""
    x, y, owner = examples()
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    deployment = Deployment.parse(net.run_config)
    loop = simulate(federation, "mlr", deployment.algorithm)
    train, who = loop.pool.train, NAMES.index(client)

    def some(ids: Tensor, download: Any, round: int, *rest: Any, **more: Any) -> Any:
        return train(ids[ids != who] if round in rounds else ids, download, round, *rest, **more)

    loop.pool.train = some  # type: ignore[method-assign]
    for _ in loop.rounds(deployment.run.rounds):
        pass
    return expected(loop)


def spoil(change: Any, round: int = 2, client: str = "b") -> Any:
    def tamper(name: str, question: Sent, answer: Packet) -> Any:
        wanted = question.kind == "train" and name == client and question.packet.header["round"] == round
        return change(answer) if wanted else answer

    return tamper


def up(answer: Packet, **tensors: Tensor) -> Packet:
    return Packet(answer.header, {**answer.groups, "up": {**answer.group("up"), **tensors}})


BAD = {
    "NaN": (lambda a: up(a, delta=a.group("up")["delta"] * float("nan")), "holds NaN or infinity"),
    "infinite": (lambda a: up(a, delta=a.group("up")["delta"] + float("inf")), "holds NaN or infinity"),
    "huge": (lambda a: up(a, delta=a.group("up")["delta"] + 1e6), "largest_norm is 100"),
    "shape": (lambda a: up(a, delta=torch.zeros(1, 3)), "got torch.float32 of shape (1, 3)"),
    "type": (lambda a: up(a, delta=a.group("up")["delta"].to(torch.float64)), "got torch.float64"),
    "extra field": (lambda a: up(a, more=torch.zeros(1)), "an update has count, delta; got count, delta, more"),
    "extra arrays": (
        lambda a: Packet(a.header, {**a.groups, "more": {"x": torch.zeros(9)}}),
        "holds an update and nothing else; got more too",
    ),
    "negative weight": (lambda a: up(a, count=torch.tensor([-5.0])), "is not negative"),
    "no update": (lambda a: Packet(a.header), "an update has count, delta; got"),
    "round": (lambda a: Packet(a.header | {"round": 1}, a.groups), "an answer with round 1 instead of 2"),
    "run": (lambda a: Packet(a.header | {"run": "other"}, a.groups), "an answer with run 'other'"),
    "client": (lambda a: Packet(a.header | {"name": "a"}, a.groups), "an answer with name 'a' instead of 'b'"),
    "silence": (lambda a: None, "no answer within 60 s"),
}


COUNTED: dict[str, tuple[str, Any, str]] = {
    "fewer numbers than bits": (
        "heterofl",
        lambda a: up(a, delta=a.group("up")["delta"][:-1]),
        "does not fit its bits",
    ),
    "more bits than numbers": (
        "heterofl",
        lambda a: up(a, bits=torch.full_like(a.group("up")["bits"], 255)),
        "delta does not fit its bits",
    ),
    "bits behind the last column": (
        "heterofl",
        lambda a: up(a, bits=torch.full_like(a.group("up")["bits"], 255), delta=torch.zeros(1160)),
        "names columns that delta does not have",
    ),
    "no matrix of bits": ("heterofl", lambda a: up(a, bits=a.group("up")["bits"].flatten()), "does not fit its bits"),
    "weights of classes": ("fedproto", lambda a: up(a, weight=a.group("up")["weight"] + 1e9), "weight counts 3e+09 ex"),
    "negative weights": ("fedproto", lambda a: up(a, weight=torch.tensor([[9.0, 9.0, -9.0]])), "(-9 at least)"),
    "counts of classes": ("fedpac", lambda a: up(a, count=a.group("up")["count"] + 1e6), "count counts 3"),
    "an early mean": ("feddbe", lambda a: up(a, reported=torch.tensor([1e6])), "reported counts 1e+06 examples"),
}


@pytest.mark.parametrize("fault", COUNTED)
def test_masks_and_counts_that_cannot_be_are_refused(tmp_path: Path, fault: str) -> None:
    """Of 1,155 columns the last byte of bits has five that stand for nothing."""
    method, change, message = COUNTED[fault]
    net = make(tmp_path, method=method, model="mlp", rounds=1, steps=1)
    net.tamper = spoil(change, round=1)
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [1]
    assert any("dropped b: " in line and message in line for line in net.log), net.log


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_answer_costs_its_client_one_round_and_nobody_else_anything(tmp_path: Path, fault: str) -> None:
    net = make(tmp_path, largest_norm=100.0)
    change, message = BAD[fault]
    net.tamper = spoil(change)
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 1, 0]
    assert any(
        ("round 2: without b: " in line or "round 2: dropped b: " in line) and message in line for line in net.log
    )
    torch.testing.assert_close(models(net), without(net, "b", {2}), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("correct", "count"), [(9.0, 8), (-1.0, 8), (1.0, -8), (math.nan, 8), (math.inf, 8)])
def test_an_impossible_score_is_left_out(tmp_path: Path, correct: float, count: int) -> None:
    def lie(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind != "evaluate" or name != "b":
            return answer
        score = {"correct": torch.tensor([correct]), "loss": torch.tensor([1.0]), "count": torch.tensor([count])}
        return Packet(answer.header, {**answer.groups, "personal": {**answer.groups["personal"], **score}})

    net = make(tmp_path)
    net.tamper = lie
    folder = run(net)
    reasons = [line.partition("without b: ")[2] for line in net.log]
    assert any(reason.startswith(("an evaluation with", "it says")) for reason in reasons)
    clients = (folder / "clients.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in clients[1:]] == [name for name in NAMES if name != "b"]


def test_a_second_answer_is_not_looked_at(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.tamper = spoil(lambda a: [a, up(a, delta=a.group("up")["delta"] + 1)])
    run(net)
    torch.testing.assert_close(models(net), without(net, "b", set()), rtol=0, atol=1e-6)


def test_an_order_of_a_dead_server_changes_nothing(net: Loopback) -> None:
    """It reaches a node after those of the server that took its place: the state that counts is not overwritten, and
    neither is the model."""
    net.run_config = {**net.run_config, "eval-every": 1}
    refusals: list[str] = []

    def late(name: str, question: Sent, answer: Packet) -> Packet:
        if name == "a" and question.packet.header.get("round") == 3:
            wanted = {"kind": question.kind, "round": 2, "name": "a"}
            old = next(one for one in net.messages if wanted.items() <= one.packet.header.items())
            with pytest.raises(Refused, match="a has done round 3, and round 2 is asked for") as error:
                Node.of(net.nodes_[100], net.run_config, 100).answer(old.kind, old.packet)
            refusals.append(str(error.value))
        return answer

    net.tamper = late
    run(net)
    assert len(refusals) == 2  # to train, and to evaluate
    assert not any("has lost its state" in line for line in net.log)
    torch.testing.assert_close(models(net), expected(simulated(net)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, KEPT])
def test_a_late_answer_is_dropped_and_the_node_goes_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The node has trained round 2 and kept its state; the server never counted it."""
    net = make(tmp_path, **settings)

    def late(name: str, question: Sent, answer: Packet) -> Packet:
        slow = question.kind == "train" and name == "c" and question.packet.header["round"] == 2
        net.delay["c"] = 500.0 if slow else 0.0
        return answer

    net.tamper = late
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 1, 0]
    torch.testing.assert_close(models(net), without(net, "c", {2}), rtol=0, atol=1e-6)


def test_too_few_updates_change_nothing_and_end_the_run_in_the_end(tmp_path: Path) -> None:
    net = make(tmp_path, quorum=3, patience=2, rounds=6)
    net.tamper = spoil(lambda a: None, round=2)
    run_two = net.tamper

    def tamper(name: str, question: Sent, answer: Packet) -> Any:
        if question.kind == "train" and name == "b" and question.packet.header["round"] == 3:
            return None
        return run_two(name, question, answer)

    net.tamper = tamper
    with pytest.raises(TooFewClients, match="2 rounds in a row had too few updates; the run stops after round 3"):
        run(net)
    assert any("2 of 3 updates, and 3 are needed; nothing was changed" in line for line in net.log)
    net.tamper = None
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 3, 3, 0, 0, 0]


def test_a_client_that_comes_back_during_the_round_is_asked_then(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1)
    seen: list[str] = []
    number = 100 + NAMES.index("b")

    def tamper(name: str, question: Sent, answer: Packet) -> Packet:
        seen.append(f"{name}:{question.kind}")
        if seen == ["a:hello", "b:hello", "c:hello"]:
            net.offline.add(number)
        return answer

    net.tamper = tamper
    sleep = net.sleep

    def wake(seconds: float) -> None:
        sleep(seconds)
        if net.now > 5:
            net.offline.discard(number)

    net.sleep = wake  # type: ignore[method-assign]
    folder = serve(Deployment.parse(net.run_config | {"quorum": 3}), net, net.log.append, **net.time)
    assert [r["dropped"] for r in records(folder)] == [0]
    assert seen.count("b:hello") == 2


def test_a_client_that_stays_away_is_not_waited_for_once_there_are_enough(tmp_path: Path) -> None:
    net = make(tmp_path, quorum=2, deadline=10_000.0)
    net.tamper = spoil(lambda a: net.offline.add(101) or None, round=2)
    folder = run(net)
    assert net.now < 10_000
    assert [r["dropped"] for r in records(folder)] == [0, 1, 1]
    assert any("without b: not connected" in line for line in net.log)


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """The server stops in the middle of round 2, after all nodes have trained it."""
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    whole = make(first, method="fedfomo", options="models=2", rounds=4)
    run(whole)
    net = make(second, method="fedfomo", options="models=2", rounds=4)

    def crash(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "train" and name == "c" and question.packet.header["round"] == 2:
            raise KeyboardInterrupt
        return answer

    net.tamper = crash
    with pytest.raises(KeyboardInterrupt):
        run(net)
    assert {entry.round for config in net.nodes_.values() for entry in Vault(config["vault"]).entries()} == {2}
    net.tamper = None
    run(net)
    assert any("resumed after round 1" in line for line in net.log)
    assert torch.equal(models(net), models(whole))


def test_a_new_run_never_takes_up_the_state_of_another(tmp_path: Path) -> None:
    net = make(tmp_path)
    run(net)
    once = models(net)
    again = dataclasses.replace(net, run_config=dict(net.run_config) | {"out": str(tmp_path / "other")})
    run(again)
    assert torch.equal(models(again), once)
    assert len({held.run for held in Vault(net.nodes_[100]["vault"]).entries()}) == 2


def test_a_lost_vault_is_reported_and_its_client_begins_anew(tmp_path: Path) -> None:
    net = make(tmp_path)

    def tamper(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "train" and name == "b" and question.packet.header["round"] == 1:
            vault = Vault(net.nodes_[101]["vault"])
            vault.clear(vault.entries()[0].run)
        return answer

    net.tamper = tamper
    folder = run(net)
    assert any("b has lost its state of round 1 and begins anew" in line for line in net.log)
    assert [r["dropped"] for r in records(folder)] == [0, 0, 0]


def test_a_node_that_cannot_read_its_data_is_named(tmp_path: Path) -> None:
    net = make(tmp_path, wait=5.0)
    Path(net.nodes_[101]["data"]).unlink()
    with pytest.raises(
        TooFewClients,
        match=r"2 of 3 clients appeared within 5 s \(a, c\); node 101 cannot take part: StorageError: \(data\) does",
    ):
        run(net)


def test_a_node_whose_data_come_later_takes_part(tmp_path: Path) -> None:
    net = make(tmp_path, wait=100.0)
    path = Path(net.nodes_[101]["data"])
    path.rename(tmp_path / "elsewhere")
    sleep = net.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        if net.now > 30 and not path.exists():
            (tmp_path / "elsewhere").rename(path)

    net.sleep = later  # type: ignore[method-assign]
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 0, 0]


def test_a_client_on_two_nodes_is_asked_on_the_newer_one(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=2)
    net.nodes_[200] = net.nodes_[101]
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 0]
    assert any("client b has appeared on a new node" in line for line in net.log)


def test_a_node_that_diverges_says_so_and_keeps_its_state(tmp_path: Path) -> None:
    net = make(tmp_path)
    x, y, owner = examples()
    np.savez(tmp_path / "b.npz", x=x[owner == 1] * np.float32(1e37), y=y[owner == 1])
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [1, 1, 1]
    assert any("ditto, round 1: dropped b: its update is not finite" in line for line in net.log)
    assert not Vault(net.nodes_[101]["vault"]).entries()


def test_clients_that_differ_in_shape_are_told_apart(tmp_path: Path) -> None:
    net = make(tmp_path)
    np.savez(tmp_path / "b.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, int))
    with pytest.raises(DataError, match="a and b differ in the shape of an example"):
        run(net)


def test_the_order_of_listed_clients_is_theirs(tmp_path: Path) -> None:
    net = make(tmp_path, clients="c,a,b")
    folder = run(net)
    assert json.loads((folder / "deployment.json").read_text())["names"] == ["c", "a", "b"]


def test_a_folder_of_another_deployment_is_refused(tmp_path: Path) -> None:
    net = make(tmp_path)
    run(net)
    with pytest.raises(StorageError, match="holds another run"):
        serve(Deployment.parse(net.run_config | {"lr": 0.01}), net, net.log.append, **net.time)


# ---- privacy ----


def private(folder: Path, **settings: Any) -> Loopback:
    return make(folder, method="fedavg", **{"dp_noise": 1.0, "rounds": 2} | settings)


def test_noise_comes_from_the_nodes_and_epsilon_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = private(tmp_path / "one"), private(tmp_path / "two")
    folder = run(one)
    run(two)
    assert not torch.equal(models(one), models(two)), "the same seed, but other secrets"
    spent = json.loads((folder / "summary.json").read_text())["results"][0]["privacy"]
    assert all(0 < epsilon < 50 for epsilon in spent["epsilon"])
    secret = Vault(one.nodes_[100]["vault"]).secret("a").key
    told = [json.dumps(one_.packet.header) for one_ in one.messages]
    assert not any(secret.hex() in text for text in told)


def test_a_private_run_that_is_resumed_costs_no_answer_twice(tmp_path: Path) -> None:
    """The server stops after all nodes have trained round 2 and asks again; the updates are those that were lost."""
    pytest.importorskip("dp_accounting")
    net, updates = private(tmp_path), dict[str, Tensor]()

    def crash(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "train" and question.packet.header["round"] == 2:
            again = answer.group("up")["delta"]
            assert torch.equal(updates.setdefault(name, again), again)
            if name == "c" and not any("resumed" in line for line in net.log):
                raise KeyboardInterrupt
        return answer

    net.tamper = crash
    with pytest.raises(KeyboardInterrupt):
        run(net)
    run(net)
    assert any("resumed after round 1" in line for line in net.log)
    for config in net.nodes_.values():
        answers = Vault(config["vault"]).privacy_log(config["client"]).read().answers
        assert [(a.kind, a.round) for a in answers] == [("train", 1), ("train", 2)]


def test_an_answer_that_never_came_counts_in_full(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole, lossy = private(tmp_path / "one"), private(tmp_path / "two")
    lossy.tamper = spoil(lambda a: None)
    spent = [
        json.loads((run(net) / "summary.json").read_text())["results"][0]["privacy"]["epsilon"]
        for net in (whole, lossy)
    ]
    assert spent[0] == spent[1]


def test_a_node_refuses_too_little_noise(tmp_path: Path) -> None:
    net = make(tmp_path, quorum=2)
    net.nodes_[101]["min_noise"] = "0.5"
    run(net)
    assert any("b trains with noise of at least 0.5 only, and the server asks for 0" in line for line in net.log)


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metod": "ditto"}, "did you mean method"),
        ({"method": "dito"}, "did you mean ditto"),
        ({"method": "ditto,fedavg"}, "one method"),
        ({"lr": -1.0}, "lr"),
        ({"pool": "ray"}, "setting of the deployment"),
        ({"clients": 0}, "at least one client"),
        ({"classes": "1"}, "at least two classes"),
        ({"clients": "a,a"}, "different names"),
        ({"scaling": "standart"}, "did you mean standard"),
        ({"scaling": "-1"}, "positive number"),
        ({"deadline": 0.0}, "deadline"),
        ({"method": "fedavg_data"}, "share examples"),
        ({"options": "lambda=3"}, "lambda"),
        ({"dp-noise": 1.0, "dp-strict": True, "scaling": "standard"}, "dp_strict"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Deployment.parse(SETTINGS | dict(settings))


def test_empty_text_is_not_set_and_zero_is_a_number() -> None:
    plain = Deployment.parse(SETTINGS)
    unset = Deployment.parse(SETTINGS | {"epochs": "", "dp-noise": "", "robust": "", "validation": "", "quorum": ""})
    assert unset == plain
    assert unset.fingerprint() == plain.fingerprint()
    assert plain.run.privacy is None
    without_noise = Deployment.parse(SETTINGS | {"dp-noise": 0.0}).run.privacy
    assert without_noise is not None
    assert without_noise.noise == 0
    assert Deployment.parse(SETTINGS | {"method": "fedfomo"}).validation_share == 0.2
    assert Deployment.parse(SETTINGS | {"method": "fedfomo", "validation": 0.0}).validation_share == 0


def test_more_rounds_continue_a_run_and_other_settings_do_not() -> None:
    one = Deployment.parse(SETTINGS)
    assert one.fingerprint() == Deployment.parse(SETTINGS | {"rounds": 9, "deadline": 5.0}).fingerprint()
    for change in ({"seed": 1}, {"method": "fedavg"}, {"classes": "4"}, {"scaling": "2"}, {"lr": 0.1}):
        assert one.fingerprint() != Deployment.parse(SETTINGS | change).fingerprint()


def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(MessageError, match="install the same one everywhere"):
        Packet.read('{"format": 99}', {})
    for text in ("", "[]", "null", "{}"):
        with pytest.raises(KinfedError, match="without a readable header"):
            Packet.read(text, {})
    with pytest.raises(MessageError, match=r"is of type .U3"):
        Packet.read(Packet().header_json(), {"up": {"x": np.array(["abc"])}})


def test_a_folder_still_held_by_the_last_server_is_waited_for(net: Loopback) -> None:
    deployment = Deployment.parse(net.run_config)
    held = RunFolder.open(deployment.folder, deployment.run.dump(), deployment.fingerprint())
    wait = net.sleep

    def sleep(seconds: float) -> None:
        wait(seconds)
        if net.now >= 5:
            held.close()

    serve(deployment, net, net.log.append, clock=net.clock, sleep=sleep)
    assert "waiting: " in net.log[0]
    assert "is being written by process" in net.log[0]
    assert sum("waiting: " in line for line in net.log) == 1


def test_a_folder_held_for_too_long_is_refused(net: Loopback) -> None:
    deployment = Deployment.parse(net.run_config)
    with (
        RunFolder.open(deployment.folder, deployment.run.dump(), deployment.fingerprint()),
        pytest.raises(StorageError, match="is being written by"),
    ):
        serve(deployment, net, net.log.append, **net.time)
    assert net.now >= 60
