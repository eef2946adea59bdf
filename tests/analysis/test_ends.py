"""Methods that end by themselves beside others: all seeds count, verdicts are given, and figures are those of the kind
of problem."""

import dataclasses

import numpy as np
import pytest

import kinfed
from kinfed.analysis.comparison import cautions
from kinfed.records import headline_text


@pytest.fixture(scope="module")
def survival():
    draw = np.random.default_rng(0)
    x, clinic = draw.normal(size=(300, 3)), np.repeat(["a", "b", "c"], 100)
    time, end = draw.exponential(np.exp(-x[:, 0])), draw.exponential(2.0, 300)
    data = kinfed.Federation.from_arrays(x, np.stack([np.minimum(time, end), time <= end], 1), clinic, task="survival")
    settings = {"model": "mlr", "rounds": 12, "seeds": (0, 1), "progress": False}
    return kinfed.run(federation=data, algorithms="local,fedavg,cox", **settings)


def test_survival_is_compared_by_concordance(survival):
    assert survival.comparison.metric == "concordance"
    assert headline_text(survival.result("cox").personal).startswith("C-index")
    assert headline_text({"accuracy": 0.5, "rank_error": 0.25}) == "Rank error 0.25"  # of ordered classes
    assert headline_text({"accuracy": 0.5, "loss": 1.0}) == "accuracy 50.0%"


def test_a_method_that_has_learnt_all_has_had_enough_rounds(survival):
    methods = {method.algorithm: method for method in survival.comparison.methods}
    assert methods["cox"].final_round < methods["fedavg"].final_round == 12
    assert methods["cox"].knows_its_end
    assert not methods["fedavg"].knows_its_end
    assert survival.comparison.same_final_round
    assert not any("different rounds" in note for note in cautions(survival.comparison))


def test_seeds_that_end_earlier_count(survival):
    (cox,) = (method for method in survival.comparison.methods if method.algorithm == "cox")
    first, second = cox.trials
    earlier = dataclasses.replace(second, rounds=second.rounds[:-1])
    cut = dataclasses.replace(cox, trials=(first, earlier))
    assert cut.seeds == (0, 1)
    unfinished = dataclasses.replace(cox, trials=(first, dataclasses.replace(earlier, finished=False)))
    assert unfinished.seeds == (0,)


def test_rounds_that_were_asked_for_and_differ_are_no_verdict(survival):
    comparison = survival.comparison
    fedavg = next(method for method in comparison.methods if method.algorithm == "fedavg")
    shorter = tuple(dataclasses.replace(trial, rounds=trial.rounds[:5], finished=False) for trial in fedavg.trials)
    methods = tuple(
        dataclasses.replace(method, trials=shorter) if method.algorithm == "fedavg" else method
        for method in comparison.methods
    )
    assert not dataclasses.replace(comparison, methods=methods).same_final_round
