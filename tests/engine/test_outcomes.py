"""Objectives beyond classes and numbers: each on every gradient path against plain torch, and what training leads to
against closed forms; metrics against scikit-survival, scikit-learn and loops."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import mean_poisson_deviance
from torch import nn
from torch.nn import functional as F

import kinfed
from kinfed.data import Batch, Federation, Problem, kaplan_meier
from kinfed.data.examples.survival_curves import survival_table
from kinfed.deploy.settings import Deployment
from kinfed.engine import LOSSES, METRICS, Judged, make_objective, make_task, model_for
from kinfed.engine.scoring.outcome_metrics import brier_terms
from kinfed.errors import ConfigError, DataError, ModelError
from kinfed.sklearn import PersonalizedSurvival

B, D = 7, 4


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def survival_targets(n=40, seed=1):
    time = numbers(n, seed=seed).exp().double()
    event = (numbers(n, seed=seed + 1) > -0.3).double()
    return torch.stack([time, event], 1)


SURVIVAL = Problem.of_survival(survival_targets(), periods=5)
COUNTS = Problem.of_counts(np.array([0.0, 1, 1, 2, 9, 4]))
ORDINAL = Problem("ordinal", 4)
LABELS = Problem("multilabel", shape=(3,))
SEVERAL = Problem.of_numbers(np.array([[0.0, 5.0], [2.0, 9.0], [4.0, 1.0]]))
DENSE = Problem("dense", 3, shape=(5,))


def hand_survival(z, y):
    """Bernoulli trials of every person and period, written out."""
    total = []
    for row, (time, event) in zip(z, y.tolist(), strict=True):
        row = row.expand(len(SURVIVAL.periods))
        begin, loss = 0.0, z.new_zeros(())
        for k, (end, hazard) in enumerate(zip(SURVIVAL.periods, SURVIVAL.hazards, strict=True)):
            chance = 1 - torch.exp(-hazard * row[k].exp())
            if time >= end and not (event and time == end):
                loss = loss - torch.log(1 - chance)
            elif event and begin < time <= end:
                loss = loss - torch.log(chance)
            begin = end
        total.append(loss)
    return torch.stack(total)


def hand_cox(z, y):
    total = []
    for (time, event), eta in zip(y.tolist(), z[:, 0], strict=True):
        risk = torch.stack([other[0].exp() for other, t in zip(z, y[:, 0].tolist(), strict=True) if t >= time]).sum()
        total.append((risk.log() - eta) * event)
    return torch.stack(total)


def hand_ordinal(z, y):
    above = torch.cat([torch.ones(len(z), 1), torch.sigmoid(z), torch.zeros(len(z), 1)], 1)
    return -torch.log(above.gather(1, y[:, None]) - above.gather(1, y[:, None] + 1))[:, 0]


def hand_labels(z, y):
    losses = [
        torch.stack(
            [F.binary_cross_entropy_with_logits(a, b) for a, b in zip(z[i], y[i], strict=True) if b == b]
        ).mean()
        for i in range(len(y))
    ]
    return torch.stack(losses)


def hand_dense(z, y):
    return torch.stack([F.cross_entropy(z[i], y[i], ignore_index=-100) for i in range(len(y))])


def hand_negative_binomial(z, y):
    alpha, mean = COUNTS.dispersion, COUNTS.mean
    r = 1 / alpha
    model = torch.distributions.NegativeBinomial(r, probs=None, logits=torch.log(alpha * mean * z[:, 0].exp()))
    best = torch.distributions.NegativeBinomial(r, logits=torch.log(alpha * y.clamp_min(1e-9)))
    half_deviance = best.log_prob(y) - model.log_prob(y)
    return half_deviance * (1 + alpha * mean) / mean


def some_labels():
    y = (numbers(B, 3, seed=4) > 0).float()
    y[0, 1] = y[2, 0] = torch.nan
    return y


def some_positions():
    y = (numbers(B, 5, seed=5).abs() * 1.4).long().clamp_max(2)
    y[:, 3:] = -100
    return y


CASES = {
    "discrete_time": (SURVIVAL, survival_targets(B, 7).float(), hand_survival),
    "partial_likelihood": (replace(SURVIVAL, proportional=True), survival_targets(B, 7).float(), hand_cox),
    "poisson": (COUNTS, torch.tensor([0.0, 3, 1, 0, 8, 2, 1]),
                lambda z, y: F.poisson_nll_loss(z[:, 0] + math.log(COUNTS.mean), y, reduction="none") / COUNTS.mean),
    "negative_binomial": (COUNTS, torch.tensor([0.0, 3, 1, 0, 8, 2, 1]), hand_negative_binomial),
    "proportional_odds": (ORDINAL, torch.tensor([0, 3, 1, 2, 2, 0, 3]), hand_ordinal),
    "binary_labels": (LABELS, some_labels(), hand_labels),
    "squared": (SEVERAL, numbers(B, 2, seed=6), lambda z, y: F.mse_loss(z, y, reduction="none").mean(1) / 2),
    "positions": (DENSE, some_positions(), hand_dense),
    "focal:2": (Problem.of_classes(3), torch.tensor([0, 2, 1, 1, 0, 2, 2]),
                lambda z, y: -(1 - z.softmax(1)[range(len(y)), y]) ** 2 * z.log_softmax(1)[range(len(y)), y]),
    "quantile:0.9": (Problem.of_numbers([1.0, 3.0]), numbers(B, seed=8),
                     lambda z, y: torch.where(y > z[:, 0], 0.9 * (y - z[:, 0]), 0.1 * (z[:, 0] - y))),
}  # fmt: skip


def network(problem):
    def build():
        outputs = 1 if problem.kind == "ordinal" else problem.outputs
        if problem.kind == "dense":
            return nn.Sequential(nn.Linear(D, 5 * 3), nn.Unflatten(1, (5, 3)))
        return nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, outputs))

    return model_for(problem, (D,), build)


@pytest.mark.parametrize("loss", CASES)
@pytest.mark.parametrize("backend", ["rows", "stacked", "vmap"])
def test_gradients_of_every_objective_are_those_of_plain_torch(loss, backend):
    problem, y, by_hand = CASES[loss]
    if backend == "stacked" and problem.kind in ("ordinal", "dense"):
        pytest.skip("not a chain of dense layers")
    objective = make_objective(problem, loss)
    if objective.couples and backend == "vmap":
        with pytest.raises(ModelError, match="whole batches"):
            make_task(network(problem), backend=backend, objective=objective)
        return
    task = make_task(network(problem), backend=backend, objective=objective, example=numbers(2, D),
                     outputs=problem.output_shapes)  # fmt: skip
    theta = torch.stack([task.init(0), task.init(1)])
    x = numbers(2, B, D, seed=3)
    weight = torch.full((2, B), 1 / B)
    weight[1, -2:] = 0  # padding
    weight[1, :-2] = 1 / (B - 2)
    gradient = task.grad(theta, Batch(x, torch.stack([y, y]), weight, torch.arange(2)))
    for i in range(2):
        real = weight[i] > 0
        module = task.module_of(theta[i])
        losses = by_hand(module(x[i][real]), y[real])
        if loss != "poisson":  # which torch has without what does not depend on the model
            assert torch.allclose(objective.losses(module(x[i][real]), y[real]), losses, atol=2e-5)
        module.zero_grad()
        (losses * weight[i][real]).sum().backward()
        expected = task.flatten({name: p.grad for name, p in module.named_parameters()})
        assert torch.allclose(gradient[i], expected, atol=2e-6)


def test_a_constant_learns_the_mean_of_counts_and_the_hazard_of_every_period():
    z = torch.zeros(1, requires_grad=True)
    counts = torch.tensor([0.0, 3, 1, 0, 8, 2, 1])
    constant = (z + math.log(counts.mean() / COUNTS.mean)).expand(7, 1)
    (slope,) = torch.autograd.grad(make_objective(COUNTS).losses(constant, counts).sum(), z)
    assert abs(float(slope)) < 1e-6
    targets = survival_targets()
    start = torch.zeros(len(SURVIVAL.periods), requires_grad=True)
    loss = make_objective(SURVIVAL).losses(start.expand(len(targets), -1), targets.float()).sum()
    (slope,) = torch.autograd.grad(loss, start)
    assert slope.abs().max() < 1e-5  # outputs of 0 are the hazards of these rows
    assert SURVIVAL.predicted(np.zeros((1, 5)))[0, -1] == pytest.approx(math.exp(-sum(SURVIVAL.hazards)))


# Printed by scikit-survival 0.28.0: concordance_index_censored(event, time, risk)[0] and, with y = Surv(event, time)
# and S = exp(-cumsum([0.2, 0.3, 0.5]) * exp(risk)), brier_score(y, y, S, [10, 20, 33])[1].
TIME = np.array([5, 8, 8, 12, 15, 15, 20, 22, 30, 31, 35, 40.0])
EVENT = np.array([1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0.0])
RISK = np.array([2.1, 0.3, 1.5, 0.9, 0.3, 1.1, -0.2, 0.1, 0.4, -1.0, -0.5, -0.9])
CONCORDANCE = 0.9333333333333333
BRIER = [0.07080036652637921, 0.12539951910339373, 0.09328799664345261]


def test_concordance_and_brier_scores_are_those_of_scikit_survival():
    problem = Problem("survival", shape=(2,), periods=(10, 20, 33), hazards=(0.2, 0.3, 0.5), proportional=True)
    target = np.stack([np.r_[TIME, TIME], np.r_[EVENT, EVENT]], 1)
    owner = np.repeat([0, 2], 12)
    judged = Judged(np.r_[RISK, -RISK][:, None], target, owner, 3, problem)
    right, pairs = METRICS.named("concordance").sums(judged)
    assert right[0] / pairs[0] == pytest.approx(CONCORDANCE, abs=1e-12)
    assert right[2] / pairs[2] == pytest.approx(1 - CONCORDANCE, abs=1e-12)  # the other order; no pair across clients
    assert pairs[1] == 0
    survival = judged.probability[:12]
    for place, t in enumerate((10, 20, 33)):
        assert brier_terms(TIME, EVENT, survival[:, place], t).mean() == pytest.approx(BRIER[place], abs=1e-12)
    total, count = METRICS.named("integrated_brier").sums(judged)
    assert total[0] / count[0] == pytest.approx(np.trapezoid([0, *BRIER], [0, 10, 20, 33]) / 33)


def test_weights_of_rows_are_copies_of_them():
    problem = Problem("survival", shape=(2,), periods=(10, 20, 33), hazards=(0.2, 0.3, 0.5), proportional=True)
    target, twice = np.stack([TIME, EVENT], 1), np.r_[np.arange(12), 3, 7]
    weight = np.ones(12)
    weight[[3, 7]] = 2
    weighted = Judged(RISK[:, None], target, np.zeros(12, int), 1, problem, weight=weight)
    copied = Judged(RISK[twice, None], target[twice], np.zeros(14, int), 1, problem)
    for name in ("concordance", "horizon_calibration"):
        metric = METRICS.named(name)
        a, b = (metric.value(torch.tensor(np.stack(metric.sums(d), 1))).item() for d in (weighted, copied))
        assert a == pytest.approx(b, abs=1e-12)


def test_the_kaplan_meier_curve_is_the_product_over_event_times():
    expected = 1.0
    for t in sorted(set(TIME[EVENT > 0])):
        expected *= 1 - ((t == TIME) & (EVENT > 0)).sum() / (t <= TIME).sum()
    assert kaplan_meier(TIME, EVENT, np.array([4.0, 100.0])).tolist() == pytest.approx([1.0, expected])


def test_metrics_of_counts_ordered_classes_and_labels():
    y, z, owner = np.array([0, 3, 1, 0.0]), np.array([[0.1], [0.5], [-1.0], [-2.0]]), np.array([0, 0, 1, 1])
    judged = Judged(z, y, owner, 2, COUNTS)
    total, count = METRICS.named("deviance").sums(judged)
    assert total[0] / count[0] == pytest.approx(mean_poisson_deviance(y[:2], COUNTS.mean * np.exp(z[:2, 0])))
    _, null = METRICS.named("d2").sums(judged)
    assert null[0] == pytest.approx(2 * mean_poisson_deviance(y[:2], [1.5, 1.5]))
    z = np.array([[3.0, 2.0, 1.0], [3.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
    judged = Judged(z, np.array([3, 1, 1]), np.zeros(3, int), 1, ORDINAL)
    assert judged.probability.sum(1) == pytest.approx([1, 1, 1])
    assert METRICS.named("rank_error").sums(judged)[0][0] == 0 + 0 + 1
    labels = Judged(np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1, np.nan], [1, 0.0]]), np.zeros(2, int), 1,
                    Problem("multilabel", shape=(2,)))  # fmt: skip
    assert [float(x[0]) for x in METRICS.named("label_accuracy").sums(labels)] == [2, 3]
    assert [float(x[0]) for x in METRICS.named("exact_match").sums(labels)] == [1, 2]
    assert [float(x[0]) for x in METRICS.named("label_f1").sums(labels)] == [4, 5]


def federation(task="auto", y=None, clients=4, each=40, **options):
    x = numbers(clients * each, D, seed=11).numpy()
    y = outcome(x, task) if y is None else y(x)
    return Federation.from_arrays(x, y, np.repeat(np.arange(clients), each), task=task, **options)


def outcome(x, task):
    draw = np.random.default_rng(3)
    risk = x[:, 0] - 0.5 * x[:, 1]
    if task == "survival":
        time = draw.exponential(np.exp(-risk))
        end = draw.exponential(2.0, len(time))
        return np.stack([np.minimum(time, end), time <= end], 1)
    if task == "counts":
        return draw.poisson(np.exp(0.5 + 0.7 * risk))
    if task == "ordinal":
        return np.searchsorted([-1.0, 0.0, 1.5], risk + draw.logistic(size=len(risk)) * 0.5)
    if task == "multilabel":
        return (np.stack([risk, -risk, x[:, 2]], 1) + draw.normal(size=(len(x), 3)) > 0).astype(float)
    if task == "dense":
        return np.stack([(x[:, 0] > 0) * 1, (x[:, 1] > 0) * 2], 1)
    return np.stack([risk, 100 + 20 * x[:, 2]], 1)


@pytest.mark.parametrize(
    ("task", "metric", "least"),
    [("survival", "concordance", 0.65), ("counts", "d2", 0.2), ("ordinal", "accuracy", 0.45),
     ("multilabel", "label_accuracy", 0.65), ("regression", "r2", 0.8), ("dense", "position_accuracy", 0.85)],
)  # fmt: skip
def test_every_kind_is_learned_scored_and_predicted(task, metric, least):
    data = federation(task)
    dense = lambda: nn.Sequential(nn.Linear(D, 6), nn.Unflatten(1, (2, 3)))  # noqa: E731
    result = kinfed.run(
        federation=data, algorithms="fedavg,ditto", rounds=15, steps=15, lr=0.3, participation=1.0, seeds=(0,),
        metric=metric, eval_every=0, model=dense if task == "dense" else "mlr",
    )  # fmt: skip
    (baseline,) = result.baselines
    for record in result.results:
        assert record.personal[metric] >= max(least, baseline.personal.get(metric, 0.0))
    predictions = result.personal_model("0", "ditto").predictions(data.features.raw[:3].numpy())
    assert len(predictions.outputs) == 3
    if task != "dense":
        assert len(predictions.lines()) == 3
        assert len(predictions.lines()[0]) == len(predictions.header)


def test_private_training_refuses_a_loss_that_couples_examples():
    with pytest.raises(ConfigError, match="partial_likelihood"):
        kinfed.run(
            federation=federation("survival"),
            algorithms="fedavg",
            loss="partial_likelihood",
            dp_noise=1.0,
            rounds=1,
            seeds=(0,),
        )


def test_methods_that_need_classes_refuse_by_name():
    with pytest.raises(ConfigError, match=r"FedProto works with classes.*survival"):
        kinfed.run(federation=federation("survival"), algorithms="fedproto", rounds=1, seeds=(0,))


@pytest.fixture
def own_losses():
    yield
    LOSSES.unregister("twice_squared")
    LOSSES.unregister("mean_of_batch")


@pytest.mark.usefixtures("own_losses")
def test_an_own_loss_is_registered_once_and_must_give_a_value_per_example():
    @kinfed.register("loss", "twice_squared", kinds=("regression",))
    def twice_squared(z, y):
        return (z[:, 0] - y).square()

    @kinfed.register("loss", "mean_of_batch", kinds=("regression",))
    def mean_of_batch(z, y):
        return (z[:, 0] - y).square().mean()

    data = federation(y=lambda x: x[:, 0] * 3.3)
    own, ours = (
        kinfed.run(federation=data, algorithms="fedavg", rounds=2, seeds=(0,), lr=lr, loss=loss, model="mlr")
        for loss, lr in (("twice_squared", 0.05), ("squared", 0.1))
    )
    assert own.results[0].personal["rmse"] == pytest.approx(ours.results[0].personal["rmse"], rel=1e-5)
    with pytest.raises(ModelError, match="one value per example"):
        kinfed.run(federation=data, algorithms="fedavg", rounds=1, seeds=(0,), loss="mean_of_batch")


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        ([-1.0, 2.0], "counts", "counts 0, 1, 2"),
        (["low", "high"], "ordinal", "which has no order"),
        ([0, 1], "ordinal", "an order needs three"),
        ([[1.0, 2.0], [2.0, 1.0]], "survival", "event in y is 1"),
        ([[-1.0, 1.0], [2.0, 1.0]], "survival", "0 or more"),
        ([[1.0, 0.0], [2.0, 0.0]], "survival", "no training row has an event"),
        ([[1.0, 3.0], [0.0, 1.0]], "multilabel", "0 or 1"),
        ([0.5, 1.0], "dense", "class for each position"),
    ],
)
def test_targets_that_cannot_be_are_refused_in_words(y, task, message):
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(np.zeros((2, 1)), y, ["a", "a"], task=task, test_fraction=0.0)


def test_records_of_old_kinds_hold_no_new_keys():
    assert list(Problem.of_classes(2).to_json()) == ["kind", "num_classes", "class_names", "mean", "scale"]
    for problem in (SURVIVAL, COUNTS, ORDINAL, LABELS, SEVERAL, DENSE):
        assert Problem.from_json(problem.to_json()) == problem


def test_structured_arrays_are_survival():
    y = np.array([(True, 3.0), (False, 5.0), (True, 1.0)], dtype=[("event", "?"), ("time", "f8")])
    data = Federation.from_arrays(np.zeros((3, 1)), y, ["a"] * 3, test_fraction=0.0)
    assert data.problem.kind == "survival"
    assert data.labels.tolist() == [[3.0, 1.0], [5.0, 0.0], [1.0, 1.0]]


def test_small_counts_are_not_in_curves():
    table = survival_table([np.stack([TIME, EVENT], 1), np.ones((3, 2))], 40.0)
    left = [int((t <= TIME).sum()) for t in table["times"]]
    assert [y is None for y in table["curves"][0]] == [n < 5 for n in left]
    assert table["curves"][1] == [None] * len(left)
    assert table["events"] == [7, None]
    assert table["at_risk"][0][-1] is None


def test_a_loss_is_a_function_or_a_module_too():
    data = federation(y=lambda x: x[:, 0] * 3.3)

    def pinball(z, y):
        r = y - z[:, 0]
        return torch.maximum(0.9 * r, -0.1 * r)

    class Pinball(nn.Module):
        def forward(self, z, y):
            return pinball(z, y)

    shared = {"federation": data, "algorithms": "fedavg", "rounds": 2, "seeds": (0,), "model": "mlr"}
    try:
        losses = ("quantile:0.9", pinball, Pinball())
        values = [kinfed.run(**shared, loss=loss).results[0].personal["loss"] for loss in losses]
    finally:
        LOSSES.unregister("pinball")
        LOSSES.unregister("Pinball")
    assert values[1] == values[2] == pytest.approx(values[0], rel=1e-5)


def test_an_estimator_of_survival_ranks_risks_within_clients():
    x = numbers(160, D, seed=11).numpy()
    data = outcome(x, "survival")
    y = np.array([(bool(e), t) for t, e in data], dtype=[("event", "?"), ("time", "f8")])
    client = np.repeat(["a", "b", "c", "d"], 40)
    model = PersonalizedSurvival("ditto", rounds=5, steps=10, lr=0.3).fit(x, y, client=client)
    chances = model.predict_survival(x[:5], client=client[:5])
    assert chances.shape == (5, len(model.periods_))
    assert (np.diff(chances, axis=1) <= 0).all()
    assert model.score(x, y, client=client) > 0.65
    model.adopt(x[:40], data[:40], "new")
    assert "new" in model.clients_
    with pytest.raises(ValueError, match="0 or more"):
        model.fit(x, data * [-1, 1], client=client)


def test_a_deployment_takes_any_problem_as_a_record():
    deployment = Deployment.parse({"target": '{"kind": "counts", "mean": 2.5}', "method": "fedavg"})
    assert deployment.problem == Problem("counts", mean=2.5)
    columns = {"time_column": "days", "event_column": "died"}
    survival = Deployment.parse({"target": json.dumps(SURVIVAL.to_json()), "method": "fedavg", **columns})
    assert survival.problem == SURVIVAL
    for target in ('{"kind": "survival", "shape": [2]}', '{"kind": "unknown"', '{"mean": 1}'):
        with pytest.raises(ConfigError, match="target"):
            Deployment.parse({"target": target, "method": "fedavg"})


def test_survival_runs_from_a_table_and_shows_its_curves(tmp_path):
    x = numbers(120, D, seed=11).numpy()
    y = outcome(x, "survival")
    table = pa.table({**{f"x{i}": x[:, i] for i in range(D)}, "days": y[:, 0], "died": y[:, 1].astype(bool),
                      "site": np.repeat(["a", "b"], 60)})  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    own = {"dataset": str(tmp_path / "rows.parquet"), "client_column": "site", "time_column": "days", "rounds": 2}
    result = kinfed.run(
        **own, event_column="died", algorithms="local,fedavg", model="mlr", seeds=(0,), out=tmp_path / "run"
    )
    page = result.report().read_text("utf-8")
    assert "Survival of every client" in page
    assert "at risk at time" in page
    with pytest.raises(ConfigError, match="both --time-column and --event-column"):
        kinfed.run(**own)
