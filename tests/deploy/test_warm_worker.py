"""The warm worker, and groups of processes: with real processes, and without Flower."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kinfed.deploy.node.node_settings import Refused
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.programs.processes import Processes, free_port, is_listening
from kinfed.deploy.programs.task_programs import CLIENT_PROGRAM, check_app, client_task
from kinfed.errors import PoolError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

# The first worker's answer says what it was asked, in which process, and leaves a module behind; the second one fails.
_WORKER = """
import os, sys
from pathlib import Path
from kinfed.deploy.programs.warm_worker import WarmWorker

folder = Path(sys.argv[1])

def answer():
    left = "left_behind" in sys.modules
    sys.modules["left_behind"] = sys
    if "--raise" in sys.argv:
        raise ValueError("an answer that fails")
    path = folder / sys.argv[-1]
    path.with_suffix(".new").write_text(f"{os.getpid()} {left} {' '.join(sys.argv)}")
    path.with_suffix(".new").rename(path)

worker = WarmWorker("flwr-clientapp", print)
print(worker.programs, flush=True)
worker.serve(answer, lambda: (folder / "stop").exists())
worker.close()
print("children", worker.num_tasks, worker.programs.exists(), flush=True)
"""


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_every_message_is_answered_in_a_fork_that_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also after an answer that failed; when the worker is gone, a new Python does the same, and it is said. Programs
    for other tasks of Flower's are there and refuse."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        program = Path(worker.stdout.readline().strip()) / CLIENT_PROGRAM
        for arguments in (["--token", "x y", "one"], ["--raise"], ["two"]):
            subprocess.run([program, *arguments], check=True, timeout=60)
        wait_for(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
        handover = Path(program.read_text().split('"')[3]).read_text()
        agent = subprocess.run([program.with_name("flwr-agentapp")], capture_output=True, text=True, timeout=60)
        (tmp_path / "stop").touch()
        output, errors = worker.communicate(timeout=60)
    finally:
        worker.kill()
    pids, lefts, texts = zip(*((tmp_path / name).read_text().split(" ", 2) for name in ("one", "two")), strict=True)
    assert texts == (f"{CLIENT_PROGRAM} --token x y one", f"{CLIENT_PROGRAM} two")
    assert lefts == ("False", "False")
    assert len({*pids, str(worker.pid)}) == 3
    assert "ValueError: an answer that fails" in errors
    assert "children 3 False" in output  # three messages, and the folder of the socket is gone
    assert output.count("without a new Python process") == 1
    (tmp_path / "handover.py").write_text(handover)
    command = [sys.executable, "-IS", str(tmp_path / "handover.py"), "--token", "t"]
    late = subprocess.run([*command[:-2], "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "the warm worker cannot be reached" in late.stderr
    assert "usage: flwr-clientapp" in late.stdout
    assert agent.returncode == 1
    assert "flwr-agentapp was asked for and is not run" in agent.stderr


def test_processes_end_with_all_that_they_started(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "logs")
    started = processes.start("parent", ["sh", "-c", "sleep 600 & echo $!; wait"], os.environ)
    log = processes.log_path("parent")
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    assert alive(child)
    processes.check()
    processes.stop()
    wait_for(lambda: not alive(child))
    assert started.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who started whom")
def test_processes_end_with_what_they_started_in_other_groups(tmp_path: Path) -> None:
    """As Flower's superlink starts its programs."""
    code = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    processes = Processes(tmp_path / "logs")
    processes.start("parent", [sys.executable, "-c", code], os.environ)
    log = processes.log_path("parent")
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    assert alive(child)
    processes.stop()
    wait_for(lambda: not alive(child))


def test_a_process_that_ignores_the_request_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinfed.deploy.programs.processes.ALL_SECONDS", 0.2)
    processes = Processes(tmp_path / "logs")
    started = processes.start(
        "stubborn", ["sh", "-c", "trap '' TERM; echo here; while :; do sleep 0.1; done"], os.environ
    )
    log = processes.log_path("stubborn")
    wait_for(lambda: log.exists() and "here" in log.read_text())
    processes.stop()
    assert started.returncode == -9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with a killed parent")
def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from kinfed.deploy.programs.processes import Processes\n"
        "p = Processes(Path(sys.argv[1])).start('child', ['sleep', '600'], os.environ); print(p.pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.communicate(timeout=30)
    wait_for(lambda: not alive(child))


def test_a_process_that_has_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "logs")
    processes.start("superlink", ["sh", "-c", "echo the port is taken; exit 3"], os.environ)
    with pytest.raises(
        PoolError, match=r"superlink has ended with status 3; .*superlink.log says:\n +the port is taken"
    ):
        processes.wait("the superlink to listen", 60, lambda: False)
    processes.stop()


def test_waiting_ends_when_the_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"waited 0\.2 s for the sun to rise"):
        Processes(tmp_path).wait("the sun to rise", 0.2, lambda: False)


def test_nobody_listens_on_a_free_port() -> None:
    assert not is_listening("127.0.0.1", free_port())


def fab(**files: str) -> bytes:
    """An app as Flower packs it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def test_only_the_app_that_kinfed_writes_is_accepted(tmp_path: Path) -> None:
    make_app(tmp_path / "study")
    files = {name: (tmp_path / "study" / name).read_text() for name in ("pyproject.toml", "kinfed_app.py")}
    check_app(fab(**files))
    check_app(fab(**files, **{"node/load_data.py": "never imported", "more.py": "never imported"}))
    renamed = files["pyproject.toml"].replace('"kinfed_app:client_app"', '"evil:client_app"')
    hostile = [
        fab(**files | {"kinfed_app.py": files["kinfed_app.py"] + "\n"}),
        fab(**files | {"pyproject.toml": renamed}),
        fab(**{"kinfed_app.py": files["kinfed_app.py"]}),
        fab(**files | {"pyproject.toml": "[tool]"}),
        fab(**files | {"pyproject.toml": "\udc80".encode("utf-8", "surrogateescape").decode("latin-1")}),
        b"no archive",
    ]
    for content in hostile:
        with pytest.raises(Refused, match="only the kinfed that is installed here is run"):
            check_app(content)


def test_a_flower_with_other_names_does_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("flwr.supernode.runtime.run_clientapp")
    monkeypatch.delattr(module, "get_load_client_app_fn")
    monkeypatch.setattr(module, "install_from_fab", None)
    with pytest.raises(PoolError, match="nothing is run"):
        client_task()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the file")
def test_the_process_of_a_task_ends_before_all_others_if_memory_runs_out() -> None:
    code = (
        "from types import SimpleNamespace as N; from kinfed.deploy.programs import task_programs as t\n"
        "show = lambda: print(open('/proc/self/oom_score_adj').read())\n"
        "t.metadata = N(entry_points=lambda **_: [N(load=lambda: show)]); t._flower_program('flwr-clientapp')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"
