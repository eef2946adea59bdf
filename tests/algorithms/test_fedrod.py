"""Fed-RoD: balanced softmax for the generic model, a personal head beside it; FedAvg as its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import (
    ALL,
    LR,
    WORKS,
    by_hand,
    close,
    cut_gradient,
    deep,
    features,
    models,
    run,
    server,
    state,
    weighted,
)
from torch import Tensor, nn

from kinfed.algorithms.common.heads import class_counts
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedrod import Client, FedRoD, TwoHeads
from kinfed.core import rng
from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_balance_and_personal_steps_it_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedRoD(training, gamma=0.0, personal_lr=0.0)), run(FedAvg(training))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal models"], theirs["server.w"].expand(6, -1))


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_the_personal_head_leaves_the_generic_model_alone(training: LocalTraining) -> None:
    ours, theirs = run(FedRoD(training)), run(FedRoD(training, personal_lr=0.0))
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert not torch.equal(ours["personal models"], theirs["personal models"])


def test_one_example_by_hand() -> None:
    """z = (1, 0), counts (3, 1), y = 1, γ = 1: the balanced loss is 2.214283; an absent class has no part in it."""
    z = torch.tensor([[[1.0, 0.0, 5.0]]])
    batch = Batch(z, torch.tensor([[1]]), torch.ones(1, 1), torch.tensor([0]))
    client = Client(torch.zeros(1, 3, 1), torch.zeros(1, 3))
    feature_loss = TwoHeads(client, torch.tensor([[3.0, 1.0, 0.0]]).log(), rate=0.1, decay=0.0)
    dz, dphi = feature_loss(torch.ones(1, 1, 1), z, batch, torch.tensor([0]))
    assert dz is not None
    assert dphi is None
    assert float(-(1 + dz[0, 0, 1]).log()) == pytest.approx(2.214283, abs=1e-5)
    assert float(dz[0, 0, 2]) == 0.0
    assert float(dz.sum()) == pytest.approx(0.0, abs=1e-6)
    step = -0.1 * (torch.softmax(z[0, 0], 0) - torch.tensor([0.0, 1.0, 0.0]))
    assert client.v_bias is not None
    close(client.v[0, :, 0], step)
    close(client.v_bias[0], step)


@pytest.mark.parametrize("bias", [True, False])
def test_rounds_by_hand(bias: bool) -> None:
    """Plain autograd of both losses, with weight decay and a rate of the personal head's own; bytes are FedAvg's."""

    def model() -> nn.Module:
        return nn.Sequential(*list(deep())[:-1], nn.Linear(3, 3, bias=bias))

    training = replace(ALL.with_steps(2), weight_decay=0.1)
    with by_hand(FedRoD(training, gamma=0.5, personal_lr=0.3), model=model) as loop:
        data = loop.pool.federation
        shift = 0.5 * class_counts(data.cohort(torch.arange(3), seed=0, round=1).train, 3).float().log()
        v = {m: nn.Linear(3, 3, bias=bias) for m in range(3)}
        for own in v.values():
            nn.init.zeros_(own.weight)
            if bias:
                nn.init.zeros_(own.bias)
        for _ in range(2):
            w, trained = server(loop), []
            for m in range(3):
                theta = w

                def balanced(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, m: int = m) -> Tensor:
                    return nn.functional.cross_entropy(z + shift[m], y)

                optimizer = torch.optim.SGD(v[m].parameters(), lr=0.3, weight_decay=0.1)
                x, y = data.features.gather(data.train[m]), data.labels[data.train[m]]
                for _ in range(2):
                    phi, z = features(loop, theta, x), loop.task.logits(theta[None], x[None])[0]
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(z + v[m](phi), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    theta = theta - LR * (cut_gradient(loop, m, theta, balanced) + 0.1 * theta)
                trained.append(theta)
            report = loop.round()
            size = 35 + 9 + 3 * bias
            assert (report.bytes_down, report.bytes_up) == (3 * 4 * size, 3 * 4 * (size + 1))
            close(server(loop), weighted(trained), 1e-5)
            for m in range(3):
                close(state(loop, m, "v"), v[m].weight.detach(), 1e-5)
        x = data.features.raw[:5]
        for m, row in enumerate(models(loop)):
            wanted = loop.task.logits(server(loop)[None], x[None])[0] + v[m](features(loop, server(loop), x))
            close(loop.task.logits(row[None], x[None])[0], wanted.detach(), 1e-5)


def test_generic_and_personal_models_are_each_better_at_their_own() -> None:
    """On the skewed clients the personal models fit their clients' classes better than the generic one."""
    found = Bench(FedRoD(LocalTraining(lr=0.1, batch=8, steps=10))).run(rounds=4)
    assert float(found["personal loss"].sum()) < float(found["server loss"].sum())


def one_sided(seed: int) -> Federation:
    """Six clients with nine examples of class 1 for one of class 0, but the last, who has it the other way round; the
    classes overlap."""
    y = torch.cat([(torch.arange(100) % 10 > 0).long() ^ int(m == 5) for m in range(6)])
    noise = rng.normal(rng.root(seed, "planted"), len(y) * 4).reshape(-1, 4)
    x = (noise + y[:, None]).to(torch.float32)
    owner = torch.arange(6).repeat_interleave(100)
    return Federation.from_arrays(x.numpy(), y.numpy(), owner.numpy(), test_fraction=0.5, num_classes=2, stratify=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_generic_model_is_balanced_and_the_personal_ones_know_their_clients(seed: int) -> None:
    """What it was invented for. FedAvg's model takes most examples for class 1, as most clients' are: of class 0 it
    gets few right. The generic model is right on both alike; with own heads clients lose nothing of their prior."""
    training, data, balanced = LocalTraining(lr=0.3, batch=50, steps=5), one_sided(seed), {}
    y, found = data.labels[data.test.rows], {}
    for method in (FedRoD(training), FedAvg(training)):
        with Bench(method, federation=data, model=lambda: nn.Sequential(nn.Linear(4, 2))).loop(Schedule()) as loop:
            for _ in range(20):
                loop.round()
            name = type(method).__name__
            hits = loop.task.logits(server(loop)[None], data.features.raw[data.test.rows][None]).argmax(-1)[0] == y
            balanced[name] = min(float(hits[y == c].float().mean()) for c in (0, 1))  # of the class it does worse on
            found[name] = loop.evaluate()
    assert balanced["FedRoD"] > balanced["FedAvg"] + 0.1
    ours = found["FedRoD"]
    assert ours.personal is not None
    assert ours.server_model is not None
    assert int(ours.personal.correct.sum()) > int(ours.server_model.correct.sum()) + 10  # of 300


def test_counts_in_the_loss_are_not_private() -> None:
    profile = FedRoD(ALL).privacy(torch.tensor([4]))
    assert profile is not None
    assert "numbers of examples by class" in profile.impossible
    assert FedRoD(ALL, gamma=0.0).privacy(torch.tensor([4])) is None


def test_a_rate_below_the_floor_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="lr_floor must lie between"):
        FedRoD(replace(ALL, lr_floor=0.05), personal_lr=0.01)
