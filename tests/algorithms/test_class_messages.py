"""FD, FedGH and FedTGP beside FedProto: what is sent for each class, limits, and planted classes. Rounds written out in
plain torch are in kinfed.testing.reference_methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_bench import ALL, WORKS, by_hand, close, deep, info, run
from torch import Tensor, nn

from kinfed.algorithms.fd import FD, Server, Up
from kinfed.algorithms.fedgh import FedGH
from kinfed.algorithms.fedproto import FedProto
from kinfed.algorithms.fedproto import Up as Prototypes
from kinfed.algorithms.fedtgp import FedTGP
from kinfed.algorithms.local import Local
from kinfed.core import rng
from kinfed.data import Federation
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.testing import Bench, check_reference

CLIENTS, CLASSES, WIDTH, EACH, TESTS = 10, 4, 6, 12, 16
WORK = LocalTraining(lr=0.3, batch=12, steps=8)


def dealt(labels: Tensor, places: Tensor, seed: int) -> Federation:
    """Examples around 2.5 e_place, the first EACH of every client for training."""
    count = CLIENTS * (EACH + TESTS)
    noise = rng.normal(rng.root(seed, "planted"), count * WIDTH).reshape(count, WIDTH).to(torch.float32)
    rows = torch.arange(count)
    owner, test = rows % CLIENTS, rows >= EACH * CLIENTS
    return Federation(
        Features(noise + 2.5 * torch.eye(WIDTH)[places]), labels, Problem.of_classes(CLASSES),
        train=Ragged.grouped(rows[~test], owner[~test], CLIENTS), val=Ragged.empty(CLIENTS),
        test=Ragged.grouped(rows[test], owner[test], CLIENTS), names=[str(m) for m in range(CLIENTS)],
    )  # fmt: skip


def two_of_four(seed: int) -> Federation:
    """Clients train on two classes each and are tested on all four."""
    rows = torch.arange(CLIENTS * (EACH + TESTS))
    example = rows // CLIENTS
    y = torch.where(example >= EACH, example % CLASSES, (rows % CLIENTS + example % 2) % CLASSES)
    return dealt(y, y, seed)


def coins(seed: int) -> Federation:
    """Classes 0 and 1 look the same, and so do 2 and 3: what is right is a chance of a half."""
    y = (rng.uniform(rng.root(seed, "coins"), CLIENTS * (EACH + TESTS)) * CLASSES).to(torch.int64)
    return dealt(y, y // 2, seed)


def learnt(method: Any, data: Federation) -> dict[str, Tensor | float]:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    with Bench(method, federation=data, model=network).loop(chunk=None) as loop:
        for _ in range(15):
            loop.round()
        score = loop.evaluate().personal
        assert score is not None
        count = score.count.sum()
        return {"accuracy": float(score.correct.sum() / count), "loss": float(score.loss.sum() / count)} | {
            name: tensor.clone() for name, tensor in loop.server.named().items()
        }


@pytest.mark.parametrize(("name", "down", "up"), [("fd", 9.75, 9.75), ("fedgh", 12, 9.75), ("fedtgp", 9.75, 12)])
def test_what_travels_is_about_classes_alone(name: str, down: float, up: float) -> None:
    """Numbers of four bytes; which classes are known is a byte each."""
    method = {"fd": FD(ALL), "fedgh": FedGH(ALL), "fedtgp": FedTGP(ALL, server_steps=1)}[name]
    with by_hand(method, model=deep) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * down, 3 * 4 * up)
    assert check_reference(name) < 1e-6


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
@pytest.mark.parametrize("method", [lambda t: FD(t, gamma=0.0), lambda t: FedTGP(t, lam=0.0, server_steps=1)])
def test_without_the_pull_they_are_local_training(method: Any, training: LocalTraining) -> None:
    assert torch.equal(run(method(training))["personal models"], run(Local(training))["personal models"])


def test_everybodys_first_round_is_local() -> None:
    wanted = run(Local(WORKS["steps"]), rounds=1)["personal models"]
    for method in (FD(WORKS["steps"], gamma=9.0), FedTGP(WORKS["steps"], lam=9.0), FedGH(WORKS["steps"])):
        assert torch.equal(run(method, rounds=1)["personal models"], wanted)


def test_prototypes_that_are_not_trained_are_fedprotos() -> None:
    ours, theirs = run(FedTGP(WORKS["steps"], server_steps=0)), run(FedProto(WORKS["steps"]))
    for name in ("personal models", "server.prototypes", "server.known"):
        assert torch.equal(ours[name], theirs[name])


def test_a_head_that_is_not_trained_stays_at_the_start() -> None:
    state = run(FedGH(WORKS["steps"], server_steps=0))
    start = Bench(FedGH(WORKS["steps"])).make_task()
    weight, bias = start.head.split(start.init(7)[None])
    assert bias is not None
    assert torch.equal(state["server.weight"], weight[0])
    assert torch.equal(state["server.bias"], bias[0])


def test_targets_are_the_others() -> None:
    """Client 0 hears of class 0 from client 1 alone; of class 1, which it alone has, nothing."""
    said, known = torch.zeros(3, 2, 2), torch.tensor([[True, True], [True, False], [False, False]])
    said[0], said[1, 0] = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0.6, 0.4])
    down = FD(ALL).download(Server(said, known), torch.arange(3))
    close(down.target[0], torch.tensor([[0.6, 0.4], [0.0, 0.0]]))
    assert down.known.tolist() == [[True, False], [True, True], [True, True]]
    close(down.target[2], torch.tensor([[0.75, 0.25], [0.2, 0.8]]))
    new = FD(ALL).aggregate(
        Server(said, known), torch.tensor([2]), Up(said[:1], torch.tensor([[True, False]])), info(clients=3)
    )
    assert new.known.tolist() == [[True, True], [True, False], [True, False]]


def test_the_margin_is_the_largest_distance_to_a_nearest_class() -> None:
    """Means at 0, 1 and 4: the nearest are 1, 1 and 3 away. One class has none."""
    method, at = FedTGP(ALL), torch.tensor([[[0.0], [1.0], [5.0]], [[0.0], [1.0], [3.0]]])
    everything = torch.ones(2, 3)
    assert method._margin(Prototypes(at, everything), everything > 0) == 3.0
    assert replace(method, margin=0.5)._margin(Prototypes(at, everything), everything > 0) == 0.5
    one = torch.tensor([[1.0, 0, 0], [1.0, 0, 0]])
    assert method._margin(Prototypes(at, one), one > 0) == 0.0


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_fd_is_less_certain_where_nothing_is_certain(seed: int) -> None:
    data = coins(seed)
    assert learnt(FD(WORK), data)["loss"] < learnt(Local(WORK), data)["loss"] - 0.2  # type: ignore[operator]


def test_fedgh_knows_classes_that_a_client_lacks() -> None:
    gains = []
    for seed in (3, 4, 5):
        data = two_of_four(seed)
        ours, alone = (learnt(method, data)["accuracy"] for method in (FedGH(WORK, server_lr=0.5), Local(WORK)))
        gains.append(ours - alone)  # type: ignore[operator]
    assert min(gains) > 0.03
    assert sum(gains) / 3 > 0.08


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_trained_prototypes_are_further_apart(seed: int) -> None:
    data, apart = two_of_four(seed), []
    for method in (FedProto(WORK), FedTGP(WORK)):
        P = learnt(method, data)["prototypes"]
        assert isinstance(P, Tensor)
        apart.append(float(torch.cdist(P, P).fill_diagonal_(torch.inf).min()))
    assert apart[1] > 1.1 * apart[0]


@pytest.mark.parametrize("method", [FD, FedGH, FedTGP])
def test_what_is_said_of_classes_is_not_private(method: Any) -> None:
    assert "of its examples of every class" in method(ALL).privacy(torch.tensor([4])).impossible.replace("for", "of")
