"""Class weights and weights of rows: their values against scikit-learn's, and training with them on every gradient path
against a plain torch loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import check_algorithm_settings
from kinfed.algorithms.common.averaging import mean_losses
from kinfed.algorithms.fedavg import FedAvg
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.example_weights import parse_class_weights
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers.adoption import adopt
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.worker import make_shard
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule

TRAINING = LocalTraining(batch=6, steps=7, lr=0.2)


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def weighted(federation: Federation) -> Federation:
    """Weights of rows and of classes, at every client others."""
    rows = torch.linspace(0.2, 3, len(federation.labels))
    return replace(federation, weights=rows).with_class_weights("by_client")


def plain_loop(task, data: Federation, batches) -> torch.Tensor:
    """[n, P] torch.optim on mean(w · loss) of the same batches, one client after the other."""
    rows = []
    for client in range(data.num_clients):
        module = task.module_of(task.init(0)).train()
        optimizer = torch.optim.SGD(module.parameters(), lr=TRAINING.lr)
        windows, own = batches.windows(), data.train[client]
        start, size = int(data.train.offsets[client]), min(TRAINING.batch, len(own))
        for step in range(TRAINING.steps):
            place = torch.from_numpy(windows.order[windows.offset[client] + step * size + np.arange(size)])
            index = data.train.rows[start + place]
            y = data.labels[index]
            weight = data.weights[index] * data.class_weights[client, y]
            losses = nn.functional.cross_entropy(module(data.features.gather(index)), y, reduction="none")
            optimizer.zero_grad()
            (weight * losses).mean().backward()
            optimizer.step()
        rows.append(task.flatten(module.state_dict()))
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["stacked", "rows", "vmap"])  # fused: tests/engine/test_fused.py
def test_steps_are_those_of_a_plain_torch_loop(federation: Federation, backend: str) -> None:
    data, task = weighted(federation), make_task(dense, backend=backend)
    batches = data.cohort(torch.arange(6), seed=1, round=1).train.batches(TRAINING)
    theta = sgd(task, task.init(0).expand(6, -1), batches)
    assert torch.allclose(theta, plain_loop(task, data, batches), atol=1e-5)


def test_one_step_of_fedavg_is_one_on_the_weighted_loss_of_all_rows(federation: Federation) -> None:
    data = weighted(federation)
    data = data.with_class_weights("balanced")
    task = make_task(dense)
    whole = FedAvg(LocalTraining(batch=10**6, steps=1, lr=0.3))
    with Loop(whole, task, LocalPool(whole, task, data, 0), data.population(0), Schedule(1.0)) as loop:
        loop.round()
        after = loop.algorithm.server_models(loop.server).models[0]
    module, rows = task.module_of(task.init(0)), data.train.rows
    weight = data.weights[rows] * data.class_weights[0, data.labels[rows]]
    losses = nn.functional.cross_entropy(module(data.features.gather(rows)), data.labels[rows], reduction="none")
    (weight * losses).mean().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.3 * parameter.grad
    assert torch.allclose(after, task.flatten(module.state_dict()), atol=1e-6)


def test_balanced_weights_are_scikit_learns(federation: Federation) -> None:
    labels = federation.labels[federation.train.rows].numpy()
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    table = federation.with_class_weights("balanced").class_weights
    assert np.allclose(table.numpy(), wanted[None])
    assert table[0][labels].mean() == pytest.approx(1)
    own = federation.with_class_weights("by_client").class_weights
    for client in range(6):
        y = federation.labels[federation.train[client]].numpy()
        assert np.allclose(own[client, np.unique(y)], compute_class_weight("balanced", classes=np.unique(y), y=y))


def test_weights_of_one_change_no_bit_and_others_reach_every_own_step(federation: Federation) -> None:
    task = make_task(dense)
    for name in ("apfl", "pfedme", "perfedavg", "fedem", "l2sgd", "fedala", "qffl", "pfedhn"):
        algorithm = make_algorithm(name, replace(TRAINING, lr=0.05), {})
        models = []
        for weights in (None, torch.ones(len(federation.labels)), torch.linspace(0.2, 3, len(federation.labels))):
            data = replace(federation, weights=weights)
            with Loop(algorithm, task, LocalPool(algorithm, task, data, 0), data.population(0), Schedule(1.0)) as loop:
                loop.round()
                models.append(loop.evaluate("test", keep_models=True).models)
        assert torch.equal(models[0], models[1]), name
        assert not torch.allclose(models[0], models[2], atol=1e-4), name


def test_mocha_has_no_place_for_weights(federation: Federation) -> None:
    linear = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 3)))
    with pytest.raises(ConfigError, match="without weights of classes"):
        check_algorithm_settings(make_algorithm("mocha", TRAINING, {}), linear, weighted(federation).population(0))


def test_validation_losses_are_weighted_and_test_figures_are_not(federation: Federation) -> None:
    data = weighted(federation.with_validation(0.3, 0))
    plain = replace(data, weights=None, class_weights=None)
    task = make_task(dense)
    task.problem = data.problem
    theta = task.init(3).expand(6, -1)
    ours, others = (one.cohort(torch.arange(6), 0, 1) for one in (data, plain))
    assert torch.equal(task.evaluate(theta, ours.test).sums["auroc"], task.evaluate(theta, others.test).sums["auroc"])
    for client in range(6):
        rows = data.val[client]
        losses = task.losses(theta[:1], next(iter(ours.val.take(torch.tensor([client])).in_order()))[1])[0]
        weight = data.weights[rows] * data.class_weights[client, data.labels[rows]]
        wanted = float((losses * weight).sum() / weight.sum())
        assert float(task.mean_loss(theta, ours.val)[client]) == pytest.approx(wanted, rel=1e-5)
        assert float(mean_losses(task, [theta], ours.val)[client, 0]) == pytest.approx(wanted, rel=1e-5)
    assert not torch.allclose(task.mean_loss(theta, ours.val), task.mean_loss(theta, others.val))


def test_a_heavy_example_is_clipped_as_all_others(federation: Federation) -> None:
    """A weight of a thousand must not let one example move a private gradient further than the clipping norm."""
    heavy = replace(federation, weights=torch.where(torch.arange(len(federation.labels)) % 5 == 0, 1000.0, 1.0))
    task = PrivateTask(make_task(dense), clip=0.5, noise=0.0, source=seeded_noise(0))
    training = replace(TRAINING, poisson=True)
    cohort = heavy.cohort(torch.arange(6), 0, 1)
    with task.recording(0):
        for rows, batch in cohort.train.batches(training):
            g = task.grad(task.inner.init(0).expand(len(batch), -1), batch)
            size = (batch.weight > 0).sum(1)
            assert bool((g.norm(dim=1) <= 0.5 * size / batch.sample.expected + 1e-5).all()), rows


def test_a_shard_and_a_saved_federation_have_the_same_weights(federation: Federation, tmp_path: Path) -> None:
    data, ids = weighted(federation), torch.tensor([1, 4])
    data.save(tmp_path / "saved")
    saved = Federation.load(tmp_path / "saved")
    assert saved.digest() == data.digest() != federation.digest()
    whole = list(data.cohort(ids, 0, 1).train.batches(TRAINING))
    for other in (make_shard(data, ids), saved):
        for (_, ours), (_, theirs) in zip(whole, other.cohort(ids, 0, 1).train.batches(TRAINING), strict=True):
            assert torch.equal(ours.weight, theirs.weight)


def table(path: Path, weights: list[object]) -> Path:
    lines = ["a,site,sick,count"]
    for i, weight in enumerate(weights):
        lines.append(f"{i % 7 - 3},{'north' if i % 2 else 'south'},{'yes' if i % 5 == 0 else 'no'},{weight}")
    path.write_text("\n".join(lines))
    return path


def test_a_run_on_a_table_with_weights(tmp_path: Path) -> None:
    file = table(tmp_path / "visits.csv", [10 * (1 + i % 3) for i in range(60)])
    columns = {"client_column": "site", "label_column": "sick", "weight_column": "count"}
    settings = {"rounds": 2, "seeds": (0,), "algorithms": "fedavg", "model": "mlr", "participation": 1.0}
    result = kinfed.run(dataset=str(file), class_weights="balanced", out=tmp_path / "run", **columns, **settings)
    data = result.federations[0]
    assert float(data.weights[data.train.rows].mean()) == pytest.approx(1)
    assert data.features.shape == (1,)  # the weight is no feature
    assert data.description["class_weight_values"] == data.class_weights[0].tolist()
    newcomer = Federation.from_arrays(np.arange(-4.0, 6)[:, None], ["no", "yes"] * 5, ["new"] * 10)
    adopted = adopt(tmp_path / "run", replace(newcomer, problem=data.problem))
    unweighted = kinfed.run(dataset=str(file), out=tmp_path / "plain", **columns, **settings)
    assert not torch.equal(adopted.model, adopt(tmp_path / "plain", replace(newcomer, problem=data.problem)).model)
    # What every client tells before training: numbers of rows by class, and sum and number of its weights.
    assert [a - b for a, b in zip(data.statistics_bytes, unweighted.federations[0].statistics_bytes, strict=True)] == [
        2 * 2 * 8, 2 * 2 * 8,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("class_weights", "protection", "message"),
    [
        ("balanced", {"dp_noise": 1.0}, "epsilon does not cover the numbers of examples by class"),
        ("by_client", {"dp_noise": 1.0}, "depend on the client's other examples"),
        ("none", {"user_noise": 1.0}, "epsilon does not cover the sums of weights"),
        ("balanced", {"secure_sum": True}, "secure_sum hides single updates, and not the numbers of examples by class"),
    ],
)
def test_weights_that_take_statistics_are_refused_under_protection(
    federation: Federation, class_weights: str, protection: dict[str, object], message: str
) -> None:
    rows = torch.ones(len(federation.labels)) if class_weights == "none" else None
    with pytest.raises(ConfigError, match=message):
        kinfed.run(
            federation=replace(federation, weights=rows), class_weights=class_weights, model="mlr", algorithms="fedavg",
            rounds=1, seeds=(0,), **protection,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1, 0, 2, 1], "not positive and finite, the first \\(0\\) in row 2"), (["x", "y", "z", "x"], "positive number")],
)
def test_weights_that_cannot_be(tmp_path: Path, weights: list[object], message: str) -> None:
    file = table(tmp_path / "visits.csv", weights)
    with pytest.raises(DataError, match=message):
        kinfed.Federation.from_table(file, client_column="site", label_column="sick", weight_column="count")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("balance", "class_weights is none, balanced, by_client, or weights of classes such as no=2,yes=1"),
        ("yess=2", "did you mean yes"),
        ("yes=-1", "must be a positive number; got '-1'"),
        ("yes=many", "must be a positive number; got 'many'"),
    ],
)
def test_rules_that_cannot_be(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_class_weights(rule, ["no", "yes"])


def test_named_weights_stand_as_they_are() -> None:
    assert parse_class_weights("a=b=3, no=0.5", ["no", "yes", "a=b"]) == [0.5, 1.0, 3.0]


def test_numbers_have_no_classes(federation: Federation) -> None:
    numbers = replace(federation, labels=federation.labels.to(torch.float64), problem=Problem.of_numbers([1.0, 2.0]))
    with pytest.raises(ConfigError, match="the target is a number"):
        numbers.with_class_weights("balanced")
