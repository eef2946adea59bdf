"""One registered node that lies can neither stop a run nor decide it, nor take another's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopback import Loopback
from test_deploy import expected, make, models, records, run, simulated, up, without
from torch import Tensor

from kinfed.deploy.server.deployment_server import TooFewClients
from kinfed.deploy.transport.enrolment_message import Greeting, read_greetings
from kinfed.deploy.transport.exchange import HELLO_SECONDS, RETRY_SECONDS, Answer, Sent
from kinfed.deploy.transport.wire import MessageError, Packet, plain_text

pytest.importorskip("cryptography", reason="the extra flower is not installed")

from kinfed.deploy.operator.certs import make_certificates
from kinfed.deploy.transport.client_keys import fingerprint, is_signed, new_private_key, sign_greeting

MALLORY = 300  # the number of a registered node that is nobody's


# ---- a client belongs to a key ----


def forged(net: Loopback, folder: Path, name: str = "b") -> None:
    """A node with a vault, and so a key, of its own that says it is b; it has b's data even."""
    net.nodes_[MALLORY] = net.nodes_[101] | {"client": name, "vault": str(folder / "vault-mallory")}


def test_a_name_is_refused_to_another_key(tmp_path: Path) -> None:
    """It appears when the run is under way, and is greeted again and again; the log says it once."""
    net = make(tmp_path, rounds=4, deadline=10 * RETRY_SECONDS)

    def appear(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "train" and name == "c":
            forged(net, tmp_path)
            net.now += RETRY_SECONDS + 1
        return answer

    net.tamper = appear
    run(net)
    assert {one.kind for one in net.messages if one.node == MALLORY} == {"hello"}
    assert sum(one.node == MALLORY for one in net.messages) > 1
    refusals = [line for line in net.log if "it says that it is b, with key" in line]
    assert len(refusals) == 1
    assert "b belongs to key" in refusals[0]
    torch.testing.assert_close(models(net, [100, 101, 102]), expected(simulated(net)), rtol=0, atol=1e-6)


def test_a_resumed_run_knows_the_keys(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=2)
    folder = run(net)
    kept = json.loads((folder / "deployment.json").read_text())["keys"]
    assert [key.startswith("ecdsa-sha2-nistp384 ") for key in kept] == [True] * 3
    forged(net, tmp_path)
    del net.nodes_[101]
    net.run_config = dict(net.run_config) | {"rounds": 3}
    run(net)
    assert {one.kind for one in net.messages if one.node == MALLORY} == {"hello"}
    assert [r["dropped"] for r in records(folder)] == [0, 0, 1]


def test_keys_that_the_operator_wrote_down_hold_from_the_start(tmp_path: Path) -> None:
    """Whoever comes first: the forger is there before b."""
    certs = tmp_path / "certs"
    make_certificates(certs, ["localhost"], ["a", "b", "c", "mallory"])
    net = make(tmp_path, rounds=1, keys=str(certs), clients="a,b,c")
    for config in net.nodes_.values():
        config["key"] = str(certs / config["client"])
    net.nodes_ = {1: net.nodes_[101] | {"key": str(certs / "mallory")}} | net.nodes_
    net.nodes_[2] = net.nodes_[101] | {"client": "stranger"}
    run(net)
    assert {one.kind for one in net.messages if one.node in (1, 2)} == {"hello"}
    assert any("it says that it is b, with key" in line for line in net.log)
    assert any("it says that it is stranger, but the folder of keys has no stranger.pub" in line for line in net.log)


def test_a_greeting_proves_itself_once_and_on_its_node() -> None:
    key = new_private_key()
    greeting = sign_greeting(key, Path("k"), {"name": "b", "counts": [1, 2, 3]}, "nonce", 7)
    assert is_signed(greeting, "nonce", 7)
    other = sign_greeting(new_private_key(), Path("k"), {"name": "b"}, "nonce", 7)
    assert fingerprint(greeting["key"]) != fingerprint(other["key"])
    assert not is_signed(greeting, "another", 7)  # an old one
    assert not is_signed(greeting, "nonce", 8)  # one that was made on another node
    assert not is_signed(greeting | {"name": "a"}, "nonce", 7)
    assert not is_signed(greeting | {"counts": [9, 2, 3]}, "nonce", 7)
    assert not is_signed(greeting | {"key": other["key"]}, "nonce", 7)
    for nonsense in ({"key": 3}, {"key": ""}, {"signature": "zz"}, {"signature": None}, {"signature": ""}):
        assert not is_signed(greeting | nonsense, "nonce", 7)


def test_a_greeting_without_its_signature_is_refused(tmp_path: Path) -> None:
    net = make(tmp_path, wait=5.0)
    net.tamper = greeting_with("b", signature="00")
    with pytest.raises(TooFewClients, match="its greeting as b is not signed with the key that it names"):
        run(net)


# ---- greetings ----


def greeting_with(client: str, **values: Any) -> Callable[[str, Sent, Packet], Packet]:
    def tamper(name: str, question: Sent, answer: Packet) -> Packet:
        if question.kind != "hello" or name != client:
            return answer
        return Packet({"clients": [answer.header["clients"][0] | values]})

    return tamper


BAD_GREETINGS: list[dict[str, Any]] = [
    {"counts": [10**30, 0, 1]}, {"counts": [10**7, 0, 1]}, {"counts": "many"}, {"counts": [[1], [2], [3]]},
    {"counts": [float("nan"), 0, 1]}, {"counts": [1.5, 0, 1]}, {"counts": [-1, 0, 1]}, {"counts": [True, 0, 1]},
    {"counts": [1, 2]}, {"counts": None}, {"shape": [0]}, {"shape": [10**30]}, {"shape": "5"}, {"shape": [10**5] * 3},
    {"rows": 10**30}, {"rows": "x"}, {"rows": 0}, {"rows": float("inf")}, {"tokens": 1}, {"columns": [1]},
    {"columns": "age"}, {"columns": ["a\\nb\n"]}, {"group": ["g"]}, {"name": ""}, {"name": "x" * 101},
    {"name": "b\x1b[31m"}, {"name": "b\nround 9 of 9"}, {"name": "[/bold]"}, {"name": 3}, {"key": None},
    {"own_roles": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("values", BAD_GREETINGS, ids=lambda values: repr(values)[:30])
def test_a_bad_greeting_is_refused_and_nobody_waits_for_more_than_its_node(values: dict[str, Any]) -> None:
    good = {
        "name": "b", "group": "", "columns": [], "counts": [12, 0, 5], "rows": 12, "shape": [5], "tokens": False,
        "key": "k", "signature": "s", "own_roles": False,
    }  # fmt: skip
    assert Greeting.read(good, 10**6).counts == (12, 0, 5)
    with pytest.raises(MessageError) as caught:
        read_greetings(Packet({"clients": [good | values]}), 10**6)
    assert str(caught.value).isprintable()


def test_a_bad_greeting_does_not_stop_a_run(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=2, clients="a,b,c")
    net.nodes_[MALLORY] = net.nodes_[101] | {"client": "mallory", "vault": str(tmp_path / "vault-mallory")}
    net.tamper = greeting_with("mallory", counts=[10**15, "x", None])
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 0]
    assert sum("cannot take part: counts should be whole numbers" in line for line in net.log) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.fixed_dictionaries({name: JSON for name in Greeting.__dataclass_fields__}), max_size=2) | JSON)
