"""scikit-learn's own checks, and clients in pipelines, searches and cross-validation."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from kinfed.sklearn import PersonalizedClassifier, PersonalizedRegressor
from tests.tabular.conftest import make_table

QUICK: dict[str, Any] = {"rounds": 4, "steps": 20}


# As of scikit-learn's own SGDClassifier: a weight is a factor of the loss, and no second place in the batches.
BATCHES = {"check_sample_weight_equivalence_on_dense_data": "batches are drawn at random from rows"}


@pytest.mark.parametrize("estimator", [PersonalizedClassifier(rounds=8), PersonalizedRegressor(rounds=8)], ids=repr)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_finds_nothing_wrong(estimator: Any) -> None:
    results = check_estimator(estimator, on_skip=None, expected_failed_checks=BATCHES)
    assert len(results) > 40
    assert [one["check_name"] for one in results if one["status"] == "xfail"] == list(BATCHES)


@pytest.fixture
def routing() -> Iterator[None]:
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two clients of opposite opinion: no one model can serve both."""
    draw = np.random.default_rng(0)
    X, client = draw.normal(size=(120, 3)), np.tile(["east", "west"], 60)
    y = np.where((X[:, 0] > 0) == (client == "east"), "yes", "no")
    return X, y, client


def test_every_client_has_its_own_model_and_others_the_servers() -> None:
    X, y, client = rows()
    model = PersonalizedClassifier(**QUICK, folds=2).fit(X, y, client=client)
    assert model.score(X, y, client=client) > 0.85
    assert model.score(X, y) < 0.8
    assert model.clients_.tolist() == ["east", "west"]
    np.testing.assert_array_equal(model.predict_proba(X, client=["nobody"] * 120), model.predict_proba(X))
    mixed = np.where(np.arange(120) % 2 == 0, client, "nobody")
    expected = np.where(
        (np.arange(120) % 2 == 0)[:, None], model.predict_proba(X, client=client), model.predict_proba(X)
    )
    np.testing.assert_array_equal(model.predict_proba(X, client=mixed), expected)


def test_a_method_by_name_and_what_it_has_for_others() -> None:
    X, y, client = rows()
    alone = PersonalizedClassifier("local", **QUICK).fit(X, y, client=client)
    with pytest.raises(ValueError, match="client 'north' was not there at fit, and local has no server model"):
        alone.predict(X[:1], client=["north"])
    with pytest.raises(ValueError, match="rows come without a client"):
        alone.predict(X)
    ditto = PersonalizedRegressor("ditto", options={"lam": 0.01}, **QUICK).fit(X, X[:, 1] * 3 + 10, client=client)
    assert ditto.score(X, X[:, 1] * 3 + 10, client=client) > 0.9
    assert ditto.predict(X).shape == (120,)
    with pytest.raises(ValueError, match="unknown option of ditto 'lamb'"):
        PersonalizedClassifier("ditto", options={"lamb": 1}).fit(X, y, client=client)
    with pytest.raises(ValueError, match="options are those of one method"):
        PersonalizedClassifier(options={"lam": 1}).fit(X, y, client=client)
    with pytest.raises(ValueError, match="120 rows, 3 names"):
        PersonalizedClassifier().fit(X, y, client=["a", "b", "c"])


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames_with_categories_and_gaps(frame: Any) -> None:
    table = make_table()
    X = frame({name: table[name] for name in ("age", "dose", "group")})
    model = PersonalizedClassifier("fedavg", **QUICK).fit(X, table["outcome"], client=table["site"])
    assert model.classes_.tolist() == ["ill", "well"]
    assert model.n_features_in_ == 3
    assert model.score(X, table["outcome"], client=table["site"]) > 0.7
    if frame is pd.DataFrame:  # parts of frames keep their old index, which is no feature
        some = X.iloc[::-2]
        part = PersonalizedClassifier("fedavg", **QUICK).fit(some, table["outcome"][::-2], client=table["site"][::-2])
        assert part._pipelines["north"].inputs.columns == ["age", "dose", "group"]
    new = frame({"age": [None, 40.0], "dose": [0.5, -2.0], "group": ["c", "a"]})
    assert model.predict_proba(new, client=["north", "elsewhere"]).shape == (2, 2)


