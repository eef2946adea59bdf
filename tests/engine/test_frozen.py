"""Frozen parameters are constants outside the row: one copy, any type, the same gradients as autograd's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from conftest import MakeBatch
from kinfed.engine.task_factory import FEW_PARAMETERS, make_task
from kinfed.errors import ModelError


class HalfBody(nn.Module):
    """A body in 16 bits, widened in use, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4).to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(nn.functional.linear(x, self.body.weight.to(x.dtype), self.body.bias.to(x.dtype))))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("backend", ["rows", "vmap"])
def test_gradients_and_rows_are_those_of_the_trained_part(make_batch: MakeBatch, backend: str) -> None:
    task = make_task(HalfBody, backend=backend)
    assert [slot.name for slot in task.slots] == ["head.weight", "head.bias"]
    theta, batch = torch.stack([task.init(0), task.init(1)]), make_batch(2, 4, (6,), 3)
    g = task.grad(theta, batch)
    for i in range(2):
        module = task.module_of(theta[i])
        nn.functional.cross_entropy(module(batch.x[i]), batch.y[i]).backward()
        wanted = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        torch.testing.assert_close(g[i], task.flatten(wanted), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(task.logits(theta, batch.x)[i], module(batch.x[i]).detach())


def test_all_threads_share_one_copy_of_the_constants(make_batch: MakeBatch) -> None:
    task = make_task(HalfBody, backend="rows")
    batch = make_batch(1, 4, (6,), 3)
    pointers = set()

    def train(_: int) -> None:
        task.grad(task.init(0)[None], batch)
        pointers.add(task._working_copy(training=True).module.body.weight.data_ptr())

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, range(6)))
    assert pointers == {task.module.body.weight.data_ptr()}


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (("0",), ["3.weight", "3.bias"]),
        (("*.weight",), ["0.bias", "1.bias", "3.bias"]),
        (("[01]", "3.bias"), ["3.weight"]),
    ],
)
def test_patterns_freeze_parameters(patterns: tuple[str, ...], trained: list[str]) -> None:
    task = make_task(normalized, frozen=patterns)
    names = [slot.name for slot in task.slots if slot.trainable]
    assert names == trained if patterns != ("0",) else names == ["1.weight", "1.bias", *trained]


def test_a_frozen_normalization_layer_keeps_its_statistics(make_batch: MakeBatch) -> None:
    task = make_task(normalized, frozen=("[01]",))
    assert [slot.name for slot in task.slots] == ["3.weight", "3.bias"]
    theta, batch = task.init(0)[None].clone(), make_batch(1, 1, (6,), 3)
    constants = {name: value.clone() for name, value in task.layout.constants(task.module).items()}
    task.descend_(theta, batch, 0.1)
    for name, value in task.layout.constants(task.module).items():
        assert torch.equal(value, constants[name])
    module = task.module_of(task.init(0))  # evaluation mode is what training saw, too
    nn.functional.cross_entropy(module(batch.x[0]), batch.y[0]).backward()
    wanted = task.init(0) - 0.1 * task.flatten({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(theta[0], wanted, rtol=1e-6, atol=1e-7)


def test_a_digest_identifies_the_constants() -> None:
    def pretrained(value: float) -> nn.Module:
        module = normalized()
        with torch.no_grad():
            module[0].weight.fill_(value)
        return module

    digest = make_task(lambda: pretrained(1.0), frozen=("0",)).constants_digest()
    assert digest == make_task(lambda: pretrained(1.0), frozen=("0",)).constants_digest() != ""
    assert digest != make_task(lambda: pretrained(1.5), frozen=("0",)).constants_digest()
    assert digest != make_task(lambda: pretrained(1.0), frozen=("0.weight",)).constants_digest()
    assert make_task(lambda: nn.Linear(6, 3)).constants_digest() == ""


def test_starts_differ_in_the_trained_part_only() -> None:
    task = make_task(HalfBody)
    first, second = task.state_dict(task.init(0)), task.state_dict(task.init(1))
    assert torch.equal(first["body.weight"], second["body.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_patterns_that_freeze_nothing_or_everything_are_refused() -> None:
    with pytest.raises(ModelError, match=r"nothing to freeze matches 'body\*'; the model's layers are 0, 1, 3"):
        make_task(normalized, frozen=("body*",))
    with pytest.raises(ModelError, match="no parameters to train"):
        make_task(normalized, frozen=("*",))


def test_frozen_weights_count_where_many_clients_at_once_are_too_much() -> None:
    """A few trained parameters above a large frozen body: the body's products are the work of a step."""
    wide = 200
    small, large = (
        make_task(lambda n=n: nn.Sequential(nn.Linear(6, n), nn.GELU(), nn.Linear(n, n), nn.GELU(), nn.Linear(n, 3)),
                  frozen=("2",))
        for n in (8, wide)
    )  # fmt: skip
    assert (small.backend, large.backend) == ("vmap", "rows")
    assert large.num_params < FEW_PARAMETERS < wide * wide
