"""pFedSim: shares by hand, FedAvg in its first phase, local training among strangers, and bodies of the like."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, deep, gradient, linear, models, run, server, state
from torch import Tensor

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.pfedsim import PFedSim, _shares
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation

COLUMNS = torch.tensor([[1, 2], [3, 4]])  # of W, two classes and two features, behind one column of a body


def shares(*rows: list[float], known: tuple[int, ...] | None = None) -> Tensor:
    theta = torch.tensor(rows)
    has = torch.tensor([known is None or m in known for m in range(len(rows))])
    return _shares(theta, has, COLUMNS)


def test_shares_by_hand() -> None:
    """Heads that agree in one of two classes: s = ½, −log ½ = 0.6931 beside −log 0.0001 = 9.2103."""
    p = shares([9.0, 1, 0, 0, 1], [7.0, 5, 0, 1, 0])
    assert p[0].tolist() == pytest.approx([0.93001, 0.06999], abs=1e-5)
    assert p[0, 1] == pytest.approx(log(2) / (log(2) + log(1e4)))
    assert p[1].tolist() == pytest.approx(p[0].flip(0).tolist())
    assert shares([0.0, 1, 2, 3, 4], [1.0, 2, 4, 6, 8]).tolist() == pytest.approx(0.5 * torch.ones(2, 2))  # lengths
    assert shares([0.0, 1, 0, 1, 0], [1.0, -1, 0, -1, 0]).tolist() == torch.eye(2).tolist()  # opposite ones
    assert shares([0.0, 1, 0, 1, 0], [1.0, 0, 0, 0, 0]).tolist() == torch.eye(2).tolist()  # a head of zeros


def test_models_that_never_came_have_no_share() -> None:
    p = shares([0.0, 1, 2, 3, 4], [1.0, 1, 2, 3, 4], [2.0, 1, 2, 3, 4], known=(0, 2))
    assert p[:, 1].tolist() == [0, 1, 0]
    assert p[0].tolist() == pytest.approx([0.5, 0, 0.5])


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_the_first_phase_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(PFedSim(training, fedavg_rounds=5)), run(FedAvg(training))
    for name in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[name], theirs[name]), name


def test_rounds_by_hand() -> None:
    """FedAvg, then training from its model; then mixed bodies under own heads, by plain autograd, two of three at a
    time."""
    with by_hand(PFedSim(ALL.with_steps(2), fedavg_rounds=1), model=deep, participation=0.67) as loop:
        loop.round()
        w, last = server(loop), {}
        for number in range(2, 8):
            known = sorted(last)
            heads = {j: last[j][35:44].reshape(3, 3).double() for j in known}
            active = loop.schedule.active(loop.pool.seed, number, 3).tolist()
            trained = {}
            for i in active:
                theta = w
                if i in last:
                    alike = {j: max(float(torch.cosine_similarity(heads[i], heads[j], -1).mean()), 0.0) for j in known}
                    closeness = {j: -log(1 - min(0.9999 if i == j else s, 0.9999)) for j, s in alike.items()}
                    body = sum(c * last[j] for j, c in closeness.items()) / sum(closeness.values())
                    theta = torch.cat([body[:35], last[i][35:]])
                for _ in range(2):
                    theta = theta - LR * gradient(loop, i, theta)
                trained[i] = theta
            last |= trained
            report = loop.round()
            for i in active:
                close(state(loop, i, "theta"), last[i], 1e-5)
                close(server(loop, "theta")[i], last[i], 1e-5)
            assert (report.bytes_down, report.bytes_up) == (len(active) * 4 * 47, len(active) * 4 * 48)
        assert torch.equal(server(loop), w)
        assert len(last) == 3


def test_among_strangers_it_is_local_training_from_the_model_of_fedavg() -> None:
    """Heads at right angles, so that nobody is like anybody; none of the heads is trained."""
    training = LocalTraining(lr=0.1, batch=3, steps=4)
    method = PFedSim(training, fedavg_rounds=0)
    with by_hand(method, model=deep) as loop:
        loop.round()
        now, heads = loop.server, torch.zeros(3, 47)
        for m in range(3):
            heads[m, 35 + m : 44 : 3] = 1.0
        theta = torch.where(now.is_head, heads, now.theta)
        loop.server = replace(now, theta=theta, p=_shares(theta, now.known, now.weight))
        assert torch.equal(loop.server.p, torch.eye(3))
        data = loop.pool.federation.cohort(torch.arange(3), seed=loop.pool.seed, round=2)
        alone = sgd(loop.task, theta, data.train.batches(training))
        loop.round()
        assert torch.equal(models(loop), alone)


def test_the_like_share_their_bodies() -> None:
    """Clients k and k + 3 call every class by the same name, which others give to another one."""
    data = tiny_federation((20,) * 6)
    labels = data.labels.clone()
    for m in range(6):
        labels[data.train[m]] = (labels[data.train[m]] + m) % 3
    method = PFedSim(LocalTraining(lr=0.1, batch=20, steps=10), fedavg_rounds=1)
    with Bench(method, federation=replace(data, labels=labels)).loop(Schedule()) as loop:
        for _ in range(8):
            loop.round()
        p = server(loop, "p")
        for m in range(6):
            kin = (m + 3) % 6
            assert float(p[m, kin]) > 1.5 * max(float(p[m, j]) for j in range(6) if j not in (m, kin))


def test_a_late_client_starts_from_the_model_of_fedavg() -> None:
    with by_hand(PFedSim(ALL, fedavg_rounds=1), model=deep, participation=0.34) as loop:
        for _ in range(2):
            loop.round()
        away = int((~server(loop, "known")).nonzero()[0])
        assert torch.equal(loop.algorithm.download(loop.server, torch.tensor([away])).w[0], server(loop))
        never = (~loop.took_part).nonzero().squeeze(1).tolist()
        assert all(torch.equal(models(loop)[m], server(loop)) for m in never)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose a deeper model"):
        PFedSim().check(make_task(linear), Population(3, 0))
    with pytest.raises(ConfigError, match=r"all 100,000 clients: .* GB, more than max_gb=4"):
        PFedSim().check(make_task(deep), Population(100_000, 0))
