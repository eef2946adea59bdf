"""The local pool: all clients in this process, in chunks that fit the cache, which worker threads take in turn.

A chunk's size depends on the model and the cohort, never on the number of workers, and every chunk runs on one
torch thread, so any number of workers gives the same bits.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, deployed_models, deploys_state
from kinfed.core import Tree, forget_free_blocks, rng, threads
from kinfed.data import Cohort, Federation, LoopMemory, Moments, Ragged, Split, augmentation, with_memory
from kinfed.engine import Score, Task, task_for
from kinfed.errors import CheckpointError
from kinfed.pools.base import Download, Evaluation, ServerModelOf
from kinfed.pools.collect import ChunkUpdate, OrderedUpdates, join_evaluations
from kinfed.pools.known_scores import KnownScores
from kinfed.pools.memory import device_memory
from kinfed.pools.store import ClientStore, MomentStore
from kinfed.updates import Road, SentUpdates, Stage, Updates

Job = TypeVar("Job")
Result = TypeVar("Result")

CHUNK_BYTES = 8 << 20  # parameters of one chunk: two of 8 MB took 0.8 of the time of four of 4 MB on two cores
DEVICE_COPIES = 16  # bytes of an accelerator's memory for every byte of parameters that it trains at a time
MIN_CHUNKS = 2  # so that a small cohort still spreads over threads; more of them only fight over the interpreter
STEP_FLOPS = 10_000_000  # a chunk whose step is less work than this is not cut: the Python that starts it costs more
SHARED_STEP_FLOPS = 50_000_000  # the same of tasks whose calls share out the rows of a chunk themselves
_MOMENTS = "moments."  # of local optimizers: before their names among the states
_BESIDE = {_MOMENTS: "moments of local optimizers", "compression.": "what compressed updates have left out"}


class LocalPool:
    """`workers`: threads, by default one per core; `chunk`: clients that train together, by default what suits the
    model; `state_folder`: keep client states in memory-mapped files there, once they are more than `state_bytes`;
    `evaluated` [n]: the only clients that will be evaluated, where not all are. Of methods whose clients keep a state
    only to deploy it, the states of the others are dropped. `stages`: what happens to updates on their way."""

    def __init__(
        self, algorithm: AnyAlgorithm, task: Task, federation: Federation, seed: int, *, workers: int | None = None,
        chunk: int | None = None, state_folder: Path | None = None, state_bytes: int = 0,
        evaluated: Tensor | None = None, stages: Iterable[Stage] = (),
    ) -> None:  # fmt: skip
        if algorithm.training.augment is not None:
            augmentation(algorithm.training.augment, federation.features.shape)  # refused now, not in the first batch
        self.algorithm, self.task, self.seed, self._chunk = algorithm, task, seed, chunk
        self.federation = federation if task.device.type == "cpu" else _on_device(federation, task.device)
        self.workers = workers or available_cores()
        self._threads = threads.OneCoreThreads(self.workers)
        self._device_bytes: int | None = None
        self._known_scores = KnownScores(federation.num_clients)

        def fresh(ids: Tensor) -> Tree:
            state: Tree = algorithm.init_client(task, self._cohort(ids, 0))
            return state

        clients = federation.num_clients
        self.clients: ClientStore[Tree] = ClientStore(clients, fresh, state_folder, state_bytes)
        self._stages = Road(stages).at_clients()
        # What clients keep beside the algorithm's state, by the prefix of its names among the states.
        prefixes = [_MOMENTS] if algorithm.training.optimizer_state == "kept" else []
        prefixes += [f"{stage.name}." for stage in self._stages if stage.remembers and algorithm.sends]
        self._beside = {prefix: MomentStore(clients, state_folder, state_bytes) for prefix in prefixes}
        self._held: list[tuple[Tensor, Tree, dict[str, Moments]]] = []  # of a round that the server has not taken yet
        self._blank: Tree | None = None  # the state of one client that has none yet, once it was asked for
        self._keeps: Tensor | None = None  # bool [K] whose states are kept; None: all
        self.reads_states = not deploys_state(algorithm)  # in training; a contract check has all methods read them
        if evaluated is not None and not self._beside and not self.reads_states:
            self._keeps = torch.zeros(clients, dtype=torch.bool)
            self._keeps[evaluated] = True

    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Updates:  # fmt: skip
        pieces = self._pieces(self.federation.train, ids)
        self._held = []
        updates = OrderedUpdates(ids, (lambda *results: self._held.append(results)) if hold else self._put)

        def train_chunk(number: int) -> None:
            piece = pieces[number]
            who = ids[piece]
            cohort = self._cohort(who, round, None if effort is None else effort[piece])
            with _error_context("client_update", who, round):
                state = self._training_state(who).to(self.task.device)
                down = download(who).to(self.task.device)
                memory = self._memory(who)
                client, up = self.algorithm.client_update(self.task, state, down, with_memory(cohort, memory))
                beside = {} if memory is None else {_MOMENTS: memory.moments}
                nbytes = up.nbytes
                for stage in self._stages:
                    up, beside[f"{stage.name}."], nbytes = self._sent(stage, up, who, round)
                if self._stages:
                    client = self.algorithm.heard(self.task, state, client, down, up)
                beside = {prefix: rows for prefix, rows in beside.items() if prefix in self._beside}
                up = up.apart_from(state, down)  # it may show the state before this round, which then changes
            updates.add(number, ChunkUpdate(piece, client, beside, up, nbytes))

        for _ in self._map(train_chunk, range(len(pieces))):
            pass
        return updates.updates()

    def commit(self, ids: Tensor) -> None:
        for who, client, beside in self._held:
            taken = torch.isin(who, ids).nonzero().squeeze(1)
            if len(taken) == len(who):
                self._put(who, client, beside)
            elif len(taken):
                rows = {prefix: moments.take(taken) for prefix, moments in beside.items()}
                self._put(who[taken], client.take(taken), rows)
        self._held = []

    def _put(self, ids: Tensor, client: Tree, beside: Mapping[str, Moments]) -> None:
        """Take over new states of these clients, and what else they keep."""
        if self._keeps is None:
            self.clients.put(ids, client)
        elif bool((stays := self._keeps[ids]).any()):
            self.clients.put(ids[stays], client.take(stays.nonzero().squeeze(1)))
        for prefix, rows in beside.items():
            self._beside[prefix].put(ids, rows)

    def _training_state(self, ids: Tensor) -> Tree:
        """States that these clients start a round from. Where states are only deployed, that of any client without one
        serves for all of them and for all rounds, and no rows are copied."""
        if self.reads_states:
            return self.clients.take(ids, borrow=True)
        if self._blank is None:
            self._blank = self.clients.fresh(ids[:1])
        return self._blank.map(lambda tensor: tensor.expand(len(ids), *tensor.shape[1:]))

    def evaluate(
        self, ids: Tensor, download: Download, round: int, *, split: str = "test",
        server_model: ServerModelOf | None = None, keep_models: bool = False,
    ) -> Evaluation:  # fmt: skip
        pieces = self._pieces(self.federation.split(split), ids)

        def evaluate_chunk(piece: Tensor) -> Evaluation:
            who = ids[piece]
            cohort = self._cohort(who, round)
            with _error_context("personalize", who, round):
                state = self.clients.take(who, borrow=True).to(self.task.device)
                down = download(who).to(self.task.device)
                shared = None if server_model is None else server_model(who)
                shared = None if shared is None else shared.to(self.task.device)
                has_it = self.task.server_task is self.task  # else it is of another architecture
                models = deployed_models(
                    self.algorithm, self.task, state, down, cohort, trained=self.clients.has(who),
                    server_model=shared if has_it else None,
                )  # fmt: skip
            part: Split = getattr(cohort, split)
            of_server = None if shared is None else task_for(self.task.server_task, shared).evaluate(shared, part)
            like = shared if has_it else None
            scores = {name: self._score(name, split, theta, part, like, of_server) for name, theta in models.items()}
            deployed, *others = models
            return Evaluation(
                who, scores[deployed], of_server, self.algorithm.client_figures(state),
                models[deployed].clone() if keep_models else None, {name: scores[name] for name in others},
            )  # fmt: skip

        parts = list(self._map(evaluate_chunk, pieces))
        return join_evaluations(ids, pieces, parts)

    def _score(
        self, name: str, split: str, theta: Tensor, examples: Split, shared: Tensor | None, of_server: Score | None
    ) -> Score:
        """Score of personal models. A client that deploys the server's model, as those never called do, has its score;
        one with the same model as at the last evaluation has the score of then."""
        task = task_for(self.task, theta)
        if shared is None or of_server is None or task is not self.task or shared.shape != theta.shape:
            return self._known_scores.score(task, name, split, theta, examples)
        same = (theta == shared).all(1).cpu()
        if not bool(same.any()):
            return self._known_scores.score(task, name, split, theta, examples)
        own, equal = (~same).nonzero().squeeze(1), same.nonzero().squeeze(1)
        if not len(own):
            return of_server
        score = self._known_scores.score(task, name, split, theta[own], examples.take(own))
        return Score.joined([score, of_server.take(equal)], torch.argsort(torch.cat([own, equal])))

    def states(self) -> dict[str, Tensor]:
        states = self.clients.named()
        for prefix, store in self._beside.items():
            rows = store.named()
            assert torch.equal(rows.pop("ids"), states["ids"])  # both are put together
            states |= {prefix + name: tensor for name, tensor in rows.items()}
        return states

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        stored = {f"{name.split('.')[0]}." for name in tensors if name != "ids" and not name.startswith("rows.")}
        for prefix in sorted(stored ^ self._beside.keys()) if len(tensors.get("ids", ())) else ():
            present, wanted = ("with", "does not keep") if prefix in stored else ("without", "keeps")
            what = _BESIDE.get(prefix, f"what the stage {prefix[:-1]} keeps")
            raise CheckpointError(f"client states {present} {what}, which this run {wanted}")
        self.clients.load({name: t for name, t in tensors.items() if name == "ids" or name.startswith("rows.")})
        for prefix, store in self._beside.items():
            rows = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            store.load(rows | {"ids": tensors["ids"]})

    def snapshot(self, ids: Tensor) -> tuple[Tree, dict[str, Moments]]:
        """States of these clients, and what else they keep: a copy, or of a round that is held its results."""
        if held := self._held:
            who = torch.cat([part[0] for part in held])
            back = torch.searchsorted(who.sort().values, ids)
            order = torch.argsort(who)[back]
            clients = type(held[0][1]).stack([part[1] for part in held]).take(order)
            beside = {prefix: Moments.stack([part[2][prefix] for part in held]) for prefix in self._beside}
            return clients, {prefix: moments.take(order) for prefix, moments in beside.items()}
        return self.clients.take(ids), {prefix: store.take(ids) for prefix, store in self._beside.items()}

    def restore(self, ids: Tensor, rows: Tree, beside: Mapping[str, Moments]) -> None:
        self._held = []
        self._put(ids, rows, {prefix: moments for prefix, moments in beside.items() if prefix in self._beside})

    def _sent(self, stage: Stage, up: Tree, ids: Tensor, round: int) -> SentUpdates:
        store = self._beside.get(f"{stage.name}.")
        key = rng.fold(rng.root(self.seed, stage.name), round, ids)
        return stage.at_client(up, Moments() if store is None else store.take(ids), key)

    def close(self) -> None:
        self._threads.close()
        forget_free_blocks()

    def _memory(self, ids: Tensor) -> LoopMemory | None:
        """Memory of the optimizers of these clients, to be changed by a round."""
        store = self._beside.get(_MOMENTS)
        return None if store is None else LoopMemory(len(ids), store.take(ids, borrow=True).to(self.task.device))

    def _cohort(self, ids: Tensor, round: int, effort: Tensor | None = None) -> Cohort:
        return self.federation.cohort(ids, self.seed, round, effort)

    def _pieces(self, examples: Ragged, ids: Tensor) -> list[Tensor]:
        """Positions of clients that train or are scored together: those with the most examples first, because like
        lengths side by side leave no rows idle, or in the order of `ids` for a task that takes every row by itself."""
        order = torch.arange(len(ids))
        if not self.task.shares_rows:
            order = torch.argsort(examples.counts(ids), descending=True, stable=True)
        return list(torch.split(order, self._chunk_size(len(ids)))) if len(ids) else []

    def _chunk_size(self, n: int) -> int:
        if self._chunk is not None:
            return self._chunk
        if self.task.one_row_at_a_time and self.task.device.type == "cpu":
            return 1  # an accelerator is given the numbers of examples of many clients in one copy
        fits = max(1, self._chunk_bytes() // (4 * self.task.num_params))
        least = SHARED_STEP_FLOPS if self.task.shares_rows else STEP_FLOPS
        worthwhile = least // (6 * self.task.num_params * self.algorithm.training.batch) + 1
        size = min(fits, max(worthwhile, -(-n // MIN_CHUNKS)))
        return -(-n // -(-n // size))  # as many chunks, of equal sizes: no worker waits for a large one

    def _chunk_bytes(self) -> int:
        """Bytes of the parameters of a chunk: on the processor what its cache holds, on an accelerator a share of the
        memory that it had free when it was first asked. Of each parameter there are copies: the model received and its
        change, gradients, moments, the client's state; activations take as much again."""
        if self._device_bytes is None:
            free = None if self.task.device.type == "cpu" else device_memory(self.task.device)
            self._device_bytes = max((free or 0) // DEVICE_COPIES // self.workers, CHUNK_BYTES)
        return self._device_bytes

    def _map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        jobs = list(jobs)
        # The caller's thread does as well as a single other one. Handing a job over takes longer than many a round of a
        # few small models, and the C library gives large blocks of other threads back to the system sooner.
        if len(jobs) == 1 or self.workers == 1:
            with threads.one_thread(), threads.idle_threads(self._threads):
                return iter([function(job) for job in jobs])
        return self._threads.map(function, jobs)


def _on_device(federation: Federation, device: torch.device) -> Federation:
    """The federation with its examples on the device, where they take less than half of its free memory."""
    free = device_memory(device)
    return federation.on(device, resident=free is None or federation.features.raw.nbytes < free // 2)


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _error_context(stage: str, ids: Tensor, round: int) -> Iterator[None]:
    """An error inside says at which stage, for which clients and in which round it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {stage} of client(s) {ids.tolist()} in round {round}")
        raise
