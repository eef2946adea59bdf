"""The linear mixed model as a method: the fit of the server, personal models, what travels, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.common.by_sums import Posterior
from kinfed.algorithms.lmm import CONSTANT, FEW_ROWS, FITTED, ONE_SITE
from kinfed.data import Federation, LocalTraining
from kinfed.engine import make_objective, make_task
from kinfed.errors import ConfigError
from kinfed.privacy import Privacy, seeded_noise
from kinfed.runs.loop_factory import simulate
from kinfed.theory.sums import Sums, fit_diagonal
from kinfed.updates import ClientSampling, SecureSettings, SecureSum, UserLevel, UserPrivacy


def sites(count=12, rows=15, sd=0.8, seed=0, columns=3):
    """Arrays of sites that differ in level and in the slope of the first column."""
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(count), rows)
    x = draw.normal(size=(len(site), columns)).astype(np.float32)
    b = sd * draw.normal(size=(count, 2))
    y = 2 + x @ np.linspace(1, -1, columns) + b[site, 0] + b[site, 1] * x[:, 0] + draw.normal(size=len(site))
    return x, y, site


def federation(x, y, site):
    names = np.array([f"site-{k:03d}" for k in site])
    return Federation.from_arrays(x, y, names, test_rows=np.zeros(len(y), dtype=bool), task="regression")


def after(data, rounds=1, *, stages=(), dropout=0.0, **options):
    """The loop after some rounds."""
    with simulate(data, "mlr", "lmm", dropout=dropout, stages=stages, **options) as loop:
        for _ in loop.rounds(rounds):
            pass
        return loop


def central(data, z):
    """The fit of the theory on the same standardized numbers."""
    x = data.features.raw.numpy().astype(float)
    y = data.targets.numpy().astype(float)
    owner = np.zeros(len(y), dtype=int)
    owner[data.train.rows.numpy()] = data.train.owner.numpy()
    both = np.column_stack([np.ones(len(y)), x, y])
    return fit_diagonal(Sums.of(np.stack([both[owner == k].T @ both[owner == k] for k in range(len(data))]), z))


@pytest.mark.parametrize(("effects", "z"), [("intercept", (0,)), ("slopes", (0, 1, 2, 3)), ("auto", (0, 1, 2, 3))])
def test_one_message_gives_the_fit_of_all_rows(effects, z):
    data = federation(*sites())
    loop, fit = after(data, effects=effects), central(data, z)
    assert loop.server.fit.beta.numpy() == pytest.approx(fit.beta, rel=1e-9)
    assert np.diag(loop.server.fit.psi.numpy())[list(z)] == pytest.approx(np.diag(fit.psi), rel=1e-6, abs=1e-12)
    assert float(loop.server.criterion) == pytest.approx(fit.criterion, abs=1e-8)


def test_nobody_is_asked_twice():
    data = federation(*sites())
    with simulate(data, "mlr", "lmm", dropout=0.4) as loop:
        reports = list(loop.rounds(12))
    sent = sum(report.bytes_up for report in reports)
    assert sent == len(data) * 8 * 15  # (p + 1)(p + 2)/2 numbers of float64 with p = 4
    assert reports[-1].active == 0
    assert bool(loop.server.heard.all())


@pytest.mark.parametrize("effects", ["intercept", "slopes"])
def test_totals_lead_to_the_same_fit_and_stop(effects):
    data = federation(*sites())
    loop = after(data, 40, totals=True, effects=effects)
    fit = central(data, (0,) if effects == "intercept" else (0, 1, 2, 3))
    assert loop.server.fit.beta.numpy() == pytest.approx(fit.beta, abs=1e-5)
    assert np.diag(loop.server.fit.psi.numpy())[: len(fit.z)] == pytest.approx(np.diag(fit.psi), rel=1e-3, abs=1e-6)
    assert loop.round().active == 0
    assert loop.server.sums.numel() == 0


def test_secure_sums_of_totals_are_the_totals():
    data = federation(*sites())
    plain = after(data, 12, totals=True)
    secure = SecureSum(SecureSettings(), ("sums",), len(data))
    hidden = after(data, 12, totals=True, stages=(secure,))
    assert hidden.server.fit.beta.numpy() == pytest.approx(plain.server.fit.beta.numpy(), abs=1e-7)
    assert hidden.server.fit.psi.numpy() == pytest.approx(plain.server.fit.psi.numpy(), abs=1e-6)


def test_user_level_noise_is_on_totals_and_one_site_moves_them_by_the_clipping_norm_at_most():
    """Without noise, the sum of shortened answers with a site and without it: the difference is within C."""
    data, clip = federation(*sites()), 0.05
    algorithm = make_algorithm("lmm", LocalTraining(), {"totals": True})
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 1)), objective=make_objective(data.problem))
    server = algorithm.init_server(task, data.population(0))
    ids = torch.arange(len(data))
    _, up = algorithm.client_update(
        task, algorithm.init_client(task, None), algorithm.download(server, ids), data.cohort(ids, 0, 1)
    )
    privacy = UserPrivacy(noise=0.0, clip=clip)

    def total(rows):
        stage = UserLevel(
            privacy, up.take(slice(0, 1)), ("sums",), seeded_noise(0), ClientSampling("fixed", 1.0), 1.0, range(1, 2)
        )
        return stage.mean(rows, 1).sums

    for left_out in (0, 5):
        others = ids[ids != left_out]
        assert float((total(up) - total(up.take(others))).norm()) <= clip * (1 + 1e-9)
    big = replace(up, sums=up.sums.clone())
    big.sums[3] *= 1e6  # whatever a site's rows are
    assert float((total(big) - total(big.take(ids[ids != 3]))).norm()) <= clip * (1 + 1e-9)


def test_too_few_sites_for_the_noise_are_told_beforehand():
    """Twelve sites are hopeless with a noise of 1; thousands are not, nor are twelve without noise."""
    algorithm = make_algorithm("lmm", LocalTraining(), {"totals": True})
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 1)))
    privacy, sampling = UserPrivacy(epsilon=8.0, delta=1e-6), ClientSampling("fixed", 1.0)

    def told(clients, noise):
        return " ".join(privacy.notes("lmm", algorithm, clients, sampling, task, noise))

    assert algorithm.clients_for_noise(task, 1.0) == pytest.approx(100 * 15**0.5)  # of (p + 1)(p + 2) / 2 numbers
    assert "asks 12 clients" in told(12, 1.0)
    assert "about 387 clients would do" in told(12, 1.0)
    assert "asks" not in told(388, 1.0)
    assert "asks" not in told(12, 0.0)


def test_noise_by_row_is_refused_with_the_reason():
    algorithm = make_algorithm("lmm", LocalTraining(poisson=True), {"totals": True})
    with pytest.raises(ConfigError, match=r"sums of its rows would leave .* by any amount .*user_epsilon"):
        Privacy(noise=1.0).check_method("lmm", algorithm, torch.tensor([30, 20]))


def test_noise_that_spoils_a_total_leaves_the_fit_finite():
    data = federation(*sites())
    algorithm = make_algorithm("lmm", LocalTraining(), {"totals": True})
    task = make_task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 1)), objective=make_objective(data.problem))
    server = algorithm.init_server(task, data.population(0))
    ids = torch.arange(1)
    _, up = algorithm.client_update(task, None, algorithm.download(server, ids), data.cohort(ids, 0, 1))
    stage = UserLevel(
        UserPrivacy(noise=5.0), up, ("sums",), seeded_noise(1), ClientSampling("fixed", 1.0), 12.0, range(1, 9)
    )
    loop = after(data, 8, totals=True, stages=(stage,))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loop.server.fit.named().values())


def test_a_personal_model_is_the_posterior_and_carries_its_variance():
    data = federation(*sites(rows=6))
    loop = after(data, effects="intercept")
    models = loop.evaluate("train", keep_models=True).models
    fit = central(data, (0,))
    row = models[2]
    x = data.features.raw.numpy().astype(float)
    y = data.targets.numpy().astype(float)
    own = data.train[2].numpy()
    n, residual = len(own), y[own] - np.column_stack([np.ones(len(own)), x[own]]) @ fit.beta
    shrink = n * fit.psi[0, 0] / (1 + n * fit.psi[0, 0])
    assert float(row[3]) == pytest.approx(fit.beta[0] + shrink * residual.mean(), rel=1e-5)  # the bias lies last
    spread, noise, _ = Posterior().uncertainty(torch.zeros(1, 1, 3), row[None, 4:-1])
    assert float(noise) == pytest.approx(fit.sigma2, rel=1e-5)
    conditional = fit.sigma2 * fit.psi[0, 0] / (1 + n * fit.psi[0, 0])
    assert conditional < float(spread) < conditional + fit.covariance[0, 0]


def test_a_site_is_forgotten_as_if_it_had_never_answered():
    x, y, site = sites()
    data = federation(x, y, site)
    loop = after(data, effects="intercept")
    forgotten = loop.algorithm.forget(loop.server, torch.tensor([4]))
    others = after(federation(x[site != 4], y[site != 4], site[site != 4]), effects="intercept")
    problems = data.problem, others.pool.federation.problem
    values = [p.restored(float(s.fit.beta[0])) for p, s in zip(problems, (forgotten, others.server), strict=True)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert not bool(forgotten.sums[4].any())
    with pytest.raises(ConfigError, match="holds no site's sums"):
        after(data, totals=True).algorithm.forget(loop.server, torch.tensor([0]))


def test_columns_that_others_determine_get_no_coefficient():
    x, y, site = sites()
    loop = after(federation(np.column_stack([x, x[:, 0] + x[:, 1]]), y, site))
    assert loop.server.basis.tolist() == [True, True, True, True, False]
    assert float(loop.server.fit.beta[4]) == 0


@pytest.mark.parametrize("totals", [False, True])
def test_tables_that_cannot_be_fitted_say_why(totals):
    x, y, site = sites(count=3, rows=1)
    few = after(federation(x, y, site), totals=totals)
    assert int(few.server.verdict) == FEW_ROWS
    x, y, site = sites()
    constant = after(federation(x, np.full(len(y), 3.0), site), totals=totals)
    assert int(constant.server.verdict) == CONSTANT
    if not totals:
        one = make_algorithm("lmm", LocalTraining(), {})
        server = constant.server
        task, ids = constant.task, torch.tensor([0])
        data = federation(x, y, site)
        _, up = one.client_update(task, None, one.download(server, ids), data.cohort(ids, 0, 1))
        fresh = one.init_server(task, data.population(0))
        assert int(one.aggregate(fresh, ids, up, None).verdict) == ONE_SITE


def test_influence_is_what_leaving_a_site_out_changes():
    """Cook's distance at the variances of the whole fit, with β fitted again without the site."""
    data = federation(*sites(count=6, rows=8))
    loop = after(data, effects="intercept")
    figures = loop.algorithm.figures(loop.server)
    x = np.column_stack([np.ones(len(data.labels)), data.features.raw.numpy()]).astype(float)
    y, owner = data.targets.numpy().astype(float), np.repeat(np.arange(6), 8)
    psi, sigma2 = float(loop.server.fit.psi[0, 0]), float(loop.server.fit.sigma2)
    v = np.linalg.inv(np.eye(len(y)) + psi * (owner[:, None] == owner))

    def beta(rows):
        w = np.linalg.inv(np.eye(len(rows)) + psi * (owner[rows][:, None] == owner[rows]))
        return np.linalg.solve(x[rows].T @ w @ x[rows], x[rows].T @ w @ y[rows])

    whole = beta(np.arange(len(y)))
    change = whole - beta(np.flatnonzero(owner != 2))
    distance = change @ (x.T @ v @ x) @ change / (4 * sigma2)
    assert float(figures["site_influence"][2]) == pytest.approx(distance, rel=1e-5)


