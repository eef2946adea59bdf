"""Random changes of training images: what they do to pixels, that they repeat, and that nothing else is changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kinfed
from kinfed.data.examples.augment import AUGMENTATIONS, draws
from kinfed.data.examples.batches import Batches, LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.testing import tiny_federation, tiny_model

CROP, FLIP, BOTH = (AUGMENTATIONS[name] for name in ("crop", "flip", "crop_flip"))


def pictures(count: int, channels: int = 2, height: int = 5, width: int = 6) -> Tensor:
    """Every pixel has a value of its own, never black."""
    size = count * channels * height * width
    return (torch.arange(size) % 255 + 1).to(torch.uint8).reshape(count, channels, height, width)


def bits(y: int, x: int, mirrored: bool) -> int:
    """Random bits that choose this place (0..8) and orientation."""
    return -(-(y << 20) // 9) | -(-(x << 20) // 9) << 20 | mirrored << 40


@given(st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_pixels_move_as_the_bits_say(y: int, x: int, mirrored: bool) -> None:
    raw = pictures(1)
    found = BOTH(raw, torch.tensor([bits(y, x, mirrored)]))
    by_hand = np.pad(raw[0].numpy(), ((0, 0), (4, 4), (4, 4)))[:, y : y + 5, x : x + 6]
    assert np.array_equal(found[0].numpy(), by_hand[:, :, ::-1] if mirrored else by_hand)


def test_the_middle_without_mirroring_is_the_image_itself() -> None:
    raw, middle = pictures(3), torch.full((3,), bits(4, 4, False))
    for change in (CROP, FLIP, BOTH):
        assert torch.equal(change(raw, middle), raw)
    assert torch.equal(FLIP(raw, torch.full((3,), bits(0, 0, True))), raw.flip(-1))


def test_all_places_and_both_orientations_are_equally_frequent() -> None:
    ids = torch.arange(90)
    draw = draws(0, "batches", 1, ids, torch.arange(10), 9).reshape(-1)  # 8,100 draws, 81 places
    dot = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    dot[..., 4, 4] = 1
    where = CROP(dot.expand(len(draw), -1, -1, -1), draw).sum(0)[0].to(torch.float64)
    assert where.sum() == len(draw)
    assert float((where - 100).abs().max()) < 50  # standard deviation 10
    left = torch.tensor([[[[1, 0]]]], dtype=torch.uint8).expand(len(draw), -1, -1, -1)
    assert abs(float(FLIP(left, draw)[:, 0, 0, 0].to(torch.float64).mean()) - 0.5) < 0.03


def image_federation(standardize: bool = False) -> Federation:
    count = 40
    owner = np.repeat([0, 1, 2], [20, 13, 7])
    raw = pictures(count, 1, 8, 8).numpy()
    return Federation.from_arrays(raw, np.arange(count) % 3, owner, test_fraction=0.2, standardize=standardize)


def batches_of(
    federation: Federation, training: LocalTraining, ids: list[int], stream: str = "batches", round: int = 1
) -> Batches:
    return federation.cohort(torch.tensor(ids), 5, round).train.batches(training, stream=stream)


@pytest.mark.parametrize("poisson", [False, True])
def test_batches_are_the_usual_ones_changed(poisson: bool) -> None:
    """Same examples and labels; the images are what `draws` makes of the raw ones, then standardized."""
    federation = image_federation(standardize=True)
    training = LocalTraining(batch=4, steps=6, poisson=poisson)
    plain = Federation(
        Features(federation.features.raw), federation.labels, Problem.of_classes(3), federation.train,
        federation.val, federation.test, federation.names,
    )  # fmt: skip
    changed = list(batches_of(federation, replace(training, augment="crop_flip"), [0, 2]))
    usual = list(batches_of(plain, training, [0, 2]))
    mean, std = federation.features.mean, federation.features.std
    assert mean is not None
    assert std is not None
    moved = 0
    for step, ((_, ours), (_, raw)) in enumerate(zip(changed, usual, strict=True)):
        n, width = raw.y.shape
        draw = draws(5, "batches", 1, torch.tensor([0, 2]), torch.tensor([step]), width).reshape(-1)
        pixels = BOTH(raw.x.reshape(n * width, 1, 8, 8), draw).reshape(n, width, 1, 8, 8)
        torch.testing.assert_close(ours.x, (pixels - mean) / std)
        assert torch.equal(ours.y, raw.y)
        assert torch.equal(ours.weight, raw.weight)
        moved += int((pixels != raw.x).any())
    assert moved == 6


def test_changes_do_not_depend_on_company_or_on_how_many_steps_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, training = image_federation(), LocalTraining(batch=4, epochs=3, steps=None, augment="crop_flip")
    together = [batch.x for _, batch in batches_of(federation, training, [0, 1, 2])]
    monkeypatch.setattr("kinfed.data.examples.batches.GATHER_BYTES", 1)
    monkeypatch.setattr("kinfed.data.examples.batches.PLAN_EXAMPLES", 1)
    for client in range(3):
        for step, (_, batch) in enumerate(batches_of(federation, training, [client])):
            real = int((batch.weight > 0).sum())
            assert torch.equal(batch.x[0, :real], together[step][client, :real])


def test_rounds_streams_and_steps_change_differently() -> None:
    federation, training = image_federation(), LocalTraining(batch=16, steps=1, augment="crop")
    other = {
        "round": batches_of(federation, training, [0], round=2),
        "stream": batches_of(federation, training, [0], "meta"),
    }
    usual = next(iter(batches_of(federation, training, [0])))[1].x
    for batches in other.values():
        assert not torch.equal(next(iter(batches))[1].x, usual)
    key = torch.tensor([1, 2])
    assert len(draws(0, "batches", 1, key, torch.arange(3), 4).unique()) == 24


def test_evaluation_sees_the_images_as_they_are() -> None:
    federation = image_federation()
    cohort = federation.cohort(torch.arange(3), 5, 1)
    for part in (cohort.train, cohort.test):
        for rows, batch in part.in_order():
            assert rows == slice(None) or isinstance(rows, Tensor)
            index = [part.rows[s : s + c] for s, c in zip(part.start.tolist(), part.count.tolist(), strict=True)]
            for row, own in enumerate(index):
                assert torch.equal(batch.x[row, : len(own)], federation.features.raw[own].to(torch.float32))


def test_a_run_with_augmentation_repeats_and_differs_from_one_without(tmp_path: Path) -> None:
    settings = {"rounds": 2, "clients": 4, "seeds": (0,), "algorithms": "fedavg", "steps": 3}
    plain = kinfed.run(**settings)
    first, second = kinfed.run(**settings, augment="crop_flip"), kinfed.run(**settings, augment="crop_flip")
    assert first.result().personal == second.result().personal
    assert first.result().personal != plain.result().personal


def test_what_cannot_be_changed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean crop_flip"):
        LocalTraining(augment="crop-flip")
    with pytest.raises(ConfigError, match=r"shape \[4\]"):
        LocalPool(
            kinfed.make_algorithm("local", LocalTraining(augment="flip")),
            make_task(tiny_model),
            tiny_federation(),
            seed=0,
        )
    with pytest.raises(ConfigError, match="images"):
        kinfed.run(
            federation=tiny_federation(), model=tiny_model, augment="flip", rounds=1, seeds=(0,), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
