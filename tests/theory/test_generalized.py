"""Generalized linear mixed models from sums against R's glmer (lme4 1.1):

    d$age2 <- d$age^2 / 100
    glmer(label ~ age + age2 + urban + livch + (1 | client), d, binomial, nAGQ = 9,
          control = glmerControl("bobyqa", optCtrl = list(rhoend = 1e-9), tolPwrss = 1e-13))

With Nelder_Mead in place of bobyqa likelihoods agree within 5e-8.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
from realdata import real_data
from scipy import integrate

from kinfed.theory.sums import FAMILIES, Ascent, Likelihood, SiteRows, at_zero, log_likelihood, modes, newton_step


def ascend(rows, z, family, nodes, rounds=30, start=0.5, ridge=0.0):
    """The fit as a server makes it, from totals; and the number of rounds."""
    p, rms = rows.x.shape[1], np.sqrt((rows.x[:, list(z)] ** 2).mean(0))
    point = np.concatenate([np.zeros(p), np.full(len(z), start)])
    ascent, prior = Ascent(point, point, -np.inf), np.concatenate([[0.0], np.full(p - 1, ridge), np.zeros(len(z))])
    number = 0
    while number < rounds and ascent.promise > 1e-12:
        number += 1
        one = log_likelihood(rows, z, ascent.point[:p], ascent.point[p:], FAMILIES[family], nodes)
        totals = Likelihood(*(part.sum(0)[None] for part in (one.value, one.gradient, one.curvature)))
        ascent = ascent.after(totals, p, rms, prior)
    return ascent, totals, number


@pytest.fixture(scope="module")
def contraception():
    table = pq.read_table(real_data("contraception") / "contraception" / "train-00000-of-00001.parquet").to_pandas()
    table = table.sort_values("client", kind="stable")
    x = [np.ones(len(table)), table.age, table.age**2 / 100, table.urban == "Y"]
    x = np.column_stack([*x, *(table.livch == level for level in ("1", "2", "3+"))]).astype(float)
    count = np.unique(table.client.to_numpy(str), return_counts=True)[1]
    children = table.livch.map({"0": 0, "1": 1, "2": 2, "3+": 3}).to_numpy(float)
    return SiteRows.of(x, table.label.to_numpy(float), count), SiteRows.of(x[:, [0, 1, 3]], children, count)


ORACLE = [  # z, nodes, log likelihood, standard deviations, β, conditional SE of β
    ((0,), 1, -1186.36429118, [0.47524422], [-1.035077799, 0.003533269, -0.4562346, 0.697267749],
     [0.1743609986, 0.0092310748, 0.0725196455, 0.1198789209]),
    ((0,), 9, -1186.22944249, [0.47863654], [-1.0354212722, 0.0035327444, -0.4563206377, 0.6967085469], None),
    ((0, 3), 1, -1185.34203962, [0.49128711, 0.432529], [-1.042948238, 0.0037372948, -0.4537069832, 0.6800928243],
     [0.1762689916, 0.0092885345, 0.0729749194, 0.1423162636]),
]  # fmt: skip


@pytest.mark.parametrize(("z", "nodes", "likelihood", "sd", "beta", "se"), ORACLE)
def test_a_logistic_fit_is_that_of_glmer(contraception, z, nodes, likelihood, sd, beta, se):
    ascent, totals, rounds = ascend(contraception[0], z, "binary", nodes)
    assert ascent.value == pytest.approx(likelihood, abs=1e-6)
    assert ascent.point[7:] == pytest.approx(sd, abs=5e-6)
    assert ascent.point[:4] == pytest.approx(beta, abs=5e-6)
    assert rounds <= 20
    if se is not None:
        conditional = np.sqrt(np.diag(np.linalg.inv(totals.curvature[0][:7, :7])))
        assert conditional[:4] == pytest.approx(se, abs=5e-7)


def test_standard_errors_of_the_quadrature_are_those_of_the_hessian(contraception):
    """sqrt(diag(vcov(m, use.hessian = TRUE))) of the fit with nAGQ = 9."""
    _, totals, _ = ascend(contraception[0], (0,), "binary", 9)
    se = np.sqrt(np.diag(np.linalg.inv(totals.curvature[0])))
    assert se[:4] == pytest.approx([0.1761015541, 0.0092871551, 0.0730255996, 0.1209567618], rel=2e-5)


def test_a_poisson_fit_is_that_of_glmer(contraception):
    """glmer(children ~ age + urban + (1 | client), d, poisson): −2728.52234466, sd 0.06254359."""
    ascent, _, _ = ascend(contraception[1], (0,), "count", 1)
    assert ascent.value == pytest.approx(-2728.52234466, abs=1e-6)
    assert ascent.point == pytest.approx([0.391335233, 0.053714809, -0.064327948, 0.06254359], abs=2e-6)


def simulated(family, sites=12, rows=6, seed=0):
    draw = np.random.default_rng(seed)
    x = np.column_stack([np.ones(sites * rows), draw.normal(size=(sites * rows, 2))])
    eta = x @ [0.3, 0.8, -0.4] + np.repeat(0.8 * draw.normal(size=sites), rows)
    y = (draw.uniform(size=len(eta)) < 1 / (1 + np.exp(-eta))) if family == "binary" else draw.poisson(np.exp(eta))
    return SiteRows.of(x, y.astype(float), np.full(sites, rows))


@pytest.mark.parametrize("family", ["binary", "count"])
def test_quadrature_is_the_integral_of_a_site(family):
    rows, beta, lam = simulated(family, sites=1), np.array([0.2, 0.5, -0.3]), 0.9
    value = log_likelihood(rows, (0,), beta, np.array([lam]), FAMILIES[family], 25).value[0]

    def density(u):
        eta = rows.x @ beta + lam * u
        return np.exp(FAMILIES[family].log_density(rows.y, eta).sum() - u * u / 2) / np.sqrt(2 * np.pi)

    assert np.exp(value) == pytest.approx(integrate.quad(density, -10, 10, epsabs=1e-14)[0], rel=1e-8)


@pytest.mark.parametrize("family", ["binary", "count"])
@pytest.mark.parametrize(("z", "nodes"), [((0,), 25), ((0, 1), 1)])
def test_gradients_are_those_of_differences(family, z, nodes):
    rows, point = simulated(family), np.array([0.2, 0.5, -0.3, *[0.7] * len(z)])

    def at(point):
        return log_likelihood(rows, z, point[:3], point[3:], FAMILIES[family], nodes)

    one = at(point)
    for j in range(len(point)):
        step = np.zeros(len(point))
        step[j] = 1e-5
        above, below = at(point + step), at(point - step)
        assert (above.value - below.value) / 2e-5 == pytest.approx(one.gradient[:, j], rel=1e-4, abs=1e-5)
        if nodes > 1:
            curvature = (below.gradient - above.gradient) / 2e-5
            assert curvature == pytest.approx(one.curvature[:, j], rel=1e-3, abs=1e-3)


def test_modes_are_where_the_gradient_vanishes():
    rows, beta, lam = simulated("binary"), np.array([0.2, 0.5, -0.3]), np.array([2.0, 1.0])
    u, _ = modes(rows, (0, 1), beta, lam, FAMILIES["binary"])
    z = rows.x[:, :2] * lam
    mu = FAMILIES["binary"].mean(rows.x @ beta + (z * u[rows.owner]).sum(1))
    assert rows.total((rows.y - mu)[:, None] * z) == pytest.approx(u, abs=1e-10)


@pytest.mark.parametrize("start", [0.1, 3.0])
def test_fits_agree_from_far_starts(contraception, start):
    ascent, _, _ = ascend(contraception[0], (0,), "binary", 9, rounds=40, start=start)
    assert ascent.point[7] == pytest.approx(0.47863654, abs=5e-6)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_is_cut_leads_uphill_all_the_same(seed):
    """The best step for the quadratic model with λ within [λ/4, 4λ]: β follows from the λ that is left of it."""
    draw = np.random.default_rng(seed)
    root, gradient = draw.normal(size=(4, 4)), draw.normal(size=4) * [1, 1, 1, 30]
    curvature, point = root @ root.T + 0.01 * np.eye(4), np.array([0.1, -0.2, 0.3, 0.4])
    new, promise = newton_step(point, 3, gradient, curvature, np.ones(1))
    step = new - point
    assert 0.1 - 1e-9 <= new[3] <= 1.6 + 1e-9
    assert gradient @ step - step @ curvature @ step / 2 > 0
    assert promise == pytest.approx(gradient @ step)
    assert curvature[:3] @ step == pytest.approx(gradient[:3], abs=1e-6)


def test_sites_that_do_not_differ_have_a_deviation_of_zero():
    draw = np.random.default_rng(8)
    x = np.column_stack([np.ones(800), draw.normal(size=800)])
    y = np.tile([0.0, 1.0], 400)  # every site has as many of both
    ascent, _, rounds = ascend(SiteRows.of(x, y, np.full(20, 40)), (0,), "binary", 15, rounds=60)
    assert at_zero(ascent.point[2:], np.ones(1)).all()
    assert rounds < 20


def test_a_ridge_holds_separated_classes():
    x = np.column_stack([np.ones(60), np.random.default_rng(2).normal(size=60)])
    rows = SiteRows.of(x, (x[:, 1] > 0).astype(float), np.full(6, 10))
    ascent, _, rounds = ascend(rows, (0,), "binary", 15, ridge=0.5)
    assert 1 < ascent.point[1] < 10
    assert rounds < 30