def test_whatever_a_node_says_it_is_read_or_refused(clients: Any) -> None:
    greetings, refusal = [], ""
    try:
        greetings = read_greetings(Packet({"clients": clients}), 10**6)
    except MessageError as error:
        refusal = str(error)
    assert refusal.isprintable()
    assert all(max(greeting.counts) <= 10**6 for greeting in greetings)


# ---- updates, evaluations and sums ----


def spoilt(kind: str, change: Callable[[Packet], Packet], client: str = "b", round: int = 2) -> Any:
    def tamper(name: str, question: Sent, answer: Packet) -> Packet:
        here = question.kind == kind and name == client and question.packet.header.get("round", round) == round
        return change(answer) if here else answer

    return tamper


@pytest.mark.parametrize("count", [1e6, 16.0, 10.0, 0.0, float("nan"), float("inf")])
def test_an_update_cannot_weigh_more_than_its_client_declared(tmp_path: Path, count: float) -> None:
    net = make(tmp_path)
    net.tamper = spoilt("train", lambda a: up(a, count=torch.tensor([count])))
    folder = run(net)
    assert [r["dropped"] for r in records(folder)] == [0, 1, 0]
    assert any("round 2: dropped b: " in line for line in net.log)
    torch.testing.assert_close(models(net), without(net, "b", {2}), rtol=0, atol=1e-6)


