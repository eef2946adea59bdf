"""One gate for all that leaves a node: an owner's rules and the ledger hold for answers, evaluations, sums and errors.

The attacks here have worked: a run that chose the test rows read a private row from eight exact evaluations, with
nothing in the ledger."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch

import kinfed
from kinfed.deploy.node import gated_requests
from kinfed.deploy.node.gate import LARGEST_LOSS, Released, Withheld, error_outside
from kinfed.deploy.node.node import Node, NodeClient
from kinfed.deploy.node.node_data import load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.privacy_log import HELD_OUT_ROWS, Page
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet
from kinfed.errors import StorageError
from kinfed.privacy import Event
from tests.loopback import Loopback, write_nodes

FEATURES, ROWS = 6, 200
PARAMETERS = 3 * (FEATURES + 1)
RUN: dict[str, Any] = {
    "method": "fedavg", "options": "weights=equal", "model": "mlr", "clients": 1, "classes": "3", "scaling": "none",
    "steps": 1, "batch": 5, "lr": 0.5, "dp-noise": 5.0, "test-fraction": 0.25,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A node whose owner demands privacy, and whose data do not say which rows are for the test."""
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(ROWS) % 3)
    return {"client": "a", "data": str(tmp_path / "a.npz"), "vault": str(tmp_path / "vault"), "min_noise": "5"}


def ask(config: dict[str, Any], kind: str, settings: dict[str, Any], model: float = 0.0, **header: Any) -> Packet:
    order = {
        "kind": kind, "run": "r1", "round": 1, "number": 0, "name": "a", "accepted": 0, "num_clients": 1,
        "longest": [ROWS] * 3, "group": -1, "noise": 5.0, "frozen": "",
    }  # fmt: skip
    order |= {"split": "test"} if kind == "evaluate" else {"effort": 1.0}
    groups = {"down": {"w": torch.full((1, PARAMETERS), model)}, "inputs": {}}
    return Node.of(config, RUN | settings).answer(kind, Packet(order | header, groups))


def page(config: dict[str, Any]) -> Page:
    return Vault(config["vault"]).privacy_log(config["client"]).read()


def roles(config: dict[str, Any], run: dict[str, Any]) -> list[list[int]]:
    federation = load_client_data(NodeSettings.parse(config), Deployment.parse(RUN | run)).federation
    return [federation.split(name).rows.tolist() for name in ("train", "val", "test")]


@pytest.mark.parametrize("rule", ["require_secure_aggregation", "user_epsilon"])
def test_under_secure_sums_no_run_chooses_the_rows_that_exact_figures_are_of(
    config: dict[str, Any], tmp_path: Path, rule: str
) -> None:
    """Else a run with nearly all rows for the test gives exact figures of the rows that others train on."""
    del config["min_noise"]
    config |= {rule: {"user_epsilon": "4"}.get(rule, "yes"), "peers": str(tmp_path)}
    run = {"dp-noise": "", "secure-sum": True, "test-fraction": 0.25}
    train, _, test = roles(config, run)
    for other in ({"test-fraction": 0.99}, {"seed": 3}, {"classes": "a,b,0,1,2"}):
        assert roles(config, run | other) == [train, [], test]
    assert len(test) == pytest.approx(ROWS / 4, abs=20)


def network(folder: Path, settings: dict[str, Any]) -> tuple[Loopback, dict[int, Any]]:
    """Three nodes, and their settings."""
    x, owner = np.random.default_rng(0).normal(size=(90, FEATURES)).astype(np.float32), np.repeat([0, 1, 2], 30)
    nodes = write_nodes(folder, x, np.arange(90) % 3, owner, ["a", "b", "c"])
    return Loopback(RUN | {"clients": "a,b,c", "rounds": 2, "out": str(folder / "run")} | settings, nodes), nodes


# ---- rows' roles are the owner's ----


def test_no_run_chooses_the_test_rows_of_an_owner_who_demands_privacy(config: dict[str, Any]) -> None:
    """A run with test-fraction 0.995 had 199 of 200 rows evaluated, and another one trained on them."""
    first = roles(config, {})
    assert 0.15 < len(first[2]) / ROWS < 0.35
    for run in ({"test-fraction": 0.995}, {"seed": 1}, {"test-fraction": 0.0, "seed": 7}):
        assert roles(config, run) == first
    ask(config, "train", {})
    answer = ask(config, "evaluate", {"test-fraction": 0.995, "seed": 3})
    assert int(answer.group("personal")["count"]) == len(first[2])


