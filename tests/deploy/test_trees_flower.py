"""Boosted trees at real nodes: python -m pytest -m flower"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch

import kinfed
from kinfed.deploy.node.vault import Vault
from kinfed.serving.pipeline import ModelPipeline
from kinfed.serving.predict import model_of_run

pytest.importorskip("flwr", reason="the extra flower is not installed: pip install 'kinfed[flower]'")

from flower_network import network

from kinfed.deploy.operator.certs import make_certificates

pytestmark = [
    pytest.mark.flower,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("KINFED_TEST_TRIAL" not in os.environ, reason="takes two minutes: set KINFED_TEST_TRIAL=1"),
]

NAMES = ["a", "b", "c"]
PATIENCE = float(os.environ.get("KINFED_TEST_DEADLINE", "60"))  # seconds; more on a machine that is busy otherwise
OPTIONS = {"trees": 2, "depth": 2, "bins": 16, "min_rows": 5, "folds": 1}


def write_table(path: Path, names: list[str]) -> Path:
    """Rows of these sites: a number with gaps, a colour, and a class that is likelier at some sites."""
    draw, parts = np.random.default_rng(4), []
    for place, name in enumerate(NAMES):
        n = 40 + 10 * place
        age, colour = draw.normal(size=n).round(3), draw.integers(0, 3, n)
        score = np.sign(age) + (colour == 1) + 0.5 * place + draw.normal(size=n)
        y = np.where(score > 1, "yes", "no")
        known = [None if gap else float(one) for one, gap in zip(age, draw.random(n) < 0.1, strict=True)]
        parts.append(
            pa.table({
                "who": [name] * n, "age": known, "colour": np.array(["red", "green", "blue"])[colour], "y": y,
                "fold": np.where(np.arange(n) % 4 == 0, "test", "train"),
            })
        )  # fmt: skip
    table = pa.concat_tables([part for part, name in zip(parts, NAMES, strict=True) if name in names])
    pa.csv.write_csv(table, path)
    return path


def test_nodes_grow_the_trees_of_a_simulation(tmp_path: Path) -> None:
    """A superlink and three supernodes, each with a table of its own: the same trees, intercepts and candidates, in the
    same rounds, by messages of the same size."""
    nodes = [
        {
            "client": name, "data": str(write_table(tmp_path / f"{name}.csv", [name])), "label": "y", "split": "fold",
            "ignore": "who", "vault": str(tmp_path / f"vault-{name}"),
        }
        for name in NAMES
    ]  # fmt: skip
    out, certs = tmp_path / "run", tmp_path / "certs"
    settings = {
        "method": "trees", "model": "mlr", "rounds": 2, "clients": ",".join(NAMES), "classes": "no,yes",
        "scaling": "standard",
        "options": " ".join(f"{name}={value}" for name, value in OPTIONS.items()), "eval-every": 0,
        "deadline": 5 * PATIENCE, "wait": 10 * PATIENCE, "out": str(out), "keys": str(certs),
    }  # fmt: skip
    make_certificates(certs, ["localhost"], NAMES)
    with network(tmp_path / "net", certs=certs) as net:
        net.start_server()
        net.register(*NAMES)
        for node in nodes:
            net.start_node(node["client"], node)
        net.run(net.app(settings))
        net.wait_done(out, 20 * PATIENCE)
    simulation = kinfed.run(
        dataset=str(write_table(tmp_path / "all.csv", NAMES)), client_column="who", label_column="y",
        split_column="fold", model="mlr", algorithms={"trees": OPTIONS}, participation=1.0, rounds=2,
        workers=1, seeds=[0], eval_every=0, progress=False, out=str(tmp_path / "simulation"),
    ).result()  # fmt: skip
    (result,) = json.loads((out / "summary.json").read_text())["results"]
    assert result["rounds"] == simulation.rounds
    assert result["personal"]["loss"] == pytest.approx(simulation.personal["loss"], rel=1e-5)
    for node in nodes:
        ours = ModelPipeline.read(Vault(node["vault"]).model_path()).module.state_dict()
        theirs = model_of_run(tmp_path / "simulation", node["client"]).module.state_dict()
        assert torch.equal(ours["trees.feature"], theirs["trees.feature"])
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
