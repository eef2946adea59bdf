"""Noise from the nodes in secure sums, against a server that sees every message and knows all other clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, trusting, write_nodes
from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.privacy_log import WHOLE_CLIENT
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import TooFewClients, serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import EVALUATE, MASK, TRAIN, Packet
from kinfed.errors import ConfigError
from kinfed.pools import Steps
from kinfed.privacy.ledger import Event
from kinfed.updates.user_level import Share

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
pytest.importorskip("cryptography", reason="the extra flower is not installed")

from kinfed.deploy.secure.secure_round import SecureNodePool, SecureRound
from kinfed.privacy.accountant import epsilon

NAMES = ["a", "b", "c"]
CLIP, NOISE, WIDTH = 0.05, 2.0, 1203  # numbers in an update: logistic regression of 400 features and 3 classes
# Batches are of all rows, so that updates of two runs are the same but for noise.
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "mlr", "rounds": 1, "clients": 3, "classes": "3", "scaling": "none", "steps": 2,
    "batch": 50, "lr": 0.5, "eval-every": 0, "deadline": 60.0, "wait": 60.0, "patience": 1, "secure-sum": True,
    "user-noise": NOISE, "user-clip": CLIP, "user-at-nodes": True,
}  # fmt: skip


class Net(Loopback):
    """A network whose server may lie (`forge`)."""

    forge: Callable[[Sent], Sent] = staticmethod(lambda one: one)

    def send(self, messages: Any) -> list[str]:
        return super().send([self.forge(one) for one in messages])


def make(folder: Path, **settings: Any) -> Net:
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (30, 17, 24))
    y = numbers.integers(0, 3, len(owner))
    x = (numbers.normal(size=(len(owner), 400)) + 2 * np.eye(3, 400)[y]).astype(np.float32)
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    return Net(SETTINGS | {"out": str(folder / "run")} | named, write_nodes(folder, x, y, owner, NAMES))


def run(net: Net) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def as_updates(summand: Tensor, noise: float, honest: int) -> Tensor:
    """float64 [W]: the sum of updates in a vector of whole numbers."""
    mean, clients = Share(CLIP, 3, noise, honest).encoding.decode(summand)
    return CLIP * clients * mean


def added(net: Net, name: str) -> Tensor:
    """What a client has added to the last sum, from its own vault."""
    (path,) = Path(net.nodes_[100 + NAMES.index(name)]["vault"]).rglob("sum-update.safetensors")
    return storage.read_tensors(path)["update"]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every sum that the server can compute, with all it was sent."""
    seen: list[Tensor] = []
    total = SecureRound.total

    def watched(self: SecureRound) -> Steps[tuple[list[int], Tensor]]:
        result = yield from total(self)
        seen.append(result[1])
        return result

    monkeypatch.setattr(SecureRound, "total", watched)
    return seen


@pytest.mark.parametrize("conspirators", [0, 1, 2])
def test_the_server_learns_no_update_though_it_knows_all_others(
    tmp_path: Path, sums: list[Tensor], conspirators: int
) -> None:
    """It subtracts the updates of b and c from the sum; conspirators among them tell their noise, too. Without noise
    from the nodes that is a's update to nine digits; with it, a's update under noise of deviation z C at least."""
    plain = make(tmp_path / "plain", user_at_nodes=False)
    run(plain)
    updates = {name: as_updates(added(plain, name), 0.0, 1) for name in NAMES}
    left = as_updates(sums[0], 0.0, 1) - updates["b"] - updates["c"]
    torch.testing.assert_close(left, updates["a"], rtol=0, atol=1e-9)
    assert float(updates["a"].norm()) == pytest.approx(CLIP)

    honest = 3 - conspirators
    net = make(tmp_path / "noisy", user_conspirators=conspirators)
    run(net)
    told = {name: as_updates(added(net, name), NOISE, honest) for name in NAMES[honest:]}
    left = as_updates(sums[1], NOISE, honest) - sum((updates | told)[name] for name in "bc")
    noise = left - updates["a"]
    assert float(noise.std()) == pytest.approx(NOISE * CLIP, rel=0.1)  # five standard errors
    assert abs(float(noise.mean())) < 5 * NOISE * CLIP / math.sqrt(WIDTH)


