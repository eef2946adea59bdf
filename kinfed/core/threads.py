"""Number of threads that torch computes with, and threads that share out the rows of one call."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch

from kinfed.errors import PoolError

Job = TypeVar("Job")
Result = TypeVar("Result")

START_SECONDS = 60.0  # for threads to start; they need milliseconds
SLICES = 2  # for each thread: a row with much work makes its slice a large one, and another thread takes the rest
WORTH_A_THREAD = 25_000_000  # operations: below, waking the thread takes as long as the work (0.3 ms)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch inside, as many as before afterwards; other threads of the process keep their number.

    A sum cut among threads adds up in another order, so its last bits depend on their number; what is decided by it
    (who joins which cluster, how many steps a client takes) may then be decided otherwise on another machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OneCoreThreads:
    """`count` threads in each of which torch uses one core; they start at the first use, and end with `close`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        if self._executor is None:
            self._executor = _start(self.count)
        return self._executor.map(function, jobs)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _start(count: int) -> ThreadPoolExecutor:
    """torch keeps its number of threads per thread, but a thread new to torch takes over the number set last anywhere
    in the process. So all threads start here, and the caller's number is set once more after them."""
    before = torch.get_num_threads()
    all_set = threading.Barrier(count + 1, timeout=START_SECONDS)

    def start() -> None:
        try:
            torch.get_num_threads()  # now, or the thread would take over the caller's number at its first use of torch
            torch.set_num_threads(1)
            all_set.wait()
        except RuntimeError:
            all_set.abort()  # this thread need not be waited for

    executor = ThreadPoolExecutor(count, "kinfed", initializer=start)
    try:
        for _ in range(count):
            executor.submit(int)  # a job finds no idle thread, so each starts one more
        all_set.wait()
    except RuntimeError as error:  # the system's limit on threads, or a barrier that was not reached in time
        all_set.abort()
        executor.shutdown(wait=False, cancel_futures=True)
        raise PoolError(f"not all of {count} worker threads started; use fewer with --workers") from error
    finally:
        torch.set_num_threads(before)
    return executor


_idle: ContextVar[OneCoreThreads | None] = ContextVar("idle threads", default=None)


@contextmanager
def idle_threads(threads: OneCoreThreads) -> Iterator[None]:
    """Inside, `share_rows` of this thread may use them: they have nothing else to do."""
    token = _idle.set(threads)
    try:
        yield
    finally:
        _idle.reset(token)


def share_rows(function: Callable[[slice], None], work: np.ndarray[Any, np.dtype[Any]]) -> None:
    """function(rows) for slices of consecutive rows, together all of them, in the idle threads, which take them in
    turn; `work` [n] are the operations of each row, so that every slice has about as many. For functions without the
    interpreter's lock, whose rows do not depend on each other: they give the same numbers in one slice as in several.
    """
    threads, total = _idle.get(), work.cumsum()
    busy = 0 if threads is None or not len(work) else min(threads.count, int(total[-1] // WORTH_A_THREAD))
    if threads is None or busy < 2:
        function(slice(0, len(work)))
        return
    parts = SLICES * busy
    cuts = 1 + np.searchsorted(total, total[-1] * np.arange(1, parts) / parts)
    ends = np.unique([0, *cuts, len(work)])
    list(threads.map(function, map(slice, ends[:-1].tolist(), ends[1:].tolist())))  # waits for all
