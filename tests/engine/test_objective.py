"""Losses of numbers on every gradient path, against autograd; and what they lead to, against closed forms."""

import numpy as np
import pytest
import torch
from torch import nn

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.engine.contract.objective import ABSOLUTE, SQUARED, Huber, make_objective
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.lora import lora
from kinfed.errors import ConfigError, ModelError
from kinfed.privacy.dpsgd import PrivateTask
from kinfed.privacy.noise import seeded_noise
from kinfed.runs.loop_factory import simulate

OBJECTIVES = (SQUARED, ABSOLUTE, Huber(0.5))


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def lstm():
    return nn.Sequential(nn.LSTM(2, 3, batch_first=True), LastOutput(), nn.Linear(3, 1))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))


def adapters():
    return lora(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), "0", rank=1, train="2")


PATHS = {
    "stacked": (dense, "stacked", (4,)),
    "recurrent": (lstm, "stacked", (5, 2)),
    "convolutional": (cnn, "rows", (1, 4, 4)),
    "rows": (dense, "rows", (4,)),
    "vmap": (dense, "vmap", (4,)),
    "batched": (adapters, "batched", (4,)),
}


def batch_of(shape, clients=2, examples=5) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, examples, *shape, generator=generator)
    y = 2 * torch.randn(clients, examples, generator=generator)
    weight = torch.rand(clients, examples, generator=generator)
    weight[0, -1] = 0  # padding
    return Batch(x, y, weight, torch.arange(clients))


def wanted(task, theta, batch, loss):
    """The gradient by plain autograd, of losses as torch has them."""
    rows = []
    for row, x, y, weight in zip(theta, batch.x, batch.y, batch.weight, strict=True):
        module = task.module_of(row).train()
        z = module(x)[:, 0]
        total = (weight * loss(z, y)).sum()
        named = dict(module.named_parameters())
        grads = torch.autograd.grad(total, [named[slot.name] for slot in task.slots])
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)


def torch_loss(objective):
    f = nn.functional
    if objective is SQUARED:
        return lambda z, y: f.mse_loss(z, y, reduction="none") / 2
    if objective is ABSOLUTE:
        return lambda z, y: f.l1_loss(z, y, reduction="none")
    return lambda z, y: f.huber_loss(z, y, reduction="none", delta=objective.threshold)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
@pytest.mark.parametrize("path", PATHS)
def test_gradients_are_those_of_autograd(path, objective):
    build, backend, shape = PATHS[path]
    task = make_task(build, backend=backend, objective=objective)
    assert not task.classifies
    batch = batch_of(shape)
    theta = torch.stack([task.init(0), task.init(1)])
    theta = theta + 0.1 * torch.sin(torch.arange(theta.numel())).view_as(theta)
    expected = wanted(task, theta, batch, torch_loss(objective))
    assert torch.allclose(task.grad(theta, batch), expected, atol=1e-5)
    moved = theta.clone()
    task.descend_(moved, batch, torch.tensor([0.1, 0.2]), (0.5, torch.zeros_like(theta)))
    assert torch.allclose(moved, theta - torch.tensor([[0.1], [0.2]]) * (expected + 0.5 * theta), atol=1e-5)
    one = Batch(batch.x[:, :1], batch.y[:, :1], torch.ones(2, 1), batch.ids)
    alone = wanted(task, theta, one, torch_loss(objective)).norm(dim=1)
    assert torch.allclose(task.example_norms(theta, batch)[:, 0], alone, atol=1e-5)
    assert torch.allclose(
        task.losses(theta, batch), torch_loss(objective)(task.logits(theta, batch.x)[..., 0], batch.y)
    )


def test_private_gradients_of_numbers_are_clipped_example_by_example():
    task = make_task(dense, objective=SQUARED)
    data = people().cohort(torch.arange(2), 0, 1)
    batches = data.train.batches(LocalTraining(batch=4, steps=1, poisson=True))
    _, batch = next(iter(batches))
    theta = torch.stack([task.init(0)] * 2)
    private = PrivateTask(task, 0.1, 0.0, seeded_noise(0))
    with private.recording():
        g = private.grad(theta, batch)
    norms = task.example_norms(theta, batch)
    factor = (0.1 / norms).clamp_max(1.0)
    by_hand = task.grad(theta, Batch(batch.x, batch.y, batch.weight * factor, batch.ids))
    assert torch.allclose(g, by_hand, atol=1e-6)