def test_noise_is_never_the_same_twice(tmp_path: Path, sums: list[Tensor]) -> None:
    """Two runs with one seed, by one server."""
    for attempt in ("one", "other"):
        run(make(tmp_path / attempt, seed=1))
    one, other = (as_updates(total, NOISE, 3) for total in sums)
    assert float((one - other).std()) == pytest.approx(math.sqrt(2) * NOISE * CLIP, rel=0.1)


def test_an_owner_who_trusts_fewer_adds_what_lacks(tmp_path: Path) -> None:
    net = make(tmp_path)
    net.nodes_[100] |= {"conspirators": "2"}
    net.nodes_[101] |= {"conspirators": "1"}
    run(net)
    scale = [float(as_updates(added(net, name), NOISE, 3).std()) / (NOISE * CLIP) for name in NAMES]
    assert scale == pytest.approx([1.0, math.sqrt(2 / 3), math.sqrt(1 / 3)], rel=0.1)


def test_every_masked_update_is_in_the_ledger_once(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=2)
    run(net)
    log = Vault(net.nodes_[100]["vault"]).privacy_log("a")
    assert log.read().spent(kinds=WHOLE_CLIENT) == ((NOISE, (Event(1.0, 1, 2),)),)
    mask = [one.packet for one in net.messages if one.kind == MASK and one.packet.header["name"] == "a"][-1]
    Node.of(net.nodes_[100], net.run_config, 100).answer(MASK, mask)  # the answer was lost: the same one again
    assert len(log.read().answers) == 2
    assert not log.read().spent()  # nothing of single rows


def test_the_price_is_booked_before_the_update_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("kinfed.deploy.node.privacy_log.PrivacyLog.enter", fail)
        with pytest.raises(TooFewClients):
            run(net)
    assert any("0 of 3 clients have sent masked updates" in line for line in net.log)


# ---- the owner's demand ----


def demanding(folder: Path, user_epsilon: float, **settings: Any) -> Net:
    """A network in which a insists on noise from the nodes."""
    from kinfed.deploy.operator.certs import make_certificates

    net = make(folder, **settings)
    make_certificates(folder / "certs", ["localhost"], NAMES)
    for config in net.nodes_.values():
        config["key"] = str(folder / "certs" / config["client"])
    net.nodes_[100] |= {"user_epsilon": str(user_epsilon), "peers": str(folder / "certs")}
    return net


def test_an_owner_is_asked_until_its_epsilon_is_spent(tmp_path: Path) -> None:
    allowed = epsilon((Event(1.0, 1, 2),), NOISE, 1e-5)
    net = demanding(tmp_path, allowed * 1.01, rounds=3)
    with pytest.raises(TooFewClients):
        run(net)
    (line,) = [line for line in net.log if "allows as a whole no more than epsilon" in line]
    assert line.startswith("round 3: without a")
    assert len(Vault(net.nodes_[100]["vault"]).privacy_log("a").read().answers) == 2
    other = make(tmp_path / "again", seed=5)  # another run, another server: the ledger goes on
    other.nodes_[100] = net.nodes_[100]
    with pytest.raises(TooFewClients):
        run(other)
    assert any("allows as a whole no more than epsilon" in line for line in other.log)


@pytest.mark.parametrize(
    "settings", [{"user_at_nodes": False}, {"user_at_nodes": False, "user_noise": "", "user_clip": ""},
                 {"user_at_nodes": False, "user_noise": "", "user_clip": "", "secure_sum": False}]
)  # fmt: skip
def test_without_noise_from_the_nodes_nothing_is_computed(tmp_path: Path, settings: dict[str, Any]) -> None:
    net = demanding(tmp_path, 8.0, **settings)
    with pytest.raises(TooFewClients):
        run(replace_quorum(net))
    assert any("a sends updates with noise from the nodes only" in line for line in net.log)
    assert not list(Path(net.nodes_[100]["vault"]).rglob("state.safetensors"))


def replace_quorum(net: Net) -> Net:
    """Without user-level privacy two of three would do."""
    if not net.run_config["user-noise"]:
        net.run_config["quorum"] = 3
    return net


