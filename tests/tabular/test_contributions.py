"""Who gives and who gains: against runs without a site, sums that must hold, and planted friends."""

from __future__ import annotations

from itertools import combinations
from math import factorial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from kinfed import contributions, runs
from kinfed.errors import ConfigError
from kinfed.server import Schedule
from kinfed.tabular.coalitions import Contributions, coalitions_of
from kinfed.tabular.contribution_page import page
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites

COLUMNS = {"client_column": "site", "label_column": "sick"}
SMALL = {"rounds": 3, "steps": 5}


def table(opposed: str = "d", rows: int = 60, sites: str = "abcd") -> pa.Table:
    """Sites with one law, but for those whose law is the opposite."""
    draw = np.random.default_rng(1)
    site = np.repeat(list(sites), rows)
    x = draw.normal(size=(len(site), 3))
    risk = x @ np.ones(3) * np.where(np.isin(site, list(opposed)), -1, 1) + 0.5 * draw.normal(size=len(site))
    columns = {f"x{k}": x[:, k] for k in range(3)}
    return pa.table({"site": site.tolist(), **columns, "sick": np.where(risk > 0, "yes", "no").tolist()})


@pytest.fixture(scope="module")
def result() -> Contributions:
    return contributions(table(), **COLUMNS, algorithm="fedavg", metric="accuracy", **SMALL)


def test_friends_give_and_the_opposed_site_takes(result: Contributions) -> None:
    friends = [result.pair(a, b) for a in "abc" for b in "abc" if a != b]
    strangers = [result.pair("d", b) for b in "abc"] + [result.pair(a, "d") for a in "abc"]
    assert min(part.value for part in friends) > max(part.value for part in strangers)
    assert all(part.value < 0 for part in strangers)
    assert sum(part.high < 0 for part in strangers) >= 3
    assert result.gains("d").value < -0.3


def test_what_a_site_has_of_all_others_is_its_gain(result: Contributions) -> None:
    for one in result.sites:
        assert sum(part.value for part in one.parts.values()) == pytest.approx(one.gain.value, abs=1e-12)
    assert result.gives("a").value == pytest.approx(np.mean([result.pair("a", b).value for b in "bcd"]), abs=1e-12)


def test_values_are_those_of_runs_of_the_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every coalition as an ordinary run in which the others never come, and the mean over orders by hand."""
    rows, sites = table(sites="abc", opposed="c"), 3
    settings = {"model": "mlr", "participation": 1.0, "seeds": "0", "eval_every": 0, **SMALL}
    got = contributions(rows, **COLUMNS, algorithm="ditto", metric="log_loss", **SMALL)

    def losses(method: str, members: tuple[int, ...]) -> list[float]:
        def only_members(self: Schedule, *_: object) -> object:
            return torch.tensor(members)

        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "active", only_members)
            run = runs.run(federation=federation, algorithms=method, accept="all", **settings)
        judged = run.result(method).evaluation.personal
        return (judged.sums["log_loss"][:, 0] / judged.sums["log_loss"][:, 1]).tolist()

    federation = SiteFit(load_sites(rows, COLUMNS, None, 0), FitSettings(**SMALL)).data
    alone = losses("local", (0, 1, 2))
    worth = {(k,): alone for k in range(sites)}
    for size in (2, 3):
        worth |= {members: losses("ditto", members) for members in combinations(range(sites), size)}
    for j, name in enumerate("abc"):
        others = [k for k in range(sites) if k != j]
        for i in others:
            value = 0.0
            for size in range(len(others)):
                weight = factorial(size) * factorial(len(others) - 1 - size) / factorial(len(others))
                for some in combinations([k for k in others if k != i], size):
                    before, after = tuple(sorted((*some, j))), tuple(sorted((*some, i, j)))
                    value += weight * (worth[before][j] - worth[after][j])
            assert got.pair("abc"[i], name).value == pytest.approx(value, abs=1e-6)


def test_a_result_is_read_as_it_was_saved(result: Contributions, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    assert Contributions.read(tmp_path / "out") == result
    text = (tmp_path / "out" / "contributions.html").read_text("utf-8")
    assert "11 coalitions of 4 sites" in text


def test_a_pair_without_a_value_is_a_dash_on_the_page() -> None:
    rows = table(rows=20)
    sick = [
        "no" if site == "a" else one for site, one in zip(*(rows[n].to_pylist() for n in ("site", "sick")), strict=True)
    ]
    rows = rows.set_column(rows.column_names.index("sick"), "sick", pa.array(sick))
    result = contributions(rows, **COLUMNS, algorithm="fedavg", metric="auroc", accept="all", rounds=1, steps=1)
    assert np.isnan(result.gains("a").value)
    assert "–" in page(result)


def test_too_many_sites_and_one_alone_are_refused() -> None:
    for sites in (1, 11):
        with pytest.raises(ConfigError, match="2 to 10 sites"):
            coalitions_of(sites)
    assert len(coalitions_of(10)) == 1013


def test_methods_that_choose_their_clients_train_the_coalition_alone() -> None:
    """glmm asks everybody; what a stranger gives must not be what a friend gives."""
    result = contributions(table(rows=80), **COLUMNS, algorithm="glmm", metric="log_loss", rounds=15)
    assert result.pair("b", "a").value > result.pair("d", "a").value + 0.01


def test_numbers_are_judged_by_their_own_metric() -> None:
    rows = table()
    number = pa.array([float(k) for k in range(rows.num_rows)])
    rows = rows.set_column(rows.column_names.index("sick"), "sick", number)
    result = contributions(rows, **COLUMNS, algorithm="lmm", rounds=2)
    assert result.metric == "rmse"
    assert all(np.isfinite(one.gain.value) for one in result.sites)
