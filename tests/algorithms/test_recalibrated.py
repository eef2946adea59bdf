"""One model with an intercept per client: closed form, optimum, limits, and clients that differ in level alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from method_bench import ALL, by_hand, close, run
from torch import nn

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.recalibrated import Recalibrated
from kinfed.author import ConfigError, LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.testing import tiny_federation, tiny_model

TRAINING = LocalTraining(batch=5, steps=4)


@pytest.mark.parametrize("slope", [False, True])
def test_the_gradient_vanishes_at_the_intercept_of_every_client(slope: bool) -> None:
    task, data = make_task(tiny_model), tiny_federation().cohort(torch.arange(6), seed=0, round=1)
    w = task.init(0).expand(6, -1) * 3
    method = Recalibrated(TRAINING, slope=slope, lam=0.7)
    a, b = method.fit(task, w, data)
    for client in range(6):
        own = tiny_federation().cohort(torch.tensor([client]), seed=0, round=1)
        parts = [(task.logits(w[:1], batch.x)[0].double(), batch.y[0]) for _, batch in own.train.in_order()]
        z, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        at = b[client].clone().requires_grad_(), a[client].clone().requires_grad_()
        loss = nn.functional.cross_entropy(at[1] * z + at[0], y, reduction="sum")
        loss = loss + 0.35 * (at[0].square().sum() + (at[1] - 1).square())
        gradient = torch.autograd.grad(loss, at)
        close(gradient[0], torch.zeros_like(gradient[0]), 1e-6)
        assert float(gradient[1]) == pytest.approx(0.0, abs=1e-6) if slope else float(a[client]) == 1.0


def test_numbers_are_shifted_by_the_shrunk_mean_residual() -> None:
    x, site = np.random.default_rng(0).normal(size=(60, 2)), np.repeat(["a", "b", "c"], 20)
    y = x[:, 0] + np.repeat([0.0, 2.0, -1.0], 20)
    data = kinfed.Federation.from_arrays(x, y, site, task="regression")
    methods = {"m": {"method": "fedavg_intercept", "lam": 4.0}}
    result = kinfed.run(federation=data, algorithms=methods, model="mlr", rounds=3, participation=1.0, seeds=(0,))
    server = result.server_model("m")
    assert server is not None
    for k, name in enumerate(data.names):
        rows = data.train[k].numpy()
        residual = y[rows] - np.asarray(server.predict(x[rows]))
        shift = float(residual.sum()) / (len(rows) + 4)
        personal = result.personal_model(name, "m").predict(x)
        np.testing.assert_allclose(personal, server.predict(x) + shift, atol=1e-4)


def test_with_a_strong_prior_it_is_the_servers_model_of_fedavg() -> None:
    ours, theirs = run(Recalibrated(TRAINING, lam=1e12)), run(make_algorithm("fedavg", TRAINING))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    close(ours["personal loss"], theirs["server loss"], 1e-5)


def test_clients_that_differ_in_level_alone_are_served_better_than_by_one_model() -> None:
    draw = np.random.default_rng(1)
    site, x = np.repeat(np.arange(12), 40), draw.normal(size=(480, 3))
    level = np.repeat(np.linspace(-3, 3, 12), 40)
    y = (x[:, 0] + level + 0.5 * draw.normal(size=480) > 0).astype(int)
    data = kinfed.Federation.from_arrays(x, y, site)
    methods = {"fedavg": {"method": "fedavg"}, "ours": {"method": "fedavg_intercept"}}
    result = kinfed.run(federation=data, algorithms=methods, model="mlr", rounds=20, participation=1.0, seeds=(0,))
    one_model, ours = result.result("fedavg").server, result.result("ours").personal
    assert ours["accuracy"] > one_model["accuracy"] + 0.05
    assert ours["loss"] < one_model["loss"]


def test_a_last_layer_without_a_bias_is_refused() -> None:
    def unbiased() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))

    with pytest.raises(ConfigError, match="needs a bias in the last layer"), by_hand(Recalibrated(ALL), model=unbiased):
        pass


def test_messages_are_fedavgs() -> None:
    with by_hand(make_algorithm("fedavg_recalibrated", ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 15, 3 * 4 * 16)
