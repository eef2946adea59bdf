"""Secure aggregation with nodes in this process: what the server gets, who may go away when, and what nodes refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, trusting, write_nodes
from torch import Tensor

from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import TooFewClients, serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import CONFIRM, MASK, SECURE_KINDS, SHARE, TRAIN, UNMASK, MessageError, Packet
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.serving.pipeline import ModelPipeline
from kinfed.updates.secure_sum import ProtocolSize
from kinfed.updates.stages import Updates

pytest.importorskip("cryptography", reason="the extra flower is not installed")

from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.secure.masks import agreed_key, join_secret, mask, new_secret, public_key, seal, split_secret, unseal
from kinfed.deploy.secure.secure_messages import KeyRecord, Member, terms_of, threshold_of
from kinfed.deploy.secure.secure_round import SecureNodePool
from kinfed.deploy.transport.client_keys import sign

NAMES = ["a", "b", "c", "d", "e"]
WIDTH = 18  # numbers in an update: logistic regression of 5 features and 3 classes
# Batches are of all rows: smaller ones are drawn from the nodes' secrets, and differ from those of a simulation.
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "mlr", "rounds": 2, "clients": 5, "classes": "3", "scaling": "none", "steps": 3,
    "batch": 30, "eval-every": 0, "deadline": 60.0, "wait": 60.0, "secure-sum": True, "quorum": 3,
}  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(5), (30, 17, 24, 12, 21))
    y = numbers.integers(0, 3, len(owner))
    return (numbers.normal(size=(len(owner), 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32), y, owner


Forge = Callable[[Sent], Sent]


class Net(Loopback):
    """A network whose server may lie (`forge`), and from which clients go away for good before a question."""

    away: Mapping[str, tuple[int, str]] = {}  # client: round and kind of question
    forge: Forge = staticmethod(lambda one: one)

    def send(self, messages: Sequence[Sent]) -> list[str]:
        ids = []
        for one in messages:
            header = one.packet.header
            if self.away.get(header.get("name", "")) == (header.get("round"), one.kind):
                self.offline.add(one.node)
                ids.append("")
            else:
                ids += super().send([self.forge(one)])
        return ids


def make(folder: Path, **settings: Any) -> Net:
    run_config = SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}
    return Net(run_config, write_nodes(folder, *examples(), NAMES))


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def simulated(net: Loopback, present: Callable[[int], list[int]] = lambda round: [0, 1, 2, 3, 4]) -> Tensor:
    """[K, P] personal models of plain averaging in one process, over the clients that were `present` in a round."""
    x, y, owner = examples()
    deployment = Deployment.parse(net.run_config)
    federation = Federation.from_arrays(x, y, np.array(NAMES)[owner], num_classes=3)
    loop = simulate(federation, "mlr", deployment.algorithm)
    train = loop.pool.train

    def some(ids: Tensor, download: Any, round: int, *rest: Any, **more: Any) -> Updates:
        return train(torch.tensor(present(round)), download, round, *rest, **more)

    loop.pool.train = some  # type: ignore[method-assign]
    for _ in loop.rounds(deployment.run.rounds):
        pass
    models = loop.evaluate(keep_models=True).models
    assert models is not None
    rows = [loop.task.module_of(row).state_dict() for row in models]  # type: ignore[attr-defined]
    return torch.stack([torch.cat([t.reshape(-1) for t in row.values()]) for row in rows])


def models(net: Loopback, names: Collection[str] = NAMES) -> Tensor:
    rows = []
    for config in net.nodes_.values():
        if config["client"] in names:
            module = ModelPipeline.read(Vault(config["vault"]).model_path()).module
            rows.append(torch.cat([t.detach().reshape(-1) for t in module.state_dict().values()]))
    return torch.stack(rows)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# ---- the sum ----


@pytest.mark.parametrize(("method", "options"), [("fedavg", ""), ("ditto", "weights=equal")])
def test_results_are_those_of_plain_averaging(tmp_path: Path, method: str, options: str) -> None:
    net = make(tmp_path, method=method, options=options)
    run(net)
    torch.testing.assert_close(models(net), simulated(net), rtol=0, atol=1e-6)


def test_only_sums_can_be_read_from_what_leaves_the_nodes(tmp_path: Path) -> None:
    """Groups of all answers; and bytes, which a simulation counts without sending them."""
    net = make(tmp_path)
    groups: dict[str, set[str]] = {}

    def look(name: str, question: Sent, answer: Packet) -> Packet:
        groups.setdefault(question.kind, set()).update(answer.groups)
        return answer

    net.tamper = look
    folder, size = run(net), ProtocolSize(5, WIDTH)
    assert groups[TRAIN] == {"keys"}
    assert [groups[kind] for kind in SECURE_KINDS] == [{"shares"}, {"sum"}, {"list"}, {"shares"}]
    for record in records(folder):
        assert record["bytes_up"] == size.up
        assert record["bytes_down"] == size.down + 5 * 4 * WIDTH


def test_a_methods_numbers_of_one_client_stay_at_its_node(tmp_path: Path) -> None:
    """APFL's α is an inner product of gradients on the client's rows, under a model of the server's choosing."""
    figures = {}
    for secure in (True, False):
        net = make(tmp_path, method="apfl", rounds=1, eval_every=1, secure_sum=secure, out=str(tmp_path / str(secure)))
        groups: set[str] = set()

        def look(name: str, question: Sent, answer: Packet, groups: set[str] = groups) -> Packet:
            groups.update(answer.groups if question.kind == "evaluate" else ())
            return answer

        net.tamper = look
        run(net)
        figures[secure] = "figures" in groups
    assert figures == {True: False, False: True}


