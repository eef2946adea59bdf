"""The Ray pool: clients in worker processes of one machine or many, with their data and states.

Every worker is an actor with a shard of the clients (pools.worker), balanced by expected work. Data is sent once; then
only messages move, and what is the same for all clients once per round. Replies are put together in the order of
client ids, so the number of workers and which one is first do not change a result.

Where the server needs nothing but the mean of large updates, these do not pass through the driver. Every worker cuts
its updates into parts by columns, each of several workers gets one part of all updates and averages it, and the driver
takes the means. Parts by rows (a tree of partial sums) would round in another order than the server's own average and
change results; the parts by columns are whole blocks of those in which the average goes through the columns anyway
(`kernels.mean_by_blocks`), so that every bit is the local pool's.

A round's reply comes with a copy of the states it changed, as an object in Ray's store to which the driver has a
reference, without fetching it. If a worker ends (crash, out of memory, killed), a new one gets the shard and those
states, and the call is made again: as training is a pure function of states and messages, the run is equal to one
without the loss. Objects of more than 100 kB are on the worker's own machine: if that is lost, so may be states, and
the run stops with a PoolError that says so; it goes on from its last checkpoint.

Ray sends pickles between its processes: the cluster, and everybody who reaches its ports, must be trusted.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, AveragingAlgorithm
from kinfed.core import Tree, is_broadcast, kernels, plugins
from kinfed.data import Federation
from kinfed.engine import ModuleTask, Task
from kinfed.errors import ConfigError, PoolError
from kinfed.pools.base import Download, Evaluation, ServerModelOf
from kinfed.pools.collect import UpdatesCollector, join_evaluations
from kinfed.pools.store import checked_ids
from kinfed.pools.worker import Cuts, balance, compact, expected_work, make_shard
from kinfed.updates import Road, Stage, Updates

try:
    import ray
    from ray import exceptions
except ImportError as error:
    raise ConfigError('the ray pool needs the package ray: pip install "kinfed[ray]"') from error

from kinfed.pools import ray_processes
from kinfed.pools.ray_processes import GONE, WorkerShare, fetch, start_workers

RESTARTS = 3  # of one worker for one call; what ends it more often is not chance
PART_BYTES = 1 << 18  # least part of a worker's updates; Ray sends results below 100 kB through the driver

Call = Callable[[Any], Any]  # worker -> reference to the result; a function, so that a new worker can be asked the same


class RayCluster:
    """Workers for the runs of one process, started once and used by one pool after the other."""

    def __init__(
        self, address: str | None = None, workers: int | None = None, say: Callable[[str], None] = lambda text: None, *,
        gpus: float = 0.0,
    ) -> None:  # fmt: skip
        """`say`: told which worker is waited for, since when and what it does, where an answer takes long. `gpus`: of
        each worker, which then computes on `cuda`; a fraction shares one among several workers."""
        self._say = say
        self._share = WorkerShare(gpus=gpus)
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            ray_processes.connect(address, workers)
        elif address is not None:
            raise ConfigError("this process is connected to a Ray cluster already; leave ray_address out to use it")
        ray_processes.send_tensors_as_bytes()
        self.size = workers or self._share.fitting()  # others may use the rest
        self._slots: list[_WorkerSlot] = []

    def pool(
        self, algorithm: AnyAlgorithm, task: Task, federation: Federation, seed: int, stages: Iterable[Stage] = ()
    ) -> RayPool:
        """A pool of these clients. The pool made before must have been closed: a worker serves one at a time."""
        if task.device.type != "cpu":
            raise ConfigError(
                f"a task travels to Ray's workers from the CPU; got device {task.device}; ray_gpus gives them GPUs"
            )
        if self._share.gpus and not isinstance(task, ModuleTask):
            raise ConfigError("Ray workers with GPUs train without privacy of single examples; leave ray_gpus out")
        members = balance(expected_work(algorithm, federation), min(self.size, federation.num_clients))
        missing = range(len(self._slots), len(members))
        workers = start_workers(len(missing), self._share)
        new = zip(missing, workers, strict=True)
        self._slots += [_WorkerSlot(number, worker, self._say, self._share) for number, worker in new]
        slots = self._slots[: len(members)]
        _send_plugins_as_code()
        device = "cuda" if self._share.gpus else "cpu"
        spec = partial(_RunSpec, uuid.uuid4().hex, algorithm, task, seed, Road(stages).at_clients(), device, federation)
        for slot, ids in zip(slots, members, strict=True):
            slot.prepare(spec(ids))
        for slot in slots:
            slot.wait()
        return RayPool(algorithm, slots, members, federation.num_clients)

    def close(self) -> None:
        """Ends the workers; and Ray itself, where it was started or joined here."""
        for slot in self._slots:
            slot.end()
        self._slots.clear()
        if ray.is_initialized():
            ray.util.deregister_serializer(Tensor)
            if self._connected_here:
                ray.shutdown()


def _send_plugins_as_code() -> None:
    """Classes of plugin files travel as code: workers have not loaded those files, and may not even have them."""
    pickler: Any = ray.cloudpickle
    for name, module in list(sys.modules.items()):
        if name.startswith(plugins.PREFIX):
            pickler.register_pickle_by_value(module)


@dataclass(frozen=True)
class _RunSpec:
    run: str  # its identity, which its states carry
    algorithm: AnyAlgorithm
    task: Task
    seed: int
    stages: Sequence[Stage]
    device: str  # on which the worker computes
    federation: Federation
    ids: Tensor  # of the worker's clients

    def same_data(self, other: _RunSpec | None) -> bool:
        return other is not None and self.federation is other.federation and torch.equal(self.ids, other.ids)


@dataclass
class _WorkerSlot:
    """One worker: the process at the moment, and what a new one needs in its stead."""

    number: int
    worker: Any  # None if the last one ended and no other could be started
    say: Callable[[str], None]
    share: WorkerShare
    spec: _RunSpec | None = None
    snapshots: list[tuple[Tensor, Any]] = field(default_factory=list)  # ids, reference to a StateSnapshot; oldest first
    under_way: list[tuple[Any, Call]] = field(default_factory=list)  # calls that have not been waited for yet

    def prepare(self, spec: _RunSpec) -> None:
        """Send what the worker does not have of a run: the data of its clients, and always the algorithm. `wait` ends
        it, so that all workers load at the same time."""
        before, self.spec, self.snapshots = self.spec, spec, []
        if self.worker is None:
            before = None
            (self.worker,) = start_workers(1, self.share.without_cpus())
        calls = [_start_run(spec)] if spec.same_data(before) else [_load_shard(spec), _start_run(spec)]
        self.under_way = [(call(self.worker), call) for call in calls]

    def wait(self) -> None:
        for reference, call in self.under_way:
            self.result(reference, call)
        self.under_way = []

    def remember(self, ids: Tensor, reference: Any) -> None:
        """Remember the newest states of these clients; drop snapshots whose clients all have newer ones."""
        self.snapshots = [(old, snapshot) for old, snapshot in self.snapshots if not bool(torch.isin(old, ids).all())]
        self.snapshots.append((ids, reference))

    def result(self, reference: Any, call: Call) -> Any:
        """The result of a call that was made; made again at a new worker where this one has gone."""
        for attempt in range(RESTARTS + 1):
            try:
                return fetch(reference, self._report)
            except GONE as error:
                if attempt == RESTARTS:
                    raise PoolError(self._message(f"ended {RESTARTS + 1} times in a row", error)) from error
                self.say(self._message("ended, and another takes its place", error))
                self._replace()
                reference = call(self.worker)
        raise AssertionError("unreachable")

    def _replace(self) -> None:
        assert self.spec is not None
        self.end()
        # A machine may be gone with its CPUs; those left must do. Of GPUs there must be one.
        (self.worker,) = start_workers(1, self.share.without_cpus())
        try:
            fetch(_load_shard(self.spec)(self.worker))
            fetch(_start_run(self.spec)(self.worker))
            fetch(_restore(self.snapshots)(self.worker))
        except exceptions.ObjectLostError as error:
            message = self._message("was lost with its machine, and states of its clients too", error)
            raise PoolError(message) from error
        except GONE:
            return  # the next call notices it

    def _report(self) -> None:
        self.say(f"waiting for Ray worker {self.number}, which {ray_processes.describe_worker(self.worker)}")

    def end(self) -> None:
        if self.worker is not None and ray.is_initialized():
            ray.kill(self.worker)
        self.worker = None

    def _message(self, what: str, error: Exception) -> str:
        clients = 0 if self.spec is None else len(self.spec.ids)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"Ray worker {self.number} with {clients} clients {what} ({reason.split('. ')[0][:200]})"


class RayPool:
    """Clients at the workers of a cluster; see kinfed.pools.base.Pool."""

    def __init__(
        self, algorithm: AnyAlgorithm, slots: list[_WorkerSlot], members: list[Tensor], num_clients: int
    ) -> None:
        self._algorithm, self._slots = algorithm, slots
        self._form: Tree | None = None  # an update of no clients, once there was one: its fields and their shapes
        self._held: list[tuple[_WorkerSlot, Tensor, Any]] = []  # ids and snapshot of a round that is not taken yet
        self._slot_of = torch.zeros(num_clients, dtype=torch.int64)
        for number, ids in enumerate(members):
            self._slot_of[ids] = number

    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Updates:  # fmt: skip
        send = _BroadcastCache(download)
        calls: list[tuple[_WorkerSlot, Tensor, Call, Any]] = []
        self._held = []
        by_slot = list(self._by_slot(ids))
        cuts = self._cuts(len(ids), len(by_slot)) if only_mean else {}
        returns = 2 + max((len(bounds) - 1 for bounds in cuts.values()), default=0)
        for slot, positions in by_slot:
            who, own_effort = ids[positions], None if effort is None else effort[positions]
            call: Call = _call("train", who, send(who), round, own_effort, hold, cuts, returns=returns)
            calls.append((slot, positions, call, call(slot.worker)))
        collector = UpdatesCollector(ids)
        sent: list[tuple[Tensor, list[Any]]] = []  # ids of a worker's updates, and references to their parts
        for slot, positions, call, reference in calls:
            updates: Updates
            updates, snapshot, *parts = slot.result(reference, call)
            if len(updates.ids):
                sent.append((updates.ids, parts))
            if hold:
                self._held.append((slot, updates.ids, snapshot))
            else:
                slot.remember(updates.ids, snapshot)
            replied = positions[torch.isin(ids[positions], updates.ids)]
            collector.add(replied, updates.rows, updates.nbytes, refused=updates.refused, record=updates.record)
        together = collector.updates()
        if cuts and together.rows is not None:
            return self._with_parts(together, len(ids), cuts, sent)
        if together.rows is not None:
            self._form = together.rows.take(torch.zeros(0, dtype=torch.int64))
        return together

    def _cuts(self, n: int, workers: int) -> Cuts:
        """Columns at which averaged fields are cut, where n updates are large enough for that to pay."""
        names = self._algorithm.fields if isinstance(self._algorithm, AveragingAlgorithm) and self._form else ()
        rows = {name: getattr(self._form, name) for name in names}
        width = {name: one.shape[1:].numel() for name, one in rows.items()}
        blocks = {name: size for name in rows if (size := kernels.mean_block(n, width[name]))}
        nbytes = sum(n * width[name] * rows[name].element_size() for name in blocks)
        parts = min(workers, nbytes // (workers * PART_BYTES))
        if parts < 2:
            return {}
        return {
            name: [min(size * (-(-width[name] // size) * k // parts), width[name]) for k in range(parts + 1)]
            for name, size in blocks.items()
        }

    def _with_parts(
        self, updates: Updates, asked: int, cuts: Cuts, sent: Sequence[tuple[Tensor, Sequence[Any]]]
    ) -> Updates:
        """The mean of updates whose parts are at the workers. Where clients that were asked are refused, so that the
        average goes through other blocks: the updates themselves."""
        n = len(updates.ids)
        positions = [torch.searchsorted(updates.ids, ids) for ids, _ in sent]
        shapes = {name: getattr(self._form, name).shape[1:] for name in cuts}
        blocks, expected = ([kernels.mean_block(count, s.numel()) for s in shapes.values()] for count in (n, asked))
        if blocks != expected:
            order, fetched = torch.argsort(torch.cat(positions)), [[fetch(part) for part in parts] for _, parts in sent]
            rows = {
                name: torch.cat([torch.cat([part[name] for part in parts], 1) for parts in fetched]) for name in cuts
            }
            whole = {name: rows[name][order].reshape(n, *shape) for name, shape in shapes.items()}
            return replace(updates, rows=replace(updates.rows, **whole))
        assert isinstance(self._algorithm, AveragingAlgorithm)  # of no other is the mean alone asked for
        weight = self._algorithm.weight(updates.rows)
        share = ray.put(kernels.shares(torch.ones(n) if weight is None else weight))
        calls = []
        for number, slot in enumerate(self._slots[: len(sent[0][1])]):
            call = _call("mean", share, positions, *(parts[number] for _, parts in sent))
            calls.append((slot, call, call(slot.worker)))
        means = [slot.result(reference, call) for slot, call, reference in calls]
        whole = {name: torch.cat([part[name] for part in means]).reshape(shape) for name, shape in shapes.items()}
        total = float(n if weight is None else weight.sum())
        return replace(updates, rows=None, mean=replace(self._algorithm.averaged(updates.rows), **whole), weight=total)

    def commit(self, ids: Tensor) -> None:
        calls: list[tuple[_WorkerSlot, Call, Any]] = []
        for slot, computed, snapshot in self._held:
            taken = computed[torch.isin(computed, ids)]
            call = _restore([(taken, snapshot)])
            calls.append((slot, call, call(slot.worker)))
            slot.remember(taken, snapshot)
        for slot, call, reference in calls:
            slot.result(reference, call)
        self._held = []

    def evaluate(
        self, ids: Tensor, download: Download, round: int, *, split: str = "test",
        server_model: ServerModelOf | None = None, keep_models: bool = False,
    ) -> Evaluation:  # fmt: skip
        send, send_model = _BroadcastCache(download), _BroadcastCache(server_model or (lambda who: None))
        calls: list[tuple[_WorkerSlot, Tensor, Call, Any]] = []
        for slot, positions in self._by_slot(ids):
            positions = positions[torch.argsort(ids[positions])]
            who = ids[positions]
            call = _call("evaluate", who, send(who), round, split, send_model(who), keep_models)
            calls.append((slot, positions, call, call(slot.worker)))
        parts = [slot.result(reference, call) for slot, _, call, reference in calls]
        return join_evaluations(ids, [positions for _, positions, _, _ in calls], parts)

    def states(self) -> dict[str, Tensor]:
        call = _call("states")
        references = [call(slot.worker) for slot in self._slots]
        parts = [slot.result(reference, call) for slot, reference in zip(self._slots, references, strict=True)]
        order = torch.argsort(torch.cat([part["ids"] for part in parts]))
        parts = [part for part in parts if len(part["ids"])] or parts[:1]  # those without clients know no fields
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        ids = checked_ids(tensors, len(self._slot_of))
        calls: list[tuple[_WorkerSlot, Tensor, Call, Any]] = []
        for number, slot in enumerate(self._slots):
            positions = (self._slot_of[ids] == number).nonzero().squeeze(1)
            part = {name: tensor.index_select(0, positions) for name, tensor in tensors.items()}
            slot.snapshots = []
            call = _call("load", ray.put(part), returns=2)
            calls.append((slot, part["ids"], call, call(slot.worker)))
        for slot, own, call, reference in calls:
            _, snapshot = slot.result(reference, call)
            slot.remember(own, snapshot)

    def close(self) -> None:
        """The workers stay for the next pool; snapshots of their clients' states are dropped."""
        for slot in self._slots:
            slot.snapshots = []

    def _by_slot(self, ids: Tensor) -> Iterator[tuple[_WorkerSlot, Tensor]]:
        """Every worker that has some of these clients, with their positions in `ids`."""
        slot_of = self._slot_of[ids]
        for number, slot in enumerate(self._slots):
            positions = (slot_of == number).nonzero().squeeze(1)
            if len(positions):
                yield slot, positions


