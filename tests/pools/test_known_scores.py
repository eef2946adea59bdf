"""Models that have not changed since the last evaluation are not computed again, which no score shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfed.algorithms.common.averaging import ModelDown
from kinfed.algorithms.local import Local
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.scoring.score import Score
from kinfed.engine.task_factory import make_task
from kinfed.pools import known_scores
from kinfed.pools.local_pool import LocalPool
from kinfed.testing import tiny_federation, tiny_model

WORK = LocalTraining(batch=5, steps=4)
EVERYONE = torch.arange(6)


def make_pool(backend: str, data: Federation | None = None, **options: Any) -> LocalPool:
    data = tiny_federation(test=40) if data is None else data
    task = make_task(tiny_model, backend=backend)
    task.problem = data.problem
    return LocalPool(Local(training=WORK), task, data, 3, workers=1, **options)


def start(pool: LocalPool) -> Any:
    w = pool.task.init(3)
    return lambda ids: ModelDown(w.expand(len(ids), -1))


def count_scored(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients' models go through each evaluation of the task from now on."""
    scored: list[int] = []
    evaluate = pool.task.evaluate

    def counted(theta: Tensor, part: Any) -> Score:
        scored.append(len(theta))
        return evaluate(theta, part)

    monkeypatch.setattr(pool.task, "evaluate", counted)
    return scored


def assert_same_bits(one: Score | None, other: Score | None) -> None:
    assert one is not None
    assert other is not None
    for name in ("correct", "loss", "count", "error"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)
    assert one.sums.keys() == other.sums.keys()
    for name, values in one.sums.items():
        torch.testing.assert_close(values, other.sums[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["fused", "rows"])
def test_only_changed_models_are_scored_again_to_the_same_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a resume: a pool that knows nothing yet and is given the same states says the same of everyone."""
    pool = make_pool(backend)
    pool.train(EVERYONE, start(pool), 1)
    scored = count_scored(pool, monkeypatch)
    pool.evaluate(EVERYONE, start(pool), 1)
    assert sum(scored) == 6
    pool.train(torch.tensor([1, 4]), start(pool), 2)
    scored.clear()
    evaluation = pool.evaluate(EVERYONE, start(pool), 2)
    assert sum(scored) == 2
    resumed = make_pool(backend)
    resumed.load(pool.states())
    assert_same_bits(evaluation.personal, resumed.evaluate(EVERYONE, start(resumed), 2).personal)
    scored.clear()
    pool.evaluate(EVERYONE, start(pool), 2)
    assert not scored
    assert pool.evaluate(torch.tensor([4, 5]), start(pool), 2).personal.correct.shape == (2,)
    assert not scored


def test_each_split_has_scores_of_its_own() -> None:
    data = tiny_federation(test=40)
    pool = make_pool("fused", replace(data, train=data.test, test=data.train))
    first = pool.evaluate(EVERYONE, start(pool), 0, split="train").personal
    other = pool.evaluate(EVERYONE, start(pool), 0, split="test").personal
    again = pool.evaluate(EVERYONE, start(pool), 0, split="train").personal
    assert_same_bits(first, again)
    assert not torch.equal(first.count, other.count)


def test_where_clients_are_scored_together_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked models: the last bits of a score may depend on who is beside."""
    pool = make_pool("stacked", chunk=6)
    scored = count_scored(pool, monkeypatch)
    for _ in range(2):
        pool.evaluate(EVERYONE, start(pool), 0)
    assert scored == [6, 6]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_scores, "MOST_CLIENTS", 3)
    pool = make_pool("fused", chunk=1)
    scored = count_scored(pool, monkeypatch)
    for _ in range(2):
        pool.evaluate(EVERYONE, start(pool), 0)
    assert len(scored) == 6 + 3


def test_one_bit_makes_another_model() -> None:
    theta = torch.zeros(2, 5)
    theta[1, 4] = -0.0
    one, other = known_scores.model_digests(theta)
    assert (one != other).any()
    assert (known_scores.model_digests(theta[:1].expand(3, -1)) == one).all()


def test_scores_of_compiled_loops_do_not_depend_on_who_is_beside() -> None:
    data = tiny_federation(test=40)
    task = make_task(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), backend="fused")
    task.problem = data.problem
    theta = torch.stack([task.init(seed) for seed in range(6)])
    part = data.cohort(EVERYONE, 0, 1).test
    whole = task.evaluate(theta, part)
    for rows in (torch.tensor([2]), torch.tensor([5, 0, 3])):
        assert task.scores_alone(theta[rows], part.take(rows))
        assert_same_bits(task.evaluate(theta[rows], part.take(rows)), whole.take(rows))
