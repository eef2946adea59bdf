"""Stratified Cox regression as a method, against R's survival 3; baselines of sites; what is refused, and said.

d <- as.data.frame(arrow::read_parquet("train-00000-of-00001.parquet"))
m <- coxph(Surv(time_days, event) ~ age + nodes + pgr + er + meno + grade + hormon + size + strata(client), d,
           ties = "efron", eps = 1e-12); coef(m); sqrt(diag(vcov(m))); m$loglik[2]
"""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from realdata import real_data

from kinfed.algorithms.common.newton_totals import FITTED, SEPARATED
from kinfed.data import Federation
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.updates import SecureSettings, SecureSum


def federation(x, time, event, site, **options):
    """All rows are training rows."""
    y = np.stack([time, event], 1).astype(float)
    return Federation.from_arrays(x, y, site, test_rows=np.zeros(len(y), dtype=bool), task="survival", **options)


def after(data, rounds=12, **options):
    with simulate(data, "mlr", "cox", **options) as loop:
        reports = list(loop.rounds(rounds))
    return loop, reports


def read(folder, columns):
    table = pq.read_table(real_data(folder) / folder / "train-00000-of-00001.parquet").to_pandas()
    x = np.column_stack([column(table) for column in columns]).astype(np.float32)
    return x, table.time_days.to_numpy(float), table.event.to_numpy(float), table.client.to_numpy(str)


@pytest.fixture(scope="module")
def rotterdam():
    columns = [lambda t, n=n: t[n] for n in ("age", "nodes", "pgr", "er")]
    columns += [lambda t: t.meno == "1", lambda t: t.grade.astype(int), lambda t: t.hormon == "1"]
    columns += [lambda t: t["size"] == ">50", lambda t: t["size"] == "20-50"]
    return federation(*read("rotterdam_gbsg", columns))


@pytest.fixture(scope="module")
def tcga():
    columns = [lambda t, n=n: t[n] for n in ("age_at_index", "race_white", "race_black or african american")]
    return federation(*read("tcga_brca", columns))