def test_it_is_refused_in_words():
    x, y, site = sites()
    data = federation(x, y, site)
    with pytest.raises(ConfigError, match="choose --model mlr"):
        simulate(data, "mlp", "lmm")
    with pytest.raises(ConfigError, match="predicts a number"):
        simulate(Federation.from_arrays(x, (y > 2).astype(int), site), "mlr", "lmm")
    with pytest.raises(ConfigError, match="there is one"):
        simulate(federation(x, y, np.zeros_like(site)), "mlr", "lmm")
    with pytest.raises(ConfigError, match="up to 8 columns"):
        simulate(federation(np.tile(x, (1, 3)), y, site), "mlr", "lmm", effects="correlated")
    algorithm = make_algorithm("lmm", LocalTraining(), {})
    with pytest.raises(ConfigError, match="keeps the sums of every site"):
        SecureSettings().averaged_fields("lmm", algorithm)


def test_new_sites_are_predicted_with_the_variance_between_sites():
    loop = after(federation(*sites()), effects="intercept")
    row = loop.algorithm.server_models(loop.server).models
    spread, _, _ = Posterior().uncertainty(torch.zeros(1, 1, 3), row[:, 4:-1])
    between = float(loop.server.fit.sigma2 * loop.server.fit.psi[0, 0])
    assert between < float(spread) < 1.5 * between
    assert int(loop.server.verdict) == FITTED
