"""Partition feature_shift: rows as by dirichlet, pixels by a rule of each client."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.partitions import make_federation
from kinfed.data.partitions.shifts import FeatureShift
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


def source(dtype: torch.dtype = torch.uint8, channels: int = 3) -> Source:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (240, channels, 4, 4), generator=generator).to(dtype)
    return Source("images", Features(raw), torch.arange(240) % 4, Problem.of_classes(4))


def shared_out(options: dict[str, Any], seed: int = 0, clients: int = 5) -> Any:
    return make_federation(source(), "feature_shift", clients, {"alpha": 0.5, "min_size": 5} | options, seed)


def test_pixels_by_hand() -> None:
    """Every pixel of every client, in training and in test, from the camera's two numbers in plain arithmetic."""
    data, original = shared_out({}), source().features.raw
    gain, shift = FeatureShift(alpha=0.5, min_size=5).cameras(5, 3, 0)
    assert float(gain.log().abs().max()) <= 0.7
    assert float(shift.abs().max()) <= 0.5
    for part in (data.train, data.test):
        for client in range(5):
            for row in part[client].tolist()[:3]:
                for channel in range(3):
                    before = original[row, channel].double()
                    after = 127.5 + gain[client, channel] * (before - 127.5) + 127.5 * shift[client, channel]
                    found = data.features.raw[row, channel].double()
                    assert float((found - after.clamp(0, 255)).abs().max()) <= 0.5 + 1e-3


def test_images_of_another_scale_stay_on_it() -> None:
    """Digits are 0..16, with 8 in the middle."""
    scaled = Features((source().features.raw % 17).to(torch.uint8), None, torch.tensor(16.0))
    digits = Source("digits", scaled, torch.arange(240) % 4, Problem.of_classes(4))
    options = {"alpha": 0.5, "min_size": 5, "contrast": 0.0}
    data = make_federation(digits, "feature_shift", 5, options, 0)
    _, shift = FeatureShift(**options).cameras(5, 3, 0)
    for client, rows in enumerate(data.train.lists()):
        after = scaled.raw[rows].double() + 8 * shift[client].double().view(1, 3, 1, 1)
        assert float((data.features.raw[rows].double() - after.clamp(0, 16)).abs().max()) <= 0.5 + 1e-3


def test_without_shift_the_pixels_are_the_sources_and_the_rows_the_same() -> None:
    plain, shifted = shared_out({"contrast": 0.0, "brightness": 0.0}), shared_out({})
    assert torch.equal(plain.features.raw, source().features.raw)
    assert not torch.equal(shifted.features.raw, plain.features.raw)
    for ours, theirs in ((plain.train, shifted.train), (plain.test, shifted.test)):
        assert torch.equal(ours.rows, theirs.rows)
        assert torch.equal(ours.offsets, theirs.offsets)


def test_it_is_a_function_of_the_seed_and_leaves_the_source_alone() -> None:
    images = source()
    before = images.features.raw.clone()
    one, again = (make_federation(images, "feature_shift", 5, {"min_size": 5, "alpha": 0.5}, 3) for _ in range(2))
    assert torch.equal(images.features.raw, before)
    assert torch.equal(one.features.raw, again.features.raw)
    assert not torch.equal(FeatureShift().cameras(5, 3, 3)[0], FeatureShift().cameras(5, 3, 4)[0])
    assert torch.equal(FeatureShift().cameras(9, 3, 3)[0][:5], FeatureShift().cameras(5, 3, 3)[0])


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"changes images, uint8 .*; images has examples of torch.float32"):
        make_federation(source(torch.float32), "feature_shift", 5)
    with pytest.raises(ConfigError, match="contrast"):
        FeatureShift(contrast=-1.0)
