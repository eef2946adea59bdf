"""User-level noise that clients add themselves: exact draws, what a client adds, and what a simulated run promises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import kinfed
from kinfed.errors import ConfigError
from kinfed.privacy import noise as noise_module
from kinfed.privacy.ledger import Event
from kinfed.privacy.noise import AnswerDraws, Secret
from kinfed.records.compare import same_results
from kinfed.report import build
from kinfed.runs.method_run import Interrupted
from kinfed.testing import tiny_federation, tiny_model
from kinfed.updates.promises import UserPrivacy
from kinfed.updates.user_level import Share

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

from kinfed.privacy.accountant import epsilon


def draws(number: int) -> AnswerDraws:
    return Secret(bytes(32)).draws(bytes([number]), bytes(32))


# ---- whole noise ----


@pytest.mark.parametrize("deviation", [1, 2, 7])
def test_whole_noise_has_the_chances_of_its_distribution(deviation: int) -> None:
    sample = draws(deviation).whole_noise(deviation, 100_000).numpy()
    values = np.arange(-40 * deviation, 40 * deviation + 1)
    chance = np.exp(-(values**2) / (2 * deviation**2))
    expected = len(sample) * chance / chance.sum()
    values, expected = values[expected > 5], expected[expected > 5]
    seen = np.array([(sample == value).sum() for value in values])
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(values) - 1) > 1e-3


def test_large_whole_noise_is_normal() -> None:
    sample = draws(0).whole_noise(2**40 + 1, 50_001)
    assert len(sample) == 50_001
    assert stats.kstest(sample.numpy() / 2.0**40, "norm").pvalue > 1e-3


def test_eighty_digits_decide_as_floating_point_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where floating point is never believed: every attempt is decided exactly, and nothing changes."""
    quick = draws(1).whole_noise(1000, 200)
    monkeypatch.setattr(noise_module, "UNSURE", 2.0)
    calls = []
    precise = noise_module._precise
    monkeypatch.setattr(
        noise_module, "_precise", lambda *parts: calls.append(1) or precise(parts[0], np.zeros(3, "<u8"))
    )
    assert torch.equal(draws(1).whole_noise(1000, 200), quick)
    assert len(calls) > 400


# ---- a client's summand ----


@given(st.floats(0.1, 100), st.integers(1, 50), st.integers(0, 49), st.integers(1, 10**6))
def test_honest_shares_make_the_whole_noise_whoever_else_conspires(
    noise: float, honest: int, conspirators: int, width: int
) -> None:
    """The sum of what honest clients add has variance (z B)² at least, as a client sees it that trusts fewer."""
    share, own = Share(1.0, 100, noise, honest), max(honest - conspirators, 1)
    others = (own - 1) * share.deviation(width, honest) ** 2
    longest = 2.0**share.encoding.bits + math.sqrt(width) / 2
    assert share.deviation(width, own) ** 2 + others >= (noise * longest) ** 2
    assert share.deviation(width, honest) <= 1.001 * noise / math.sqrt(honest) * longest + 2


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_a_client_changes_the_sum_by_what_the_noise_is_made_for(row: list[float], clip: float) -> None:
    share = Share(clip, 10, 1.0, 3)
    summand = share.encode(torch.tensor([row]), lambda deviation, count: torch.zeros(count, dtype=torch.int64))
    assert int(summand[-1]) == 1
    length = math.sqrt(sum(int(number) ** 2 for number in summand[:-1]))
    assert length <= math.sqrt(3) * share.deviation(len(row), 3)  # with z = 1, H = 3


def test_sums_have_room_for_their_noise() -> None:
    share = Share(1.0, 1000, 50.0, 3)
    total = sum(share.encode(torch.zeros(1, 20), draws(client).whole_noise) for client in range(200))
    assert isinstance(total, torch.Tensor)
    assert share.encoding.holds(total)
    with pytest.raises(ConfigError, match="do not fit into 64 bits"):
        Share(1.0, 2**40, 1e6, 1).encoding.step  # noqa: B018


# ---- a simulated run ----

