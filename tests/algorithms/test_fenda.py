"""FENDA and PerFCL: a joint row against autograd of the whole, FedPer and FENDA as limits, planted bodies, files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_bench import TWO_STEPS, WORKS, accuracy_on, by_hand, close, deep, one_body, run, server, state
from torch import Tensor, nn

import kinfed
from kinfed.algorithms.fedper import FedPer
from kinfed.algorithms.fenda import FENDA
from kinfed.algorithms.local import Local
from kinfed.algorithms.perfcl import PerFCL
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.personal.joint_models import JointTask, joint_rows
from kinfed.engine.personal.personal_models import module_for, module_from, named_parameters, task_for
from kinfed.engine.task_factory import make_task
from kinfed.serving.export import export_model
from kinfed.serving.pipeline import ModelPipeline
from kinfed.testing import tiny_federation, tiny_model
from kinfed.testing.workbench import normalized_model


def rows(task: kinfed.engine.ModuleTask, count: int = 6) -> Tensor:
    first, second = (torch.stack([task.init(seed, half) for seed in range(count)]) for half in (0, 1))
    return joint_rows(task, first, second)


@pytest.mark.parametrize("backend", ["stacked", "rows", "vmap", "fused"])
def test_gradients_are_those_of_the_whole(backend: str) -> None:
    task = make_task(tiny_model, backend=backend)
    theta = rows(task)
    own = task_for(task, theta)
    assert isinstance(own, JointTask)
    data = tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    _, batch = next(iter(data.train.batches(LocalTraining(batch=7, steps=1))))
    found = own.grad(theta, batch) * own.trained_columns()
    for i in range(6):
        module = own.module_of(theta[i])
        x, y, weight = (part[i] for part in (batch.x, batch.y, batch.weight))
        loss = (nn.functional.cross_entropy(module(x), y, reduction="none") * weight).sum()
        grads = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(found[i, :-1], grads * own.trained_columns()[:-1], rtol=1e-4, atol=1e-6)


def test_a_row_tells_what_it_is_and_a_module_predicts_as_its_row() -> None:
    task = make_task(tiny_model)
    theta = rows(task)
    ((_, batch),) = tiny_federation().cohort(torch.arange(6), seed=0, round=1).test.in_order()
    z = task_for(task, theta).logits(theta, batch.x)
    for i in range(6):
        module = module_for(task, theta[i])
        torch.testing.assert_close(module(batch.x[i]), z[i])
        names = named_parameters(theta[i], task.num_params, lambda row: dict(task.unflatten(row)))
        assert names.keys() == module.state_dict().keys()
        again = module_from(tiny_model, names)
        again.load_state_dict(names)
        torch.testing.assert_close(again(batch.x[i]), z[i])


@pytest.mark.parametrize("method", ["fenda", "perfcl", "gpfl"])
def test_training_goes_by_clients_in_whatever_order(method: str) -> None:
    """With epochs, clients are trained the longest first; what pulls at a client's features is its own, and so is
    GPFL's condition."""
    own = kinfed.make_algorithm(method, WORKS["epochs"])
    federation, task = tiny_federation((2, 9, 5)), make_task(tiny_model)
    server = own.init_server(task, federation.population(0))

    def trained(ids: list[int]) -> Tensor:
        client, delta = None, torch.empty(0)
        for number in (1, 2):
            data = federation.cohort(torch.tensor(ids), seed=0, round=number)
            before = own.init_client(task, data) if client is None else client
            client, up = own.client_update(task, before, own.download(server, torch.tensor(ids)), data)
            delta = up.delta
        return delta

    torch.testing.assert_close(trained([0, 1, 2]), torch.cat([trained([m]) for m in range(3)]), rtol=1e-5, atol=1e-6)


def test_without_contrasts_perfcl_is_fenda() -> None:
    for work in WORKS.values():
        ours, theirs = run(PerFCL(work, mu=0.0, gamma=0.0)), run(FENDA(work))
        assert torch.equal(ours["server.shared"], theirs["server.shared"])
        assert torch.equal(ours["personal loss"], theirs["personal loss"])


