"""Runs on a superlink, by Flower's own command line: started, followed by what the server's part writes, and ended."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinfed.core import storage
from kinfed.deploy.programs.processes import flower_environment, flower_program
from kinfed.deploy.server.status import DONE, ENDED, read_status
from kinfed.errors import PoolError

CONNECTION = "kinfed"
COMMAND_SECONDS = 120.0  # for each of Flower's commands
SILENCE_SECONDS = 60.0  # without a sign of the server's part, after which Flower is asked whether it lives
STARTS_ANEW = (
    "Flower has not started the server's part of the run yet. Its program must report within 30 s of being started; "
    "if the machine is too busy for that, Flower keeps restarting it. Stop other work on the machine, and the run "
    "will start by itself"
)
Say = Callable[[str], None]


class RunStopped(Exception):
    """A request to stop has come."""


@dataclass(frozen=True)
class Control:
    """The control port of a superlink, as any account on its machine reaches it."""

    home: Path  # for Flower's own files
    address: str  # host:port
    ca: Path

    def connect(self) -> None:
        """Write down where the superlink is, for Flower's commands."""
        place = Path(self._environment["FLWR_HOME"])
        storage.make_folder(place)
        (place / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n'
            f"root-certificates = {json.dumps(str(self.ca.resolve()))}\n",
            "utf-8",
        )

    @property
    def _environment(self) -> dict[str, str]:
        return flower_environment(self.home) | {"OMP_NUM_THREADS": "1"}

    def flwr(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [flower_program("flwr"), *arguments]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run(self, app: Path) -> None:
        finish(self.flwr("run", str(app), CONNECTION), "flwr run")

    def follow(
        self, folder: Path, say: Say, should_stop: Callable[[], bool], end: float, position: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Say what the run in this folder logs until it is done, from byte `position` of its log on. PoolError where
        it stops, or has not ended by `end`; `check` may raise, too."""
        sign, last = "", time.monotonic()
        while True:
            status = read_status(folder)
            position += _show_from(position, folder / "log.txt", say)
            if status is not None and status.state in ENDED:
                if status.state != DONE:
                    raise PoolError(f"the run has stopped: {status.reason}")
                return
            now = time.monotonic()
            if status is not None and status.written != sign:
                sign, last = status.written, now
            if should_stop():
                raise RunStopped
            check()
            if now >= end:
                raise PoolError(f"not ended in time (--seconds); {folder / 'log.txt'} says how far it came")
            if now - last > SILENCE_SECONDS:
                self._check_run(say)
                last = now
            time.sleep(0.2)

    def _check_run(self, say: Say) -> None:
        """PoolError if Flower says that the run is over; a sentence if it may not have begun."""
        text = finish(self.flwr("list", CONNECTION, "--format", "json"), "flwr list")
        if '"starting"' in text or '"pending"' in text:
            say(STARTS_ANEW)
        elif '"running"' not in text:
            raise PoolError("the server's part of the run ended without saying why; the superlink's log may say it")


def log_size(folder: Path) -> int:
    """Bytes that an earlier part of a run has logged."""
    log = folder / "log.txt"
    return log.stat().st_size if log.exists() else 0


def finish(process: subprocess.Popen[bytes], what: str) -> str:
    try:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    text = output.decode("utf-8", "replace")
    if process.returncode != 0:
        raise PoolError(f"cannot {what}: {text.strip()}")
    return text


def _show_from(start: int, log: Path, say: Say) -> int:
    """Say the whole lines of a log from this byte on, without their times; returns their number of bytes."""
    text = log.read_bytes()[start:] if log.exists() else b""
    lines = text[: text.rfind(b"\n") + 1]
    for line in lines.decode("utf-8", "replace").splitlines():
        say(line.partition(" ")[2])
    return len(lines)
