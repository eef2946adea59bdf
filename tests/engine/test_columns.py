"""Patterns that choose parameters, and rows cut in two and joined again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.engine.contract.columns import (
    ColumnSplit,
    ParameterSlot,
    last_layers,
    layer_mask,
    layer_names,
    parse_patterns,
)
from kinfed.errors import ModelError

SIZES = {
    "scale": (1,),
    "body.0.weight": (2, 3),
    "body.0.bias": (2,),
    "body.norm.weight": (2,),
    "body.norm.bias": (2,),
    "body.10.weight": (1, 2),
    "head.weight": (3, 1),
    "head.bias": (3,),
}


def slots() -> tuple[ParameterSlot, ...]:
    place, position = [], 0
    for name, shape in SIZES.items():
        stop = position + torch.Size(shape).numel()
        place.append(ParameterSlot(name, shape, position, stop))
        position = stop
    return tuple(place)


def names_in(mask: torch.Tensor) -> list[str]:
    """Parameters that lie wholly in the mask; none may lie in it by half."""
    assert all(mask[x.start : x.stop].all() or not mask[x.start : x.stop].any() for x in slots())
    return [x.name for x in slots() if mask[x.start]]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("head",), ["head.weight", "head.bias"]),
        (("head.*",), ["head.weight", "head.bias"]),
        (("*.bias",), ["body.0.bias", "body.norm.bias", "head.bias"]),
        (("*norm*",), ["body.norm.weight", "body.norm.bias"]),
        (("body.0",), ["body.0.weight", "body.0.bias"]),
        (("body.?",), ["body.0.weight", "body.0.bias"]),
        (("body.1?", "scale"), ["scale", "body.10.weight"]),
        (("head.weight", "head"), ["head.weight", "head.bias"]),
        (("body",), [name for name in SIZES if name.startswith("body")]),
        (("*",), list(SIZES)),
        ((), []),
    ],
    ids=str,
)
def test_patterns_choose_layers_parameters_and_globs(patterns: tuple[str, ...], names: list[str]) -> None:
    assert names_in(layer_mask(slots(), patterns)) == names


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("fc", "no layer 'fc'"),
        ("bod", "no layer 'bod'"),
        ("head.", "no layer 'head.'"),
        ("fc*", "no layer that matches 'fc"),
    ],
)
def test_a_pattern_that_chooses_nothing_is_refused_with_what_there_is(pattern: str, problem: str) -> None:
    with pytest.raises(ModelError, match=problem) as refused:
        layer_mask(slots(), ("head", pattern))
    assert "its layers are scale, body.0, body.norm, body.10, head" in str(refused.value)


def test_patterns_are_separated_by_commas() -> None:
    assert parse_patterns(" head.* ,*.bias,") == ("head.*", "*.bias")
    assert parse_patterns("") == ()


def test_last_layers_by_number() -> None:
    assert layer_names(slots()) == ("scale", "body.0", "body.norm", "body.10", "head")
    assert last_layers(slots(), 2) == ("body.10", "head")
    assert last_layers(slots(), 0) == ()
    assert last_layers(slots(), 99) == layer_names(slots())


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 3))
def test_what_is_taken_apart_is_joined_again(own: list[bool], n: int) -> None:
    mask = torch.tensor(own)
    split = ColumnSplit.from_mask(mask)
    theta = torch.arange(n * len(own), dtype=torch.float32).reshape(n, len(own))
    mine, ours = split.take_own(theta), split.take_shared(theta)
    assert torch.equal(mine, theta[:, mask])
    assert torch.equal(ours, theta[:, ~mask])
    assert torch.equal(split.join(mine, ours), theta)
    assert torch.equal(split.swapped().join(ours, mine), theta)
    assert torch.equal(split.own_mask, mask)
    assert torch.equal(split.shared_mask, ~mask)


def test_single_rows_are_split_as_well() -> None:
    split = ColumnSplit.owning(slots(), ("*.bias",))
    row = torch.arange(float(slots()[-1].stop))
    assert torch.equal(split.take_shared(row), row[split.shared_mask])
    assert torch.equal(split.join(split.take_own(row), split.take_shared(row)), row)


def test_a_join_is_the_callers_own_and_takes_shared_rows() -> None:
    split = ColumnSplit.owning(slots(), ("head",))
    shared = torch.zeros(15).expand(2, -1)  # one memory for all clients
    theta = split.join(torch.ones(2, 6), shared)
    theta += 1
    assert not shared.any()
    assert theta.tolist() == [[1.0] * 15 + [2.0] * 6] * 2
