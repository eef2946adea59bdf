"""Linear mixed models from sums against R's lme4 1.1, which ran on the same tables:

    m <- lmer(normexam ~ standLRT + schavg + sex + schgend + (1 | client), exam65, REML = TRUE,
              control = lmerControl(optimizer = "nloptwrap", optCtrl = list(xtol_abs = 1e-12, ftol_abs = 1e-14)))
    sprintf("%.9f", REMLcrit(m)); sigma(m); VarCorr(m); fixef(m); sqrt(diag(vcov(m))); ranef(m, condVar = TRUE)

and again with optimizer = "Nelder_Mead": the two agree within 2e-7 of the criterion. (bobyqa does not: on insteval with
a slope it stops at 27550.76, above the optimum 27444.26.)
"""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from realdata import real_data

from kinfed.errors import DataError
from kinfed.theory import TwoLevel
from kinfed.theory.sums import (
    Sums,
    check_sums,
    fit_diagonal,
    fit_full,
    independent_columns,
    row_variance,
    scoring_step,
    site_effects,
    site_terms,
    solve_fixed,
)


def moments(x, y, site):
    """[K, p + 1, p + 1]"""
    rows = np.column_stack([np.ones(len(y)), x, y])
    return np.stack([rows[site == k].T @ rows[site == k] for k in range(site.max() + 1)])


def read(folder, columns, target, clients=None):
    """(sums, names) of a table; categories become indicators of all levels but the first, as in R."""
    table = pq.read_table(real_data(folder) / folder / "train-00000-of-00001.parquet").to_pandas()
    table = table.dropna(subset=[*columns, target])
    if clients is not None:
        table = table[table.client.isin(sorted(table.client.unique())[:clients])]
    parts, names = [], ["intercept"]
    for name in columns:
        if table[name].dtype.kind in "if":
            parts.append(table[name].to_numpy(float))
            names.append(name)
        else:
            for level in sorted(table[name].unique())[1:]:
                parts.append((table[name] == level).to_numpy(float))
                names.append(name + level)
    _, site = np.unique(table.client.to_numpy(str), return_inverse=True)
    return moments(np.column_stack(parts), table[target].to_numpy(float), site), names


EXAM = ("exam65_london", ("standLRT", "schavg", "sex", "schgend"), "normexam", None)
CHEM = ("chem97", ("gcsecnt", "age", "gender"), "score", None)
LONDON = (
    "london_schools", ("pct_free_meals", "pct_vr_band1", "year", "gender", "vr_band", "ethnic", "school_gender",
    "school_denomination"), "exam_score", None,
)  # fmt: skip
INSTEVAL = ("insteval", ("studage", "lectage", "service", "dept"), "rating", 300)

# table, criterion, σ, D, first β, their SE, b of the first site, its conditional variance
INTERCEPT = [
    (EXAM, 9340.686173406, 0.750127361, 0.0716546023, [0.202152534, 0.555810894, 0.347221034, -0.165900582],
     [0.0981011883, 0.0125232777, 0.1077467841, 0.0340722489], 0.402887306, 0.00695944833),
    (CHEM, 141026.207779695, 2.245583224, 1.15028145, [5.216975290, 2.569195145, -0.037587461, 0.743653164],
     [0.03209020324, 0.01711290194, 0.00382143568, 0.03030276486], 0.520605531, 0.290076616),
    (LONDON, 114556.284907510, 10.014886548, 7.63028832, [9.7867338586, -0.0605974928, 0.0987610815, 1.3271932630],
     [1.0051380470, 0.0143401307, 0.0266388769, 0.2844802433], -1.04944964, 0.470562704),
    (INSTEVAL, 27454.045990665, 1.281228442, 0.100136101, [3.38525204952, -0.03538374281, -0.11336489353],
     [0.1016715485, 0.0969543510, 0.0882368861], 0.0696020534, 0.0804949779),
]  # fmt: skip


@pytest.mark.parametrize(("table", "criterion", "sigma", "between", "beta", "se", "b", "variance"), INTERCEPT)
def test_a_random_intercept_is_that_of_lme4(table, criterion, sigma, between, beta, se, b, variance):
    sums, _ = read(*table)
    fit = fit_diagonal(Sums.of(sums))
    effect, conditional = site_effects(sums[:1], fit.z, fit.beta, fit.psi, fit.sigma2)
    assert fit.criterion == pytest.approx(criterion, abs=2e-9)
    assert math.sqrt(fit.sigma2) == pytest.approx(sigma, rel=1e-8)
    assert fit.between[0, 0] == pytest.approx(between, rel=1e-6)
    assert fit.beta[: len(beta)] == pytest.approx(beta, rel=1e-6)
    assert np.sqrt(np.diag(fit.covariance))[: len(se)] == pytest.approx(se, rel=1e-6)
    assert effect[0, 0] == pytest.approx(b, rel=1e-6)
    assert conditional[0, 0, 0] == pytest.approx(variance, rel=1e-6)


