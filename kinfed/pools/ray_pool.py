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
from kinfed.core.tree import Tree
from kinfed.data.federation import Federation
from kinfed.engine.task import Score, Task
from kinfed.errors import CheckpointError, ConfigError, PoolError
from kinfed.pools.base import Download, Evaluation, Reply, ServerModelOf
from kinfed.pools.local_pool import available_cores
from kinfed.pools.shard import cut, deal, expected_work
from kinfed.pools.worker import Worker, compact
from kinfed.privacy.dpsgd import Record

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
        self._places: list[_Place] = []

    def pool(self, algorithm: Algorithm[Any, Any, Any, Any], task: Task, federation: Federation, seed: int) -> RayPool:
        """A pool of these clients. The pool made before must have been closed: a worker serves one at a time."""
        if task.device.type != "cpu":
            raise ConfigError(f"the ray pool computes on CPUs; got device {task.device}; use --device cpu")
        members = deal(expected_work(algorithm, federation), min(self.size, federation.num_clients))
        missing = range(len(self._places), len(members))
        self._places += [_Place(n, worker) for n, worker in zip(missing, _started(len(missing), 1), strict=True)]
        places = self._places[: len(members)]
        opened = partial(_Opened, uuid.uuid4().hex, algorithm, task, seed, federation)
        for place, ids in zip(places, members, strict=True):
            place.prepare(opened(ids))
        return RayPool(places, members, federation.num_clients)

    def close(self) -> None:
        """Ends the workers; and Ray itself, where it was started or joined here."""
        for place in self._places:
            place.end()
        self._places.clear()
        if self._ours and ray.is_initialized():
            ray.shutdown()


@dataclass(frozen=True)
class _Opened:
    """What a worker must know before its first round of a run."""

    run: str
    algorithm: Algorithm[Any, Any, Any, Any]
    task: Task
    seed: int
    federation: Federation
    ids: Tensor

    def same_data(self, other: _Opened | None) -> bool:
        return other is not None and self.federation is other.federation and torch.equal(self.ids, other.ids)


@dataclass
class _Place:
    """One worker's place: the process that fills it at the moment, and what another one would need to take it over."""

    number: int
    worker: Any
    opened: _Opened | None = None
    kept: list[tuple[Tensor, Any]] = field(default_factory=list)  # (ids, reference to Kept), the oldest first

    def prepare(self, opened: _Opened) -> None:
        before, self.opened, self.kept = self.opened, opened, []
        if self.worker is None:  # none could be had when the last one ended
            before = None
            (self.worker,) = _started(1, num_cpus=0)
        if opened.same_data(before):
            self.ask(_open(opened))
        else:
            self.ask(_hold(opened))
            self.ask(_open(opened))

    def keep(self, ids: Tensor, reference: Any) -> None:
        """States of these clients, newer than all before. What is older than others of all its clients is let go."""
        self.kept = [(old, held) for old, held in self.kept if not bool(torch.isin(old, ids).all())]
        self.kept.append((ids, reference))

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
        assert self.opened is not None
        self.end()
        (self.worker,) = _started(1, num_cpus=0)  # a machine may be gone with its cores; the others' must do
        try:
            _get(_hold(self.opened)(self.worker))
            _get(_open(self.opened)(self.worker))
            _get(self.worker.restore.remote(*(held for _, held in self.kept)))
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
        clients = 0 if self.opened is None else len(self.opened.ids)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return f"Ray worker {self.number} with {clients} clients {what} ({reason.split('. ')[0][:200]})"