@pytest.mark.parametrize(("kinds", "first"), [((SHARE, MASK), [0, 2, 4]), ((CONFIRM, UNMASK), [0, 1, 2, 3, 4])])
def test_clients_may_go_away_at_any_question(tmp_path: Path, kinds: tuple[str, str], first: list[int]) -> None:
    """Two of five. Whose masked updates came are in the sum, also if they are gone when it is unmasked."""
    net = make(tmp_path)
    net.away = {"b": (1, kinds[0]), "d": (1, kinds[1])}
    folder = run(net)
    assert [record["dropped"] for record in records(folder)] == [5 - len(first), 2]
    expected = simulated(net, lambda round: first if round == 1 else [0, 2, 4])
    torch.testing.assert_close(models(net, "ace"), expected[[0, 2, 4]], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "reason"), [
    (MASK, "2 of 5 clients have sent masked updates, and 3 must"),
    (UNMASK, "2 of 5 clients have revealed their shares, and 3 must"),
])  # fmt: skip
def test_too_few_clients_give_no_sum(tmp_path: Path, kind: str, reason: str) -> None:
    net = make(tmp_path, patience=1)
    net.away = {name: (2, kind) for name in "bcd"}
    with pytest.raises(TooFewClients):
        run(net)
    assert f"round 2: no secure sum: {reason}; nothing was changed" in net.log
    assert [record["dropped"] for record in records(tmp_path / "run")] == [0, 5]


