"""Curves in methods that learn by sums: the basis, its evidence, predictions, what travels."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize

import kinfed
from kinfed.algorithms.common.bending import BENDS, CELLS, KNOTS, bent, count_rows, deviations, form_of
from kinfed.algorithms.common.newton_totals import NO_CURVES, TAKEN
from kinfed.data import Federation
from kinfed.errors import ConfigError
from kinfed.runs.loop_factory import simulate
from kinfed.theory.sums import Sums, fit_held
from kinfed.updates import SecureSettings, SecureSum


def columns(rows=4000, seed=0):
    """A normal column, one of amounts that are mostly zero, one of two values."""
    draw = np.random.default_rng(seed)
    amount = np.where(draw.uniform(size=rows) < 0.7, 0.0, draw.gamma(2.0, size=rows))
    return np.column_stack([draw.normal(size=rows), amount - 0.5, np.where(draw.uniform(size=rows) < 0.3, 1.0, -1.0)])


def formed(x):
    return form_of(count_rows(x, np.array([0, len(x)])).reshape(-1, CELLS))


def test_knots_are_quantiles_of_all_rows_and_sites_add_up():
    x = columns()
    halves = count_rows(x, np.array([0, 1500, len(x)]))
    assert halves.sum(0) == pytest.approx(count_rows(x, np.array([0, len(x)]))[0])
    form, _ = formed(x)
    knots = form[0, 3 : 3 + KNOTS]
    assert knots == pytest.approx(np.quantile(x[:, 0], np.arange(1, 9) / 9), abs=0.03)
    assert form[0, 0] == pytest.approx(np.quantile(x[:, 0], 0.99), abs=0.1)
    others = np.quantile(x[x[:, 1] > -0.5, 1], np.arange(1, 9) / 9)
    assert form[1, 3 : 3 + KNOTS] == pytest.approx(others, abs=0.1)
    assert form[1, 1] < -0.5 < form[1, 2] < -0.4  # the cell of the value that most rows have
    assert not bent(torch.from_numpy(x), torch.from_numpy(form))[:, 2 * BENDS :].any()  # two values are a line


def test_what_bends_is_orthogonal_to_the_line_and_flat_beyond_the_last_knots():
    x = columns()
    form, products = formed(x)
    both = bent(torch.from_numpy(x), torch.from_numpy(form)).numpy()[:, : 2 * BENDS]
    line = np.column_stack([np.ones(len(x)), x[:, 0]])
    assert np.abs(line.T @ both[:, :BENDS]).max() / len(x) < 5e-3  # cells are narrow, not points
    assert both[:, :BENDS].T @ both[:, :BENDS] / len(x) == pytest.approx(products[0], abs=5e-3)
    far = torch.tensor([[4.0, 0.0, 1.0], [9.0, 0.0, 1.0], [14.0, 0.0, 1.0]], dtype=torch.float64)
    outside = bent(far, torch.from_numpy(form)).numpy()[:, :KNOTS]
    slope = form[0, 3 + KNOTS + BENDS : 3 + KNOTS + 2 * BENDS][:KNOTS]
    assert np.diff(outside, axis=0) / 5 == pytest.approx(np.tile(-slope, (2, 1)))  # only the line goes on
    gamma = np.zeros((3, BENDS))
    gamma[0, 2] = 3.0
    assert deviations(gamma, products)[0] == pytest.approx(3 * both[:, 2].std(), rel=0.02)


def test_the_criterion_with_curves_is_that_of_their_covariance_among_rows():
    """-2 log restricted likelihood of y ~ N(Xβ, σ²(I + ψ 11' by site + τ GG')), by dense matrices."""
    draw = np.random.default_rng(3)
    site, x = np.repeat(np.arange(8), 12), draw.normal(size=(96, 1))
    g = np.maximum(x - np.array([-0.7, 0.0, 0.7]), 0)
    y = np.sin(2 * x[:, 0]) + 0.5 * draw.normal(size=8)[site] + 0.4 * draw.normal(size=96)
    fixed = np.column_stack([np.ones(96), x])
    rows = np.column_stack([fixed, g, y])
    sums = np.stack([rows[site == k].T @ rows[site == k] for k in range(8)])
    held = Sums.of(sums)
    fit, tau = fit_held(Sums(held.total, held.rows, held.z, held=3), np.array([0.1]))

    def dense(psi, tau):
        v = np.eye(96) + psi * (site[:, None] == site) + tau * g @ g.T
        inner = fixed.T @ np.linalg.solve(v, fixed)
        beta = np.linalg.solve(inner, fixed.T @ np.linalg.solve(v, y))
        r = y - fixed @ beta
        sigma2, nu = r @ np.linalg.solve(v, r) / 94, 94
        return np.linalg.slogdet(v)[1] + np.linalg.slogdet(inner)[1] + nu * (1 + np.log(2 * np.pi * sigma2))

    assert fit.criterion == pytest.approx(dense(fit.psi[0, 0], tau), abs=1e-8)
    best = optimize.minimize(lambda log: dense(*np.exp(log)), np.log([fit.psi[0, 0], tau]), method="Nelder-Mead")
    assert fit.criterion == pytest.approx(best.fun, abs=1e-4)


def table(bend, classes=False, sites=15, rows=60, seed=0):
    draw = np.random.default_rng(seed)
    site = np.repeat(np.arange(sites), rows)
    x = draw.normal(size=(len(site), 2))
    eta = bend * np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.7 * draw.normal(size=sites)[site]
    y = draw.uniform(size=len(site)) < 1 / (1 + np.exp(-eta)) if classes else eta + 0.5 * draw.normal(size=len(site))
    return pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1], "site": [f"s{k}" for k in site], "y": y * 1})


def after(data, method, rounds=40, stages=(), **options):
    with simulate(data, "mlr", method, stages=stages, curves=True, **options) as loop:
        reports = list(loop.rounds(rounds))
    return loop, reports


def federation(frame, task):
    return Federation.from_table(frame, client_column="site", label_column="y", task=task)


def test_the_evidence_of_training_rows_decides():
    plain = federation(table(0.0), "regression")
    loop, reports = after(plain, "lmm", 5)
    with simulate(plain, "mlr", "lmm") as without:
        without.round()
    assert loop.server.fit.beta[:3].numpy() == pytest.approx(without.server.fit.beta.numpy(), rel=1e-12)
    assert not bool(loop.server.fit.beta[3:].any())
    assert [report.active for report in reports] == [15, 15, 0, 0, 0]  # counts, then sums
    loop, _ = after(federation(table(2.0), "regression"), "lmm", 2)
    assert bool(loop.server.fit.beta[3:].any())
    figures = loop.algorithm.figures(loop.server)
    assert float(figures["bends"][0]) > 5 * float(figures["bends"][1])


def test_newton_steps_take_curves_or_leave_them():
    loop, reports = after(federation(table(2.5, classes=True, rows=100), "classification"), "glmm")
    assert int(loop.server.estimate.curves) == TAKEN
    assert reports[-1].active == 0
    with simulate(federation(table(0.0, classes=True), "classification"), "mlr", "glmm") as without:
        list(without.rounds(20))
    loop, reports = after(federation(table(0.0, classes=True), "classification"), "glmm")
    assert int(loop.server.estimate.curves) == NO_CURVES
    assert loop.server.estimate.fit[0][:3] == pytest.approx(without.server.estimate.fit[0], abs=1e-6)
    assert reports[-1].active == 0


def test_secure_sums_know_no_more_and_lead_to_the_same_curves():
    data = federation(table(2.5, classes=True), "classification")
    plain, _ = after(data, "glmm", 12)
    hidden, _ = after(data, "glmm", 12, (SecureSum(SecureSettings(), ("sums",), len(data)),))
    assert hidden.server.form.numpy() == pytest.approx(plain.server.form.numpy(), abs=1e-6)
    assert hidden.server.estimate.fit[0] == pytest.approx(plain.server.estimate.fit[0], abs=1e-3)


@pytest.fixture(scope="module")
def run():
    everything = table(2.0, rows=80, seed=1)
    data = federation(everything, "regression")
    options = {"plain": {"method": "lmm"}, "curved": {"method": "lmm", "curves": True}}
    return kinfed.run(federation=data, model="mlr", algorithms=options, rounds=1, seeds=(0,), progress=False)


def test_models_predict_their_curves_with_intervals_and_say_so(run, tmp_path):
    new = pd.DataFrame({"x1": np.linspace(-1.2, 1.2, 9), "x2": 0.0})
    model = run.personal_model("s3", "curved")
    curve = model.predictions(new, level=0.9)
    wanted = 2 * np.sin(2 * new.x1)
    got = curve.outputs.numpy().ravel()
    assert got - got.mean() == pytest.approx(wanted - wanted.mean(), abs=0.5)
    line = run.personal_model("s3", "plain").predictions(new, level=0.9)
    width, plain_width = (np.diff(each.sets.numpy()).mean() for each in (curve, line))
    assert 1.5 < width < 0.6 * plain_width
    model.save(tmp_path / "s3.safetensors")
    again = kinfed.serving.ModelPipeline.read(tmp_path / "s3.safetensors").predictions(new, level=0.9)
    assert again.sets.numpy() == pytest.approx(curve.sets.numpy())


def test_it_is_refused_in_words():
    draw = np.random.default_rng(0)
    wide = Federation.from_arrays(draw.normal(size=(60, 41)), draw.normal(size=60), np.repeat(np.arange(6), 10))
    with pytest.raises(ConfigError, match="up to 40 columns"):
        simulate(wide, "mlr", "lmm", curves=True)
    with pytest.raises(ConfigError, match="curves need the sums of every site"):
        simulate(federation(table(0.0), "regression"), "mlr", "lmm", curves=True, totals=True)
