"""Attributes of Python that a forward pass changes are refused by name; what is set once, or anew, is not."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kinfed.engine.rows.python_state import changed_attribute, python_state
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.models import MODELS, build_model
from kinfed.engine.zoo.pretrained import random_minilm
from kinfed.errors import ModelError

EXAMPLE = torch.linspace(-1.0, 1.0, 12).view(2, 6)
Step = Callable[[Any, Tensor], object]


class Remembering(nn.Module):
    """Does something with its `kept` in every forward pass, which changes nothing that it gives."""

    def __init__(self, kept: Any, step: Step) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.kept, self._step = kept, step

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        self._step(self, z)
        out: Tensor = z
        return out


def assign(value: Callable[[Any, Tensor], object]) -> Step:
    return lambda m, z: setattr(m, "kept", value(m.kept, z))


def in_evaluation(step: Step) -> Step:
    return lambda m, z: None if m.training else step(m, z)


GROWS: dict[str, tuple[Callable[[], Any], Step]] = {
    "a count": (lambda: 0, assign(lambda kept, _: kept + 1)),
    "a count in evaluation": (lambda: 0, in_evaluation(assign(lambda kept, _: kept + 1))),
    "a switch": (lambda: False, assign(lambda kept, _: not kept)),
    "a factor that shrinks": (lambda: 1.0, assign(lambda kept, _: kept * 0.999)),
    "a list": (list, lambda m, z: m.kept.append(z.detach())),
    "a deque": (deque, lambda m, z: m.kept.append(1)),
    "a set": (set, lambda m, z: m.kept.add(len(m.kept))),
    "a dict": (dict, lambda m, z: m.kept.update({len(m.kept): 0})),
    "a Counter": (Counter, lambda m, z: m.kept.update(["calls"])),
    "a full deque": (lambda: deque([0], 1), lambda m, z: m.kept.append(m.kept[0] + 1)),
    "a list in a dict": (lambda: {"past": []}, lambda m, z: m.kept["past"].append(0)),
    "an object": (lambda: SimpleNamespace(calls=0), lambda m, z: setattr(m.kept, "calls", m.kept.calls + 1)),
    "an array": (lambda: np.zeros(2), lambda m, z: m.kept.__iadd__(1)),
    "a running mean": (lambda: torch.zeros(3), assign(lambda kept, z: 0.9 * kept + 0.1 * z.detach().mean(0))),
    "a tensor in place": (lambda: torch.zeros(3), lambda m, z: m.kept.add_(1)),
}

if sys.version_info < (3, 14):  # which copies no iterator of itertools, so that such a model is refused before
    GROWS["an iterator"] = (itertools.count, lambda m, z: next(m.kept))


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed:DeprecationWarning")
@pytest.mark.parametrize("name", GROWS)
@pytest.mark.parametrize("path", ["auto", "rows"])
def test_what_changes_in_every_call_is_refused_by_name(name: str, path: str) -> None:
    kept, step = GROWS[name]
    where = "in evaluation" if "evaluation" in name else "in training"
    with pytest.raises(ModelError, match=rf"the model changes its attribute 'kept' in every call, {where} \("):
        make_task(lambda: Remembering(kept(), step), example=EXAMPLE, backend=path, outputs=3)


STAYS: dict[str, tuple[Callable[[], Any], Step]] = {
    "a table made by the first call": (
        lambda: None,
        assign(lambda kept, z: torch.arange(len(z)) if kept is None else kept),
    ),
    "tables by shape": (dict, lambda m, z: m.kept.setdefault(tuple(z.shape), torch.ones(z.shape))),
    "the last output": (lambda: None, assign(lambda _, z: z)),
    "the size of the last batch": (lambda: 0, assign(lambda _, z: len(z))),
    "a list begun anew": (list, assign(lambda _, z: [z.detach(), z.mean().item()])),
    "an object of its own in every call": (object, assign(lambda _, z: object())),
    "not a number": (lambda: float("nan"), assign(lambda _, z: float("nan"))),
    "an array": (lambda: np.full(2, np.nan), assign(lambda kept, _: kept.copy())),
    "equal values": (lambda: None, assign(lambda _, z: {"names": ["a"], "kind": z.dtype, "where": z.device})),
    "a logger": (lambda: logging.getLogger("kinfed.test"), lambda m, z: m.kept.debug("a call")),
    "a count that ends": (lambda: 0, assign(lambda kept, _: min(kept + 1, 2))),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_or_is_made_anew_is_accepted(name: str) -> None:
    kept, step = STAYS[name]
    make_task(lambda: Remembering(kept(), step), example=EXAMPLE, outputs=3)


def test_the_error_says_which_layer_and_what_came() -> None:
    with pytest.raises(ModelError, match=r"layer '1' changes its attribute 'kept' .*\(2, then 3\).*register_buffer"):
        make_task(
            lambda: nn.Sequential(nn.Linear(6, 6), Remembering(0, GROWS["a count"][1])), example=EXAMPLE, outputs=3
        )


def test_a_late_change_of_behaviour_is_refused_before_it_comes() -> None:
    """Twenty calls on, results would depend on who was trained before by the same thread."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x) if self.calls < 20 else -self.fc(x)

    with pytest.raises(ModelError, match="'calls'"):
        make_task(Late, example=EXAMPLE, outputs=3)


def test_what_a_class_keeps_for_all_its_modules_counts_too() -> None:
    class Shared(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return self.fc(x)

    with pytest.raises(ModelError, match="'calls'"):
        make_task(Shared, example=EXAMPLE, outputs=3)


def test_objects_that_hold_each_other_end() -> None:
    ring = SimpleNamespace(value=1)
    ring.other = SimpleNamespace(back=ring)
    module = Remembering(ring, lambda m, z: None)
    before = python_state(module)
    assert changed_attribute(before, python_state(module)) is None
    ring.other.more = 2
    changed = changed_attribute(before, python_state(module))
    assert changed is not None
    assert (changed.layer, changed.name, changed.before, changed.after) == ("", "kept", "nothing", "2")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "minilm"])
def test_models_that_come_with_kinfed_are_accepted(name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "resnet18": {"width": 4}, "mobilenet": {"width": 0.1}, "lstm": {"hidden": 4},
        "transformer": {"vocabulary": 12, "width": 16, "hidden": 16},
    }  # fmt: skip
    shape, classes = MODELS[name].facts["example"]
    if name == "transformer":
        example = torch.randint(1, 12, (2, 6), generator=torch.Generator().manual_seed(0))
    else:
        example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    make_task(
        lambda: build_model(name, tuple(example.shape[1:]), classes, options.get(name, {})),
        example=example,
        outputs=classes,
    )


def test_an_encoder_with_adapters_is_accepted() -> None:
    tokens = torch.randint(1, 30_000, (2, 6), generator=torch.Generator().manual_seed(0))
    make_task(lambda: random_minilm((6,), 3), example=tokens, outputs=3)