@pytest.mark.parametrize("back", [True, False])
def test_a_server_that_stops_after_the_masks_has_the_same_sum_later_or_none(tmp_path: Path, back: bool) -> None:
    """Clients answer the same order as before; with other clients than before there is no second sum."""
    net = make(tmp_path, rounds=3)

    def stop(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == UNMASK and question.packet.header["round"] == 2:
            raise KeyboardInterrupt
        return answer

    net.tamper = stop
    with pytest.raises(KeyboardInterrupt):
        run(net)
    net.tamper, net.away = None, {} if back else {"b": (2, TRAIN)}
    folder = run(net)
    assert [record["dropped"] for record in records(folder)][:2] == [0, 0 if back else 5]
    if back:
        torch.testing.assert_close(models(net, "abcde"), simulated(net, lambda round: range(5)), rtol=0, atol=1e-6)
    else:
        assert any("in another way before" in line for line in net.log)


def test_private_training_goes_into_secure_sums(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    net = make(tmp_path, dp_noise=1.0, rounds=1)
    folder = run(net)
    assert [record["dropped"] for record in records(folder)] == [0]
    assert len(Vault(net.nodes_[100]["vault"]).privacy_log("a").read().answers) == 1


# ---- servers that lie ----


def lists(one: Sent, **places: list[int]) -> Sent:
    """The question with other lists of clients."""
    flags = {name: torch.tensor([int(k in some) for k in range(5)], dtype=torch.uint8) for name, some in places.items()}
    groups = one.packet.groups | {"lists": one.packet.group("lists") | flags}
    return replace(one, packet=Packet(one.packet.header, groups))


def attack(folder: Path, forge: Forge, **settings: Any) -> tuple[Net, str]:
    """A run of one round with a server that lies, and its log."""
    folder.mkdir(exist_ok=True)
    net = make(folder, rounds=1, patience=1, **settings)
    net.forge = forge
    with pytest.raises(TooFewClients):
        run(net)
    return net, "\n".join(net.log)


def test_nobody_reveals_both_secrets_of_a_client(tmp_path: Path) -> None:
    """e's masked update came, and all have signed that it did; then its masking key is asked for, too."""

    def forge(one: Sent) -> Sent:
        return lists(one, survivors=[0, 1, 2, 3]) if one.kind == UNMASK else one

    _, log = attack(tmp_path, forge)
    assert log.count("has not signed this list of clients, and reveals nothing for it") == 5


OTHERWISE: dict[str, Callable[[Packet], Packet]] = {
    "a model that learns nothing": lambda p: Packet(
        p.header, p.groups | {"down": {"w": 0 * p.group("down")["w"] + 1e9}}
    ),
    "no steps": lambda p: Packet(p.header | {"effort": 1e-9}, p.groups),
    "inputs of zeros": lambda p: Packet(p.header, p.groups | {"inputs": {"std": torch.full((5,), 1e30)}}),
    "other rows": lambda p: Packet(p.header | {"longest": [1, 0, 1]}, p.groups),
}


@pytest.mark.parametrize("told", OTHERWISE)
def test_no_client_adds_up_with_others_who_were_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """All but a have an update of zero, or one that the server knows: the sum is a's update (Pasquini and others, CCS
    2022). What they sign with their keys says what they were told, and a refuses them."""
    net = make(tmp_path, rounds=1, patience=1)

    def forge(one: Sent) -> Sent:
        misled = one.kind == TRAIN and one.packet.header["name"] != "a"
        return replace(one, packet=OTHERWISE[told](one.packet)) if misled else one

    net.forge = forge
    monkeypatch.setattr("kinfed.deploy.secure.secure_messages.KeyRecord.is_of", trusting(SecureNodePool))
    with pytest.raises(TooFewClients):
        run(net)
    assert any("without a" in line and "of the same model, settings and noise" in line for line in net.log)


def test_the_settings_of_a_run_are_of_the_terms_and_its_length_is_not() -> None:
    order, run = Packet({"round": 1, "number": 0, "effort": 1.0}), Deployment.parse(SETTINGS).run
    same = [
        terms_of(Packet(order.header | {"number": 3, "accepted": 5}), run, ""),
        terms_of(order, again(rounds=9), ""),
    ]
    other = [terms_of(order, again(lr=0.3), ""), terms_of(order, run, "[1.0, 3, 40]"),
             terms_of(Packet(order.header | {"round": 2}), run, "")]  # fmt: skip
    assert {terms_of(order, run, "")} == set(same)
    assert len({terms_of(order, run, ""), *other}) == 4


def again(**settings: Any) -> Any:
    return Deployment.parse(SETTINGS | settings).run


def test_a_list_that_few_have_signed_reveals_nothing(tmp_path: Path) -> None:
    """a and b are told that e is not in the sum, and sign that; all others that it is."""
    net, signatures = make(tmp_path, rounds=1), torch.zeros(5, 96, dtype=torch.uint8)

    def forge(one: Sent) -> Sent:
        misled = one.kind == CONFIRM and one.packet.header["name"] in "ab"
        return lists(one, survivors=[0, 1, 2, 3]) if misled else one

    def collect(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == CONFIRM and name in "ab":
            signatures[NAMES.index(name)] = answer.group("list")["signature"][0]
        return answer

    net.forge, net.tamper = forge, collect
    run(net)
    order = next(one for one in net.messages if one.kind == UNMASK)
    assert order.packet.header["name"] == "c"  # the others' signatures are not on the server's list
    order = lists(order, survivors=[0, 1, 2, 3])
    header = order.packet.header | {"name": "a", "number": 0}
    question = Packet(header, {"lists": order.packet.group("lists") | {"signatures": signatures}})
    with pytest.raises(Refused, match="2 clients have signed who is in the sum, and 3 must; nothing was revealed"):
        Node.of(net.nodes_[100], net.run_config, 100).answer(UNMASK, question)


def test_a_second_list_is_not_signed(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1)
    run(net)
    last = {(one.kind, one.packet.header.get("name")): one for one in net.messages}
    node, order = Node.of(net.nodes_[100], net.run_config, 100), last[CONFIRM, "a"]
    assert node.answer(CONFIRM, order.packet).groups.keys() == {"list"}  # the same question: an answer was lost
    for kind, places in ((CONFIRM, {"survivors": [0, 1, 2]}), (MASK, {"senders": [0, 1, 2]})):
        with pytest.raises(Refused, match="in another way before"):
            node.answer(kind, lists(last[kind, "a"], **places).packet)
    train, first = last[TRAIN, "a"].packet, order.packet
    assert node.answer(TRAIN, train).groups.keys() == {"keys"}
    assert node.answer(CONFIRM, first).groups.keys() == {"list"}  # the same keys: of no new sum
    with pytest.raises(Refused, match="has masked an update of round 1 already"):
        node.answer(TRAIN, Packet(train.header | {"effort": 0.5}, train.groups))
    with pytest.raises(Refused, match="has no update of round 2"):
        node.answer(MASK, Packet(last[MASK, "a"].packet.header | {"round": 2}))


def test_sums_of_too_few_are_refused(tmp_path: Path) -> None:
    def forge(one: Sent) -> Sent:
        return lists(one, survivors=[0, 1]) if one.kind == CONFIRM else one

    _, log = attack(tmp_path, forge)
    assert "2 clients with 2 keys would be in the sum; a adds up 3 at least, of 3 owners" in log


def changed(one: Sent, group: str, name: str, row: int, column: int) -> Sent:
    """The question with one bit flipped."""
    table = one.packet.group(group)[name].clone()
    table[row, column] ^= 1
    groups = one.packet.groups | {group: one.packet.group(group) | {name: table}}
    return replace(one, packet=Packet(one.packet.header, groups))


def test_changed_shares_and_keys_are_refused(tmp_path: Path) -> None:
    def shares(one: Sent) -> Sent:
        return changed(one, "shares", "sealed", 1, 40) if one.kind == MASK and one.node != 101 else one

    def keys(one: Sent) -> Sent:
        return changed(one, "keys", "records", 1, 3) if one.kind == SHARE and one.node != 101 else one

    _, log = attack(tmp_path / "1", shares)
    assert log.count("shares that cannot be opened: they were changed on the way") == 4
    _, log = attack(tmp_path / "2", keys)
    assert log.count("the keys in the name of b are not signed by it") == 4


def impostor(one: Sent, folder: Path) -> Sent:
    """The server itself in the place of b: keys of its own, and a signature of its own on them."""
    if one.kind != SHARE or one.node == 101:
        return one
    record = KeyRecord(public_key(new_secret()), public_key(new_secret()), bytes(32), b"")
    public = " ".join((folder / "server.pub").read_text().split()[:2])
    header = one.packet.header
    text = record.text(header["run"], header["round"], Member(1, "b", public), "")
    record = replace(record, signature=sign((folder / "server").read_bytes(), folder, text))
    clients = [client if client[1] != "b" else [1, "b", public] for client in header["clients"]]
    table = one.packet.group("keys")["records"].clone()
    table[1] = torch.tensor(list(record.packed()), dtype=torch.uint8)
    return replace(one, packet=Packet(header | {"clients": clients}, {"keys": {"records": table}}))


def test_a_server_cannot_take_the_place_of_clients(tmp_path: Path) -> None:
    """With keys that the nodes' owners have written down, not even in the first round; else from the second on."""
    certs, peers = tmp_path / "certs", tmp_path / "peers"
    make_certificates(certs, ["localhost"], [*NAMES, "mallory"])
    peers.mkdir()
    for name in NAMES:
        (peers / f"{name}.pub").write_bytes((certs / f"{name}.pub").read_bytes())
    for end in ("", ".pub"):
        (certs / f"mallory{end}").rename(certs / f"server{end}")
    net = make(tmp_path, rounds=2, patience=1)
    for config in net.nodes_.values():
        config["key"] = str(certs / config["client"])
    net.forge = lambda one: impostor(one, certs) if one.packet.header.get("round") == 2 else one
    with pytest.raises(TooFewClients):
        run(net)
    assert sum("without a: Refused: b would have key" in line for line in net.log) == 1
    net = make(tmp_path, rounds=1, patience=1, out=str(tmp_path / "strict"), seed=1)
    for config in net.nodes_.values():
        config |= {"key": str(certs / config["client"]), "peers": str(peers)}
    net.forge = lambda one: impostor(one, certs)
    with pytest.raises(TooFewClients):
        run(net)
    assert sum("without a: Refused: b would have key" in line for line in net.log) == 1


# ---- two studies ----


def server_move(net: Net) -> Tensor:
    """[P] the sum of a first round's updates, as anybody has it who sees the server's models."""
    first, second = (
        next(
            one.packet.group("down")["w"][0] for one in net.messages if (one.kind, one.packet.header.get("round")) == at
        )
        for at in (("train", 1), ("train", 2))
    )
    return second - first


def test_the_same_model_is_trained_for_the_sums_of_one_run_only(tmp_path: Path) -> None:
    """In the second of two studies with one seed a client was absent: the difference of the sums was its update, to
    5.6e-7, and nobody had lied."""
    run(make(tmp_path, options="weights=equal"))
    second = make(tmp_path, options="weights=equal", out=str(tmp_path / "second"), patience=1)
    second.away = {"e": (1, "train")}
    with pytest.raises(TooFewClients):
        run(second)
    assert sum("has trained this model for a secure sum of run" in line for line in second.log) == 4
    run(make(tmp_path, options="weights=equal", out=str(tmp_path / "third"), seed=1))


def test_batches_of_secure_sums_are_the_nodes_secret(tmp_path: Path) -> None:
    """Two networks with the same seed and data, and vaults that know nothing of each other: without the secret their
    sums were equal but for the absent client, of whom the difference is now no picture."""
    moves = []
    for name, away in (("all", {}), ("absent", {"e": (1, "train")})):
        (tmp_path / name).mkdir()
        net = make(tmp_path / name, options="weights=equal", batch=5)
        net.away = away
        run(net)
        moves.append(server_move(net))
    alone = make(tmp_path, options="weights=equal", batch=5, secure_sum=False)
    updates: dict[str, Tensor] = {}

    def look(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "train":
            updates.setdefault(name, answer.group("up")["delta"][0])
        return answer

    alone.tamper = look
    run(alone)
    guess = 5 * moves[0] - 4 * moves[1]
    assert float((guess - updates["e"]).norm() / updates["e"].norm()) > 0.1


def test_clients_with_the_same_keys_are_refused(tmp_path: Path) -> None:
    """b publishes the keys of c as its own, with its own signature: masks of the two with others would agree."""
    certs = tmp_path / "certs"
    make_certificates(certs, ["localhost"], NAMES)

    def forge(one: Sent) -> Sent:
        if one.kind != SHARE or one.node != 100:
            return one
        table, header = one.packet.group("keys")["records"].clone(), one.packet.header
        record = replace(KeyRecord.read(bytes(table[2].tolist())), commitment=bytes(32))
        order = next(sent.packet for sent in net.messages if sent.kind == TRAIN)
        terms = terms_of(order, Deployment.parse(net.run_config).run, "")
        text = record.text(header["run"], header["round"], Member(1, "b", ""), terms)
        signed = replace(record, signature=sign((certs / "b").read_bytes(), certs / "b", text))
        table[1] = torch.tensor(list(signed.packed()), dtype=torch.uint8)
        return replace(one, packet=Packet(header, {"keys": {"records": table}}))

    net = make(tmp_path, rounds=1)
    for config in net.nodes_.values():
        config["key"] = str(certs / config["client"])
    net.forge = forge
    run(net)
    assert any("without a: Refused: two clients of the sum have the same keys" in line for line in net.log)


def test_several_clients_of_one_owner_count_as_one(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, ["localhost"], ["a", "b"])
    net = make(tmp_path, rounds=1, patience=1)
    for config in net.nodes_.values():
        config["key"] = str(certs / ("a" if config["client"] == "a" else "b"))
    with pytest.raises(TooFewClients):
        run(net)
    assert any("5 clients with 2 keys take part; a adds up 3 at least, of 3 owners" in line for line in net.log)


# ---- clients that lie ----


def lie(kind: str, client: str, change: Callable[[Packet], Packet]) -> Any:
    return lambda name, question, answer: change(answer) if (question.kind, name) == (kind, client) else answer


def test_a_false_share_gives_no_sum(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1, patience=1)
    net.tamper = lie(UNMASK, "a", lambda answer: Packet(
        answer.header, {"shares": {"revealed": answer.group("shares")["revealed"] ^ 1}}
    ))  # fmt: skip
    with pytest.raises(TooFewClients):
        run(net)
    assert "round 1: no secure sum: the shares of a's own mask do not fit what it announced; nothing was changed" in (
        net.log
    )


def test_a_sum_out_of_range_is_not_used(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1, patience=1)
    net.tamper = lie(MASK, "a", lambda answer: Packet(
        answer.header, {"sum": {"masked": answer.group("sum")["masked"] + 2**62}}
    ))  # fmt: skip
    with pytest.raises(TooFewClients):
        run(net)
    assert any("beyond what updates within secure_range can add up to" in line for line in net.log)


def test_an_update_out_of_range_stays_at_its_client(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1, secure_range=0.0005, patience=1)
    with pytest.raises(TooFewClients):
        run(net)
    lines = [line for line in net.log if "beyond secure_range" in line]
    assert len(lines) == 5
    assert all(line.endswith("its update holds a number beyond secure_range") for line in lines)  # not by how much


# ---- what is asked for, and refused ----


def test_owners_may_insist_on_secure_sums(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1, secure_sum=False)
    net.nodes_[100] |= {"require_secure_aggregation": "yes", "peers": str(tmp_path)}
    folder = run(net)
    assert any("without a: Refused: a sends updates in secure sums only" in line for line in net.log)
    assert records(folder)[0]["dropped"] == 1
    net = make(tmp_path, rounds=1, patience=1, out=str(tmp_path / "second"))
    net.nodes_[101]["least_clients"] = "6"
    folder = run(net)
    assert any("share: without b: Refused: 5 clients with 5 keys take part; b adds up 6" in line for line in net.log)
    assert records(folder)[0]["dropped"] == 1


def test_an_owner_who_insists_on_secure_sums_says_with_whom() -> None:
    """A server could invent all others of a sum."""
    with pytest.raises(ConfigError, match="a server could invent the others"):
        NodeSettings.parse({"client": "a", "data": "a.csv", "require_secure_aggregation": "yes"})


@pytest.mark.parametrize(("settings", "reason"), [
    ({"method": "fedfomo"}, "its server needs single updates"),
    ({"method": "selffl_control"}, "also sends s,? "),
    ({"robust": "median"}, "judges single updates"),
    ({"largest_norm": 3.0}, "judges single updates"),
    ({"scaling": "standard"}, "takes exact sums of features from every node"),
    ({"secure_least": 2}, "secure_least must be"),
    ({"participation": 0.4}, "2 client\\(s\\) are called"),
])  # fmt: skip
def test_what_needs_single_updates_is_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(make(tmp_path, **settings))


# ---- the parts ----


def test_parts_of_the_protocol() -> None:
    one, two = new_secret(), new_secret()
    key = agreed_key(one, public_key(two), "x")
    assert key == agreed_key(two, public_key(one), "x")
    assert key != agreed_key(two, public_key(one), "y")
    assert unseal(key, seal(key, b"text", "about"), "about") == b"text"
    with pytest.raises(MessageError, match="cannot be opened"):
        unseal(key, seal(key, b"text", "about"), "other")
    with pytest.raises(MessageError, match="a public key that is none"):
        agreed_key(one, bytes(32), "x")
    shares = split_secret(one, 3, 5)
    assert join_secret({4: shares[4], 0: shares[0], 2: shares[2]}, 3) == one
    assert join_secret({0: shares[0], 1: shares[1], 2: shares[3]}, 3) != one
    with pytest.raises(MessageError, match="2 shares of a secret, and 3"):
        join_secret({0: shares[0], 1: shares[1]}, 3)
    assert [threshold_of(n, 0.5) for n in (3, 4, 5, 10)] == [2, 3, 3, 6]
    assert [threshold_of(n, 0.67) for n in (3, 4, 5, 10)] == [3, 3, 4, 7]


@pytest.mark.parametrize("value", [0, 1, 2**40])
def test_a_masked_update_tells_nothing(value: int) -> None:
    """Bytes of constant updates under a mask are spread evenly: chi-square of 255 degrees of freedom."""
    masked = np.full(100_000, value, np.uint64) + mask(bytes(range(32)), 100_000)
    counts = np.bincount(masked.view(np.uint8), minlength=256)
    assert 180 < float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 340
