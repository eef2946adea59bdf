"""Many steps in a row are the same steps, whichever way a task takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kinfed.data.examples.batches import Batch, LocalTraining
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.descent import TRANSPOSE_FROM_STEPS, LayerwiseDescent, ProximalTerm, StepwiseDescent, Terms
from kinfed.engine.task_factory import ModuleTask, make_task
from kinfed.engine.training.sgd import sgd

CLASSES = 3
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "few outputs": (lambda: nn.Sequential(nn.Linear(7, CLASSES)), 7),
    "transposed": (lambda: nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, CLASSES)), 7),
    "deep, without bias": (
        lambda: nn.Sequential(
            nn.Linear(6, 33, bias=False), nn.Tanh(), nn.Linear(33, 35), nn.ReLU(), nn.Linear(35, CLASSES, bias=False)
        ),
        6,
    ),
    "one input": (lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, CLASSES)), 1),
}


def batches(n: int, inputs: int, steps: int) -> list[Batch]:
    g = torch.Generator().manual_seed(3)
    return [
        Batch(
            torch.randn(n, 4, inputs, generator=g), torch.randint(0, CLASSES, (n, 4), generator=g),
            torch.rand(n, 4, generator=g), torch.arange(n),
        )
        for _ in range(steps)
    ]  # fmt: skip


def models(task: ModuleTask, n: int, kind: str) -> Tensor:
    if kind == "shared":
        return task.init(0).expand(n, -1)
    return torch.stack([task.init(0, k) for k in range(n)])


PULLS: dict[str, Callable[[ModuleTask, int], ProximalTerm | None]] = {
    "none": lambda task, n: None,
    "one for all": lambda task, n: (0.3, task.init(5).expand(n, -1)),
    "one for each": lambda task, n: (torch.linspace(0, 1, n, dtype=torch.float64), models(task, n, "own")),
    "to zero": lambda task, n: (0.1, torch.zeros(1).expand(n, task.num_params)),
}


@pytest.mark.parametrize("proximal", PULLS)
@pytest.mark.parametrize("kind", ["shared", "own"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", NETS)
def test_steps_on_layers_are_the_steps_one_by_one(name: str, n: int, kind: str, proximal: str) -> None:
    build, inputs = NETS[name]
    task = make_task(build)
    theta, toward = models(task, n, kind), PULLS[proximal](task, n)
    steps = TRANSPOSE_FROM_STEPS + 2
    before = theta.clone(), None if toward is None else toward[1].clone()
    plain, fast = StepwiseDescent(task.take_step_, theta, Terms(toward)), task.descent(theta, steps, Terms(toward))
    assert isinstance(fast, LayerwiseDescent)
    for number, batch in enumerate(batches(n, inputs, steps)):
        rows = slice(None) if number < 4 else slice(0, max(1, n - number // 4))  # clients leave as they finish
        for descent in (plain, fast):
            descent.step(rows, batch.rows(rows), 0.2)
    assert not torch.equal(plain.result(), before[0])
    torch.testing.assert_close(fast.result(), plain.result(), rtol=1e-5, atol=1e-6)
    assert fast.result().is_contiguous()
    assert torch.equal(theta, before[0])
    assert toward is None or before[1] is None or torch.equal(toward[1], before[1])


@pytest.mark.parametrize("drifts", [False, True])
def test_rates_may_be_the_clients_own(drifts: bool) -> None:
    """theta <- theta - lr (g + drift), spelled out, for one rate per client."""
    build, inputs = NETS["transposed"]
    task = make_task(build)
    theta, lr = models(task, 3, "own"), torch.tensor([0.1, 0.0, 0.4])
    drift = models(task, 4, "own")[1:] if drifts else None
    plain = StepwiseDescent(task.take_step_, theta, Terms(drift=drift))
    fast = task.descent(theta, TRANSPOSE_FROM_STEPS, Terms(drift=drift))
    assert fast is not None
    wanted = theta.clone()
    for batch in batches(3, inputs, 3):
        plain.step(slice(None), batch, lr)
        fast.step(slice(None), batch, lr)
        wanted -= lr[:, None] * (task.grad(wanted, batch) + (0.0 if drift is None else drift))
    torch.testing.assert_close(plain.result(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.result(), plain.result(), rtol=1e-5, atol=1e-6)
    assert torch.equal(fast.result()[1], theta[1])


@pytest.mark.parametrize("steps", [TRANSPOSE_FROM_STEPS - 1, TRANSPOSE_FROM_STEPS])
def test_result_can_be_asked_for_at_any_time(steps: int) -> None:
    build, inputs = NETS["transposed"]
    task = make_task(build)
    descent = task.descent(models(task, 2, "own"), steps)
    assert descent is not None
    assert torch.equal(descent.result(), models(task, 2, "own"))
    descent.step(slice(None), batches(2, inputs, 1)[0], 0.1)
    once = descent.result()
    kept = once.clone()
    descent.step(slice(None), batches(2, inputs, 1)[0], 0.1)
    assert torch.equal(once, kept)
    assert not torch.equal(descent.result(), once)


def federation() -> Federation:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 7), dtype=torch.uint8, generator=g)
    clients = [0] * 30 + [1] * 18 + [2] * 12
    return Federation.from_arrays(x.numpy(), (x[:, 0] % CLASSES).numpy(), clients, test_fraction=0.0, standardize=True)


@pytest.mark.parametrize("name", ["few outputs", "transposed"])
def test_weight_decay_takes_the_fast_path_and_means_the_same(name: str) -> None:
    """theta <- theta - lr (g + decay theta), spelled out with plain gradients."""
    task = make_task(NETS[name][0])
    part = federation().cohort(torch.arange(3), 0, 1).train
    training = LocalTraining(lr=0.3, batch=5, epochs=2, steps=None, weight_decay=0.1)
    theta = models(task, 3, "own")
    wanted = theta.clone()
    for rows, batch in part.batches(training):
        wanted[rows] -= 0.3 * (task.grad(wanted[rows], batch) + 0.1 * wanted[rows])
    torch.testing.assert_close(sgd(task, theta, part.batches(training)), wanted, rtol=1e-4, atol=1e-5)


def test_fleeting_batches_are_the_batches() -> None:
    part = federation().cohort(torch.arange(3), 0, 1).train
    training = LocalTraining(batch=4, epochs=2, steps=None)
    kept = list(part.batches(training))  # none of these may be written over
    seen = 0
    for (rows, batch), (again, reusing_memory) in zip(kept, part.batches(training).reusing_memory(), strict=True):
        assert rows == again
        for name in ("x", "y", "weight", "ids"):
            assert torch.equal(getattr(batch, name), getattr(reusing_memory, name))
        assert (batch.round, batch.step) == (reusing_memory.round, reusing_memory.step)
        seen += 1
    assert seen == 16  # 30 examples in eight steps, twice
