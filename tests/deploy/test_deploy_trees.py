"""Boosted trees grown by nodes are those of a simulation, also where no histogram leaves a node but masked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes

from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.trial import deployment_settings
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.runs.experiment import run
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["a", "b", "c"]
OPTIONS = {"method": "trees", "trees": 2, "depth": 3, "bins": 8, "min_rows": 3, "rate": 0.3}
SETTINGS: dict[str, Any] = {
    "model": "mlr", "rounds": 2, "seeds": (0,), "participation": 1.0, "eval_every": 0,
}  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (40, 27, 34))
    x = numbers.normal(size=(len(owner), 3)).astype(np.float32)
    return x, np.sign(x[:, 0]) + np.abs(x[:, 1]) + owner + 0.1 * numbers.normal(size=len(owner)), owner


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure sums"])
def test_nodes_grow_the_trees_of_a_simulation(tmp_path: Path, secure: bool) -> None:
    x, y, owner = examples()
    data = Federation.from_arrays(x, y, np.array(NAMES)[owner])
    # Under secure sums folds are drawn from a node's own secret: other rows are left out than in a simulation.
    chosen = SETTINGS | {"algorithms": {"trees": OPTIONS | {"folds": 0 if secure else 1}}}
    simulated = run(federation=data, **chosen)
    config = make_config(None, chosen | ({"secure_sum": True} if secure else {}))
    settings = deployment_settings(config, data, NAMES) | {"out": str(tmp_path / "run")}
    net = Loopback(settings, write_nodes(tmp_path, x, y, owner, NAMES))
    folder = serve(Deployment.parse(net.run_config), net, net.log.append, **net.time)
    (result,) = json.loads((folder / "summary.json").read_text())["results"]
    wanted = simulated.result()
    assert result["rounds"] == wanted.rounds > SETTINGS["rounds"]  # its own number, and none after the end
    for k, config_of_node in enumerate(net.nodes_.values()):
        model, own = ModelPipeline.read(Vault(config_of_node["vault"]).model_path()), simulated.personal_model(k)
        ours, theirs = model.module.state_dict(), own.module.state_dict()
        assert torch.equal(ours["trees.feature"], theirs["trees.feature"])
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-3 if secure else 1e-5)
    assert result["personal"]["rmse"] == pytest.approx(wanted.personal["rmse"], rel=1e-3 if secure else 1e-5)