def test_figures_of_a_client_that_is_hidden_as_a_whole_stay_at_its_node(tmp_path: Path) -> None:
    net = demanding(tmp_path, 8.0, eval_every=1)
    answers: dict[str, Packet] = {}

    def look(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "evaluate":
            answers[name] = answer
        return answer

    net.tamper = look
    run(net)
    assert not answers["a"].groups
    assert "keeps figures of evaluations (user_epsilon)" in answers["a"].header["scores"]
    assert answers["b"].groups


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_whether_an_update_is_finite_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sums: list[Tensor], method: str
) -> None:
    """A server makes a model whose update is finite or not by what a row holds, and once had that answered exactly, for
    as many rows as it had rounds. Such an update counts as none, under noise and at its price as any other."""
    net = demanding(tmp_path, 8.0, method=method, eval_every=1, options="weights=equal")
    answers: dict[str, list[Packet]] = {}

    def forge(one: Sent) -> Sent:
        down = {name: torch.full_like(t, math.nan) for name, t in one.packet.group("down").items()}
        hostile = one.kind == TRAIN or (one.kind == EVALUATE and one.node == 100)
        return replace(one, packet=Packet(one.packet.header, one.packet.groups | {"down": down})) if hostile else one

    def look(name: str, question: Sent, answer: Packet) -> Packet:
        answers.setdefault(question.kind, []).append(answer)
        return answer

    net.forge, net.tamper = forge, look
    monkeypatch.setattr("kinfed.deploy.secure.secure_messages.KeyRecord.is_of", trusting(SecureNodePool))
    run(net)
    (total,) = sums
    left = as_updates(total, NOISE, 3) - as_updates(added(net, "b") + added(net, "c"), NOISE, 3)
    torch.testing.assert_close(left, as_updates(added(net, "a"), NOISE, 3), rtol=0, atol=1e-9)
    assert float(left.std()) == pytest.approx(NOISE * CLIP / math.sqrt(3), rel=0.1)  # its share alone
    assert [sorted(one.header) for one in answers[TRAIN]] == 3 * [sorted(answers[TRAIN][1].header)]
    assert {one.header["scores"] for one in answers[EVALUATE]} == {
        "exact", "the owner of a keeps figures of evaluations (user_epsilon)"
    }  # fmt: skip
    vault = Vault(net.nodes_[100]["vault"])
    assert len(vault.privacy_log("a").read().answers) == 1
    assert vault.entries()[0].has_model == (method == "ditto")  # whose own model is as it was before
    assert all(bool(t.isfinite().all()) for t in vault.entry(vault.entries()[0].run, "a").state(1).values())


def test_a_deployment_without_secure_sums_has_no_noise_from_nodes() -> None:
    with pytest.raises(ConfigError, match="set secure_sum, too"):
        Deployment.parse(SETTINGS | {"secure-sum": False})


def test_invented_clients_would_know_their_noise() -> None:
    with pytest.raises(ConfigError, match="user_epsilon needs peers"):
        NodeSettings.parse({"client": "a", "data": "a.csv", "user_epsilon": "8"})


# ---- servers that lie about the noise ----


def test_a_server_cannot_have_the_others_add_less_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b and c are told of less noise, and the server takes their keys all the same; a does not."""
    net = make(tmp_path, user_noise="", user_epsilon=50.0)

    def forge(one: Sent) -> Sent:
        if one.kind != TRAIN or one.node == 100:
            return one
        return replace(one, packet=Packet(one.packet.header | {"user_noise": 1.0}, one.packet.groups))

    net.forge = forge
    monkeypatch.setattr("kinfed.deploy.secure.secure_messages.KeyRecord.is_of", trusting(SecureNodePool))
    with pytest.raises(TooFewClients):
        run(net)
    assert any("are not signed by it, for a sum on these terms" in line and "without a" in line for line in net.log)


@pytest.mark.parametrize("noise", [1.9, 0.0, float("nan"), float("inf"), -2.0])
def test_less_noise_than_the_run_promises_is_refused(tmp_path: Path, noise: float) -> None:
    net = make(tmp_path)
    run(net)
    order = next(one.packet for one in net.messages if one.kind == TRAIN and one.node == 100)
    lie = Packet(order.header | {"user_noise": noise, "round": 2}, order.groups)
    with pytest.raises(Refused, match="the run promises a user-level noise"):
        Node.of(net.nodes_[100], net.run_config, 100).answer(TRAIN, lie)
