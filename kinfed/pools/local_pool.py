"""The local pool: all clients in this process, in chunks that fit the cache, which worker threads take in turn.

A chunk's size depends on the model and the cohort, never on the number of workers, and every chunk runs on one
torch thread, so any number of workers gives the same bits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kinfed.algorithms.base import AnyAlgorithm, deployed_models, deploys_state
from kinfed.core.loop_memory import LoopMemory, Moments
from kinfed.core.tree import Tree
from kinfed.data.augment import augmentation
from kinfed.data.batches import Split
from kinfed.data.federation import Cohort, Federation, with_memory
from kinfed.engine.personal import task_for
from kinfed.engine.task import Task
from kinfed.errors import CheckpointError, PoolError
from kinfed.pools.base import Download, Evaluation, Reply, ServerModelOf
from kinfed.pools.collect import ReplyCollector, join_evaluations
from kinfed.pools.store import ClientStore, MomentStore

Job = TypeVar("Job")
Result = TypeVar("Result")

CHUNK_BYTES = 8 << 20  # parameters of one chunk: two of 8 MB took 0.8 of the time of four of 4 MB on two cores
MIN_CHUNKS = 2  # so that a small cohort still spreads over threads; more of them only fight over the interpreter
STEP_FLOPS = 10_000_000  # a chunk whose step is less work than this is not cut: the Python that starts it costs more
_MOMENTS = "moments."  # before the names of what optimizers keep, among the states
THREAD_START_SECONDS = 60.0  # for worker threads to start; they need milliseconds


class LocalPool:
    """`workers`: threads, by default one per core; `chunk`: clients that train together, by default what suits the
    model; `state_folder`: keep client states in memory-mapped files there, once they are more than `state_bytes`;
    `evaluated` [n]: the only clients that will be evaluated, where not all are. Of methods whose clients keep a state
    only to deploy it, the states of the others are let go."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        federation: Federation,
        seed: int,
        *,
        workers: int | None = None,
        chunk: int | None = None,
        state_folder: Path | None = None,
        state_bytes: int = 0,
        evaluated: Tensor | None = None,
    ) -> None:
        if algorithm.training.augment is not None:
            augmentation(algorithm.training.augment, federation.features.shape)  # refused now, not in the first batch
        self.algorithm = algorithm
        self.task = task
        self.federation = federation if task.device.type == "cpu" else federation.on(task.device)
        self.seed = seed
        self.workers = workers or available_cores()
        self._chunk = chunk
        self._threads: ThreadPoolExecutor | None = None

        def fresh(ids: Tensor) -> Tree:
            state: Tree = algorithm.init_client(task, self._cohort(ids, 0))
            return state

        clients = federation.num_clients
        self.clients: ClientStore[Tree] = ClientStore(clients, fresh, state_folder, state_bytes)
        self.moments: MomentStore | None = None  # of local optimizers, where clients keep them
        if algorithm.training.optimizer_state == "kept":
            self.moments = MomentStore(clients, state_folder, state_bytes)
        self._keeps: Tensor | None = None  # bool [K] whose states are kept; None: all
        if evaluated is not None and self.moments is None and deploys_state(algorithm):
            self._keeps = torch.zeros(clients, dtype=torch.bool)
            self._keeps[evaluated] = True

    def train(self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None) -> Reply:
        """One round at the clients `ids` (ascending). Their new states are kept; non-finite ones are not."""
        counts = self.federation.train.counts(ids)
        order = torch.argsort(counts, descending=True, stable=True)  # like lengths together: no idle rows
        pieces = [order[a:b] for a, b in self._chunks(len(ids))]

        updates = _OrderedUpdates(ids, self.clients, self.moments, self._keeps)

        def train_chunk(number: int) -> None:
            piece = pieces[number]
            who = ids[piece]
            cohort = self._cohort(who, round, None if effort is None else effort[piece])
            with _error_context("client_update", who, round):
                state = self.clients.take(who, borrow=True).to(self.task.device)
                down = download(who).to(self.task.device)
                memory = self._memory(who)
                client, up = self.algorithm.client_update(self.task, state, down, with_memory(cohort, memory))
                moments = None if memory is None else memory.moments
            updates.add(number, _ChunkUpdate(piece, client, moments, up))

        for _ in self._map(train_chunk, range(len(pieces))):
            pass
        return updates.reply()

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
        """Personal models (and the server's, through `server_model(ids) -> [n, P]`) on one split. Changes nothing."""
        counts = self.federation.split(split).counts(ids)
        order = torch.argsort(counts, descending=True, stable=True)
        pieces = [order[a:b] for a, b in self._chunks(len(ids))]

        def evaluate_chunk(piece: Tensor) -> Evaluation:
            who = ids[piece]
            cohort = self._cohort(who, round)
            with _error_context("personalize", who, round):
                state = self.clients.take(who, borrow=True).to(self.task.device)
                down = download(who).to(self.task.device)
                shared = None if server_model is None else server_model(who)
                models = deployed_models(
                    self.algorithm, self.task, state, down, cohort, trained=self.clients.has(who), server_model=shared
                )
            examples: Split = getattr(cohort, split)
            scores = {name: task_for(self.task, theta).evaluate(theta, examples) for name, theta in models.items()}
            deployed, *others = models
            return Evaluation(
                who,
                scores[deployed],
                None if shared is None else self.task.evaluate(shared, examples),
                self.algorithm.client_figures(state),
                models[deployed].clone() if keep_models else None,
                {name: scores[name] for name in others},
            )

        parts = list(self._map(evaluate_chunk, pieces))
        return join_evaluations(ids, pieces, parts)

    def states(self) -> dict[str, Tensor]:
        states = self.clients.named()
        if self.moments is not None:
            kept = self.moments.named()
            assert torch.equal(kept.pop("ids"), states["ids"])  # both are put together
            states |= {_MOMENTS + name: tensor for name, tensor in kept.items()}
        return states

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        moments = {name.removeprefix(_MOMENTS): t for name, t in tensors.items() if name.startswith(_MOMENTS)}
        if bool(moments) != (self.moments is not None) and len(tensors.get("ids", ())):
            stored, wanted = ("with", "does not keep") if moments else ("without", "keeps")
            raise CheckpointError(f"client states {stored} moments of local optimizers, which this run {wanted}")
        self.clients.load({name: tensor for name, tensor in tensors.items() if not name.startswith(_MOMENTS)})
        if self.moments is not None:
            self.moments.load(moments | {"ids": tensors["ids"]})

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _memory(self, ids: Tensor) -> LoopMemory | None:
        """What the optimizers of these clients remember, to be changed by a round."""
        if self.moments is None:
            return None
        return LoopMemory(len(ids), self.moments.take(ids, borrow=True).to(self.task.device))

    def _cohort(self, ids: Tensor, round: int, effort: Tensor | None = None) -> Cohort:
        return self.federation.cohort(ids, self.seed, round, effort)

    def _chunks(self, n: int) -> Iterator[tuple[int, int]]:
        size = self._chunk
        if size is None:
            if self.task.one_row_at_a_time:
                size = 1
            else:
                fits = max(1, CHUNK_BYTES // (4 * self.task.num_params))
                worthwhile = STEP_FLOPS // (6 * self.task.num_params * self.algorithm.training.batch) + 1
                size = min(fits, max(worthwhile, -(-n // MIN_CHUNKS)))
                if n:
                    size = -(-n // -(-n // size))  # as many chunks, of equal sizes: no worker waits for a large one
        for begin in range(0, n, size):
            yield begin, min(begin + size, n)

    def _map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        if self._threads is None:
            self._threads = _one_core_threads(self.workers)
        return self._threads.map(function, list(jobs))


@dataclass
class _ChunkUpdate:
    """What came out of one chunk of a round, one row per client."""

    piece: Tensor  # positions of its clients in the cohort
    client: Tree  # new states
    moments: Moments | None  # of local optimizers, where they are kept
    up: Tree

    def finite(self) -> Tensor:
        """[n] whose update and new state can be used."""
        trees = [self.up, self.client] if self.moments is None else [self.up, self.client, self.moments]
        return torch.stack([tree.finite_rows(len(self.piece)) for tree in trees]).all(0)

    def take(self, index: Tensor) -> _ChunkUpdate:
        moments = None if self.moments is None else self.moments.take(index)
        return _ChunkUpdate(self.piece[index], self.client.take(index), moments, self.up.take(index))


class _OrderedUpdates:
    """Updates and new client states of the chunks of a round, added by the worker threads themselves.

    Chunks enter in their own order, whichever is done first, so that the store does not depend on the number of
    workers. The calling thread leaves all copying to the workers: torch would spread it over more threads, and those
    would then take the cores from the workers while they wait for the next piece."""

    def __init__(
        self, ids: Tensor, clients: ClientStore[Tree], moments: MomentStore | None, keeps: Tensor | None
    ) -> None:
        self._ids = ids
        self._clients = clients
        self._keeps = keeps
        self._moments = moments
        self._collector = ReplyCollector(ids)
        self._lock = threading.Lock()
        self._early: dict[int, tuple[_ChunkUpdate, Tensor]] = {}
        self._next = 0

    def add(self, number: int, update: _ChunkUpdate) -> None:
        """Of chunk `number`. Clients whose update or state is not finite are rejected."""
        good = update.finite()
        with self._lock:
            self._early[number] = (update, good)
            while self._next in self._early:
                self._enter(*self._early.pop(self._next))
                self._next += 1

    def _enter(self, update: _ChunkUpdate, good: Tensor) -> None:
        nbytes, rejected = update.up.nbytes, self._ids[update.piece[~good]].tolist()
        if rejected:
            update = update.take(good.nonzero().squeeze(1))
        # First the update: it may show the state before this round, which then changes.
        self._collector.add(update.piece, update.up, nbytes, rejected=rejected)
        if len(update.piece):
            who = self._ids[update.piece]
            if self._keeps is None:
                self._clients.put(who, update.client)
            elif bool((kept := self._keeps[who]).any()):
                self._clients.put(who[kept], update.client.take(kept.nonzero().squeeze(1)))
            if self._moments is not None and update.moments is not None:
                self._moments.put(who, update.moments)

    def reply(self) -> Reply:
        return self._collector.reply()


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_core_threads(count: int) -> ThreadPoolExecutor:
    """Threads in each of which torch uses one core; everywhere else its setting stays as it was.

    torch keeps the number per thread, but a thread new to torch takes over the number set last anywhere in the
    process. So all workers start here, and the caller's number is set once more after them."""
    before = torch.get_num_threads()
    all_set = threading.Barrier(count + 1, timeout=THREAD_START_SECONDS)

    def start() -> None:
        try:
            torch.get_num_threads()  # now, or the thread would take over the caller's number at its first use of torch
            torch.set_num_threads(1)
            all_set.wait()
        except RuntimeError:
            all_set.abort()  # nobody needs to wait for this thread

    threads = ThreadPoolExecutor(count, "kinfed", initializer=start)
    try:
        for _ in range(count):
            threads.submit(int)  # a job finds nobody idle, so each starts one more thread
        all_set.wait()
    except RuntimeError as error:  # the system's limit on threads, or a barrier that was not reached in time
        all_set.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise PoolError(f"not all of {count} worker threads started; use fewer with --workers") from error
    finally:
        torch.set_num_threads(before)
    return threads


@contextmanager
def _error_context(stage: str, ids: Tensor, round: int) -> Iterator[None]:
    """An error inside says at which stage, for which clients and in which round it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {stage} of client(s) {ids.tolist()} in round {round}")
        raise
