"""FedEM against E and M steps worked by hand and against FedAvg at its limit; mixtures as models of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_bench import ALL, LR, SIZES, WORKS, by_hand, close, deep, linear, quadratic, server, state
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedem import FedEM, proportions
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.personal.personal_models import (
    MixtureModule,
    MixtureTask,
    mixture_rows,
    module_for,
    num_components,
    task_for,
)
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError, ModelError, StorageError
from kinfed.records.run_files import RunFiles
from kinfed.serving.export import export_model, state_dict
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED

P = 15


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_one_component_is_fedavg(training: LocalTraining, weights: str) -> None:
    runs = []
    for method in (FedEM(training=training, components=1, weights=weights), FedAvg(training=training, weights=weights)):
        with Bench(method).loop() as loop:
            for _ in range(4):
                loop.round()
            evaluation = loop.evaluate()
            runs.append((loop.server.named(), evaluation))
    (ours, mixture), (theirs, average) = runs
    close(ours["theta"][0], theirs["w"])
    close(mixture.personal.loss, average.server_model.loss, 1e-5)  # a mixture of one model is that model
    assert torch.equal(mixture.personal.correct, average.server_model.correct)


def test_a_round_by_hand() -> None:
    """q_jk ∝ π_k exp(−f_k), π_k ← mean q_jk, θ_k ← θ_k − η (1/N) Σ_j q_jk ∇f_k(x_j), averages by examples."""
    with by_hand(FedEM(training=ALL, components=2)) as loop:
        for _ in range(2):  # in the second round proportions differ
            theta = server(loop, "theta")
            before = [state(loop, m, "pi") for m in range(3)]
            loop.round()
            steps = torch.zeros(2, P)
            for m, size in enumerate(SIZES):
                rows = loop.pool.federation.train[m]
                x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
                losses = []
                for k in range(2):
                    z = x @ theta[k, :12].reshape(3, 4).T + theta[k, 12:]
                    losses.append(nn.functional.cross_entropy(z, y, reduction="none"))
                joint = before[m] * torch.exp(-torch.stack(losses, 1).double())
                q = joint / joint.sum(1, keepdim=True)
                close(state(loop, m, "pi"), q.mean(0))
                for k in range(2):
                    t = theta[k].clone().requires_grad_()
                    z = x @ t[:12].reshape(3, 4).T + t[12:]
                    loss = (q[:, k] * nn.functional.cross_entropy(z, y, reduction="none")).mean()
                    (g,) = torch.autograd.grad(loss, t)
                    steps[k] -= LR * size / sum(SIZES) * g
            close(server(loop, "theta"), theta + steps)


def test_the_e_step_keeps_the_components_of_the_start() -> None:
    """Two steps on one full batch: the second still weighs examples by the round's first components."""
    training = LocalTraining(lr=LR, batch=100, steps=2)
    with by_hand(FedEM(training=training, components=2), sizes=(6,)) as loop:
        theta = server(loop, "theta")
        loop.round()
        federation = loop.pool.federation
        x, y = federation.features.raw[federation.train[0]], federation.labels[federation.train[0]]

        def losses(row: Tensor) -> Tensor:
            return nn.functional.cross_entropy(x @ row[:12].reshape(3, 4).T + row[12:], y, reduction="none")

        q = torch.softmax(-torch.stack([losses(row) for row in theta], 1), 1)
        for k in range(2):
            row = theta[k].clone()
            for _ in range(2):
                row.requires_grad_()
                (g,) = torch.autograd.grad((q[:, k] * losses(row)).mean(), row)
                row = (row - LR * g).detach()
            close(server(loop, "theta")[k], row)


def test_bytes_are_k_models_each_way() -> None:
    with by_hand(FedEM(training=ALL, components=3)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 3 * 4 * P, 3 * (3 * 4 * P + 4))
    with by_hand(FedEM(training=ALL, components=2, weights="equal")) as loop:
        assert loop.round().bytes_up == 3 * 2 * 4 * P


def test_a_client_never_called_takes_one_em_step() -> None:
    with by_hand(FedEM(training=ALL, components=2), participation=0.34) as loop:
        loop.round()
        (called,) = loop.pool.clients.seen.tolist()
        models = loop.evaluate(keep_models=True).models
        assert models is not None
        theta = server(loop, "theta").expand(3, -1, -1)
        data = loop.pool.federation.cohort(torch.arange(3), SEED, 1)
        fresh = proportions(loop.task, theta, torch.full((3, 2), 0.5, dtype=torch.float64), data.train)
        for m in range(3):
            close(models[m, 2 * P :], state(loop, m, "pi") if m == called else fresh[m])
            close(models[m, : 2 * P], theta[m].flatten())
        assert not torch.allclose(fresh[called], state(loop, called, "pi"))


