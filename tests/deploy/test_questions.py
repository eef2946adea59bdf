"""What sites are asked beside training: descriptions without small counts, and models judged at every site."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopback import Loopback

import kinfed
from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.column_statistics import TableStatistics
from kinfed.deploy.node.gate import Withheld
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_data import load_client_data
from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.node.question_client import QuestionClient
from kinfed.deploy.node.site_description import MISSING, large_cells
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.server.enrol import TooFewClients
from kinfed.deploy.server.question_pages import doubts
from kinfed.deploy.server.question_server import read_description
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.wire import MessageError, Packet, bundled, unbundled
from kinfed.errors import ConfigError
from kinfed.serving.model_inputs import ModelInputs
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["east", "north", "west"]
SURVIVAL = {"kind": "survival", "periods": [50.0, 60.0, 90.0], "hazards": [0.1, 0.1, 0.1]}


def table(site: str) -> pa.Table:
    """Rows in which `chol` of the north is in other units, and a ward has three patients."""
    draw = np.random.default_rng(len(site))
    n = {"east": 60, "north": 50, "west": 70}[site]
    chol = draw.normal(5.2, 1.0, n) * (38.67 if site == "north" else 1)
    ward = np.where(np.arange(n) < 3, "rare", np.where(np.arange(n) % 2, "a", "b"))
    age = draw.normal(60, 9, n).round()
    sick = np.where(age + 4 * draw.normal(size=n) > 60, "yes", "no")
    gaps = pa.array([None if k % 5 == 0 else float(one) for k, one in enumerate(chol)])
    rows = {"age": age, "chol": gaps, "ward": ward.tolist(), "sick": sick.tolist()}
    return pa.table(rows if site != "west" else {**rows, "extra": draw.normal(size=n)})


def make(folder: Path, rules: dict[str, Any] | None = None, **settings: Any) -> Loopback:
    nodes = {}
    for place, name in enumerate(NAMES):
        pa_csv.write_csv(table(name), folder / f"{name}.csv")
        nodes[100 + place] = {
            "client": name, "data": str(folder / f"{name}.csv"), "vault": str(folder / f"vault-{name}"),
            **(rules if rules and name == "west" else {}),
        }  # fmt: skip
    common = {"method": "describe", "clients": ",".join(NAMES), "deadline": 60.0, "wait": 60.0}
    return Loopback({**common, "out": str(folder / "run"), **settings}, nodes)


def run(net: Loopback, name: str) -> Any:
    folder = serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    assert (folder / f"{name}.html").exists()
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def ledger(folder: Path) -> Any:
    return Vault(folder / "vault-west").privacy_log("west").read()


def released(folder: Path) -> dict[str, int]:
    return {rule: count for of_run in ledger(folder).released.values() for rule, count in of_run.items()}


# ---- describe ----


def test_a_description_has_what_a_table_has_and_no_small_count(tmp_path: Path) -> None:
    sites = run(make(tmp_path), "describe")["sites"]
    assert {name: one["rows"] for name, one in sites.items()} == {"east": 60, "north": 50, "west": 70}
    east, age = sites["east"]["columns"], table("east")["age"].to_numpy()
    assert east["age"] == {
        "kind": "number", "missing": 0, "mean": float(f"{age.mean():.4g}"), "deviation": float(f"{age.std():.4g}")
    }  # fmt: skip
    assert east["chol"]["missing"] == 12
    assert east["ward"]["missing"] is None  # else three patients would be what is left
    assert "rare" not in json.dumps(sites)
    ((_, large),) = east["ward"]["categories"].items()
    assert large in (28, 29)
    assert east["ward"]["others"] == [3, 60 - large]  # rare, the smaller ward, and no gaps
    assert "extra" not in east
    assert released(tmp_path)["describe: a description, counts from 5 on"] == 1


def test_whom_rows_are_of_is_in_no_description(tmp_path: Path) -> None:
    """A column of numbers of patients, of whom three have twenty rows each."""
    net = make(tmp_path, {"person": "who"})
    who = pa.array([f"p{k % 3}" for k in range(70)])
    pa_csv.write_csv(table("west").append_column("who", who), tmp_path / "west.csv")
    assert run(net, "describe")["sites"]["west"]["columns"].keys() == {"age", "chol", "ward", "sick", "extra"}


def test_rare_codes_are_not_told_by_a_mean(tmp_path: Path) -> None:
    """Two of 60 patients have a 1: 60 times the mean would say so."""
    net = make(tmp_path)
    codes = pa.array([1 if k < 2 else 0 for k in range(60)])
    pa_csv.write_csv(table("east").append_column("rare", codes), tmp_path / "east.csv")
    assert run(net, "describe")["sites"]["east"]["columns"]["rare"] == {
        "kind": "category", "missing": None, "categories": {}, "others": [3, 60]
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["number", "text", "date"])
def test_a_mean_and_a_deviation_do_not_tell_the_one_value_that_leads_them(tmp_path: Path, kind: str) -> None:
    """An income of a million among hundreds: mean + deviation √(n − 1) was that income, to four digits."""
    net = make(tmp_path)
    income = np.arange(60, dtype=np.float64) ** 1.5
    income[7] = 1_000_000
    assert income.mean() + income.std() * np.sqrt(59) == pytest.approx(1_000_000, rel=1e-3)
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(days=int(day)) for day in income]
    values = {"number": income, "text": [f"{one:.0f}" for one in income], "date": days}[kind]
    pa_csv.write_csv(table("east").append_column("income", pa.array(values)), tmp_path / "east.csv")
    column = run(net, "describe")["sites"]["east"]["columns"]["income"]
    assert column == {"kind": "date" if kind == "date" else "number", "missing": 0}


def test_a_value_that_leads_in_several_rows_leads_too() -> None:
    small = np.arange(60, dtype=np.float64) ** 1.5
    twice, huge, none = (small.copy() for _ in range(3))
    twice[[7, 30]], huge[7], none[:] = 1_000_000, 3e38, np.nan
    columns = {"small": small, "twice": twice, "huge": huge, "none": none}
    assert TableStatistics.led_by_one(pa.table(columns), columns, {}, "east") == {"twice", "huge"}


@pytest.mark.parametrize("kind", ["number", "date"])
def test_a_run_has_no_say_in_what_is_told_of_a_column(tmp_path: Path, kind: str) -> None:
    """Declared as numbers, rare codes were told by their mean after all, and rare days by their deviation."""
    net = make(tmp_path, columns=f"rare={kind}")
    days = [datetime.date(2024, 1, 1), datetime.date(2025, 1, 1)]
    rare = [(days[k < 2] if kind == "date" else int(k < 2)) for k in range(60)]
    pa_csv.write_csv(table("east").append_column("rare", pa.array(rare)), tmp_path / "east.csv")
    column = run(net, "describe")["sites"]["east"]["columns"]["rare"]
    assert column == {"kind": "category", "missing": None, "categories": {}, "others": [3, 60]}


def test_no_second_description_tells_small_counts_of_the_first(tmp_path: Path) -> None:
    """A column of 13 codes: counts of twelve, and the mean of all, would tell how many have the last."""
    codes = pa.array([k % 12 for k in range(58)] + [99, 99])
    columns = []
    for declared in ("", "ward2=category", "ward2=number", "ward2=text"):
        net = make(tmp_path, out=str(tmp_path / f"run{len(columns)}"), **({"columns": declared} if declared else {}))
        pa_csv.write_csv(table("east").append_column("ward2", codes), tmp_path / "east.csv")
        columns.append(run(net, "describe")["sites"]["east"]["columns"]["ward2"])
    assert columns[0]["kind"] == "number"
    assert all(one == columns[0] for one in columns)


def test_other_units_and_absent_columns_are_named(tmp_path: Path) -> None:
    sentences = doubts(run(make(tmp_path), "describe")["sites"])
    assert any("chol at north" in one and "cholesterol" in one for one in sentences)
    assert any(one.startswith("extra: not at east, north") for one in sentences)
    assert not any("age" in one for one in sentences)
    assert "cholesterol in mmol/l and mg/dl" in (tmp_path / "run" / "describe.html").read_text("utf-8")


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1), st.integers(0, 30), st.integers(1, 9)
)
def test_no_count_below_the_smallest_follows_from_what_leaves(
    cells: dict[str, int], missing: int, smallest: int
) -> None:
    whole = {**cells, MISSING: missing}
    shown, (number, rows) = large_cells(whole, smallest)
    assert all(count == 0 or count >= smallest for count in shown.values())
    assert (number, rows) == (len(whole) - len(shown), sum(whole.values()) - sum(shown.values()))
    if any(0 < count < smallest for count in whole.values()):
        assert rows >= smallest or sum(whole.values()) < smallest
        assert number > 1
        assert MISSING not in shown or shown[MISSING] >= smallest


def test_an_owner_may_refuse_a_description_and_the_others_are_shown(tmp_path: Path) -> None:
    net = make(tmp_path, {"describe": "no"})
    assert run(net, "describe")["sites"].keys() == {"east", "north"}
    assert any("without west" in line and "(describe)" in line for line in net.log)


@pytest.mark.parametrize(
    "rules",
    [{"smallest_count": 100}, {"user_epsilon": 2.0, "peers": "peers"},
     {"require_secure_aggregation": "yes", "peers": "peers"}],
)  # fmt: skip
def test_few_rows_and_clients_of_whom_sums_of_many_leave_are_not_described(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    assert "west" not in run(make(tmp_path, rules), "describe")["sites"]


def test_an_owner_may_allow_a_description_beside_secure_sums(tmp_path: Path) -> None:
    rules = {"require_secure_aggregation": "yes", "peers": "peers", "sums": "yes"}
    assert run(make(tmp_path, rules), "describe")["sites"]["west"]["terms"] == "exact"


@pytest.mark.parametrize(
    "target", [{"label-column": "ward", "classes": "a,b,rare"},
               {"time-column": "age", "event-column": "ward", "target": json.dumps(SURVIVAL)}]
)  # fmt: skip
def test_no_run_learns_a_column_that_the_owner_leaves_out(tmp_path: Path, target: dict[str, Any]) -> None:
    net = make(tmp_path, **({"method": "fedavg", "scaling": "none", "features": "chol"} | target))
    order = Packet({"nonce": "n"})
    with pytest.raises(ConfigError, match=r"column ward of \(data\) is to be left out"):
        Node.of(net.nodes_[100] | {"ignore": "ward"}, net.run_config).answer("hello", order)


def test_a_run_with_an_endless_name_is_refused(tmp_path: Path) -> None:
    """Its name is in the ledger for good, which every later answer reads and writes."""
    node = Node.of(make(tmp_path).nodes_[102], make(tmp_path).run_config)
    order = {"kind": "describe", "name": "west", "run": "r" * 10_000, "round": 0, "number": 0}
    with pytest.raises(MessageError, match="100 characters"):
        node.answer("describe", Packet(order))
    (part,) = unbundled(node.answer("together", bundled([Packet(order)], kind="together", name="west")))
    assert "100 characters" in part.header["error"]
    assert not released(tmp_path)


def test_under_privacy_noised_gaps_leave_at_a_price_and_once(tmp_path: Path) -> None:
    rules = {"epsilon": 2.0, "evaluation_noise": 5.0}
    net = make(tmp_path, rules)
    west = run(net, "describe")["sites"]["west"]
    assert west["terms"] == "noise 5"
    assert west["columns"].keys() == set(table("west").column_names)
    assert all(one.keys() == {"kind", "missing"} for one in west["columns"].values())
    (entry,) = ledger(tmp_path).answers
    assert (entry.kind, entry.noise, len(entry.events)) == ("counts", 5.0, 1)
    assert run(net, "describe")["sites"]["west"] == west  # the same run asks again: the kept answer
    assert len(ledger(tmp_path).answers) == 1
    for number in range(20):  # other runs pay anew, until nothing is left
        other = make(tmp_path, rules, out=str(tmp_path / f"run{number}"))
        if "west" not in run(other, "describe")["sites"]:
            break
    assert any("epsilon 2" in line for line in other.log)
    assert 1 < number < 19


@pytest.mark.parametrize(
    "record",
    [{}, {"rows": 5, "columns": {"a": {"kind": "x"}}}, {"rows": 5, "columns": {"a": {"kind": "number", "missing": 6}}},
     {"rows": 5, "columns": {"a": {"kind": "number", "mean": float("nan")}}},
     {"rows": 5, "columns": {"a": {"kind": "category", "categories": {"v": -1}, "others": [0, 0]}}}],
)  # fmt: skip
def test_descriptions_that_are_none_are_refused(record: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        read_description(Packet({"description": record, "terms": "exact"}))


# ---- evaluate ----


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    rows = [table(name).select(["age", "chol", "ward", "sick"]) for name in NAMES]
    owner = [name for name, part in zip(NAMES, rows, strict=True) for _ in range(len(part))]
    result = kinfed.fit(
        pa.concat_tables(rows).append_column("site", pa.array(owner)), client_column="site", label_column="sick",
        models="mlr", algorithms="fedavg", trials=1, folds=2, rounds=2, steps=5, references=False, accept="all",
    )  # fmt: skip
    for name in NAMES:
        result.model(name).save(folder / f"{name}.safetensors")
    return folder


EVALUATE = {"method": "evaluate", "classes": "no,yes", "label-column": "sick"}


def test_every_model_is_judged_at_every_site(tmp_path: Path, models: Path) -> None:
    net = make(tmp_path, judged=str(models), **EVALUATE)
    record = run(net, "evaluate")
    assert record["models"] == NAMES
    for name, config in zip(NAMES, net.nodes_.values(), strict=True):
        client = Node.of(config, net.run_config).clients[name]
        test = load_client_data(client.settings, client.deployment).federation.test.rows.numpy()
        own, rows = record["sites"][name], table(name).take(test)
        assert own["rows"] == len(rows)
        for model in NAMES:
            predicted = ModelPipeline.read(models / f"{model}.safetensors").predict(rows)
            right = np.mean([a == b for a, b in zip(predicted, rows["sick"].to_pylist(), strict=True)])
            assert own["scores"][model]["accuracy"] == pytest.approx(float(right))
    assert released(tmp_path)["score: scores of 3 models on test rows"] == 1


def test_judged_figures_get_noise_and_a_price_under_an_owners_epsilon(tmp_path: Path, models: Path) -> None:
    net = make(tmp_path, {"epsilon": 3.0, "test_fraction": 0.3}, judged=str(models), **EVALUATE)
    sites = run(net, "evaluate")["sites"]
    assert sites["west"]["terms"] == "noise 5"
    assert all(one.keys() == {"accuracy", "log_loss"} for one in sites["west"]["scores"].values())
    (entry,) = ledger(tmp_path).answers
    assert (entry.kind, [(event.q, event.gradients, event.batches) for event in entry.events]) == (
        "scores", [(1.0, 1, 3)]
    )  # fmt: skip
    assert sites["east"]["terms"] == "exact"


@pytest.mark.parametrize(
    ("rules", "text"),
    [({"evaluate": "val"}, "on val examples only"), ({"smallest_count": 50}, "smallest_count"),
     ({"epsilon": 1.0, "evaluation_noise": 0}, "evaluation_noise = 0"),
     ({"user_epsilon": 2.0, "peers": "peers"}, "user_epsilon")],
)  # fmt: skip
def test_owners_who_keep_their_figures_are_named(
    tmp_path: Path, models: Path, rules: dict[str, Any], text: str
) -> None:
    net = make(tmp_path, rules, judged=str(models), **EVALUATE)
    assert "west" not in run(net, "evaluate")["sites"]
    assert any("without west" in line and text in line for line in net.log)


def test_models_of_other_classes_and_of_foreign_code_are_refused(tmp_path: Path, models: Path) -> None:
    net = make(tmp_path, judged=str(models), **EVALUATE | {"classes": "ill,well"})
    with pytest.raises(TooFewClients):
        run(net, "evaluate")
    inputs = ModelPipeline.read(models / "east.safetensors").inputs.to_json()
    order = {
        "kind": "score", "name": "east", "run": "r", "round": 0, "number": 0, "split": "test",
        "models": {"m": {"model": "os.system", "inputs": inputs}},
    }  # fmt: skip
    node = Node.of(net.nodes_[100], net.run_config | {"classes": "no,yes"})
    with pytest.raises(MessageError, match="none of kinfed's models"):
        node.answer("score", Packet(order, {"m": {"w": torch.ones(1)}}))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_model_that_is_sent_opens_no_file_that_the_server_names(tmp_path: Path, there: bool, mixed: bool) -> None:
    """What the attempt said told whether the node's machine has a folder. Parts of a mixture have options, too."""
    net = make(tmp_path, judged="models", **EVALUATE)
    options = {"weights": str(tmp_path if there else tmp_path / "none")}
    inputs = ModelInputs((8,), Problem.of_classes(2, ["no", "yes"]), tokens=True)
    about = {"model": "minilm", "inputs": replace(inputs, options=options).to_json()}
    if mixed:
        parts = json.dumps([{"model": "minilm", "options": options}])
        about = {"model": "mixture", "inputs": inputs.to_json(), "parts": parts}
    order = {"kind": "score", "name": "east", "run": "r", "round": 0, "number": 0, "split": "test"}
    with pytest.raises(Refused, match="a node reads none but its owner's"):
        Node.of(net.nodes_[100], net.run_config).answer("score", Packet(order | {"models": {"m": about}}))
    owned = net.nodes_[100] | {"weights": str(tmp_path / "owned")}
    with pytest.raises(MessageError, match="there is no folder"):
        Node.of(owned, net.run_config).answer("score", Packet(order | {"models": {"m": about}}))


def test_nothing_is_trained_and_nothing_avoids_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to train are refused, and an answer that was made without the gate is not sent."""
    net = make(tmp_path)
    node = Node.of(net.nodes_[100], net.run_config)
    with pytest.raises(MessageError, match="nothing is trained"):
        node.answer("train", Packet({"kind": "train", "name": "east"}))
    monkeypatch.setattr(QuestionClient, "describe", lambda self, order: Packet({"description": "all rows"}))
    with pytest.raises(Withheld):
        node.answer("describe", Packet({"kind": "describe", "name": "east"}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"dp-noise": 1.0}, "dp_noise"), ({"judged": "x"}, "judged"), ({"method": "evaluate"}, "needs models")],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Deployment.parse({"method": "describe", "clients": "a,b", **settings})