def test_rounds_lead_to_coxphs_fit_and_stop(rotterdam):
    loop, reports = after(rotterdam)
    estimate = loop.server.estimate
    wanted = [0.0026241796717, 0.0662439959038, -0.000206543184593, -6.04112440685e-06]
    wanted += [0.0922109277495, 0.339894467867, -0.17415891584, 0.619132842691, 0.365259300517]
    assert estimate.fit[0][1:] == pytest.approx(wanted, rel=1e-8)
    assert float(estimate.value) == pytest.approx(-14321.3515336273, abs=1e-8)
    assert np.sqrt(np.diag(estimate.covariance))[1:3] == pytest.approx([0.003029968011, 0.003608388172], rel=1e-8)
    assert sum(report.active > 0 for report in reports) <= 7
    assert reports[-1].active == reports[-1].bytes_up == 0
    assert int(estimate.verdict) == FITTED
    p, periods = 10, 10  # value, gradient, information, events and exposure by period, rows
    assert reports[0].bytes_up == 2 * 8 * (1 + p + p * (p + 1) // 2 + 2 * periods + 1)


def test_six_regions_lead_to_coxphs_fit_too(tcga):
    loop, reports = after(tcga)
    wanted = [0.029975642114, 0.40319440275, 0.47145655028]
    assert loop.server.estimate.fit[0][1:] == pytest.approx(wanted, rel=1e-8)
    assert float(loop.server.estimate.value) == pytest.approx(-623.3002430450, abs=1e-8)
    assert sum(report.active > 0 for report in reports) <= 5


def test_secure_sums_lead_to_the_same_fit(tcga):
    hidden, reports = after(tcga, stages=(SecureSum(SecureSettings(), ("sums",), len(tcga)),))
    assert hidden.server.estimate.fit[0][1:] == pytest.approx([0.0299756, 0.4031944, 0.4714566], abs=1e-5)
    assert reports[-1].active == 0


def test_survival_of_a_site_is_its_own_baselines(tcga):
    """With a prior of nothing: exp(-basehaz(m, centered = FALSE) exp(x'beta)), of Canada at the end of each period."""
    loop, _ = after(tcga, prior=1e-9)
    problem, canada = tcga.problem, tcga.names.index("Canada")
    row = loop.evaluate("train", keep_models=True).models[canada]
    x = np.array([60.0, 1.0, 0.0])
    weight, bias = row[: 3 * len(problem.periods)].view(-1, 3), row[3 * len(problem.periods) :]
    chance = problem.predicted(weight.double() @ torch.tensor(x) + bias.double()).numpy()
    last = np.searchsorted(problem.periods, 1900)  # R's basehaz of Canada is 0.3400751002316 there, and constant after
    assert problem.periods[last] < 2_600
    beta = [0.029975642114, 0.40319440275, 0.47145655028]
    assert chance[last] == pytest.approx(np.exp(-0.3400751002316 * np.exp(x @ beta)), rel=1e-5)


def test_a_site_without_events_leans_on_all_others():
    """And with a prior of any number of events every site has the hazard of all."""
    draw = np.random.default_rng(0)
    site, x = np.repeat(np.arange(4), 30), draw.normal(size=(120, 2)).astype(np.float32)
    event = (draw.uniform(size=120) < 0.7) & (site > 0)
    loop, _ = after(federation(x, draw.exponential(np.exp(-x[:, 0])), event, site))
    models = loop.evaluate("train", keep_models=True).models
    assert bool(torch.isfinite(models).all())
    ratio = models[:, -10:].exp()
    assert 0.01 < float(ratio[0].mean()) < 0.6 * float(ratio[1:].mean())
    loop, _ = after(federation(x, draw.exponential(np.exp(-x[:, 0])), event, site), prior=1e12)
    models = loop.evaluate("train", keep_models=True).models
    assert models.numpy() == pytest.approx(models[:1].expand(4, -1).numpy(), abs=1e-4)


def table(count=4, rows=40, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count * rows, 2)).astype(np.float32)
    return x, draw.exponential(np.exp(-x[:, 0])), np.repeat(np.arange(count), rows)


def test_one_ratio_for_all_periods_is_the_same_fit():
    """Its level is that of the site's hazard over all periods."""
    x, time, site = table()
    plain = federation(x, time, np.ones(len(x)), site)
    single = federation(x, time, np.ones(len(x)), site)
    single.problem = replace(single.problem, proportional=True)
    many, one = (after(data)[0] for data in (plain, single))
    assert one.server.estimate.fit[0] == pytest.approx(many.server.estimate.fit[0])
    several, level = (loop.evaluate("train", keep_models=True).models for loop in (many, one))
    scale = torch.tensor(plain.problem.hazards)
    total = (several[:, -10:].exp() * scale).sum(1) / scale.sum()
    assert level[:, 2] == pytest.approx(total.log(), abs=1e-5)


def test_columns_that_tell_who_has_the_event_are_held_by_a_prior():
    x, time, site = table()
    x[:, 0] = np.argsort(np.argsort(-time)) / len(time)  # the order of events itself
    loop, reports = after(federation(x, time, np.ones(len(x)), site, standardize=True), 60)
    assert int(loop.server.estimate.verdict) == SEPARATED
    assert float(loop.server.estimate.ridge) == 0.5
    assert reports[-1].active == 0


def test_columns_that_do_not_vary_within_sites_are_left_out():
    x, time, site = table()
    loop, _ = after(federation(np.column_stack([x, site, x[:, 0] - x[:, 1]]), time, np.ones(len(x)), site))
    assert loop.server.estimate.basis.tolist() == [False, True, True, False, False]


def test_it_is_refused_in_words():
    x, time, site = table()
    numbers = Federation.from_arrays(x, time, site, task="regression")
    with pytest.raises(ConfigError, match="Cox is for survival"):
        simulate(numbers, "mlr", "cox")
    with pytest.raises(ConfigError, match="choose --model mlr"):
        simulate(federation(x, time, np.ones(len(x)), site), "mlp", "cox")
