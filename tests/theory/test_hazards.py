"""Stratified Cox regression from sums against R's survival 3:

coxph(Surv(time_days, event) ~ age + meno + grade + nodes + pgr + er + hormon + size + strata(client), d,
      ties = "efron", eps = 1e-12)
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
from realdata import real_data

from kinfed.theory.sums import Ascent, Likelihood, baseline_hazard, exposure, partial_likelihood


def fit(x, time, event, site):
    start = np.zeros(x.shape[1])
    ascent, number = Ascent(start, start, -np.inf), 0
    while ascent.promise > 1e-9 and number < 20:
        number += 1
        parts = [partial_likelihood(x[site == k], time[site == k], event[site == k], ascent.point) for k in set(site)]
        sums = Likelihood(*(sum(getattr(one, name) for one in parts) for name in ("value", "gradient", "curvature")))
        ascent = ascent.after(sums, len(start), np.zeros(0))
    return ascent.point, sums, number


def read(folder, columns):
    table = pq.read_table(real_data(folder) / folder / "train-00000-of-00001.parquet").to_pandas()
    x = np.column_stack([column(table) for column in columns]).astype(float)
    return x, table.time_days.to_numpy(float), table.event.to_numpy(float), table.client.to_numpy(str)


def test_rotterdam_is_that_of_coxph():
    names = ("age", "nodes", "pgr", "er")
    columns = [lambda t, n=n: t[n] for n in names]
    columns += [lambda t: t.meno == "1", lambda t: t.grade.astype(int), lambda t: t.hormon == "1"]
    columns += [lambda t: t["size"] == ">50", lambda t: t["size"] == "20-50"]
    beta, sums, rounds = fit(*read("rotterdam_gbsg", columns))
    wanted = [0.0026241796717, 0.0662439959038, -0.000206543184593, -6.04112440685e-06]
    wanted += [0.0922109277495, 0.339894467867, -0.17415891584, 0.619132842691, 0.365259300517]
    assert sums.value[0] == pytest.approx(-14321.3515336273, abs=1e-8)
    assert beta == pytest.approx(wanted, rel=1e-8)
    se = np.sqrt(np.diag(np.linalg.inv(sums.curvature[0])))
    assert se[:2] == pytest.approx([0.003029968011, 0.003608388172], rel=1e-8)
    assert rounds <= 8


def test_tcga_and_its_baseline_are_those_of_coxph():
    """basehaz(m, centered = FALSE), last time of Canada: 1900 0.3400751002316."""
    columns = [lambda t, n=n: t[n] for n in ("age_at_index", "race_white", "race_black or african american")]
    x, time, event, site = read("tcga_brca", columns)
    beta, sums, _ = fit(x, time, event, site)
    assert sums.value[0] == pytest.approx(-623.3002430450, abs=1e-8)
    assert beta == pytest.approx([0.029975642114, 0.40319440275, 0.47145655028], rel=1e-8)
    here = site == "Canada"
    hazard = baseline_hazard(x[here], time[here], event[here], beta, np.array([0.0, 1899.0, 1900.0, 5000.0]))
    assert hazard[[0, 2, 3]] == pytest.approx([0, 0.3400751002316, 0.3400751002316], rel=1e-8)
    assert hazard[1] < hazard[2]


def test_tied_events_are_shared_as_efron_says():
    """Two events at time 1 of three rows, by hand: log L = 2 x'β − log(r1 + r2 + r3) − log((r1 + r2)/2 + r3)."""
    x, beta = np.array([[1.0], [0.0], [2.0]]), np.array([0.3])
    one = partial_likelihood(x, np.array([1.0, 1.0, 2.0]), np.array([1.0, 1.0, 0.0]), beta)
    r = np.exp(0.3 * x[:, 0])
    by_hand = 0.3 - np.log(r.sum()) - np.log((r[0] + r[1]) / 2 + r[2])
    assert one.value[0] == pytest.approx(by_hand, rel=1e-12)


def test_a_site_without_events_says_nothing():
    one = partial_likelihood(np.ones((3, 2)), np.arange(3.0), np.zeros(3), np.zeros(2))
    assert not one.value.any()
    assert not one.curvature.any()


def test_derivatives_are_those_of_differences():
    draw = np.random.default_rng(0)
    x, time, event = draw.normal(size=(40, 3)), draw.integers(1, 12, 40).astype(float), draw.integers(0, 2, 40)
    beta = np.array([0.3, -0.2, 0.1])
    one = partial_likelihood(x, time, event, beta)
    for j in range(3):
        step = 1e-5 * np.eye(3)[j]
        above, below = (partial_likelihood(x, time, event, beta + sign * step) for sign in (1, -1))
        assert (above.value - below.value) / 2e-5 == pytest.approx(one.gradient[:, j], rel=1e-6)
        assert (below.gradient - above.gradient) / 2e-5 == pytest.approx(one.curvature[:, j], rel=1e-5, abs=1e-7)


def test_events_by_exposure_are_the_hazard_of_a_period():
    """Two periods up to 1 and 3, by hand; of many rows with a hazard of 0.4 about that."""
    x, beta = np.array([[0.0], [1.0], [0.0]]), np.array([np.log(2)])
    events, exposed = exposure(x, np.array([0.5, 2.0, 9.0]), np.array([1.0, 1.0, 1.0]), beta, np.array([1.0, 3.0]))
    assert events.tolist() == [1, 1]
    assert exposed == pytest.approx([0.5 + 2 + 1, 2 * 0.5 + 1])
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20_000, 1))
    time = draw.exponential(1 / (0.4 * np.exp(x @ beta)))
    events, exposed = exposure(x, time, np.ones(len(x)), beta, np.array([0.5, 1.5]))
    assert events / exposed == pytest.approx([0.4 * 0.5, 0.4 * 1.0], rel=0.03)
