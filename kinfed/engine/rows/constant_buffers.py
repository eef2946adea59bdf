"""Float buffers that no training forward moves, such as tables of positions: constants, though `state_dict` has them.

A buffer that `state_dict` holds may be anything: statistics that training moves, or a table. By default it is taken for
statistics, which is never wrong and costs its bytes in every message. It is a constant where it is seen to be one:

    the module begins with the same values whatever the seed,
    and two training passes over different examples leave them as they are.

What is seen in two passes need not hold for ever. So training looks at constants after every pass
(`WorkingCopy.check_still`), and a model that moves one after all is refused by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kinfed.engine.rows.layout import STILL, statistics
from kinfed.engine.rows.model_trial import failures_as_model_errors
from kinfed.errors import ModelError

Examples = tuple[Tensor, ...]  # any of which the module may take


def mark_still_buffers(module: nn.Module, build_other: Callable[[], nn.Module], candidates: Examples) -> None:
    """Mark buffers that never move as constants (kinfed.engine.rows.layout); `build_other` makes the module with other
    random numbers. It is tried on the first of the candidates [B, ...] that it takes; where it takes none, nothing is
    marked."""
    values = {name: value.clone() for name, value in statistics(module) if not _is_norm(module, name)}
    if not values:
        return
    there = build_other().state_dict()
    same = {name: value for name, value in values.items() if name in there and torch.equal(there[name], value)}
    if not same:
        return
    after = _after_training(module, candidates) or {}
    for name, value in same.items():
        if name in after and torch.equal(after[name], value):
            owner, _, own = name.rpartition(".")
            layer = module.get_submodule(owner)
            setattr(layer, STILL, {own, *getattr(layer, STILL, ())})


def _is_norm(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.modules.batchnorm._NormBase)


def _after_training(module: nn.Module, candidates: Examples) -> dict[str, Tensor] | None:
    """The module's state after two passes over different examples. What they draw does not matter, but torch's
    generator is left as it was."""
    for example in candidates:
        trial = copy.deepcopy(module).train()
        try:
            with failures_as_model_errors(module, example), torch.no_grad(), torch.random.fork_rng(devices=[]):
                trial(example.clone())
                trial(example.flip(0) + 1 if example.is_floating_point() else example.flip(0))
        except ModelError:  # a model that takes none is refused by its trial
            continue
        return trial.state_dict()
    return None


def example_like(shape: tuple[int, ...]) -> Examples:
    """Examples of a shape, where none are at hand: numbers, and tokens that every embedding has."""
    numbers = torch.linspace(-1, 1, 2 * max(1, torch.Size(shape).numel())).view(2, *shape)
    return numbers, torch.tensor([0, 1]).view(2, *(1 for _ in shape)).expand(2, *shape).contiguous()
