"""Every method on a device that is not there (tests/pretend_device.py), where tensors of both sides do not mix, and
where copies and waits are counted; evaluation, curves, export and resume of whole runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pretend_device
import pytest
import torch
from pretend_device import traffic
from safetensors.torch import load as from_bytes
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from test_contract import bench
from torch import Tensor, nn

import kinfed
from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.data import Federation, LocalTraining
from kinfed.engine import make_task
from kinfed.errors import ConfigError
from kinfed.pools import LocalPool, local_pool
from kinfed.records.reader import load_run
from kinfed.runs.method_run import Interrupted
from kinfed.server import Loop, Schedule
from kinfed.serving.export import TrainedModels, export_model
from kinfed.testing.workbench import ROUNDS, expect_equal, outcome, state_of

BY_TREES = ("trees", "trees_fast", "random_trees", "bagged_trees")


@pytest.fixture
def device() -> Iterator[torch.device]:
    with pretend_device.pretended() as name:
        yield name


def test_tensors_of_both_sides_do_not_mix(device: torch.device) -> None:
    there, here = torch.ones(3).to(device), torch.ones(3)
    assert there.device == device
    for mixing in (
        lambda: there + here,
        lambda: torch.where(there > 0, here, there),
        lambda: here[torch.arange(2).to(device)],
        lambda: here.index_copy_(0, torch.arange(2), there[:2]),
        lambda: torch.cat([there, here]),
        lambda: here.__setitem__(slice(2), there[:2] + here[:2]),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            mixing()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    assert (there + 2.0 * torch.tensor(1.0)).tolist() == [3.0] * 3  # numbers without axes may come from anywhere
    assert there[torch.tensor([0, 2])].tolist() == [1.0, 1.0]


def test_copies_and_waits_are_counted(device: torch.device) -> None:
    with traffic() as counter:
        there = torch.ones(3).to(device)
        there.to(device)  # is there already
        there.cpu()
        there.sum().item()
        there[there > 0]
        there[torch.tensor([0])]
    assert (counter["to"], counter["from"], counter["waits"]) == (2, 1, 2)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in BY_TREES])
def test_a_method_on_a_device_gives_what_it_gives_without(name: str, device: torch.device) -> None:
    """Rounds, evaluations and a resumed run: what is stored after the first round goes on to the same end."""
    method = bench(name)
    task = method.make_task().on(device)
    with method.loop(rounds=1, task=task) as first:
        stored = to_bytes({name: tensor.cpu().contiguous() for name, tensor in state_of(first).items()})
    with method.loop(task=task) as loop:
        loop.load(1, from_bytes(stored))
        for _ in range(ROUNDS - 1):
            loop.round()
        result = {name: tensor.cpu() for name, tensor in outcome(loop).items()}
    expect_equal(result, method.usual, "a device gives what the processor gives", 1e-5)


@pytest.mark.parametrize("name", BY_TREES)
def test_trees_are_refused_on_a_device(name: str, device: torch.device) -> None:
    method = bench(name)
    with pytest.raises(ConfigError, match="--device cpu"), method.loop(task=method.make_task().on(device)):
        pass


def image_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))


def images(clients: int) -> Federation:
    number = torch.arange(12 * clients)
    x = torch.sin(torch.arange(16.0 * len(number))).reshape(-1, 1, 4, 4)
    return Federation.from_arrays(x, number % 3, number % clients, test_fraction=0.25)


def loop_on(device: torch.device, clients: int, **training: int | str) -> Loop:
    method = make_algorithm("fedavg", LocalTraining(lr=0.1, batch=3, **training))  # type: ignore[arg-type]
    task = make_task(image_net, device=device, backend="rows")
    data = images(clients)
    return Loop(method, task, LocalPool(method, task, data, 0, workers=1), data.population(0), Schedule())


def test_copies_do_not_grow_with_clients_or_steps(device: torch.device) -> None:
    """Examples lie on the device: a round copies the numbers of those that form the batches, for many clients at once;
    an evaluation copies outputs back once. (Models that train one row at a time had 12 and 6 copies per client.)"""
    seen = []
    for clients, steps in ((5, 3), (20, 6)):
        with loop_on(device, clients, steps=steps) as loop:
            loop.round()
            with traffic() as of_round:
                loop.round()
            with traffic() as of_evaluation:
                loop.evaluate()
        assert of_round["from"] == 0
        seen.append((of_round["to"], of_round["waits"], of_evaluation["to"], of_evaluation["from"]))
    assert seen[0] == seen[1]
    assert max(seen[0]) <= 6


def test_examples_that_do_not_fit_stay_with_the_host(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    with loop_on(device, 3, steps=2) as loop:
        assert isinstance(loop.pool, LocalPool)
        assert loop.pool.federation.features.raw.device == loop.pool.federation.targets.device == device
        loop.round()
        resident = state_of(loop)
    nbytes = images(3).features.raw.nbytes
    monkeypatch.setattr(local_pool, "device_memory", lambda _: 2 * nbytes)
    with loop_on(device, 3, steps=2) as loop:
        assert isinstance(loop.pool, LocalPool)
        assert loop.pool.federation.features.raw.device.type == "cpu"
        loop.round()
        expect_equal({k: t.cpu() for k, t in state_of(loop).items()},
                     {k: t.cpu() for k, t in resident.items()}, "where examples lie does not matter")  # fmt: skip


def test_images_are_changed_on_the_device_as_without(device: torch.device) -> None:
    results = []
    for where in (torch.device("cpu"), device):
        with loop_on(where, 3, steps=2, augment="crop_flip") as loop:
            loop.round()
            results.append({name: tensor.cpu() for name, tensor in state_of(loop).items()})
    expect_equal(results[1], results[0], "augmented examples are the same on a device", 1e-6)


def test_a_part_of_the_examples_goes_to_a_device_alone(device: torch.device) -> None:
    data = images(4)
    part = data.cohort(torch.tensor([1, 3]), 0, 1).test
    moved = part.on(device)
    assert moved.features.raw.device == moved.labels.device == device
    assert len(moved.features) == len(torch.unique(data.test.rows)) < len(data.features)
    for (_, ours), (_, theirs) in zip(moved.in_order(), part.in_order(), strict=True):
        assert torch.equal(ours.x.cpu(), theirs.x)
        assert torch.equal(ours.y.cpu(), theirs.y)
    assert part.on(torch.device("cpu")) is part


class Attentive(nn.Module):
    """BatchNorm, attention and dropout: what keeps statistics and what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.reshape(-1, 8, 8))
        x, _ = self.attention(x, x, x, need_weights=False)
        z: Tensor = self.head(self.drop(x.mean(1)))
        return z