# (standLRT | client) and so on: criterion, D, b of the first site, its conditional variance
SLOPES = [
    (EXAM, "standLRT", 9300.083302997, [0.0702373441, 0.0151871031, 0.0153998689], [0.416958909, 0.137029036],
     [0.006635755978, -0.000119272061, 0.004280182575]),
    (CHEM, "gcsecnt", 140805.600376228, [1.095157805, -0.213891079, 0.171380300], [0.362118519, 0.0713646595],
     [0.422528215, -0.156468340, 0.151027582]),
    (LONDON, "genderg2", 114551.000485034, [8.93470665, -1.78206991, 1.28959029], [-1.26531768, 0.429551873],
     [0.646178029, -0.360615275, 0.716928739]),
    (INSTEVAL, "service1", 27444.257926156, [0.09366626, -0.00702615681, 0.0630197976], [0.0788753184, -0.0778724609],
     [0.0776365009, -0.0109431410, 0.0595802124]),
]  # fmt: skip


@pytest.mark.parametrize(("table", "slope", "criterion", "between", "b", "variance"), SLOPES)
def test_a_correlated_slope_is_that_of_lme4_or_nearer_the_optimum(table, slope, criterion, between, b, variance):
    sums, names = read(*table)
    fit = fit_full(Sums.of(sums, (0, names.index(slope))))
    effect, conditional = site_effects(sums[:1], fit.z, fit.beta, fit.psi, fit.sigma2)
    lower = np.tril_indices(2)
    assert criterion - 2e-7 < fit.criterion < criterion + 2e-9
    assert fit.between[lower] == pytest.approx(between, rel=2e-4)  # as far as R's own two optimizers agree
    assert effect[0] == pytest.approx(b, rel=1e-4)
    assert conditional[0][lower] == pytest.approx(variance, rel=1e-4, abs=1e-7)


def test_independent_slopes_are_those_of_lme4():
    """lmer(normexam ~ standLRT + schavg + sex + schgend + (standLRT || client)): Nelder_Mead reaches 9306.005062165."""
    sums, _ = read(*EXAM)
    fit = fit_diagonal(Sums.of(sums, (0, 1)))
    assert fit.criterion == pytest.approx(9306.005062161, abs=5e-9)
    assert np.diag(fit.between) == pytest.approx([0.0691068026, 0.0152265243], rel=1e-4)


def simulated(sites=30, rows=12, sd=0.5, seed=0, columns=2):
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(sites), rows)
    x = draw.normal(size=(len(site), columns))
    b = sd * draw.normal(size=(sites, 2))
    y = 1 + x @ np.linspace(1, -1, columns) + b[site, 0] + b[site, 1] * x[:, 0] + draw.normal(size=len(site))
    return x, y, site, moments(x, y, site)


@pytest.mark.parametrize("reml", [True, False])
def test_the_gradient_is_that_of_differences(reml):
    sums = Sums.of(simulated()[3], (0, 1), reml=reml)
    psi = np.array([[0.3, 0.05], [0.05, 0.2]])
    gradient, _ = sums.derivatives(psi, sums.solve(psi), diagonal=False)
    for i, j in ((0, 0), (1, 0), (1, 1)):
        step = np.zeros((2, 2))
        step[i, j] = step[j, i] = 1e-5
        by_difference = (sums.solve(psi + step).criterion - sums.solve(psi - step).criterion) / 2e-5
        assert by_difference == pytest.approx(float((gradient * (step != 0)).sum()), rel=1e-6)


def test_the_criterion_is_that_of_the_joint_normal_density():
    """Written with the covariance of all rows, 30 of them."""
    x, y, site, sums = simulated(sites=5, rows=6)
    design, z = np.column_stack([np.ones(len(y)), x]), np.column_stack([np.ones(len(y)), x[:, 0]])
    psi = np.array([[0.4, 0.1], [0.1, 0.2]])
    v = np.eye(len(y)) + (z @ psi @ z.T) * (site[:, None] == site)
    solved = Sums.of(sums, (0, 1)).solve(psi)
    inverse = np.linalg.inv(v)
    xvx = design.T @ inverse @ design
    beta = np.linalg.solve(xvx, design.T @ inverse @ y)
    residual, freedom = y - design @ beta, len(y) - 3
    sigma2 = residual @ inverse @ residual / freedom
    criterion = np.linalg.slogdet(v)[1] + np.linalg.slogdet(xvx)[1] + freedom * (1 + np.log(2 * np.pi * sigma2))
    assert solved.beta == pytest.approx(beta, rel=1e-10)
    assert solved.criterion == pytest.approx(criterion, rel=1e-12)


def test_known_variances_of_a_mean_are_the_two_level_model():
    """Self-FL's model: z_m = mean of N_m rows of variance v, θ_m ~ N(θ_0, s0)."""
    draw, counts, v, s0 = np.random.default_rng(1), np.array([3, 5, 20, 8]), 0.7, 0.4
    site = np.repeat(np.arange(4), counts)
    y = draw.normal(size=len(site)) + draw.normal(size=4)[site]
    sums = moments(np.zeros((len(y), 0)), y, site)
    psi = np.array([[s0 / v]])
    beta = Sums.of(sums).solve(psi).beta
    b, _ = site_effects(sums, (0,), beta, psi, v)
    means = sums[:, 0, 1] / counts
    exact = TwoLevel(means, v / counts, s0, posterior="exact")
    assert beta[0] + b[:, 0] == pytest.approx(exact.theta_FL.numpy(), rel=1e-12)
    inverse = Sums.of(sums).solve(psi).inverse
    variance = row_variance(sums, (0,), psi, v, v * inverse)
    assert variance[:, 0, 0] == pytest.approx(exact.mse.numpy(), rel=1e-10)


