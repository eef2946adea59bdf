"""Ray's side of the pool: joining a cluster, starting worker processes there, and how tensors travel between them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray import exceptions
from torch import Tensor

from kinfed.core import Silence, Tree
from kinfed.errors import ConfigError, PoolError
from kinfed.pools.base import Evaluation
from kinfed.pools.local_pool import available_cores
from kinfed.pools.worker import NO_CUTS, Cuts, Part, StateSnapshot, Worker
from kinfed.updates import Updates

START_SECONDS = 300  # for workers to start: they import torch, perhaps from a slow disk on a busy machine
SIGN_SECONDS = 10.0  # for a worker to say what it does, before it is said to be silent
SIGNS = "signs"  # the group of calls that are answered beside all others
NOTICE_SECONDS = 1  # before a new worker is asked for again, for Ray to notice what it has lost

GONE = (exceptions.RayActorError, exceptions.OutOfMemoryError, exceptions.ObjectLostError, exceptions.NodeDiedError)
"""What a call raises when its process or machine has gone, rather than when the algorithm failed."""


def connect(address: str | None, workers: int | None) -> None:
    """Join the cluster at `address`; without one, start a cluster of this machine, with a CPU for every worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": address or "local"}
    if address is None:
        settings |= {"num_cpus": workers or available_cores(), "include_dashboard": False}
    try:
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of open files, which only Ray can close
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of any kind: what times out while Ray starts is a plain Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if address is None:
            raise PoolError(
                f"Ray could not be started on this machine ({reason}); a machine with too much other work takes longer "
                "than Ray waits: end some of it, or use --pool local"
            ) from error
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({reason}); start one with `ray start --head`, or leave "
            "--ray-address out to use this machine"
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


@dataclass(frozen=True)
class WorkerShare:
    """Part of a cluster that Ray sets aside for one worker."""

    cpus: float = 1.0
    gpus: float = 0.0  # a fraction: several workers share one

    def fitting(self) -> int:
        """Workers for which the cluster has room at the moment; at least one."""
        rooms = [free(kind) / share for kind, share in (("CPU", self.cpus), ("GPU", self.gpus)) if share]
        return max(int(min(rooms)), 1)

    def without_cpus(self) -> WorkerShare:
        return replace(self, cpus=0.0)


def free(kind: str) -> float:
    """CPUs or GPUs ("CPU", "GPU") of the cluster that are free at the moment."""
    cluster: Any = ray  # its functions have no types
    return float(cluster.available_resources().get(kind, 0))


class WorkerProcess(Worker):
    """A worker as an actor of Ray. `sign_of_life` is answered by a thread of its own, whatever else is computed."""

    def __init__(self) -> None:
        # Ctrl-C reaches all processes of a terminal's group; when to stop is the driver's to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        send_tensors_as_bytes()
        super().__init__()
        self._doing, self._since = "", (time.monotonic(), time.process_time())

    def process_id(self) -> int:
        """Answers once the process runs."""
        return os.getpid()

    @ray.method(concurrency_group=SIGNS)
    def sign_of_life(self) -> str:
        """What it does at the moment, in words that follow its name."""
        where, (began, used) = f"(process {os.getpid()} on {socket.gethostname()})", self._since
        seconds, processor = time.monotonic() - began, time.process_time() - used
        if not self._doing:
            return f"{where} is alive and idle: its answer is on the way"
        return f"{where} {self._doing}, for {seconds:.0f} s so far ({processor:.0f} s of computing)"

    def train(
        self, ids: Tensor, down: Tree, round: int, effort: Tensor | None, hold: bool = False, cuts: Cuts = NO_CUTS
    ) -> tuple[Updates, StateSnapshot, *tuple[Part, ...]]:
        with self._at_work(f"trains {len(ids)} clients in round {round}"):
            return super().train(ids, down, round, effort, hold, cuts)

    def evaluate(
        self, ids: Tensor, down: Tree, round: int, split: str, server_model: Tensor | None, keep_models: bool
    ) -> Evaluation:
        with self._at_work(f"evaluates {len(ids)} clients after round {round}"):
            return super().evaluate(ids, down, round, split, server_model, keep_models)

    @contextmanager
    def _at_work(self, doing: str) -> Iterator[None]:
        self._since, self._doing = (time.monotonic(), time.process_time()), doing
        try:
            yield
        finally:
            self._doing = ""


