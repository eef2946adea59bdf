"""The Ray pool: clients in worker processes of one machine or many, with their data and states.

Every worker is an actor with a shard of the clients (pools.worker), balanced by expected work. Data is sent once; then
only messages move, and what is the same for all clients once per round. Replies are put together in the order of
client ids, so the number of workers and which one is first do not change a result.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import is_broadcast, plugins
from kinfed.data import Federation
from kinfed.engine import ModuleTask, Task
from kinfed.errors import ConfigError, PoolError
from kinfed.pools.base import Download, Evaluation, ServerModelOf
from kinfed.pools.collect import UpdatesCollector, join_evaluations
from kinfed.pools.store import checked_ids
from kinfed.pools.worker import balance, compact, expected_work, make_shard
from kinfed.updates import Road, Stage, Updates

try:
    import ray
    from ray import exceptions
except ImportError as error:
    raise ConfigError('the ray pool needs the package ray: pip install "kinfed[ray]"') from error

from kinfed.pools import ray_processes
from kinfed.pools.ray_processes import GONE, WorkerShare, fetch, start_workers

RESTARTS = 3  # of one worker for one call; what ends it more often is not chance

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
        return RayPool(slots, members, federation.num_clients)

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
    worker: Any  # None where the last one ended and no other could be started
    say: Callable[[str], None]
    share: WorkerShare
    spec: _RunSpec | None = None
    snapshots: list[tuple[Tensor, Any]] = field(default_factory=list)  # ids, reference to a StateSnapshot; oldest first

    def prepare(self, spec: _RunSpec) -> None:
        """Send what the worker does not have of a run: the data of its clients, and always the algorithm."""
        before, self.spec, self.snapshots = self.spec, spec, []
        if self.worker is None:
            before = None
            (self.worker,) = start_workers(1, self.share.without_cpus())
        if not spec.same_data(before):
            self.ask(_load_shard(spec))
        self.ask(_start_run(spec))

    def remember(self, ids: Tensor, reference: Any) -> None:
        """Remember the newest states of these clients; drop snapshots whose clients all have newer ones."""
        self.snapshots = [(old, snapshot) for old, snapshot in self.snapshots if not bool(torch.isin(old, ids).all())]
        self.snapshots.append((ids, reference))

    def ask(self, call: Call) -> Any:
        return self.result(call(self.worker), call)

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

    def __init__(self, slots: list[_WorkerSlot], members: list[Tensor], num_clients: int) -> None:
        self._slots = slots
        self._held: list[tuple[_WorkerSlot, Tensor, Any]] = []  # ids and snapshot of a round that is not taken yet
        self._slot_of = torch.zeros(num_clients, dtype=torch.int64)
        for number, ids in enumerate(members):
            self._slot_of[ids] = number

    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False
    ) -> Updates:
        send = _BroadcastCache(download)
        calls: list[tuple[_WorkerSlot, Tensor, Call, Any]] = []
        self._held = []
        for slot, positions in self._by_slot(ids):
            who, own_effort = ids[positions], None if effort is None else effort[positions]
            call: Call = _call("train", who, send(who), round, own_effort, hold, returns=2)
            calls.append((slot, positions, call, call(slot.worker)))
        collector = UpdatesCollector(ids)
        for slot, positions, call, reference in calls:
            updates: Updates
            updates, snapshot = slot.result(reference, call)
            if hold:
                self._held.append((slot, updates.ids, snapshot))
            else:
                slot.remember(updates.ids, snapshot)
            replied = positions[torch.isin(ids[positions], updates.ids)]
            collector.add(replied, updates.rows, updates.nbytes, refused=updates.refused, record=updates.record)
        return collector.updates()

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
        for number, slot in enumerate(self._slots):
            positions = (self._slot_of[ids] == number).nonzero().squeeze(1)
            part = {name: tensor.index_select(0, positions) for name, tensor in tensors.items()}
            slot.snapshots = []
            _, snapshot = slot.ask(_call("load", ray.put(part), returns=2))
            slot.remember(part["ids"], snapshot)

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
