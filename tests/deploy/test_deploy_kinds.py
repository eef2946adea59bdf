"""Every kind of problem on nodes: the models and metrics of a simulation, in files that predict."""

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
OWNER = np.repeat(np.arange(3), (40, 25, 34))


def targets(kind: str, x: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(5)
    eta = x[:, 0] - 0.5 * x[:, 1] + 0.2 * OWNER
    if kind == "survival":
        time = draw.exponential(np.exp(-eta))
        return np.stack([np.minimum(time, 1.5), time < 1.5], 1)
    if kind == "counts":
        return draw.poisson(np.exp(0.4 * eta))
    if kind == "ordinal":
        return np.digitize(eta + draw.logistic(size=len(eta)), [-1, 1])
    several = eta[:, None] * [1.0, -1.0, 0.3] + draw.normal(size=(len(eta), 3))
    return (several > 0).astype(np.int64) if kind == "multilabel" else several


@pytest.mark.parametrize(
    ("kind", "method", "metric"),
    [
        ("survival", "cox", "concordance"), ("survival", "ditto", "integrated_brier"), ("counts", "glmm", "deviance"),
        ("counts", "ditto", "d2"), ("ordinal", "ditto", "rank_error"), ("multilabel", "ditto", "label_accuracy"),
        ("regression", "ditto", "rmse"),
    ],
)  # fmt: skip
def test_nodes_learn_what_a_simulation_learns(kind: str, method: str, metric: str, tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=(len(OWNER), 4)).astype(np.float32)
    y = targets(kind, x)
    data = Federation.from_arrays(x, y, np.array(NAMES)[OWNER], task=kind, standardize=False)
    training: dict[str, Any] = {
        "model": "mlr",
        "rounds": 7 if method in ("cox", "glmm") else 2,
        "steps": 4,
        "eval_every": 0,
    }
    config = make_config(
        None, {"algorithms": method, "seeds": (0,), "participation": 1.0, "metric": metric, **training}
    )
    settings = deployment_settings(config, data, NAMES)
    assert Deployment.parse(settings).problem == data.problem
    settings |= {"clients": 3, "out": str(tmp_path / "run"), "deadline": 60.0, "wait": 60.0}
    net = Loopback(settings, write_nodes(tmp_path, x, y, OWNER, NAMES))
    folder = serve(Deployment.parse(settings), net, net.log.append, **net.time)
    simulated = run(config, federation=data)
    for k, node in enumerate(net.nodes_.values()):
        model, own = ModelPipeline.read(Vault(node["vault"]).model_path()), simulated.personal_model(k)
        torch.testing.assert_close(
            model.predictions(x[:9]).outputs, own.predictions(x[:9]).outputs, rtol=1e-5, atol=1e-6
        )
    (result,) = json.loads((folder / "summary.json").read_text())["results"]
    assert result["metric"] == metric
    assert result["personal"][metric] == pytest.approx(simulated.result().personal[metric], rel=1e-5)
