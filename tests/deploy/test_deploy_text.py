"""Texts and a pretrained encoder in a deployment: nodes cut their own texts and have the frozen weights themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from opinions import OPINIONS, write_opinions
from tiny_bert import write_bert

import kinfed
from kinfed.deploy.node.node import Node
from kinfed.deploy.node.node_settings import NodeSettings, Refused
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.server.deployment_server import TooFewClients, serve
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers.adoption import adopt
from kinfed.newcomers.finished import newcomer_from_table
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import model_of_run, predict

NAMES = ["a", "b", "c"]


def make(folder: Path, **settings: Any) -> Loopback:
    """A server and three nodes, each with the model's files in a folder of its own."""
    write_bert(folder / "server")
    nodes = {}
    for number, name in enumerate(NAMES):
        shutil.copytree(folder / "server", folder / f"bert-{name}")
        nodes[100 + number] = {
            "client": name, "data": str(write_opinions(folder / f"{name}.csv", [name])), "label": "opinion",
            "split": "fold", "text": "body", "tokenizer": str(folder / f"bert-{name}"), "length": "8",
            "weights": str(folder / f"bert-{name}"), "vault": str(folder / f"vault-{name}"),
        }  # fmt: skip
    run_config = {
        "method": "fedavg", "model": "minilm", "rounds": 2, "clients": 3, "classes": "bad,good", "steps": 2, "batch": 4,
        "options": f"model.weights={folder / 'server'} model.lora_rank=2", "eval-every": 0, "lr": 0.1,
        "deadline": 60.0, "wait": 60.0, "out": str(folder / "run"), **settings,
    }  # fmt: skip
    return Loopback(run_config, nodes)


def run(net: Loopback) -> Path:
    return serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same clients in one process."""
    folder = tmp_path_factory.mktemp("texts")
    bert = str(write_bert(folder / "bert"))
    table = write_opinions(folder / "all.csv", NAMES)
    kinfed.run(
        dataset={"name": str(table), "text_column": "body", "tokenizer": bert, "length": 8},
        client_column="who", label_column="opinion", split_column="fold",
        model={"name": "minilm", "weights": bert, "lora_rank": 2}, algorithms="fedavg", participation=1.0, rounds=2,
        workers=1, steps=2, batch=4, lr=0.1, seeds=[0], eval_every=0, out=str(folder / "run"),
    )  # fmt: skip
    return folder


def test_texts_train_on_nodes_as_in_a_simulation(tmp_path: Path, simulated: Path) -> None:
    net = make(tmp_path)
    run(net)
    ours = ModelPipeline.read(Vault(net.nodes_[101]["vault"]).model_path())
    theirs = model_of_run(simulated / "run", "b").module
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.module.state_dict()[name], tensor, rtol=0, atol=1e-6)
    sent = [one.packet for one in net.messages if one.kind == "train"]
    assert sum(t.numel() for t in sent[0].groups["down"].values()) < 300  # adapters and head; the rest stays

    # The model file alone says how to read new texts, by this node's own tokenizer.
    predictions = predict(ours, write_opinions(tmp_path / "new.csv", ["b"]))
    assert ours.inputs.text is not None
    assert ours.inputs.text.tokenizer == str(tmp_path / "bert-b")
    x = ours.inputs.text.encode([f"{text} b" for texts in OPINIONS.values() for text in texts])
    torch.testing.assert_close(predictions.probabilities, torch.softmax(ours.module(x), 1).detach())


def test_a_node_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    net = make(tmp_path, rounds=1)
    write_bert(tmp_path / "bert-c", seed=1)
    run(net)
    assert any("c" in line and "other frozen weights" in line for line in net.log)
    write_bert(tmp_path / "server", seed=2)
    with pytest.raises(ConfigError, match="other frozen weights than the run"):
        run(Loopback({**net.run_config, "rounds": 2}, net.nodes_))


def test_nodes_must_cut_texts_alike(tmp_path: Path) -> None:
    net = make(tmp_path)
    words = (tmp_path / "bert-c" / "vocab.txt").read_text().replace("film\nbook", "book\nfilm")
    (tmp_path / "bert-c" / "vocab.txt").write_text(words)
    with pytest.raises(DataError, match=r"a and c differ in the feature columns: .*tokenizer"):
        run(net)
    (tmp_path / "other").mkdir()
    net = make(tmp_path / "other")
    net.nodes_[101]["length"] = "7"
    with pytest.raises(DataError, match="a and b differ in the shape of an example"):
        run(net)


def test_a_node_needs_its_files(tmp_path: Path) -> None:
    table = {"client": "a", "data": "a.csv", "text": "body"}
    with pytest.raises(ConfigError, match=r"text='body' in node\.toml needs a tokenizer"):
        NodeSettings.parse(table)
    with pytest.raises(ConfigError, match=r"node\.toml: length must be at least 3; got '2'"):
        NodeSettings.parse(table | {"tokenizer": "t", "length": "2"})
    net = make(tmp_path, model="mlr", options="")
    with pytest.raises(TooFewClients):
        run(net)
    assert any("names none for model mlr" in line for line in net.log)


def test_a_path_that_the_run_brings_is_not_opened_at_a_node(tmp_path: Path) -> None:
    """Whether it is there or not, the answer is the same."""
    net, answers = make(tmp_path), set()
    config = {key: value for key, value in net.nodes_[100].items() if key != "weights"}
    for path in (tmp_path / "server", tmp_path / "gone"):
        with pytest.raises(Refused, match="a node reads none but its owner's") as refusal:
            Node.of(config, net.run_config | {"options": f"model.weights={path} model.lora_rank=2"})
        answers.add(str(refusal.value))
    assert len(answers) == 1


def test_a_newcomer_with_texts_is_adopted(simulated: Path, tmp_path: Path) -> None:
    table = write_opinions(tmp_path / "new.csv", ["d"])
    newcomer = newcomer_from_table(simulated / "run", table, "opinion", split_column="fold")
    assert newcomer.features.is_tokens
    adoption = adopt(simulated / "run", newcomer, "fedavg", rounds=1)
    assert (adoption.n_train, adoption.n_test) == (6, 2)
    assert adoption.adopted is not None
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(table.read_text().replace("body,", "letter,", 1))
    elsewhere = str(shutil.copytree(simulated / "bert", tmp_path / "elsewhere"))
    again = newcomer_from_table(
        simulated / "run", renamed, "opinion", split_column="fold", text_column="letter", tokenizer=elsewhere
    )
    assert torch.equal(again.features.raw, newcomer.features.raw)