class RayPool:
    """Clients at the places of a cluster. Kept in step with kinfed.pools.base.Pool."""

    def __init__(self, places: list[_Place], members: list[Tensor], num_clients: int) -> None:
        self._places = places
        self._home = torch.zeros(num_clients, dtype=torch.int64)
        for number, ids in enumerate(members):
            self._home[ids] = number

    def train(self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None) -> Reply:
        send = _Sender(download)
        calls: list[tuple[_Place, Tensor, Callable[[Any], Any], Any]] = []
        for place, mine in self._shares(ids):
            own = None if effort is None else effort[mine]
            call = partial(_train, ids[mine], send(ids[mine]), round, own)
            calls.append((place, mine, call, call(place.worker)))
        total = _Gathered(len(ids))
        for place, mine, again, references in calls:
            reply: Reply
            reply, states = place.result(references, again)
            place.keep(reply.ids, states)
            total.add(mine[torch.isin(ids[mine], reply.ids)], reply)
        return total.reply(ids)

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
        send, send_shared = _Sender(download), _Sender(server_model or (lambda who: None))
        calls: list[tuple[_Place, Tensor, Callable[[Any], Any], Any]] = []
        for place, mine in self._shares(ids):
            mine = mine[torch.argsort(ids[mine])]
            who = ids[mine]
            call = partial(_evaluate, who, send(who), round, split, send_shared(who), keep_models)
            calls.append((place, mine, call, call(place.worker)))
        found = [(mine, place.result(reference, call)) for place, mine, call, reference in calls]
        return _joined(ids, torch.cat([mine for mine, _ in found]), [evaluation for _, evaluation in found])

    def states(self) -> dict[str, Tensor]:
        calls = [(place, _states(place.worker)) for place in self._places]
        parts = [place.result(reference, _states) for place, reference in calls]
        order = torch.argsort(torch.cat([part["ids"] for part in parts]))
        parts = [part for part in parts if len(part["ids"])] or parts[:1]  # those without clients know no fields
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        ids = tensors.get("ids")
        if ids is None:
            raise CheckpointError("client states without the ids of their clients")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._home):
            raise CheckpointError(f"client states of ids up to {int(ids.max())}; there are {len(self._home)} clients")
        for number, place in enumerate(self._places):
            mine = (self._home[ids] == number).nonzero().squeeze(1)
            part = {name: tensor.index_select(0, mine) for name, tensor in tensors.items()}
            place.kept = []
            _, states = place.ask(partial(_load, ray.put(part)))
            place.keep(part["ids"], states)

    def close(self) -> None:
        """The workers stay for the next pool; what they would need to go on with this one is let go."""
        for place in self._places:
            place.kept = []

    def _shares(self, ids: Tensor) -> Iterator[tuple[_Place, Tensor]]:
        """Every place with the positions in `ids` of its clients."""
        home = self._home[ids]
        for number, place in enumerate(self._places):
            mine = (home == number).nonzero().squeeze(1)
            if len(mine):
                yield place, mine


class _Sender:
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
        common = all(tensor.stride(0) == 0 or len(tensor) == 1 for tensor in tensors)
        if common and self._common is not None and self._common[0] == addresses:
            return self._common[2]
        small = rows[:1] if isinstance(rows, Tensor) and common else compact(rows) if isinstance(rows, Tree) else rows
        reference = ray.put(small)
        if common:
            self._common = addresses, rows, reference  # `rows` lives on, so that nothing else gets its addresses
        return reference


class _Gathered:
    """Replies of the workers to one round, in the order of the clients."""

    def __init__(self, clients: int) -> None:
        self._replied = torch.zeros(clients, dtype=torch.bool)
        self._rows: Tree | None = None
        self._total = Reply(torch.zeros(0, dtype=torch.int64), None, 0)

    def add(self, positions: Tensor, reply: Reply) -> None:
        self._total.nbytes += reply.nbytes
        self._total.rejected += reply.rejected
        self._total.reasons |= reply.reasons
        self._total.record = _together(self._total.record, reply.record)
        if reply.up is None:
            return
        self._replied[positions] = True
        if self._rows is None:
            self._rows = reply.up.map(lambda tensor: tensor.new_empty(len(self._replied), *tensor.shape[1:]))
        self._rows.put(positions, reply.up)

    def reply(self, ids: Tensor) -> Reply:
        total, good = self._total, self._replied.nonzero().squeeze(1)
        total.rejected.sort()
        total.ids = ids[good]
        if self._rows is not None:
            total.up = self._rows if len(good) == len(ids) else self._rows.take(good)
        return total


def _joined(ids: Tensor, positions: Tensor, parts: list[Evaluation]) -> Evaluation:
    """One evaluation from those of the workers, whose clients are ids[positions]."""
    back = torch.argsort(positions)

    def rows(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)[back]

    def scores(some: list[Score | None]) -> Score | None:
        known = [score for score in some if score is not None]
        if not known:
            return None
        return Score(*(rows([getattr(score, name) for score in known]) for name in ("correct", "loss", "count")))

    models = [part.models for part in parts if part.models is not None]
    alternatives = {name: scores([part.alternatives[name] for part in parts]) for name in parts[0].alternatives}
    record = None
    for part in parts:
        record = _together(record, part.record)
    return Evaluation(
        ids,
        scores([part.personal for part in parts]),
        scores([part.server_model for part in parts]),
        {name: rows([part.figures[name] for part in parts]) for name in parts[0].figures},
        rows(models) if models else None,
        {name: score for name, score in alternatives.items() if score is not None},
        record,
    )


def _together(one: Record | None, other: Record | None) -> Record | None:
    if one is None or other is None:
        return one or other
    one.join(other)
    return one


# ---- calls to a worker, as functions of it, so that another one can be asked the same ----


def _hold(opened: _Opened) -> Callable[[Any], Any]:
    return lambda worker: worker.hold.remote(cut(opened.federation, opened.ids))


def _open(opened: _Opened) -> Callable[[Any], Any]:
    return lambda worker: worker.open.remote(opened.run, opened.algorithm, opened.task, opened.seed)


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