def test_clients_reach_pipelines_searches_and_folds(routing: None) -> None:
    X, y, client = rows()
    personal = PersonalizedClassifier("local", **QUICK)
    personal.set_fit_request(client=True).set_predict_request(client=True).set_score_request(client=True)
    pipeline = make_pipeline(StandardScaler(), personal)
    pipeline.fit(X, y, client=client)
    assert pipeline.score(X, y, client=client) > 0.85
    scores = cross_validate(pipeline, X, y, params={"client": client}, cv=2)["test_score"]
    assert scores.min() > 0.8
    search = GridSearchCV(personal, {"lr": [1e-6, 0.1]}, cv=2).fit(X, y, client=client)
    assert search.best_params_ == {"lr": 0.1}
    assert search.best_estimator_.score(X, y, client=client) > 0.85


def test_weights_of_rows() -> None:
    X, y, client = rows()
    weights = np.where(np.arange(120) % 3 == 0, 0.0, 1.0 + np.arange(120) % 2)
    some = weights > 0
    weighted = PersonalizedClassifier("ditto", **QUICK).fit(X, y, client=client, sample_weight=weights)
    rest = PersonalizedClassifier("ditto", **QUICK).fit(X[some], y[some], client[some], sample_weight=weights[some])
    np.testing.assert_array_equal(weighted.predict_proba(X, client=client), rest.predict_proba(X, client=client))
    wrong = np.where(y == "yes", "no", "yes")
    both, names = np.concatenate([y, wrong]), np.concatenate([client, client])
    trust = np.repeat([1.0, 0.001], 120)
    model = PersonalizedClassifier("local", **QUICK).fit(np.vstack([X, X]), both, names, sample_weight=trust)
    assert model.score(X, y, client=client) > 0.85
    with pytest.raises(ValueError, match="at least one non-zero"):
        PersonalizedClassifier().fit(X, y, sample_weight=np.zeros(120))
    with pytest.raises(ValueError, match="Negative values"):
        PersonalizedClassifier().fit(X, y, sample_weight=-np.ones(120))


@pytest.mark.parametrize("algorithm", ["auto", "ditto", "fedfomo", "local"])
def test_a_client_that_was_not_there_is_adopted(algorithm: str) -> None:
    X, y, client = rows()
    model = PersonalizedClassifier(algorithm, **QUICK, folds=2).fit(X, y, client=client)
    before = model.predict_proba(X, client=client)
    draw = np.random.default_rng(1)
    new = draw.normal(size=(40, 3))
    like_west = np.where(new[:, 0] < 0, "yes", "no")
    model = pickle.loads(pickle.dumps(model)).adopt(new, like_west, client="north")
    assert model.score(new, like_west, client=["north"] * 40) > 0.85
    assert model.clients_.tolist() == ["east", "north", "west"]
    np.testing.assert_array_equal(model.predict_proba(X, client=client), before)
    with pytest.raises(ValueError, match="'north' has a model already"):
        model.adopt(new, like_west, client="north")
    with pytest.raises(ValueError, match=r"classes that were not there at fit \('perhaps'\); known are no, yes"):
        model.adopt(new, ["perhaps"] * 40, client="south")
    one_class = model.adopt(new[:4], ["yes"] * 4, client="hut")
    assert set(one_class.predict(new, client=["hut"] * 40)) <= {"no", "yes"}


