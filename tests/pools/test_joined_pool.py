"""Runs that train as one cohort are the runs that they would be one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm
from kinfed.data import LocalTraining
from kinfed.engine import make_task
from kinfed.pools import JoinedPool, LocalPool, in_step, joined_pool
from kinfed.server import Loop, Schedule
from kinfed.testing import tiny_federation, tiny_model

COALITIONS = ([0, 1, 2, 3, 4, 5], [0, 3], [1, 2, 5], [3, 4])


def loops_of(method: str, backend: str, pool: Any) -> list[Loop]:
    data = tiny_federation()
    algorithm = make_algorithm(method, LocalTraining(batch=5, steps=3), {})
    task = make_task(tiny_model, backend=backend)
    if "needs validation" in algorithm.traits:
        data = data.with_validation(0.2, 0)
    return [
        Loop(
            algorithm, task, pool(algorithm, task, data, 3, workers=1), data.population(3),
            Schedule(1.0, members=torch.tensor(members), evaluates=torch.tensor(members)),
        )
        for members in COALITIONS
    ]  # fmt: skip


def models_of(loops: list[Loop]) -> list[Tensor]:
    models = [loop.evaluate(keep_models=True).models for loop in loops]
    return [one for one in models if one is not None]


@pytest.mark.parametrize("backend", ["rows", "stacked"])
@pytest.mark.parametrize("method", ["local", "fedavg", "ditto", "selffl", "fedfomo", "scaffold", "kin"])
def test_runs_that_train_together_are_the_runs_alone(
    method: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = object()
    monkeypatch.setattr(joined_pool, "JOINED_BYTES", 4 * 9 * make_task(tiny_model).num_params)  # two blocks of rows
    joined = loops_of(method, backend, lambda *args, **options: JoinedPool(together, *args, **options))
    alone = loops_of(method, backend, LocalPool)
    for _ in range(3):
        for report, other in zip(
            in_step([loop.steps() for loop in joined]), [loop.round() for loop in alone], strict=True
        ):
            assert (report.active, report.bytes_up, report.bytes_down) == (
                other.active, other.bytes_up, other.bytes_down
            )  # fmt: skip
    assert [report.active for report in in_step([loop.steps() for loop in joined])] == [len(c) for c in COALITIONS]
    for loop in alone:
        loop.round()
    for one, wanted in zip(models_of(joined), models_of(alone), strict=True):
        assert len(one) in (2, 3, 6)
        # FedFomo multiplies matrices of all rows by itself, in whatever order suits their number.
        torch.testing.assert_close(one, wanted, rtol=0, atol=0 if backend == "rows" and method != "fedfomo" else 1e-6)


def test_one_call_trains_the_clients_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    together, sizes = object(), []
    loops = loops_of("ditto", "stacked", lambda *args, **options: JoinedPool(together, *args, chunk=100, **options))
    inner = type(loops[0].algorithm).client_update

    def counted(self: Any, task: Any, client: Any, down: Any, data: Any) -> Any:
        sizes.append(len(data))
        return inner(self, task, client, down, data)

    monkeypatch.setattr(type(loops[0].algorithm), "client_update", counted)
    in_step([loop.steps() for loop in loops])
    assert sizes == [sum(map(len, COALITIONS))]


def test_stages_and_kept_moments_are_refused() -> None:
    data, training = tiny_federation(), LocalTraining(optimizer="adam", optimizer_state="kept")
    with pytest.raises(ValueError, match="together"):
        JoinedPool(object(), make_algorithm("fedavg", training, {}), make_task(tiny_model), data, 0)
