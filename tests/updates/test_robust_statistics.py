"""Robust averages and screening of models with running statistics: norms and distances are of parameters alone, and
statistics are no way around a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.fedem import Up
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.server.schedule import Schedule
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import normalized_model
from kinfed.updates.robust import Clip, Krum, Median, RobustAverage, Rule, TrimmedMean
from kinfed.updates.screening import Screening, UpdateSpec, trained_columns
from kinfed.updates.stages import Updates

TRAINED = torch.tensor([True, True, False])
INFO = RoundInfo(1, Population(3, 0))


def average(rule: Rule, method: str, up: Any) -> Tensor:
    stage = RobustAverage(rule, make_algorithm(method, LocalTraining()), TRAINED)
    mean: Tensor = stage.at_server(Updates(torch.arange(len(up.delta)), up, 0), INFO).mean.delta
    return mean


def result(rule: Rule, *values: list[float]) -> Tensor:
    return average(rule, "fedavg", DeltaUp(torch.tensor(values), None))


def test_clipping_goes_by_the_norm_of_parameters_and_takes_the_median_of_statistics() -> None:
    row = result(Clip(5.0), [3.0, 4.0, 900.0], [6.0, 8.0, 1.0], [0.0, 0.0, 2.0])
    torch.testing.assert_close(row, torch.tensor([2.0, 8 / 3, 2.0]))


def test_krum_goes_by_the_distances_of_parameters() -> None:
    near = [[1.0, 0.0, 1.0], [1.1, 0.0, 1e6], [0.9, 0.0, 2.0], [1.0, 0.1, 3.0]]
    row = result(Krum(1), *near, [50.0, 50.0, 2.5])
    assert float(row[:2].norm()) < 1.2  # the one far away in parameters is out, whatever its statistics
    assert float(row[2]) == 2.5


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.34)], ids=lambda rule: type(rule).__name__)
def test_rules_by_coordinate_treat_statistics_alike(rule: Rule) -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [2.0, 9.0, 1.0], [7.0, 1.0, 2.0]])
    assert torch.equal(result(rule, *values.tolist()), rule(values))


def test_every_component_of_a_mixture_has_its_statistics() -> None:
    delta = torch.tensor([[[3.0, 4.0, 100.0], [0.0, 0.0, 5.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 6.0]]])
    mean = average(Clip(2.5), "fedem", Up(delta, None))
    torch.testing.assert_close(mean, torch.tensor([[0.75, 1.0, 50.5], [0.0, 0.0, 5.5]]))


def test_the_largest_norm_is_that_of_parameters() -> None:
    delta = torch.tensor([[3.0, 4.0, 900.0], [6.0, 8.0, 0.0], [1.0, 1.0, torch.nan]])
    found = Screening(5.5, TRAINED).at_server(Updates(torch.arange(3), DeltaUp(delta, None), 36), INFO)
    assert found.ids.tolist() == [0]
    assert "norm 10" in found.refused[1]
    assert "NaN" in found.refused[2]
    good = {"delta": delta[:1]}
    assert UpdateSpec.from_update(good, 5.5, TRAINED).violation(good) is None
    assert "norm 900" in str(UpdateSpec.from_update(good, 5.5).violation(good))


def test_which_columns_of_an_update_are_parameters() -> None:
    task = make_task(normalized_model)  # 30 and 12 and 21 parameters, 12 statistics
    training = LocalTraining()
    whole = trained_columns(make_algorithm("fedavg", training), task)
    assert whole is not None
    assert whole.tolist() == [True] * 63 + [False] * 12
    shared = trained_columns(make_algorithm("fedper", training), task)
    assert shared is not None
    assert shared.tolist() == [True] * 42 + [False] * 12
    assert trained_columns(make_algorithm("fedbn", training), task) is None


def test_a_run_with_hostile_statistics_keeps_its_variances() -> None:
    """One client of seven sends statistics that no data have; every rule holds, and the plain mean does not."""
    method = make_algorithm("fedavg", LocalTraining(batch=5, steps=3))

    def least_variance(rule: Rule | None) -> float:
        bench = Bench(method, federation=tiny_federation((6,) * 7), model=normalized_model)
        trained = trained_columns(method, bench.make_task())
        stages = [] if rule is None else [RobustAverage(rule, method, trained)]
        with bench.loop(Schedule(), stages=stages) as loop:
            train = loop.pool.train

            def hostile(*args: object, **more: object) -> Updates:
                reply = train(*args, **more)  # type: ignore[arg-type]
                reply.rows.delta[3, loop.task.trainable.stop :] = -100.0
                return reply

            loop.pool.train = hostile  # type: ignore[method-assign]
            loop.round()
            models = method.server_models(loop.server)
            assert models is not None
            return float(models.models[0, -6:].min())

    for rule in (Clip(), Median(), TrimmedMean(0.2), Krum(1)):
        assert least_variance(rule) > 0
    assert least_variance(None) < 0