@pytest.mark.parametrize(("model", "methods"), [(None, "local,fedavg,fedfomo"), (Attentive, "fedavg,ditto")])
def test_a_whole_run_on_a_device(
    model: Callable[[], nn.Module] | None, methods: str, device: torch.device, tmp_path: Path
) -> None:
    """Scores, curves, kept models, export and a run that was interrupted, beside a run without a device."""
    settings: dict[str, Any] = {
        "dataset": "digits", "partition": "dirichlet", "clients": 3, "rounds": 2, "algorithms": methods, "seeds": (0,),
        "participation": 1.0, "validation": 0.2, "steps": 2, "eval_every": 1, "save_models": True, "model": model,
        "checkpoint_every": 1,
    }  # fmt: skip
    for name in ("cpu", "gpu"):
        kinfed.run(out=tmp_path / name, device=name, **settings)
    stops = iter([False, False, True])
    with pytest.raises(Interrupted):
        kinfed.run(out=tmp_path / "resumed", device="gpu", should_stop=lambda: next(stops), **settings)
    kinfed.run(out=tmp_path / "resumed", device="gpu", resume=True, **settings)
    label, client = methods.split(",")[-1], "client-1"
    here, there, resumed = (load_run(tmp_path / name, name) for name in ("cpu", "gpu", "resumed"))
    models = {name: TrainedModels.open(tmp_path / name, label, 0).parts(client)[0] for name in ("gpu", "resumed")}
    expect_equal(models["resumed"], models["gpu"], "a resumed run on a device ends where it would have")
    assert resumed.curves[label, 0].to_json() == there.curves[label, 0].to_json()
    exported = export_model(tmp_path / "gpu", client, label, out=tmp_path / "model.safetensors")
    expect_equal(load_file(exported.path), models["gpu"], "what is exported is what was kept")
    if model is None:  # draws of a device are its own
        ours, theirs = (run.curves[label, 0].to_json() for run in (there, here))
        assert ours["clients"] == theirs["clients"]
        for part in ("roc", "bins"):
            np.testing.assert_allclose(np.array(ours[part]), np.array(theirs[part]), atol=1e-4)
        expect_equal(models["gpu"], TrainedModels.open(tmp_path / "cpu", label, 0).parts(client)[0], "", 1e-5)
