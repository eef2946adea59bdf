"""Texts at real nodes: python -m pytest -m flower"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.deploy.node.vault import Vault
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import model_of_run

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from flower_network import network
from opinions import write_opinions
from tiny_bert import write_bert

from kinfed.deploy.operator.certs import make_certificates

pytestmark = [
    pytest.mark.flower,
    pytest.mark.timeout(600),
    pytest.mark.skipif("KINFED_TEST_TRIAL" not in os.environ, reason="takes two minutes: set KINFED_TEST_TRIAL=1"),
]

NAMES = ["a", "b"]
PATIENCE = float(os.environ.get("KINFED_TEST_DEADLINE", "60"))  # seconds; more on a machine that is busy otherwise


def test_nodes_cut_their_own_texts_and_have_the_weights_themselves(tmp_path: Path) -> None:
    """A superlink and two supernodes, each with a table of texts, a tokenizer and an encoder's weights of its own:
    adapters are trained to what a simulation gives."""
    bert = write_bert(tmp_path / "bert")
    nodes = [
        {
            "client": name, "data": str(write_opinions(tmp_path / f"{name}.csv", [name])), "label": "opinion",
            "split": "fold", "text": "body", "length": "8", "tokenizer": str(folder), "weights": str(folder),
            "vault": str(tmp_path / f"vault-{name}"),
        }
        for name, folder in ((name, shutil.copytree(bert, tmp_path / f"bert-{name}")) for name in NAMES)
    ]  # fmt: skip
    out, certs = tmp_path / "run", tmp_path / "certs"
    settings = {
        "method": "fedavg", "model": "minilm", "rounds": 2, "clients": "a,b", "classes": "bad,good", "steps": 2,
        "batch": 4, "options": f"model.weights={bert} model.lora_rank=2", "eval-every": 0, "lr": 0.1,
        "deadline": 5 * PATIENCE, "wait": 10 * PATIENCE, "out": str(out), "keys": str(certs),
    }  # fmt: skip
    make_certificates(certs, ["localhost"], NAMES)
    with network(tmp_path / "net", certs=certs) as net:
        net.start_server()
        net.register(*NAMES)
        for node in nodes:
            net.start_node(node["client"], node)
        net.run(net.app(settings))
        net.wait_done(out)
    kinfed.run(
        dataset={
            "name": str(write_opinions(tmp_path / "all.csv", NAMES)), "text_column": "body", "tokenizer": str(bert),
            "length": 8,
        },
        client_column="who", label_column="opinion", split_column="fold",
        model={"name": "minilm", "weights": str(bert), "lora_rank": 2}, algorithms="fedavg", participation=1.0,
        rounds=2, workers=1, steps=2, batch=4, lr=0.1, seeds=[0], eval_every=0, out=str(tmp_path / "simulation"),
    )  # fmt: skip
    for node in nodes:
        ours = ModelPipeline.read(Vault(node["vault"]).model_path()).module.state_dict()
        for name, tensor in model_of_run(tmp_path / "simulation", node["client"]).module.state_dict().items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)