def contrary(examples: int = 60) -> Federation:
    """Two kinds of clients that give opposite labels to like examples."""
    numbers = np.random.default_rng(3)
    owner = np.repeat(np.arange(6), examples)
    x = numbers.normal(size=(len(owner), 4))
    y = ((x @ np.array([1.0, -1.0, 0.5, 0.0]) > 0) ^ (owner % 2 == 1)).astype(int)
    return Federation.from_arrays(x, y, owner, num_classes=2)


def test_components_part_and_clients_find_theirs() -> None:
    def accuracy(method: Any) -> tuple[float, Any]:
        bench = Bench(method, federation=contrary(), model=lambda: nn.Sequential(nn.Linear(4, 2)))
        with bench.loop(chunk=None) as loop:
            for _ in range(40):
                loop.round()
            evaluation = loop.evaluate()
            score = evaluation.personal if isinstance(method, FedEM) else evaluation.server_model
            assert score is not None
            return float(score.correct.sum() / score.count.sum()), evaluation.figures

    training = LocalTraining(lr=0.3, batch=20, steps=5)
    together, figures = accuracy(FedEM(training=training, components=2))
    alone, _ = accuracy(FedAvg(training=training))
    assert together > 0.85
    assert alone < 0.65
    first = figures["pi_0"] > 0.5
    assert first.tolist() in ([True, False] * 3, [False, True] * 3)


