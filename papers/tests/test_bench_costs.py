"""Costs of methods: gradients are counted where they happen; no test here judges a time."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from costs import Cost, compare, cost_table, counted, measure_costs, setting_of, with_validation
from rich.console import Console
from torch import nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.selffl.selffl import SelfFL
from kinfed.data.examples.batches import Batch
from kinfed.engine.task_factory import RowsTask, make_task
from kinfed.errors import ConfigError, KinfedError, ModelError
from kinfed_papers.bench.workload import synthetic

TINY = setting_of("mlr").quick()
TINY = replace(TINY, fewest=TINY.examples)  # clients of one size, as in the full setting


def batch(n: int, size: int) -> Batch:
    labels = torch.zeros(n, size, dtype=torch.int64)
    return Batch(torch.randn(n, size, 4), labels, torch.ones(n, size), torch.arange(n), 1, 0)


@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        ("fedavg", 2),  # the two steps of the quick setting
        ("ditto", 4),
        ("perfedavg", 4),
        ("perfedavg_hf", 8),
        ("apfl", 4),
        ("mocha", 0),
        ("pfedhn", 2),  # what its server's network takes is work of the server
        ("ifca", 2 + 4 * 10 / 4 / 3),  # four models on ten training examples, in batches of four, forward only
    ],
)
def test_gradients_are_those_of_the_method(method: str, gradients: float) -> None:
    cost = measure_costs(TINY, [method], repeats=1, validation=2)[0]
    assert cost.method == method
    assert cost.gradients == pytest.approx(gradients)
    assert cost.gradient_ratio == pytest.approx(gradients / 2)
    assert cost.seconds > 0
    assert cost.time_ratio > 0
    assert (cost.overhead is None) == (gradients == 0)


def test_local_steps_can_be_chosen() -> None:
    setting = setting_of("mlr", steps=50)
    assert (setting.steps, setting.batch) == (50, setting_of("mlr").batch)
    assert "50 steps of" in setting.title
    with pytest.raises(ConfigError, match="steps"):
        measure_costs(setting_of("mlr", steps=0), ["fedavg"], repeats=1)


def test_a_question_is_counted_once_however_the_task_answers_it() -> None:
    task = RowsTask(lambda: nn.Sequential(nn.Linear(4, 3)))  # its descent is made of descend_
    theta = task.init(0).expand(2, -1).clone()
    with counted(task) as count:
        descent = task.descent(theta, 1)
        descent.step(slice(0, 2), batch(2, 5), 0.1)
        assert count.examples == 10
        task.descend_(theta, batch(2, 5), 0.1)
        task.grad(theta, batch(2, 5))
        assert count.examples == 30
        task.losses(theta, batch(2, 5))
        assert count.examples == pytest.approx(30 + 10 / 3)
    task.grad(theta, batch(2, 5))
    assert count.examples == pytest.approx(30 + 10 / 3)
    assert not {"grad", "descend_", "descent", "logits"} & vars(task).keys()


def test_counting_changes_no_result() -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 3)))
    theta, examples = task.init(0).expand(2, -1).clone(), batch(2, 5)
    with counted(task):
        inside = task.grad(theta, examples)
    assert torch.equal(inside, task.grad(theta, examples))


def test_validation_examples_are_taken_from_training() -> None:
    before = synthetic(TINY)
    after = with_validation(before, 3)
    assert torch.equal(after.train.count + 3, before.train.count)
    for client in range(len(before.train)):
        assert torch.equal(torch.cat([after.train[client], after.val[client]]), before.train[client])


def test_methods_that_refuse_the_model_are_left_out_unless_they_were_asked_for() -> None:
    with pytest.raises(ModelError):
        measure_costs(setting_of("mlp").quick(), ["mocha"], repeats=1, validation=2)
    with pytest.raises(KinfedError, match="fedavgg"):
        measure_costs(TINY, ["fedavgg"])
    with pytest.raises(KinfedError, match="rnn"):
        setting_of("rnn")
    with pytest.raises(ConfigError, match="repeats"):
        measure_costs(TINY, repeats=0)


def test_selffl_is_compared_at_equal_steps_and_the_threads_are_given_back() -> None:
    torch.set_num_threads(2)
    try:
        cost = compare(SelfFL(training=TINY.training, use_steps=False), TINY, synthetic(TINY), repeats=2, warm_up=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert cost.method == "SelfFL"
    assert cost.gradient_ratio == 1.0
    assert make_algorithm("fedavg", TINY.training).training == TINY.training


def test_the_table_marks_what_gradients_do_not_explain() -> None:
    out = io.StringIO()
    costs = [
        Cost("a", 0.01, 10, 2.0, 1.9, 1.0),
        Cost("b", 0.01, 10, 1.2, 1.1, 1.0),
        Cost("c", 0.01, 0, 3, 3, 0),
    ]
    Console(file=out, width=120).print(cost_table(costs, "title"))
    lines = {line.split()[0]: line for line in out.getvalue().splitlines() if line.strip()}
    assert "2.00 !" in lines["a"]
    assert "!" not in lines["b"]
    assert lines["c"].split() == ["c", "10.0", "0.0", "3.00", "3.00", "0.00"]
    assert costs[0].figures()["overhead"] == 2.0
