"""A number is predicted on nodes as in a simulation: models, metrics in the target's own unit, vault and adoption."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback, write_nodes
from rich.console import Console
from torch import Tensor

from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operator.trial import deployment_settings
from kinfed.deploy.server.deployment_server import serve
from kinfed.deploy.settings import Deployment
from kinfed.errors import ConfigError
from kinfed.newcomers.adoption import adopt
from kinfed.newcomers.finished import newcomer_from_table
from kinfed.runs.experiment import run
from kinfed.serving.pipeline import ModelPipeline

NAMES = ["a", "b", "c"]
TRAINING: dict[str, Any] = {
    "model": "mlr", "rounds": 3, "steps": 4, "batch": 5, "eval_every": 0, "loss": "huber", "huber_delta": 0.7,
    "metric": "neg_median_absolute_error",
}  # fmt: skip


def examples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(3), (30, 17, 24))
    x = numbers.normal(size=(len(owner), 4)).astype(np.float32)
    return x, 40 + 10 * x[:, 0] + owner + numbers.normal(size=len(owner)), owner


def federation() -> Federation:
    x, y, owner = examples()
    return Federation.from_arrays(x, y, np.array(NAMES)[owner])


def state(model: ModelPipeline) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in model.module.state_dict().values()])


def test_nodes_give_the_models_and_metrics_of_a_simulation(tmp_path: Path) -> None:
    problem = federation().problem
    settings = {name.replace("_", "-"): value for name, value in TRAINING.items()} | {
        "method": "ditto", "clients": 3, "target": f"{problem.mean!r},{problem.scale!r}", "scaling": "none",
        "out": str(tmp_path / "run"), "deadline": 60.0, "wait": 60.0,
    }  # fmt: skip
    net = Loopback(settings, write_nodes(tmp_path, *examples(), NAMES))
    folder = serve(Deployment.parse(settings), net, net.log.append, **net.time)
    simulated = run(federation=federation(), algorithms="ditto", seeds=(0,), participation=1.0, **TRAINING)
    for k, config in enumerate(net.nodes_.values()):
        model = ModelPipeline.read(Vault(config["vault"]).model_path())
        own = simulated.personal_model(k)
        torch.testing.assert_close(state(model), state(own), rtol=0, atol=1e-6)
        rows = examples()[0][:5]
        assert model.predict(rows) == pytest.approx(own.predict(rows), rel=1e-6)  # in the target's own unit
        assert 20 < float(np.mean(model.predict(rows))) < 60
    (result,) = json.loads((folder / "summary.json").read_text())["results"]
    wanted = simulated.result().personal
    assert result["metric"] == "neg_median_absolute_error"
    for name in ("rmse", "r2", "neg_median_absolute_error"):
        assert result["personal"][name] == pytest.approx(wanted[name], rel=1e-5)


def test_a_trial_hands_the_target_over() -> None:
    data = federation()
    settings = deployment_settings(
        make_config(None, {"algorithms": "ditto", "seeds": (0,), "participation": 1.0, **TRAINING}), data, NAMES
    )
    assert "classes" not in settings
    assert Deployment.parse(settings).problem == data.problem


@pytest.mark.parametrize("target", ["29", "29,0", "mean,10", "1,2,3"])
def test_targets_that_cannot_be(target: str) -> None:
    with pytest.raises(ConfigError, match="target is the mean and the standard deviation"):
        Deployment.parse({"clients": 3, "target": target})


def test_a_newcomer_with_numbers_is_shown_in_their_unit(tmp_path: Path) -> None:
    run(federation=federation(), out=tmp_path / "run", algorithms="ditto", seeds=(0,), participation=1.0, **TRAINING)
    x, y, _ = examples()
    rows = [f"{','.join(map(str, row))},{number}" for row, number in zip(x[:20].tolist(), y[:20], strict=True)]
    (tmp_path / "new.csv").write_text("\n".join(["c0,c1,c2,c3,score", *rows]))
    adoption = adopt(tmp_path / "run", newcomer_from_table(tmp_path / "run", tmp_path / "new.csv", "score"))
    assert adoption.adopted is not None
    assert -30 < adoption.adopted.value < 0
    console = Console(width=120, record=True, file=StringIO())
    console.print(adoption)
    text = console.export_text()
    assert "neg_median_absolute_error" in text
    assert "accuracy" not in text
