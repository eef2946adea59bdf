"""Secure sums in simulations: the fixed point by hand, whole runs against plain averaging, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_user_level import pairs, user_level

import kinfed
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.errors import ConfigError
from kinfed.updates.promises import UserPrivacy
from kinfed.updates.secure_sum import FixedPoint, ProtocolSize, SecureSettings, SecureSum
from kinfed.updates.user_level import Share

SETTINGS: dict[str, Any] = {
    "clients": 6, "rounds": 3, "seeds": (0,), "model": "mlr", "participation": 0.7, "steps": 3, "eval_every": 0,
}  # fmt: skip


def test_a_sum_by_hand() -> None:
    """Range 2, weights of 4 in all: 64 - 2 - 3 bits of room, of which 40 are used."""
    encoding = FixedPoint(2.0, 4)
    assert encoding.bits == 40
    rows = encoding.encode(torch.tensor([[0.5, -2.0], [1.0, 1.5]]), torch.tensor([3, 1]))
    assert rows.tolist() == [[3 * 2**39, -6 * 2**40, 3], [2**40, 3 * 2**39, 1]]
    mean, weight = encoding.decode(rows.sum(0))
    assert mean.tolist() == [(1.5 + 1.0) / 4, (-6.0 + 1.5) / 4]
    assert weight == 4
    assert encoding.holds(rows.sum(0))
    assert not encoding.holds(rows.sum(0) + torch.tensor([2**44, 0, 0]))
    assert not encoding.holds(rows.sum(0) + torch.tensor([0, 0, 1]))


@given(st.floats(1e-6, 1e9), st.integers(1, 10**6), st.integers(1, 50))
def test_no_sum_can_wrap_and_means_are_off_by_half_a_step(largest: float, each: int, clients: int) -> None:
    try:
        encoding = FixedPoint(largest, each * clients)
    except ConfigError:
        assert largest * each * clients > 2**49
        return
    extreme = torch.full((clients, 1), largest, dtype=torch.float64)
    total = encoding.encode(extreme, torch.full((clients,), each)).sum(0)
    assert sum(int(row) for row in encoding.encode(extreme, torch.full((clients,), each))[:, 0]) == int(total[0])
    assert encoding.holds(total)
    assert abs(float(encoding.decode(total)[0]) - largest) <= encoding.step / 2 + 1e-12 * largest


def test_a_mean_is_off_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    up = DeltaUp(torch.randn(5, 1000), torch.tensor([3.0, 1.0, 0.0, 12.0, 5.0]))
    secure = SecureSum(SecureSettings(largest=1e4), ("delta",), 10**10)
    assert secure.fixed_point.step == 2.0**-15  # a coarse one
    mean = secure.mean(up)
    assert up.count is not None
    exact = (up.count[:, None].double() * up.delta.double()).sum(0) / 21
    error = float((mean.delta.double() - exact).abs().max())
    assert 1e-6 < error <= secure.fixed_point.step / 2 + 1e-6


def test_runs_are_those_of_plain_averaging_and_bytes_those_of_the_protocol() -> None:
    runs = [kinfed.run(algorithms="fedavg,ditto,local", secure_sum=on, **SETTINGS) for on in (False, True)]
    for label in ("fedavg", "ditto", "local"):
        plain, secure = (one.result(label) for one in runs)
        assert plain.evaluation.models is not None
        assert secure.evaluation.models is not None
        torch.testing.assert_close(secure.evaluation.models, plain.evaluation.models, rtol=0, atol=1e-5)
    size, width = ProtocolSize(4, 650), 650
    assert runs[1].result("fedavg").bytes_up == 3 * size.up
    assert runs[1].result("fedavg").bytes_down == 3 * (size.down + 4 * 4 * width)
    assert runs[1].result("local").bytes_up == 0


def test_the_noisy_sum_of_user_level_privacy_is_taken_in_fixed_point() -> None:
    up = pairs([3, 0, 0, 4], [0.3, 0, 0, 0.4], [0, 0, 12, 5])
    plain = user_level(UserPrivacy(noise=1.0, clip=0.7)).mean(up, 1)
    secure = user_level(UserPrivacy(noise=1.0, clip=0.7), share=Share(0.7, 3)).mean(up, 1)
    torch.testing.assert_close(secure.a, plain.a)
    torch.testing.assert_close(secure.b, plain.b)


def test_updates_out_of_range_are_left_out_and_few_are_not_added_up() -> None:
    loud = kinfed.run(algorithms="fedavg", secure_sum=True, secure_range=1e-5, **SETTINGS).result("fedavg")
    silent = kinfed.run(algorithms="fedavg", lr=1e-30, **SETTINGS).result("fedavg")
    assert loud.server_models is not None
    assert silent.server_models is not None
    torch.testing.assert_close(loud.server_models.models, silent.server_models.models)  # which never moved
    assert loud.bytes_up == 0


@pytest.mark.parametrize(("settings", "reason"), [
    ({"algorithms": "fedfomo"}, "fedfomo hands clients' models on to other clients .* its server needs single"),
    ({"algorithms": "selffl_control"}, "also sends s,? .*neither averaged nor a number"),
    ({"algorithms": "fedavg", "robust": "median"}, "robust judges single updates"),
    ({"algorithms": "fedavg", "largest_norm": 1.0}, "largest_norm judges single updates"),
    ({"algorithms": "fedavg", "participation": 0.4}, "adds up 3 updates at least .* 2 client"),
    ({"algorithms": "fedavg", "pretrain": 1}, "pre-training sees the data of all clients"),
    ({"algorithms": "fedavg", "secure_range": 1e8, "secure_least": 2}, "secure_least must be .* at least 3"),
    ({"algorithms": "fedavg", "secure_range": float("inf")}, "secure_range must be a number in"),
])  # fmt: skip
def test_what_needs_single_updates_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        kinfed.run(**(SETTINGS | {"secure_sum": True} | settings))
