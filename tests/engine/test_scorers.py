"""scikit-learn's scorers as metrics: the same values as scikit-learn's own call, or a refusal that says why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import get_scorer, get_scorer_names, matthews_corrcoef

import kinfed
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Judged
from kinfed.errors import ConfigError
from kinfed.records.run_record import headline_text

PROBLEMS = {
    "binary": Problem.of_classes(2),
    "multiclass": Problem.of_classes(3),
    "regression": Problem("regression", mean=5.0, scale=0.5),
}


def judged(problem: Problem) -> Judged:
    numbers = np.random.default_rng(1)
    owner = np.repeat([0, 1], [40, 25])
    if problem.is_regression:
        target = numbers.normal(size=65)
        return Judged((target + 0.3 * numbers.normal(size=65))[:, None], target, owner, 2, problem)
    target = np.arange(65) % problem.num_classes
    output = numbers.normal(size=(65, problem.num_classes)) + np.eye(problem.num_classes)[target]
    return Judged(output, target, owner, 2, problem)


def model_of(data: Judged, own: np.ndarray) -> DummyClassifier | DummyRegressor:
    """scikit-learn's dummy, taught to say what the model says of these rows."""

    def predict(rows: object) -> np.ndarray:
        return data.problem.restored(data.output[own, 0]) if data.problem.is_regression else data.predicted[own]

    def predict_proba(rows: object) -> np.ndarray:
        return data.probability[own]

    if data.problem.is_regression:
        model = DummyRegressor().fit([[0]], [0])
    else:
        model = DummyClassifier().fit([[0]] * data.problem.num_classes, range(data.problem.num_classes))
        model.predict_proba = predict_proba
    model.predict = predict
    return model


@pytest.mark.parametrize("kind", PROBLEMS)
def test_every_scorer_is_scikit_learns_or_refused(kind: str) -> None:
    problem = PROBLEMS[kind]
    data, refused = judged(problem), []
    for name in get_scorer_names():
        try:
            metric = METRICS.headline(problem, name)
        except ConfigError:
            refused.append(name)
            continue
        if metric.name in METRICS:
            continue  # ours, which has its own tests
        value = metric.value(torch.from_numpy(np.stack(metric.sums(data), 1)))
        for client in (0, 1):
            own = np.flatnonzero(data.owner == client)
            target = problem.restored(data.target[own]) if problem.is_regression else data.target[own]
            wanted = get_scorer(name)(model_of(data, own), np.zeros((len(own), 1)), target)
            assert float(value[client]) == pytest.approx(wanted, rel=1e-9), name
    assert {"rand_score", "f1_samples"} <= set(refused)
    assert ("explained_variance" in refused) == (kind != "regression")
    assert ("matthews_corrcoef" in refused) == (kind == "regression")


def test_a_run_is_judged_by_a_scorer(federation: Federation) -> None:
    settings = {"rounds": 1, "seeds": (0,), "model": "mlr", "participation": 1.0}
    result = kinfed.run(federation=federation, algorithms="fedavg", metric="matthews_corrcoef", **settings)
    entry, model = result.result(), result.personal_model("0")
    assert entry.metric == "matthews_corrcoef"
    rows = federation.test[0]
    predicted = np.argmax(model.predict_proba(federation.features.gather(rows).numpy()), 1)
    wanted = matthews_corrcoef(federation.labels[rows].numpy(), predicted)
    score = entry.evaluation.personal
    assert float(score.metric("matthews_corrcoef")[0]) == pytest.approx(wanted)
    assert entry.personal["matthews_corrcoef"] <= 1
    assert headline_text(entry.personal, "matthews_corrcoef").startswith("matthews_corrcoef ")
    assert headline_text(entry.personal, "roc_auc").startswith("AUROC ")
    assert headline_text(entry.personal).startswith("accuracy ")
    with pytest.raises(ConfigError, match="metric explained_variance is for numbers"):
        kinfed.run(federation=federation, algorithms="fedavg", metric="explained_variance", **settings)
    with pytest.raises(ConfigError, match="did you mean matthews_corrcoef"):
        kinfed.run(federation=federation, algorithms="fedavg", metric="matthews_corcoef", **settings)
    assert METRICS.find("loss") is None
