"""Partition hidden_groups: rows as by iid; images or classes by the rule of each client's group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.partitions import make_federation
from kinfed.data.partitions.shifts import HiddenGroups
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


def source(shape: tuple[int, ...] = (1, 4, 4)) -> Source:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (120, *shape), generator=generator).to(torch.uint8)
    return Source("images", Features(raw), torch.arange(120) % 5, Problem.of_classes(5))


def shared_out(seed: int = 0, clients: int = 8, **options: Any) -> Any:
    return make_federation(source(), "hidden_groups", clients, options, seed)


def test_images_of_a_group_are_turned_and_nothing_else() -> None:
    data, original = shared_out(), source()
    for part in (data.train, data.test):
        for k in range(8):
            for row in part[k].tolist():
                turned = torch.rot90(original.features.raw[row], k % 4, (-2, -1))
                assert torch.equal(data.features.raw[row], turned)
    assert torch.equal(data.labels, original.labels)
    assert torch.equal(data.features.raw[data.train[0]], original.features.raw[data.train[0]])


@pytest.mark.parametrize(("by", "changed"), [("labels", 5), ("swap", 2)])
def test_classes_of_a_group_have_names_of_their_own(by: str, changed: int) -> None:
    data, original = shared_out(by=by, groups=3), source()
    names = HiddenGroups(groups=3, by=by).class_names_of_groups(5, 0)  # type: ignore[arg-type]
    assert (names != torch.arange(5)).sum(1).tolist() == [0, changed, changed]
    assert all(sorted(row.tolist()) == list(range(5)) for row in names)
    for part in (data.train, data.test):
        for k in range(8):
            assert torch.equal(data.labels[part[k]], names[k % 3][original.labels[part[k]]])
    assert torch.equal(data.features.raw, original.features.raw)


def test_rows_are_those_of_the_draw_and_groups_are_not_told() -> None:
    one, again, other = shared_out(), shared_out(), shared_out(seed=1)
    assert torch.equal(one.train.rows, again.train.rows)
    assert not torch.equal(one.train.rows, other.train.rows)
    assert one.groups is None
    assert one.description["options"]["groups"] == 4
    assert one.digest() != shared_out(by="labels").digest()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="turns square images"):
        make_federation(source((3, 5)), "hidden_groups", 4)
    with pytest.raises(ConfigError, match="four turns"):
        shared_out(groups=5)
    with pytest.raises(ConfigError, match="as many clients"):
        shared_out(clients=3)
