"""The generalized linear mixed model as a method: glmer's figures through rounds, boundaries, what is refused."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from realdata import real_data

from kinfed.algorithms.common.by_sums import Posterior
from kinfed.algorithms.common.newton_totals import FITTED, ONE_CLASS, SEPARATED
from kinfed.data import Federation
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.updates import SecureSettings, SecureSum


def federation(x, y, site):
    return Federation.from_arrays(x, y, site, test_rows=np.zeros(len(y), dtype=bool), task="classification")


def after(data, rounds=25, **options):
    with simulate(data, "mlr", "glmm", **options) as loop:
        reports = list(loop.rounds(rounds))
    return loop, reports


@pytest.fixture(scope="module")
def contraception():
    table = pq.read_table(real_data("contraception") / "contraception" / "train-00000-of-00001.parquet").to_pandas()
    x = [table.age / 10, table.age**2 / 100, table.urban == "Y", *(table.livch == level for level in ("1", "2", "3+"))]
    return federation(np.column_stack(x).astype(np.float32), table.label.to_numpy(), table.client.to_numpy(str))


def test_rounds_lead_to_glmers_fit_and_stop(contraception):
    """glmer(label ~ age + age2 + urban + livch + (1 | client), binomial, nAGQ = 9): −1186.22944249, sd 0.47863654."""
    loop, reports = after(contraception, nodes=9)
    point = loop.server.estimate.best.numpy()
    assert float(loop.server.estimate.value) == pytest.approx(-1186.22944249, abs=1e-5)  # columns are of float32
    assert point[-1] == pytest.approx(0.47863654, abs=1e-5)
    assert point[:4] == pytest.approx([-1.0354212722, 0.035327444, -0.4563206377, 0.6967085469], abs=1e-4)
    assert sum(report.active > 0 for report in reports) <= 15
    assert reports[-1].active == 0
    p = 7  # value, gradient, curvature, the intercept's sum of squares, and rows
    assert reports[0].bytes_up == 60 * 8 * (1 + (p + 1) + (p + 1) * (p + 2) // 2 + 1 + 1)
    se = np.sqrt(np.diag(loop.server.estimate.covariance.numpy()))
    assert se[0] == pytest.approx(0.1761015541, rel=1e-3)
    assert int(loop.server.estimate.verdict) == FITTED


def test_secure_sums_lead_to_the_same_fit(contraception):
    plain, _ = after(contraception)
    hidden, _ = after(contraception, stages=(SecureSum(SecureSettings(), ("sums",), len(contraception)),))
    assert hidden.server.estimate.best.numpy() == pytest.approx(plain.server.estimate.best.numpy(), abs=1e-5)


def test_personal_models_are_modes_and_carry_their_variance(contraception):
    """ranef of the first district: −0.7512392353."""
    loop, _ = after(contraception, nodes=9)
    row = loop.evaluate("train", keep_models=True).models[0]
    log_odds = row[13] - row[12]  # the biases lie behind two rows of six weights
    assert float(log_odds) == pytest.approx(-1.0354212722 - 0.7512392353, abs=1e-4)
    spread, noise, _ = Posterior().uncertainty(torch.zeros(1, 1, 6), row[None, 14:-1])
    assert 0.01 < float(spread) < 0.3
    assert float(noise) == 0


def table(count=8, rows=20, seed=0):
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(count), rows)
    return draw.normal(size=(len(site), 2)).astype(np.float32), site, draw


def test_separated_classes_are_held_by_a_prior():
    x, site, _ = table()
    loop, reports = after(federation(x, (x[:, 0] > 0).astype(int), site), 40)
    assert int(loop.server.estimate.verdict) == SEPARATED
    assert float(loop.server.estimate.ridge) == 0.5
    assert 2 < float(loop.server.estimate.best[1]) < 15
    assert reports[-1].active == 0


def test_sites_with_one_class_each_have_no_effects_of_sites():
    x, site, _ = table()
    loop, _ = after(federation(x, site % 2, site), 60)
    assert int(loop.server.estimate.verdict) == ONE_CLASS
    assert bool(torch.isfinite(loop.server.estimate.best).all())


def test_columns_that_others_determine_are_left_out_of_the_table():
    x, site, draw = table()
    y = (draw.uniform(size=len(x)) < 1 / (1 + np.exp(-x[:, 0]))).astype(int)
    loop, _ = after(federation(np.column_stack([x, x[:, 0] - x[:, 1]]), y, site))
    assert loop.server.estimate.basis.tolist() == [True, True, True, False]


def test_it_is_refused_in_words():
    x, site, draw = table()
    with pytest.raises(ConfigError, match="for two classes or counts"):
        simulate(federation(x, draw.integers(0, 3, len(x)), site), "mlr", "glmm")
    with pytest.raises(ConfigError, match="choose --model mlr"):
        simulate(federation(x, site % 2, site), "mlp", "glmm")
