"""PeFLL: pFedHN's gradient for the same descriptors, slopes by autograd, planted kinds that newcomers are told by."""

from __future__ import annotations

import pytest
import torch
from method_bench import TWO_STEPS, by_hand, close, deep, models, server
from torch import nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.pefll import PeFLL, Up
from kinfed.algorithms.pfedhn import PFedHN
from kinfed.algorithms.pfedhn import Up as HyperUp
from kinfed.core import rng
from kinfed.data import Federation
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.testing import Bench, tiny_federation, tiny_model
from kinfed.testing.workbench import SEED, normalized_model


def test_the_gradient_of_the_hypernetwork_is_pfedhns_where_descriptors_are_embeddings() -> None:
    """pFedHN with plain steps of rate 1 moves by minus the gradient."""
    population, task, ids = tiny_federation((2, 2, 2)).population(SEED), make_task(tiny_model), torch.arange(3)
    sizes = {"hidden": 7, "hidden_layers": 2}
    table = PFedHN(server_lr=1.0, server_momentum=0.0, server_weight_decay=0.0, server_clip=1e9, **sizes)
    ours, theirs = PeFLL(descriptor=1, **sizes), table.init_server(task, population)
    eta = ours.init_server(task, population).eta
    eta.trunk, eta.head, eta.bias = theirs.phi.trunk, theirs.phi.head, theirs.phi.bias
    delta = rng.normal(rng.root(1, "delta"), 3 * task.num_params).view(3, -1).float()
    g = ours.gradient(eta, Up(delta, theirs.phi.embedding, torch.zeros(3, 94), torch.zeros(3, 7)))
    new = table.aggregate(theirs, ids, HyperUp(delta), None).phi  # type: ignore[arg-type]
    close(g.trunk, theirs.phi.trunk - new.trunk, 1e-5)
    close(g.head, theirs.phi.head - new.head, 1e-5)
    close(g.bias, theirs.phi.bias - new.bias, 1e-5)


@pytest.mark.parametrize("hidden_layers", [0, 1, 3])
@pytest.mark.parametrize("descriptor", [1, 4])
def test_a_descriptor_is_read_from_the_size_of_its_network(hidden_layers: int, descriptor: int) -> None:
    method = PeFLL(descriptor=descriptor, hidden=5, hidden_layers=hidden_layers)
    start = method.init_server(make_task(tiny_model), tiny_federation().population(0))
    assert method._descriptor_of(start.eta.trunk) == descriptor


def test_what_travels() -> None:
    """Down: both networks; up: a model's change, a descriptor, and the slopes of the network that describes."""
    with by_hand(PeFLL(TWO_STEPS, hidden=5, hidden_layers=1, descriptor=2), model=deep) as loop:
        report = loop.round()
        h, describes = (2 + 1) * 5 + (5 + 1) * 5 + (5 + 1) * 47, 35 + (3 + 3 + 1) * 5 + (5 + 1) * 2
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * (h + describes), 3 * 4 * (47 + 2 + describes))


def test_running_statistics_are_averaged_and_those_of_descriptions_stay() -> None:
    with by_hand(PeFLL(TWO_STEPS), sizes=(8, 6, 7), model=normalized_model) as loop:
        before = server(loop, "eta.body")[-12:]
        loop.round()
        assert torch.equal(server(loop, "eta.body")[-12:], before)
        assert not torch.equal(server(loop, "statistics"), before)
        close(models(loop)[:, -12:], server(loop, "statistics").expand(3, -1))


def kinds(clients: int, seed: int, per: int = 40) -> Federation:
    """Clients of two kinds, of which one has the two classes the other way round; twelve training examples each."""
    count = clients * per
    x = rng.normal(rng.root(seed, "planted"), count * 4).reshape(count, 4).to(torch.float32)
    rows = torch.arange(count)
    owner, test = rows % clients, rows >= 12 * clients
    y = ((x[:, 0] + x[:, 1] > 0).long() + owner) % 2
    return Federation(
        Features(x), y, Problem.of_classes(2), train=Ragged.grouped(rows[~test], owner[~test], clients),
        val=Ragged.empty(clients), test=Ragged.grouped(rows[test], owner[test], clients),
        names=[str(m) for m in range(clients)],
    )  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_clients_that_nobody_has_seen_get_models_of_their_kind_without_training() -> None:
    """Twelve examples tell the kind, and the kind's model is that of many."""
    work = LocalTraining(lr=0.3, batch=12, steps=5)
    accuracy = {}
    for method in (PeFLL(work, server_lr=5e-3), FedAvg(work)):
        with Bench(method, federation=kinds(40, 3), model=small).loop(chunk=None) as loop:
            for _ in range(45):
                loop.round()
            new = kinds(20, 103)
            data = new.cohort(torch.arange(20), seed=0, round=1)
            down = method.download(loop.server, torch.arange(20))  # type: ignore[arg-type]
            theta = method.personalize(loop.task, method.init_client(loop.task, data), down, data)  # type: ignore
            score = loop.task.score(theta, data.test)
        accuracy[type(method)] = float(score.correct.sum() / score.count.sum())
    assert accuracy[PeFLL] > 0.85
    assert accuracy[FedAvg] < 0.6


def test_privacy_and_memory_are_refused_in_words() -> None:
    profile = PeFLL(TWO_STEPS).privacy(torch.tensor([4]))
    assert profile is not None
    assert "descriptor" in profile.impossible
    with pytest.raises(ConfigError, match="PeFLL's head for a model of"), by_hand(PeFLL(TWO_STEPS, max_gb=1e-9)):
        pass