def test_no_run_turns_training_rows_into_validation_rows(config: dict[str, Any]) -> None:
    """A run with validation = 0.9 had 144 of 160 training rows evaluated, where the data named test rows only."""
    data = dict(np.load(config["data"]))
    np.savez(config["data"], **data, test=np.arange(ROWS) >= 160)
    config["evaluate"] = "test,val"
    with pytest.raises(Refused, match="its rows have the roles that its owner gave them"):
        ask(config, "evaluate", {"validation": 0.9}, split="val")
    config["validation"] = "0.25"
    train, val, test = roles(config, {"validation": 0.9})
    assert test == list(range(160, 200))
    assert 20 < len(val) < 60
    assert roles(config, {}) == [train, val, test]
    assert int(ask(config, "evaluate", {"validation": 0.9}, split="val").group("personal")["count"]) == len(val)


def test_roles_stay_when_rows_are_added_and_columns_are_chosen(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    table = pa.table({"age": numbers.integers(20, 80, 60), "dose": numbers.normal(size=60), "ill": np.arange(60) % 2})
    config = {"client": "a", "data": str(tmp_path / "a.csv"), "vault": str(tmp_path / "vault"), "epsilon": "8"}
    pa_csv.write_csv(table, config["data"])
    run = {"label-column": "ill", "classes": "2"}
    before = roles(config, run)
    assert roles(config, run | {"features": "age"}) == before
    assert roles(config, run | {"label-column": "age", "target": "50,10", "classes": ""}) == before
    more = pa.table({"age": [30.5, 41.0], "dose": [0.1, 0.2], "ill": [0, 1]})  # ages are no whole numbers any more
    both = pa.concat_tables([table.set_column(0, "age", table["age"].cast(pa.float64())), more])
    pa_csv.write_csv(both, config["data"])
    assert [[row for row in rows if row < 60] for rows in roles(config, run)] == before
    order = numbers.permutation(62)
    pa_csv.write_csv(both.take(order), config["data"])
    assert [sorted(order[row] for row in rows if order[row] < 60) for rows in roles(config, run)] == before


def test_all_rows_of_a_person_have_one_role(tmp_path: Path) -> None:
    numbers, who = np.random.default_rng(1), [f"p{k % 20}" for k in range(100)]
    config = {"client": "a", "data": str(tmp_path / "a.csv"), "vault": str(tmp_path / "vault"), "person": "who"}
    pa_csv.write_csv(
        pa.table({"dose": numbers.normal(size=100), "who": who, "ill": np.arange(100) % 2}), config["data"]
    )
    run = {"label-column": "ill", "classes": "2", "dp-noise": "", "validation": 0.2}
    for owner, asked in (({}, run), ({"epsilon": "8", "validation": "0.2"}, run | {"dp-noise": 5.0})):
        train, val, test = ({who[row] for row in rows} for rows in roles(config | owner, asked))
        assert train | val | test == set(who)
        assert len(train) + len(val) + len(test) == 20
        assert test


def test_the_owner_changes_no_role_after_private_training(config: dict[str, Any]) -> None:
    ask(config, "train", {})
    with pytest.raises(Refused, match="another division of its rows"):
        ask(config | {"test_fraction": "0.5"}, "train", {}, round=2)


def test_without_a_demand_the_run_draws_its_test_rows_as_a_simulation_does(config: dict[str, Any]) -> None:
    del config["min_noise"]
    assert len(roles(config, {"test-fraction": 0.5})[2]) == 100
    assert roles(config, {"seed": 1}) != roles(config, {})
    config["test_fraction"] = "0.1"
    assert roles(config, {"seed": 1}) == roles(config, {})


# ---- evaluations have a price ----


def test_evaluations_do_not_tell_a_row_and_are_in_the_ledger(config: dict[str, Any]) -> None:
    """Differences of exact losses under chosen models gave one row to 3.6e-7."""
    noises = []
    for number in range(8):
        answer = ask(config, "evaluate", {}, model=number * 1e-9, run=f"r{number}")
        assert answer.header["scores"] == "noise 5"
        assert set(answer.groups) == {"personal"}
        assert set(answer.group("personal")) == {"correct", "loss", "count"}
        count = int(answer.group("personal")["count"])
        noises.append((float(answer.group("personal")["loss"]) - count * math.log(3)) / LARGEST_LOSS)
    entries = [answer for answer in page(config).answers if answer.kind == "scores"]
    assert [(entry.noise, entry.events) for entry in entries] == [(5.0, (Event(1.0, 1, 1),))] * 8
    assert len({round(noise, 3) for noise in noises}) > 3  # losses are at least 0: some may end there
    assert 0.5 < float(np.std(noises)) < 30  # about sqrt(2) times 5, as each row has two figures; keys are drawn anew


def test_the_noise_of_figures_is_what_the_ledger_says(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_requests, "_bounded_sums", lambda *_: torch.tensor([25.0, 25.0], dtype=torch.float64))
    config |= {"evaluation_noise": "1", "test_fraction": "0.5"}  # clamping to the rows that there are plays no part
    answers = [ask(config, "evaluate", {}, run=f"r{number}").group("personal") for number in range(60)]
    right = torch.cat([answer["correct"] for answer in answers]) - 25
    loss = torch.cat([answer["loss"] for answer in answers]) / LARGEST_LOSS - 25
    assert float(torch.cat([right, loss]).std()) == pytest.approx(math.sqrt(2), rel=0.25)


def test_no_row_moves_a_figure_by_more_than_one(config: dict[str, Any]) -> None:
    """The sensitivity that the price counts on, with models whose losses are huge, infinite or NaN."""
    node = Node.of(config, RUN)
    federation = load_client_data(node.clients["a"].settings, Deployment.parse(RUN)).federation
    split = federation.cohort(torch.tensor([0]), 0, 1).test
    split = replace(split, count=torch.ones_like(split.count))
    task = kinfed.engine.make_task(lambda: kinfed.engine.build_model("mlr", (FEATURES,), 3))
    for value in (0.0, 1e30, -1e30, float("inf"), float("nan")):
        theta = torch.full((1, PARAMETERS), value)
        sums = gated_requests._bounded_sums(task, theta, split)
        assert bool((sums >= 0).all())
        assert bool((sums <= 1).all()), (value, sums)


def test_the_same_evaluation_again_gets_the_same_figures(config: dict[str, Any]) -> None:
    first, again = (ask(config, "evaluate", {}).group("personal") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert len(page(config).answers) == 1


def test_figures_end_with_the_owners_epsilon_and_models_are_still_made(config: dict[str, Any]) -> None:
    accounting = pytest.importorskip("kinfed.privacy.accountant", reason="the extra dp is not installed")
    config["epsilon"] = "1.5"
    terms = [ask(config, "evaluate", {}, round=number).header["scores"] for number in range(1, 6)]
    given = sum(text == "noise 5" for text in terms)
    withheld = "figures would take the rows that a evaluates on beyond its owner's epsilon"
    assert 1 <= given < 5
    assert terms == ["noise 5"] * given + [withheld] * (5 - given)
    assert accounting.epsilon_over_noises(page(config).spent(kinds=HELD_OUT_ROWS), 1e-5) <= 1.5
    assert page(config).spent() == ()  # training rows have paid nothing
    assert Vault(config["vault"]).entry("r1", "a").model_round == 5
    config["evaluation_noise"] = "0"
    answer = ask(config, "evaluate", {}, run="r2")
    assert not answer.groups
    assert "keeps figures of evaluations" in answer.header["scores"]


def test_an_owner_may_give_exact_figures_of_test_rows(config: dict[str, Any]) -> None:
    answer = ask(config | {"exact_scores": "yes"}, "evaluate", {})
    assert answer.header["scores"] == "exact"
    count = int(answer.group("personal")["count"])
    assert float(answer.group("personal")["loss"]) == pytest.approx(count * math.log(3), rel=1e-5)
    assert page(config).answers == ()
    assert page(config).released["r1"] == {"evaluate: figures on test rows, exact": 1}


@pytest.mark.parametrize("target", [{"classes": "3"}, {"classes": "", "target": "1,1"}])
def test_a_run_ends_well_with_figures_that_have_noise_and_with_none(tmp_path: Path, target: dict[str, Any]) -> None:
    net, nodes = network(tmp_path, target | {"dp-noise": 5.0})
    for node, own in zip(
        nodes.values(), ({"min_noise": "5"}, {"epsilon": "50", "evaluation_noise": "0"}, {}), strict=True
    ):
        node |= own
    serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    assert any("figures of a: noise 5" in line for line in net.log)
    assert any("figures of b: the owner of b keeps figures" in line for line in net.log)
    assert any("the choice of the owners of a, b" in line for line in net.log)
    assert any(line.startswith("done") for line in net.log)
    assert all(Vault(node["vault"]).model_path().exists() for node in nodes.values())


# ---- nothing goes around the gate ----


def test_an_answer_that_avoids_the_gate_is_not_sent(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeClient, "train", lambda self, order: Packet({"name": "a"}, {"up": {}}))
    with pytest.raises(Withheld, match="has not passed the gate; it was not sent"):
        ask(config, "train", {})
    monkeypatch.setattr(NodeClient, "hello", lambda self, nonce, node: Packet({"rows": 3}))
    with pytest.raises(Withheld, match="has not passed the gate"):
        Node.of(config, RUN).answer("hello", Packet({"nonce": "00"}))


def test_only_the_gate_lets_answers_out() -> None:
    """`Released` is made in two files, and only in methods that write the ledger first."""
    root = Path(kinfed.__file__).parent
    files = {path for path in root.rglob("*.py") if re.search(r"\bReleased(\.of)?\(", path.read_text("utf-8"))}
    assert files == {root / "deploy" / "node" / name for name in ("gate.py", "gated_requests.py")}
    text = "".join(path.read_text("utf-8") for path in files)
    # At a price (twice), the same again, by a rule, by a rule among answers of one message that are counted before.
    assert len(re.findall(r"\bReleased\.of\(", text)) == 5
    assert re.findall(r"\bReleased\(.*", text) == ["Released(Packet):"]  # the class


def test_the_ledger_has_all_that_left(tmp_path: Path) -> None:
    net, nodes = network(tmp_path, {"dp-noise": "", "scaling": "standard"})
    serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    for number, node in nodes.items():
        released = page(node).released
        counts = [count for by_rule in released.values() for count in by_rule.values()]
        assert sum(counts) == sum(message.node == number for message in net.messages)
        assert released[""] == {"hello: a greeting": 1, "sums: sums of features": 2}
        (by_rule,) = (by_rule for run, by_rule in released.items() if run)
        assert by_rule == {"train: an update": 2, "evaluate: figures on test rows, exact": 1}


def test_refusals_and_errors_are_counted(config: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        ask(config, "train", {"dp-noise": ""})
    with pytest.raises(MessageError):
        ask(config, "train", {}, longest=[1])
    assert page(config).released == {"": {"error: Refused": 1, "error: MessageError": 1}}


# ---- errors ----


def test_errors_name_no_file_of_the_machine(config: dict[str, Any], tmp_path: Path) -> None:
    Path(config["data"]).rename(tmp_path / "b.npz")
    with pytest.raises(StorageError) as caught:
        ask(config, "train", {})
    assert str(caught.value) == "(data) does not exist, which a names as its data in node.toml"
    paths = {"data": "/srv/my patients/hiv.csv", "vault": "relative/vault"}
    for text in (
        "cannot read /srv/my patients/hiv.csv: is a folder", "relative/vault/books/a.json is gone",
        "no '/home/me/x.txt' and ~/secret, nor C:\\Users\\me", "[Errno 28] no space: /mnt/a-b_c/d.e",
    ):  # fmt: skip
        outside = str(error_outside(StorageError(text), "a", paths))
        assert not re.search(r"srv|patients|hiv|relative|home|secret|Users|mnt", outside), outside
    for text in ("train/val/test", "3 of 4 updates, 12.5 km/h", "use scaling = none or 1/255"):
        assert str(error_outside(StorageError(text), "a", paths)) == text


# ---- a ledger that is set back ----


def test_a_vault_that_is_set_back_is_noticed(config: dict[str, Any], tmp_path: Path) -> None:
    ask(config, "train", {})
    shutil.copytree(config["vault"], tmp_path / "backup")
    ask(config, "train", {}, round=2)
    shutil.rmtree(config["vault"])
    shutil.copytree(tmp_path / "backup", config["vault"])
    with pytest.raises(StorageError, match="has been set back: it has 1 answers with a price, and 2 had left"):
        ask(config, "train", {}, round=2)
    shutil.rmtree(config["vault"])  # a new one forgets as well
    with pytest.raises(StorageError, match="has been set back: it has 0 answers"):
        ask(config, "train", {}, round=2)
    (tmp_path / "elsewhere").mkdir()
    ask(config | {"counter": str(tmp_path / "elsewhere")}, "train", {}, round=2)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["vault.a.count"]


def test_released_answers_are_packets() -> None:
    answer = Released.together("clients", [Released({"name": "a"}), Released({"name": "b"})])
    assert answer.header == {"clients": [{"name": "a"}, {"name": "b"}]}


# ---- counting ----


def test_evaluations_are_counted_and_a_model_travels_once(tmp_path: Path) -> None:
    """FedAvg's model went down twice in every evaluation, and none of it was counted."""
    net, _ = network(tmp_path, {"dp-noise": "", "eval-every": 1})
    answers: list[int] = []

    def look(client: str, question: Any, answer: Packet) -> Packet:
        if question.kind == "evaluate":
            answers.append(answer.nbytes)
        return answer

    net.tamper, net.delay = look, {"b": 3.0}
    folder = serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    orders = [one.packet for one in net.messages if one.kind == "evaluate"]
    assert len(orders) == 6
    assert all(order.header["server_model"] == "w" and "server_model" not in order.groups for order in orders)
    counted = json.loads((folder / "summary.json").read_text())["evaluations"]
    assert counted["bytes_down"] == sum(order.nbytes for order in orders)
    assert counted["bytes_up"] == sum(answers)
    assert counted["seconds"] >= 6.0
    assert any("evaluated in" in line for line in net.log)
    with pytest.raises(MessageError, match="server_model should name"):
        ask(net.nodes_[100], "evaluate", {"dp-noise": ""}, server_model="v")
