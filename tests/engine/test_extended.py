"""Models with an extension: gradients against autograd of the whole, on every path; what a row is; modules, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import deployed_models
from kinfed.algorithms.fedcp import FeatureGate, gate_logits, policy_size
from kinfed.algorithms.gpfl import GPFL, FeatureValve, through_valve, valve_size
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.personal.personal_models import (
    ExtendedTask,
    MixtureTask,
    extended_rows,
    mixture_rows,
    module_for,
    module_from,
    named_parameters,
    task_for,
)
from kinfed.engine.task_factory import make_task
from kinfed.errors import ModelError
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.testing import tiny_federation, tiny_model
from kinfed.testing.workbench import normalized_model

SIZES: dict[str, tuple[Any, int]] = {
    "gate": (FeatureGate(), 21 + policy_size(6)),  # of the tiny model: six features, three classes
    "valve": (FeatureValve(), valve_size(6) + 6),
}


def rows(task: Any, kind: str, count: int = 6) -> Tensor:
    extension, width = SIZES[kind]
    models = torch.stack([task.init(seed) for seed in range(count)])
    extra = 0.5 * rng.normal(rng.root(0, kind), count * width).reshape(count, width).float()
    return extended_rows(models, extra, extension)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("backend", ["stacked", "rows", "vmap"])
def test_gradients_are_those_of_the_whole(kind: str, backend: str) -> None:
    task = make_task(tiny_model, backend=backend)
    theta = rows(task, kind)
    own = task_for(task, theta)
    assert isinstance(own, ExtendedTask)
    data = tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    _, batch = next(iter(data.train.batches(LocalTraining(batch=7, steps=1))))
    found = own.grad(theta, batch)
    for i in range(6):
        row = theta[i].clone().requires_grad_()
        module = task.module.eval()
        params = task.unflatten(row[: task.num_params])
        body = {name: value for name, value in params.items() if not name.startswith("5.")}
        phi = torch.func.functional_call(nn.Sequential(*list(module)[:-1]), body, (batch.x[i],))
        z = own.extension.logits(
            phi[None], params["5.weight"][None], params["5.bias"][None], row[None, task.num_params : -1]
        )[0]
        loss = (nn.functional.cross_entropy(z, batch.y[i], reduction="none") * batch.weight[i]).sum()
        (wanted,) = torch.autograd.grad(loss, row)
        torch.testing.assert_close(found[i], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", SIZES)
def test_a_module_predicts_as_its_row(kind: str) -> None:
    task = make_task(tiny_model)
    theta = rows(task, kind)
    data = tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    ((_, batch),) = data.test.in_order()
    z = task_for(task, theta).logits(theta, batch.x)
    for i in range(6):
        module = module_for(task, theta[i])
        torch.testing.assert_close(module(batch.x[i]), z[i])
        names = named_parameters(theta[i], task.num_params, lambda row: dict(task.unflatten(row)))
        assert names.keys() == module.state_dict().keys()
        again = module_from(tiny_model, names)
        again.load_state_dict(names)
        torch.testing.assert_close(again(batch.x[i]), z[i])


def test_a_row_tells_what_it_is() -> None:
    """Even where a mixture is as wide."""
    task = make_task(tiny_model)
    P = task.num_params
    start = task.init(0)[None]
    mixture = mixture_rows(torch.stack([start, start], 1), torch.full((1, 2), 0.5))
    valve = extended_rows(start, torch.zeros(1, P + 1), FeatureValve())
    assert mixture.shape == valve.shape
    assert isinstance(task_for(task, mixture), MixtureTask)
    assert isinstance(task_for(task, valve), ExtendedTask)
    assert task_for(task, start) is task
    assert task_for(task, start[:0]) is task
    valve[0, -1] = -77
    with pytest.raises(ModelError, match="mark -77 of an extension"):
        task_for(task, valve)


def test_fine_tuning_moves_all_but_the_mark_and_statistics_by_decay() -> None:
    task = make_task(normalized_model)
    method = GPFL(LocalTraining(batch=5, steps=2, weight_decay=0.5), finetune=2)
    federation = tiny_federation((9, 9))
    data, everybody = federation.cohort(torch.arange(2), seed=0, round=1), torch.arange(2)
    down = method.download(method.init_server(task, federation.population(0)), everybody)
    models = deployed_models(method, task, method.init_client(task, data), down, data)
    tuned, before = models["personal"], models["without_finetuning"]
    assert torch.equal(tuned[:, -1], before[:, -1])
    moved = (tuned != before).float().mean(0)
    assert float(moved[: task.num_params].mean()) > 0.9
    variance = next(slot for slot in task.slots if slot.name.endswith("running_var"))
    assert float(tuned[:, variance.start : variance.stop].min()) > 0.5  # from 1, by two passes and no decay


def test_networks_are_those_of_torch() -> None:
    phi, width = rng.normal(rng.root(1, "phi"), 24).reshape(1, 4, 6).float(), 6
    gate = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
    numbers = torch.cat([gate[0].weight.T.flatten(), gate[0].bias, gate[1].weight + 1, gate[1].bias - 0.3])
    with torch.no_grad():
        gate[1].weight += 1
        gate[1].bias -= 0.3
        a = gate(phi[0])
        torch.testing.assert_close(gate_logits(phi, numbers[None])[0], a[:, :width] - a[:, width:])
        networks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(2)]
        valve = torch.cat(
            [torch.cat([net[0].weight.T.flatten(), net[0].bias, net[2].weight, net[2].bias]) for net in networks]
        )
        k = phi[0, 0] - 1
        wanted = torch.relu(phi[0] * (1 + networks[0](k)) + networks[1](k))
        torch.testing.assert_close(through_valve(phi, k[None], valve[None])[0], wanted)


@pytest.mark.parametrize("name", ["gpfl", "fedcp"])
def test_exported_models_predict_as_in_the_run(name: str, tmp_path: Path) -> None:
    data, out = tiny_federation(), tmp_path / "run"
    result = kinfed.run(
        out=out, federation=data, model="mlp", algorithms=[name], rounds=2, seeds=[0], eval_every=0, workers=1
    )
    exported = export_model(out, "client-4", out=tmp_path / "model.safetensors")
    module = ModelPipeline.read(exported.path).module
    score = result.result().evaluation.personal
    assert score is not None
    with torch.no_grad():
        x, y = data.features.gather(data.test[4]), data.labels[data.test[4]]
        assert float((module(x).argmax(1) == y).sum()) == float(score.correct[4])
        torch.testing.assert_close(result.personal_model(4).module(x), module(x))