def test_a_count_may_change_by_what_the_operator_allows(tmp_path: Path) -> None:
    """b has 12 training examples of 17 rows: 13 is a change by 8 %."""
    net = make(tmp_path, drift=0.1)
    net.tamper = spoilt("train", lambda a: up(a, count=torch.tensor([13.0])))
    assert [r["dropped"] for r in records(run(net))] == [0, 0, 0]


def score(**values: float) -> Callable[[Packet], Packet]:
    def change(answer: Packet) -> Packet:
        tensors = {name: torch.tensor([value]) for name, value in values.items()}
        return Packet(answer.header, {**answer.groups, "personal": answer.group("personal") | tensors})

    return change


def group(name: str, tensors: dict[str, Tensor]) -> Callable[[Packet], Packet]:
    return lambda answer: Packet(answer.header, {**answer.groups, name: tensors})


BAD_EVALUATIONS: dict[str, Callable[[Packet], Packet]] = {
    "count NaN": score(count=float("nan")),
    "count infinite": score(count=float("inf")),
    "count 1e9": score(count=1e9, correct=1e9),
    "count negative": score(count=-5.0, correct=-5.0),
    "count one half": score(count=5.5, correct=1.0),
    "more correct than there are": score(correct=6.0),
    "correct NaN": score(correct=float("nan")),
    "correct negative": score(correct=-1.0),
    "loss NaN": score(loss=float("nan")),
    "loss 1e30": score(loss=1e30),
    "loss negative": score(loss=-1.0),
    "no score": group("personal", {}),
    "two counts": group("personal", {name: torch.ones(2) for name in ("correct", "loss", "count")}),
    "a figure of many numbers": group("figures", {"alpha": torch.ones(7)}),
    "a figure with a strange name": group("figures", {"a\x1b[31m\n": torch.ones(1)}),
    "a strange model": group("other.x", {"correct": torch.ones(1)}),
    "gradients in text": lambda a: Packet(a.header | {"name": "a"}, a.groups),
}


@pytest.mark.parametrize("fault", BAD_EVALUATIONS)
def test_an_impossible_evaluation_is_left_out(tmp_path: Path, fault: str) -> None:
    net = make(tmp_path, rounds=2)
    net.tamper = spoilt("evaluate", BAD_EVALUATIONS[fault])
    folder = run(net)
    assert sum("evaluation after round 2: without b: " in line for line in net.log) == 1
    personal = json.loads((folder / "summary.json").read_text())["results"][0]["personal"]
    assert 0 <= personal["accuracy"] <= 1
    assert all(line.isprintable() for line in net.log)


