"""Foreign targets (FedFomo's out-of-distribution task): whatever the method, clients are judged as others are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from method_bench import linear
from torch import Tensor

import kinfed
from kinfed import Federation
from kinfed.algorithms import ALGORITHMS
from kinfed.data.examples.ragged import Ragged
from kinfed.engine.personal.personal_models import task_for
from kinfed.records.reader import load_run
from kinfed.testing import Bench
from kinfed.testing.workbench import SEED

SETTINGS = {
    "dataset": "digits", "partition": {"name": "latent", "groups": 3}, "clients": 6, "rounds": 1, "steps": 2,
    "algorithms": "local,fedfomo", "model": "mlr",
}  # fmt: skip


def owners(federation: Federation) -> Tensor:
    """[N] the client in whose training data every row lies, else -1."""
    found = torch.full((len(federation.features),), -1)
    found[federation.train.rows] = federation.train.owner
    return found


def same(one: Ragged, other: Ragged) -> bool:
    return torch.equal(one.offsets, other.offsets) and torch.equal(one.rows, other.rows)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_is_judged_on_the_targets_examples(name: str) -> None:
    special = {"mocha": {"model": linear}, "fedbn": {"options": {"own": "*.bias"}}}
    bench = Bench(name, **special.get(name, {}))
    moved = bench.federation.with_foreign_targets(3)
    target = torch.tensor(moved.description["target_of"])
    assert bool((target != torch.arange(len(target))).any())
    with bench.loop(federation=moved) as loop:
        loop.round()
        loop.round()
        found = loop.evaluate(keep_models=True)
        assert found.personal is not None
        assert found.models is not None
        part = bench.federation.cohort(target, SEED, 2).test
        assert torch.equal(found.personal.count, part.count)
        expected = task_for(loop.task, found.models).score(found.models, part)
        assert torch.equal(found.personal.correct, expected.correct)
        torch.testing.assert_close(found.personal.loss, expected.loss)


def test_seeds_of_a_run_are_the_shuffles() -> None:
    seeds = (0, 1, 2, 3, 4)
    result = kinfed.run(**SETTINGS, seeds=seeds, foreign_targets=True)
    targets = [tuple(result.federations[seed].description["target_of"]) for seed in seeds]
    assert len(set(targets)) == 5
    assert all(sorted(target) == list(range(6)) for target in targets)


def test_training_stays_and_validation_comes_from_the_target() -> None:
    own = kinfed.run(**SETTINGS, seeds=(0,)).federations[0]
    moved = kinfed.run(**SETTINGS, seeds=(0,), foreign_targets=True).federations[0]
    target = moved.description["target_of"]
    assert same(own.train, moved.train)
    assert own.groups is not None
    assert moved.groups is not None
    assert torch.equal(own.groups, moved.groups)  # groups are those of the training data
    for client in range(6):
        assert torch.equal(moved.val[client], own.val[target[client]])
        assert torch.equal(moved.test[client], own.test[target[client]])
    assert bool((own.val.count > 0).all())
    used = owners(moved)
    assert bool((used[moved.val.rows] == -1).all())  # nobody trains on what another is judged by
    assert bool((used[moved.test.rows] == -1).all())


def test_moving_targets_twice_is_told_as_it_is() -> None:
    own = Bench("fedfomo").federation
    twice = own.with_foreign_targets(1).with_foreign_targets(2)
    for client, target in enumerate(twice.description["target_of"]):
        assert torch.equal(twice.test[client], own.test[target])
        assert torch.equal(twice.val[client], own.val[target])


def test_targets_are_kept_with_the_run_for_its_pictures(tmp_path: Path) -> None:
    result = kinfed.run(**SETTINGS, seeds=(2,), foreign_targets=True, out=tmp_path / "run")
    read = load_run(tmp_path / "run", "run").federations[2]
    assert read.description["target_of"] == result.federations[2].description["target_of"]
    assert read.groups == [0, 0, 1, 1, 2, 2]


def test_a_federation_with_foreign_targets_can_be_saved(tmp_path: Path) -> None:
    moved = Bench("fedfomo").federation.with_foreign_targets(5)
    moved.save(tmp_path / "moved")
    loaded = Federation.load(tmp_path / "moved")
    assert loaded.description["target_of"] == moved.description["target_of"]
    assert same(loaded.val, moved.val)
    assert same(loaded.test, moved.test)
