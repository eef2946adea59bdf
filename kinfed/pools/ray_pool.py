"""The Ray pool: clients in worker processes of one machine or many, which keep their data and states.

Every worker is an actor with a shard of the clients (pools.worker), dealt by expected work. Data goes there once;
then only messages move, and what is the same for all clients once per round. Replies are put together in the order of
client ids, so the number of workers and who is first do not change a result.

A round's reply comes with a copy of the states it changed, as an object in Ray's store that the driver holds and does
not fetch. If a worker ends (crash, out of memory, killed), another one takes its place, gets the shard and those
states, and the call is made again: as training is a pure function of states and messages, the run is equal to one
without the loss. Objects of more than 100 kB lie on the worker's own machine: if that is lost, so may be states, and
the run stops with a PoolError that says so; it goes on from its last checkpoint.

Ray sends pickles between its processes: the cluster, and everybody who reaches its ports, must be trusted.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.core.registry import PLUGIN_PREFIX
from kinfed.core.tree import Tree, is_broadcast
from kinfed.data.federation import Federation
from kinfed.engine.task import Task
from kinfed.errors import CheckpointError, ConfigError, PoolError
from kinfed.pools.base import Download, Evaluation, Reply, ServerModelOf
from kinfed.pools.collect import ReplyCollector, join_evaluations
from kinfed.pools.local_pool import available_cores
from kinfed.pools.shard import balance, expected_work, make_shard
from kinfed.pools.worker import Worker, compact

try:
    import ray
    from ray import exceptions
except ImportError as error:
    raise ConfigError('the ray pool needs the package ray: pip install "kinfed[ray]"') from error

START_SECONDS = 300  # for workers to start: they import torch, perhaps from a slow disk on a busy machine
NOTICE_SECONDS = 1  # before a new worker is asked for again, for Ray to notice what it has lost
RESTARTS = 3  # of one worker for one call; what ends it more often is not chance

# What a call raises when its process or machine has gone, rather than when the method failed.
_GONE = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError, exceptions.NodeDiedError)


class RayCluster:
    """Workers for the runs of one process, started once and used by one pool after the other."""

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(address, workers)
        elif address is not None:
            raise ConfigError("this process is connected to a Ray cluster already; leave ray_address out to use it")
        ray.util.register_serializer(Tensor, serializer=_to_bytes, deserializer=_from_bytes)
        self.size = workers or max(int(_cpus(ray.available_resources)), 1)  # others may be at work there
        self._slots: list[_WorkerSlot] = []

    def pool(self, algorithm: Algorithm[Any, Any, Any, Any], task: Task, federation: Federation, seed: int) -> RayPool:
        """A pool of these clients. The pool made before must have been closed: a worker serves one at a time."""
        if task.device.type != "cpu":
            raise ConfigError(f"the ray pool computes on CPUs; got device {task.device}; use --device cpu")
        members = balance(expected_work(algorithm, federation), min(self.size, federation.num_clients))
        missing = range(len(self._slots), len(members))
        self._slots += [_WorkerSlot(n, worker) for n, worker in zip(missing, _started(len(missing), 1), strict=True)]
        slots = self._slots[: len(members)]
        if type(algorithm).__module__.startswith(PLUGIN_PREFIX):  # a file that workers elsewhere do not have
            pickler: Any = ray.cloudpickle
            pickler.register_pickle_by_value(sys.modules[type(algorithm).__module__])
        spec = partial(_RunSpec, uuid.uuid4().hex, algorithm, task, seed, federation)
        for slot, ids in zip(slots, members, strict=True):
            slot.prepare(spec(ids))
        return RayPool(slots, members, federation.num_clients)

    def close(self) -> None:
        """Ends the workers; and Ray itself, where it was started or joined here."""
        for slot in self._slots:
            slot.end()
        self._slots.clear()
        if self._ours and ray.is_initialized():
            ray.shutdown()


@dataclass(frozen=True)
class _RunSpec:
    """What a worker must know before its first round of a run."""

    run: str
    algorithm: Algorithm[Any, Any, Any, Any]
    task: Task
    seed: int
    federation: Federation
    ids: Tensor

    def same_data(self, other: _RunSpec | None) -> bool:
        return other is not None and self.federation is other.federation and torch.equal(self.ids, other.ids)


@dataclass
class _WorkerSlot:
    """One worker: the process at the moment, and what another one would need to take its place."""

    number: int
    worker: Any
    spec: _RunSpec | None = None
    snapshots: list[tuple[Tensor, Any]] = field(
        default_factory=list
    )  # (ids, reference to a StateSnapshot), the oldest first

    def prepare(self, spec: _RunSpec) -> None:
        before, self.spec, self.snapshots = self.spec, spec, []
        if self.worker is None:  # none could be had when the last one ended
            before = None
            (self.worker,) = _started(1, num_cpus=0)
        if spec.same_data(before):
            self.ask(_start_run(spec))
        else:
            self.ask(_load_shard(spec))
            self.ask(_start_run(spec))

    def remember(self, ids: Tensor, reference: Any) -> None:
        """Remember the newest states of these clients; drop snapshots whose clients all have newer ones."""
        self.snapshots = [(old, snapshot) for old, snapshot in self.snapshots if not bool(torch.isin(old, ids).all())]
        self.snapshots.append((ids, reference))

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """The result of a call; made again at a new worker where this one has gone."""
        return self.result(call(self.worker), call)

    def result(self, reference: Any, call: Callable[[Any], Any]) -> Any:
        for attempt in range(RESTARTS + 1):
            try:
                return _get(reference)
            except _GONE as error:
                if attempt == RESTARTS:
                    raise PoolError(self._sentence(f"ended {RESTARTS + 1} times in a row", error)) from error
                self._replace()
                reference = call(self.worker)
        raise AssertionError("unreachable")

    def _replace(self) -> None:
        assert self.spec is not None
        self.end()
        (self.worker,) = _started(1, num_cpus=0)  # a machine may be gone with its cores; the others' must do
        try:
            _get(_load_shard(self.spec)(self.worker))
            _get(_start_run(self.spec)(self.worker))
            _get(self.worker.restore.remote(*(snapshot for _, snapshot in self.snapshots)))
        except exceptions.ObjectLostError as error:
            raise PoolError(
                self._sentence("was lost with its machine, and states of its clients too", error)
            ) from error
        except _GONE:
            return  # the next call will find it gone

    def end(self) -> None:
        if self.worker is not None and ray.is_initialized():
            ray.kill(self.worker)
        self.worker = None

    def _sentence(self, what: str, error: Exception) -> str:
        clients = 0 if self.spec is None else len(self.spec.ids)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"Ray worker {self.number} with {clients} clients {what} ({reason.split('. ')[0][:200]})"


class RayPool:
    """Clients at the places of a cluster. Kept in step with kinfed.pools.base.Pool."""

    def __init__(self, slots: list[_WorkerSlot], members: list[Tensor], num_clients: int) -> None:
        self._slots = slots
        self._slot_of = torch.zeros(num_clients, dtype=torch.int64)
        for number, ids in enumerate(members):
            self._slot_of[ids] = number

    def train(self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None) -> Reply:
        send = _BroadcastCache(download)
        calls: list[tuple[_WorkerSlot, Tensor, Callable[[Any], Any], Any]] = []
        for slot, mine in self._shares(ids):
            own = None if effort is None else effort[mine]
            call = partial(_train, ids[mine], send(ids[mine]), round, own)
            calls.append((slot, mine, call, call(slot.worker)))
        collector = ReplyCollector(ids)
        for slot, mine, again, references in calls:
            reply: Reply
            reply, states = slot.result(references, again)
            slot.remember(reply.ids, states)
            collector.add(
                mine[torch.isin(ids[mine], reply.ids)], reply.up, reply.nbytes,
                rejected=reply.rejected, reasons=reply.reasons, record=reply.record,
            )  # fmt: skip
        return collector.reply()

    def evaluate(
        self,
        ids: Tensor,
        download: Download,
        round: int,
        *,
        split: str = "test",
        server_model: ServerModelOf | None = None,
        keep_models: bool = False,
    ) -> Evaluation:
        send, send_shared = _BroadcastCache(download), _BroadcastCache(server_model or (lambda who: None))
        calls: list[tuple[_WorkerSlot, Tensor, Callable[[Any], Any], Any]] = []
        for slot, mine in self._shares(ids):
            mine = mine[torch.argsort(ids[mine])]
            who = ids[mine]
            call = partial(_evaluate, who, send(who), round, split, send_shared(who), keep_models)
            calls.append((slot, mine, call, call(slot.worker)))
        parts = [slot.result(reference, call) for slot, _, call, reference in calls]
        return join_evaluations(ids, [mine for _, mine, _, _ in calls], parts)

    def states(self) -> dict[str, Tensor]:
        calls = [(slot, _states(slot.worker)) for slot in self._slots]
        parts = [slot.result(reference, _states) for slot, reference in calls]
        order = torch.argsort(torch.cat([part["ids"] for part in parts]))
        parts = [part for part in parts if len(part["ids"])] or parts[:1]  # those without clients know no fields
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        ids = tensors.get("ids")
        if ids is None:
            raise CheckpointError("client states without the ids of their clients")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._slot_of):
            raise CheckpointError(
                f"client states of ids up to {int(ids.max())}; there are {len(self._slot_of)} clients"
            )
        for number, slot in enumerate(self._slots):
            mine = (self._slot_of[ids] == number).nonzero().squeeze(1)
            part = {name: tensor.index_select(0, mine) for name, tensor in tensors.items()}
            slot.snapshots = []
            _, states = slot.ask(partial(_load, ray.put(part)))
            slot.remember(part["ids"], states)

    def close(self) -> None:
        """The workers stay for the next pool; what they would need to go on with this one is let go."""
        for slot in self._slots:
            slot.snapshots = []

    def _shares(self, ids: Tensor) -> Iterator[tuple[_WorkerSlot, Tensor]]:
        """Every place with the positions in `ids` of its clients."""
        slot_of = self._slot_of[ids]
        for number, slot in enumerate(self._slots):
            mine = (slot_of == number).nonzero().squeeze(1)
            if len(mine):
                yield slot, mine


class _BroadcastCache:
    """Rows for one worker after the other, put into Ray's store; the same row for all clients is put there once."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make
        self._common: tuple[list[int], Any, Any] | None = None  # addresses, the rows that hold them, and the reference

    def __call__(self, ids: Tensor) -> Any:
        rows = self._make(ids)
        if rows is None:
            return None
        tensors = [rows] if isinstance(rows, Tensor) else list(rows.named().values())
        addresses = [tensor.data_ptr() for tensor in tensors]
        common = all(is_broadcast(tensor) or len(tensor) == 1 for tensor in tensors)
        if common and self._common is not None and self._common[0] == addresses:
            return self._common[2]
        small = rows[:1] if isinstance(rows, Tensor) and common else compact(rows) if isinstance(rows, Tree) else rows
        reference = ray.put(small)
        if common:
            self._common = addresses, rows, reference  # `rows` lives on, so that nothing else gets its addresses
        return reference


