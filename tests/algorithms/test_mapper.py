"""MAPPER: rounds by hand, the limits of its grid, and clients that come to rely on themselves."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, by_hand, close, gradient, mean, models, quadratic, run, server, state
from torch import nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.mapper import MAPPER
from kinfed.server.loop import Loop
from kinfed.testing.workbench import SEED


def loss(loop: Loop, client: int, theta: torch.Tensor) -> float:
    rows = loop.pool.federation.train[client]
    x, y = loop.pool.federation.features.raw[rows], loop.pool.federation.labels[rows]
    return float(nn.functional.cross_entropy(x @ theta[:12].reshape(3, 4).T + theta[12:], y))


def test_rounds_by_hand() -> None:
    """h_k(λ) by steps at h_λ; the λ with the least training loss; then h_c by steps at that mixture."""
    with by_hand(MAPPER(ALL.with_steps(2), grid=3)) as loop:
        own = [loop.task.init(SEED) for _ in range(3)]
        for _ in range(3):
            w, sent, kept = server(loop), [], []
            for m in range(3):
                tried = []
                for lam in (0.0, 0.5, 1.0):
                    v = own[m].clone()
                    for _ in range(2):
                        v = v - LR * lam * gradient(loop, m, lam * v + (1 - lam) * w)
                    tried.append((loss(loop, m, lam * v + (1 - lam) * w), lam, v))
                _, lam, own[m] = min(tried, key=lambda one: one[0])
                w_m = w.clone()
                for _ in range(2):
                    w_m = w_m - LR * (1 - lam) * gradient(loop, m, lam * own[m] + (1 - lam) * w_m)
                sent.append(w_m)
                kept.append(lam)
            loop.round()
            close(server(loop), mean(sent))
            for m in range(3):
                close(state(loop, m, "v"), own[m])
                assert float(state(loop, m, "alpha")) == kept[m]
                close(models(loop)[m], kept[m] * own[m] + (1 - kept[m]) * server(loop))


def test_a_grid_of_zero_is_fedavg_with_equal_weights() -> None:
    ours, theirs = run(MAPPER(ALL, grid=1)), run(FedAvg(ALL, weights="equal"))
    close(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["personal models"], ours["server.w"].expand(6, -1))


@pytest.mark.parametrize("s0", [30.0, 100.0, 400.0])
def test_clients_unlike_the_others_rely_on_themselves(s0: float) -> None:
    with quadratic(MAPPER(ALL.with_steps(5)), s0=s0) as (loop, _):
        for _ in range(10):
            loop.round()
        assert float(loop.evaluate().figures["share"].mean()) > 0.7


def test_bytes_are_one_model_each_way() -> None:
    with by_hand(MAPPER(ALL)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
