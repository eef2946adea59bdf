"""Every backend on every pool: the same bits, uninterrupted or killed and resumed; and means that spare the driver."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.ditto import Ditto
from kinfed.algorithms.fedavg import FedAvg
from kinfed.core import kernels
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.federations.federation import Federation
from kinfed.engine import lora
from kinfed.engine.task_factory import make_task
from kinfed.engine.zoo.classics import lstm
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.server.schedule import Schedule
from kinfed.testing import tiny_federation, tiny_model
from kinfed.testing.workbench import expect_equal, outcome, state_of
from kinfed.updates.codecs import QSGD
from kinfed.updates.compression import Compression
from kinfed.updates.robust import Median, RobustAverage
from kinfed.updates.stages import Stage

ray = pytest.importorskip("ray", reason='the ray pool needs the package ray: pip install "kinfed[ray]"')

from ray import cloudpickle  # noqa: E402

from kinfed.pools.ray_pool import RayCluster, RayPool  # noqa: E402

# Ray leaves files and processes to the garbage collector, which warns about them.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

SEED, ROUNDS = 3, 4
WORK = LocalTraining(batch=5, steps=3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One Ray of this machine for the whole file."""
    workers = RayCluster(None, workers=2)
    try:
        yield workers
    finally:
        workers.close()


def federation(shape: tuple[int, ...] = (4,)) -> Federation:
    """Clients of several sizes, none below a batch: who trains beside a client then never changes how it is padded."""
    data = tiny_federation((5, 9, 16, 7, 13, 10, 6, 8))
    repeats = -(-torch.Size(shape).numel() // 4)
    raw = data.features.raw.repeat(1, repeats)[:, : torch.Size(shape).numel()]
    data.features = Features(raw.reshape(-1, *shape).clone())
    return data


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))


def adapters() -> nn.Module:
    return lora(tiny_model(), targets="1,3", rank=2, alpha=4.0, train="5")


def sequences() -> nn.Module:
    return lstm((4, 3), 3, hidden=5, layers=1)