@pytest.mark.parametrize(
    "gradients",
    ["many", [[0.3, 1, 10**30]], [[0.3, 1, float("inf")]], [[float("nan"), 1, 1]], [[1.0, 1]], [3], [[0.3, -1, -1]],
     [[0.3, 1, 10**6]]],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_impossible_numbers_of_private_gradients_are_refused(tmp_path: Path, kind: str, gradients: Any) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    net = make(tmp_path, method="fedavg", dp_noise=1.0, rounds=2)
    net.tamper = spoilt(kind, lambda a: Packet(a.header | {"gradients": gradients}, a.groups))
    folder = run(net)
    assert any("without b: " in line or "dropped b: " in line for line in net.log)
    assert [r["dropped"] for r in records(folder)] == [0, 1 if kind == "train" else 0]


@pytest.mark.parametrize("value", [1e30, -1e30, 1e8, float("nan")])
def test_sums_beyond_all_measure_are_left_out_of_the_scaling(tmp_path: Path, value: float) -> None:
    net = make(tmp_path, scaling="standard", rounds=1)
    net.tamper = spoilt("sums", group("sums", {"total": torch.full((5,), value, dtype=torch.float64)}))
    folder = run(net)
    assert sum("the common scaling is without b: " in line for line in net.log) == 1
    mean = json.loads((folder / "deployment.json").read_text())["mean"]
    assert max(map(abs, mean)) < 3
    assert [r["dropped"] for r in records(folder)] == [0]


# ---- what nodes write ----


def test_what_nodes_write_stays_on_its_line(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1)
    text = "broken\n2026-01-01T00:00:00 done; \x1b[2J\x1b]0;title\x07[bold red]all is well[/] \u202egnorw"
    net.tamper = spoilt("train", lambda a: Packet(a.header | {"refused": text}), round=1)
    folder = run(net)
    lines = (folder / "log.txt").read_text().splitlines()
    (line,) = [line for line in lines if "broken" in line]
    assert line.endswith("dropped b: broken 2026-01-01T00:00:00 done; (bold red)all is well(/) gnorw")
    assert all(line[:2] == "20" and line.isprintable() for line in lines)


@given(st.text(max_size=400))
def test_plain_text_is_plain(text: str) -> None:
    plain = plain_text(text)
    assert plain.isprintable()
    assert len(plain) <= 300
    assert not set(plain) & set("[]<>\x1b\n")
    assert plain_text(plain) == plain


# ---- time ----


def test_a_greeting_without_an_answer_is_sent_again(tmp_path: Path) -> None:
    """b's node takes the first greeting and is never heard of; the second one it answers."""
    net = make(tmp_path, rounds=1, wait=2 * HELLO_SECONDS)
    greetings: list[str] = []

    def silent(name: str, question: Sent, answer: Packet) -> Packet | None:
        if question.kind == "hello" and name == "b":
            greetings.append(name)
            return answer if len(greetings) > 1 else None
        return answer

    net.tamper = silent  # type: ignore[assignment]
    assert [r["dropped"] for r in records(run(net))] == [0]
    assert len(greetings) == 2
    assert HELLO_SECONDS < net.now < 2 * HELLO_SECONDS


def test_a_client_whose_node_went_away_with_the_message_is_asked_again(tmp_path: Path) -> None:
    """Flower says so with an error of its own; the node is back under the same number at once."""
    net = make(tmp_path, rounds=2, quorum=3)
    lost: list[str] = []

    def gone(name: str, question: Sent, answer: Packet) -> Packet | None:
        if question.kind == "train" and name == "b" and question.packet.header["round"] == 2 and not lost:
            lost.append(f"m{len(net.messages) - 1}")
            net._post("b", Answer(lost[0], None, "Node unavailable", gone=True))
            return None
        return answer

    net.tamper = gone  # type: ignore[assignment]
    assert [r["dropped"] for r in records(run(net))] == [0, 0]
    asked = [one for one in net.messages if one.kind == "train" and one.packet.header["name"] == "b"]
    assert [one.packet.header["round"] for one in asked] == [1, 2, 2]
    torch.testing.assert_close(models(net), expected(simulated(net)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_client_whose_answering_process_died_is_asked_once_more(tmp_path: Path, crashes: int) -> None:
    """One killed process costs nobody a round; a message that kills it every time costs its client one."""
    net = make(tmp_path, rounds=2, quorum=2)
    lost: list[str] = []

    def crash(name: str, question: Sent, answer: Packet) -> Packet | None:
        if question.kind == "train" and name == "b" and question.packet.header["round"] == 2 and len(lost) < crashes:
            lost.append(f"m{len(net.messages) - 1}")
            net._post("b", Answer(lost[-1], None, "ClientApp stopped responding. (code 8)", crashed=True))
            return None
        return answer

    net.tamper = crash  # type: ignore[assignment]
    assert [r["dropped"] for r in records(run(net))] == [0, crashes - 1]
    asked = [one for one in net.messages if one.kind == "train" and one.packet.header["name"] == "b"]
    assert [one.packet.header["round"] for one in asked] == [1, 2, 2]
    if crashes == 1:
        torch.testing.assert_close(models(net), expected(simulated(net)), rtol=0, atol=1e-6)


def test_the_log_says_what_clients_claim(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1)
    run(net)
    assert "training examples, as the clients say: a 22 (42 %), b 12 (23 %), c 18 (35 %)" in net.log