# ---- calls to a worker, as functions of it, so that another one can be asked the same ----


def _load_shard(spec: _RunSpec) -> Callable[[Any], Any]:
    return lambda worker: worker.load_shard.remote(make_shard(spec.federation, spec.ids))


def _start_run(spec: _RunSpec) -> Callable[[Any], Any]:
    return lambda worker: worker.start_run.remote(spec.run, spec.algorithm, spec.task, spec.seed)


def _train(ids: Tensor, down: Any, round: int, effort: Tensor | None, worker: Any) -> Any:
    return worker.train.options(num_returns=2).remote(ids, down, round, effort)


def _evaluate(ids: Tensor, down: Any, round: int, split: str, server_model: Any, keep_models: bool, worker: Any) -> Any:
    return worker.evaluate.remote(ids, down, round, split, server_model, keep_models)


def _states(worker: Any) -> Any:
    return worker.states.remote()


def _load(part: Any, worker: Any) -> Any:
    return worker.load.options(num_returns=2).remote(part)


def _get(reference: Any) -> Any:
    """The result; of a pair the first, with the second as the reference it is. What a method raised is raised here."""
    try:
        return (ray.get(reference[0]), reference[1]) if isinstance(reference, list) else ray.get(reference)
    except exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


# ---- processes ----