class _BroadcastCache:
    """Puts rows into Ray's store, for one worker after the other; a row that is the same for all clients only once."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make  # ids [n] -> rows, as a Tree or a tensor; or None
        self._common: tuple[list[int], Any, Any] | None = None  # addresses, the rows there, and the reference to them

    def __call__(self, ids: Tensor) -> Any:
        rows = self._make(ids)
        if rows is None:
            return None
        tensors = [rows] if isinstance(rows, Tensor) else list(rows.named().values())
        addresses = [tensor.data_ptr() for tensor in tensors]
        common = all(is_broadcast(tensor) or len(tensor) == 1 for tensor in tensors)
        if common and self._common is not None and self._common[0] == addresses:
            return self._common[2]
        reference = ray.put(compact(rows))
        if common:
            self._common = addresses, rows, reference  # `rows` lives on, so that nothing else gets its addresses
        return reference


def _call(method: str, *arguments: Any, returns: int = 1) -> Call:
    return lambda worker: getattr(worker, method).options(num_returns=returns).remote(*arguments)


def _load_shard(spec: _RunSpec) -> Call:
    return lambda worker: worker.load_shard.remote(make_shard(spec.federation, spec.ids))


def _start_run(spec: _RunSpec) -> Call:
    return _call("start_run", spec.run, spec.algorithm, spec.task, spec.seed, spec.stages, spec.device)


def _restore(snapshots: Sequence[tuple[Tensor, Any]]) -> Call:
    return _call("restore", [ids for ids, _ in snapshots], *(one for _, one in snapshots))