RUN: dict[str, Any] = {
    "federation": tiny_federation((8,) * 6), "model": tiny_model, "rounds": 4, "steps": 2, "batch": 5, "seeds": (0,),
    "eval_every": 2, "checkpoint_every": 1, "algorithms": "fedavg,ditto,local", "secure_sum": True,
    "user_at_nodes": True, "participation": 0.67,
}  # fmt: skip


def user_privacy(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())["results"][0]["user_privacy"]
    return result


def test_a_run_says_what_it_promises_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = RUN | {"user_epsilon": 4.0, "user_conspirators": 1, "warm_start": 1}
    whole = kinfed.run(**settings, out=tmp_path / "whole")
    said = user_privacy(tmp_path / "whole")
    assert said["at_nodes"]
    assert said["rounds"] == 5
    assert said["neighbours"] == "one client's data or none"
    assert 3.9 < said["epsilon"] <= 4.0
    assert said["epsilon"] == epsilon((Event(1.0, 1, 5),), said["noise"], 1e-5)  # a client that all rounds call
    page = build([tmp_path / "whole"]).read_text()
    assert "also against the server and up to 1 clients that conspire with it" in page

    calls = iter(range(100))
    with pytest.raises(Interrupted):
        kinfed.run(**settings, out=tmp_path / "stopped", should_stop=lambda: next(calls) >= 5)
    resumed = kinfed.run(**settings, out=tmp_path / "stopped", resume=True)
    assert not same_results(tmp_path / "whole", tmp_path / "stopped")
    for ours, theirs in zip(whole.results, resumed.results, strict=True):
        assert ours.server_model is None or torch.equal(ours.server_model, theirs.server_model)


@pytest.mark.parametrize(("conspirators", "deviation"), [(0, math.sqrt(6 / 3)), (2, math.sqrt(6))])
def test_the_sum_of_six_clients_has_the_noise_of_six_shares(conspirators: int, deviation: float) -> None:
    """Steps of nearly nothing: what moves the model in a round is the noise of all, z C √(n / H) / E."""
    wide = kinfed.Federation.from_arrays(
        np.random.default_rng(0).normal(size=(48, 700)).astype(np.float32), np.arange(48) % 3, np.arange(48) // 8
    )
    settings = RUN | {"federation": wide, "model": "mlr", "lr": 1e-12, "rounds": 2, "participation": 1.0}
    settings |= {"algorithms": "fedavg", "user_noise": 2.0, "user_clip": 0.5, "user_conspirators": conspirators}
    (one,), (other,) = (kinfed.run(**(settings | {"rounds": rounds})).results for rounds in (1, 2))
    move = other.server_model - one.server_model
    assert float(move.std()) == pytest.approx(2.0 * 0.5 * deviation / 6, rel=0.05)


def test_a_round_with_too_few_clients_changes_nothing() -> None:
    settings = RUN | {"algorithms": "fedavg", "user_noise": 5.0, "secure_least": 4, "rounds": 1}
    start = kinfed.run(**(settings | {"dropout": 0.99, "rounds": 1})).results[0]
    again = kinfed.run(**(settings | {"dropout": 0.99, "rounds": 3})).results[0]
    assert torch.equal(start.server_model, again.server_model)
    assert again.user_privacy["epsilon"] > start.user_privacy["epsilon"]  # who was called is counted all the same


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secure_sum": False}, "set secure_sum, too"),
        ({"user_quantile": 0.5}, "give user_clip alone"),
        ({"user_conspirators": 3}, "no client is left that adds noise"),
        ({"user_at_nodes": False, "user_conspirators": 1}, "set user_at_nodes, too"),
    ],
)
def test_what_would_make_the_promise_untrue_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        kinfed.run(**(RUN | {"user_noise": 1.0} | settings))


def test_settings_that_only_say_where_noise_is_added_are_no_privacy() -> None:
    with pytest.raises(ConfigError, match="got neither"):
        kinfed.run(**RUN)
    assert UserPrivacy(noise=1.0).at_nodes is False