def start_workers(count: int, share: WorkerShare) -> list[Any]:
    """New workers, spread over the cluster, each with its share to itself. Ray must not restart them by itself: one
    without its states would go on as if nothing had happened."""
    remote: Any = ray.remote  # whose types do not know groups
    actor = remote(concurrency_groups={SIGNS: 1})(WorkerProcess)
    actor = actor.options(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, scheduling_strategy="SPREAD")
    workers = [actor.remote() for _ in range(count)]
    deadline = time.monotonic() + START_SECONDS
    try:
        for number in range(count):
            while not _is_running(workers[number], deadline):
                time.sleep(NOTICE_SECONDS)
                workers[number] = actor.remote()
    except exceptions.GetTimeoutError:
        for worker in workers:
            ray.kill(worker)
        raise PoolError(
            f"not all of {count} Ray workers started within {START_SECONDS} s; the cluster has {free('CPU'):g} CPUs "
            f"and {free('GPU'):g} GPUs free: end other jobs there, or use fewer with --workers"
        ) from None
    return workers


def _is_running(worker: Any, deadline: float) -> bool:
    """Waits for a new worker; False where it ended at once, such as on a machine that is lost without Ray's knowing."""
    try:
        ray.get(worker.process_id.remote(), timeout=max(deadline - time.monotonic(), 0))
    except GONE:
        return False
    return True


def fetch(reference: Any, report: Callable[[], None] | None = None) -> Any:
    """The result of a call; of several the first, and the others as references. What an algorithm raised in the worker
    is raised here. While there is no result, `report` is called: after half a minute, then ever more rarely."""
    if report is not None:
        _report_silence(reference[0] if isinstance(reference, list) else reference, report)
    try:
        return (ray.get(reference[0]), *reference[1:]) if isinstance(reference, list) else ray.get(reference)
    except exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _report_silence(reference: Any, report: Callable[[], None]) -> None:
    """Returns when there is a result, or an error in its place."""
    silence = Silence(time.monotonic())
    while not ray.wait([reference], timeout=max(silence.due - time.monotonic(), 0.0), fetch_local=False)[0]:
        if silence.is_due(time.monotonic()):
            report()


def describe_worker(worker: Any) -> str:
    """Words on what a worker does at the moment, to follow its name; it may be silent."""
    try:
        return str(ray.get(worker.sign_of_life.remote(), timeout=SIGN_SECONDS))
    except exceptions.GetTimeoutError:
        return (
            f"has given no sign of life within {SIGN_SECONDS:g} s: its machine is overloaded or cut off. kinfed "
            "keeps waiting, and replaces the worker if Ray finds that it is gone"
        )
    except GONE:
        return "has ended; another takes its place"


def send_tensors_as_bytes() -> None:
    """Send from this process, and receive, tensors as bytes: Ray moves arrays of bytes without pickling them."""
    ray.util.register_serializer(Tensor, serializer=_to_bytes, deserializer=_from_bytes)


def _to_bytes(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    whole = tensor.detach().cpu().contiguous()
    # One element of an expand() counts as contiguous with a stride of 0, of which no bytes can be viewed.
    flat = whole.as_strided((whole.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), flat.dtype, tuple(tensor.shape)


def _from_bytes(packed: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    data, dtype, shape = packed
    tensor = torch.empty(shape, dtype=dtype)  # a copy: memory of Ray's store must not be written to
    if len(data):
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor
