"""Shared fixtures: one torch thread, and small data whose every value tells where it came from."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

import kinfed
from kinfed.core import registry_of
from kinfed.data.examples.batches import Batch, Split
from kinfed.data.examples.features import Features
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.task import Task

torch.set_num_threads(1)
# A busy machine must not fail a test, and a test run must not depend on luck: examples are the same every time.
# `make test-random` looks for new ones.
settings.register_profile("kinfed", deadline=None, max_examples=15, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("KINFED_HYPOTHESIS", "kinfed"))

# Seconds for tests that start other processes, which mostly wait; everything else has the limit of pyproject.toml.
PROCESS_TIMEOUTS = {"ray": 400, "flower": 400, "browser": 120}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from work_units import WorkUnits

    return WorkUnits(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Begun last, what waits for processes would keep one worker busy after the others are done.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("flower", "ray")))
    for item in items:
        for marker, seconds in PROCESS_TIMEOUTS.items():
            if item.get_closest_marker(marker) is not None and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(seconds))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: what looks for garbage need not walk through them again and again."""
    gc.collect()
    gc.freeze()


MakeSplit = Callable[..., Split]
MakeBatch = Callable[..., Batch]


def _split(
    sizes: Sequence[int],
    *,
    shape: tuple[int, ...] = (1,),
    classes: int = 3,
    seed: int = 0,
    round: int = 1,
    ids: Sequence[int] | None = None,
    effort: Tensor | None = None,
) -> Split:
    count = torch.tensor(list(sizes), dtype=torch.int64)
    total = int(count.sum())
    raw = torch.arange(total, dtype=torch.float32).reshape(-1, *(1 for _ in shape)).expand(-1, *shape).contiguous()
    scattered = torch.from_numpy(np.random.default_rng(5).permutation(total))
    start = torch.cumsum(count, 0) - count
    who = torch.arange(len(count)) if ids is None else torch.tensor(list(ids))
    return Split(Features(raw), torch.arange(total) % classes, who, start, count, scattered, seed, round, effort)


@pytest.fixture(scope="session")
def make_split() -> MakeSplit:
    """make_part([5, 1, 30]): clients with so many examples. Example number i has all features equal to i and the
    label i % classes; clients own scattered examples, so that an index into the wrong list shows."""
    return _split


def _batch(n: int, size: int, shape: tuple[int, ...], classes: int, *, seed: int = 0, ragged: bool = False) -> Batch:
    numbers = np.random.default_rng(seed)
    x = torch.from_numpy(numbers.normal(size=(n, size, *shape)).astype(np.float32))
    y = torch.from_numpy(numbers.integers(0, classes, (n, size)))
    real = torch.from_numpy(numbers.integers(1, size + 1, n)) if ragged else torch.full((n,), size)
    valid = torch.arange(size) < real[:, None]
    weight = torch.where(valid, 1.0 / real[:, None], 0.0).to(torch.float32)
    return Batch(x, y, weight, torch.arange(n))


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """make_batch(n, size, shape, classes): normal inputs, random labels; `ragged` pads rows with weight 0."""
    return _batch


def example_gradients(task: Task, theta: Tensor, batch: Batch) -> Tensor:
    """[n, B, P]: the unweighted gradient of every example's own loss, each computed alone."""
    one = torch.ones(len(batch), 1)
    columns = [Batch(batch.x[:, b : b + 1], batch.y[:, b : b + 1], one, batch.ids) for b in range(batch.y.shape[1])]
    return torch.stack([task.grad(theta, column) for column in columns], 1)


@pytest.fixture
def federation() -> Federation:
    """Six clients of 3 to 40 examples, five features, three classes that a linear model can tell apart."""
    sizes = [40, 3, 17, 8, 25, 11]
    numbers = np.random.default_rng(11)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y = numbers.integers(0, 3, len(owner))
    x = numbers.normal(size=(len(owner), 5)) + 2.0 * np.eye(3, 5)[y]
    return Federation.from_arrays(x, y, owner, test_fraction=0.3, num_classes=3)


@pytest.fixture
def missed() -> Iterator[str]:
    """A metric of one's own, as strangers register it: the share of the second class that is missed."""

    @kinfed.register("metric", "missed", of="examples", title="Missed", unit="%", higher_is_better=False)
    def share_missed(judged: Any) -> Any:
        """Share of the second class that is missed."""
        positive = judged.target == 1
        return judged.total(positive & (judged.predicted != 1)), judged.total(positive)

    yield "missed"
    registry_of("metric").unregister("missed")
