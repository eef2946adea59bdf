"""Lets a library that runs all rounds in one call be measured round by round."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Turnstile:
    """The library's loop runs in a thread of its own and passes here before every round."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, loop: Callable[[], object]) -> None:
        """Begin the loop; returns when it waits for its first round."""

        def run() -> None:
            asyncio.set_event_loop(asyncio.new_event_loop())  # some libraries expect the main thread's
            try:
                loop()
            except BaseException as error:
                self._error = error
            finally:
                self._arrived.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._wait()

    def wait_for_turn(self) -> bool:
        """Called by the loop before each round. False: it should end."""
        self._arrived.release()
        self._allowed.acquire()
        return not self._closed

    def let_pass(self, count: int) -> None:
        """So many rounds."""
        for _ in range(count):
            self._allowed.release()
            self._wait()

    def close(self) -> None:
        self._closed = True
        self._allowed.release()
        if self._thread is not None:
            self._thread.join(60)

    def _wait(self) -> None:
        self._arrived.acquire()
        if self._error is not None:
            raise RuntimeError("the library's loop ended") from self._error
