"""One process per node, and one at the server, that has imported everything and does each task in a fork of itself.

Flower starts the program `flwr-clientapp` for every message to a node and `flwr-serverapp` for every run, and a new
Python takes a second or two to import PyTorch: much longer on a busy machine, where Flower gives up a program that has
not reported within 30 s and starts it anew. Here a small program of the same name comes first in the PATH of Flower's
supernode or superlink. It hands its arguments to the warm worker, which forks, and the fork does the task
(`kinfed.deploy.programs.task_programs`). A task has a process of its own as before: nothing that one leaves behind is
there for the next. Where the worker cannot be reached, the small program says so and does the task in a new Python.
"""

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from kinfed.deploy.programs import task_programs

_LONGEST_REQUEST = 1 << 20  # bytes

_HANDOVER = """\
import json, os, socket, sys
try:
    with socket.socket(socket.AF_UNIX) as worker:
        worker.settimeout(30)
        worker.connect({address!r})
        worker.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
        if worker.recv(2) != b"ok":
            raise OSError("it did not take the message")
except OSError as error:
    print(f"kinfed: the warm worker cannot be reached ({{error}}); a new Python is started", file=sys.stderr)
    os.execv({python!r}, [{python!r}, "-m", {module!r}, {name!r}, *sys.argv[1:]])
"""


def reason_against() -> str:
    """Why this machine cannot have a warm worker; "" if it can."""
    return "" if hasattr(os, "fork") and hasattr(socket, "AF_UNIX") else "this system has no fork"


def load_task(program: str) -> Callable[[], Any]:
    """The task of a program, with all that it needs imported. Torch computes nothing here: threads do not survive a
    fork."""
    import kinfed.deploy.programs.flower  # noqa: F401

    (entry,) = metadata.entry_points(group="console_scripts", name=program)
    entry.load()
    gc.collect()
    gc.freeze()  # what is imported stays shared between the forks
    return task_programs.TASKS[program]


class WarmWorker:
    """The folder `programs` comes first in the PATH of what starts the program. `serve` does its tasks; it is called in
    the main thread of a process without other threads, for forks of it must be sound."""

    def __init__(self, program: str, say: Callable[[str], None], cold: bool = False) -> None:
        """`program`: the name of Flower's, such as flwr-clientapp. `cold`: a Python is started for every task."""
        self._name, self._say = program, say
        self._folder = Path(tempfile.mkdtemp(prefix="kinfed-"))  # for its owner only; short, as sockets need it
        self.programs = self._folder / "bin"
        self.programs.mkdir()
        address, handover = str(self._folder / "worker"), self._folder / "handover.py"
        own = {"python": sys.executable, "module": task_programs.__name__, "name": program}
        handover.write_text(_HANDOVER.format(address=address, **own), "utf-8")
        start = f'-m "{task_programs.__name__}" {program}' if cold else f'-IS "{handover}"'
        task_programs.write_programs(self.programs, program, f'exec "{sys.executable}" {start} "$@"')
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._children: set[int] = set()
        self.num_tasks = 0

    def serve(self, task: Callable[[], Any] | None, should_stop: Callable[[], bool]) -> None:
        """Do tasks until it should stop, which is asked several times a second; those that came before wait half a
        minute. `task` does what the program does, from sys.argv; None if every task has a Python of its own."""
        while not should_stop():
            self._reap()
            if select.select([self._listener], [], [], 0.2)[0]:
                connection, _ = self._listener.accept()
                with connection:
                    if task is not None:
                        self._take(connection, task)

    def _take(self, connection: socket.socket, task: Callable[[], Any]) -> None:
        connection.settimeout(10)
        try:
            with connection.makefile("rb") as lines:
                arguments = json.loads(lines.readline(_LONGEST_REQUEST))
        except (OSError, ValueError) as error:
            self._say(f"warm worker: a request that cannot be read ({error})")
            return
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._be_the_program(arguments, task)
        self._children.add(child)
        with contextlib.suppress(OSError):
            connection.sendall(b"ok")
        self.num_tasks += 1
        if self.num_tasks == 1:
            self._say(f"warm worker: does what {self._name} is asked for, without a new Python process")

    def _be_the_program(self, arguments: list[str], task: Callable[[], Any]) -> None:
        """Do in the fork what Flower's own program does. Never returns."""
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._listener.close()
            sys.argv = [self._name, *arguments]
            task()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        for child in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(child, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(child)

    def close(self) -> None:
        """Tasks under way are given up: a server asks again, or goes on without an answer; a run can be resumed."""
        self._listener.close()
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        shutil.rmtree(self._folder, ignore_errors=True)