def people(clients=2, each=40, seed=0, noise=0.0) -> Federation:
    """y = 100 + 20 (x · a + c_k): clients of one slope whose intercepts differ."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(clients * each, 4))
    who = np.repeat(np.arange(clients), each)
    y = 100 + 20 * (x @ [1.0, -0.5, 0.25, 0.0] + who) + noise * rng.normal(size=len(x))
    return Federation.from_arrays(x, y, who)


def least_squares(x, y) -> np.ndarray:
    return np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]


def test_a_linear_model_learns_the_least_squares_solution_and_speaks_in_the_targets_own_unit():
    federation = people(clients=2, noise=5.0)
    assert federation.problem.kind == "regression"
    training = LocalTraining(lr=0.3, batch=1000, steps=200)
    loop = simulate(federation, lambda: nn.Linear(4, 1), "local", training=training)
    loop.round()
    models = loop.evaluate(keep_models=True).models
    for k in range(2):
        rows = federation.train[k]
        solution = least_squares(federation.features.gather(rows).numpy(), federation.labels[rows].numpy())
        restored = federation.problem.restored(models[k, 4].item()), federation.problem.scale * models[k, :4].numpy()
        assert restored[0] == pytest.approx(solution[4], abs=1e-2)
        assert restored[1] == pytest.approx(solution[:4], abs=1e-2)


def test_fedavg_of_one_full_gradient_step_each_ends_at_the_solution_of_all_data():
    federation = people(clients=2, noise=5.0)  # of equal size, so that the mean of gradients is that of all data
    training = LocalTraining(lr=0.5, batch=1000, steps=1)
    loop = simulate(federation, lambda: nn.Linear(4, 1), "fedavg", training=training)
    for _ in loop.rounds(150):
        pass
    rows = federation.train.rows
    solution = least_squares(federation.features.gather(rows).numpy(), federation.targets[rows].numpy())
    w = loop.algorithm.server_models(loop.server).models[0]
    assert w.numpy() == pytest.approx(solution, abs=1e-3)


def test_all_methods_train_on_numbers_or_say_that_they_need_classes():
    federation = people(clients=3, each=8).with_validation(0.25, 0)
    training, refused = LocalTraining(lr=0.01, steps=1, batch=4), {}
    for name in ALGORITHMS:
        try:
            loop = simulate(federation, dense, name, training=training, workers=1)
            for _ in loop.rounds(2):
                pass
            score = loop.evaluate().personal
            assert score is not None
            assert bool(torch.isfinite(score.loss).all()), name
        except (ConfigError, ModelError) as error:
            refused[name] = str(error)
    needs = {name for name in ALGORITHMS if "needs classes" in ALGORITHMS[name].target.traits}
    assert needs >= {"fedlc", "fedntd", "fedproto", "fedrod", "fedem", "mocha"}
    assert needs == {name for name, reason in refused.items() if "works with classes" in reason}
    assert {"local", "fedavg", "ditto", "selffl", "fedfomo", "pfedme", "fedper", "apfl", "moon", "feddbe"} <= {
        *ALGORITHMS
    } - refused.keys()


@pytest.mark.parametrize("name", ["fedavg", "ditto", "selffl", "fedfomo", "ifca"])
def test_methods_keep_their_contract_on_numbers(name):
    from kinfed.testing import check_algorithm

    check_algorithm(name, federation=people(clients=6, each=24), model=dense)


def test_losses_belong_to_their_problem():
    numbers, classes = Problem.of_numbers([1.0, 2.0]), Problem.of_classes(2)
    assert make_objective(numbers, "huber", 0.7).threshold == 0.7
    with pytest.raises(ConfigError, match=r"squared is not for this problem, which is binary.*cross_entropy"):
        make_objective(classes, "squared")
    with pytest.raises(ConfigError, match=r"cross_entropy is not for this problem.*squared"):
        make_objective(numbers, "cross_entropy")
    with pytest.raises(ModelError, match="one number"):
        kinfed.run(federation=people(), model=lambda: nn.Linear(4, 3), algorithms="local", rounds=1, seeds=(0,))
