"""A program of Flower that is started again whenever it ends, beside a warm worker that does its tasks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kinfed.deploy.programs.processes import end_group, flower_environment, flower_program, start_group
from kinfed.deploy.programs.warm_worker import WarmWorker, load_program, reason_against

Say = Callable[[str], None]


@dataclass(frozen=True)
class Service:
    """What is to be kept running."""

    name: str  # of the program, for people
    command: Callable[[], list[str]]  # asked for at every start
    task_program: str  # that it starts for every task (kinfed.deploy.programs.warm_worker)
    restart_seconds: float  # between an end and the next start
    advice: str  # what its end may mean


def run_service(service: Service, say: Say, should_stop: Callable[[], bool], *, warm: bool, home: Path) -> None:
    """Until it should stop. `home`: the folder of Flower's own files."""
    os.environ.update(flower_environment(home))
    reason = reason_against(service.task_program) if warm else "it was not wanted"
    if reason:
        say(f"no warm worker: {reason}; a Python is started for every task, which takes seconds each time")
    worker = None if reason else WarmWorker(Path(flower_program(service.task_program)), say)
    process = _Process(service, worker, say)
    try:
        process.start()
        if worker is not None:
            task = load_program(service.task_program)  # while the program starts, which takes as long
            worker.serve(task, lambda: should_stop() or process.watch())
        while not should_stop():
            process.watch()
            time.sleep(0.2)
    finally:
        process.stop()
        if worker is not None:
            worker.close()


class _Process:
    def __init__(self, service: Service, worker: WarmWorker | None, say: Say) -> None:
        self._service, self._worker, self._say = service, worker, say
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def start(self) -> None:
        environment = dict(os.environ)
        if self._worker is not None:
            environment["PATH"] = os.pathsep.join([str(self._worker.programs), environment["PATH"]])
        sys.stdout.flush()
        self._process = start_group(self._service.command(), environment)

    def watch(self) -> bool:
        """Start it again when it has ended and the time has come. False: this is no reason to stop."""
        if self._process is None:
            if time.monotonic() >= self._start_at:
                self.start()
        elif (status := self._process.poll()) is not None:
            end_group(self._process, 0.0)
            pause = self._service.restart_seconds
            self._process, self._start_at = None, time.monotonic() + pause
            self._say(
                f"the {self._service.name} has ended with status {status}; the next try is in {pause:g} s. "
                f"{self._service.advice}"
            )
        return False

    def stop(self) -> None:
        if self._process is not None:
            end_group(self._process)
