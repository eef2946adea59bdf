"""Public examples: drawn from training data only, the same for everyone, kept by files and shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError, DataError
from kinfed.pools.worker import make_shard
from kinfed.testing import tiny_federation


def test_they_come_from_training_examples_and_are_nobodys_own() -> None:
    before = tiny_federation((20, 30, 1, 4))
    data = before.with_public(0.2, 0)
    assert data.public is not None
    assert len(data.public) == 4 + 6  # the others have too few
    assert bool(torch.isin(data.public, before.train.rows).all())
    assert not bool(torch.isin(data.public, torch.cat([data.train.rows, data.val.rows, data.test.rows])).any())
    assert data.train.count.tolist() == [16, 24, 1, 4]
    assert torch.equal(data.test.rows, before.test.rows)
    assert not torch.equal(before.with_public(0.2, 1).public, data.public)  # type: ignore[arg-type]
    assert before.digest() != data.digest()


def test_everyone_has_the_same() -> None:
    data = tiny_federation((20, 30)).with_public(0.2, 0)
    public = data.cohort(torch.arange(2), seed=0, round=1).public
    pool = data.population(0).pool
    assert public is not None
    assert pool is not None
    ((_, batch),) = public.in_order()
    assert torch.equal(batch.x[0], batch.x[1])
    assert torch.equal(next(pool.in_order())[1].x[0], batch.x[0])
    assert tiny_federation().cohort(torch.arange(2), seed=0, round=1).public is None


def test_files_and_shards_keep_them(tmp_path: Path) -> None:
    data = tiny_federation((20, 30, 10)).with_public(0.2, 0)
    data.save(tmp_path)
    again = Federation.load(tmp_path)
    assert torch.equal(again.public, data.public)  # type: ignore[arg-type]
    assert again.digest() == data.digest()
    ids = torch.tensor([1])
    ours, theirs = (one.cohort(ids, 0, 1).public for one in (data, make_shard(data, ids)))
    assert ours is not None
    assert theirs is not None
    assert torch.equal(next(ours.in_order())[1].x, next(theirs.in_order())[1].x)


def test_what_cannot_be_is_refused() -> None:
    data = tiny_federation((3, 4))
    with pytest.raises(ConfigError, match=r"in \(0, 1\); got 1"):
        data.with_public(1.0, 0)
    with pytest.raises(ConfigError, match="no client has enough examples"):
        data.with_public(0.1, 0)
    for rows in (data.test.rows[:1], data.train.rows[:1], torch.tensor([999]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(DataError, match="public examples are some of the data set"):
            replace(data, public=rows)