def test_extreme_losses_leave_finite_proportions(make_batch: Any) -> None:
    """Components worlds apart: the hopeless one keeps 1e-8, and q is a distribution."""
    task = make_task(linear)
    theta = torch.stack([torch.zeros(P), torch.full((P,), 1.0)])[None].repeat(2, 1, 1)
    theta[:, 1, 0] = 1e6  # one class beyond all reason
    batch = make_batch(2, 6, (4,), 3)
    q = MixtureTask(task, 2).responsibilities(theta.unbind(1), torch.full((2, 2), 0.5), batch)
    assert bool(torch.isfinite(q).all())
    close(q.sum(-1), torch.ones(2, 6))
    data = Federation.from_arrays(np.ones((4, 4)), [1, 1, 1, 1], [0, 0, 0, 0], num_classes=3, test_fraction=0.0)
    pi = proportions(
        task, theta[:1], torch.full((1, 2), 0.5, dtype=torch.float64), data.cohort(torch.tensor([0]), 1, 1).train
    )
    close(pi, torch.tensor([[1.0, 1e-8]]), 1e-9)
    assert float(pi.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"components": 0}, "components"),
        ({"weights": "some"}, "weights"),
        ({"components": 1.5}, "components must be int"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_algorithm("fedem", LocalTraining(), options)


def test_regression_is_refused() -> None:
    with pytest.raises(ConfigError, match="works with classes"), quadratic(FedEM(training=ALL)):
        pass


# Mixtures


def test_predictions_are_those_of_the_mixture(make_batch: Any) -> None:
    """p(y | x) = Σ_k π_k softmax(z_k)_y, by plain formulas; the module and the task agree."""
    task = make_task(deep)
    models = torch.stack([torch.stack([task.init(n, k) for k in range(3)]) for n in range(2)])
    pi = torch.tensor([[0.2, 0.5, 0.3], [1.0 - 2e-8, 1e-8, 1e-8]])
    rows = mixture_rows(models, pi)
    mixture = task_for(task, rows)
    assert isinstance(mixture, MixtureTask)
    batch = make_batch(2, 6, (4,), 3)
    p = sum(pi[:, k, None, None] * torch.softmax(task.logits(models[:, k], batch.x), -1) for k in range(3))
    close(mixture.logits(rows, batch.x).exp(), p)
    for n in range(2):
        module = module_for(task, rows[n])
        assert isinstance(module, MixtureModule)
        close(module(batch.x[n]), mixture.logits(rows, batch.x)[n])


@pytest.mark.parametrize("ragged", [False, True])
def test_the_gradient_of_a_mixture_is_that_of_its_loss(make_batch: Any, ragged: bool) -> None:
    task = make_task(deep)
    mixture = MixtureTask(task, 2)
    rows = torch.stack([mixture.init(1), mixture.init(2)])
    rows[0, -2:] = torch.tensor([0.9, 0.1])
    batch = make_batch(2, 6, (4,), 3, ragged=ragged)
    g = mixture.grad(rows, batch)
    for n in range(2):
        module = module_for(task, rows[n])
        loss = (nn.functional.cross_entropy(module(batch.x[n]), batch.y[n], reduction="none") * batch.weight[n]).sum()
        wanted = torch.autograd.grad(loss, list(module.parameters()))
        close(g[n, :-2], torch.cat([w.reshape(-1) for w in wanted]))
    assert bool((g[:, -2:] == 0).all())
    lam, center = 0.5, torch.zeros_like(rows)
    stepped = rows.clone()
    mixture.descend_(stepped, batch, 0.1, (lam, center))
    close(stepped[:, :-2], (rows - 0.1 * (g + lam * rows))[:, :-2])
    assert torch.equal(stepped[:, -2:], rows[:, -2:])


@given(st.integers(1, 40), st.integers(1, 6))
def test_a_width_tells_what_a_row_is(params: int, components: int) -> None:
    assert num_components(components * (params + 1), params) == components
    for width in (0, params - 1, params + 2 if params > 1 else 3):
        if width % (params + 1) or width == 0:
            with pytest.raises(ModelError, match="neither a model"):
                num_components(width, params)


def test_layers_of_a_mixture_cover_the_row() -> None:
    mixture = MixtureTask(make_task(deep), 2)
    edges = [0, *(layer.stop for layer in mixture.slots)]
    assert [layer.start for layer in mixture.slots] == edges[:-1]
    assert edges[-1] == mixture.num_params == len(mixture.init(0))
    assert mixture.slots[0].name == "components.0.1.weight"
    assert not torch.equal(mixture.init(0)[:47], mixture.init(0)[47:94])


def test_mixtures_are_saved_and_exported(tmp_path: Path) -> None:
    data = contrary(12)
    result = kinfed.run(
        out=tmp_path / "run", federation=data, model="mlr", algorithms={"fedem": {"components": 2}}, rounds=2,
        seeds=[0], eval_every=0, workers=1,
    )  # fmt: skip
    x = data.features.raw[:5]
    module = result.personal_model(1).module
    exported = export_model(tmp_path / "run", "1", out=tmp_path / "one.safetensors")
    blank = MixtureModule([nn.Sequential(nn.Flatten(), nn.Linear(4, 2)) for _ in range(2)], torch.empty(2))
    blank.load_state_dict(safetensors.torch.load_file(exported.path))
    close(blank(x), module(x))
    score = result.result().evaluation.personal
    assert score is not None
    with torch.no_grad():
        rows = data.test[1]
        hits = module(data.features.raw[rows]).argmax(1) == data.labels[rows]
    assert float(score.correct[1]) == float(hits.sum())
    with pytest.raises(StorageError, match="does not describe"):
        state_dict(RunFiles(tmp_path / "run"), torch.zeros(13))
    assert math.isclose(float(module.pi.sum()), 1, rel_tol=1e-6)


def test_examples_of_no_share_still_enter_the_statistics_of_a_component() -> None:
    """An example that speaks for one component alone is no padding for the others: they normalize by all examples."""
    task = make_task(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
    mixture = MixtureTask(task, 2)
    models, x = torch.stack([task.init(0), task.init(1)])[None], torch.randn(1, 6, 2)
    bias = next(slot for slot in task.slots if slot.name == "2.bias")
    models[:, 0, bias.start : bias.stop] = torch.tensor([200.0, -200.0])  # exp(−400) is 0 in float32
    theta = mixture_rows(models, torch.full((1, 2), 0.5))
    batch = Batch(x, torch.ones(1, 6, dtype=torch.int64), torch.full((1, 6), 1 / 6), torch.zeros(1, dtype=torch.int64))
    assert float(MixtureTask(task, 2).responsibilities(models.unbind(1), theta[:, -2:], batch)[..., 0].max()) == 0.0
    mixture.descend_(theta, batch, 0.1)
    plain = models[:, 0].clone()
    task.training_grad(plain, batch)
    close(theta[:, : task.num_params], plain, 1e-6)  # its statistics moved, its parameters did not
