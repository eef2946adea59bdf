"""Random trees: a round by hand, structure that no rows choose, bytes, and what noise leaves of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kinfed
from kinfed import Federation, simulate
from kinfed.algorithms.trees.random_trees import EDGES, RandomTrees
from kinfed.errors import ConfigError

SITES, EACH = 5, 30
SMALL: dict[str, Any] = {"turns": 4, "trees": 6, "depth": 3}


def federation(sites: int = SITES, seed: int = 0) -> Federation:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(sites * EACH, 3)).astype(np.float32)
    site = np.repeat(np.arange(sites), EACH)
    y = 2.0 * ((x[:, 0] > 0) & (x[:, 1] > 0)) + 0.5 * (site % 3) + 0.1 * draw.normal(size=len(x))
    return Federation.from_arrays(x, y, site)


def leaf_of(x: np.ndarray, feature: np.ndarray, threshold: np.ndarray, depth: int) -> int:
    place = 0
    for _ in range(depth):
        place = 2 * place + (1 if x[feature[place]] <= threshold[place] else 2)
    return int(place) - (2**depth - 1)


def test_a_round_is_that_of_the_formulas() -> None:
    data = federation()
    with simulate(data, "mlr", "random_trees", **SMALL) as loop:
        loop.round()
        before: Any = loop.server
        before = before.clone()
        loop.round()
        after: Any = loop.server
        method: Any = loop.algorithm
        b = loop.pool.states()["rows.b"].numpy()[:, 0]
    feature, split, _ = (one[0, 0] for one in method.structure(before.key, 0, 6, 3))
    threshold, lam = EDGES[split.astype(int) - 1], method.lam
    G, H, level = np.zeros((6, 8)), np.zeros((6, 8)), np.zeros(2)
    for k in range(SITES):
        rows = data.train[k]
        x, y = data.features.gather(rows).numpy(), data.targets[rows].numpy()
        g = (float(before.base) + b[k] - y) / len(y) / SITES
        level += g.sum(), 1 / SITES
        for r in range(6):
            for i in range(len(y)):
                leaf = leaf_of(x[i], feature[r], threshold[r], 3)
                G[r, leaf] += g[i]
                H[r, leaf] += 1 / len(y) / SITES
    step = -level[0] / (level[1] + lam)
    G += H * step
    gain = (G**2 / (H + lam)).sum(1)
    wanted = -method.rate * (gain / gain.sum())[:, None] * G / (H + lam)
    assert float(after.base) == pytest.approx(float(before.base) + step, abs=1e-6)
    np.testing.assert_allclose(after.value[..., 0].numpy(), wanted, atol=1e-5)


def test_no_rows_choose_the_structure_and_another_seed_draws_another() -> None:
    keys = []
    for data, seed in ((federation(), 0), (federation(seed=9), 0), (federation(), 1)):
        with simulate(data, "mlr", "random_trees", seed=seed, **SMALL) as loop:
            server: Any = loop.server
            keys.append(server.key)
    method = RandomTrees(**SMALL)
    one, same, other = (method.structure(key, 0, 6, 3) for key in keys)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one[0], other[0])
    again = method.structure(keys[0], 2, 4, 3)
    assert all(np.array_equal(a[:, :, 2:], b) for a, b in zip(one, again, strict=True))


def test_bytes_are_those_of_leaves_and_features() -> None:
    with simulate(federation(), "mlr", "random_trees", **SMALL) as loop:
        report = loop.round()
    assert report.bytes_up == SITES * 4 * (6 * 8 * 2 + 2 + 3)


def test_it_learns_an_interaction_and_levels_in_its_own_number_of_rounds() -> None:
    result = kinfed.run(
        federation=federation(), algorithms={"random_trees": {"turns": 30}, "fedavg": {}}, model="mlr", rounds=3,
        seeds=(0,), participation=1.0, progress=False,
    )  # fmt: skip
    trees, linear = result.result("random_trees"), result.result("fedavg")
    assert (trees.rounds, linear.rounds) == (31, 3)
    assert trees.personal["rmse"] < 0.7 * linear.personal["rmse"]
    assert trees.personal["rmse"] < trees.server["rmse"]


def test_noise_for_whole_clients_leaves_something_and_histograms_are_refused() -> None:
    settings: dict[str, Any] = {
        "federation": federation(200), "model": "mlr", "rounds": 3, "seeds": (0,), "participation": 1.0,
        "progress": False, "user_noise": 2.0, "user_clip": 1.0, "user_delta": 1e-3,
    }  # fmt: skip
    options = {"turns": 10, "trees": 10, "depth": 3}
    noisy = kinfed.run(algorithms={"random_trees": options}, **settings).result("random_trees")
    assert np.isfinite(noisy.personal["rmse"])
    assert noisy.personal["r2"] > 0.3
    with pytest.raises(ConfigError, match="nothing"):
        kinfed.run(algorithms="trees", **settings)


def test_what_cannot_work_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="not trained by steps"):
        simulate(federation(), "mlr", "random_trees", finetune=3)
    profile = RandomTrees().privacy(torch.tensor([5]))
    assert profile is not None
    assert "leaves of trees" in profile.impossible
