"""pFedHN against server steps worked by hand and against a hypernetwork of torch modules trained by torch's SGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, TWO_STEPS, by_hand, close, gradient, linear, models, quadratic
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.pfedhn import Outer, PFedHN, Server, Up
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.testing import tiny_federation
from kinfed.testing.workbench import SEED

P = 15
ROUND = RoundInfo(1, tiny_federation((2, 2, 2)).population(SEED))


def fresh(method: PFedHN, clients: int = 3) -> Server:
    return method.init_server(make_task(linear), tiny_federation((2,) * clients).population(SEED))


def test_a_server_step_by_hand() -> None:
    """One number per embedding, one unit, no hidden layer: f = a e + c, θ = h f + b.

    Δh = −Δθ f, Δb = −Δθ, Δa = −(h·Δθ) e, Δc = −(h·Δθ), Δe = −(h·Δθ) a; all times −α."""
    method = PFedHN(
        server_lr=0.1,
        server_momentum=0.0,
        server_weight_decay=0.0,
        embedding=1,
        hidden=1,
        hidden_layers=0,
        server_clip=1e9,
    )
    server = fresh(method)
    e, (a, c), h, b = server.phi.embedding[1, 0], server.phi.trunk, server.phi.head[:, 0], server.phi.bias
    f = a * e + c
    close(method.download(server, torch.tensor([1])).theta[0], h * f + b)
    delta = torch.linspace(-1, 2, P)
    new = method.aggregate(server, torch.tensor([1]), Up(delta[None]), ROUND).phi
    s = h @ delta
    close(new.head[:, 0], h + 0.1 * delta * f)
    close(new.bias, b + 0.1 * delta)
    close(new.trunk, torch.stack([a + 0.1 * s * e, c + 0.1 * s]))
    close(new.embedding[1, 0], e + 0.1 * s * a)
    assert torch.equal(new.embedding[[0, 2]], server.phi.embedding[[0, 2]])


class Reference(nn.Module):
    """The same hypernetwork as torch modules."""

    def __init__(self, server: Server, hidden: int, layers: int) -> None:
        super().__init__()
        width = server.phi.embedding.shape[1]
        sizes = [(width, hidden)] + [(hidden, hidden)] * layers
        self.trunk = nn.ModuleList(nn.Linear(i, o) for i, o in sizes)
        self.head = nn.Linear(hidden, P)
        flat = [p for layer in self.trunk for p in (layer.weight, layer.bias)]
        nn.utils.vector_to_parameters(server.phi.trunk.clone(), flat)
        nn.utils.vector_to_parameters(torch.cat([server.phi.head.flatten(), server.phi.bias]), self.head.parameters())

    def forward(self, e: Tensor) -> Tensor:
        for number, layer in enumerate(self.trunk):
            e = layer(e.relu() if number else e)
        return self.head(e)


@pytest.mark.parametrize("clip", [50.0, 0.3])
def test_rounds_of_one_client_are_torchs_sgd_on_the_hypernetwork(clip: float) -> None:
    method = PFedHN(server_lr=0.2, hidden=7, hidden_layers=2, server_clip=clip, server_weight_decay=0.01)
    server = fresh(method)
    network = Reference(server, 7, 2)
    embeddings = nn.ParameterList(row.clone() for row in server.phi.embedding)
    settings = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    trained = torch.optim.SGD(network.parameters(), **settings)
    each = [torch.optim.SGD([e], **settings) for e in embeddings]
    for number, client in enumerate((0, 2, 0, 1, 0)):
        ids = torch.tensor([client])
        theta = method.download(server, ids).theta
        with torch.no_grad():
            close(theta[0], network(embeddings[client]))
        delta = torch.sin(torch.arange(P) + number).float()[None]
        network.zero_grad()
        each[client].zero_grad()
        network(embeddings[client]).backward(-delta[0])
        nn.utils.clip_grad_norm_(network.parameters(), clip)
        nn.utils.clip_grad_norm_([embeddings[client]], clip)
        trained.step()
        each[client].step()
        server = method.aggregate(server, ids, Up(delta), ROUND)
    close(server.phi.embedding, torch.stack(list(embeddings)), 1e-5)
    close(server.phi.head, network.head.weight, 1e-5)
    close(server.phi.bias, network.head.bias, 1e-5)


@pytest.mark.parametrize("training", [ALL, LocalTraining(batch=5, steps=4)], ids=["all", "some"])
def test_with_silent_features_it_is_fedavg(training: LocalTraining) -> None:
    """A trunk and a head of zeros get no gradient from one another: the bias alone moves, by the mean of updates."""
    method = PFedHN(training, server_lr=1.0, server_momentum=0.0, server_weight_decay=0.0, server_clip=1e9, hidden=4)
    with (
        by_hand(method, participation=0.67) as ours,
        by_hand(FedAvg(training, weights="equal"), participation=0.67) as theirs,
    ):
        phi = ours.server.phi
        silent = replace(phi, trunk=torch.zeros_like(phi.trunk), head=torch.zeros_like(phi.head))
        ours.server = replace(ours.server, phi=silent)
        for _ in range(4):
            ours.round()
            theirs.round()
        close(models(ours), theirs.server.w.expand(3, -1))


def test_of_several_clients_the_mean_moves_the_network_and_each_its_embedding() -> None:
    method = PFedHN(server_momentum=0.0, server_weight_decay=0.0, hidden=5, hidden_layers=1)
    server = fresh(method)
    delta = torch.linspace(-1, 1, 2 * P).reshape(2, P)
    both = method.aggregate(server, torch.tensor([0, 2]), Up(delta), ROUND).phi
    first = method.aggregate(server, torch.tensor([0]), Up(delta[:1]), ROUND).phi
    second = method.aggregate(server, torch.tensor([2]), Up(delta[1:]), ROUND).phi
    for name in ("trunk", "head", "bias"):
        close(getattr(both, name), (getattr(first, name) + getattr(second, name)) / 2)
    close(both.embedding, torch.stack([first.embedding[0], server.phi.embedding[1], second.embedding[2]]))


def test_a_round_is_local_training_and_one_server_step() -> None:
    method = PFedHN(training=ALL, hidden=6, hidden_layers=1)
    with by_hand(method, participation=0.67) as loop:
        start = loop.server
        before = models(loop)
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (2 * 4 * P, 2 * 4 * P)
        ids = loop.schedule.active(SEED, 1, 3)
        delta = torch.stack([-LR * gradient(loop, m, before[m]) for m in ids.tolist()])
        wanted = method.aggregate(start, ids, Up(delta), ROUND)
        close(loop.server.named()["phi.head"], wanted.phi.head)
        close(models(loop), method.download(wanted, torch.arange(3)).theta)


def test_one_network_has_room_for_the_optimum_of_every_client() -> None:
    """Quadratic losses around z_m: no single model fits, and all that is trained is the network at the server."""
    with quadratic(PFedHN(TWO_STEPS, server_lr=0.05)) as (loop, world):
        for _ in range(80):
            loop.round()
        assert float(world.z.std()) > 0.5
        close(models(loop), world.z, 0.05)


def test_clients_start_around_the_common_start_and_differ() -> None:
    task = make_task(linear)
    theta = PFedHN().download(fresh(PFedHN(), 40), torch.arange(40)).theta
    assert not torch.allclose(theta[0], theta[1])
    assert float((theta.mean(0) - task.init(SEED)).abs().max()) < 0.3
    server = fresh(PFedHN(), 40)
    assert server.phi.embedding.shape == (40, 11)
    assert float(server.phi.head.abs().max()) <= 0.1
    assert torch.equal(server.phi.bias, task.init(SEED))


def test_bad_options_and_models_too_large() -> None:
    for options, match in (
        ({"server_lr": 0}, "server_lr must be positive"),
        ({"server_clip": -1}, "clip must be positive"),
        ({"server_momentum": 1}, "server_momentum"),
        ({"server_weight_decay": -1}, "server_weight_decay"),
        ({"hidden": 0}, "hidden"),
        ({"embedding": 0}, "embedding"),
        ({"hidden_layers": -1}, "hidden_layers"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_algorithm("pfedhn", LocalTraining(), options)
    clients: Any = tiny_federation().population(SEED)
    # 3 x 4 bytes x 101 x 15 parameters
    PFedHN(max_gb=2.5e-5).check(make_task(linear), clients)
    with pytest.raises(ConfigError, match=r"15 parameters takes 0.0 GB .* lower hidden, or raise max_gb"):
        PFedHN(max_gb=2.4e-5).check(make_task(linear), clients)


@pytest.mark.parametrize(("n", "parameters"), [(1, 7), (5, 7), (9, 4), (3, 0)])
def test_the_norm_of_a_sum_of_outer_products(n: int, parameters: int) -> None:
    torch.manual_seed(n)
    outer = Outer(torch.randn(n, parameters), torch.randn(n, 6))
    assert torch.allclose(outer.norm(), (outer.left.T @ outer.right).norm(), rtol=1e-5)
    opposite = Outer(torch.tensor([[1e4, 3.0], [-1e4, -3.0]]), torch.tensor([[2.0, 1e3], [2.0, 1e3]]))
    assert opposite.norm() == 0  # also where rounding leaves less than nothing