def test_a_variance_at_zero_leaves_it_where_the_criterion_falls():
    sums = Sums.of(simulated(sd=1.0)[3], (0, 1))
    assert fit_diagonal(sums, start=np.zeros(2)).criterion == pytest.approx(fit_diagonal(sums).criterion, abs=1e-8)


def test_variances_that_are_not_there_are_reported_as_zero():
    draw = np.random.default_rng(3)
    site = np.repeat(np.arange(40), 10)
    noise = draw.normal(size=400)
    noise -= np.array([noise[site == k].mean() for k in range(40)])[site]  # sites agree better than by chance
    x = draw.normal(size=(400, 1))
    fit = fit_diagonal(Sums.of(moments(x, x[:, 0] + noise, site)))
    assert fit.psi[0, 0] == 0


@pytest.mark.parametrize("z", [(0,), (0, 1), (0, 1, 2)])
def test_totals_alone_lead_to_the_same_fit(z):
    """A server that gets only totals, with the β and M of the round before, by scoring: 25 rounds."""
    sums = simulated(sites=60, sd=0.7)[3]
    central = fit_diagonal(Sums.of(sums, z))
    psi, beta, inverse = np.full(len(z), 0.05), np.zeros(3), np.zeros((3, 3))
    freedom = sums[:, 0, 0].sum() - 3
    for number in range(25):
        terms = site_terms(sums, z, np.diag(psi), beta, inverse)
        at = solve_fixed(terms.moments.sum(0), terms.log_det.sum(), freedom)
        beta, inverse = at.beta, at.inverse
        if number:
            traces = terms.traces.sum(0)
            gradient = traces - terms.scores.sum(0) / at.sigma2 - terms.leverage.sum(0)
            step, _ = scoring_step(psi, gradient, terms.curvature.sum(0) - np.outer(traces, traces) / freedom)
            psi = np.maximum(psi + step, 0)
    assert psi == pytest.approx(np.diag(central.psi), rel=1e-6)
    assert at.beta == pytest.approx(central.beta, rel=1e-8)


def test_intervals_of_sites_cover_in_simulations():
    inside = []
    for seed in range(20):
        draw = np.random.default_rng(100 + seed)
        site = np.repeat(np.arange(60), 6)
        b, x = 0.8 * draw.normal(size=60), draw.normal(size=(360, 1))
        y = 2 + x[:, 0] + b[site] + draw.normal(size=360)
        sums = moments(x, y, site)
        fit = fit_diagonal(Sums.of(sums))
        effect, _ = site_effects(sums, fit.z, fit.beta, fit.psi, fit.sigma2)
        sd = np.sqrt(row_variance(sums, fit.z, fit.psi, fit.sigma2, fit.covariance)[:, 0, 0])
        inside.append(np.abs(fit.beta[0] + effect[:, 0] - 2 - b) < 1.96 * sd)
    assert 0.93 < np.mean(inside) < 0.97


def test_shuffled_sites_lose_what_sites_have_in_common():
    x, y, site, sums = simulated(sd=1.0)
    shuffled = moments(x, y, np.random.default_rng(5).permutation(site))
    assert fit_diagonal(Sums.of(shuffled)).between[0, 0] < 0.2 * fit_diagonal(Sums.of(sums)).between[0, 0]


def test_columns_that_others_determine_are_found_from_left_to_right():
    x = np.random.default_rng(0).normal(size=(50, 3))
    x = np.column_stack([np.ones(50), x, x[:, 0] + x[:, 1], np.zeros(50), 3 * x[:, 2]])
    assert independent_columns(x.T @ x) == [0, 1, 2, 3]


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_of_columns_do_not_matter(scale):
    x, y, site, sums = simulated()
    other = fit_diagonal(Sums.of(moments(scale * x, y, site), (0, 1)))
    here = fit_diagonal(Sums.of(sums, (0, 1)))
    assert other.beta[1:] * scale == pytest.approx(here.beta[1:], rel=1e-6)
    assert np.diag(other.psi) * [1, scale**2] == pytest.approx(np.diag(here.psi), rel=1e-5)


def test_what_no_mixed_model_fits_is_refused_in_words():
    x, y, site, sums = simulated(sites=4, rows=3)
    with pytest.raises(DataError, match="compares sites, and there is one"):
        check_sums(sums[:1])
    with pytest.raises(DataError, match="3 training rows for 3 columns"):
        check_sums(moments(x[:3], y[:3], np.array([0, 1, 2])))
    with pytest.raises(DataError, match="residual variance is zero"):
        fit_diagonal(Sums.of(moments(x, np.ones(len(y)), site)))
