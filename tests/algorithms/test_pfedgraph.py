"""pFedGraph: shares by hand, FedAvg and learning alone as limits, planted groups. Rounds written out are in
kinfed.testing.reference_methods."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, WORKS, accuracy_on, by_hand, close, deep, one_body, run
from torch import Tensor, nn

from kinfed.algorithms.common.simplex import nearest_shares
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.local import Local
from kinfed.algorithms.pfedgraph import PFedGraph
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.testing import Bench, check_reference


def test_rounds_and_bytes() -> None:
    assert check_reference("pfedgraph") < 1e-6
    with by_hand(PFedGraph(ALL), model=deep) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * 48)


def test_the_nearest_shares_by_hand() -> None:
    """(0.9, 0.5, −1): τ = 0.2 of the first two; a point of the simplex is its own; a large number takes all."""
    points = torch.tensor([[0.9, 0.5, -1.0], [0.2, 0.3, 0.5], [9.0, 1.0, 1.0]])
    close(nearest_shares(points), torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]))


def test_shares_are_the_least_of_the_program() -> None:
    """No other point of the simplex does better."""
    d, p, alpha = torch.tensor([-1.0, 0.3, -0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double(), 0.7
    a = nearest_shares((p - d / (2 * alpha))[None])[0]

    def value(x: Tensor) -> Tensor:
        return alpha * (x - p).square().sum(-1) + x @ d

    others = rng.uniform(rng.root(1, "others"), 3000).view(-1, 3).double()
    others = others / others.sum(1, keepdim=True)
    assert bool((value(others) >= value(a) - 1e-12).all())


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_firm_shares_are_fedavg(weights: str) -> None:
    """With everybody called; each client then starts from FedAvg's mean."""
    training = WORKS["steps"]
    ours = run(PFedGraph(training, alpha=1e9, lam=0.0, weights=weights), participation=1.0)  # type: ignore[arg-type]
    theirs = run(FedAvg(training, weights=weights), participation=1.0)  # type: ignore[arg-type]
    close(ours["personal models"], theirs["personal models"], 1e-5)


def test_without_firmness_models_that_go_apart_stay_apart() -> None:
    """α → 0: shares for cosines that count as 1 alone, here nobody's but the own."""
    ours = run(PFedGraph(WORKS["steps"], alpha=1e-9, lam=0.0, alike=1.0), participation=1.0)
    close(ours["personal models"], run(Local(WORKS["steps"]), participation=1.0)["personal models"], 1e-5)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_clients_of_a_kind_find_each_other(seed: int) -> None:
    """Clients call the classes by four sets of names, those of numbers m, m + 4, ... by the same."""
    work, data = LocalTraining(lr=0.5, batch=12, steps=5), one_body(names=True, seed=seed)
    with Bench(PFedGraph(work), federation=data, model=lambda: nn.Linear(10, 4)).loop(chunk=None) as loop:
        for _ in range(5):
            loop.round()
        group = torch.arange(30) % 4
        of_group = (loop.server.a * (group[:, None] == group)).sum(1)
    assert float(of_group.mean()) > 0.9
    assert accuracy_on(data, PFedGraph(work))[0] > accuracy_on(data, Local(work))[0] + 0.2


def test_privacy() -> None:
    profile = PFedGraph(ALL).privacy(torch.tensor([4]))
    assert profile is not None
    assert list(profile.uncovered) == ["the number of training examples of each client"]
