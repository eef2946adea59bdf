"""Nodes with tables as they are: what columns become is learnt from one message of each, and equals a simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from loopback import Loopback

from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_data import Enrolment, audit_sentences, load_client_data
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Sent
from kinfed.deploy.transport.wire import Packet
from kinfed.engine.personal.personal_models import module_for
from kinfed.errors import ConfigError, DataError
from kinfed.runs.loop_factory import simulate
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["a", "b", "c"]
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "mlr", "rounds": 2, "clients": 3, "classes": "no,yes", "label-column": "sick",
    "steps": 2, "batch": 5, "eval-every": 0, "deadline": 60.0, "wait": 60.0,
}  # fmt: skip


def table() -> pa.Table:
    """All sites together: gaps, categories, a constant; site b has no column `lab`."""
    numbers, rows = np.random.default_rng(1), 60
    site = np.repeat(NAMES, (25, 15, 20))
    age, lab = numbers.normal(60, 9, rows).round(1), numbers.normal(5, 2, rows).round(2)
    return pa.table({
        "age": age, "ward": numbers.choice(["x", "y", "z"], rows), "unit": ["mmol"] * rows,
        "lab": pa.array(np.where((site == "b") | (np.arange(rows) % 7 == 0), np.nan, lab), from_pandas=True),
        "sick": np.where(age + numbers.normal(0, 4, rows) > 60, "yes", "no"), "site": site,
    })  # fmt: skip


def net(folder: Path, **settings: Any) -> Loopback:
    whole, nodes = table(), {}
    for number, name in enumerate(NAMES):
        own = whole.filter(pa.compute.equal(whole["site"], name)).drop_columns(
            ["site", *(["lab"] if name == "b" else [])]
        )
        pyarrow.csv.write_csv(own, folder / f"{name}.csv")
        nodes[number + 1] = {
            "client": name, "data": str(folder / f"{name}.csv"), "vault": str(folder / f"vault-{name}"),
        }  # fmt: skip
    return Loopback(
        SETTINGS | {"out": str(folder / "run")} | {k.replace("_", "-"): v for k, v in settings.items()}, nodes
    )


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


def test_tables_of_nodes_give_the_models_of_a_simulation(tmp_path: Path) -> None:
    nodes = net(tmp_path)
    folder = run(nodes)
    data = Federation.from_table(table(), label_column="sick", client_column="site")
    assert data.preprocessing is not None
    assert data.preprocessing.features == ["age", "ward=x", "ward=y", "ward=z", "lab", "lab missing"]
    loop = simulate(data, "mlr", Deployment.parse(nodes.run_config).algorithm)
    reports = list(loop.rounds(2))
    wanted = loop.evaluate(keep_models=True).models
    assert wanted is not None
    for row, config in zip(wanted, nodes.nodes_.values(), strict=True):
        pipeline = ModelPipeline.read(Vault(config["vault"]).model_path())
        theirs = pipeline.module.state_dict()
        for name, tensor in module_for(loop.task, row).state_dict().items():  # type: ignore[arg-type]
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-6)
        assert pipeline.inputs.preprocessing is not None
        assert pipeline.inputs.preprocessing.encodings == data.preprocessing.encodings
        assert len(pipeline.predict({"ward": ["x", "new"], "age": [50, 70]})) == 2, "raw rows, without lab"
    first = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    assert first["bytes_up"] > sum(row.numel() * 4 for row in wanted), "statistics are counted"
    assert 0 < reports[0].bytes_up - first["bytes_up"] < 200, "b says nothing of the column that it lacks"
    asked = [one for one in nodes.messages if one.kind == "sums"]
    assert len(asked) == 3
    assert any("columns left out: unit has the same value" in line for line in nodes.log)


@pytest.mark.parametrize("persons", [False, True])
def test_a_column_of_some_sites_has_the_effects_of_a_simulation_and_none_under_privacy(
    tmp_path: Path, persons: bool
) -> None:
    """With persons, whom five rows each are of, their rows are for one purpose and errors are those of persons."""
    draw = np.random.default_rng(4)
    site, x, lab = np.repeat(NAMES, 70), draw.normal(size=210), draw.normal(size=210)
    sick = np.where(x + 2 * lab * (site == "c") + draw.normal(size=210) > 0, "yes", "no")
    cells = pa.array([float(one) if name == "c" else None for one, name in zip(lab, site, strict=True)])
    whole = pa.table({"x": x, "lab": cells, "sick": sick, "site": site, "who": [f"p{k // 5}" for k in range(210)]})
    ties, owner = ({"person_column": "who"}, {"person": "who"}) if persons else ({}, {"ignore": "who"})
    nodes = net(tmp_path, method="ditto", dp_noise="")
    for name in NAMES:
        own = whole.filter(pa.compute.equal(whole["site"], name)).drop_columns(["site"])
        pyarrow.csv.write_csv(own if name == "c" else own.drop_columns(["lab"]), tmp_path / f"{name}.csv")
    nodes.nodes_ = {number: config | owner for number, config in nodes.nodes_.items()}
    run(nodes)
    data = Federation.from_table(
        whole, label_column="sick", client_column="site", ignore="" if persons else "who", **ties
    )
    loop = simulate(data, "mlr", Deployment.parse(nodes.run_config).algorithm)
    list(loop.rounds(2))
    wanted = loop.evaluate(keep_models=True).models
    assert wanted is not None
    for k, (row, config) in enumerate(zip(wanted, nodes.nodes_.values(), strict=True)):
        pipeline = ModelPipeline.read(Vault(config["vault"]).model_path())
        theirs = torch.cat([one.reshape(-1) for one in pipeline.module.state_dict().values()])
        torch.testing.assert_close(theirs, row[: len(theirs)], rtol=0, atol=1e-6)
        assert pipeline.inputs.preprocessing is not None
        assert pipeline.inputs.preprocessing.own == list(data.own_columns[k])
    asked = {name for sent in nodes.messages for name in sent.packet.header.get("preprocessing", {})}
    assert "own_columns" not in asked
    private = Deployment.parse({**nodes.run_config, "dp-noise": 1.0})
    assert private.own_outputs == ()
    own_rows = load_client_data(NodeSettings.parse(nodes.nodes_[3]), private)
    learnt = Enrolment(2, 3, (70, 0, 20), preprocessing=data.preprocessing)
    with pytest.raises(Refused, match="no epsilon covers"):
        own_rows.prepared(learnt, private)


def test_statistics_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    nodes = net(tmp_path, rounds=1)

    def tamper(client: str, question: Sent, answer: Packet) -> Packet:
        if question.kind == "sums" and client == "b":
            columns = answer.header["statistics"]["columns"]
            columns["age"]["values"] |= {"mean": 1e12}
        return answer

    nodes.tamper = tamper
    run(nodes)
    assert any("learning columns is without b: column age: a mean of 1e+12" in line for line in nodes.log)


def test_settings_must_name_columns_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no client has a column 'weight'"):
        run(net(tmp_path, features="age,weight"))


def test_no_categories_leave_under_privacy(tmp_path: Path) -> None:
    nodes = net(tmp_path, dp_noise=1.0)
    config = nodes.nodes_[1] | {"sums": "yes"}
    ask = Sent(1, "sums", Packet({"kind": "sums", "name": "a"}), 60.0)

    def answer(**settings: Any) -> Packet:
        return Node.of(config | settings, nodes.run_config, 1).answer("sums", ask.packet)

    with pytest.raises(Refused, match="does not say which categories its columns ward, unit hold: no epsilon covers"):
        answer()
    with pytest.raises(Refused, match="no exact sums"):
        answer(sums="no")
    assert answer(ignore="ward,unit").header["statistics"]["rows"] == 18


def test_without_common_statistics_a_table_must_hold_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a and b differ in the"):
        run(net(tmp_path, scaling="none"))


# ---- weights ----


def weighted_net(folder: Path, **settings: Any) -> Loopback:
    """Rows of older people count more; every node says by which column."""
    nodes = net(folder, **settings)
    for config in nodes.nodes_.values():
        own = pyarrow.csv.read_csv(config["data"])
        pyarrow.csv.write_csv(own.append_column("trust", pa.compute.divide(own["age"], 20.0)), config["data"])
        config["row_weight"] = "trust"
    return nodes


@pytest.mark.parametrize("rule", ["no=1,yes=4", "by_client"])
def test_rows_and_classes_count_as_in_a_simulation(tmp_path: Path, rule: str) -> None:
    nodes = weighted_net(tmp_path, class_weights=rule)
    run(nodes)
    data = Federation.from_table(table(), label_column="sick", client_column="site")
    weights = torch.tensor(table()["age"].to_numpy() / 20.0)
    for k in range(3):  # mean one at every client
        mine = torch.cat([rows.lists()[k] for rows in (data.train, data.test)])
        weights[mine] /= weights[data.train.lists()[k]].mean()
    data = replace(data, weights=weights.float()).with_class_weights(rule)
    plain = Federation.from_table(table(), label_column="sick", client_column="site")
    algorithm = Deployment.parse(nodes.run_config).algorithm
    models = []
    for one in (data, plain):
        loop = simulate(one, "mlr", algorithm)
        list(loop.rounds(2))
        models.append(loop.evaluate(keep_models=True).models)
    assert models[0] is not None
    assert not torch.allclose(*models), "weights matter"
    for row, config in zip(models[0], nodes.nodes_.values(), strict=True):
        pipeline = ModelPipeline.read(Vault(config["vault"]).model_path())
        assert "trust" not in (pipeline.inputs.columns or [])
        for name, tensor in module_for(loop.task, row).state_dict().items():  # type: ignore[arg-type]
            torch.testing.assert_close(pipeline.module.state_dict()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"class-weights": "balanced"}, "which nodes do not reveal"),
        ({"class-weights": "by_client", "dp-noise": 1.0, "scaling": "none"}, "depend on the client's other examples"),
        ({"class-weights": "ill=2"}, "unknown class in class_weights 'ill'"),
        ({"class-weights": "by_client", "target": "29,10"}, "without classes"),
        ({"class-weights": "by_client", "method": "mocha"}, "know no class_weights"),
    ],
)
def test_class_weights_that_nodes_cannot_have(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Deployment.parse(SETTINGS | settings)


def test_weights_of_rows_that_cannot_be_meant(tmp_path: Path) -> None:
    for settings, reason in (({"method": "mocha"}, "mocha's local steps do not use"),
                             ({"dp-noise": 1.0, "scaling": "none"}, "weight of a row would depend")):  # fmt: skip
        nodes = weighted_net(tmp_path)
        with pytest.raises(ConfigError, match=reason):
            load_client_data(NodeSettings.parse(nodes.nodes_[1]), Deployment.parse(nodes.run_config | settings))
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.array(["no", "yes", "no"]), weight=np.ones(2))
    with pytest.raises(DataError, match="3 examples but 2 weights"):
        load_client_data(
            NodeSettings.parse({"client": "a", "data": str(tmp_path / "a.npz")}), Deployment.parse(SETTINGS)
        )


# ---- what a node tells its owner of the data ----


def write_table(path: Path, **columns: Any) -> dict[str, str]:
    numbers = np.random.default_rng(0)
    table = {"age": numbers.normal(size=200), "sick": ["yn"[k % 2] for k in range(200)]} | columns
    pq.write_table(pa.table(table), path)
    return {"client": "a", "data": str(path), "label": "sick"}


def test_a_node_says_what_its_data_look_like_before_any_run(tmp_path: Path) -> None:
    config = write_table(tmp_path / "a.parquet", again=["YN"[k % 2] for k in range(200)])
    (sentence,) = audit_sentences(NodeSettings.parse(config))
    assert sentence.startswith("audit, label_copy: column again says the label itself")
    assert sentence.endswith("A run on one machine would refuse these data.")
    assert audit_sentences(NodeSettings.parse(config | {"ignore": "again"})) == [
        "200 rows; the audit looked for 16 troubles: none"
    ]
    assert "not audited: label_column" in audit_sentences(NodeSettings.parse(config | {"label": "ill"}))[0]
    np.savez(
        tmp_path / "a.npz",
        x=np.repeat(np.random.default_rng(1).normal(size=(40, 3)), 2, 0),
        y=np.arange(80) // 2 % 2,
        test=np.arange(80) % 2 == 1,
    )
    (sentence,) = audit_sentences(NodeSettings.parse({"client": "a", "data": str(tmp_path / "a.npz")}))
    assert "40 of 40 test rows are equal to a training row" in sentence