class _Process(Worker):
    def __init__(self) -> None:
        # Ctrl-C reaches all processes of a terminal's group; when to stop is the driver's to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ray.util.register_serializer(Tensor, serializer=_to_bytes, deserializer=_from_bytes)
        super().__init__()

    def ready(self) -> int:
        """Answers once the process is there, with its number."""
        return os.getpid()


def _started(count: int, num_cpus: int) -> list[Any]:
    """New workers, spread over the cluster. Ray must not restart them by itself: one without its states would go on as
    if nothing had happened."""
    kind: Any = ray.remote(_Process).options(num_cpus=num_cpus, max_restarts=0, scheduling_strategy="SPREAD")
    workers = [kind.remote() for _ in range(count)]
    until = time.monotonic() + START_SECONDS
    try:
        for number in range(count):
            while not _is_ready(workers[number], until):
                time.sleep(NOTICE_SECONDS)
                workers[number] = kind.remote()
    except exceptions.GetTimeoutError:
        for worker in workers:
            ray.kill(worker)
        raise PoolError(
            f"not all of {count} Ray workers started within {START_SECONDS} s; the cluster has "
            f"{_cpus(ray.available_resources):g} CPUs free: "
            "end other jobs there, or use fewer with --workers"
        ) from None
    return workers


def _is_ready(worker: Any, until: float) -> bool:
    """Waits for a new worker; False where it went at once, such as on a machine of whose end Ray does not know yet."""
    try:
        ray.get(worker.ready.remote(), timeout=max(until - time.monotonic(), 0))
    except _GONE:
        return False
    return True


def _cpus(resources: Any) -> float:
    found: dict[str, float] = resources()
    return found.get("CPU", 0)


def _connect(address: str | None, workers: int | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": address or "local"}
    if address is None:
        settings |= {"num_cpus": workers or available_cores(), "include_dashboard": False}
    try:
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of open files, about which nobody but Ray can do anything
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}); start one with `ray start --head`, "
            "or leave --ray-address out to use this machine"
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs a handler of SIGTERM that ends the process; a run stops after its round."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _to_bytes(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """As an array of bytes, which Ray moves without pickling it."""
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided(
        (whole.numel(),), (1,)
    )  # one element of an expand() counts as contiguous with a stride of 0
    return flat.view(torch.uint8).numpy(), flat.dtype, tuple(tensor.shape)


def _from_bytes(packed: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    data, dtype, shape = packed
    tensor = torch.empty(shape, dtype=dtype)  # a copy: the store's memory is not ours to write to
    if len(data):
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor
