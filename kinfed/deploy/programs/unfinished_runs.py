"""Runs that a server has begun and that have not ended. `kinfed deploy server` restarts those whose process has died.

    <folder>/run-0123456789ab/         an app folder with all settings of the run: starting it resumes the run
    <folder>/run-0123456789ab.json     Flower's number of the run, and the folder of its results
    <folder>/ended-0123456789ab.json   the same of a run that has ended, for kinfed.deploy.operations

A run that ends, well or with a reason of its own, is taken out by the process that did it. What is left when no process
holds the lock of the results has died: its process was killed, or the superlink was. One that the operator has stopped
(`flwr stop`) is left alone.
"""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kinfed.core import storage
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.programs.processes import flower_program, is_listening
from kinfed.errors import KinfedError, PoolError

CONNECTION = "kinfed-server"  # the superlink's name in the configuration of `flwr`
ENDED_RUN = "ended-"  # what the note of a run begins with when it has ended
LOOK_SECONDS, FIRST_PAUSE, LONGEST_PAUSE = 5.0, 20.0, 600.0  # between looks; before a run is started again
LIST_SECONDS = 60.0  # that `flwr list` may take


@contextlib.contextmanager
def unfinished(folder: Path, run_id: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Note a run while it is done, and take the note out when it ends with or without a reason of its own."""
    out = Path(str(config["out"])).expanduser().absolute()
    app = folder / f"run-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}"
    shutil.rmtree(app, ignore_errors=True)
    make_app(app, {name.replace("-", "_"): value for name, value in config.items()} | {"out": str(out)})
    (folder / app.with_suffix(".json").name.replace("run-", ENDED_RUN, 1)).unlink(missing_ok=True)
    storage.write_json(app.with_suffix(".json"), {"run": str(run_id), "out": str(out)})
    try:
        yield
    except KinfedError:
        _forget(app)
        raise
    _forget(app)


def _forget(app: Path) -> None:
    note = app.with_suffix(".json")
    with contextlib.suppress(FileNotFoundError):
        note.replace(note.with_name(note.name.replace("run-", ENDED_RUN, 1)))
    shutil.rmtree(app, ignore_errors=True)


class Resumer:
    """Starts runs again that have died. `watch` is called often; it waits for `flwr list` where one has."""

    def __init__(self, folder: Path, home: Path, port: int, ca: Path, say: Callable[[str], None]) -> None:
        """`folder` of the notes, `home` of Flower's files, `port` of the superlink on this machine."""
        self._folder, self._port, self._say = folder, port, say
        self._look_at, self._tries, self._wait_until = 0.0, dict[str, int](), dict[str, float]()
        self._starting: dict[str, subprocess.Popen[bytes]] = {}
        storage.make_folder(home)
        table = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\n'
        table += f"root-certificates = {json.dumps(str(ca.resolve()))}\n"
        storage.write_atomically(home / "config.toml", table.encode())

    def watch(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for note in sorted(self._folder.glob("run-*.json")):
            with contextlib.suppress(KinfedError, OSError):  # it ends just now
                self._look(note, now)

    def _look(self, note: Path, now: float) -> None:
        about, name = storage.read_json(note), note.stem
        if name in self._starting and self._starting[name].poll() is None:
            return
        if _is_held(Path(about["out"])):
            self._tries.pop(name, None)
            self._wait_until[name] = now + FIRST_PAUSE
        elif now >= self._wait_until.setdefault(name, now + FIRST_PAUSE) and is_listening("127.0.0.1", self._port):
            if _was_stopped(about["run"]):
                _forget(note.with_suffix(""))
                return
            tries = self._tries[name] = self._tries.get(name, 0) + 1
            pause = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE)
            self._wait_until[name] = now + pause
            text = f"the server's part of this run has died; it is started again and resumes (try {tries})"
            self._say(f"{about['out']}: {text}")
            with contextlib.suppress(OSError), (Path(about["out"]) / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
            command = [flower_program("flwr"), "run", str(note.with_suffix("")), CONNECTION]
            self._starting[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _is_held(out: Path) -> bool:
    """Say whether a process writes the folder of results."""
    lock = FileLock(out / ".lock", blocking=False)
    try:
        lock.acquire()
    except (Timeout, OSError):
        return out.exists()
    lock.release()
    return False


def _was_stopped(run: str) -> bool:
    """Say whether the operator has stopped the run, as Flower knows it; PoolError if it does not say."""
    command = [flower_program("flwr"), "list", CONNECTION, "--run-id", run, "--format", "json"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=LIST_SECONDS, check=False)
    except subprocess.TimeoutExpired:  # a busy machine; the server looks again
        raise PoolError(f"flwr list has not answered within {LIST_SECONDS:g} s") from None
    return "finished:stopped" in listed.stdout
