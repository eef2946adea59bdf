"""Flower's programs as processes of their own, started together and stopped together.

Every process leads a group, and ends with all that it started. On Linux it ends with the process that started it, too,
also when that was killed; elsewhere a killed parent leaves it running.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kinfed.errors import ConfigError, PoolError

GRACE_SECONDS = 8.0  # between the request to end and the end by force; Flower's programs take up to five
ALL_SECONDS = 30.0  # likewise for processes that have others to end first
TAIL_LINES = 12  # of a log, in the error about its process
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # here: between fork and exec no lock may be waited for
_PR_SET_PDEATHSIG = 1

Process = subprocess.Popen[bytes]
_Member = tuple[int, str]  # a process: numbers are used again, and the time of its start tells one from the next


class Processes:
    """Named processes; their output goes to <logs>/<name>.log."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._running: dict[str, Process] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        self.logs.mkdir(parents=True, exist_ok=True)
        with self.log_path(name).open("ab") as file:
            self._running[name] = process = start_group(command, environment, file.fileno())
        return process

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def check(self) -> None:
        """PoolError if one has ended, with the last lines that it wrote."""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                log = f"{self.log_path(name)} says:\n{self.tail(name)}"
                raise PoolError(f"{name} has ended with status {status}; {log}")

    def wait(self, what: str, seconds: float, happened: Callable[[], bool]) -> None:
        """Wait until it has happened; PoolError when the time is up, or when a process has ended."""
        end = time.monotonic() + seconds
        while not happened():
            self.check()
            if time.monotonic() >= end:
                raise PoolError(
                    f"waited {seconds:g} s for {what}; the logs in {self.logs} may say why it takes so long"
                )
            time.sleep(0.1)

    def tail(self, name: str) -> str:
        lines = self.log_path(name).read_text("utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])

    def stop(self) -> None:
        """End all, the last started first asked, with everything that they started."""
        family = _descendants({process.pid for process in self._running.values()})
        for process in reversed(self._running.values()):
            _signal_group(process, signal.SIGTERM)
        end = time.monotonic() + ALL_SECONDS
        for process in self._running.values():
            end_group(process, max(end - time.monotonic(), 0.0))
        alive = {member for member, _ in _table()}
        for pid, _ in family & alive:  # of other groups: Flower's superlink starts some of its programs so
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._running.clear()


def start_group(command: Sequence[str], environment: Mapping[str, str], output: int | None = None) -> Process:
    """A process that leads a group of its own. `output`: an open file for all that it writes (default: as this one)."""
    return subprocess.Popen(
        list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True, preexec_fn=None if _LIBC is None else _end_with_parent,
    )  # fmt: skip


def end_group(process: Process, grace: float = GRACE_SECONDS) -> None:
    """Ask it to end, wait, and kill what is left of its group."""
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _table() -> list[tuple[_Member, int]]:
    """Processes and the numbers of their parents; on Linux only, elsewhere none are known."""
    table = []
    for path in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text("utf-8", errors="replace").rpartition(")")[2].split()
            table.append(((int(path.parent.name), fields[19]), int(fields[1])))
    return table


def _descendants(pids: set[int]) -> set[_Member]:
    """Processes that these have started, directly or not."""
    family, numbers, table = set[_Member](), set(pids), _table()
    while children := {member for member, parent in table if parent in numbers} - family:
        family |= children
        numbers = {pid for pid, _ in children}
    return family


def _signal_group(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def flower_program(name: str) -> str:
    """The path of one of Flower's commands: beside this Python, else as the shell finds it."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        raise ConfigError(f"the command {name} is not installed; it comes with: pip install 'kinfed[node]'")
    return path


def flower_environment(home: Path) -> dict[str, str]:
    """Variables for Flower's programs: a folder of their own, nothing reported to its makers, quick looks for tasks."""
    return os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5", "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }  # fmt: skip


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_listening(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end nothing at once; the function says whether one of them has come."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    former = [signal.signal(number, lambda which, _: arrived.append(which)) for number in numbers]
    try:
        yield lambda: bool(arrived)
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)