def test_numbers_for_a_client_that_was_not_there() -> None:
    X, _, client = rows()
    y = 10 + 3 * X[:, 1] + np.where(client == "east", 5, -5)
    model = PersonalizedRegressor("ditto", options={"lam": 0.01}, **QUICK | {"rounds": 8}).fit(X, y, client=client)
    assert model.score(X[60:], 20 + 3 * X[60:, 1], client=["north"] * 60) < 0, (
        "the server's model, for whom it does not know"
    )
    model.adopt(X[:60], 20 + 3 * X[:60, 1], client="north", sample_weight=1 + np.arange(60) % 2)
    assert model.score(X[60:], 20 + 3 * X[60:, 1], client=["north"] * 60) > 0.9


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_clients_as_a_column_of_the_frame(frame: Any) -> None:
    X, y, client = rows()
    table = frame({"where": client, "a": X[:, 0], "b": X[:, 1], "c": X[:, 2]})
    model = PersonalizedClassifier("local", client_column="where", **QUICK).fit(table, y)
    assert model.clients_.tolist() == ["east", "west"]
    assert model.n_features_in_ == 3
    by_argument = PersonalizedClassifier("local", **QUICK).fit(X, y, client=client)
    np.testing.assert_allclose(model.predict_proba(table), by_argument.predict_proba(X, client=client), atol=1e-6)
    # Scorers by name reach the clients' own models: the two are of opposite opinion, and no other way ranks them.
    scores = cross_validate(model, table, y, cv=2, scoring="roc_auc")["test_score"]
    assert scores.min() > 0.9
    with pytest.raises(ValueError, match="X has no column 'where'"):
        model.predict(frame({"a": [1.0], "b": [1.0], "c": [1.0]}))
    with pytest.raises(ValueError, match="leave the argument client out"):
        model.predict(table, client=client)
    with pytest.raises(ValueError, match="is a column of a frame"):
        PersonalizedClassifier(client_column="where").fit(X, y)
    gap = frame({"where": [None, *client[1:]], "a": X[:, 0], "b": X[:, 1], "c": X[:, 2]})
    with pytest.raises(ValueError, match="row 0 names no client"):
        PersonalizedClassifier("local", client_column="where").fit(gap, y)


def test_classes_count_by_their_weights() -> None:
    X, y, client = rows()
    rare = (y == "no") | (np.arange(120) % 5 == 0)
    X, y, client = X[rare] + np.random.default_rng(2).normal(size=(int(rare.sum()), 3)), y[rare], client[rare]

    def share_of_rare(**settings: Any) -> float:
        model = PersonalizedClassifier(**QUICK, **settings).fit(X, y, client=client)
        return float((model.predict(X, client=client) == "yes").mean())

    assert share_of_rare(algorithm="ditto", class_weight={"yes": 50.0}) > share_of_rare(algorithm="ditto") + 0.1
    assert share_of_rare(algorithm="ditto", class_weight="balanced") > share_of_rare(algorithm="ditto")
    with pytest.raises(ValueError, match="'maybe', which is no class of y"):
        share_of_rare(class_weight={"maybe": 2})
    with pytest.raises(ValueError, match="class_weight is balanced, by_client or"):
        share_of_rare(class_weight="equal")


def test_prediction_sets_of_estimators_hold_the_truth_about_as_often_as_they_say() -> None:
    draw = np.random.default_rng(3)
    X, client = draw.normal(size=(900, 3)), np.repeat([f"c{k:02}" for k in range(12)], 75)
    score = X[:, 0] + 0.8 * draw.normal(size=900)
    train = np.arange(900) % 3 > 0
    for estimator, y in ((PersonalizedClassifier, score > 0), (PersonalizedRegressor, score)):
        model = estimator(rounds=5, folds=3).fit(X[train], y[train], client=client[train])
        for names in (client[~train], None):  # clients of the fit, and one that was not there
            sets = model.predict_set(X[~train], client=names, level=0.8)
            truth = y[~train]
            if estimator is PersonalizedClassifier:
                covered = sets[np.arange(len(truth)), np.searchsorted(model.classes_, truth)]
                assert sets.any(1).all()
            else:
                covered = (sets[:, 0] <= truth) & (truth <= sets[:, 1])
            assert 0.72 <= covered.mean() <= 0.97
    with pytest.raises(ValueError, match=r"sets of level 0\.42 are not in"):
        model.predict_set(X, client=client, level=0.42)
    alone = PersonalizedClassifier("local", rounds=2).fit(X, score > 0, client=client)
    with pytest.raises(ValueError, match='algorithm="auto"'):
        alone.predict_set(X, client=client)