class Gated(nn.Module):
    """No chain of layers: autograd goes through it, row by row or with vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.gate(x)) * self.value(x))  # type: ignore[no-any-return]


# By name: the backend, a model for it, and the shape of an example.
BACKENDS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "stacked": ("stacked", tiny_model, (4,)),
    "fused": ("fused", tiny_model, (4,)),
    "rows": ("rows", Gated, (4,)),
    "vmap": ("vmap", Gated, (4,)),
    "batched": ("batched", adapters, (4,)),
    "cnn": ("rows", convolutions, (1, 8, 8)),
    "lstm": ("stacked", sequences, (4, 3)),
    "lstm, fused": ("fused", sequences, (4, 3)),
}


NEW_PROCESS = ("fused", "batched")  # backends that are tried in a worker that took the place of a killed one, too
# Products of many clients' matrices in one call, whose last bits may depend on how many clients are in it (vmap's do):
# on Ray, every worker has some of them. On one pool, they are always the same.
JOINT_PRODUCTS = ("stacked", "vmap", "batched", "lstm")


@cache
def uninterrupted(backend: str) -> dict[str, Tensor]:
    """The run on the local pool with one worker, from beginning to end."""
    return completed(start(backend, partial(LocalPool, workers=1)))


def start(backend: str, make_pool: Callable[..., Any]) -> Loop:
    kind, build, shape = BACKENDS[backend]
    method, data, task = Ditto(WORK), federation(shape), make_task(build, backend=kind)
    return Loop(method, task, make_pool(method, task, data, SEED), data.population(SEED), Schedule(0.75))


def completed(loop: Loop) -> dict[str, Tensor]:
    with loop:
        while loop.completed < ROUNDS:
            loop.round()
        return outcome(loop)


@pytest.mark.parametrize("killed", [False, True], ids=["uninterrupted", "killed and resumed"])
@pytest.mark.parametrize("where", ["local", "local, 3 workers", "ray"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_has_the_same_bits_on_every_pool(backend: str, where: str, killed: bool, cluster: RayCluster) -> None:
    """A killed run has nothing but its last checkpoint: what it did after that, and its pool, are gone."""
    if "fused" in backend:
        pytest.importorskip("numba", reason='compiled loops need numba: pip install "kinfed[fast]"')
    make = cluster.pool if where == "ray" else partial(LocalPool, workers=3 if "3" in where else 1)
    loop = start(backend, make)
    if killed:
        loop.round()
        checkpoint = loop.completed, state_of(loop)
        loop.round()
        if isinstance(loop.pool, RayPool) and backend in NEW_PROCESS:
            os.kill(ray.get(loop.pool._slots[1].worker.process_id.remote()), signal.SIGKILL)
        loop.close()
        loop = start(backend, make)
        loop.load(*checkpoint)
    joint = where == "ray" and backend in JOINT_PRODUCTS
    ours, theirs = completed(loop), uninterrupted(backend)
    expect_equal(ours, theirs, f"{backend} on {where} is {backend}", 1e-6 if joint else 0.0)
    if joint and killed:
        expect_equal(ours, completed(start(backend, make)), f"{backend} on {where}, killed and resumed")


# ---- means that spare the driver ----


def wide() -> nn.Module:
    """240,003 parameters: of six clients more than an average takes at once."""
    return nn.Sequential(nn.Linear(4, 30_000), nn.Linear(30_000, 3))


@dataclass(frozen=True)
class Poisoned(FedAvg):
    """Client 2 sends nothing but NaN in round 3."""

    def client_update(self, task: Any, client: Any, down: Any, data: Any) -> Any:
        client, up = super().client_update(task, client, down, data)
        if data.round == 3:
            up.delta[data.ids == 2] = torch.nan
        return client, up


@dataclass(frozen=True)
class Heaviest(FedAvg):
    """A server that looks at single updates: it takes that of the client with the most examples."""

    def aggregate(self, server: Any, ids: Tensor, up: Any, round: Any) -> Any:
        return super().aggregate(server, ids, up.take(up.count.argmax()[None]), round)


def averaged(
    method: Any,
    where: RayCluster | None,
    stages: tuple[Stage, ...] = (),
    after: Callable[[Loop], None] = lambda _: None,
) -> tuple[dict[str, Tensor], list[bool]]:
    """What a run led to, and of every round whether its pool gave the mean alone."""
    data, task = federation(), make_task(wide, backend="rows")
    pool: Any = (
        where.pool(method, task, data, SEED, stages) if where else LocalPool(method, task, data, SEED, stages=stages)
    )
    train, spared = pool.train, list[bool]()

    def watched(*arguments: Any, **more: Any) -> Any:
        updates = train(*arguments, **more)
        spared.append(updates.mean is not None and updates.rows is None)
        return updates

    pool.train = watched
    with Loop(method, task, pool, data.population(SEED), Schedule(0.75), stages) as loop:
        while loop.completed < ROUNDS:
            loop.round()
            after(loop)
        return state_of(loop), spared


@pytest.mark.parametrize(
    ("method", "stages", "spared"),
    [
        (FedAvg(WORK), (), [False, True, True, True]),  # the first round shows how large updates are
        (FedAvg(WORK, weights="equal"), (), [False, True, True, True]),
        (make_algorithm("fedem", WORK, {"components": 2}), (), [False, True, True, True]),
        (FedAvg(WORK), (Compression(QSGD(levels=3)),), [False, True, True, True]),
        (Poisoned(WORK), (), [False, True, False, True]),  # five updates are averaged in other blocks than six
        (Heaviest(WORK), (), [False] * 4),
        (FedAvg(WORK), (RobustAverage(Median(), FedAvg(WORK)),), [False] * 4),
        (make_algorithm("scaffold", WORK, {}), (), [False] * 4),
    ],
    ids=["", "equal weights", "several models", "codes", "refused", "own aggregate", "robust", "single updates"],
)
def test_workers_average_large_updates_where_only_their_mean_is_needed(
    method: Any, stages: tuple[Stage, ...], spared: list[bool], cluster: RayCluster
) -> None:
    ours, by_workers = averaged(method, cluster, stages)
    theirs, _ = averaged(method, None, stages)
    assert by_workers == spared
    order = [torch.argsort(found["clients.ids"]) for found in (ours, theirs)]
    for found, by_id in zip((ours, theirs), order, strict=True):
        found |= {name: tensor[by_id] for name, tensor in found.items() if name.startswith("clients.")}
    expect_equal(ours, theirs, "a mean of workers is the server's own")


def test_a_worker_that_ends_while_it_averages_leaves_no_trace(cluster: RayCluster) -> None:
    def kill(loop: Loop) -> None:
        pool: Any = loop.pool
        worker = pool._slots[0].worker
        if loop.completed != 2:
            return
        train = pool._with_parts

        def killed(*arguments: Any) -> Any:
            os.kill(ray.get(worker.process_id.remote()), signal.SIGKILL)
            pool._with_parts = train
            return train(*arguments)

        pool._with_parts = killed

    ours, spared = averaged(FedAvg(WORK), cluster, after=kill)
    theirs, _ = averaged(FedAvg(WORK), None)
    assert spared == [False, True, True, True]
    assert torch.equal(ours["server.w"], theirs["server.w"])


@pytest.mark.parametrize("n", [3, 128, 300])
def test_the_mean_of_whole_blocks_of_columns_is_there_that_of_all_columns(n: int) -> None:
    columns = 3 * kernels.MEAN_BLOCK // min(n, kernels.MEAN_ROWS) + 17
    rows = torch.randn(n, columns, generator=torch.Generator().manual_seed(n))
    weight = torch.arange(1.0, n + 1)
    width = kernels.mean_block(n, columns)
    whole, share = kernels.weighted_mean(rows, weight), kernels.shares(weight)
    for begin, end in ((0, width), (width, 3 * width), (2 * width, columns)):
        part = kernels.mean_by_blocks(rows[:, begin:end].clone(), share)
        assert torch.equal(part, whole[begin:end])