def test_contrasts_begin_in_a_clients_second_round() -> None:
    with by_hand(PerFCL(TWO_STEPS), model=deep) as ours, by_hand(FENDA(TWO_STEPS), model=deep) as theirs:
        for equal in (True, False):
            ours.round()
            theirs.round()
            assert torch.equal(server(ours, "shared"), server(theirs, "shared")) == equal


def test_the_common_body_of_clients_whose_own_says_nothing_is_fedpers() -> None:
    """An own body with a head of zeros, without momentum, gets no gradient in its first step; nor has it any say."""
    method, task = FENDA(LocalTraining(batch=5, steps=1)), make_task(tiny_model)
    data = tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    down = method.download(method.init_server(task, tiny_federation().population(0)), torch.arange(6))
    client = method.init_client(task, data)
    client = replace(client, own=torch.where(task.head.mask, 0.0, client.own))
    per, split = FedPer(LocalTraining(batch=5, steps=1)), method.split(task)
    other = per.init_client(task, data)
    other = replace(other, own=torch.cat([other.own[:, :-3] / math.sqrt(2), torch.zeros(6, 3)], 1))
    torch.testing.assert_close(client.head[:, :-3], other.own[:, :-3])
    ours, theirs = method.client_update(task, client, down, data), per.client_update(task, other, down, data)
    torch.testing.assert_close(ours[1].delta, theirs[1].delta, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours[0].head[:, :-3], theirs[0].own[:, :-3], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(split.take_shared(ours[0].own), split.take_shared(client.own))


def test_nobodys_body_and_head_leave() -> None:
    with by_hand(FENDA(TWO_STEPS), model=deep) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 35, 3 * 4 * 36)
        assert not torch.equal(state(loop, 0, "own"), state(loop, 1, "own"))
        close(state(loop, 0, "head")[-3:], torch.zeros(3))


def test_running_statistics_of_both_bodies_move_and_only_the_common_ones_are_shared() -> None:
    with by_hand(FENDA(TWO_STEPS), sizes=(8, 6, 7), model=normalized_model) as loop:
        loop.round()
        variance = next(slot for slot in loop.task.slots if slot.name.endswith("running_var"))
        own = torch.stack([state(loop, m, "own")[variance.start : variance.stop] for m in range(3)])
        assert bool((own != 1).all())
        assert not torch.equal(own[0], own[1])
        assert bool((server(loop, "shared")[-12:] != torch.tensor([0.0] * 6 + [1.0] * 6)).any())


@pytest.mark.parametrize("method", [FENDA, PerFCL])
def test_a_common_body_helps_where_there_is_one(
    method: type[FENDA] | type[PerFCL],
) -> None:
    """Better than alone where clients only name classes their own way, and than FedPer where their inputs differ."""
    work, names, inputs = LocalTraining(lr=0.5, batch=12, steps=5), one_body(names=True), one_body(inputs=True)
    assert accuracy_on(names, method(work))[0] > accuracy_on(names, Local(work))[0] + 0.03
    assert accuracy_on(inputs, method(work))[0] > accuracy_on(inputs, FedPer(work))[0] + 0.08


def test_exported_models_predict_as_in_the_run(tmp_path: Path) -> None:
    data, out = tiny_federation(), tmp_path / "run"
    result = kinfed.run(
        out=out, federation=data, model="mlp", algorithms=["fenda"], rounds=2, seeds=[0], eval_every=0, workers=1
    )
    module = ModelPipeline.read(export_model(out, "client-4", out=tmp_path / "model.safetensors").path).module
    score = result.result().evaluation.personal
    assert score is not None
    with torch.no_grad():
        x, y = data.features.gather(data.test[4]), data.labels[data.test[4]]
        assert float((module(x).argmax(1) == y).sum()) == float(score.correct[4])
