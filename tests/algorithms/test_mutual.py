"""FML and FedKD: limits, what travels, and what own and common models learn from each other. Rounds written out are in
kinfed.testing.reference_methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from method_bench import ALL, accuracy_on, by_hand, close, deep, models, one_body, run, server, state
from torch import Tensor, nn

from kinfed import simulate
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedkd import FedKD
from kinfed.algorithms.fml import FML
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.testing import check_reference, tiny_federation, tiny_model

WORK = LocalTraining(batch=5, steps=4, weight_decay=0.01, lr_decay=0.9)


@pytest.mark.parametrize("name", ["fml", "fedkd"])
def test_a_model_travels_each_way(name: str) -> None:
    with by_hand({"fml": FML(ALL), "fedkd": FedKD(ALL)}[name], model=deep) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 4 * 47, 3 * 4 * 48)
    assert check_reference(name) < 1e-6


def test_who_does_not_listen_learns_alone_or_as_fedavg() -> None:
    ours = run(FML(WORK, alpha=1.0, beta=1.0))
    close(ours["personal models"], run(Local(WORK))["personal models"])
    close(ours["server.w"], run(FedAvg(WORK))["server.w"])
    half = run(FML(WORK, alpha=1.0))
    close(half["personal models"], ours["personal models"])
    assert float((half["server.w"] - ours["server.w"]).abs().max()) > 1e-3


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


@pytest.mark.parametrize("method", ["fml", "fedkd"])
def test_the_common_model_is_the_first_architecture(method: str) -> None:
    """27 numbers travel, whatever clients have; features of 3 and 6 numbers are compared by W."""
    data = tiny_federation().with_groups(lambda name: "large" if name in ("client-1", "client-4") else "small")
    with simulate(data, {"small": small, "large": tiny_model}, method, seed=1, participation=1.0) as loop:
        report = loop.round()
        assert report.bytes_down == 6 * 4 * 27
        found = loop.evaluate(keep_models=True)
        assert found.server_model is not None
        assert loop.server.w.shape == (27,)
        assert found.models is not None
        assert found.models[:, -1].tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_mentors_that_know_nothing_of_features_keep_their_projection(hidden: float) -> None:
    with by_hand(FedKD(ALL, hidden=hidden), model=deep) as loop:
        before = loop.algorithm.init_client(loop.task, loop.pool.federation.cohort(torch.arange(3), 7, 1)).projection
        loop.round()
        assert torch.equal(state(loop, 0, "projection"), before[0]) == (hidden == 0.0)
        assert torch.equal(models(loop)[0], state(loop, 0, "theta"))
        assert server(loop).shape == (47,)


@pytest.mark.parametrize(("method", "gain"), [(FML, 0.01), (FedKD, 0.03)])
def test_own_models_learn_from_the_common_one(method: Any, gain: float) -> None:
    """Twelve examples teach nobody what matters; the common model knows, and passes some of it on."""
    work, gains = LocalTraining(lr=0.5, batch=12, steps=5), []
    for seed in (3, 4, 5):
        data = one_body(seed=seed)
        personal, common = accuracy_on(data, method(work))
        assert (common or 0) > 0.9
        gains.append(personal - accuracy_on(data, Local(work))[0])
    assert min(gains) > gain


def test_fml_costs_two_gradients_and_fedkd_is_refused() -> None:
    count: Tensor = torch.tensor([40])
    profile = FML(ALL, weights="equal").privacy(count)
    assert profile is not None
    assert list(profile.per_round or {}) == [2]
    assert not profile.uncovered
    refused = FedKD(ALL).privacy(count)
    assert refused is not None
    assert "how well both models know its batches" in refused.impossible
